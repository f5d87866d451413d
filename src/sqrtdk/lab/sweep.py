"""Sweep over many runs: stored runs are reused, an executor trains the rest, each is kept as it finishes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqrtdk.lab.checkpoints import read_state
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord, Store, record_failure


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


Curves = Mapping[str, Sequence[Any]]


class Job(NamedTuple):
    """Run to train: its spec, the checkpoint that it goes on from, whether new ones are kept, and maps recorded."""

    spec: RunSpec
    checkpoint: bytes | None = None
    keeps_checkpoints: bool = False
    maps: bool = True


class Report(NamedTuple):
    """Report of a running run: updates done, and from time to time its curves, a checkpoint and its maps."""

    step: int
    curves: Curves | None = None
    checkpoint: bytes | None = None
    maps: Mapping[str, Any] | None = None


ProgressCallback = Callable[[Progress], None]

MOST_DEATHS = 3
"""A run whose worker died so often has failed."""


class Sweep:
    """State of a sweep: finished and pending runs, and the report of progress."""

    def __init__(
        self,
        specs: Sequence[RunSpec],
        store: Store,
        progress: ProgressCallback | None,
        on_finish: Callable[[RunSpec, RunRecord], object] = lambda spec, record: None,
        maps: bool = True,
    ) -> None:
        self.maps = maps
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
        self.resumed: dict[str, int] = {}  # the steps that checkpoints had
        self.deaths: Counter[str] = Counter()
        self.pending = deque(spec for spec in self.specs.values() if not self.reuse(spec))

    def reuse(self, spec: RunSpec) -> bool:
        """Take the run from the store if it is there."""
        record = self.store.get(spec)
        if record is None:
            return False
        self.records[spec.key] = record
        self.reused += 1
        self.reused_steps += spec.total_steps
        self.store.checkpoints.drop(spec.key)  # of a driver that was killed after it had kept the run
        return True

    def take(self) -> Job | None:
        """Return the next run to train; None if there is none."""
        if not self.pending:
            return None
        spec = self.pending.popleft()
        checkpoints = self.store.checkpoints
        checkpoint = checkpoints.get(spec.key)
        if checkpoint is not None:
            self.resumed[spec.key] = self.running[spec.key] = read_state(checkpoint, spec.key)["step"]
        return Job(spec, checkpoint, checkpoints.folder is not None, self.maps)

    def finish(self, spec: RunSpec, record: RunRecord) -> None:
        """Keep a finished run; where a run was trained twice, the first that finishes."""
        if spec.key in self.records:
            return
        self.store.put(spec, record)
        self.records[spec.key] = record
        self.running.pop(spec.key, None)
        self.finished_steps += spec.total_steps
        self.on_finish(spec, record)
        self.tell()

    def lose(self, spec: RunSpec, reason: str) -> None:
        """Let a run whose worker died go on from its last checkpoint; after three deaths it has failed."""
        self.deaths[spec.key] += 1
        if self.deaths[spec.key] < MOST_DEATHS:
            self.running.pop(spec.key, None)
            self.pending.appendleft(spec)
        else:
            self.finish(spec, record_failure(spec, f"{reason}, for the {MOST_DEATHS}rd time"))

    def advance(self, spec: RunSpec, report: Report) -> None:
        """Note how far a run is; keep its curves so far and its checkpoint if the report has them."""
        if spec.key in self.records:  # a late report of a run that was trained twice
            return
        self.running[spec.key] = report.step
        if report.curves is not None:
            self.store.put_running(spec, report.step, report.curves, report.maps or {})
        if report.checkpoint is not None:
            self.store.checkpoints.put(spec.key, report.checkpoint)
        self.tell()

    def tell(self) -> None:
        """Call back with the present state."""
        if self.progress is None:
            return
        total = sum(spec.total_steps for spec in self.specs.values())
        trained = self.finished_steps + sum(self.running.values())
        left = total - self.reused_steps - trained
        here = trained - sum(self.resumed.values())
        elapsed = time.monotonic() - self.began
        state = Progress(
            done=len(self.records),
            total=len(self.specs),
            reused=self.reused,
            fraction=(self.reused_steps + trained) / total if total else 1.0,
            elapsed=elapsed,
            remaining=elapsed * left / here if here > 0 else (None if left else 0.0),
        )
        self.progress(state)
