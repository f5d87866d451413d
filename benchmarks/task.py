"""What the timing asks of a computation: inputs, the right answer to them, and how far another answer is off."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


# How far off an answer may be, by dtype: outputs are averages of standard normal values, other errors are relative.
# A contender that is further off computes something else.
LARGEST_ERRORS = {"float32": 1e-3, "bfloat16": 3e-2}


class Answer(NamedTuple):
    """What a contender computed, as NumPy arrays.

    Output `[B, H, L, D]` (of a model its logits `[B, L, vocabulary]`); entropy `[B, H, L]` and the gradients of q, k
    and v if it has them.
    """

    output: Array
    entropy: Array | None = None
    gradients: tuple[Array, ...] | None = None


class Errors(NamedTuple):
    """How far an answer is off: in what the task names, and in the entropy if the answer has one."""

    error: float
    entropy_error: float | None = None


class Truth(Protocol):
    """The right answer, computed in float64, or as much of it as is checked."""

    def compare(self, answer: Answer) -> Errors:
        """How far another answer is off."""


class Task(Protocol):
    """One computation that contenders are timed on."""

    @property
    def suite(self) -> str:
        """The suite it belongs to."""

    @property
    def name(self) -> str:
        """What tables and figures call it; unique within the suite."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes, for the record."""

    @property
    def dtype(self) -> str:
        """In what contenders compute, one of `LARGEST_ERRORS`."""

    @property
    def sets(self) -> int:
        """So many inputs are used in turn."""

    @property
    def error_of(self) -> str:
        """What errors are errors of, in a few words."""

    def make_inputs(self, rng: np.random.Generator) -> list[Any]:
        """Inputs as its contenders understand them, one for each of `sets`."""

    def compute_truth(self, inputs: Any) -> Truth:
        """The right answer to one of the inputs."""

    def multiply_adds(self) -> int:
        """Multiply-adds that the computation cannot do without."""

    def bytes_read(self) -> int | None:
        """Bytes it reads, if it is judged by them and not by its multiply-adds."""

    def shorten(self, longest: int) -> Task | None:
        """What takes its place in a quick run with sequences up to `longest`; None if nothing does."""
