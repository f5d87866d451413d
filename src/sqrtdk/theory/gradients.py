"""Size of ∂loss/∂q for Gaussian attention: the exact mean square, and limits without scaling."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sqrtdk import checks
from sqrtdk.theory.gaussian_softmax import average_over_lengths, expected_jacobian


def query_gradient_norm(scale: float, *, d_k: int, jacobian_norm: Any, output_gradient_norm: float) -> Any:
    """Predict the root mean square of ‖∂loss/∂q‖ ≈ scale·√dₖ·‖J‖_F·‖∂loss/∂o‖ for Gaussian k and v of unit variance.

    ∂loss/∂q = scale·Kᵀ J V·∂loss/∂o. Averaged over v and over the parts of the keys that are orthogonal to q,
    E‖∂loss/∂q‖² = scale²·‖∂loss/∂o‖²·[(dₖ − 1)‖J‖²_F + ‖Jκ‖²], κ the parts along q, is exact for the row's own J. This
    function takes dₖ‖J‖²_F for the bracket: ‖Jκ‖² is ‖J‖²_F for small logits and less for large ones.

    >>> round(query_gradient_norm(1 / 8, d_k=64, jacobian_norm=0.05, output_gradient_norm=8.0), 3)
    0.4
    """
    return scale * math.sqrt(d_k) * jacobian_norm * output_gradient_norm


@lru_cache(maxsize=256)
def gradient_scale(scale: float, *, d_k: int, n: int) -> float:
    """Return the exact root mean square of ‖∂loss/∂q‖ per unit of ‖∂loss/∂o‖ for standard normal q, k, v and n keys.

    √E[scale²·((dₖ − 1)‖J‖²_F + ‖Jκ‖²)], by `expected_jacobian` at each length of q. Without scaling
    the mean and the median are far smaller: past ρ = 1 rows differ by many orders of magnitude.

    >>> gradient_scale(1 / 64, d_k=64, n=1024) < gradient_scale(1 / 8, d_k=64, n=1024)
    True
    """
    checks.integer("d_k", d_k, 1)
    norm_square, along_square = average_over_lengths(lambda sigma: expected_jacobian(sigma, n), scale, d_k)
    return abs(scale) * math.sqrt((d_k - 1) * norm_square + along_square)


@lru_cache(maxsize=256)
def top_gap_density(n: int) -> float:
    """Return the density at 0 of the gap between the largest two of n independent standard normal numbers.

    f_n(0) = n(n−1)∫ φ(x)²Φ(x)ⁿ⁻² dx; it grows like √(2 ln n).

    >>> round(top_gap_density(2), 4), round(top_gap_density(16), 3)     # 1/√π, and sixteen keys
    (0.5642, 1.766)
    """
    checks.integer("n", n, 2)
    x = np.linspace(-12.0, 12.0, 2401)
    cumulative = np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x])
    with np.errstate(under="ignore"):
        terms = np.exp(-x * x) / (2.0 * math.pi) * cumulative ** (n - 2)
    return n * (n - 1) * float(terms.sum()) * float(x[1] - x[0])


class GradientsWithoutScaling(NamedTuple):
    """Large-dₖ limits of ‖∂loss/∂q‖/‖∂loss/∂o‖ without scaling: mean, root mean square, share of rows that still learn.

    `alive` is the share of rows whose largest weight is below 0.9.
    """

    mean: float
    root_mean_square: float
    alive: float


def gradients_without_scaling(d_k: int, n: int) -> GradientsWithoutScaling:
    """Return how uneven gradients become without scaling, for standard normal q, k, v and large dₖ.

    All weight lies on two keys, p and 1 − p with the logit gap Δ = ‖q‖·gap: ∂q = p(1 − p)(k₁ − k₂)(v₁ − v₂)·∂o. Near 0
    the gap has the density f = `top_gap_density(n)`, and ∫p(1 − p)dΔ = ½, ∫p²(1 − p)²dΔ = 1/12 over Δ ≥ 0. Hence

        mean = √(2/π)·f      root mean square = √(f/3)·dₖ^¼      alive = ln 9·f/√dₖ

    The mean does not depend on dₖ: ever fewer rows have a gradient, and theirs grows like √dₖ.

    >>> [round(value, 3) for value in gradients_without_scaling(512, 16)]
    [1.409, 3.65, 0.171]
    """
    checks.integer("d_k", d_k, 1)
    density = top_gap_density(n)
    return GradientsWithoutScaling(
        mean=math.sqrt(2.0 / math.pi) * density,
        root_mean_square=math.sqrt(density / 3.0) * d_k**0.25,
        alive=math.log(9.0) * density / math.sqrt(d_k),
    )
