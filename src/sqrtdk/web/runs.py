"""The runs of a store for the Runs page: read-only, while another process writes, or before the file is there."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.store import APPLICATION_ID, CURVES, STORE_VERSION
from sqrtdk.report.palette import NEUTRAL, policy_colour
from sqrtdk.setting_names import name_policy

MOST_RUNS = 1000
MOST_CURVES = 64
_BUSY_SECONDS = 1.0
# A run that has not been heard of for so long was killed.
_SILENT_SECONDS = 30.0


def list_runs(path: Path | None, version: str | None = None) -> dict[str, Any]:
    """The latest finished runs of a store without their curves, the newest first.

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
        return {"state": "waiting", "message": f"{path.name} is not there yet. The page looks again by itself."}
    try:
        with closing(_connect(path)) as connection:
            if not _is_made(connection, path):
                return {"state": "waiting", "message": f"{path.name} is just being made."}
            total, latest = connection.execute("SELECT COUNT(*), MAX(finished) FROM runs").fetchone()
            unfinished = _read_running(connection)
            current = f"{total}-{latest}-{max((seen for *_, seen in unfinished), default=0)}"
            if current == version:
                return {"state": "ready", "version": current, "unchanged": True}
            rows = connection.execute(
                "SELECT key, status, row, finished FROM runs ORDER BY finished DESC, key LIMIT ?", (MOST_RUNS,)
            ).fetchall()
        runs = [
            {"key": key, "status": status, "finished": finished, **_describe(json.loads(row))}
            for key, status, row, finished in rows
        ]
        running = [
            {"key": key, "step": step, "curves": _pick(json.loads(curves)), **_describe(json.loads(spec))}
            for key, spec, step, curves, _ in unfinished
        ]
    except (sqlite3.DatabaseError, ValueError) as error:
        return {"state": "unreadable", "message": f"{path.name} cannot be read: {error}"}
    return {"state": "ready", "version": current, "total": total, "runs": runs, "running": running}


def _read_running(connection: sqlite3.Connection) -> list[tuple[str, str, int, str, float]]:
    """Runs that are being trained: key, spec, step, curves so far, and when they were heard of."""
    if not connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'running'").fetchone()[0]:
        return []  # a store of before there were such
    return connection.execute(
        "SELECT key, spec, step, curves, seen FROM running WHERE seen > ? ORDER BY key LIMIT ?",
        (time.time() - _SILENT_SECONDS, MOST_CURVES),
    ).fetchall()


def _describe(row: Any) -> dict[str, Any]:
    """A run's row with the colour and the name of its policy."""
    if not isinstance(row, dict):
        raise ValueError("a row of it is no record")
    scale = str(row.get("scale", ""))
    try:
        colour = policy_colour(scale)
    except ValueError:  # the parameter of a name that nobody checked
        colour = NEUTRAL
    return {"row": row, "colour": colour, "label": name_policy(scale)}


def read_curves(path: Path | None, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The curves of runs by key; keys that the store does not have are left out.

    Raises:
        InvalidValueError: there is no readable store, or too many are asked for.
    """
    if not 1 <= len(keys) <= MOST_CURVES:
        raise InvalidValueError(f"keys must name 1 to {MOST_CURVES} runs, got {len(keys)}")
    if path is None or not path.exists():
        raise InvalidValueError("store must be there to read curves from, got none")
    try:
        with closing(_connect(path)) as connection:
            marks = ",".join("?" * len(keys))
            rows = connection.execute(f"SELECT key, curves FROM runs WHERE key IN ({marks})", list(keys)).fetchall()
        curves = {key: json.loads(text) for key, text in rows}
    except (sqlite3.DatabaseError, ValueError) as error:
        raise InvalidValueError(f"store must be readable, got {path.name}: {error}") from None
    return {key: _pick(own) for key, own in curves.items()}


def _pick(curves: Any) -> dict[str, list[Any]]:
    return {name: curves[name] for name in CURVES if isinstance(curves, dict) and isinstance(curves.get(name), list)}


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_BUSY_SECONDS)


def _is_made(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has its tables; what is no store of ours is refused."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'runs'").fetchone()[0]
    if application == 0 and not tables:
        return False
    if application != APPLICATION_ID or version != STORE_VERSION:
        raise ValueError("it is no store of this version of sqrtdk")
    return bool(tables)
