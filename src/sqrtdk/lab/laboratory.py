"""Lab: a store of finished runs, an executor that trains, and a report of progress."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from sqrtdk import checks
from sqrtdk.errors import InvalidValueError, missing_extra, warn
from sqrtdk.lab.processes import Processes
from sqrtdk.lab.ray_cluster import Ray
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


def choose_executor(on: str | None = None, workers: int | None = None, **per_run: Any) -> Executor:
    """Return the executor of a place: processes of this machine, or a Ray cluster.

    Args:
        on: None for this machine; else as in `Ray`.
        workers: as in `Processes`, and as in `Ray` for a cluster that is started here.
        per_run: `num_cpus`, `num_gpus` and `memory` of `Ray`; those that are None are left out.

    Raises:
        MissingExtraError, InvalidValueError: as `Ray` says; or something is given per run without a cluster.

    >>> choose_executor(workers=2).workers
    2
    """
    chosen = {name: value for name, value in per_run.items() if value is not None}
    if on is not None:
        return Ray(on, workers=workers, **chosen)
    if chosen:
        raise InvalidValueError(next(iter(chosen)), f"must go with a cluster (on), got {chosen}")
    return Processes(workers)


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
        maps: record attention maps of one example in each newly trained run (some 10 to 40 kB), see `MapRecorder`.
        on: where it trains, in place of an executor: ``"ray"``, ``"auto"`` or the address of a Ray cluster, see `Ray`.

    Raises:
        InvalidTypeError, InvalidValueError, SqrtdkError: the store or `to` cannot be used, see `Store`; or both
            `executor` and `on` are given.
        MissingExtraError: `on` is given and Ray is not installed.

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
        maps: bool = True,
        on: str | None = None,
    ) -> None:
        self._maps = checks.flag("maps", maps)
        self._write = None if to is None else open_destination(to)
        if executor is not None and on is not None:
            raise InvalidValueError("on", f"must not be given beside an executor, got {on!r}", "executor")
        self.executor: Executor = executor or choose_executor(on)
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
        sweep = Sweep(specs, self.store, self.progress, self._write_run, self._maps)
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
                known = {name: values[at] for name, values in curves.items() if at < len(values)}
                scalars = {name: value for name, value in known.items() if value is not None}
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
