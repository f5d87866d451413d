"""Tables of stored runs: rows by key, the differences between runs, and CSV; for the command line and the Runs page."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.store import Store
from sqrtdk.records.record import Record

__all__ = ["compare_runs", "export_runs", "find_runs", "flatten"]


def flatten(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat row of a stored run: its key, its settings and results, and the local time it finished.

    >>> row = flatten({"key": "3f2a", "row": {"scale": "sqrt", "final_loss": 0.5}, "finished": 0.0})
    >>> list(row)
    ['key', 'scale', 'final_loss', 'finished']
    """
    finished = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored["finished"]))
    return {"key": stored["key"], **stored["row"], "finished": finished}


def find_runs(store: Store, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return finished runs in the order of their keys, or of the first characters of their keys.

    Raises:
        InvalidValueError: a key is unknown, is the beginning of several, or names an unfinished or damaged run.
    """
    complete = [store.complete(key) for key in keys]
    rows = {row["key"]: row for row in store.runs(len(complete), complete)}
    missing = [key for key in complete if key not in rows]
    if missing:
        raise InvalidValueError("KEY", f"must name finished runs, got {missing[0]}, which is unfinished or damaged")
    return [rows[key] for key in complete]


def compare_runs(store: Store, keys: Sequence[str]) -> Record:
    """Return the settings and results in which runs differ.

    Args:
        store: holds the runs.
        keys: keys of two runs or more, or their first characters.

    Returns:
        A record of kind ``"run differences"``. Its table `differences` has a row per setting or result with a column
        per run, named by the run's key; it is empty for equal runs, and the reading says so.

    Raises:
        InvalidValueError: fewer than two keys are given, or `find_runs` refuses one.

    >>> from sqrtdk.lab.spec import RunSpec
    >>> from sqrtdk.lab.store import RunRecord
    >>> with Store(None) as store:
    ...     for seed in (0, 1):
    ...         store.put(RunSpec(seed=seed), RunRecord({"status": "done", "scale": "sqrt", "seed": seed}))
    ...     keys = [RunSpec(seed=seed).key for seed in (0, 1)]
    ...     [row["name"] for row in compare_runs(store, keys).tables["differences"] if row["name"] != "finished"]
    ['seed']
    """
    if len(keys) < 2:
        raise InvalidValueError("KEY", f"must name at least two runs, got {len(keys)}")
    rows = [flatten(stored) for stored in find_runs(store, keys)]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("key", "spec_hash"))
    differences = [
        {"name": name, **{row["key"]: row.get(name) for row in rows}}
        for name in names
        if any(row.get(name) != rows[0].get(name) for row in rows)
    ]
    reading = [] if differences else ["The runs are equal."]
    spec = {"keys": [row["key"] for row in rows]}
    return Record("run differences", spec, {"differences": differences}, reading=reading)


def export_runs(store: Store, *, curves: bool = False) -> tuple[bytes, int]:
    """Return all runs as CSV in UTF-8, newest first, and the number of lines below the header.

    Args:
        store: holds the runs.
        curves: one line per point of the curves in place of one line per run.

    >>> with Store(None) as store:
    ...     export_runs(store)
    (b'\\r\\n', 0)
    """
    stored = store.runs(len(store))
    rows = [point for run in stored for point in _list_points(run)] if curves else [flatten(run) for run in stored]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode(), len(rows)


def _list_points(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the points of a run's curves. A curve that a run lacks, or that ends early, has no value there."""
    curves = {name: values for name, values in stored["curves"].items() if isinstance(values, list)}
    points = zip_longest(*curves.values())
    return [{"key": stored["key"], **dict(zip(curves, values, strict=True))} for values in points]
