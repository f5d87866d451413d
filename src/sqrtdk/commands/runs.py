"""Commands for the runs of a store: list, show, compare, export, delete."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    listed = [{name: row.get(name) for name in _LISTED} for row in map(_flatten, rows)]
    present(Record("runs", {"store": str(store)}, {"runs": listed}, reading=reading), json, None)


@commands.command(epilog=examples("sqrtdk runs show runs.sqlite 3f2a", "sqrtdk runs show runs.sqlite 3f2a --json"))
def show(
    store: Source,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of a run, or its first characters.")],
    json: Json = False,
) -> None:
    """Show everything about one run. With --json also its curves."""
    with _open(store) as opened:
        (row,) = _find(opened, [key])
    rows = [{"name": name, "value": value} for name, value in _flatten(row).items() if value is not None]
    record = Record("run", {"store": str(store), "key": row["key"]}, {"run": rows}, curves={"runs": [row["curves"]]})
    present(record, json, None, curves=True)


@commands.command(epilog=examples("sqrtdk runs compare runs.sqlite 3f2a 9c01"))
def compare(store: Source, keys: Keys, json: Json = False) -> None:
    """Show in which settings and results runs differ."""
    if len(keys) < 2:
        raise InvalidValueError("KEY", f"must name at least two runs, got {len(keys)}")
    with _open(store) as opened:
        found = [_flatten(row) for row in _find(opened, keys)]
    names = dict.fromkeys(name for row in found for name in row if name not in ("key", "spec_hash"))
    rows = [
        {"name": name, **{row["key"]: row.get(name) for row in found}}
        for name in names
        if any(row.get(name) != found[0].get(name) for row in found)
    ]
    reading = [] if rows else ["The runs are equal."]
    spec = {"store": str(store), "keys": [row["key"] for row in found]}
    present(Record("run differences", spec, {"differences": rows}, reading=reading), json, None)


@commands.command(
    epilog=examples("sqrtdk runs export runs.sqlite runs.csv", "sqrtdk runs export runs.sqlite c.csv --curves")
)
def export(
    store: Source,
    output: Annotated[Path, typer.Argument(help="CSV file to write.")],
    curves: Annotated[bool, typer.Option("--curves", help="Write one line per point of the curves.")] = False,
) -> None:
    """Write all runs to a CSV file, one line per run."""
    with _open(store) as opened:
        stored = opened.runs(len(opened))
    rows = [_flatten(row) for row in stored]
    if curves:
        points = [
            {"key": row["key"], **dict(zip(row["curves"], values, strict=True))}
            for row in stored
            for values in zip(*row["curves"].values(), strict=True)
        ]
        rows = points
    names = list(dict.fromkeys(name for row in rows for name in row))
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    print(f"{count(len(rows), 'line')} written to {output}")


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


def _find(store: Store, keys: list[str]) -> list[dict[str, Any]]:
    """Return the rows of runs in the order of their keys."""
    complete = [store.complete(key) for key in keys]
    rows = {row["key"]: row for row in store.runs(len(complete), complete)}
    missing = [key for key in complete if key not in rows]
    if missing:
        raise InvalidValueError("KEY", f"must name finished runs, got {missing[0]}, which is unfinished or damaged")
    return [rows[key] for key in complete]


def _flatten(row: dict[str, Any]) -> dict[str, Any]:
    """Return key, status and time of a run beside the columns of its row."""
    finished = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["finished"]))
    return {"key": row["key"], **row["row"], "finished": finished}
