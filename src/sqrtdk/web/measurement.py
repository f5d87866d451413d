"""Answers of the Explore page: what attention does with the vectors, beside what theory predicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk import scales, theory
from sqrtdk.attention import attention, attention_gradients
from sqrtdk.exercises.gaussian_rows import many_key_law, rank_weights, state_crossing
from sqrtdk.report.palette import policy_colour
from sqrtdk.setting_names import name_policy
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.web.experiment import TRIO, Experiment, factor_of
from sqrtdk.web.vectors import Vectors, write_python

Array = npt.NDArray[Any]

_BINS = 48
_DENSITY_POINTS = 161
_CURVE_POINTS = 61
_SMALL = 2**24
_MEANS = (
    "saturation_index",
    "entropy_ratio",
    "effective_keys",
    "max_weight",
    "sum_p2",
    "jacobian_trace",
    "jacobian_norm",
)


@dataclass(frozen=True)
class Law:
    """Mean and variance that theory gives for all logits, as a mixture: the keys in general, and each query's own."""

    mean: float
    variance: float
    own_mean: float = 0.0
    own_variance: float = 0.0
    own_share: float = 0.0

    @property
    def std(self) -> float:
        """The standard deviation of the mixture."""
        share, rest = self.own_share, 1.0 - self.own_share
        mean = rest * self.mean + share * self.own_mean
        square = rest * (self.variance + self.mean**2) + share * (self.own_variance + self.own_mean**2)
        return math.sqrt(max(square - mean * mean, 0.0))

    def density(self, at: Array) -> Array:
        """The density of the mixture of normal distributions."""
        parts = [(1.0 - self.own_share, self.mean, self.variance), (self.own_share, self.own_mean, self.own_variance)]
        total = np.zeros_like(at)
        for share, mean, variance in parts:
            if share > 0.0 and variance > 0.0:
                total += share * np.exp(-0.5 * (at - mean) ** 2 / variance) / math.sqrt(2.0 * math.pi * variance)
        return total


def columns_of(asked: Experiment) -> list[str]:
    """The scales that are shown: the three of the texts, and the chosen one if it is another.

    >>> columns_of(Experiment(policy="qk_norm"))
    ['chosen', 'none', 'sqrt', 'inverse']
    """
    return [*TRIO] if asked.is_of_the_trio else ["chosen", *TRIO]


def measure(asked: Experiment, given: Vectors) -> dict[str, Any]:
    """All numbers and curves of one answer, as plain values but for NaN.

    Every row statistic is the mean over queries as `AttentionStatistics.mean` takes it.
    """
    n, d_k = given.k.shape
    with np.errstate(all="ignore"):
        product = _multiply(given.q.astype(np.float64), given.k.astype(np.float64))
        columns = {name: _measure_column(asked, given, name, product) for name in columns_of(asked)}
    chosen = asked.policy if asked.is_of_the_trio else "chosen"
    begins, nearly_one_hot = theory.unscaled_crossover(n)
    return {
        "experiment": asdict(asked) | {"parameter": asked.parameter_used},
        "d_k": d_k,
        "n": n,
        "queries": len(given.q),
        "chosen": chosen,
        "columns": columns,
        "law": _law_curve(n),
        "crossover": {
            "begins": begins,
            "nearly_one_hot": nearly_one_hot,
            "concentrated_from": theory.concentration_crossing(n),
        },
        "reading": _read(asked, columns, d_k, n),
        "python": write_python(asked, asked.scale("chosen", d_k, n)),
    }


