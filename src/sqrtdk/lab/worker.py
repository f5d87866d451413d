"""One run in the process that trains it: reports now and then, checkpoints every few seconds, failures as records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sqrtdk.lab.store import RunRecord, record_failure
from sqrtdk.lab.sweep import Curves, Job, Report

_REPORT_SECONDS = 0.2
# The curves so far go into the store for observers; rarely, as each is a write to the disk.
_CURVES_SECONDS = 2.0
_CHECKPOINT_SECONDS = 4.0
# A checkpoint is followed by so many times the time that it took: 1% of a run at most.
_CHECKPOINT_PAUSE = 100.0


def train_guarded(job: Job, report: Callable[[Report], None], is_stopped: Callable[[], bool]) -> RunRecord:
    """Train a run from its checkpoint on; an exception becomes the record of a run that failed.

    Args:
        job: the run.
        report: called a few times a second.
        is_stopped: asked before each report; when it says so, a checkpoint is reported and the run ends.

    Raises:
        KeyboardInterrupt: the run was stopped.
    """
    from sqrtdk.lab import train  # torch loads here, in the process that trains

    told = shown = saved = time.monotonic()
    pause = _CHECKPOINT_SECONDS

    def report_sometimes(
        step: int, curves: Curves, make_checkpoint: Callable[[], bytes], show_maps: Callable[[], Mapping[str, Any]]
    ) -> None:
        nonlocal told, shown, saved, pause
        now = time.monotonic()
        if now - told < _REPORT_SECONDS:
            return
        told = now
        is_due, stopped = now - shown >= _CURVES_SECONDS, is_stopped()
        shown = now if is_due else shown
        checkpoint = None
        if job.keeps_checkpoints and (stopped or now - saved >= pause):
            checkpoint = make_checkpoint()
            saved = time.monotonic()
            pause = max(_CHECKPOINT_SECONDS, _CHECKPOINT_PAUSE * (saved - now))
        report(Report(step, curves if is_due else None, checkpoint, show_maps() if is_due else None))
        if stopped:
            raise KeyboardInterrupt

    try:
        return train.train(job.spec, report_sometimes, job.checkpoint, job.maps)
    except Exception as error:  # one run's failure must not lose the others; the record carries the message
        return record_failure(job.spec, f"{type(error).__name__}: {error}")
