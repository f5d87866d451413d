"""Trains the runs of a sweep on this machine: here, or in spawned processes that may die without losing the others."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from sqrtdk import backends
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord, record_failure
from sqrtdk.lab.sweep import Sweep

_REPORT_SECONDS = 0.2


class Processes:
    """Trains in processes of this machine, one thread each.

    Args:
        workers: how many; None: one per CPU that this process may use, by its affinity and its cgroup's quota. With 1
            the runs take place in the calling process.

    >>> Processes(2).workers
    2
    """

    def __init__(self, workers: int | None = None) -> None:
        workers = backends.count_cpus() if workers is None else workers
        if isinstance(workers, bool) or not isinstance(workers, int):
            raise InvalidTypeError(f"workers must be an integer, got {type(workers).__name__}")
        if workers < 1:
            raise InvalidValueError(f"workers must be at least 1, got {workers}")
        self.workers = workers

    def execute(self, sweep: Sweep) -> None:
        """Train what is pending.

        Raises:
            SqrtdkError: the worker processes cannot start.
        """
        count = min(self.workers, len(sweep.pending))
        if count > 1:
            _run_in_processes(sweep, count)
            return
        while (spec := sweep.take()) is not None:
            job = spec
            sweep.finish(job, _train_guarded(job, lambda step, job=job: sweep.advance(job, step)))  # type: ignore[misc]


def _train_guarded(spec: RunSpec, report: Callable[[int], None]) -> RunRecord:
    from sqrtdk.lab import train  # torch loads here, in the process that trains

    last = time.monotonic()

    def report_sometimes(step: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_SECONDS:
            last = time.monotonic()
            report(step)

    try:
        return train.train(spec, report_sometimes)
    except Exception as error:  # one run's failure must not lose the others; the record carries the message
        return record_failure(spec, f"{type(error).__name__}: {error}")


def _serve(connection: Connection) -> None:
    """A worker's life: take a spec, report its steps, hand back its record, until the other end is gone."""
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connection.send(("ready", None))
        while True:
            spec = connection.recv()
            record = _train_guarded(spec, lambda step: connection.send(("step", step)))
            connection.send(("record", record))
    except (EOFError, OSError):
        return  # The parent was killed or has closed its end. A running report fails the same way and ends the run.


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    ready: bool = False
    spec: RunSpec | None = None


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while a process is started; the caller gets an interrupt that came meanwhile right after.

    Blocking the signal is for the new process, which inherits that: it imports for seconds before `_serve` runs. For
    the caller it is not enough, since any other thread may receive the signal: a start that is broken off between fork
    and the last byte of its data leaves a process that reads half a pickle and complains.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it sets the mask itself when it is first started
    interrupts: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Other threads are never interrupted; a handler that was not set from Python (None) could not be set again.
    is_handled = threading.current_thread() is threading.main_thread() and handler is not None
    if is_handled:
        signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_handled:
            signal.signal(signal.SIGINT, handler)
            if interrupts:
                signal.raise_signal(signal.SIGINT)


def _start_worker() -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name="sqrtdk-lab", daemon=True)
    with _interrupts_held():
        process.start()
    theirs.close()  # else the worker's end would never read as closed here
    return _Worker(process, ours)


def _run_in_processes(sweep: Sweep, count: int) -> None:
    workers: list[_Worker] = []
    try:
        workers.extend(_start_worker() for _ in range(count))
        while workers:
            for ready in wait([worker.connection for worker in workers]):
                worker = next(item for item in workers if item.connection is ready)
                if not _hear(sweep, worker):
                    workers.remove(worker)
                    _stop(worker)
                    if len(workers) < len(sweep.pending):
                        workers.append(_start_worker())
    finally:
        for worker in workers:
            _stop(worker)


def _hear(sweep: Sweep, worker: _Worker) -> bool:
    """Take one message from a worker and give it its next run; False when it is of no further use."""
    try:
        kind, content = worker.connection.recv()
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
    worker.spec = sweep.take()
    if worker.spec is None:
        return False
    try:
        worker.connection.send(worker.spec)
    except OSError:
        _note_death(sweep, worker)
        return False
    return True


def _note_death(sweep: Sweep, worker: _Worker) -> None:
    worker.process.join()
    code = worker.process.exitcode
    if not worker.ready:
        raise SqrtdkError(
            f"a worker process ended with exit code {code} before its first run; call this from a file whose "
            'top level is guarded by `if __name__ == "__main__":`, or give Processes(1)'
        )
    if worker.spec is not None:
        sweep.finish(worker.spec, record_failure(worker.spec, f"the worker process ended with exit code {code}"))


def _stop(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.terminate()
    worker.process.join()
    worker.process.close()
