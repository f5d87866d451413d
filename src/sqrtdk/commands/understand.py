"""Commands that explain the scale: the claims of the four sources, the exercises, and scales at one size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk import exercises
from sqrtdk.commands.flags import Json, On, Plot, Seed, Store, Workers, examples
from sqrtdk.commands.interrupts import leaving_at_second_interrupt
from sqrtdk.commands.options import read_numbers
from sqrtdk.commands.results import gathering, present, require_drawable, working
from sqrtdk.errors import InvalidValueError
from sqrtdk.records.record import Record
from sqrtdk.show.progress import follow, progress_bar

commands = typer.Typer()

Sizes = Annotated[str, typer.Option(help="Lengths dₖ of queries and keys, separated by commas.")]
KeyCounts = Annotated[str, typer.Option(help="Numbers of keys, separated by commas.")]


@commands.command(epilog=examples("sqrtdk explain --d-k 64 --n 1024", "sqrtdk explain --audit audit.json"))
def explain(
    d_k: Annotated[int, typer.Option(help="Length of queries and keys.")] = 64,
    n: Annotated[int, typer.Option(help="Keys per query.")] = 1024,
    audit: Annotated[
        Path | None,
        typer.Option(help="Explain the scores of an audited model instead: a file from `sqrtdk audit --json`."),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Compare no scaling, 1/√dₖ and 1/dₖ at one size, measured and predicted.

    With --audit, explain why the scores of each head in an audited model are as large as they are.
    """
    if audit is not None:
        from sqrtdk.audits import read_audit

        if plot is not None:
            raise InvalidValueError("--audit and --plot exclude each other, got both")
        present(exercises.spread(read_audit(audit)), json, None)
        return
    require_drawable(plot)
    with working(f"measuring dₖ {d_k}, n {n}"):
        record = exercises.explain(d_k=d_k, n=n, seed=seed)
    present(record, json, plot)


@commands.command(
    epilog=examples(
        "sqrtdk claims --list", "sqrtdk claims soft grad.vanish --markdown", "sqrtdk claims --no-training --json"
    )
)
def claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claim ids or groups (op, var, soft, grad, scale). Default: all claims.")
    ] = None,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="Training runs per setting for the claims about learning.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Training steps per run.", min=1)] = 600,
    store: Store = None,
    workers: Workers = None,
    training: Annotated[
        bool,
        typer.Option(
            "--training/--no-training", help="Also check the claims that train models (needs torch, takes minutes)."
        ),
    ] = True,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="List the claims without checking them.")] = False,
) -> None:
    """Check every claim of the four sources by computation: claim, computed value, verdict and reason."""
    from sqrtdk.claims import check_claims, choose_claims, name_sources
    from sqrtdk.commands import terminal
    from sqrtdk.report.kinds import CLAIM_COLUMNS

    if json and markdown:
        raise InvalidValueError("--json and --markdown exclude each other, got both")
    if list_only:
        chosen = choose_claims(ids, training=training)
        rows = [{"id": claim.id, "source": claim.source, "claimed": claim.claimed} for claim in chosen]
        if markdown:
            print(terminal.markdown_table(rows, list(rows[0])))
        else:
            present(Record(kind="claim list", spec={}, tables={"claims": rows}), json, None)
        return
    with gathering(seed, seeds, steps, store, workers) as (evidence, bar):
        record = check_claims(
            ids,
            evidence,
            training=training,
            on_claim=lambda claim, i, n: bar.show(f"checking {claim.id}", i / n),
        )
    if markdown:
        # Not typer's echo, which takes an ASCII terminal for a misconfigured one and writes UTF-8.
        print(terminal.markdown_table(record.tables["claims"], CLAIM_COLUMNS), f"\n{name_sources()}", sep="\n")
        return
    present(record, json, None)


