"""Store of finished runs and records in one SQLite file, which survives a kill; one process writes, any may read."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sqrtdk.errors import InvalidValueError, SqrtdkError, warn
from sqrtdk.lab.checkpoints import Checkpoints
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store_file import (
    BUSY_SECONDS,
    COLUMNS,
    connect,
    identify,
    in_words,
    read_mapping,
    reading,
    require_ours,
    seal,
    select,
    unseal,
)
from sqrtdk.lab.store_lock import StoreLock
from sqrtdk.records.record import Record, spec_hash, versions

CURVES = (
    "step",
    "loss",
    "accuracy",
    "grad_q",
    "grad_k",
    "entropy_ratio",
    "saturation_index",
    "jacobian_trace",
    "pressure",
)
LEARNED_CURVES = ("temperature", "temperature_least", "temperature_largest")
"""Further curves of runs whose scale learns: τ/√dₖ, the mean of the heads, the least and the largest."""
_JSON = ("spec", "row", "curves", "versions", "content")
_SILENT_SECONDS = 30.0
"""A run that has not been heard of for so long was killed."""


@dataclass(frozen=True)
class RunRecord:
    """Result of a run: a flat row for tables, its curves, lists of equal length by name, and its attention maps.

    The names are those of `CURVES`, and of `LEARNED_CURVES` if the scale learns. Runs of earlier versions lack some.
    """

    row: Mapping[str, Any]
    curves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    maps: Mapping[str, Any] = field(default_factory=dict)


def identify_run(spec: RunSpec) -> dict[str, Any]:
    """Return the columns that identify a run.

    >>> identify_run(RunSpec(scale="none", seed=3))["seed"]
    3
    """
    columns = spec.as_dict()
    parameters = columns.pop("task_parameters")
    if spec.start_scale is None:
        del columns["start_scale"], columns["start_steps"]
    first = ("scale", "d_k", "seed", "init", "lr")
    rest = {name: value for name, value in columns.items() if name not in first}
    row = {name: columns[name] for name in first} | rest | parameters
    return {**row, "data_sha256": spec.make_task().data_hash, "spec_hash": spec.key}


def record_failure(spec: RunSpec, message: str) -> RunRecord:
    """Return the record of a run that broke down: its row carries the message instead of numbers."""
    outcome = {"final_loss": None, "final_accuracy": None, "solved": False, "steps_to_threshold": None}
    row = {**identify_run(spec), "status": "failed", **outcome, "message": message}
    return RunRecord(row=row, curves={name: [] for name in CURVES})


class Store:
    """Finished runs by their spec's hash, and finished records by kind and spec; each is committed as it is put.

    Every row has a checksum. A row that is damaged is left out with a warning that names it; the others are read.
    `is_new` says that a file that is only read is just being made. One process at a time has a store open to write;
    `checkpoints` has the unfinished runs, in the folder `runs.checkpoints` beside `runs.sqlite`.

    Args:
        path: the SQLite file, made if it is not there; None keeps the runs in memory.
        read_only: read what is there, also where nothing can be written; the file must exist.
        busy_seconds: how long a reader waits for those who write.
        on_damage: called with words about each row that is damaged and left out; warns if not given.

    Raises:
        InvalidValueError: the file is not such a store, of a later version, cannot be written, or its folder does not
            exist. The file is left as it was.
        SqrtdkError: another process writes the store (the message says who), the file is damaged, or the disk is full;
            the last two from `get` and `put` too.

    >>> with Store(None) as store:
    ...     store.put(RunSpec(), RunRecord({"status": "done", "final_loss": 0.5}))
    ...     store.get(RunSpec()).row["final_loss"], store.get(RunSpec(seed=1))
    (0.5, None)
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        read_only: bool = False,
        busy_seconds: float = BUSY_SECONDS,
        on_damage: Callable[[str], None] = warn,
    ) -> None:
        self._path = None if path is None else Path(path)
        self._stack = ExitStack()
        self._on_damage = on_damage
        self.is_new = False
        if read_only and self._path is not None:
            self._connection = self._stack.enter_context(reading(self._path, busy_seconds))
            try:
                with in_words(self._path):
                    application, version, tables = identify(self._connection)
                self.is_new = not application and not tables
                if not self.is_new:
                    require_ours(application, version, self._path)
            except BaseException:
                self._stack.close()
                raise
        else:
            if self._path is not None:
                self._stack.callback(StoreLock(self._path).release)
            try:
                self._connection = connect(self._path)
            except BaseException:
                self._stack.close()
                raise
            self._stack.callback(self._close_to_write)
        beside = None
        if self._path is not None:
            beside = self._path.with_name(self._path.name.removesuffix(".sqlite") + ".checkpoints")
        self.checkpoints = Checkpoints(beside, on_damage)

    def get(self, spec: RunSpec) -> RunRecord | None:
        """Return the finished run of this spec; None if it is missing, failed or damaged."""
        stored = self._select("runs", "WHERE key = ?", spec.key)
        for _, row in stored:
            if row["status"] != "failed":
                return RunRecord(row["row"], row["curves"], self.maps([spec.key]).get(spec.key, {}))
        return None

    def put(self, spec: RunSpec, record: RunRecord) -> None:
        """Keep a run; committed when this returns."""
        values = (
            spec.key,
            record.row["status"],
            json.dumps(spec.as_dict()),
            json.dumps(dict(record.row)),
            _write_curves(record.curves),
            json.dumps(versions()),
            time.time(),
        )
        with in_words(self._path):
            self._put_maps(spec.key, record.maps)  # first: a run that is there has its maps, whenever we are killed
            self._insert("runs", values)
            self._connection.execute("DELETE FROM running WHERE key = ?", (spec.key,))
        if record.row["status"] != "failed":  # a run that failed goes on from there when it is tried again
            self.checkpoints.drop(spec.key)

    def put_running(
        self, spec: RunSpec, step: int, curves: Mapping[str, Sequence[Any]], maps: Mapping[str, Any] | None = None
    ) -> None:
        """Publish the progress of an unfinished run for observers; it is never taken for a result."""
        if self._path is None:
            return
        values = (spec.key, json.dumps(spec.as_dict()), step, _write_curves(curves), time.time())
        with in_words(self._path):
            self._put_maps(spec.key, maps or {})
            self._insert("running", values)

    def maps(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the attention maps of runs by key, those of unfinished runs so far; runs without maps are left out.

        >>> with Store(None) as store:
        ...     store.put(RunSpec(), RunRecord({"status": "done"}, maps={"steps": [0]}))
        ...     store.maps([RunSpec().key]) == {RunSpec().key: {"steps": [0]}}
        True
        """
        rows = self._select("maps", f"WHERE key IN ({', '.join('?' * len(keys))})", *keys)
        return {row["key"]: row["content"] for _, row in rows}

    def _put_maps(self, key: str, maps: Mapping[str, Any]) -> None:
        if maps:
            self._insert("maps", (key, json.dumps(dict(maps))))

    def put_record(self, record: Record) -> None:
        """Keep a finished record in place of one of the same kind and spec; committed when this returns."""
        values = (record.kind, spec_hash(record.spec), json.dumps(record.as_json()), time.time())
        with in_words(self._path):
            self._insert("records", values)

    def records(self, kind: str | None = None) -> list[Record]:
        """Return the finished records, of one kind or all, the latest last, to plot or print again without computing.

        >>> with Store(None) as store:
        ...     store.put_record(Record("variance", {"seed": 0}, {"variance": []}))
        ...     [record.kind for record in store.records()], store.records("swap")
        (['variance'], [])
        """
        found = []
        for rowid, row in self._select("records", "WHERE ?1 IS NULL OR kind = ?1", kind):
            try:
                found.append((row["finished"], rowid, Record.from_json(row["content"])))
            except (SqrtdkError, ValueError, TypeError, KeyError) as error:
                self._report("records", rowid, error)
        return [record for *_, record in sorted(found, key=lambda one: one[:2])]

    def runs(self, most: int, keys: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows of the latest finished runs, the newest first, of these keys or all; their JSON is read.

        >>> with Store(None) as store:
        ...     store.put(RunSpec(), RunRecord({"status": "done"}))
        ...     [row["status"] for row in store.runs(10)], store.runs(10, ["another"])
        (['done'], [])
        """
        chosen = "" if keys is None else f"WHERE key IN ({', '.join('?' * len(keys))})"
        rows = self._select("runs", f"{chosen} ORDER BY finished DESC, key LIMIT {most}", *(keys or ()))
        return [row for _, row in rows]

    def complete(self, beginning: str) -> str:
        """Return the one key that begins so, of a finished run or of a checkpoint.

        Raises:
            InvalidValueError: no run begins so, or several do.
        """
        with in_words(self._path):
            rows = self._connection.execute(
                "SELECT key FROM runs WHERE substr(key, 1, ?) = ?", (len(beginning), beginning)
            )
            stored = {key.decode() for (key,) in rows}
        found = sorted(stored | {key for key in self.checkpoints.list_keys() if key.startswith(beginning)})
        if len(found) != 1:
            several = f"{beginning!r}, the beginning of {', '.join(found[:5])}" if found else f"{beginning!r}, unknown"
            raise InvalidValueError("KEY", f"must be the beginning of one run's key, got {several}")
        return found[0]

    def delete(self, keys: Sequence[str]) -> int:
        """Delete runs and their checkpoints, and return how many there were."""
        deleted = 0
        for key in keys:
            with in_words(self._path):
                rows = self._connection.execute("DELETE FROM runs WHERE key = ?", (key,)).rowcount
                self._connection.execute("DELETE FROM maps WHERE key = ?", (key,))
            deleted += bool(rows) or key in self.checkpoints.list_keys()
            self.checkpoints.drop(key)
        return deleted

    def running(self, most: int) -> list[dict[str, Any]]:
        """Return the rows of unfinished runs that were heard of lately, with their curves so far."""
        lately = time.time() - _SILENT_SECONDS
        return [row for _, row in self._select("running", f"WHERE seen > ? ORDER BY key LIMIT {most}", lately)]

    def last_finished(self) -> float | None:
        """Return the time at which the latest run finished; None if there is none."""
        with in_words(self._path):
            latest: float | None = self._connection.execute("SELECT MAX(finished) FROM runs").fetchone()[0]
        return latest

    def _insert(self, table: str, values: Sequence[Any]) -> None:
        names = (*COLUMNS[table], "checksum")
        marks = ", ".join("?" * len(names))
        statement = f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})"
        self._connection.execute(statement, (*values, seal(values)))

    def _select(self, table: str, condition: str, *values: Any) -> list[tuple[int, dict[str, Any]]]:
        """Return the sound rows, each after its number, their JSON read; damaged ones are reported."""
        with in_words(self._path):
            rows = select(self._connection, table, condition, *values)
        sound = []
        for rowid, *stored in rows:
            try:
                row = unseal(table, stored)
                sound.append((rowid, row | {name: read_mapping(row[name]) for name in _JSON if name in row}))
            except ValueError as error:
                self._report(table, rowid, error)
        return sound

    def _report(self, table: str, rowid: int, error: Exception) -> None:
        reason = " ".join(str(error).split())[:120]
        self._on_damage(
            f"store {self._path}: row {rowid} of {table} is damaged ({reason}) and left out; the others are read"
        )

    def __len__(self) -> int:
        with in_words(self._path):
            return int(self._connection.execute("SELECT COUNT(*) FROM runs").fetchone()[0])

    def _close_to_write(self) -> None:
        with suppress(sqlite3.Error):  # what ends here is cleared when the store is opened next, too
            self._connection.execute("DELETE FROM running")
        self._connection.close()
        self.checkpoints.close()

    def close(self) -> None:
        """Close the file and let others write it."""
        self._stack.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_curves(curves: Mapping[str, Sequence[Any]]) -> str:
    return json.dumps({name: list(values) for name, values in curves.items()})
