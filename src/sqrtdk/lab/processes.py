"""Training on this machine: in this process, or in spawned ones that may die without losing the others."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait

from sqrtdk import checks
from sqrtdk.children import Child, interrupts_asked
from sqrtdk.errors import SqrtdkError
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.sweep import MOST_DEATHS, Sweep
from sqrtdk.lab.worker import train_guarded
from sqrtdk.operation.cpus import count_cpus

# Seconds between two looks whether Ctrl-C was pressed, and seconds for the checkpoints that it asks for.
_LOOK_SECONDS = 0.2
_STOP_SECONDS = 3.0
# Stands for the workers that die before they have a run, among a sweep's deaths.
_STARTING = "starting"


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

        Ctrl-C lets every run write a checkpoint before it is raised, a second one is raised at once.

        Raises:
            SqrtdkError: the worker processes cannot start.
        """
        count = min(self.workers, len(sweep.pending))
        if count > 1:
            self._run_in_processes(sweep, count)
            return
        with interrupts_asked() as is_stopped:
            while (job := sweep.take()) is not None:
                sweep.finish(job.spec, train_guarded(job, partial(sweep.advance, job.spec), is_stopped))
                if is_stopped():
                    raise KeyboardInterrupt

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
            with interrupts_asked() as is_stopped:
                for _ in range(count):
                    self._engage(sweep, busy)
                while busy and not is_stopped():
                    self._listen(sweep, busy)
                if is_stopped():
                    _stop(sweep, busy)
                    raise KeyboardInterrupt
        finally:
            for worker in busy:
                worker.child.stop()

    def _listen(self, sweep: Sweep, busy: list[_Worker]) -> None:
        """Hear the workers that have something to say; let others go on with what is pending."""
        for ready in wait([worker.child.connection for worker in busy], _LOOK_SECONDS):
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


def _serve(connection: Connection) -> None:
    """Serve as a worker: take a job, report its steps, hand back its record, until the other end closes.

    A report that a running training cannot send ends it the same way. Whatever comes while it trains asks it to stop.
    """
    from sqrtdk.lab import train  # noqa: F401  torch loads before it is waited for

    connection.send(("ready", None))
    while True:
        job = connection.recv()
        if job is None:  # asked to stop, when the run had just ended
            return
        try:
            record = train_guarded(job, lambda report: connection.send(("step", report)), connection.poll)
        except KeyboardInterrupt:
            return
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
        sweep.advance(worker.spec, content)
        return True
    if kind == "record":
        assert worker.spec is not None
        sweep.finish(worker.spec, content)
    worker.ready = True
    worker.spec = None
    return _give_next(sweep, worker)


def _give_next(sweep: Sweep, worker: _Worker) -> bool:
    """Send a worker its next run; False if there is none, or no worker any more, whose run then waits for another."""
    job = sweep.take()
    if job is None:
        return False
    try:
        worker.child.connection.send(job)
    except OSError:
        sweep.pending.appendleft(job.spec)
        return False
    worker.spec = job.spec
    return True


def _stop(sweep: Sweep, busy: list[_Worker]) -> None:
    """Ask the workers for a last checkpoint, keep those that come in time, and what has finished meanwhile."""
    training = [worker for worker in busy if worker.spec is not None]
    sweep.pending.clear()
    for worker in training:
        with suppress(OSError):
            worker.child.connection.send(None)
    deadline = time.monotonic() + _STOP_SECONDS
    while training and (left := deadline - time.monotonic()) > 0:
        for ready in wait([worker.child.connection for worker in training], left):
            worker = next(item for item in training if item.child.connection is ready)
            if not _hear(sweep, worker):
                training.remove(worker)


def _note_death(sweep: Sweep, worker: _Worker) -> None:
    code = worker.child.end()
    if not worker.ready:
        sweep.deaths[_STARTING] += 1
        is_killed = code is not None and code < 0
        if is_killed and sweep.deaths[_STARTING] < MOST_DEATHS:
            return  # another one is started
        guard = 'call this from a file whose top level is guarded by `if __name__ == "__main__":`, or give Processes(1)'
        reason = "memory may be short: give fewer workers" if is_killed else guard
        raise SqrtdkError(f"a worker process ended with exit code {code} before its first run; {reason}")
    if worker.spec is not None:
        sweep.lose(worker.spec, f"the worker process ended with exit code {code}")
