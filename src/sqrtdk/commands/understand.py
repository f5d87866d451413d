"""Commands that answer why: the claims of the texts, the exercises, what scales do at a size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk import exercises
from sqrtdk.commands.flags import Json, Plot, Seed, Store, Workers, examples
from sqrtdk.commands.presenting import gathering, present, require_drawable, working
from sqrtdk.errors import InvalidValueError
from sqrtdk.options import read_numbers
from sqrtdk.records import Record

commands = typer.Typer()

Sizes = Annotated[str, typer.Option(help="Sizes dₖ, separated by commas.")]
KeyCounts = Annotated[str, typer.Option(help="Numbers of keys, separated by commas.")]


@commands.command(epilog=examples("sqrtdk explain --d-k 64 --n 1024", "sqrtdk explain --audit audit.json"))
def explain(
    d_k: Annotated[int, typer.Option(help="Length of queries and keys.")] = 64,
    n: Annotated[int, typer.Option(help="Keys per query.")] = 1024,
    audit: Annotated[
        Path | None,
        typer.Option(help="JSON of `sqrtdk audit --json`: say what makes the scores of its heads large instead."),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """What no scaling, 1/√dₖ and 1/dₖ do at this size: predicted beside measured.

    With --audit it says what makes the scores of each head of a real model as large as they are.
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


@commands.command(epilog=examples("sqrtdk claims soft grad.vanish --markdown", "sqrtdk claims --no-training --json"))
def claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claims or groups (op, var, soft, grad, scale); none: all.")
    ] = None,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="Training runs per setting for the claims about learning.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Training steps per run.", min=1)] = 600,
    store: Store = None,
    workers: Workers = None,
    training: Annotated[
        bool, typer.Option("--training/--no-training", help="Check the claims that train models (torch, minutes) too.")
    ] = True,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Check every claim of the four texts by computation: claimed, computed, verdict, why."""
    from sqrtdk import terminal
    from sqrtdk.claims import check_claims, name_sources
    from sqrtdk.report.kinds import CLAIM_COLUMNS

    if json and markdown:
        raise InvalidValueError("--json and --markdown exclude each other, got both")
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


@commands.command(epilog=examples("sqrtdk variance", "sqrtdk variance --d-k 4,64,512 --plot variance.png"))
def variance(
    d_k: Sizes = "4,64,512",
    samples: Annotated[int, typer.Option(help="Pairs (q, k) per size.")] = 20_000,
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 1: the standard deviation of unscaled scores at any dₖ, and after dividing by √dₖ and dₖ."""
    require_drawable(plot)
    with working("drawing q and k"):
        record = exercises.variance(read_numbers("--d-k", d_k, int), samples, seed)
    present(record, json, plot)


@commands.command(epilog=examples("sqrtdk saturation", "sqrtdk saturation --largest 10 --plot saturation.svg"))
def saturation(
    largest: Annotated[float, typer.Option(help="Sweep x from 0 to here.")] = 10.0,
    zeros: Annotated[int, typer.Option(help="How many zeros stand beside x.")] = 3,
    share: Annotated[float, typer.Option(help="Saturated: this share of the Jacobian's trace is left.")] = 0.05,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 2: softmax([x, 0, 0, 0]) for x from 0 to 10; where does it saturate?"""
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
    """Exercise 4: τ = ½, 1, 2 × √dₖ: patterns side by side, entropy, saturation index, gradients."""
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
    """Exercise 5: ∂softmax/∂input for uniform and peaked rows, and how large gradients are over dₖ × n."""
    require_drawable(plot)
    present(_measure_sizes(exercises.gradients, "measuring gradients", d_k, n, seed), json, plot)


@commands.command(epilog=examples("sqrtdk condensation --d-k 1,8,64,512 --n 1024 --plot condensation.png"))
def condensation(
    d_k: Sizes = "1,4,8,16,32,64,128,256,512",
    n: KeyCounts = "16,1024",
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """How many keys a query attends to as dₖ grows, without scaling, with 1/√dₖ and 1/dₖ: the answer in one picture."""
    require_drawable(plot)
    present(_measure_sizes(exercises.condensation, "measuring attention", d_k, n, seed), json, plot)


def _measure_sizes(exercise: Callable[..., Record], doing: str, d_k: str, n: str, seed: int) -> Record:
    """The exercise at every size dₖ and number of keys n, showing at which it is."""
    with working(doing) as bar:
        return exercise(
            d_ks=read_numbers("--d-k", d_k, int),
            ns=read_numbers("--n", n, int),
            seed=seed,
            on_size=lambda size, done: bar.show(f"{doing}: {size}", done),
        )
