"""Runs of a store, or a monitored run, for the Runs page: listed, compared, exported and deleted."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.lab.run_tables import compare_runs, export_runs
from sqrtdk.lab.store import CURVES, LEARNED_CURVES, Store
from sqrtdk.records.observations import read_observations
from sqrtdk.records.record import Record, tabulate
from sqrtdk.report.monitor_figures import show_monitor
from sqrtdk.report.palette import NEUTRAL, policy_colour
from sqrtdk.report.panels import spread_out
from sqrtdk.report.plotly_renderer import draw
from sqrtdk.wording.names import name_policy

MOST_RUNS = 1000
MOST_CELLS = 1 << 15
"""Cells of a monitored run's charts, so that browsers stay quick; steps with alerts are shown beyond that."""
MOST_CURVES = 64
_BUSY_SECONDS = 1.0
_KEY = re.compile(r"[0-9a-f]{16}")


def list_runs(path: Path | None, version: str | None = None) -> dict[str, Any]:
    """Return the latest finished runs of a store without their curves, the newest first.

    Args:
        path: the store, or a file that a monitor writes (`.jsonl`); None if none was given.
        version: of the list that the asker has; where it is still the same, the list is left out.

    Returns:
        `state` "none", "waiting" (the file is not there yet, or is just being made), "ready", "monitor" or
        "unreadable", a `message` for all but "ready", and there `version`, `total`, `runs`, those that are `running`,
        with their curves so far, and the bytes of `checkpoints` by key. "monitor" has `version`, `charts`, their
        `caption`, and `alerts`.

    >>> list_runs(None)["state"]
    'none'
    """
    if path is None:
        return {
            "state": "none",
            "message": "No store was given. Train with `sqrtdk ablate --store runs.sqlite` and "
            "serve with `sqrtdk serve --store runs.sqlite`, or give the file of a Monitor: `--store heads.jsonl`.",
        }
    if not path.exists() or path.stat().st_size == 0:
        return {"state": "waiting", "message": f"{path.name} is not there yet. The page checks again by itself."}
    if path.suffix == ".jsonl":
        return _view_monitor(path, version)
    try:
        with _open(path) as store:
            if store.is_new:
                return {"state": "waiting", "message": f"{path.name} is just being made."}
            total, running = len(store), store.running(MOST_RUNS)
            checkpoints = store.checkpoints.measure()
            parts = (total, store.last_finished(), max((row["seen"] for row in running), default=0), *checkpoints)
            current = f"{total}-{zlib.crc32(repr(parts).encode()):08x}"
            if current == version:
                return {"state": "ready", "version": current, "unchanged": True}
            rows = store.runs(MOST_RUNS)
    except (SqrtdkError, OSError) as error:
        return {"state": "unreadable", "message": f"{path.name} cannot be read: {error}"}
    runs = [
        {"key": row["key"], "status": row["status"], "finished": row["finished"], **_describe(row["row"])}
        for row in rows
    ]
    unfinished = [
        {"key": row["key"], "step": row["step"], "curves": _pick(row["curves"]), **_describe(row["spec"])}
        for row in running[:MOST_CURVES]
    ]
    damaged = min(total, MOST_RUNS) - len(runs)
    return {
        "state": "ready",
        "version": current,
        "total": total,
        "damaged": damaged,
        "runs": runs,
        "running": unfinished,
        "checkpoints": checkpoints,
    }


def _view_monitor(path: Path, version: str | None) -> dict[str, Any]:
    """Return the figure of a monitored run as Plotly charts, with the alerts."""
    about = path.stat()
    current = f"{about.st_size}-{about.st_mtime_ns}"
    if current == version:
        return {"state": "monitor", "version": current, "unchanged": True}
    try:
        record = read_observations(path)
    except (SqrtdkError, OSError) as error:
        return {"state": "unreadable", "message": str(error).replace(str(path), path.name)}
    figure = show_monitor(_thin(record))
    charts = [
        {"title": panel.title, "height": figure.panel_height, **json.loads(chart.to_json())}
        for panel, chart in zip(figure.panels, draw(figure), strict=True)
    ]
    return {
        "state": "monitor",
        "version": current,
        "message": " ".join(record.reading),
        "charts": charts,
        "caption": figure.caption,
        "alerts": record.tables["alerts"],
    }


