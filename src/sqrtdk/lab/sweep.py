"""Sweep over many runs: stored runs are reused, an executor trains the rest, each is kept as it finishes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord, Store


@dataclass(frozen=True)
class Progress:
    """Progress of a sweep.

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


Curves = Mapping[str, Sequence[float]]
ProgressCallback = Callable[[Progress], None]


class Sweep:
    """State of a sweep: finished and pending runs, and the report of progress."""

    def __init__(
        self,
        specs: Sequence[RunSpec],
        store: Store,
        progress: ProgressCallback | None,
        on_finish: Callable[[RunSpec, RunRecord], object] = lambda spec, record: None,
    ) -> None:
        self.store = store
        self.on_finish = on_finish
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
        """Return the next run to train; None while other sweeps on the same store train all that are pending.

        Runs that another sweep has finished meanwhile are taken from the store.
        """
        for _ in range(len(self.pending)):
            spec = self.pending.popleft()
            if self.reuse(spec):
                self.tell()
            elif self.store.claim(spec):
                return spec
            else:
                self.pending.append(spec)
        return None

    def finish(self, spec: RunSpec, record: RunRecord) -> None:
        """Keep a finished run."""
        self.store.put(spec, record)
        self.records[spec.key] = record
        self.running.pop(spec.key, None)
        self.finished_steps += spec.total_steps
        self.on_finish(spec, record)
        self.tell()

    def advance(self, spec: RunSpec, step: int, curves: Curves | None = None) -> None:
        """Note how far a run is, and its curves so far if they are given."""
        self.running[spec.key] = step
        if curves is not None:
            self.store.put_running(spec, step, curves)
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
