"""Commands about this machine: what computes attention here, and how fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk import backends
from sqrtdk.commands.flags import Json, Seed, examples
from sqrtdk.commands.presenting import fail, present
from sqrtdk.display import count
from sqrtdk.options import naming, read_names
from sqrtdk.progress import progress_bar
from sqrtdk.records import Record, cpu_name, versions

commands = typer.Typer()


@commands.command(epilog=examples("sqrtdk info", "sqrtdk info --json"))
def info(json: Json = False) -> None:
    """What computes attention here: the backends, which one is in use, threads, versions and CPU."""
    listed, used, threads = backends.list(), backends.current(), backends.threads()
    rows = [
        {"name": one.name, "runs_here": one.runs_here, "in_use": one.name == used, "about": one.why_not or one.about}
        for one in listed
    ]
    reading = [
        f"Attention runs on {used} with {count(threads, 'thread')}.",
        f"{cpu_name()}; " + ", ".join(f"{package} {version}" for package, version in versions().items()) + ".",
    ]
    if not any(one.runs_here for one in listed[:-1]):
        reading.insert(0, f"sqrtdk runs without its kernel ({listed[0].why_not}): attention is computed in NumPy.")
    record = Record(kind="info", spec={"backend": used, "threads": threads}, tables={"backends": rows}, reading=reading)
    present(record, json, None)


@commands.command(
    epilog=examples(
        "sqrtdk bench --quick",
        "sqrtdk bench --suite real --case decode",
        "sqrtdk bench --suite square,real --output benchmark.json",
    )
)
def bench(
    suite: Annotated[
        str | None,
        typer.Option(
            help="square, statistics, real, overhead, tensors, bfloat16, peers, model, training, growth, memory; all."
        ),
    ] = None,
    case: Annotated[str | None, typer.Option(help="Only cases that have this text in their name.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per case that should count; default: 15, quick 7.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of everyone; default: as `sqrtdk info` says.")] = None,
    backend: Annotated[str | None, typer.Option(help="A backend of `sqrtdk info`; default: the best.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Sequences up to 2048 only, fewer rounds.")] = False,
    seed: Seed = 0,
    output: Annotated[
        Path | None, typer.Option(help="Also write JSON with every timing into this file, after each case.")
    ] = None,
    json: Json = False,
) -> None:
    """Time attention beside its peers: paired ratios, shares of the probed peak, errors, memory, growth."""
    from sqrtdk.bench import run_benchmark, write_raw
    from sqrtdk.bench.tabulation import keep_measured, was_too_busy
    from sqrtdk.bench.timing import FEWEST_ROUNDS
    from sqrtdk.report.files import require_directory

    if output is not None:
        with naming("--output"):
            require_directory(output)
    suites = None if suite is None else read_names("--suite", suite)
    with progress_bar() as bar:
        record = run_benchmark(
            suites,
            case=case,
            rounds=rounds,
            threads=threads,
            backend=backend,
            quick=quick,
            seed=seed,
            on_step=bar.show,
            on_case=None if output is None else lambda so_far: write_raw(so_far, output),
        )
    if output is not None:
        write_raw(record, output)
    busy = was_too_busy(record)
    # JSON has every case; tables show what was measured.
    shown = record if json else replace(record, tables=keep_measured(record))
    present(shown, json, None)
    if busy:
        fail(
            f"the machine was too busy: in no case did {FEWEST_ROUNDS} rounds count; try again when it is "
            "idle, or with more --rounds",
            1,
        )
