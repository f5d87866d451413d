"""The laws behind the scale: variance of q·k, the softmax Jacobian, condensation, bounds. Pure functions, no state.

Symbols: σ standard deviation of a row's logits, n its visible keys, p its softmax weights,
ρ = σ/√(2 ln n) the saturation index.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidValueError, unknown_name

__all__ = [
    "Condensation",
    "Crossover",
    "ExpectedSoftmax",
    "InitialVariance",
    "JacobianSize",
    "SquaredSumTerms",
    "condensation",
    "digamma",
    "divided_variance",
    "dot_product_mean",
    "dot_product_variance",
    "entropy_lower_bound",
    "expected_softmax",
    "gradient_scale",
    "initial_variance",
    "initialisations",
    "jacobian_size",
    "query_gradient_norm",
    "saturation_index",
    "softmax_jacobian",
    "squared_sum_terms",
    "unscaled_crossover",
]

Array = npt.NDArray[np.float64]


def dot_product_mean(
    d_k: int,
    *,
    mean_q: float = 0.0,
    mean_k: float = 0.0,
    std_q: float = 1.0,
    std_k: float = 1.0,
    correlation: float = 0.0,
) -> float:
    """E[q·k] = dₖ·(μ_q μ_k + r σ_q σ_k), with r the correlation of a query entry with its key entry.

    >>> dot_product_mean(64)
    0.0
    >>> dot_product_mean(64, correlation=1.0)     # q = k: the squared length
    64.0
    """
    _require_distribution(d_k, std_q, std_k, correlation)
    return d_k * (mean_q * mean_k + correlation * std_q * std_k)


def dot_product_variance(
    d_k: int,
    *,
    mean_q: float = 0.0,
    mean_k: float = 0.0,
    std_q: float = 1.0,
    std_k: float = 1.0,
    correlation: float = 0.0,
) -> float:
    """Var(q·k) = dₖ·(σ_q²σ_k²(1 + r²) + μ_q²σ_k² + μ_k²σ_q² + 2r μ_q μ_k σ_q σ_k).

    The dₖ pairs (qᵢ, kᵢ) are independent of each other. For r = 0 the law holds for any distribution with these
    means and variances; for r ≠ 0 the pair is taken as Gaussian (Isserlis' theorem gives the r² term).

    >>> dot_product_variance(512)
    512.0
    >>> dot_product_variance(64, mean_q=1.0)      # a mean on one side adds dₖ·μ²σ²
    128.0
    """
    _require_distribution(d_k, std_q, std_k, correlation)
    spread = std_q * std_k
    one_pair = (
        spread * spread * (1.0 + correlation * correlation)
        + (mean_q * std_k) ** 2
        + (mean_k * std_q) ** 2
        + 2.0 * correlation * mean_q * mean_k * spread
    )
    return d_k * one_pair


def _require_distribution(d_k: int, std_q: float, std_k: float, correlation: float) -> None:
    if d_k < 0:
        raise InvalidValueError(f"d_k must not be negative, got {d_k}")
    if std_q < 0 or std_k < 0:
        raise InvalidValueError(f"std_q and std_k must not be negative, got {std_q} and {std_k}")
    if not -1.0 <= correlation <= 1.0:
        raise InvalidValueError(f"correlation must lie in [-1, 1], got {correlation}")


class SquaredSumTerms(NamedTuple):
    """The terms of (Σᵢ qᵢkᵢ)²: how many there are, how many are squares, how many are products of two indices."""

    total: int
    squares: int
    crosses: int


def squared_sum_terms(d_k: int) -> SquaredSumTerms:
    """Count the dₖ² terms of (Σᵢ qᵢkᵢ)²: dₖ squares that average 1 and dₖ² − dₖ cross terms that average 0.

    >>> squared_sum_terms(3)
    SquaredSumTerms(total=9, squares=3, crosses=6)
    """
    if d_k < 0:
        raise InvalidValueError(f"d_k must not be negative, got {d_k}")
    return SquaredSumTerms(d_k * d_k, d_k, d_k * d_k - d_k)


def divided_variance(variance: float, divisor: float) -> float:
    """Var(x/c) = Var(x)/c².

    >>> divided_variance(64.0, 8.0)
    1.0
    """
    if divisor == 0:
        raise InvalidValueError("divisor must not be 0")
    return variance / (divisor * divisor)


def softmax_jacobian(p: npt.ArrayLike) -> Array:
    """J = diag(p) − p pᵀ, so ∂pᵢ/∂xⱼ = pᵢ(δᵢⱼ − pⱼ); shape `[..., n]` → `[..., n, n]`.

    >>> softmax_jacobian([0.5, 0.5]).tolist()
    [[0.25, -0.25], [-0.25, 0.25]]
    """
    p = np.asarray(p, dtype=np.float64)
    return np.asarray(p[..., :, None] * (np.eye(p.shape[-1]) - p[..., None, :]))


class JacobianSize(NamedTuple):
    """Three sizes of a softmax Jacobian, each an array without the last axis of p."""

    trace: Array
    frobenius: Array
    spectral: Array


def jacobian_size(p: npt.ArrayLike) -> JacobianSize:
    """Trace 1 − Σp², Frobenius norm √(Σp² − 2Σp³ + (Σp²)²) and largest eigenvalue of the softmax Jacobian.

    The trace is what the texts call the diagonal: it is 1 − 1/n for uniform weights, the largest it can be, and
    0 for one-hot ones. The largest eigenvalue never exceeds ½ (reached by two equal weights).

    >>> jacobian_size([0.5, 0.5]).spectral
    array(0.5)
    """
    p = np.asarray(p, dtype=np.float64)
    jacobian = softmax_jacobian(p)
    trace = np.trace(jacobian, axis1=-2, axis2=-1)
    frobenius = np.sqrt(np.sum(jacobian * jacobian, axis=(-2, -1)))
    spectral = np.linalg.eigvalsh(jacobian).max(axis=-1) if p.shape[-1] else np.zeros(p.shape[:-1])
    return JacobianSize(np.asarray(trace), np.asarray(frobenius), np.asarray(spectral))


def namespace_of(array: object) -> Any:
    """The module whose functions work on the array: torch for its tensors, numpy for all else."""
    # Never imported here: whoever holds a tensor has loaded it.
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else np


def saturation_index(sigma: npt.ArrayLike, n: npt.ArrayLike) -> Array:
    """ρ = σ/√(2 ln n); NaN where n ≤ 1, as one key cannot saturate. Tensors give a tensor in the precision of σ.

    >>> round(float(saturation_index(8.0, 1024)), 3)     # unscaled, dₖ = 64
    2.149
    """
    xp = namespace_of(sigma)
    std = xp.asarray(sigma, dtype=np.float64 if xp is np else None)
    keys = xp.asarray(n, dtype=std.dtype)
    several = keys > 1
    width = xp.sqrt(2.0 * xp.log(xp.where(several, keys, 2.0)))
    return cast(Array, xp.asarray(xp.where(several, std / width, xp.nan)))


class Condensation(NamedTuple):
    """What the random energy model predicts for Gaussian logits of standard deviation σ over n keys."""

    saturation_index: float
    regime: Literal["spread", "condensed"]
    entropy: float
    entropy_ratio: float
    sum_p2: float
    trusted: bool


def condensation(sigma: float, n: int) -> Condensation:
    """Predict entropy and Σp² of the softmax of n independent Gaussian logits (Derrida 1981, random energy model).

    Below ρ = 1 the weights are spread: H ≈ ln n − σ²/2, so H/ln n ≈ 1 − ρ²; Σp² ≈ e^{σ²}/n up to ρ = ½ and
    n^{−2(1−ρ)²} from there, where the largest logits rule the sum. Past ρ = 1 they condense on few keys:
    H → ψ(1) − ψ(1 − 1/ρ) nats and E Σp² → 1 − 1/ρ, whatever n.

    The laws are limits for n → ∞. `trusted` says where they are good at finite n: ρ ≤ ½ (entropy ratio within 0.03
    for n ≥ 64) and ρ ≥ 2 (Σp² within 0.12 for n ≥ 64); between the two the transition is smeared out and the law is
    only a guide. `expected_softmax` gives the exact averages at any n.

    >>> round(condensation(1.0, 1024).entropy_ratio, 3)
    0.928
    >>> round(condensation(2.14 * math.sqrt(2 * math.log(1024)), 1024).sum_p2, 2)
    0.53
    """
    _require_gaussian_row(sigma, n)
    log_n = math.log(n)
    rho = float(saturation_index(sigma, n))
    if rho <= 1.0:
        exponent = 2.0 * rho * rho - 1.0 if rho <= 0.5 else -2.0 * (1.0 - rho) ** 2
        entropy = log_n * (1.0 - rho * rho)
        return Condensation(rho, "spread", entropy, entropy / log_n, math.exp(exponent * log_n), rho <= 0.5)
    entropy = min(digamma(1.0) - digamma(1.0 - 1.0 / rho), log_n)
    return Condensation(rho, "condensed", entropy, entropy / log_n, 1.0 - 1.0 / rho, rho >= 2.0)


class ExpectedSoftmax(NamedTuple):
    """Averages over rows of n independent Gaussian logits, exact at finite n."""

    entropy: float
    entropy_ratio: float
    sum_p2: float


def expected_softmax(sigma: float, n: int) -> ExpectedSoftmax:
    """E[H] and E[Σp²] of the softmax of n independent N(0, σ²) logits, exact at finite n by quadrature.

    With Z = Σe^{xⱼ} and φ(t) = E e^{−t·e^x}:  E ln Z = ∫ (e^{−t} − φ(t)ⁿ)/t dt,
    E Σp² = n ∫ t·φ''(t)·φ(t)ⁿ⁻¹ dt (write 1/Z² as ∫ t·e^{−tZ} dt), and since E Σpx = σ²·E[1 − Σp²]
    (Gaussian integration by parts), E H = E ln Z − σ²·(1 − E Σp²). Error below 1e-6 for σ ≤ 40, n ≤ 10⁶.

    >>> result = expected_softmax(1.0, 1024)
    >>> round(result.entropy_ratio, 3)
    0.928
    """
    _require_gaussian_row(sigma, n)
    log_n = math.log(n)
    # t = e^u. The integrands live where t·Z is of order one; 10 standard deviations hold all but 1e-23.
    reach = 10.0 * sigma
    u = np.linspace(-reach - log_n - 40.0, reach + 8.0, 1201 + 60 * math.ceil(sigma))
    g = np.linspace(-10.0, 10.0, 801 + 80 * math.ceil(sigma))
    density = np.exp(-0.5 * g * g) * (g[1] - g[0]) / math.sqrt(2.0 * math.pi)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        phi_below_one = np.empty_like(u)
        second = np.empty_like(u)
        for index, shift in enumerate(u):
            tilted = np.exp(shift + sigma * g)
            falling = np.exp(-tilted)
            phi_below_one[index] = density @ -np.expm1(-tilted)
            second[index] = density @ np.where(falling > 0, tilted * tilted * falling, 0.0)
        log_phi = np.log1p(-np.minimum(phi_below_one, 1.0))
        step = float(u[1] - u[0])
        # The trapezoid rule is exact to rounding for such analytic, decaying integrands.
        log_z = float(np.sum(np.exp(-np.exp(u)) - np.exp(n * log_phi))) * step
        sum_p2 = n * float(np.sum(second * np.exp((n - 1) * log_phi))) * step
    entropy = log_z - sigma * sigma * (1.0 - sum_p2)
    return ExpectedSoftmax(entropy, entropy / log_n, sum_p2)


def _require_gaussian_row(sigma: float, n: int) -> None:
    if n < 2:
        raise InvalidValueError(f"n must be at least 2 keys, got {n}")
    if not (math.isfinite(sigma) and sigma >= 0):
        raise InvalidValueError(f"sigma must be finite and not negative, got {sigma}")


class Crossover(NamedTuple):
    """The dₖ at which unscaled unit-variance attention over n keys begins to condense and is nearly one-hot."""

    begins: float
    nearly_one_hot: float


def unscaled_crossover(n: int) -> Crossover:
    """dₖ = 2 ln n (ρ = 1, condensation begins) and dₖ = 8 ln n (ρ = 2, E Σp² ≥ ½, nearly one-hot).

    >>> [round(d, 1) for d in unscaled_crossover(1024)]
    [13.9, 55.5]
    """
    if n < 2:
        raise InvalidValueError(f"n must be at least 2 keys, got {n}")
    return Crossover(2.0 * math.log(n), 8.0 * math.log(n))


def digamma(x: float) -> float:
    """ψ(x) = d ln Γ(x)/dx for x > 0, by recurrence up to 10 and the asymptotic series; error below 1e-13.

    >>> round(digamma(1.0), 12)                 # minus Euler's constant
    -0.577215664902
    """
    if not x > 0:
        raise InvalidValueError(f"x must be positive, got {x}")
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


def entropy_lower_bound(sigma: npt.ArrayLike, n: npt.ArrayLike) -> Array:
    """The least entropy n logits of standard deviation σ can have (Zhai et al. 2023, theorem 3.1, for one row).

    With s = √n·σ, the length of the centred row, and β = exp(−s√(n/(n−1))):
    H ≥ ln(1 + (n−1)β) + s√(n(n−1))·β/(1 + (n−1)β), reached by one high logit above n − 1 equal ones. A row of
    one key has entropy 0. Evidence for what a spread of logits permits, never a rule: real rows lie far above it.

    >>> round(float(entropy_lower_bound(0.0, 8)), 4)      # no spread: uniform, ln 8
    2.0794
    """
    sigma = np.asarray(sigma, dtype=np.float64)
    n = np.asarray(n, dtype=np.float64)
    several = np.maximum(n, 2.0)
    # The gap between the high logit and the others in the extremal row; s√(n/(n−1)) = σ·n/√(n−1).
    gap = sigma * several / np.sqrt(several - 1.0)
    tail = (several - 1.0) * np.exp(-gap)
    lifted = np.where(tail > 0, gap, 0.0) * tail / (1.0 + tail)  # an infinite gap has no tail left to lift
    return np.asarray(np.where(n > 1, np.log1p(tail) + lifted, 0.0))


_INITIALISATIONS = {
    "unit": "entries of W with variance 1/d_model, so that q and k have unit variance (what the texts assume)",
    "unit_weights": "entries of W with variance 1 (the texts' wording taken literally)",
    "torch": "nn.Linear: uniform ±1/√d_model for W and bias",
    "xavier": "Glorot: variance 2/(d_model + heads·dₖ)",
    "xavier_packed": "nn.MultiheadAttention: Glorot on the packed [3·d_model, d_model] projection",
    "kaiming": "He: variance 2/d_model",
    "gpt2": "normal with standard deviation 0.02",
    "absorbed": "unit, then W_q and W_k each times dₖ^(−1/4): the scale inside the weights",
}


def initialisations() -> dict[str, str]:
    """The known initialisations by name, each with one line on what it does.

    >>> "xavier" in initialisations()
    True
    """
    return dict(_INITIALISATIONS)


class InitialVariance(NamedTuple):
    """Variances at initialisation: of an entry of W_q (or W_k), of an entry of q (or k), and of q·k."""

    weight: float
    entry: float
    dot_product: float


def initial_variance(
    initialisation: str, *, d_model: int, d_k: int, heads: int = 1, input_variance: float = 1.0
) -> InitialVariance:
    """What an initialisation gives for Var(q·k), for inputs of mean 0 and the given variance: dₖ·Var(q)·Var(k).

    The variance is over the draw of independent W_q and W_k and of independent token vectors.

    >>> initial_variance("torch", d_model=512, d_k=64).entry       # a third, plus the bias
    0.333984375
    >>> initial_variance("absorbed", d_model=512, d_k=64).dot_product
    1.0
    """
    if initialisation not in _INITIALISATIONS:
        raise unknown_name("initialisation", initialisation, list(_INITIALISATIONS))
    if min(d_model, d_k, heads) < 1 or input_variance < 0:
        raise InvalidValueError(
            "d_model, d_k and heads must be at least 1 and input_variance not negative, "
            f"got {d_model}, {d_k}, {heads} and {input_variance}"
        )
    bias = 1.0 / (3.0 * d_model) if initialisation == "torch" else 0.0
    weight = {
        "unit": 1.0 / d_model,
        "unit_weights": 1.0,
        "torch": 1.0 / (3.0 * d_model),
        "xavier": 2.0 / (d_model + heads * d_k),
        "xavier_packed": 2.0 / (4.0 * d_model),
        "kaiming": 2.0 / d_model,
        "gpt2": 0.02**2,
        "absorbed": 1.0 / (d_model * math.sqrt(d_k)),
    }[initialisation]
    entry = d_model * weight * input_variance + bias
    return InitialVariance(weight, entry, d_k * entry * entry)


def query_gradient_norm(scale: float, *, d_k: int, jacobian_norm: Any, output_gradient_norm: float) -> Any:
    """Predict ‖∂loss/∂q‖ ≈ scale·√dₖ·‖J‖_F·‖∂loss/∂o‖ for Gaussian k and v of unit variance.

    ∂loss/∂q = scale·Kᵀ J V·∂loss/∂o; treating K and V as independent of the weights, V·∂loss/∂o has n independent
    entries of size ‖∂loss/∂o‖ and Kᵀ stretches by √dₖ. Good where no single key rules the row (ρ < 1); unscaled
    rows past condensation pick keys that lie along q, and the estimate is then only the order of magnitude.

    >>> round(query_gradient_norm(1 / 8, d_k=64, jacobian_norm=0.05, output_gradient_norm=8.0), 3)
    0.4
    """
    return scale * math.sqrt(d_k) * jacobian_norm * output_gradient_norm


def gradient_scale(scale: float, *, d_k: int, n: int) -> float:
    """How large ∂loss/∂q is per unit of ∂loss/∂o at initialisation, for unit-variance Gaussian q, k, v and n keys.

    σ = scale·√dₖ gives E Σp² by `expected_softmax`, that gives ‖J‖_F ≈ √(Σp²(1 − Σp²)), `query_gradient_norm` the rest.
    It is a typical size; past ρ = 1 single rows scatter around it over many orders of magnitude.

    >>> gradient_scale(1 / 64, d_k=64, n=1024) < gradient_scale(1 / 8, d_k=64, n=1024)
    True
    """
    sum_p2 = expected_softmax(abs(scale) * math.sqrt(d_k), n).sum_p2
    norm = math.sqrt(sum_p2 * max(1.0 - sum_p2, 0.0))
    return float(query_gradient_norm(abs(scale), d_k=d_k, jacobian_norm=norm, output_gradient_norm=1.0))
