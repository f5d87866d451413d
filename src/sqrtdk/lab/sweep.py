"""Many runs: those the store has are reused, the rest is trained in spawned processes and kept as each finishes."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError, missing_extra
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord, Store, record_failure

_REPORT_SECONDS = 0.2


@dataclass(frozen=True)
class Progress:
    """How far a sweep is.

    Args:
        done: finished runs, the reused ones included.
        total: all runs of the sweep.
        reused: runs that the store had.
        fraction: share of all updates that are done, those inside unfinished runs included.
        elapsed: seconds since the sweep began.
        remaining: estimated seconds left at the pace so far; None before there is a pace.
    """

    done: int
    total: int
    reused: int
    fraction: float
    elapsed: float
    remaining: float | None


ProgressCallback = Callable[[Progress], None]


def run_all(
    specs: Sequence[RunSpec],
    store: Store,
    *,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> list[RunRecord]:
    """Train what the store does not have; one record per spec, in the order of the specs.

    Args:
        specs: the runs; equal ones are trained once.
        store: gets each run as soon as it is finished.
        workers: processes, one thread each; None: one per core this process may use. With 1 the runs take
            place in the calling process.
        progress: called in the calling process at the start, several times a second, and at the end.

    Raises:
        MissingExtraError: there is something to train and torch is not installed.
        SqrtdkError: the worker processes cannot start.
    """
    workers = _count_cores() if workers is None else workers
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise InvalidTypeError(f"workers must be an integer, got {type(workers).__name__}")
    if workers < 1:
        raise InvalidValueError(f"workers must be at least 1, got {workers}")
    sweep = _Sweep(specs, store, progress)
    if sweep.pending and importlib.util.find_spec("torch") is None:
        raise missing_extra("torch", "torch")
    sweep.tell()
    if min(workers, len(sweep.pending)) <= 1:
        _run_here(sweep)
    else:
        _run_in_processes(sweep, min(workers, len(sweep.pending)))
    return [sweep.records[spec.key] for spec in specs]


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Sweep:
    """What is finished, what is left, and how to say so."""

    def __init__(self, specs: Sequence[RunSpec], store: Store, progress: ProgressCallback | None) -> None:
        self.store = store
        self.progress = progress
        self.began = time.monotonic()
        self.specs = {spec.key: spec for spec in specs}
        self.records: dict[str, RunRecord] = {}
        self.reused = 0
        self.reused_steps = 0
        self.finished_steps = 0
        self.running: dict[str, int] = {}
        self.pending = deque(spec for spec in self.specs.values() if not self.reuse(spec))

    def reuse(self, spec: RunSpec) -> bool:
        """Take the run from the store if it is there."""
        record = self.store.get(spec)
        if record is None:
            return False
        self.records[spec.key] = record
        self.reused += 1
        self.reused_steps += spec.total_steps
        return True

    def take(self) -> RunSpec | None:
        """The next run to train; another sweep on the same store may have finished some meanwhile."""
        while self.pending:
            spec = self.pending.popleft()
            if not self.reuse(spec):
                return spec
            self.tell()
        return None

    def finish(self, spec: RunSpec, record: RunRecord) -> None:
        """Keep a finished run."""
        self.store.put(spec, record)
        self.records[spec.key] = record
        self.running.pop(spec.key, None)
        self.finished_steps += spec.total_steps
        self.tell()

    def advance(self, spec: RunSpec, step: int) -> None:
        """Note how far a run is."""
        self.running[spec.key] = step
        self.tell()

    def tell(self) -> None:
        """Call back with the present state."""
        if self.progress is None:
            return
        total = sum(spec.total_steps for spec in self.specs.values())
        trained = self.finished_steps + sum(self.running.values())
        left = total - self.reused_steps - trained
        elapsed = time.monotonic() - self.began
        state = Progress(
            done=len(self.records),
            total=len(self.specs),
            reused=self.reused,
            fraction=(self.reused_steps + trained) / total if total else 1.0,
            elapsed=elapsed,
            remaining=elapsed * left / trained if trained else (None if left else 0.0),
        )
        self.progress(state)


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


def _run_here(sweep: _Sweep) -> None:
    while (spec := sweep.take()) is not None:
        job = spec
        sweep.finish(job, _train_guarded(job, lambda step, job=job: sweep.advance(job, step)))  # type: ignore[misc]


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
    """Hold Ctrl-C back while a process is started, which inherits that: it imports for seconds before `_serve` runs.

    The parent gets an interrupt that came meanwhile right after.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it sets the mask itself when it is first started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name="sqrtdk-lab", daemon=True)
    with _interrupts_held():
        process.start()
    theirs.close()  # else the worker's end would never read as closed here
    return _Worker(process, ours)


def _run_in_processes(sweep: _Sweep, count: int) -> None:
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


def _hear(sweep: _Sweep, worker: _Worker) -> bool:
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


def _note_death(sweep: _Sweep, worker: _Worker) -> None:
    worker.process.join()
    code = worker.process.exitcode
    if not worker.ready:
        raise SqrtdkError(
            f"a worker process ended with exit code {code} before its first run; call this from a file whose "
            'top level is guarded by `if __name__ == "__main__":`, or give workers=1'
        )
    if worker.spec is not None:
        sweep.finish(worker.spec, record_failure(worker.spec, f"the worker process ended with exit code {code}"))


def _stop(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.terminate()
    worker.process.join()
    worker.process.close()
