"""Softmax of one row: its Jacobian, its saturation index, and the least entropy at a given spread."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def softmax_jacobian(p: npt.ArrayLike) -> Array:
    """Return J = diag(p) − p pᵀ, so ∂pᵢ/∂xⱼ = pᵢ(δᵢⱼ − pⱼ); shape `[..., n]` → `[..., n, n]`.

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
    """Return trace 1 − Σp², Frobenius norm √(Σp² − 2Σp³ + (Σp²)²) and largest eigenvalue of the softmax Jacobian.

    The trace is the sum of the diagonal that the four sources discuss. It is 1 − 1/n for uniform weights, its largest
    value, and 0 for one-hot weights. The largest eigenvalue never exceeds ½ (reached by two equal weights).

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
    """Return the module whose functions work on the array: torch for its tensors, numpy for all else."""
    # Not imported here: a caller with a tensor has loaded torch.
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else np


def saturation_index(sigma: npt.ArrayLike, n: npt.ArrayLike) -> Array:
    """Return ρ = σ/√(2 ln n), and NaN where n ≤ 1. Tensors give a tensor in the precision of σ.

    >>> round(float(saturation_index(8.0, 1024)), 3)     # no scaling, dₖ = 64
    2.149
    """
    xp = namespace_of(sigma)
    std = xp.asarray(sigma, dtype=np.float64 if xp is np else None)
    keys = xp.asarray(n, dtype=std.dtype)
    several = keys > 1
    width = xp.sqrt(2.0 * xp.log(xp.where(several, keys, 2.0)))
    return cast(Array, xp.asarray(xp.where(several, std / width, xp.nan)))


def entropy_lower_bound(sigma: npt.ArrayLike, n: npt.ArrayLike) -> Array:
    """Return the least entropy of n logits with standard deviation σ (Zhai et al. 2023, theorem 3.1, for one row).

    With s = √n·σ, the length of the centred row, and β = exp(−s√(n/(n−1))):
    H ≥ ln(1 + (n−1)β) + s√(n(n−1))·β/(1 + (n−1)β), reached by one high logit above n − 1 equal ones. A row of
    one key has entropy 0. Real rows lie far above this bound.

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
