"""SQLite file of a store: creation, opening, checksums of rows, and clear errors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError, SqrtdkError

STORE_VERSION = 2
APPLICATION_ID = 0x73716474  # "sqdt": marks the file as ours
BUSY_SECONDS = 60.0

COLUMNS = {
    "runs": ("key", "status", "spec", "row", "curves", "versions", "finished"),
    "records": ("kind", "spec_hash", "content", "finished"),
    "running": ("key", "spec", "step", "curves", "seen"),
    "maps": ("key", "content"),
}
"""The columns of each table, `checksum` not among them: the seal of a row is that of all of these."""

_CREATE = (
    """
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    spec TEXT NOT NULL,
    row TEXT NOT NULL,
    curves TEXT NOT NULL,
    versions TEXT NOT NULL,
    finished REAL NOT NULL,
    checksum TEXT
)
""",
    """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL,
    spec_hash TEXT NOT NULL,
    content TEXT NOT NULL,
    finished REAL NOT NULL,
    checksum TEXT,
    PRIMARY KEY (kind, spec_hash)
)
""",
    """
CREATE TABLE IF NOT EXISTS running (
    key TEXT PRIMARY KEY,
    spec TEXT NOT NULL,
    step INTEGER NOT NULL,
    curves TEXT NOT NULL,
    seen REAL NOT NULL,
    checksum TEXT
)
""",
    # A table of its own: stores without it are read as before, and read by versions that do not know it.
    """
CREATE TABLE IF NOT EXISTS maps (
    key TEXT PRIMARY KEY,
    content TEXT NOT NULL,
    checksum TEXT
)
""",
)

# What version 1 did not have. Its rows have no checksum and are believed as they are.
_ADDED = {
    "runs": {"checksum": "TEXT"},
    "records": {"checksum": "TEXT"},
    "running": {"checksum": "TEXT"},
}


def connect(path: Path | None) -> sqlite3.Connection:
    """Open a store to read and write, made or brought to this version if need be; None is one in memory.

    Raises:
        InvalidValueError, SqrtdkError: as `Store` says. A file that is refused is left as it was.
    """
    if path is not None:
        _require_usable(path)
    with in_words(path):
        connection = sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None)
        try:
            _enter_write_ahead_mode(connection)
            # The write lock comes first: of two sweeps that begin together one makes the table, the other finds it.
            connection.execute("BEGIN IMMEDIATE")
            for statement in _CREATE:
                connection.execute(statement)
            for table, added in _ADDED.items():
                present = [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]
                for name, kind in added.items():
                    if name not in present:
                        connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
            # Nobody else has the store open to write: what a killed process had begun is not running.
            connection.execute("DELETE FROM running")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {STORE_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
    connection.text_factory = bytes
    return connection


@contextmanager
def reading(path: Path, busy_seconds: float = BUSY_SECONDS) -> Iterator[sqlite3.Connection]:
    """Open a store to read only, while others may write; also where nobody may write, as on a read-only mount.

    Raises:
        InvalidValueError, SqrtdkError: the file is not such a store, or it is damaged.
    """
    effective = os.access in os.supports_effective_ids
    is_writable = os.access(path.parent, os.W_OK, effective_ids=effective)
    with nullcontext() if is_writable else tempfile.TemporaryDirectory() as folder:
        if folder is not None:
            # SQLite reads a file in write-ahead mode only where it may make files beside it.
            for beside in ("", "-wal"):
                if (source := path.with_name(path.name + beside)).exists():
                    shutil.copyfile(source, Path(folder) / ("copy" + beside))
            path = Path(folder) / "copy"
        with in_words(path):
            address = f"{path.resolve().as_uri()}?mode={'ro' if folder is None else 'rw'}"
            connection = sqlite3.connect(address, uri=True, timeout=busy_seconds)
        with closing(connection):
            connection.text_factory = bytes
            yield connection


def identify(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Application id, version and number of tables of a file, read in one transaction."""
    # Another sweep may be making the tables, which must be seen whole or not at all.
    connection.execute("BEGIN")
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    finally:
        connection.execute("ROLLBACK")
    return int(application), int(version), int(tables)


