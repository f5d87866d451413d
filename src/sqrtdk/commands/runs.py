"""Commands for the runs of a store: list, show, compare, export, delete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sqrtdk.commands.flags import Json, examples
from sqrtdk.commands.options import naming
from sqrtdk.commands.results import present
from sqrtdk.errors import InvalidValueError
from sqrtdk.records.record import Record
from sqrtdk.show.table import count

if TYPE_CHECKING:
    from sqrtdk.lab import Store

commands = typer.Typer(no_args_is_help=True)

Source = Annotated[Path, typer.Argument(metavar="STORE", help="SQLite file that a training command wrote.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of runs, or their first characters.")]

_LISTED = ("key", "status", "scale", "d_k", "seed", "init", "lr", "steps", "final_loss", "final_accuracy", "finished")


@commands.callback(
    epilog=examples(
        "sqrtdk runs list runs.sqlite",
        "sqrtdk runs show runs.sqlite 3f2a",
        "sqrtdk runs compare runs.sqlite 3f2a 9c01",
        "sqrtdk runs export runs.sqlite runs.csv",
        "sqrtdk runs delete runs.sqlite 3f2a",
    )
)
def runs() -> None:
    """List, show, compare, export and delete the training runs of a store."""


@commands.command("list", epilog=examples("sqrtdk runs list runs.sqlite", "sqrtdk runs list runs.sqlite --json"))
def list_runs(
    store: Source,
    most: Annotated[int, typer.Option(help="Number of runs to list.", min=1)] = 50,
    json: Json = False,
) -> None:
    """List the latest runs, newest first."""
    from sqrtdk.lab.run_tables import flatten

    with _open(store) as opened:
        rows, total = opened.runs(most), len(opened)
        unfinished = opened.checkpoints.list_keys()
    reading = (
        [f"{count(total, 'run')} in {store.name}; the latest {len(rows)} are listed."] if total > len(rows) else []
    )
    if unfinished:
        reading.append(f"{count(len(unfinished), 'run')} can go on from a checkpoint: {', '.join(unfinished)}.")
    if not total:
        reading.append(f"{store.name} has no finished run.")
    listed = [{name: row.get(name) for name in _LISTED} for row in map(flatten, rows)]
    present(Record("runs", {"store": str(store)}, {"runs": listed}, reading=reading), json, None)


@commands.command(epilog=examples("sqrtdk runs show runs.sqlite 3f2a", "sqrtdk runs show runs.sqlite 3f2a --json"))
def show(
    store: Source,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of a run, or its first characters.")],
    json: Json = False,
) -> None:
    """Show everything about one run. With --json also its curves."""
    from sqrtdk.lab.run_tables import find_runs, flatten

    with _open(store) as opened:
        (row,) = find_runs(opened, [key])
    rows = [{"name": name, "value": value} for name, value in flatten(row).items() if value is not None]
    record = Record("run", {"store": str(store), "key": row["key"]}, {"run": rows}, curves={"runs": [row["curves"]]})
    present(record, json, None, curves=True)


@commands.command(epilog=examples("sqrtdk runs compare runs.sqlite 3f2a 9c01"))
def compare(store: Source, keys: Keys, json: Json = False) -> None:
    """Show in which settings and results runs differ."""
    from sqrtdk.lab.run_tables import compare_runs

    with _open(store) as opened:
        record = compare_runs(opened, keys)
    present(replace(record, spec={"store": str(store), **record.spec}), json, None)


@commands.command(
    epilog=examples("sqrtdk runs export runs.sqlite runs.csv", "sqrtdk runs export runs.sqlite c.csv --curves")
)
def export(
    store: Source,
    output: Annotated[Path, typer.Argument(help="CSV file to write.")],
    curves: Annotated[bool, typer.Option("--curves", help="Write one line per point of the curves.")] = False,
) -> None:
    """Write all runs to a CSV file, one line per run."""
    from sqrtdk.lab.run_tables import export_runs

    with _open(store) as opened:
        content, lines = export_runs(opened, curves=curves)
    output.write_bytes(content)
    print(f"{count(lines, 'line')} written to {output}")


@commands.command(epilog=examples("sqrtdk runs delete runs.sqlite 3f2a", "sqrtdk runs delete runs.sqlite --failed"))
def delete(
    store: Source,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Keys of runs, or their first characters.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Delete all runs that failed.")] = False,
) -> None:
    """Delete runs and their checkpoints. Finished records of ablations stay."""
    if bool(keys) == failed:
        raise InvalidValueError(
            "KEY", f"must name runs, or --failed stand in their place, got {'both' if keys else 'neither'}"
        )
    with _open(store, read_only=False) as opened:
        if failed:
            chosen = [row["key"] for row in opened.runs(len(opened)) if row["status"] == "failed"]
        else:
            chosen = [opened.complete(key) for key in keys or ()]
        deleted = opened.delete(chosen)
    print(f"{count(deleted, 'run')} deleted from {store}")


def _open(path: Path, *, read_only: bool = True) -> Store:
    from sqrtdk.lab import Store

    if not path.exists():
        raise InvalidValueError("STORE", f"must be a file that exists, got {path}")
    with naming("STORE", "store"):
        return Store(path, read_only=read_only)
