"""A contender: one way to compute a task. And what contenders are called."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.task import Answer

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

# Whose times are set against those of the others.
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

# Which extra of sqrtdk brings a package; the last that is absent is told, as it brings the ones before it.
_EXTRAS = {"torch": "torch", "transformers": "hf"}
_EXTRAS |= dict.fromkeys(("onnxruntime", "onnx", "openvino", "zentorch"), "peers")

Run = Callable[[], Any]


class NotForThisCaseError(Exception):
    """The contender has no way to compute the case; the message says what is missing."""


class PeerError(Exception):
    """A contender in a process of its own failed, died or does not answer; the message says which."""


class RemoteRun(Protocol):
    """A call in another process, which is timed there: the way there and back is not part of it."""

    def __call__(self) -> Answer:
        """Run it once and bring the answer."""

    def time(self, repeats: int, warm_up: bool) -> float:
        """As `timing.time_run`, over there."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a task.

    Args:
        name: what tables and figures call it.
        needs: packages that must be installed.
        prepare: a task, inputs that it made and threads to the call that is timed; raises `NotForThisCaseError`. Suites
            bring tasks and the contenders that understand them together.
        read: what the call returns to an `Answer`; not timed.
        takes_threads: False if the library cannot be told how many threads to use.
    """

    name: str
    needs: tuple[str, ...]
    prepare: Callable[[Any, Any, int], Run]
    read: Callable[[Any], Answer]
    takes_threads: bool = True

    def why_missing(self, threads: int, default_threads: int) -> str | None:
        """Why the contender cannot take part on this machine; None if it can."""
        absent = [package for package in self.needs if importlib.util.find_spec(package) is None]
        if absent:
            extra = _EXTRAS.get(absent[-1])
            hint = "" if extra is None else f'; it comes with: pip install "sqrtdk[{extra}]"'
            return f"not installed: {', '.join(absent)}{hint}"
        if not self.takes_threads and threads != default_threads:
            return f"always uses {default_threads} threads here and cannot be told to use {threads}"
        return None
