"""Lock of a store: one process writes at a time, and a lock whose process has died is free."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from sqrtdk.errors import SqrtdkError

try:
    import fcntl
except ImportError:  # Windows, where nothing keeps a second process away
    fcntl = None  # type: ignore[assignment]


class StoreLock:
    """Exclusive right to write a store, held by a file beside it until `release` or the end of the process.

    The operating system gives the lock back when the process ends, however it ends: a file that a killed process has
    left behind holds nobody up. Readers need no lock.

    Args:
        path: the store; the lock is `path` with `.lock` at its end.

    Raises:
        SqrtdkError: another process holds it; the message names host, process and time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = StoreLock(Path(folder) / "runs.sqlite")
    ...     lock.release()
    ...     list(Path(folder).iterdir())
    []
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._file: IO[str] | None = None
        while self._file is None and fcntl is not None:
            try:
                file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115 - open as long as the lock is held
            except OSError:  # the store itself cannot be written here, either, and says so
                return
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its holder may have removed the file between the two lines above.
                if os.path.exists(self._path) and os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    self._file = file
            except BlockingIOError:
                raise _held(path, file) from None
            finally:
                if self._file is None:
                    file.close()
        if self._file is not None:
            self._file.truncate(0)
            json.dump({"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}, self._file)
            self._file.flush()

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()
            self._file.close()
            self._file = None


def _held(path: Path, file: IO[str]) -> SqrtdkError:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        whose = "this process" if holder["process"] == os.getpid() else f"process {holder['process']}"
        words = f"{whose} on {holder['host']} since {since}"
    except (ValueError, KeyError, TypeError):  # it has just been taken
        words = "another process"
    return SqrtdkError("store", f"{path} is in use by {words}; wait for it, end it, or give another file")