def _measure_column(asked: Experiment, given: Vectors, name: str, product: Array) -> dict[str, Any]:
    n, d_k = given.k.shape
    scale = asked.scale(name, d_k, n)
    factor = factor_of(scale, d_k, n)
    result = attention(given.q, given.k, given.v, scale=scale, weights=True)
    rows, weights = result.statistics, result.weights
    assert rows is not None
    assert weights is not None
    weights = weights.astype(np.float64)
    slopes = attention_gradients(given.q, given.k, given.v, given.grad_output, scale=scale)
    gradients = np.linalg.norm(slopes.query.astype(np.float64), axis=-1)
    logits = (product if not isinstance(scale, scales.Policy) else _prepared_product(scale, given)) * factor
    law = _predict(asked, scale, factor, d_k, n)
    values = {
        "scale": factor,
        "logit_std": _std(logits),
        **{mean: float(rows.mean(mean)) for mean in _MEANS},
        "jacobian_trace_p5": _quantile(rows.jacobian_trace, 0.05),
        "grad_q": _mean(gradients),
        "grad_q_median": _quantile(gradients, 0.5),
        "grad_q_p5": _quantile(gradients, 0.05),
    }
    if given.own is not None:
        values["own_weight"] = _mean(weights[np.arange(len(weights)), given.own])
    return {
        "label": name_policy(name) if name != "chosen" else asked.label,
        "colour": policy_colour(asked.policy if name == "chosen" else name),
        "engine": result.engine,
        "values": values,
        "predicted": {} if law is None else {"logit_std": law.std},
        "histogram": _histogram(logits, law),
        "weights": _weights(asked, weights, rows),
        "gradients": gradients,
        "not_finite": int(len(gradients) - np.isfinite(rows.entropy).sum()),
    }


def _prepared_product(policy: scales.Policy, given: Vectors) -> Array:
    q, k = policy.prepare(given.q.astype(np.float64), given.k.astype(np.float64))
    return _multiply(q, k)


def _multiply(q: Array, k: Array) -> Array:
    # On a busy machine the threads of BLAS wait longer for each other than a small product takes: 56 ms against 4.
    return np.asarray(np.einsum("ld,nd->ln", q, k) if q.size * len(k) <= _SMALL else q @ k.T)


def _predict(asked: Experiment, scale: float | scales.Policy, factor: float, d_k: int, n: int) -> Law | None:
    """What the variance law says of all logits; None where it says nothing."""
    if asked.source != "random":
        return None
    if isinstance(scale, scales.Policy):
        # The cosine of vectors whose direction is uniform has variance 1/dₖ; rms(q)·rms(k) is |q||k|/dₖ.
        if asked.mean_q or asked.mean_k or asked.correlation or asked.distribution != "normal":
            return None
        unit = d_k if isinstance(scale, scales.QKNorm) else 1.0
        return Law(0.0, (factor * unit) ** 2 / d_k)
    moments = {"mean_q": asked.mean_q, "mean_k": asked.mean_k}
    law = Law(factor * theory.dot_product_mean(d_k, **moments), factor**2 * theory.dot_product_variance(d_k, **moments))
    if not asked.correlation:
        return law
    own = {**moments, "correlation": asked.correlation}
    return Law(
        law.mean,
        law.variance,
        factor * theory.dot_product_mean(d_k, **own),
        factor**2 * theory.dot_product_variance(d_k, **own),
        1.0 / n,
    )


def _histogram(logits: Array, law: Law | None) -> dict[str, Any]:
    finite = logits[np.isfinite(logits)]
    if not len(finite):
        return {"edges": [], "density": [], "at": [], "predicted": []}
    low, high = float(finite.min()), float(finite.max())
    if not high > low:
        low, high = low - 0.5, high + 0.5
    counts, edges = np.histogram(finite, bins=_BINS, range=(low, high))
    at = np.linspace(low, high, _DENSITY_POINTS)
    return {
        "edges": edges,
        "density": counts / (finite.size * (edges[1] - edges[0])),
        "at": at if law is not None else [],
        "predicted": law.density(at) if law is not None else [],
    }


def _weights(asked: Experiment, weights: Array, rows: AttentionStatistics) -> dict[str, Any]:
    """Of given scores the weight of each key; else the median over queries of the weights in descending order."""
    if asked.source == "scores":
        return {"by_key": weights[0]}
    counted = weights[np.isfinite(rows.entropy)]
    if not len(counted):
        return {"rank": [], "weight": []}
    return rank_weights(counted)