def seal(values: Sequence[Any]) -> str:
    """Return the checksum of the values of a row as a string; numbers count as they are written.

    >>> seal(["a", 1.5]) == seal(["a", 1.5]) != seal(["a", 1.25])
    True
    """
    written = (value if isinstance(value, bytes) else str(value).encode() for value in values)
    return hashlib.blake2b(b"\x1f".join(written), digest_size=16).hexdigest()


def select(connection: sqlite3.Connection, table: str, condition: str = "", *values: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a table for `unseal`, each after its number; files of version 1 lack columns and tables."""
    present = {column[1].decode() for column in connection.execute(f"PRAGMA table_info({table})")}
    if not present:
        return []
    columns = [name if name in present else "''" for name in COLUMNS[table]]
    checksum = "checksum" if "checksum" in present else "NULL"
    statement = f"SELECT rowid, {', '.join(columns)}, {checksum} FROM {table} {condition}"
    return connection.execute(statement, values).fetchall()


def unseal(table: str, stored: Sequence[Any]) -> dict[str, Any]:
    """Read a row of `table`, its columns and then its checksum, by name: strings decoded, times and steps as numbers.

    Raises:
        ValueError: the row is damaged; the message says how.
    """
    *values, checksum = stored
    if checksum is not None and checksum != seal(values).encode():
        raise ValueError("its checksum does not fit")
    row: dict[str, Any] = {}
    for name, value in zip(COLUMNS[table], values, strict=True):
        if name in ("finished", "seen", "step") and isinstance(value, int | float):
            row[name] = value
        elif isinstance(value, bytes) and name not in ("finished", "seen", "step"):
            row[name] = value.decode()
        else:
            raise ValueError(f"its {name} is {type(value).__name__}")
    return row


def read_mapping(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: it is something else, or nested too deeply.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"it is {type(content).__name__}, no object")
    return dict(content)


@contextmanager
def in_words(path: Path | None) -> Iterator[None]:
    """Turn an SQLite error into an error that says what to do."""
    try:
        yield
    except UnicodeDecodeError as error:  # a string that SQLite puts into its own message
        raise _damaged(path, error) from None
    except sqlite3.DatabaseError as error:
        # The low byte is the kind, the rest says where it happened.
        kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if kind == sqlite3.SQLITE_CORRUPT:
            raise _damaged(path, error) from None
        if kind == sqlite3.SQLITE_NOTADB:
            raise InvalidValueError("store", f"must be a SQLite file made by sqrtdk, got {path} ({error})") from None
        if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise SqrtdkError(
                "store", f"{path} cannot be written ({error}); finished runs in it are kept: make room and start again"
            ) from None
        if kind == sqlite3.SQLITE_BUSY:
            raise SqrtdkError("store", f"{path} is in use by another process ({error}); wait for it") from None
        raise InvalidValueError("store", f"must be a file that can be written, got {path} ({error})") from None


def _damaged(path: Path | None, error: Exception) -> SqrtdkError:
    return SqrtdkError("store", f"{path} is damaged ({error}); move it away, or give another file")


def require_ours(application: int, version: int, path: Path) -> None:
    """Refuse a file that is no store, or one of a later version.

    Raises:
        InvalidValueError: naming which.
    """
    if application != APPLICATION_ID:
        raise InvalidValueError("store", f"must be a SQLite file made by sqrtdk, got {path}, made by something else")
    if not 1 <= version <= STORE_VERSION:
        raise InvalidValueError(
            "store", f"must have version {STORE_VERSION} or less, got {path} of version {version}; give another file"
        )


def _require_usable(path: Path) -> None:
    if not path.parent.is_dir():
        raise InvalidValueError("store", f"must lie in a folder that exists, got {path}")
    if path.is_dir():
        raise InvalidValueError("store", f"must be a file, got the folder {path}")
    if not path.exists() or path.stat().st_size == 0:
        return
    # Opened for writing though nothing is written: a read-only reader cannot clear its -wal and -shm files away.
    address = f"{path.resolve().as_uri()}?mode=rw"
    with in_words(path):
        connection = sqlite3.connect(address, timeout=BUSY_SECONDS, isolation_level=None, uri=True)
        with closing(connection):
            application, version, tables = identify(connection)
    if application or tables:  # else a sweep was killed between making the file and making its table
        require_ours(application, version, path)


def _enter_write_ahead_mode(connection: sqlite3.Connection) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # SQLite does not wait here by itself when another sweep is changing the mode of the same new file.
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
