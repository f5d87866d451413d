"""Lab: a store of finished runs, an executor that trains, and a report of progress."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from sqrtdk.errors import missing_extra, warn
from sqrtdk.lab.processes import Processes
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord, Store
from sqrtdk.lab.sweep import ProgressCallback, Sweep
from sqrtdk.records.destinations import open_destination
from sqrtdk.records.json import plain
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
        to: destination of each newly trained run's curves as the run finishes, with the run's key: a path (JSON Lines),
            a TensorBoard `SummaryWriter`, MLflow, a function of (step, mapping), or a list, as for `Monitor`. (A W&B
            run takes rising steps alone, and so one run of a lab.) An error in it causes a warning.

    Raises:
        InvalidTypeError, InvalidValueError, SqrtdkError: the store or `to` cannot be used, see `Store`.

    >>> with Lab() as lab:
    ...     len(lab.store)
    0
    """

    def __init__(
        self,
        store: str | Path | None = None,
        executor: Executor | None = None,
        progress: ProgressCallback | None = None,
        *,
        to: Any = None,
    ) -> None:
        self._write = None if to is None else open_destination(to)
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
        sweep = Sweep(specs, self.store, self.progress, self._write_run)
        if sweep.pending and importlib.util.find_spec("torch") is None:
            raise missing_extra("torch", "torch")
        sweep.tell()
        self.executor.execute(sweep)
        return [sweep.records[spec.key] for spec in specs]

    def _write_run(self, spec: RunSpec, record: RunRecord) -> None:
        """Write the curves of a finished run to the destination, a step after the other."""
        if self._write is None:
            return
        about = {name: record.row.get(name) for name in ("scale", "d_k", "seed", "init", "lr", "status")}
        curves = {name: values for name, values in record.curves.items() if name != "step"}
        try:
            for at, step in enumerate(record.curves.get("step", ())):
                scalars = {name: values[at] for name, values in curves.items() if at < len(values)}
                self._write(int(step), plain({"run": spec.key, "spec": about, "scalars": scalars}))
        except Exception as error:
            warn(f"the run {spec.key} is stored, but could not be written to `to`: {type(error).__name__}: {error}")

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
