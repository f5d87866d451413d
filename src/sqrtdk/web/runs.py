"""Runs of a store for the Runs page: read-only, while another process writes, or before the file exists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.lab.store import CURVES, Store
from sqrtdk.report.palette import NEUTRAL, policy_colour
from sqrtdk.wording.names import name_policy

MOST_RUNS = 1000
MOST_CURVES = 64
_BUSY_SECONDS = 1.0


def list_runs(path: Path | None, version: str | None = None) -> dict[str, Any]:
    """Return the latest finished runs of a store without their curves, the newest first.

    Args:
        path: the store; None if none was given.
        version: of the list that the asker has; where it is still the same, the list is left out.

    Returns:
        `state` "none", "waiting" (the file is not there yet, or is just being made), "ready" or "unreadable", a
        `message` for all but "ready", and there `version`, `total`, `runs` and those that are `running`, with their
        curves so far.

    >>> list_runs(None)["state"]
    'none'
    """
    if path is None:
        return {
            "state": "none",
            "message": "No store was given. Train with `sqrtdk ablate --store runs.sqlite` and "
            "serve with `sqrtdk serve --store runs.sqlite`.",
        }
    if not path.exists() or path.stat().st_size == 0:
        return {"state": "waiting", "message": f"{path.name} is not there yet. The page checks again by itself."}
    try:
        with _open(path) as store:
            if store.is_new:
                return {"state": "waiting", "message": f"{path.name} is just being made."}
            total, running = len(store), store.running(MOST_RUNS)
            current = f"{total}-{store.last_finished()}-{max((row['seen'] for row in running), default=0)}"
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
    }


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
    if not 1 <= len(keys) <= MOST_CURVES:
        raise InvalidValueError("keys", f"must name 1 to {MOST_CURVES} runs, got {len(keys)}")
    if path is None or not path.exists():
        raise InvalidValueError("store", "must be there to read curves from, got none")
    try:
        with _open(path) as store:
            rows = store.runs(MOST_CURVES, keys)
    except (SqrtdkError, OSError) as error:
        raise InvalidValueError("store", f"must be readable, got {path.name}: {error}") from None
    return {row["key"]: _pick(row["curves"]) for row in rows}


def _pick(curves: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: curves[name] for name in CURVES if isinstance(curves.get(name), list)}
