"""Claim and verdict, the list of all claims, and helpers for their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sqrtdk.claims.evidence import Evidence
from sqrtdk.exercises.estimates import Estimate, estimate_mean
from sqrtdk.wording.numbers import write_number

VerdictName = Literal["holds", "wrong", "depends", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """The result of checking a claim.

    Args:
        computed: the computed value in words, beside the claimed one.
        verdict: `holds`, `wrong`, `depends` (true under conditions that `why` names), or `undecided` (the evidence at
            hand is too little: too few seeds or steps, or a count of papers that is not at hand).
        why: one or a few sentences; the first states the fact, in place of the claim where the claim does not hold.
        numbers: the values behind it, for scripts.
    """

    computed: str
    verdict: VerdictName
    why: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """One statement of the sources, and the computation that decides it."""

    id: str
    source: str
    claimed: str
    check: Callable[[Evidence], Verdict]
    trains: bool = False


CLAIMS: list[Claim] = []

SOURCES = {
    "S0": "“Math behind √dₖ Scaling Factor in Attention” (Amit Shekhar, Outcome School blog)",
    "S1": "“Stabilizing Attention Scores in Transformers” (a note on √dₖ against dₖ)",
    "S2": "“Why scale the Scaled Dot-Product Attention?” (pranay, 2025-03-11, a note on the softmax Jacobian)",
    "S3": "“Section 5.3: Scaled Attention: Why √d Matters” (a textbook section with code and exercises)",
}
"""The four sources by title; the source of a claim names one, several or all of them."""


def claim(
    id: str, source: str, claimed: str, *, trains: bool = False
) -> Callable[[Callable[[Evidence], Verdict]], Callable[[Evidence], Verdict]]:
    """Add the decorated check to the list of claims. `trains` marks checks that train models with torch."""

    def enter(check: Callable[[Evidence], Verdict]) -> Callable[[Evidence], Verdict]:
        CLAIMS.append(Claim(id, source, claimed, check, trains))
        return check

    return enter


def agree(claimed: npt.ArrayLike, computed: npt.ArrayLike, *, decimals: int) -> bool:
    """Return whether computed values equal the claimed ones at the source's number of decimals.

    >>> agree([0.971, 0.018], [0.97121, 0.01779], decimals=3)
    True
    """
    apart = np.abs(np.asarray(claimed, dtype=np.float64) - np.asarray(computed, dtype=np.float64))
    return bool(np.all(apart <= 0.5 * 10.0**-decimals * (1 + 1e-9)))


def estimate_variance(samples: npt.ArrayLike) -> Estimate:
    """Return the variance of independent samples with its 95% interval, which comes from their fourth moment.

    >>> estimate_variance([-1.0, 1.0] * 50).value.__round__(2)
    1.01
    """
    x = np.asarray(samples, dtype=np.float64).reshape(-1)
    return estimate_mean((x - x.mean()) ** 2 * (x.size / (x.size - 1)))


def covers(estimate: Estimate, value: float) -> bool:
    """Return whether a value lies within twice the 95% interval, which one true value in ten thousand does not."""
    return abs(estimate.value - value) <= estimate.high - estimate.low


def state(estimate: Estimate, *, samples: int, seed: int) -> str:
    """Write an estimate with its interval, the number of samples and their seed.

    >>> state(Estimate(1.0, 0.9, 1.1), samples=100, seed=0)
    '1 [0.9, 1.1] (95%, 100 samples, seed 0)'
    """
    return f"{show_interval(estimate)} (95%, {samples} samples, seed {seed})"


def show_interval(estimate: Estimate) -> str:
    """Write an estimate and the ends of its interval.

    >>> show_interval(Estimate(1.0, 0.9, 1.1))
    '1 [0.9, 1.1]'
    """
    return f"{write_number(estimate.value)} [{write_number(estimate.low)}, {write_number(estimate.high)}]"


def row(values: npt.ArrayLike, decimals: int = 3) -> str:
    """Write a few numbers as the sources do.

    >>> row([0.5, 0.25])
    '[0.500, 0.250]'
    """
    return "[" + ", ".join(f"{x:.{decimals}f}" for x in np.asarray(values, dtype=np.float64)) + "]"
