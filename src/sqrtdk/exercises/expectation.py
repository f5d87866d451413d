"""What rows of Gaussian attention are on average, exactly: theory at one σ, averaged over the lengths of q."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numpy.polynomial import chebyshev

from sqrtdk import theory

Array = npt.NDArray[np.float64]

# Σp² to 4e-6 of itself at dₖ = 512, n = 1024 and to 1e-5 at n = 10⁵; each node costs a quadrature of theory.
_NODES = 40
# |q| has a standard deviation below 0.71 whatever dₖ: beyond this distance from √dₖ lies less than 1e-9 of it.
_REACH = 6.0


class ExpectedRows:
    """E[H/ln n] and E[Σp²] of rows with standard normal q and k, as functions of σ or of the multiplier of q·k.

    Given q, the logits s·q·k are n independent N(0, s²|q|²) numbers, so that the average over rows is the one of
    `theory.expected_softmax` over |q|, which is χ-distributed with dₖ degrees of freedom. Between 40 Chebyshev nodes
    in asinh σ the curve over σ is interpolated.

    >>> rows = expect_rows(64, 1024)
    >>> round(rows.at_sigma(8.0).sum_p2, 3), round(rows.at_scale(1.0).sum_p2, 3)     # one length, and all of them
    (0.602, 0.597)
    """

    def __init__(self, d_k: int, n: int) -> None:
        self.d_k, self.n = d_k, n
        self.largest_sigma = max(math.sqrt(d_k) + _REACH, 3.0 * math.sqrt(2.0 * math.log(n)))
        self._top = math.asinh(self.largest_sigma)
        nodes = np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)
        exact = [theory.expected_softmax(float(sigma), n) for sigma in np.sinh(0.5 * (nodes + 1.0) * self._top)]
        # The logarithm keeps the relative accuracy of Σp² where it is near 1/n.
        values = np.array([(point.entropy_ratio, math.log(point.sum_p2)) for point in exact])
        self._coefficients = chebyshev.chebfit(nodes, values, _NODES - 1)

    def at_sigma(self, sigma: float) -> theory.ExpectedSoftmax:
        """The averages over rows whose logits all have the standard deviation σ, up to `largest_sigma`."""
        return self._average(np.array([sigma]), np.ones(1))

    def at_scale(self, scale: float) -> theory.ExpectedSoftmax:
        """The averages over rows of Gaussian q and k whose products are multiplied by `scale`, at most 1."""
        middle = math.sqrt(self.d_k)
        low, high = max(0.0, middle - _REACH), middle + _REACH
        x, weights = np.polynomial.legendre.leggauss(64)
        lengths = 0.5 * (high - low) * (x + 1.0) + low
        logs = (self.d_k - 1) * np.log(lengths) - 0.5 * lengths**2
        weights = weights * np.exp(logs - logs.max())
        return self._average(scale * lengths, weights / weights.sum())

    def _average(self, sigmas: Array, weights: Array) -> theory.ExpectedSoftmax:
        ratio, log_sum = chebyshev.chebval(2.0 * np.arcsinh(sigmas) / self._top - 1.0, self._coefficients)
        entropy_ratio = float(weights @ ratio)
        return theory.ExpectedSoftmax(entropy_ratio * math.log(self.n), entropy_ratio, float(weights @ np.exp(log_sum)))


@lru_cache(maxsize=64)
def expect_rows(d_k: int, n: int) -> ExpectedRows:
    """The averages for one size, computed once.

    >>> expect_rows(4, 16) is expect_rows(4, 16)
    True
    """
    return ExpectedRows(d_k, n)
