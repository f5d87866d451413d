"""Mean and variance of q·k: over pairs, within a row, and at initialisation."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidValueError, unknown_name

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
    """Return E[q·k] = dₖ·(μ_q μ_k + r σ_q σ_k), with r the correlation of a query entry with its key entry.

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
    """Return Var(q·k) = dₖ·(σ_q²σ_k²(1 + r²) + μ_q²σ_k² + μ_k²σ_q² + 2r μ_q μ_k σ_q σ_k).

    This is the variance over independent pairs (q, k). Softmax sees the variance within a row, one q against its keys,
    in which the mean of the keys drops out: see `row_variance`.

    The dₖ pairs of entries (qᵢ, kᵢ) are independent of each other. For r = 0 the formula holds for any distribution
    with these means and variances. For r ≠ 0 the pair of entries is taken as Gaussian (Isserlis' theorem gives the r²
    term): at q = k the general variance is dₖ·(E q⁴ − 1) for unit entries, 2dₖ if they are Gaussian, 0 if they are ±1.

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


def row_variance(
    d_k: int,
    *,
    mean_q: float = 0.0,
    std_q: float = 1.0,
    std_k: float = 1.0,
    key_correlation: float = 0.0,
    alignment: float = 1.0,
) -> float:
    """Return the variance of q·k over the keys of one row, averaged over q: dₖ·σ_k²·(σ_q² + μ_q²)·(1 − r)·A.

    This is what softmax sees. The mean of the keys shifts a whole row and drops out. So does what the keys have in
    common: r is the correlation between the same entry of two keys. A is the `alignment` of q with the directions in
    which the keys differ, 1 where either is isotropic. For one q the variance is qᵀΣ_k q.

    >>> row_variance(64), dot_product_variance(64, mean_k=1.0)      # within a row, over pairs
    (64.0, 128.0)
    >>> round(row_variance(64, key_correlation=0.9), 6)
    6.4
    """
    _require_distribution(d_k, std_q, std_k, key_correlation)
    if not alignment >= 0:
        raise InvalidValueError("alignment", f"must not be negative, got {alignment}")
    return d_k * (std_k * std_k) * (std_q * std_q + mean_q * mean_q) * (1.0 - key_correlation) * alignment


def alignment(second_moment_q: npt.ArrayLike, covariance_k: npt.ArrayLike) -> float:
    """Return A = dₖ·tr(M_q Σ_k)/(tr M_q·tr Σ_k), from E[qᵀΣ_k q] = tr(M_q Σ_k) with M_q = E[q qᵀ].

    A is 1 where q or k is isotropic, and up to dₖ where both lie along one direction. q and k that share a spectrum λᵢ
    have A = dₖ·Σλ²/(Σλ)².

    Args:
        second_moment_q: E[q qᵀ], `[dₖ, dₖ]`.
        covariance_k: covariance of the keys, `[dₖ, dₖ]`.

    >>> spectrum = np.diag(np.arange(1, 65) ** -1.5)
    >>> round(alignment(spectrum, spectrum), 1)
    13.8
    """
    m, sigma = np.asarray(second_moment_q, dtype=np.float64), np.asarray(covariance_k, dtype=np.float64)
    if m.ndim != 2 or m.shape[0] != m.shape[1] or m.shape != sigma.shape:
        raise InvalidValueError(f"both matrices must have shape [d_k, d_k], got {m.shape} and {sigma.shape}")
    traces = float(np.trace(m)) * float(np.trace(sigma))
    if not traces > 0:
        raise InvalidValueError(f"both matrices must have a positive trace, got {np.trace(m)} and {np.trace(sigma)}")
    return len(m) * float(np.sum(m * sigma.T)) / traces


def _require_distribution(d_k: int, std_q: float, std_k: float, correlation: float) -> None:
    if d_k < 0:
        raise InvalidValueError("d_k", f"must not be negative, got {d_k}")
    if std_q < 0 or std_k < 0:
        raise InvalidValueError(f"std_q and std_k must not be negative, got {std_q} and {std_k}")
    if not -1.0 <= correlation <= 1.0:
        raise InvalidValueError("correlation", f"must lie in [-1, 1], got {correlation}")


class SquaredSumTerms(NamedTuple):
    """Numbers of terms of (Σᵢ qᵢkᵢ)²: all terms, squares, and products of two different indices."""

    total: int
    squares: int
    crosses: int


def squared_sum_terms(d_k: int) -> SquaredSumTerms:
    """Count the dₖ² terms of (Σᵢ qᵢkᵢ)²: dₖ squares that average 1 and dₖ² − dₖ cross terms that average 0.

    >>> squared_sum_terms(3)
    SquaredSumTerms(total=9, squares=3, crosses=6)
    """
    if d_k < 0:
        raise InvalidValueError("d_k", f"must not be negative, got {d_k}")
    return SquaredSumTerms(d_k * d_k, d_k, d_k * d_k - d_k)


def divided_variance(variance: float, divisor: float) -> float:
    """Return Var(x/c) = Var(x)/c².

    >>> divided_variance(64.0, 8.0)
    1.0
    """
    if divisor == 0:
        raise InvalidValueError("divisor", "must not be 0")
    return variance / (divisor * divisor)


_INITIALISATIONS = {
    "unit": "entries of W with variance 1/d_model, so that q and k have unit variance (what the four sources assume)",
    "unit_weights": "entries of W with variance 1 (the sources' wording taken literally)",
    "torch": "nn.Linear: uniform ±1/√d_model for W and bias",
    "xavier": "Glorot: variance 2/(d_model + heads·dₖ)",
    "xavier_packed": "nn.MultiheadAttention: Glorot on the packed [3·d_model, d_model] projection",
    "kaiming": "He: variance 2/d_model",
    "gpt2": "normal with standard deviation 0.02",
    "rescaled": "rescaled init: unit, then W_q and W_k each times dₖ^(−1/4), which replaces 1/√dₖ",
}


def initialisations() -> dict[str, str]:
    """Return the known initialisations by name, each with a one-line description.

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
    """Return Var(q·k) = dₖ·Var(q)·Var(k) under an initialisation, for inputs of mean 0 and the given variance.

    The variance is over independent W_q and W_k and of independent token vectors.

    >>> initial_variance("torch", d_model=512, d_k=64).entry       # a third, plus the bias
    0.333984375
    >>> initial_variance("rescaled", d_model=512, d_k=64).dot_product
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
        "rescaled": 1.0 / (d_model * math.sqrt(d_k)),
    }[initialisation]
    entry = d_model * weight * input_variance + bias
    return InitialVariance(weight, entry, d_k * entry * entry)
