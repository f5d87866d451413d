"""Means and quantiles of random rows, with intervals that contain the true value in 95 of 100 seeds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_Z_95 = 1.959963984540054  # the 97.5th percentile of the normal distribution
_SIMULATED = 10_000


class Estimate(NamedTuple):
    """An estimated value and the ends of its 95% confidence interval."""

    value: float
    low: float
    high: float

    def holds(self, truth: float) -> bool:
        """Return whether the interval contains a value."""
        return self.low <= truth <= self.high


def estimate_mean(values: npt.ArrayLike) -> Estimate:
    """Return the mean of independent values with its 95% interval: the outer ends of Student's and of Hall's (1992).

    With T = (mean − truth)·√m/s, skewness γ and a = γ/(3√m), Hall's T + aT² + a²T³/3 + γ/(6√m) is close to Student's t
    where T itself is not. Hall's interval is longer on the side of the tail and shorter on the other. The shorter side
    is not used, because γ comes out too small where the values contain only a few of the tail.
    Equal values give an interval of length 0.

    >>> estimate_mean([1.0] * 8)
    Estimate(value=1.0, low=1.0, high=1.0)
    >>> mean, low, high = estimate_mean([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 8.0])
    >>> high - mean > mean - low
    True
    """
    x = np.asarray(values, dtype=np.float64)
    mean, error, skewness = (float(moment[0]) for moment in _standardise(x[:, None]))
    reach = _student_95(x.size - 1)
    below, above = (max(reach, abs(_unbend(end, skewness, x.size))) for end in (reach, -reach))
    return Estimate(mean, mean - error * below, mean + error * above)


def estimate_quantile(values: Array, share: float) -> Estimate:
    """Return a quantile of rows `[samples, queries]` with its 95% interval over samples (Woodruff 1952).

    Samples are independent, the rows of one sample are not. The share of rows below the quantile therefore gets its
    standard error from the shares of the samples; the ends are the quantiles at `share` ± Student's t times that error.

    >>> estimate_quantile(np.arange(80.0).reshape(8, 10).T, 0.5).value
    39.5
    """
    value = float(np.quantile(values, share))
    error = (values <= value).mean(axis=1).std(ddof=1) / math.sqrt(len(values))
    reach = _student_95(len(values) - 1) * float(error)
    # The rank r of n sorted rows stands for the share (r − ½)/n.
    ranks = values.size * np.array([share - reach, share + reach]) - 0.5
    low, high = np.interp(ranks, np.arange(values.size), np.sort(values, axis=None))
    return Estimate(value, float(low), float(high))


class JointMiss(NamedTuple):
    """The largest distance between measured means and their predictions, in standard errors, and its probability."""

    standard_errors: float
    probability: float


def judge_jointly(values: Array, predictions: npt.ArrayLike) -> JointMiss:
    """Judge several predictions at once whose measurements share their samples.

    Each distance is the smaller of T and Hall's corrected T, as for `estimate_mean`. The probability that the largest
    of them is at least as large as measured, if every prediction is exact, comes from normal numbers with the
    correlations of the samples, divided as Student's t is; they are simulated from a fixed seed.

    Args:
        values: independent measurements `[samples, quantities]`.
        predictions: the predicted means `[quantities]`.

    >>> x = np.random.default_rng(0).standard_normal((64, 3))
    >>> judge_jointly(x, [0.0, 0.0, 0.0]).probability > 0.05 > judge_jointly(x, [0.0, 0.0, 1.0]).probability
    True
    """
    mean, error, skewness = _standardise(values)
    freedom = len(values) - 1
    certain = error == 0.0
    distance = mean - np.asarray(predictions, dtype=np.float64)
    if np.any(certain & (distance != 0.0)):
        return JointMiss(math.inf, 0.0)
    t = distance / np.where(certain, 1.0, error)
    a = skewness / (3.0 * math.sqrt(len(values)))
    largest = float(np.minimum(np.abs(t), np.abs(t + a * t**2 + a**2 * t**3 / 3.0 + 0.5 * a)).max())
    # Normal numbers times this triangle have the correlations of the samples, whatever their rank.
    triangle = np.linalg.qr((values - mean) / np.where(certain, 1.0, error * math.sqrt(len(values) * freedom)), "r")
    rng = np.random.default_rng(0)
    simulated = rng.standard_normal((_SIMULATED, len(triangle))) @ triangle
    simulated /= np.sqrt(rng.chisquare(freedom, (_SIMULATED, 1)) / freedom)
    return JointMiss(largest, float(np.mean(np.abs(simulated).max(axis=1) >= largest)))


def _standardise(values: Array) -> tuple[Array, Array, Array]:
    """Return the mean, its standard error and the skewness of each column."""
    mean = values.mean(axis=0)
    deviation = values - mean
    spread = np.sqrt((deviation**2).mean(axis=0))
    skewness = np.divide((deviation**3).mean(axis=0), spread**3, out=np.zeros_like(spread), where=spread > 0)
    return mean, spread / math.sqrt(len(values) - 1), skewness


def _unbend(y: float, skewness: float, count: int) -> float:
    """Return the T at which T + aT² + a²T³/3 + γ/(6√m) is y, a cubic in 1 + aT."""
    a = skewness / (3.0 * math.sqrt(count))
    return y if abs(a) < 1e-9 else (math.cbrt(1.0 + 3.0 * a * (y - 0.5 * a)) - 1.0) / a


def _student_95(freedom: int) -> float:
    # Cornish–Fisher expansion of the t quantile around the normal one; within 0.001 from 7 degrees of freedom on.
    z = _Z_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
