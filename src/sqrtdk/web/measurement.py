"""Answers of the Explore page: measured attention beside the predictions of theory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk import scales, theory
from sqrtdk.exercises.gaussian_rows import many_key_limit, rank_weights, state_crossing
from sqrtdk.operation.attention import attention, attention_gradients
from sqrtdk.report.palette import policy_colour
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.web.explore_query import TRIO, Experiment, factor_of
from sqrtdk.web.vectors import Vectors, write_python
from sqrtdk.web.verdict import judge_all
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import write_number, write_percent

Array = npt.NDArray[Any]

# What scores alone do not determine: the page makes up keys, values and a gradient at the output.
_INVENTED = ("grad_q", "grad_q_median", "grad_q_p5")

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
class Prediction:
    """Predicted mean and variance of all logits, as a mixture: the keys in general, and each query's own key."""

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
    """Return the scales that are shown: the three of the four sources, and the chosen one if it is another.

    >>> columns_of(Experiment(policy="qk_norm"))
    ['chosen', 'none', 'sqrt', 'inverse']
    """
    return [*TRIO] if asked.is_of_the_trio else ["chosen", *TRIO]


def measure(asked: Experiment, given: Vectors) -> dict[str, Any]:
    """Measure all numbers and curves of one answer, as plain values except NaN.

    Every row statistic is the mean over queries as `AttentionStatistics.mean` takes it.
    """
    n, d_k = given.k.shape
    with np.errstate(all="ignore"):
        product = _multiply(given.q.astype(np.float64), given.k.astype(np.float64))
        columns = {name: _measure_column(asked, given, name, product) for name in columns_of(asked)}
    chosen = asked.policy if asked.is_of_the_trio else "chosen"
    begins, concentrated = theory.crossover_without_scaling(n)
    return {
        "experiment": asdict(asked) | {"parameter": asked.parameter_used},
        "d_k": d_k,
        "n": n,
        "queries": len(given.q),
        "chosen": chosen,
        "columns": columns,
        "limit": _limit_curve(n),
        "crossover": {
            "begins": begins,
            "concentrated": concentrated,
            "concentrated_from": theory.concentration_crossing(n),
        },
        "reading": _read(asked, columns, d_k, n),
        "hints": _hint(columns),
        "invented": [*_INVENTED] if asked.source == "scores" else [],
        "verdicts": judge_all(asked.claimed, columns) if asked.claimed else [],
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
    predicted = _predict(asked, scale, factor, d_k, n)
    values = {
        "scale": factor,
        "logit_std": _over_finite(np.std, logits),
        **{mean: float(rows.mean(mean)) for mean in _MEANS},
        "jacobian_trace_p5": _quantile(rows.jacobian_trace, 0.05),
        "grad_q": _over_finite(np.mean, gradients),
        "grad_q_median": _quantile(gradients, 0.5),
        "grad_q_p5": _quantile(gradients, 0.05),
    }
    if given.own is not None:
        values["own_weight"] = _over_finite(np.mean, weights[np.arange(len(weights)), given.own])
    return {
        "label": name_policy(name) if name != "chosen" else asked.label,
        "colour": _choose_colour(asked, name),
        "engine": result.engine,
        "values": values,
        "predicted": {} if predicted is None else {"logit_std": predicted.std},
        "histogram": _histogram(logits, predicted),
        "weights": _weights(asked, weights, rows),
        "gradients": gradients,
        "not_finite": int(len(gradients) - np.isfinite(rows.entropy).sum()),
    }


def _choose_colour(asked: Experiment, name: str) -> str:
    """Return a colour that no other column has: another temperature of the trio has its own."""
    if name != "chosen":
        return policy_colour(name)
    return policy_colour(f"temperature:{asked.t!r}" if asked.policy in TRIO else asked.policy)


def _hint(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return what a quantity does in this answer, for quantities whose meaning alone would not tell."""
    gradients = {name: np.asarray(columns[name]["gradients"]) for name in ("none", "sqrt")}
    if any(len(values) < 2 or not np.isfinite(values).all() or not values.any() for values in gradients.values()):
        return {}
    ratio = float(gradients["none"].mean() / gradients["sqrt"].mean())
    shares = {}
    for name, values in gradients.items():
        squares = np.sort(values**2)[::-1]
        shares[name] = float(squares[: math.ceil(len(squares) / 20)].sum() / squares.sum())
    than = "larger" if ratio > 1.0 else "smaller"
    return {
        "grad_q": f"With no scaling it is {than} than with 1/√dₖ ({write_number(ratio, 3)} times). A twentieth of the "
        f"queries holds {write_percent(shares['none'])} of the squared gradient with no scaling, "
        f"{write_percent(shares['sqrt'])} with 1/√dₖ."
    }


def _prepared_product(policy: scales.Policy, given: Vectors) -> Array:
    q, k = policy.prepare(given.q.astype(np.float64), given.k.astype(np.float64))
    return _multiply(q, k)


def _multiply(q: Array, k: Array) -> Array:
    # On a busy machine the threads of BLAS wait longer for each other than a small product takes: 56 ms against 4.
    return np.asarray(np.einsum("ld,nd->ln", q, k) if q.size * len(k) <= _SMALL else q @ k.T)


def _predict(asked: Experiment, scale: float | scales.Policy, factor: float, d_k: int, n: int) -> Prediction | None:
    """Predict all logits by the variance formula; None where the formula does not apply."""
    if asked.source != "random":
        return None
    if isinstance(scale, scales.Policy):
        # The cosine of vectors whose direction is uniform has variance 1/dₖ; rms(q)·rms(k) is |q||k|/dₖ.
        if asked.mean_q or asked.mean_k or asked.correlation or asked.distribution != "normal":
            return None
        unit = d_k if isinstance(scale, scales.QKNorm) else 1.0
        return Prediction(0.0, (factor * unit) ** 2 / d_k)
    moments = {"mean_q": asked.mean_q, "mean_k": asked.mean_k}
    predicted = Prediction(
        factor * theory.dot_product_mean(d_k, **moments), factor**2 * theory.dot_product_variance(d_k, **moments)
    )
    if not asked.correlation:
        return predicted
    own = {**moments, "correlation": asked.correlation}
    return Prediction(
        predicted.mean,
        predicted.variance,
        factor * theory.dot_product_mean(d_k, **own),
        factor**2 * theory.dot_product_variance(d_k, **own),
        1.0 / n,
    )


def _histogram(logits: Array, predicted: Prediction | None) -> dict[str, Any]:
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
        "at": at if predicted is not None else [],
        "predicted": predicted.density(at) if predicted is not None else [],
    }


def _weights(asked: Experiment, weights: Array, rows: AttentionStatistics) -> dict[str, Any]:
    """Return the weight of each key for given scores, else the median weights over queries in descending order."""
    if asked.source == "scores":
        return {"by_key": weights[0]}
    counted = weights[np.isfinite(rows.entropy)]
    if not len(counted):
        return {"rank": [], "weight": []}
    return rank_weights(counted)


def _limit_curve(n: int) -> dict[str, Any]:
    """Return H/ln n over ρ in the many-key limit (n → ∞); None where its error is not known."""
    width = math.sqrt(2.0 * math.log(n))
    grid = np.linspace(0.0, 3.0, _CURVE_POINTS)
    return {"rho": grid, "entropy_ratio": [many_key_limit(float(rho) * width, n).get("entropy_ratio") for rho in grid]}


def expect(asked: Experiment) -> dict[str, Any]:
    """Return exact averages at this dₖ and n: the curve over ρ, and each scale's own for standard normal q and k.

    A new size takes a moment, so the page asks for the averages separately.
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
    """Return sentences from the numbers: effective keys, where dₖ lies, and gradients."""
    values = {name: column["values"] for name, column in columns.items()}
    labels = {name: column["label"] for name, column in columns.items()}
    listed = [f"{write_number(value['effective_keys'], 3)} with {labels[name]}" for name, value in values.items()]
    sentences = [f"Of {n} keys a query attends to about {', '.join(listed[:-1])} and {listed[-1]} (effective keys)."]
    if asked.source == "scores":
        told = [
            f"{', '.join(f'{weight:.3f}' for weight in column['weights']['by_key'])} with {labels[name]}"
            for name, column in columns.items()
        ]
        sentences.append(f"The weights: {'; '.join(told)}.")
        sentences.append(
            "Scores determine the weights, but not the gradients. Numbers marked * come from invented vectors: "
            f"q = (1, 0, …), keys (score, 0, …) and random values of length {d_k}."
        )
    else:
        sentences.append(f"For standard normal q and k: {state_crossing(n, d_k)}")
    mean, median = (_ratio(values, quantity) for quantity in ("grad_q", "grad_q_median"))
    if len(columns["none"]["gradients"]) == 1 and math.isfinite(mean):
        sentences.append(f"Without scaling the gradient of the query is {write_number(mean, 3)} times that with 1/√dₖ.")
    elif math.isfinite(mean) and math.isfinite(median):
        sentences.append(
            f"Without scaling the gradient of a query is {write_number(mean, 3)} times that with 1/√dₖ on average, "
            f"{write_number(median, 3)} times in the median."
        )
    return sentences


def _ratio(values: Mapping[str, Any], quantity: str) -> float:
    beside = values["sqrt"][quantity]
    return float(values["none"][quantity] / beside) if beside else math.nan


def _over_finite(take: Callable[[Array], Any], values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(take(finite)) if len(finite) else math.nan


def _quantile(values: Array, share: float) -> float:
    return _over_finite(lambda finite: np.quantile(finite, share), np.asarray(values))