def _law_curve(n: int) -> dict[str, Any]:
    """H/ln n over ρ by the law for n → ∞, None where it states no error for it."""
    width = math.sqrt(2.0 * math.log(n))
    grid = np.linspace(0.0, 3.0, _CURVE_POINTS)
    return {"rho": grid, "entropy_ratio": [many_key_law(float(rho) * width, n).get("entropy_ratio") for rho in grid]}


def expect(asked: Experiment) -> dict[str, Any]:
    """The exact averages at this dₖ and n: the curve over ρ, and the scales' own for standard normal q and k.

    They take a moment for a size that is new, so that the page asks for them apart.
    """
    d_k, n = asked.d_k, asked.n
    width = math.sqrt(2.0 * math.log(n))
    grid = np.linspace(0.0, 3.0, _CURVE_POINTS)
    columns = {}
    is_standard = asked.source == "random" and asked.distribution == "normal"
    if is_standard and not (asked.mean_q or asked.mean_k or asked.correlation):
        for name in columns_of(asked):
            scale = asked.scale(name, d_k, n)
            # Normalised q and k are not Gaussian; the average takes ever longer for larger logits.
            if not isinstance(scale, scales.Policy) and scale <= 1.0:
                average = theory.expected_rows(scale, d_k, n)
                columns[name] = {
                    "entropy_ratio": average.entropy_ratio,
                    "sum_p2": average.sum_p2,
                    "jacobian_trace": 1.0 - average.sum_p2,
                }
    return {
        "d_k": d_k,
        "n": n,
        "rho": grid,
        "entropy_ratio": [theory.expected_softmax(float(rho) * width, n).entropy_ratio for rho in grid],
        "columns": columns,
    }


def _read(asked: Experiment, columns: Mapping[str, Any], d_k: int, n: int) -> list[str]:
    """Sentences from the numbers: how many keys count, where dₖ lies, what gradients do."""
    values = {name: column["values"] for name, column in columns.items()}
    labels = {name: column["label"] for name, column in columns.items()}
    listed = [f"{_say(value['effective_keys'])} with {labels[name]}" for name, value in values.items()]
    sentences = [f"Of {n} keys a query attends to about {', '.join(listed[:-1])} and {listed[-1]} (effective keys)."]
    if asked.source == "scores":
        told = [
            f"{', '.join(f'{weight:.3f}' for weight in column['weights']['by_key'])} with {labels[name]}"
            for name, column in columns.items()
        ]
        sentences.append(f"The weights: {'; '.join(told)}.")
    else:
        sentences.append(f"For standard normal q and k: {state_crossing(n, d_k)}")
    mean, median = (_ratio(values, quantity) for quantity in ("grad_q", "grad_q_median"))
    if len(columns["none"]["gradients"]) == 1 and math.isfinite(mean):
        sentences.append(f"Without scaling the gradient of the query is {_say(mean)} times that with 1/√dₖ.")
    elif math.isfinite(mean) and math.isfinite(median):
        sentences.append(
            f"Without scaling the gradient of a query is {_say(mean)} times that with 1/√dₖ on average, "
            f"{_say(median)} times in the median."
        )
    return sentences


def _ratio(values: Mapping[str, Any], quantity: str) -> float:
    beside = values["sqrt"][quantity]
    return float(values["none"][quantity] / beside) if beside else math.nan


def _say(value: float) -> str:
    return f"{value:.3g}" if not 100 <= abs(value) < 1e6 else f"{value:.0f}"


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _std(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.std()) if len(finite) else math.nan


def _quantile(values: Array, share: float) -> float:
    finite = np.asarray(values)[np.isfinite(values)]
    return float(np.quantile(finite, share)) if len(finite) else math.nan
