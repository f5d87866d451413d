"""Vectors of an experiment, sampled or made from given scores, and the Python script that makes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import scales
from sqrtdk.errors import MissingExtraError
from sqrtdk.web.explore_query import QUERIES, Experiment

Array = npt.NDArray[Any]
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


class Vectors(NamedTuple):
    """q `[L, dₖ]`, k and v `[n, dₖ]` and the gradient at the output `[L, dᵥ]`, of one dtype; own: each query's key."""

    q: Array
    k: Array
    v: Array
    grad_output: Array
    own: Array | None = None


# Entries of mean 0 and variance 1: the sampling, and the same as source code. Student's t₅ has variance 5/3.
_DRAWS: dict[str, tuple[Draw, str]] = {
    "normal": (lambda rng, shape: rng.standard_normal(shape), "rng.standard_normal({shape})"),
    "uniform": (lambda rng, shape: rng.uniform(-(3**0.5), 3**0.5, shape), "rng.uniform(-(3**0.5), 3**0.5, {shape})"),
    "laplace": (lambda rng, shape: rng.laplace(0.0, 0.5**0.5, shape), "rng.laplace(0.0, 0.5**0.5, {shape})"),
    "student": (lambda rng, shape: rng.standard_t(5, shape) * 0.6**0.5, "rng.standard_t(5, {shape}) * 0.6**0.5"),
    "signs": (lambda rng, shape: 2.0 * rng.integers(0, 2, shape) - 1.0, "2.0 * rng.integers(0, 2, {shape}) - 1.0"),
}


def sample(asked: Experiment) -> Vectors:
    """Return the vectors of an experiment; `write_python` writes the same as source code.

    >>> sample(Experiment(d_k=4, n=8)).k.shape
    (8, 4)
    """
    rng = np.random.default_rng(asked.seed)
    own = None
    if asked.source == "scores":
        q, k = np.zeros((1, asked.d_k)), np.zeros((asked.n, asked.d_k))
        q[:, 0], k[:, 0] = 1.0, asked.scores
    else:
        entries = _DRAWS[asked.distribution][0]
        q, k = entries(rng, (QUERIES, asked.d_k)), entries(rng, (asked.n, asked.d_k))
        if asked.correlation:
            own = np.arange(QUERIES) % asked.n
            q = asked.correlation * k[own] + math.sqrt(1.0 - asked.correlation**2) * q
        if asked.mean_q:
            q = q + asked.mean_q
        if asked.mean_k:
            k = k + asked.mean_k
    v = rng.standard_normal(k.shape)
    arrays = (q, k, v, rng.standard_normal((len(q), v.shape[1])))
    with np.errstate(over="ignore"):  # what a dtype cannot hold becomes infinite; the page says how many do
        return Vectors(*(array.astype(find_dtype(asked.dtype), copy=False) for array in arrays))._replace(own=own)


def find_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of that name; bfloat16 comes from ml_dtypes.

    Raises:
        MissingExtraError: ml_dtypes is not installed.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise MissingExtraError("dtype bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def write_python(asked: Experiment, scale: float | scales.Policy) -> str:
    """Return a script that computes the same numbers with the public interface.

    >>> print(write_python(Experiment(d_k=4, n=8), 0.5).splitlines()[-1])
    gradients = sqrtdk.attention_gradients(q, k, v, grad_output, scale=0.5)
    """
    lines = ["import numpy as np", "import sqrtdk", "", f"rng = np.random.default_rng({asked.seed})"]
    if asked.source == "scores":
        lines += [
            f"q, k = np.zeros((1, {asked.d_k})), np.zeros(({asked.n}, {asked.d_k}))",
            f"q[:, 0], k[:, 0] = 1.0, {list(asked.scores)}",
        ]
    else:
        entries = _DRAWS[asked.distribution][1]
        lines += [
            f"q = {entries.format(shape=(QUERIES, asked.d_k))}",
            f"k = {entries.format(shape=(asked.n, asked.d_k))}",
        ]
        if asked.correlation:
            lines += [
                f"own = np.arange({QUERIES}) % {asked.n}  # each query has a key of its own",
                f"q = {asked.correlation!r} * k[own] + {math.sqrt(1.0 - asked.correlation**2)!r} * q",
            ]
        lines += [f"{name} = {name} + {mean!r}" for name, mean in (("q", asked.mean_q), ("k", asked.mean_k)) if mean]
    lines += ["v = rng.standard_normal(k.shape)", "grad_output = rng.standard_normal((len(q), v.shape[1]))"]
    if asked.dtype != "float64":
        dtype = "ml_dtypes.bfloat16" if asked.dtype == "bfloat16" else f"np.{asked.dtype}"
        lines[1:1] = ["import ml_dtypes"] if asked.dtype == "bfloat16" else []
        lines += [f"q, k, v, grad_output = (x.astype({dtype}) for x in (q, k, v, grad_output))"]
    written = f"sqrtdk.scales.{scale!r}" if isinstance(scale, scales.Policy) else repr(scale)
    return "\n".join(
        [
            *lines,
            f"result = sqrtdk.attention(q, k, v, scale={written}, weights=True)",
            "print(result.statistics)",
            f"gradients = sqrtdk.attention_gradients(q, k, v, grad_output, scale={written})",
        ]
    )
