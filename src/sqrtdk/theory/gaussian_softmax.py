"""Softmax of n independent Gaussian logits: exact averages by quadrature, and their limits for many keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import checks
from sqrtdk.errors import InvalidValueError
from sqrtdk.theory.softmax import saturation_index

Array = npt.NDArray[np.float64]


class Condensation(NamedTuple):
    """Many-key limits for Gaussian logits of standard deviation σ over n keys; entropy and Σp² are averages."""

    saturation_index: float
    regime: Literal["spread", "condensed"]
    entropy: float
    entropy_ratio: float
    sum_p2: float
    trusted: bool


def condensation(sigma: float, n: int) -> Condensation:
    """Predict mean entropy and mean Σp² of many Gaussian logits (random energy model, Derrida 1981).

    Below ρ = 1 the weights are spread: H ≈ ln n − σ²/2, so H/ln n ≈ 1 − ρ². E Σp² ≈ e^{σ²}/n up to ρ = 1/√3. From there
    rare rows in which one key rivals all others make the average, and with a = (1 + ρ²)/(2ρ²)
    E Σp² ≈ n^{−(1−ρ²)²/(4ρ²)}·Γ(2−a)Γ(a)/(σ√(2π)). That diverges at ρ = 1/√3, so the smaller of the two is taken. Past
    ρ = 1 the weights concentrate on few keys: H → ψ(1) − ψ(1 − 1/ρ) nats and E Σp² → 1 − 1/ρ, whatever n.

    `trusted` says where the limits are good at finite n: ρ ≤ ½ (entropy ratio within 0.03 for n ≥ 64) and ρ ≥ 2 (Σp²
    within 0.12 for n ≥ 64). `expected_softmax` gives the exact averages at any n.

    >>> round(condensation(1.0, 1024).entropy_ratio, 3)
    0.928
    >>> round(condensation(2.14 * math.sqrt(2 * math.log(1024)), 1024).sum_p2, 2)
    0.53
    """
    _require_gaussian_row(sigma, n)
    log_n = math.log(n)
    rho = float(saturation_index(sigma, n))
    if rho <= 1.0:
        entropy = log_n * (1.0 - rho * rho)
        return Condensation(rho, "spread", entropy, entropy / log_n, _spread_sum_p2(rho, log_n), rho <= 0.5)
    entropy = min(digamma(1.0) - digamma(1.0 - 1.0 / rho), log_n)
    return Condensation(rho, "condensed", entropy, entropy / log_n, 1.0 - 1.0 / rho, rho >= 2.0)


def _spread_sum_p2(rho: float, log_n: float) -> float:
    typical_keys = math.exp((2.0 * rho * rho - 1.0) * log_n)
    if rho * rho <= 1.0 / 3.0:
        return typical_keys
    a = (1.0 + rho * rho) / (2.0 * rho * rho)
    exponent = -((1.0 - rho * rho) ** 2) / (4.0 * rho * rho)
    sigma = rho * math.sqrt(2.0 * log_n)
    one_key = math.exp(exponent * log_n) * math.gamma(2.0 - a) * math.gamma(a) / (sigma * math.sqrt(2.0 * math.pi))
    return min(typical_keys, one_key)


def entropy_expansion(sigma: float, n: int) -> float:
    """Return E[H] ≈ ln n − σ²/2 + (σ² − ½)·e^{σ²}/n + 1/(2n), the first correction to the many-key limit at small ρ.

    From E ln Z ≈ ln E Z − Var(Z)/(2(E Z)²) and E Σp² ≈ e^{σ²}/n in E H = E ln Z − σ²(1 − E Σp²). Exact at
    σ = 0; within 0.011 nats of `expected_softmax` up to ρ = 0.4 for n ≥ 64.

    >>> round(entropy_expansion(1.0, 1024), 4), round(expected_softmax(1.0, 1024).entropy, 4)
    (6.4333, 6.4333)
    """
    _require_gaussian_row(sigma, n)
    square = sigma * sigma
    return math.log(n) - 0.5 * square + ((square - 0.5) * math.exp(square) + 0.5) / n


class ExpectedSoftmax(NamedTuple):
    """Averages over rows of Gaussian logits, exact at finite n."""

    entropy: float
    entropy_ratio: float
    sum_p2: float


class ExpectedJacobian(NamedTuple):
    """Averages over rows of ‖J‖²_F and of ‖Jκ‖², κ = x/σ the logits in units of their standard deviation."""

    norm_square: float
    along_square: float


# Below this σ the averages are their expansions to second order in σ, exact to 1e-12; the grid would grow without end.
_TINY = 1e-3


def expected_softmax(sigma: float, n: int) -> ExpectedSoftmax:
    """Return E[H] and E[Σp²] of the softmax of n independent N(0, σ²) logits, exact at finite n by quadrature.

    With Z = Σe^{xⱼ} and φ(t) = E e^{−t·e^x}:  E ln Z = ∫ (e^{−t} − φ(t)ⁿ)/t dt,
    E Σp² = n ∫ t·φ''(t)·φ(t)ⁿ⁻¹ dt (write 1/Z² as ∫ t·e^{−tZ} dt), and since E Σpx = σ²·E[1 − Σp²]
    (Gaussian integration by parts), E H = E ln Z − σ²·(1 − E Σp²). Error below 1e-9 for σ ≤ 40, n ≤ 10⁶.

    >>> result = expected_softmax(1.0, 1024)
    >>> round(result.entropy_ratio, 3)
    0.928
    """
    _require_gaussian_row(sigma, n)
    log_n = math.log(n)
    if sigma < _TINY:
        shrunk = sigma * sigma * (n - 1) / n
        entropy, sum_p2 = log_n - 0.5 * shrunk, (1.0 + shrunk) / n
    else:
        grid = _Grid(sigma, n)
        sum_p2 = grid.moment((2, 0))
        entropy = grid.log_partition() - sigma * sigma * (1.0 - sum_p2)
    return ExpectedSoftmax(entropy, entropy / log_n, sum_p2)


def expected_jacobian(sigma: float, n: int) -> ExpectedJacobian:
    """Return E‖J‖²_F and E‖Jκ‖² of the softmax Jacobian J = diag(p) − p pᵀ for n independent N(0, σ²) logits x = σκ.

    ‖J‖²_F = Σp² − 2Σp³ + (Σp²)² and ‖Jκ‖² = Σpᵢ²(κᵢ − Σpκ)², each sum over different keys an integral as in
    `expected_softmax`. For many keys and ρ > 1, E‖J‖²_F → y(1 − y)/3 with y = E Σp² = 1 − 1/ρ (moments of the
    Poisson–Dirichlet distribution). Relative error below 1e-5 for σ ≤ 40, n ≤ 10⁶.

    >>> result = expected_jacobian(4 * math.sqrt(2 * math.log(1024)), 1024)
    >>> y = expected_softmax(4 * math.sqrt(2 * math.log(1024)), 1024).sum_p2
    >>> round(result.norm_square / (y * (1 - y)), 2)
    0.34
    """
    _require_gaussian_row(sigma, n)
    if sigma < _TINY:
        return ExpectedJacobian((n - 1) / n**2, (n - 1) / n**2)
    grid = _Grid(sigma, n)
    fourth = grid.moment((4, 0)) + grid.moment((2, 0), (2, 0))  # (Σp²)²: the same key twice, or two keys
    norm_square = grid.moment((2, 0)) - 2.0 * grid.moment((3, 0)) + fourth
    # Σp²x² − 2·Σp²x·Σpx + Σp²·(Σpx)², sorted by which of the keys are the same.
    mixed = grid.moment((3, 2)) + grid.moment((2, 1), (1, 1))
    squared = (
        grid.moment((4, 2))
        + grid.moment((2, 2), (2, 0))
        + 2.0 * grid.moment((3, 1), (1, 1))
        + grid.moment((2, 0), (1, 1), (1, 1))
    )
    along = grid.moment((2, 2)) - 2.0 * mixed + squared
    return ExpectedJacobian(norm_square, along / (sigma * sigma))


class _Grid:
    """Integrals over t = e^u for n logits x ~ N(0, σ²).

    A mean E f(u + x) over x is a convolution on one grid for u and x, and the trapezoid rule is exact to rounding for
    these analytic, decaying integrands: its step resolves the normal density (σ/2) and e^{−e^z} (¼).
    """

    def __init__(self, sigma: float, n: int) -> None:
        self.n = n
        self.step = min(0.25, 0.5 * sigma)
        # 10 standard deviations hold all but 1e-23; the integrands live where t·Z is of order one.
        side = math.ceil(10.0 * sigma / self.step)
        x = self.step * np.arange(-side, side + 1)
        self.density = np.exp(-0.5 * (x / sigma) ** 2) * (self.step / (sigma * math.sqrt(2.0 * math.pi)))
        # Moments about the largest logits: a shift drops out of ‖Jκ‖², and near it little cancels.
        self.x = x - min(sigma * math.sqrt(2.0 * math.log(n)), sigma * sigma)
        low = -10.0 * sigma - math.log(n) - 40.0
        self.u = low + self.step * np.arange(math.ceil((10.0 * sigma + 8.0 - low) / self.step) + 1)
        z = self.u[0] + self.step * np.arange(-side, self.u.size + side)
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            self.exponentials = np.exp(z)
            self.z = z
            below_one = self._mean(-np.expm1(-self.exponentials), 0)
            self.log_phi = np.log1p(-np.minimum(below_one, 1.0))

    def _mean(self, values: Array, power: int) -> Array:
        # The kernel is reversed by convolve: x enters with its sign turned, as the density is even only for power 0.
        weights = self.density * self.x**power if power else self.density
        return np.convolve(values, weights[::-1], "valid")

    def log_partition(self) -> float:
        """Return E ln Z."""
        with np.errstate(over="ignore", under="ignore"):
            return float(np.sum(np.exp(-np.exp(self.u)) - np.exp(self.n * self.log_phi))) * self.step

    def moment(self, *keys: tuple[int, int]) -> float:
        """Return E of the sum over distinct keys of the product of p^a·(x − shift)^b, one pair (a, b) per key."""
        count = math.prod(range(self.n - len(keys) + 1, self.n + 1))
        if count == 0:
            return 0.0
        with np.errstate(over="ignore", under="ignore"):
            others = self.n - len(keys)
            product = np.exp(others * self.log_phi) if others else np.ones_like(self.u)
            for a, b in keys:
                product = product * self._mean(np.exp(a * self.z - self.exponentials), b)
        return count * float(product.sum()) * self.step / math.factorial(sum(a for a, _ in keys) - 1)


def _require_gaussian_row(sigma: float, n: int) -> None:
    checks.integer("n", n, 2)
    if not (math.isfinite(sigma) and sigma >= 0):
        raise InvalidValueError("sigma", f"must be finite and not negative, got {sigma}")


def average_over_lengths(of_sigma: Callable[[float], Sequence[float]], scale: float, d_k: int) -> Array:
    """Return the mean of a function of σ = |scale|·‖q‖ over standard normal q, whose length is χ-distributed."""
    middle = math.sqrt(d_k)
    # ‖q‖ has a standard deviation below 0.71 whatever dₖ: beyond this reach lies less than 1e-9 of it.
    low, high = max(0.0, middle - 6.0), middle + 6.0
    x, weights = np.polynomial.legendre.leggauss(48)
    lengths = 0.5 * (high - low) * (x + 1.0) + low
    logs = (d_k - 1) * np.log(lengths) - 0.5 * lengths**2
    weights = weights * np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum() @ np.array([of_sigma(abs(scale) * length) for length in lengths]))


@lru_cache(maxsize=256)
def expected_rows(scale: float, d_k: int, n: int) -> ExpectedSoftmax:
    """Return E[H] and E[Σp²] over rows of attention with standard normal q and k, exact at finite dₖ and n.

    Given q, the logits scale·q·k are n independent N(0, scale²·‖q‖²) numbers: `expected_softmax` at each length of q,
    averaged over the lengths.

    >>> round(expected_softmax(8.0, 1024).sum_p2, 3), round(expected_rows(1.0, 64, 1024).sum_p2, 3)
    (0.602, 0.597)
    """
    checks.integer("d_k", d_k, 1)
    return ExpectedSoftmax(*average_over_lengths(lambda sigma: expected_softmax(sigma, n), scale, d_k).tolist())


class Crossover(NamedTuple):
    """Many-key limits, without scaling, of the dₖ at which rows begin to concentrate and at which E Σp² = ½."""

    begins: float
    concentrated: float


def crossover_without_scaling(n: int) -> Crossover:
    """Return dₖ = 2 ln n (ρ = 1, rows begin to concentrate) and dₖ = 8 ln n (ρ = 2, where E Σp² = ½).

    Both hold without scaling, for q and k of unit variance, in the limit of many keys. At finite n the second comes
    earlier: `concentration_crossing` gives it exactly.

    >>> [round(d, 1) for d in crossover_without_scaling(1024)]
    [13.9, 55.5]
    """
    checks.integer("n", n, 2)
    return Crossover(2.0 * math.log(n), 8.0 * math.log(n))


@lru_cache(maxsize=256)
def concentration_crossing(n: int) -> int:
    """Return the first dₖ at which rows over n keys have E Σp² ≥ ½ without scaling, for standard normal q and k.

    Two keys have Σp² ≥ ½ always, so n = 2 gives 1.

    >>> [concentration_crossing(n) for n in (2, 16, 64, 1024, 4096)]
    [1, 12, 21, 41, 52]
    """
    low, high = 0, math.ceil(crossover_without_scaling(n).concentrated) + 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if expected_rows(1.0, middle, n).sum_p2 >= 0.5 else (middle, high)
    return high


def digamma(x: float) -> float:
    """Return ψ(x) = d ln Γ(x)/dx for x > 0, by recurrence up to 10 and the asymptotic series. Relative error < 1e-13.

    >>> round(digamma(1.0), 12)                 # minus Euler's constant
    -0.577215664902
    """
    if not x > 0:
        raise InvalidValueError("x", f"must be positive, got {x}")
    shift = 0.0
    while x < 10.0:
        shift -= 1.0 / x
        x += 1.0
    inverse_square = 1.0 / (x * x)
    series = inverse_square * (
        1 / 12
        - inverse_square
        * (
            1 / 120
            - inverse_square
            * (1 / 252 - inverse_square * (1 / 240 - inverse_square * (1 / 132 - inverse_square * 691 / 32760)))
        )
    )
    return shift + math.log(x) - 0.5 / x - series
