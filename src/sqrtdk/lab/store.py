"""The store of finished runs and records: one SQLite file, written ahead: survives a kill, serves several sweeps."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.lab.spec import RunSpec
from sqrtdk.records import Record, spec_hash, versions

STORE_VERSION = 1
CURVES = (
    "step",
    "loss",
    "accuracy",
    "grad_q",
    "grad_k",
    "entropy_ratio",
    "saturation_index",
    "jacobian_trace",
)

APPLICATION_ID = 0x73716474  # "sqdt": marks the file as ours
_BUSY_SECONDS = 60.0
_CREATE = (
    """
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    spec TEXT NOT NULL,
    row TEXT NOT NULL,
    curves TEXT NOT NULL,
    versions TEXT NOT NULL,
    finished REAL NOT NULL
)
""",
    # Files made before there were records get the table when they are next opened.
    """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL,
    spec_hash TEXT NOT NULL,
    content TEXT NOT NULL,
    finished REAL NOT NULL,
    PRIMARY KEY (kind, spec_hash)
)
""",
    """
CREATE TABLE IF NOT EXISTS running (
    key TEXT PRIMARY KEY,
    spec TEXT NOT NULL,
    step INTEGER NOT NULL,
    curves TEXT NOT NULL,
    seen REAL NOT NULL
)
""",
)


@dataclass(frozen=True)
class RunRecord:
    """What a run leaves: a flat row for tables, and its curves, lists of equal length by the names in `CURVES`."""

    row: Mapping[str, Any]
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


def identify_run(spec: RunSpec) -> dict[str, Any]:
    """The columns that say which run a row is about.

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
    """The record of a run that broke down: its row carries the message instead of numbers."""
    outcome = {"final_loss": None, "final_accuracy": None, "solved": False, "steps_to_threshold": None}
    row = {**identify_run(spec), "status": "failed", **outcome, "message": message}
    return RunRecord(row=row, curves={name: [] for name in CURVES})


