"""Intervals and tests for few seeds: signed ranks, Hodges–Lehmann, shares and their differences, Holm.

A difference may be infinite, as a diverged run has an infinite loss. They are written out, as sqrtdk needs only NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidValueError

Array = npt.NDArray[np.float64]

LEVEL = 0.95
"""The confidence of every interval here."""

FEWEST_PAIRS = 6
"""With fewer differences the signed-rank interval is the whole line, as 2/2⁵ is more than 5%."""

_Z = NormalDist().inv_cdf(0.5 + LEVEL / 2.0)


class Interval(NamedTuple):
    """Confidence interval, ends included."""

    low: float
    high: float

    def within(self, margin: float) -> bool:
        """Tell whether all of it lies closer to 0 than the margin.

        >>> Interval(-0.01, 0.02).within(0.03), Interval(-0.01, math.inf).within(0.03)
        (True, False)
        """
        return -margin < self.low and self.high < margin


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test, exact for every n and with ties.

    Zeros are left out, equal sizes share their mean rank, and the distribution counts all 2ⁿ signs
    (Wilcoxon 1945, with ties and zeros as he treats them). With eight pairs of one sign it is 2/2⁸ = 0.0078.

    >>> wilcoxon_p([0.1, 0.4, 0.2, 0.3, 0.5, 0.9, 0.8, 0.7])
    0.0078125
    >>> wilcoxon_p([0.0, 0.0])
    1.0
    """
    values = np.array([value for value in _numbers(differences) if value != 0.0])
    sizes = np.abs(values)
    # Twice the mean rank is an integer: how many are smaller, plus how many are not larger, plus 1.
    doubled = [int((sizes < size).sum() + (sizes <= size).sum() + 1) for size in sizes]
    probability = _rank_sums(doubled)
    positive = sum(rank for rank, value in zip(doubled, values, strict=True) if value > 0.0)
    tail = min(probability[: positive + 1].sum(), probability[positive:].sum())
    return float(min(1.0, 2.0 * tail))


