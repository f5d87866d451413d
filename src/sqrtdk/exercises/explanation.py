"""What no scaling, 1/√dₖ and 1/dₖ do at one size: the theory's prediction beside the measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sqrtdk import scales, theory
from sqrtdk.attention import attention
from sqrtdk.exercises.sampling import POLICIES, SampledRows, draw_attention, require_sampling, sample_rows
from sqrtdk.records import Record

_MEASURED = (
    "logit_std",
    "saturation_index",
    "entropy_ratio",
    "sum_p2",
    "effective_keys",
    "max_weight",
    "jacobian_trace",
    "grad_q",
)


def explain(d_k: int = 64, n: int = 1024, seed: int = 0, draws: int = 16, queries: int = 32) -> Record:
    """Say what none, √dₖ and dₖ do to Gaussian attention with this dₖ and n, predicted and measured.

    q, k, v (dᵥ = dₖ) and the gradient at the output have independent standard normal entries. Predictions: the
    law of the random energy model (n → ∞, `theory.condensation`) and exact averages at this n for rows of one σ
    (`theory.expected_softmax`); in the measurement σ varies from row to row with the length of q.

    Args:
        d_k: length of queries and keys.
        n: keys per query.
        seed: of the random numbers.
        draws: independent draws of q, k, v.
        queries: queries per draw.

    Returns:
        A record with the table ``explain``: one row per policy and quantity with `law` (n → ∞), `predicted` (at
        this n; for ‖∂loss/∂q‖ an estimate), `measured` and the 95% interval of the mean; None where theory is silent.

    >>> explain(d_k=4, n=64, draws=8, queries=4).spec["regime"]
    'below condensation'
    """
    require_sampling(d_k=d_k, n=n, draws=draws, queries=queries, seed=seed)
    factors = [float(scales.get(name).factor(scales.ScaleContext(d_k=d_k))) for name in POLICIES]
    sampled = sample_rows(factors, d_k=d_k, n=n, draws=draws, queries=queries, seed=seed)
    rows = []
    for policy, factor, measured in zip(POLICIES, factors, sampled, strict=True):
        rows += _compare(policy, factor, measured, d_k, n)
    regime = _regime(d_k, n)
    return Record(
        kind="explain",
        spec={"d_k": d_k, "n": n, "seed": seed, "draws": draws, "queries": queries, "regime": regime},
        tables={"explain": rows},
        curves={
            "law": _law_curve(n, float(theory.saturation_index(math.sqrt(d_k), n))),
            "ranked": _ranked_weights(factors, d_k, n, seed, queries),
            "map": _condensation_map(d_k, n),
        },
        reading=_read(rows, d_k, n, regime, draws * queries, seed),
    )


def _compare(policy: str, factor: float, measured: SampledRows, d_k: int, n: int) -> list[dict[str, Any]]:
    sigma = factor * math.sqrt(d_k)
    law = theory.condensation(sigma, n)
    exact = theory.expected_softmax(sigma, n)
    # The gradient at the output has dᵥ = dₖ standard normal entries, so its length is √dₖ.
    gradient = theory.gradient_scale(factor, d_k=d_k, n=n) * math.sqrt(d_k)
    predictions: dict[str, tuple[float | None, float | None]] = {
        "logit_std": (sigma, sigma),
        "saturation_index": (law.saturation_index, law.saturation_index),
        "entropy_ratio": (law.entropy_ratio, exact.entropy_ratio),
        "sum_p2": (law.sum_p2, exact.sum_p2),
        "jacobian_trace": (1.0 - law.sum_p2, 1.0 - exact.sum_p2),
        "grad_q": (None, gradient),
    }
    rows = []
    for quantity in _MEASURED:
        found = measured.mean(quantity)
        predicted = predictions.get(quantity, (None, None))
        rows.append(
            {
                "scale": policy,
                "quantity": quantity,
                "law": predicted[0],
                "predicted": predicted[1],
                "measured": found.value,
                "low": found.low,
                "high": found.high,
            }
        )
    return rows


def _regime(d_k: int, n: int) -> str:
    begins, nearly_one_hot = theory.unscaled_crossover(n)
    if d_k < begins:
        return "below condensation"
    return "condensing" if d_k < nearly_one_hot else "nearly one-hot"


def _law_curve(n: int, rho: float) -> dict[str, list[float | None]]:
    last = max(3.0, 1.15 * rho)
    grid = np.linspace(0.0, last, 121)
    # Closer where the curve bends; each exact point costs a quadrature.
    coarse = np.concatenate([np.linspace(0.0, 1.6, 13), np.geomspace(1.6, last, 8)[1:]])
    width = math.sqrt(2.0 * math.log(n))
    law = [theory.condensation(float(x) * width, n) for x in grid]
    exact = [theory.expected_softmax(float(x) * width, n) for x in coarse]
    return {
        "rho": grid.tolist(),
        "entropy_ratio": [point.entropy_ratio if point.trusted else None for point in law],
        "sum_p2": [point.sum_p2 if point.trusted else None for point in law],
        "exact_rho": coarse.tolist(),
        "exact_entropy_ratio": [point.entropy_ratio for point in exact],
        "exact_sum_p2": [point.sum_p2 for point in exact],
    }


def _ranked_weights(factors: Sequence[float], d_k: int, n: int, seed: int, queries: int) -> list[dict[str, Any]]:
    """The typical (median) weight by rank under each policy, for the first draw of the measurement."""
    q, k, v, _ = next(draw_attention(d_k=d_k, n=n, queries=queries, seed=seed))
    ranks = np.unique(np.geomspace(1, n, 60).round().astype(int))
    curves = []
    for policy, factor in zip(POLICIES, factors, strict=True):
        weights = attention(q, k, v, scale=factor, weights=True).weights
        assert weights is not None
        typical = np.median(-np.sort(-weights, axis=-1), axis=0)
        curves.append({"scale": policy, "rank": ranks.tolist(), "weight": typical[ranks - 1].tolist()})
    return curves


def _condensation_map(d_k: int, n: int) -> dict[str, Any]:
    last = max(65536.0, 4.0 * n)
    ns = np.unique(np.geomspace(2, last, 60).round().astype(int)).tolist()
    crossings = [theory.unscaled_crossover(count) for count in ns]
    return {
        "n": ns,
        "begins": [crossing.begins for crossing in crossings],
        "nearly_one_hot": [crossing.nearly_one_hot for crossing in crossings],
        "here": {"d_k": d_k, "n": n},
    }


def _read(rows: Sequence[dict[str, Any]], d_k: int, n: int, regime: str, count: int, seed: int) -> list[str]:
    by = {(row["scale"], row["quantity"]): row for row in rows}
    begins, nearly_one_hot = theory.unscaled_crossover(n)
    words = {
        "below condensation": f"below dₖ = 2 ln n = {begins:.1f}: unscaled rows are still spread and scaling "
        f"matters little",
        "condensing": f"between dₖ = 2 ln n = {begins:.1f} and 8 ln n = {nearly_one_hot:.1f}: unscaled rows "
        f"condense on few keys",
        "nearly one-hot": f"past dₖ = 8 ln n = {nearly_one_hot:.1f}: unscaled rows are nearly one-hot",
    }
    sentences = [f"dₖ = {d_k} with n = {n} keys lies {words[regime]} (E Σp² ≥ ½ is predicted from 8 ln n on)."]
    for policy, name in (("none", "No scaling"), ("sqrt", "1/√dₖ"), ("inverse", "1/dₖ")):
        at = {quantity: by[policy, quantity]["measured"] for quantity in _MEASURED}
        predicted = by[policy, "entropy_ratio"]["predicted"]
        sentences.append(
            f"{name}: σ = {at['logit_std']:.3g}, ρ = {at['saturation_index']:.2g}, entropy ratio "
            f"{at['entropy_ratio']:.3f} "
            f"(predicted {predicted:.3f}), Σp² {at['sum_p2']:.2g}, {at['effective_keys']:.4g} effective keys, "
            f"largest weight "
            f"{at['max_weight']:.2g}, mean ‖∂loss/∂q‖ {at['grad_q']:.3g}."
        )
    order = sorted(POLICIES, key=lambda policy: -by[policy, "grad_q"]["measured"])
    labels = {"none": "no scaling", "sqrt": "1/√dₖ", "inverse": "1/dₖ"}
    sentences.append(
        f"The mean gradient of the queries is largest with {labels[order[0]]} and smallest with {labels[order[-1]]}."
    )
    sentences.append(f"Measured on {count} rows, seed {seed}; intervals are 95% over independent draws.")
    return sentences
