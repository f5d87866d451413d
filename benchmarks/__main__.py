"""Command line of the benchmarks: `python -m benchmarks --help`, in the root of the source tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.benchmark import COMMAND, run_benchmark, write_raw
from benchmarks.tabulation import keep_measured, was_too_busy
from benchmarks.timing import FEWEST_ROUNDS
from sqrtdk.commands.cli import run_app
from sqrtdk.commands.flags import Json, Seed, examples
from sqrtdk.commands.options import naming, read_names
from sqrtdk.commands.results import fail, present
from sqrtdk.report.files import require_directory
from sqrtdk.show.progress import progress_bar

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command(
    epilog=examples(
        f"{COMMAND} --quick",
        f"{COMMAND} --suite real --case decode",
        f"{COMMAND} --suite square,real --output benchmark.json",
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
    threads: Annotated[int | None, typer.Option(help="Threads per library; default: as `sqrtdk info` says.")] = None,
    backend: Annotated[str | None, typer.Option(help="A backend of `sqrtdk info`; default: the best.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Sequences up to 2048 only, fewer rounds.")] = False,
    seed: Seed = 0,
    output: Annotated[
        Path | None, typer.Option(help="Also write JSON with every timing into this file, after each case.")
    ] = None,
    json: Json = False,
) -> None:
    """Time attention against its peers: paired ratios, shares of the probed peak, errors, memory, growth."""
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
    # The JSON has every case. The tables show only cases that were measured.
    shown = record if json else replace(record, tables=keep_measured(record))
    present(shown, json, None)
    if busy:
        fail(
            f"the machine was too busy: in no case did {FEWEST_ROUNDS} rounds count; try again when it is idle, "
            "or with more --rounds",
            1,
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; wrong input prints one line on stderr and exits with code 2."""
    run_app(app, COMMAND, arguments)


if __name__ == "__main__":
    main()