def _thin(record: Record) -> Record:
    """Return the record with evenly spaced steps, at most `MOST_CELLS` cells, and the steps of alerts."""
    steps = record.curves["steps"]
    heads = sum(len(numbers["entropy_ratio"][0]) for numbers in record.curves["layers"].values())
    most = max(MOST_CELLS // max(heads, 1), 16)
    if len(steps) <= most:
        return record
    marked = {alert["step"] for alert in record.tables["alerts"]}
    kept = sorted({*spread_out(range(len(steps)), most), *(at for at, step in enumerate(steps) if step in marked)})
    layers = {
        layer: {name: [values[at] for at in kept] for name, values in numbers.items()}
        for layer, numbers in record.curves["layers"].items()
    }
    return replace(record, curves={"steps": [steps[at] for at in kept], "layers": layers})


def _open(path: Path) -> Store:
    # Damaged rows are counted on the page, which asks every two seconds.
    return Store(path, read_only=True, busy_seconds=_BUSY_SECONDS, on_damage=lambda message: None)


def _describe(row: dict[str, Any]) -> dict[str, Any]:
    """Return a run's row with the colour and the name of its policy."""
    scale = str(row.get("scale", ""))
    try:
        colour = policy_colour(scale)
    except ValueError:  # the parameter of a name that nobody checked
        colour = NEUTRAL
    return {"row": row, "colour": colour, "label": name_policy(scale)}


def read_curves(path: Path | None, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the curves of runs by key; keys that the store does not have are left out.

    Raises:
        InvalidValueError: there is no readable store, or too many are asked for.
    """
    _require_number(keys, 1, MOST_CURVES)
    with _reading(path) as store:
        return {row["key"]: _pick(row["curves"]) for row in store.runs(MOST_CURVES, keys)}


def read_maps(path: Path | None, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the attention maps of runs by key, those in training so far; runs without maps are left out.

    Raises:
        InvalidValueError: as `read_curves`.
    """
    _require_number(keys, 1, MOST_CURVES)
    with _reading(path) as store:
        return store.maps(keys)


def compare(path: Path | None, keys: Sequence[str]) -> dict[str, Any]:
    """Return the differences between runs as `sqrtdk runs compare` prints them.

    Returns:
        `differences` with a row per setting or result, `columns` and `rows` with the same as text, and the `reading`.

    Raises:
        InvalidValueError: there is no readable store, a key is unknown, or too few or too many are given.
    """
    _require_number(keys, 2, MOST_CURVES)
    with _reading(path) as store:
        record = compare_runs(store, keys)
    table = tabulate(record.tables["differences"])
    return {
        "differences": record.tables["differences"],
        "columns": table.columns,
        "rows": table.rows,
        "reading": record.reading,
    }


def export(path: Path | None, *, curves: bool) -> bytes:
    """Return all runs as CSV, the bytes that `sqrtdk runs export` writes.

    Raises:
        InvalidValueError: there is no readable store.
    """
    with _reading(path) as store:
        return export_runs(store, curves=curves)[0]


def delete(path: Path | None, keys: Sequence[str]) -> dict[str, int]:
    """Delete runs and their checkpoints. Nothing is deleted if one of them cannot be.

    Returns:
        The number `deleted`, and of how many of them `checkpoints` were deleted.

    Raises:
        InvalidValueError: there is no store that can be written, or a key is no key or unknown.
        SqrtdkError: a run is in training, or another process writes the store; the message says which.
    """
    _require_number(keys, 1, MOST_RUNS)
    strange = [key for key in keys if not _KEY.fullmatch(key)]
    if strange:
        raise InvalidValueError("keys", f"must be of 16 digits and letters a to f, got {strange[0][:40]!r}")
    with _reading(path) as store:
        training = {row["key"]: row["step"] for row in store.running(MOST_RUNS)}
    for key in keys:
        if key in training:
            raise SqrtdkError("keys", f"{key} is in training (step {training[key]}); delete it when it has ended")
    assert path is not None
    try:
        with Store(path, on_damage=lambda message: None) as store:
            chosen = {store.complete(key) for key in keys}  # before the first is deleted
            with_checkpoints = len(chosen.intersection(store.checkpoints.list_keys()))
            return {"deleted": store.delete(sorted(chosen)), "checkpoints": with_checkpoints}
    except (SqrtdkError, OSError) as error:
        raise SqrtdkError(str(error).replace(str(path), path.name)) from None


def _require_number(keys: Sequence[str], least: int, most: int) -> None:
    if not least <= len(keys) <= most:
        raise InvalidValueError("keys", f"must name {least} to {most} runs, got {len(keys)}")


@contextmanager
def _reading(path: Path | None) -> Iterator[Store]:
    """Open the store for a question about some of its runs.

    Raises:
        InvalidValueError: there is none, or it cannot be read.
    """
    if path is None or not path.exists():
        raise InvalidValueError("store", "must be there to read runs from, got none")
    try:
        with _open(path) as store:
            yield store
    except (SqrtdkError, OSError) as error:
        raise InvalidValueError(str(error).replace(str(path), path.name)) from None


def _pick(curves: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: curves[name] for name in (*CURVES, *LEARNED_CURVES) if isinstance(curves.get(name), list)}
