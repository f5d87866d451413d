"""Training on this machine: in this process, or in spawned ones that may die without losing the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait

from sqrtdk import checks
from sqrtdk.children import Child
from sqrtdk.errors import SqrtdkError
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord, record_failure
from sqrtdk.lab.sweep import Curves, Sweep
from sqrtdk.operation.cpus import count_cpus

_REPORT_SECONDS = 0.2
# The curves so far go into the store for observers; rarely, as each is a write to the disk.
_CURVES_SECONDS = 2.0
# Seconds between two checks of runs that another sweep on the same store trains.
_OTHERS_SECONDS = 0.5


class Processes:
    """Trains in processes of this machine, one thread each; they stay for the next sweep until `close`.

    Args:
        workers: how many; None: one per CPU that this process may use, by its affinity and its cgroup's quota. With 1
            the runs take place in the calling process.

    >>> Processes(2).workers
    2
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = count_cpus() if workers is None else checks.integer("workers", workers, 1)
        self._idle: list[_Worker] = []  # importing torch takes a worker seconds: one sweep's serve the next

    def execute(self, sweep: Sweep) -> None:
        """Train what is pending.

        Raises:
            SqrtdkError: the worker processes cannot start.
        """
        count = min(self.workers, len(sweep.pending))
        if count > 1:
            self._run_in_processes(sweep, count)
            return
        while sweep.pending:
            job = sweep.take()
            if job is not None:
                sweep.finish(job, _train_guarded(job, partial(sweep.advance, job)))
            elif sweep.pending:
                time.sleep(_OTHERS_SECONDS)

    def prepare(self) -> None:
        """Start the processes now: they import torch while the caller does something else."""
        while self.workers > 1 and len(self._idle) < self.workers:
            self._idle.append(_start_worker())

    def close(self) -> None:
        """End the processes; the next sweep would start new ones."""
        while self._idle:
            self._idle.pop().child.stop()

    def _run_in_processes(self, sweep: Sweep, count: int) -> None:
        busy: list[_Worker] = []
        try:
            while sweep.pending:
                for _ in range(min(count, len(sweep.pending))):
                    self._engage(sweep, busy)
                while busy:
                    self._listen(sweep, busy)
                if sweep.pending:
                    time.sleep(_OTHERS_SECONDS)
        finally:
            for worker in busy:
                worker.child.stop()

    def _listen(self, sweep: Sweep, busy: list[_Worker]) -> None:
        """Hear the workers that have something to say; let others go on with what is pending."""
        for ready in wait([worker.child.connection for worker in busy]):
            worker = next(item for item in busy if item.child.connection is ready)
            if _hear(sweep, worker):
                continue
            busy.remove(worker)
            if worker.is_usable():
                self._idle.append(worker)
            else:
                worker.child.stop()
            if len(busy) < len(sweep.pending):
                self._engage(sweep, busy)

    def _engage(self, sweep: Sweep, busy: list[_Worker]) -> None:
        """Let an idle worker begin, or start one, which begins when it has said that it is ready."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.ready:  # it will say so
                busy.append(worker)
                return
            if _give_next(sweep, worker):
                busy.append(worker)
                return
            if worker.is_usable():  # there is no run left for it
                self._idle.append(worker)
                return
            worker.child.stop()
        busy.append(_start_worker())


def _train_guarded(spec: RunSpec, report: Callable[[int, Curves | None], None]) -> RunRecord:
    from sqrtdk.lab import train  # torch loads here, in the process that trains

    told = shown = time.monotonic()

    def report_sometimes(step: int, curves: Curves) -> None:
        nonlocal told, shown
        now = time.monotonic()
        if now - told >= _REPORT_SECONDS:
            told = now
            is_due = now - shown >= _CURVES_SECONDS
            shown = now if is_due else shown
            report(step, curves if is_due else None)

    try:
        return train.train(spec, report_sometimes)
    except Exception as error:  # one run's failure must not lose the others; the record carries the message
        return record_failure(spec, f"{type(error).__name__}: {error}")


def _serve(connection: Connection) -> None:
    """Serve as a worker: take a spec, report its steps, hand back its record, until the other end closes.

    A report that a running training cannot send ends it the same way.
    """
    from sqrtdk.lab import train  # noqa: F401  torch loads before it is waited for

    connection.send(("ready", None))
    while True:
        spec = connection.recv()
        record = _train_guarded(spec, lambda step, curves: connection.send(("step", (step, curves))))
        connection.send(("record", record))


@dataclass
class _Worker:
    child: Child
    ready: bool = False
    spec: RunSpec | None = None

    def is_usable(self) -> bool:
        """Tell whether the worker waits for a run."""
        return self.ready and self.spec is None and self.child.process.is_alive()


def _start_worker() -> _Worker:
    return _Worker(Child(_serve, "sqrtdk-lab"))


def _hear(sweep: Sweep, worker: _Worker) -> bool:
    """Take one message from a worker and give it its next run; False if this sweep needs it no more, or it is gone."""
    try:
        kind, content = worker.child.connection.recv()
    except (EOFError, OSError):
        _note_death(sweep, worker)
        return False
    if kind == "step":
        assert worker.spec is not None
        sweep.advance(worker.spec, *content)
        return True
    if kind == "record":
        assert worker.spec is not None
        sweep.finish(worker.spec, content)
    worker.ready = True
    worker.spec = None
    return _give_next(sweep, worker)


def _give_next(sweep: Sweep, worker: _Worker) -> bool:
    """Send a worker its next run; False if there is none, or no worker any more, whose run then waits for another."""
    worker.spec = sweep.take()
    if worker.spec is None:
        return False
    try:
        worker.child.connection.send(worker.spec)
    except OSError:
        sweep.pending.appendleft(worker.spec)
        return False
    return True


def _note_death(sweep: Sweep, worker: _Worker) -> None:
    code = worker.child.end()
    if not worker.ready:
        raise SqrtdkError(
            f"a worker process ended with exit code {code} before its first run; call this from a file whose "
            'top level is guarded by `if __name__ == "__main__":`, or give Processes(1)'
        )
    if worker.spec is not None:
        sweep.finish(worker.spec, record_failure(worker.spec, f"the worker process ended with exit code {code}"))