def hodges_lehmann(differences: Sequence[float]) -> float:
    """Return the Hodges–Lehmann estimate of a shift: the median of the means of all pairs, a value with itself too.

    The mean of two opposite infinities counts as 0.

    >>> hodges_lehmann([1.0, 2.0, 6.0])
    2.75
    >>> hodges_lehmann([1.0, math.inf, math.inf])
    inf
    """
    means = sorted(np.nan_to_num(_pair_means(differences), nan=0.0, posinf=math.inf, neginf=-math.inf))
    low, high = means[(len(means) - 1) // 2], means[len(means) // 2]
    return float(low if low == high else low + (high - low) / 2.0)


def signed_rank_interval(differences: Sequence[float]) -> Interval:
    """Return the 95% interval of a shift that belongs to the exact signed-rank test.

    Its ends are means of pairs: of all n(n + 1)/2, sorted, the k-th from below and from above, with the largest k that
    leaves out no more than 2.5% on each side. It covers the centre of any symmetric distribution in 95% of the cases
    or more. Fewer than `FEWEST_PAIRS` cannot: there it is the whole line. The mean of two opposite infinities is
    unknown and stands at the end that makes the interval wider.

    >>> signed_rank_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    Interval(low=1.0, high=6.0)
    >>> signed_rank_interval([1.0, 2.0, 3.0])
    Interval(low=-inf, high=inf)
    """
    n = len(differences)
    below = np.cumsum(_rank_sums(range(1, n + 1)))
    left_out = int((below <= (1.0 - LEVEL) / 2.0).sum())
    means = _pair_means(differences)
    if left_out == 0:
        return Interval(-math.inf, math.inf)
    lower, upper = (np.sort(np.where(np.isnan(means), end, means)) for end in (-math.inf, math.inf))
    return Interval(float(lower[left_out - 1]), float(upper[-left_out]))


def wilson(successes: int, n: int) -> Interval:
    """Return Wilson's 95% interval of a probability (Wilson 1927); all of [0, 1] for n = 0.

    >>> [round(end, 4) for end in wilson(81, 263)]
    [0.2553, 0.3662]
    """
    if not 0 <= successes <= n:
        raise InvalidValueError("successes", f"must be from 0 to n = {n}, got {successes}")
    if n == 0:
        return Interval(0.0, 1.0)
    centre = successes + _Z**2 / 2.0
    reach = _Z * math.sqrt(successes * (n - successes) / n + _Z**2 / 4.0)
    # Rounding must not leave a probability that was seen outside.
    return Interval(
        0.0 if successes == 0 else (centre - reach) / (n + _Z**2),
        1.0 if successes == n else (centre + reach) / (n + _Z**2),
    )


def share_difference(successes: int, n: int, other_successes: int, other_n: int) -> Interval:
    """Return the exact 95% interval of a difference of two probabilities (Santner and Snell 1980).

    It holds every difference d at which, for some pair of probabilities d apart, a difference of shares as far out as
    the one observed has a chance of more than 2.5%. So it covers in 95% of the cases or more, whatever the two
    probabilities are; Newcombe's interval falls to 85% with eight seeds. It is wider in turn.

    >>> [round(end, 2) for end in share_difference(3, 3, 0, 3)], [round(end, 2) for end in share_difference(2, 2, 0, 2)]
    ([0.08, 1.0], [-0.2, 1.0])
    """
    if n == 0 or other_n == 0:
        return Interval(-1.0, 1.0)
    low = _least_difference(successes, n, other_successes, other_n)
    return Interval(low, -_least_difference(other_successes, other_n, successes, n))


def _least_difference(successes: int, n: int, other_successes: int, other_n: int) -> float:
    """Return the smallest d that the observed shares, or shares farther apart, leave possible."""
    mine, theirs = np.meshgrid(np.arange(n + 1) / n, np.arange(other_n + 1) / other_n, indexing="ij")
    as_far = mine - theirs >= successes / n - other_successes / other_n - 1e-12
    low, high = -1.0, 1.0
    # The chance grows with d: a larger first or a smaller second probability makes large differences likelier.
    for _ in range(40):
        middle = (low + high) / 2.0
        second = np.linspace(max(0.0, -middle), min(1.0, 1.0 - middle), 401)
        chances = _binomial(n, second + middle).T @ as_far * _binomial(other_n, second).T
        low, high = (middle, high) if chances.sum(axis=1).max() <= (1.0 - LEVEL) / 2.0 else (low, middle)
    return low


def _binomial(n: int, p: Array) -> Array:
    """Return the probabilities of 0 … n successes, `[n + 1, len(p)]`."""
    k = np.arange(n + 1)[:, None]
    ways = np.array([math.comb(n, i) for i in range(n + 1)], dtype=np.float64)[:, None]
    chances: Array = ways * np.clip(p, 0.0, 1.0) ** k * np.clip(1.0 - p, 0.0, 1.0) ** (n - k)
    return chances


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979), in the order in which they came.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def can_reject(n: int, comparisons: int) -> bool:
    """Tell whether n pairs of one sign are enough for a p-value below 5% after correction for so many comparisons.

    >>> can_reject(8, 6), can_reject(8, 7), can_reject(3, 1)
    (True, False, False)
    """
    return comparisons * 2.0 ** (1 - n) <= 1.0 - LEVEL + 1e-12


def _numbers(values: Sequence[float]) -> Sequence[float]:
    if any(math.isnan(value) for value in values):
        raise InvalidValueError("differences", f"must not hold NaN, got {list(values)}")
    return values


def _pair_means(differences: Sequence[float]) -> Array:
    """Return the means of all pairs, each value with itself included; NaN for two opposite infinities."""
    if not differences:
        raise InvalidValueError("differences", "must hold at least one number, got none")
    values = np.array(_numbers(differences), dtype=np.float64)
    first, second = np.triu_indices(len(values))
    with np.errstate(invalid="ignore"):
        return values[first] / 2.0 + values[second] / 2.0


def _rank_sums(ranks: Sequence[int]) -> Array:
    """Return the distribution of the sum of ranks, each of which counts with probability ½."""
    probability = np.zeros(sum(ranks) + 1)
    probability[0] = 1.0
    for rank in ranks:
        shifted = np.zeros_like(probability)
        shifted[rank:] = probability[: len(probability) - rank]
        probability = 0.5 * (probability + shifted)
    return probability