class Store:
    """Finished runs by their spec's hash, and finished records by kind and spec; each is committed as it is put.

    Args:
        path: the SQLite file, made if it is not there; None keeps the runs in memory.

    Raises:
        InvalidValueError: the file is not such a store, of another version, cannot be written, or its folder does not
            exist. The file is left as it was.
        SqrtdkError: the file is damaged, or the disk is full; from `get` and `put` too.

    >>> with Store(None) as store:
    ...     store.put(RunSpec(), RunRecord({"status": "done", "final_loss": 0.5}))
    ...     store.get(RunSpec()).row["final_loss"], store.get(RunSpec(seed=1))
    (0.5, None)
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            _require_usable(self._path)
        with _in_words(self._path):
            self._connection = _connect(self._path)

    def get(self, spec: RunSpec) -> RunRecord | None:
        """The finished run of this spec; None if there is none or it failed, as a failure deserves another try."""
        with _in_words(self._path):
            stored = self._connection.execute(
                "SELECT row, curves FROM runs WHERE key = ? AND status != 'failed'", (spec.key,)
            ).fetchone()
            return None if stored is None else RunRecord(json.loads(stored[0]), json.loads(stored[1]))

    def put(self, spec: RunSpec, record: RunRecord) -> None:
        """Keep a run; committed when this returns."""
        values = (
            spec.key,
            record.row["status"],
            json.dumps(spec.as_dict()),
            json.dumps(dict(record.row)),
            json.dumps({name: list(values) for name, values in record.curves.items()}),
            json.dumps(versions()),
            time.time(),
        )
        with _in_words(self._path):
            self._connection.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            self._connection.execute("DELETE FROM running WHERE key = ?", (spec.key,))

    def put_running(self, spec: RunSpec, step: int, curves: Mapping[str, Sequence[float]]) -> None:
        """Show how far an unfinished run is, until it is put; for those who look on, never taken for a result."""
        if self._path is None:
            return
        written = json.dumps({name: list(values) for name, values in curves.items()})
        values = (spec.key, json.dumps(spec.as_dict()), step, written, time.time())
        with _in_words(self._path):
            self._connection.execute("INSERT OR REPLACE INTO running VALUES (?, ?, ?, ?, ?)", values)

    def put_record(self, record: Record) -> None:
        """Keep a finished record in place of one of the same kind and spec; committed when this returns."""
        values = (record.kind, spec_hash(record.spec), json.dumps(record.as_json()), time.time())
        with _in_words(self._path):
            self._connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", values)

    def records(self, kind: str | None = None) -> list[Record]:
        """The finished records, of one kind or all, the latest last: to draw or print again without computing.

        >>> with Store(None) as store:
        ...     store.put_record(Record("variance", {"seed": 0}, {"variance": []}))
        ...     [record.kind for record in store.records()], store.records("swap")
        (['variance'], [])
        """
        with _in_words(self._path):
            rows = self._connection.execute(
                "SELECT content FROM records WHERE ?1 IS NULL OR kind = ?1 ORDER BY finished, rowid", (kind,)
            ).fetchall()
            return [Record.from_json(json.loads(content)) for (content,) in rows]

    def __len__(self) -> int:
        with _in_words(self._path):
            return int(self._connection.execute("SELECT COUNT(*) FROM runs").fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _in_words(path: Path | None) -> Iterator[None]:
    """What SQLite reports, as an error that says what to do."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise _damaged(path, error) from None
    except sqlite3.DatabaseError as error:
        # The low byte is the kind, the rest says where it happened.
        kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if kind == sqlite3.SQLITE_CORRUPT:
            raise _damaged(path, error) from None
        if kind == sqlite3.SQLITE_NOTADB:
            raise InvalidValueError(f"store must be a SQLite file made by sqrtdk, got {path} ({error})") from None
        if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise SqrtdkError(
                f"store {path} cannot be written ({error}); finished runs in it are kept: make room and start again"
            ) from None
        if kind == sqlite3.SQLITE_BUSY:
            raise SqrtdkError(f"store {path} is in use by another process ({error}); wait for it") from None
        raise InvalidValueError(f"store must be a file that can be written, got {path} ({error})") from None


def _damaged(path: Path | None, error: Exception) -> SqrtdkError:
    return SqrtdkError(f"store {path} is damaged ({error}); move it away, or give another file")


def _require_usable(path: Path) -> None:
    if not path.parent.is_dir():
        raise InvalidValueError(f"store must lie in a folder that exists, got {path}")
    if path.is_dir():
        raise InvalidValueError(f"store must be a file, got the folder {path}")
    if not path.exists() or path.stat().st_size == 0:
        return
    with _in_words(path):
        application, version, tables = _read_identity(path)
    if application == 0 and tables == 0:
        return  # A sweep was killed between making the file and making its table.
    if application != APPLICATION_ID:
        raise InvalidValueError(f"store must be a SQLite file made by sqrtdk, got {path}, made by something else")
    if version != STORE_VERSION:
        raise InvalidValueError(
            f"store must have version {STORE_VERSION}, got {path} of version {version}; give another file"
        )


def _read_identity(path: Path) -> tuple[int, int, int]:
    # Opened for writing though nothing is written: a read-only reader cannot clear its -wal and -shm files away.
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode=rw", timeout=_BUSY_SECONDS, isolation_level=None, uri=True
    )
    try:
        # One transaction: another sweep may be making the table, which must be seen whole or not at all.
        connection.execute("BEGIN")
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        return int(application), int(version), int(tables)
    finally:
        connection.close()


def _connect(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(path or ":memory:", timeout=_BUSY_SECONDS, isolation_level=None)
    try:
        _enter_write_ahead_mode(connection)
        # The write lock comes first: of two sweeps that begin together one makes the table, the other finds it.
        connection.execute("BEGIN IMMEDIATE")
        for statement in _CREATE:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {STORE_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _enter_write_ahead_mode(connection: sqlite3.Connection) -> None:
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # SQLite does not wait here by itself when another sweep is changing the mode of the same new file.
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