@commands.command(
    epilog=examples(
        "sqrtdk reproduce --list",
        "sqrtdk reproduce ssmax critical-scaling --json",
        "sqrtdk reproduce logit-factor --store runs.sqlite --plot factor.png",
        "sqrtdk reproduce --all --store runs.sqlite",
    )
)
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names from --list. Default: those that train nothing (seconds).")
    ] = None,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="Also train models, which needs torch and takes minutes.")
    ] = False,
    seed: Seed = 0,
    store: Store = None,
    workers: Workers = None,
    on: On = None,
    json: Json = False,
    plot: Plot = None,
    list_only: Annotated[bool, typer.Option("--list", help="List results, sources and expectations.")] = False,
) -> None:
    """Compute published results about attention's scale again, and compare each with what it was expected to give."""
    from sqrtdk.lab import Lab, choose_executor
    from sqrtdk.reproductions import REPRODUCTIONS, list_expectations
    from sqrtdk.reproductions import reproduce as compute

    if list_only:
        present(list_expectations(names), json, None)
        return
    if all_of_them and names:
        raise InvalidValueError("--all", f"must stand without names, got {', '.join(names)}")
    require_drawable(plot)
    current = "reproducing"

    def start(name: str, share: float) -> None:
        nonlocal current
        current = f"reproducing {name}"
        bar.show(current, share)

    with (
        leaving_at_second_interrupt(),
        progress_bar() as bar,
        Lab(store, choose_executor(on, workers), lambda state: follow(bar, f"{current}, training")(state)) as lab,
    ):
        record = compute(list(REPRODUCTIONS) if all_of_them else names or None, seed, start, lab)
    present(record, json, plot)


@commands.command(epilog=examples("sqrtdk variance", "sqrtdk variance --d-k 4,64,512 --plot variance.png"))
def variance(
    d_k: Sizes = "4,64,512",
    samples: Annotated[int, typer.Option(help="Pairs (q, k) per size.")] = 20_000,
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 1: measure the standard deviation of q·k with no scaling, with 1/√dₖ and with 1/dₖ."""
    require_drawable(plot)
    with working("sampling q and k"):
        record = exercises.variance(read_numbers("--d-k", d_k, int), samples, seed)
    present(record, json, plot)


@commands.command(epilog=examples("sqrtdk saturation", "sqrtdk saturation --largest 10 --plot saturation.svg"))
def saturation(
    largest: Annotated[float, typer.Option(help="Largest x of the sweep, which starts at 0.")] = 10.0,
    zeros: Annotated[int, typer.Option(help="Number of zeros beside x.")] = 3,
    share: Annotated[float, typer.Option(help="Share of the Jacobian trace that is left at saturation.")] = 0.05,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 2: find where softmax([x, 0, 0, 0]) saturates as x grows from 0 to 10."""
    require_drawable(plot)
    record = exercises.saturation(largest=largest, zeros=zeros, share=share)
    present(record, json, plot)


@commands.command(epilog=examples("sqrtdk temperature", "sqrtdk temperature --d-k 64 --n 32 --plot temperature.png"))
def temperature(
    d_k: Annotated[int, typer.Option(help="Length of queries and keys.")] = 64,
    n: Annotated[int, typer.Option(help="Keys per query.")] = 32,
    relative: Annotated[str, typer.Option(help="Temperatures in units of √dₖ.")] = "0.5,1,2",
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 4: compare τ = ½, 1 and 2 × √dₖ by attention pattern, entropy, saturation index and gradients."""
    require_drawable(plot)
    with working("measuring attention at each temperature"):
        record = exercises.temperature(d_k=d_k, n=n, relatives=read_numbers("--relative", relative, float), seed=seed)
    present(record, json, plot)


@commands.command(epilog=examples("sqrtdk gradients --d-k 64,512 --n 16,1024 --plot gradients.html"))
def gradients(
    d_k: Sizes = "4,64,512",
    n: KeyCounts = "16,128,1024",
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 5: measure the softmax Jacobian of uniform and peaked rows, and gradients over dₖ × n."""
    require_drawable(plot)
    present(_measure_sizes(exercises.gradients, "measuring gradients", d_k, n, seed), json, plot)


@commands.command(epilog=examples("sqrtdk concentration --d-k 1,8,64,512 --n 1024 --plot concentration.png"))
def concentration(
    d_k: Sizes = "1,4,8,16,32,64,128,256,512",
    n: KeyCounts = "16,1024",
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Count the keys that a query attends to as dₖ grows, with no scaling, with 1/√dₖ and with 1/dₖ."""
    require_drawable(plot)
    present(_measure_sizes(exercises.concentration, "measuring attention", d_k, n, seed), json, plot)


def _measure_sizes(exercise: Callable[..., Record], doing: str, d_k: str, n: str, seed: int) -> Record:
    """Run an exercise at every dₖ and n, and show progress."""
    with working(doing) as bar:
        return exercise(
            d_ks=read_numbers("--d-k", d_k, int),
            ns=read_numbers("--n", n, int),
            seed=seed,
            on_size=lambda size, done: bar.show(f"{doing}: {size}", done),
        )
