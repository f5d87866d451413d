"""Defines a contender, which is one way to compute a task, and the names of all contenders."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.task import ContenderResult

PLAIN = "sqrtdk"
WITH_STATISTICS = "sqrtdk with statistics"
WITHOUT_MASK = "sqrtdk without the mask"
TENSORS = "sqrtdk.torch"
TENSORS_WITH_STATISTICS = "sqrtdk.torch with statistics"
TENSORS_BACKWARD = "sqrtdk.torch forward and backward"
MODEL = "model with sqrtdk"
TORCH = "torch SDPA"
PEERS = ("zentorch", "FlexAttention, compiled", "onnxruntime", "OpenVINO", "jax")
TENSORS_RECORDED = "sqrtdk.torch recorded"
TORCH_RECORDED = "torch SDPA recorded"
TORCH_BACKWARD = "torch SDPA forward and backward"
MODEL_PEERS = ("model with sdpa", "model with eager")
TRAINING = "training with sqrtdk"
TRAINING_WITH_STATISTICS = "training with sqrtdk and statistics"
TRAINING_PEER = "training with sdpa"

# Contenders whose times are compared with those of the others.
SUBJECTS = (
    PLAIN,
    WITH_STATISTICS,
    TENSORS,
    TENSORS_WITH_STATISTICS,
    TENSORS_BACKWARD,
    TENSORS_RECORDED,
    MODEL,
    TRAINING,
    TRAINING_WITH_STATISTICS,
)

# Extra of sqrtdk that installs a package; the last missing package counts, because its extra includes the others.
_EXTRAS = {"torch": "torch", "transformers": "hf"}
_EXTRAS |= dict.fromkeys(("onnxruntime", "onnx", "openvino", "zentorch"), "peers")

TimedCall = Callable[[], Any]


class NotForThisCaseError(Exception):
    """Raised if a contender cannot compute the case; the message says what is missing."""


class PeerError(Exception):
    """Raised if a contender in its own process failed, died or does not answer; the message says which."""


class RemoteRun(Protocol):
    """Call in another process that is timed there, without the transfer."""

    def __call__(self) -> ContenderResult:
        """Run once and return the result."""

    def time(self, repeats: int, warm_up: bool) -> float:
        """Return the same as `timing.time_run`, measured in the other process."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a task.

    Args:
        name: name in tables and figures.
        needs: packages that must be installed.
        prepare: returns the timed call from a task, its inputs and a number of threads, or raises
            `NotForThisCaseError`. Suites combine tasks with contenders that understand them.
        read: returns a `ContenderResult` from the result of the call; not timed.
        takes_threads: False if the library cannot be told how many threads to use.
    """

    name: str
    needs: tuple[str, ...]
    prepare: Callable[[Any, Any, int], TimedCall]
    read: Callable[[Any], ContenderResult]
    takes_threads: bool = True

    def why_missing(self, threads: int, default_threads: int) -> str | None:
        """Return the reason why the contender cannot run on this machine; None if it can."""
        absent = [package for package in self.needs if importlib.util.find_spec(package) is None]
        if absent:
            extra = _EXTRAS.get(absent[-1])
            hint = "" if extra is None else f'; it comes with: pip install "sqrtdk[{extra}]"'
            return f"not installed: {', '.join(absent)}{hint}"
        if not self.takes_threads and threads != default_threads:
            return f"always uses {default_threads} threads here and cannot be told to use {threads}"
        return None
