"""Lab: a store of finished runs, an executor that trains, and a report of progress."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from sqrtdk.errors import missing_extra
from sqrtdk.lab.processes import Processes
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord, Store
from sqrtdk.lab.sweep import ProgressCallback, Sweep
from sqrtdk.records.record import Record


class Executor(Protocol):
    """Trainer of a sweep: takes its runs (`take`), reports their steps (`advance`) and hands them in (`finish`)."""

    def prepare(self) -> None:
        """Get ready for runs."""

    def execute(self, sweep: Sweep) -> None:
        """Train until nothing is pending."""

    def close(self) -> None:
        """Release what is kept between sweeps."""


class Lab:
    """Place for experiments: runs in the store are reused, the executor trains the rest.

    Args:
        store: SQLite file that keeps every finished run and record, so that a sweep broken off goes on where it was;
            None keeps them as long as the lab is there.
        executor: who trains; None: `Processes()`, one per CPU.
        progress: called in the calling process with a `Progress` at the start, several times a second and at the end.

    Raises:
        InvalidValueError, SqrtdkError: the store cannot be used, see `Store`.

    >>> with Lab() as lab:
    ...     len(lab.store)
    0
    """

    def __init__(
        self,
        store: str | Path | None = None,
        executor: Executor | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.executor: Executor = Processes() if executor is None else executor
        self.progress = progress
        self.store = Store(store)

    def run(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """Train what the store does not have; one record per spec, in the order of the specs; equal ones once.

        Raises:
            MissingExtraError: there is something to train and torch is not installed.
            SqrtdkError: the worker processes cannot start.
        """
        if not specs:
            return []
        sweep = Sweep(specs, self.store, self.progress)
        if sweep.pending and importlib.util.find_spec("torch") is None:
            raise missing_extra("torch", "torch")
        sweep.tell()
        self.executor.execute(sweep)
        return [sweep.records[spec.key] for spec in specs]

    def prepare(self) -> None:
        """Let the executor get ready while something else is done; nothing where torch is not installed."""
        if importlib.util.find_spec("torch") is not None:
            self.executor.prepare()

    def keep(self, record: Record) -> Record:
        """Put a finished record into the store, in place of one of the same kind and spec, and give it back."""
        self.store.put_record(record)
        return record

    def close(self) -> None:
        """Close the executor and the store."""
        self.executor.close()
        self.store.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
