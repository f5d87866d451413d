"""Defines timed computations: inputs, the exact result, and the error of another result."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


# How far off an answer may be, by dtype: outputs are averages of standard normal values, other errors are relative.
# Largest errors that are accepted. A contender beyond them computes something else.
LARGEST_ERRORS = {"float32": 1e-3, "bfloat16": 3e-2}


class ContenderResult(NamedTuple):
    """Result of a contender, as NumPy arrays.

    `output` is `[B, H, L, D]`, or the logits `[B, L, vocabulary]` of a model. `entropy` `[B, H, L]` and the gradients
    of q, k and v are None if the contender has none.
    """

    output: Array
    entropy: Array | None = None
    gradients: tuple[Array, ...] | None = None


class Errors(NamedTuple):
    """Errors of a result: of the quantity that the task names, and of the entropy if the result has one."""

    error: float
    entropy_error: float | None = None


class Truth(Protocol):
    """Exact result in float64, or the part of it that is checked."""

    def compare(self, answer: ContenderResult) -> Errors:
        """Return the errors of another result."""


class TimedTask(Protocol):
    """Computation that contenders are timed on."""

    @property
    def suite(self) -> str:
        """Return the name of its suite."""

    @property
    def name(self) -> str:
        """Return the name in tables and figures; unique within the suite."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its sizes, for the record."""

    @property
    def dtype(self) -> str:
        """Return the dtype that contenders compute in, one of `LARGEST_ERRORS`."""

    @property
    def sets(self) -> int:
        """Return the number of inputs that are used in turn."""

    @property
    def error_of(self) -> str:
        """Return the quantity that errors refer to, in a few words."""

    def make_inputs(self, rng: np.random.Generator) -> list[Any]:
        """Return inputs that its contenders understand, one for each of `sets`."""

    def compute_truth(self, inputs: Any) -> Truth:
        """Return the exact result for one of the inputs."""

    def multiply_adds(self) -> int:
        """Return the multiply-adds that the computation needs at least."""

    def bytes_read(self) -> int | None:
        """Return the bytes read if the task is judged by them; None if it is judged by multiply-adds."""

    def shorten(self, longest: int) -> TimedTask | None:
        """Return the replacement in a quick run with sequences up to `longest`; None if there is none."""
