"""No scaling, 1/√dₖ and 1/dₖ at one size: exact predictions beside the measurement, and sentences that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sqrtdk import theory
from sqrtdk.attention import attention
from sqrtdk.exercises.estimates import estimate_mean, judge_jointly
from sqrtdk.exercises.gaussian_rows import (
    POLICIES,
    SampledRows,
    choose_effort,
    draw_attention,
    many_key_law,
    name_importance,
    policy_factors,
    rank_weights,
    require_count,
    require_sampling,
    sample_policies,
    state_crossing,
)
from sqrtdk.records import Record
from sqrtdk.setting_names import name_policy

_QUANTITIES = (
    "logit_std",
    "saturation_index",
    "entropy_ratio",
    "sum_p2",
    "jacobian_trace",
    "effective_keys",
    "max_weight",
    "grad_q",
)
# The others that are predicted restate one of these: ρ is σ in other units, 1 − Σp² is Σp².
_INDEPENDENT = ("logit_std", "entropy_ratio", "sum_p2")
_WORDS = (
    "σ is the standard deviation of the logits; ρ = σ/√(2 ln n) the saturation index; H/ln n the entropy ratio, 1 for "
    "uniform weights and 0 for one-hot ones; Σp² the sum of squared weights, 1/n for uniform and 1 for one-hot; "
    "1 − Σp² the trace of the softmax Jacobian; effective keys 1/Σp² of each row; ‖∂loss/∂q‖ the gradient that one "
    "query gets from a gradient of standard normal entries at the output"
)


def explain(
    d_k: int = 64, n: int = 1024, seed: int = 0, draws: int | None = None, queries: int | None = None
) -> Record:
    """Say what none, √dₖ and dₖ do to Gaussian attention with this dₖ and n, predicted and measured.

    q, k, v (dᵥ = dₖ) and the gradient at the output have independent standard normal entries. Predictions are exact
    averages at this dₖ and n (`theory.expected_rows`); that of ‖∂loss/∂q‖ is its root mean square
    (`theory.gradient_scale`), and the measured mean stands as a multiple of it. The many-key limit n → ∞
    (`theory.condensation`) is given where it states its error: n ≥ 64, the entropy up to ρ = ½, Σp² from ρ = 2 on.

    Args:
        d_k: length of queries and keys.
        n: keys per query.
        seed: of the random numbers.
        draws: independent draws of q, k, v; None takes as many as the gradients of this size are measured on.
        queries: queries per draw; None likewise.

    Returns:
        A record with the tables ``side_by_side`` (a row per quantity, the scalings as columns, each with its
        prediction and whether it lies in the 95% interval of the measurement), ``explain``: one row per policy and
        quantity with `law`, `predicted`, `measured`, the interval, `inside` and, for the gradient, `ratio` (measured
        mean over predicted root mean square), None where theory is silent; and ``joint``: the predictions judged at
        once, as they share their draws.

    >>> explain(d_k=4, n=64, draws=8, queries=4).spec["regime"]
    'spread'
    """
    require_count("d_k", d_k, 1)
    require_count("n", n, 2)
    usual = choose_effort(d_k, n)
    draws, queries = (usual.draws if draws is None else draws), (usual.queries if queries is None else queries)
    require_sampling(d_k=d_k, n=n, draws=draws, queries=queries, seed=seed)
    sampled = sample_policies(d_k=d_k, n=n, draws=draws, queries=queries, seed=seed)
    factors = dict(zip(POLICIES, policy_factors(d_k), strict=True))
    rows = [row for policy in POLICIES for row in _compare(policy, factors[policy], sampled[policy], d_k)]
    joint = _judge(rows, sampled)
    sentences = _read(rows, joint, sampled, d_k, n)
    return Record(
        kind="explain",
        spec={"d_k": d_k, "n": n, "seed": seed, "draws": draws, "queries": queries, "regime": _name_regime(d_k, n)},
        tables={"side_by_side": _put_side_by_side(rows), "explain": rows, "joint": [joint]},
        curves={
            "law": _law_curve(n, float(theory.saturation_index(math.sqrt(d_k), n))),
            "ranked": _ranked_weights(list(factors.values()), d_k, n, seed, queries),
            "map": _condensation_map(d_k, n),
        },
        reading=[
            *sentences[:-1],
            f"Measured on {draws * queries} rows, seed {seed}; intervals are 95% over {draws} independent draws."
            + _warn_of_few_rows(draws * queries, math.prod(choose_effort(d_k, n, budget=1))),
            f"Words: {_WORDS}.",
            sentences[-1],
        ],
        headline=sentences[-1],
    )


def _warn_of_few_rows(rows: int, fewest: int) -> str:
    return "" if rows >= fewest else f" With fewer than {fewest} rows they may hold the truth less often than that."


def _compare(policy: str, factor: float, measured: SampledRows, d_k: int) -> list[dict[str, Any]]:
    n = measured.n
    sigma = factor * math.sqrt(d_k)
    exact = theory.expected_rows(factor, d_k, n)
    predictions = {
        "logit_std": sigma,
        "saturation_index": float(theory.saturation_index(sigma, n)),
        "entropy_ratio": exact.entropy_ratio,
        "sum_p2": exact.sum_p2,
        "jacobian_trace": 1.0 - exact.sum_p2,
        # The gradient at the output has dᵥ = dₖ standard normal entries: the mean square of its length is dₖ.
        "grad_q": theory.gradient_scale(factor, d_k=d_k, n=n) * math.sqrt(d_k),
    }
    law = many_key_law(sigma, n)
    rows = []
    for quantity in _QUANTITIES:
        estimate, predicted = measured.mean(quantity), predictions.get(quantity)
        estimated = quantity == "grad_q"
        rows.append(
            {
                "scale": policy,
                "quantity": quantity,
                "law": law.get(quantity),
                "predicted": predicted,
                "measured": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "inside": None if predicted is None or estimated else estimate.holds(predicted),
                "ratio": estimate.value / predicted if estimated and predicted else None,
            }
        )
    return rows


def _put_side_by_side(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by = {(row["scale"], row["quantity"]): row for row in rows}
    table = []
    for quantity in _QUANTITIES:
        line: dict[str, Any] = {"quantity": quantity}
        for policy in POLICIES:
            row = by[policy, quantity]
            line |= {policy: row["measured"], f"{policy}_predicted": _state_prediction(row)}
        table.append(line)
    return table


def _state_prediction(row: Mapping[str, Any]) -> str | None:
    if row["predicted"] is None:
        return None
    if row["ratio"] is not None:
        return f"rms {row['predicted']:.3g} (mean {row['ratio']:.2g} × that)"
    return f"{row['predicted']:.4g} {'inside' if row['inside'] else 'outside'}"


def _name_regime(d_k: int, n: int) -> str:
    if n == 2:
        return "two keys"
    if d_k >= theory.concentration_crossing(n):
        return "concentrated"
    return "spread" if d_k < theory.unscaled_crossover(n).begins else "concentrating"


def _law_curve(n: int, rho: float) -> dict[str, list[float | None]]:
    width = math.sqrt(2.0 * math.log(n))
    grid = np.linspace(0.0, max(3.0, 1.15 * rho), 121)
    law = [many_key_law(float(x) * width, n) for x in grid]
    exact = [theory.expected_softmax(float(x) * width, n) for x in grid]
    return {
        "rho": grid.tolist(),
        "entropy_ratio": [point.get("entropy_ratio") for point in law],
        "sum_p2": [point.get("sum_p2") for point in law],
        "exact_rho": grid.tolist(),
        "exact_entropy_ratio": [point.entropy_ratio for point in exact],
        "exact_sum_p2": [point.sum_p2 for point in exact],
    }


def _ranked_weights(factors: Sequence[float], d_k: int, n: int, seed: int, queries: int) -> list[dict[str, Any]]:
    """The typical (median) weight by rank under each policy, for the first draw of the measurement."""
    q, k, v, _ = next(draw_attention(d_k=d_k, n=n, queries=queries, seed=seed))
    curves = []
    for policy, factor in zip(POLICIES, factors, strict=True):
        weights = attention(q, k, v, scale=factor, weights=True).weights
        assert weights is not None
        curves.append({"scale": policy, **rank_weights(weights)})
    return curves


def _condensation_map(d_k: int, n: int) -> dict[str, Any]:
    last = max(65536.0, 4.0 * n)
    ns = np.unique(np.geomspace(2, last, 60).round().astype(int)).tolist()
    crossings = [theory.unscaled_crossover(count) for count in ns]
    exact = [*dict.fromkeys([3, *np.geomspace(4, last, 8).round().astype(int).tolist()])]
    return {
        "n": ns,
        "begins": [crossing.begins for crossing in crossings],
        "nearly_one_hot": [crossing.nearly_one_hot for crossing in crossings],
        "exact_n": exact,
        "concentrated_from": [theory.concentration_crossing(count) for count in exact],
        "here": {"d_k": d_k, "n": n},
    }


def _judge(rows: Sequence[Mapping[str, Any]], sampled: Mapping[str, SampledRows]) -> dict[str, Any]:
    """The predictions that do not restate each other, judged at once."""
    judged = [row for row in rows if row["quantity"] in _INDEPENDENT]
    draws, predictions = [], []
    for row in judged:
        # σ is the root of the mean square of the logits, and a mean is what is judged.
        of_sigma = row["quantity"] == "logit_std"
        draws.append(getattr(sampled[row["scale"]], "logit_square" if of_sigma else row["quantity"]).mean(axis=1))
        predictions.append(row["predicted"] ** 2 if of_sigma else row["predicted"])
    return {
        "predictions": len(judged),
        "inside": sum(row["inside"] for row in judged),
        **judge_jointly(np.stack(draws, axis=1), predictions)._asdict(),
    }


def _read(
    rows: Sequence[Mapping[str, Any]], joint: Mapping[str, Any], sampled: Mapping[str, SampledRows], d_k: int, n: int
) -> list[str]:
    """Sentences that follow from the numbers; the last one says it all."""
    by = {(row["scale"], row["quantity"]): row for row in rows}
    keys = {policy: by[policy, "effective_keys"]["measured"] for policy in POLICIES}
    sum_p2 = by["none", "sum_p2"]
    way = (sum_p2["predicted"] - 1 / n) / (1 - 1 / n)
    return [
        state_crossing(n, d_k),
        f"Unscaled rows have Σp² = {sum_p2['predicted']:.3g} by prediction and {sum_p2['measured']:.3g} measured: "
        f"{100 * way:.0f} % of the way from uniform (1/n = {1 / n:.3g}) to one-hot (1).",
        _read_gradients(by, sampled),
        _read_predictions(rows, joint),
        _conclude(keys, d_k, n),
    ]


def _read_gradients(by: Mapping[tuple[str, str], Mapping[str, Any]], sampled: Mapping[str, SampledRows]) -> str:
    """Each policy's mean gradient beside that of 1/√dₖ, compared draw by draw."""
    parts = []
    for policy in ("none", "inverse"):
        apart = estimate_mean((sampled[policy].grad_q - sampled["sqrt"].grad_q).mean(axis=1))
        ratio = by[policy, "grad_q"]["measured"] / by["sqrt", "grad_q"]["measured"]
        same = " (not distinguishable)" if apart.holds(0.0) else ""
        parts.append(f"{ratio:.3g} times that with {name_policy(policy)}{same}")
    return (
        f"The mean gradient of the queries is {by['sqrt', 'grad_q']['measured']:.3g} with 1/√dₖ, {' and '.join(parts)}."
    )


def _read_predictions(rows: Sequence[Mapping[str, Any]], joint: Mapping[str, Any]) -> str:
    outside = [row for row in rows if row["quantity"] in _INDEPENDENT and not row["inside"]]
    titles = {"logit_std": "σ", "entropy_ratio": "H/ln n", "sum_p2": "Σp²"}
    named = ", ".join(f"{titles[row['quantity']]} with {name_policy(row['scale'])}" for row in outside)
    probability = joint["probability"]
    chance = f"{100 * probability:.2g} %" if probability >= 0.001 else "less than 0.1 %"
    return (
        f"Of {joint['predictions']} predictions (σ, H/ln n and Σp²) {joint['inside']} lie inside the 95% interval of "
        f"their measurement{f'; outside: {named}' if outside else ''}. The largest distance is "
        f"{joint['standard_errors']:.2g} standard errors; if all predictions are exact, {chance} of seeds have one as "
        "large, as the measurements share their draws."
    )


def _conclude(keys: Mapping[str, float], d_k: int, n: int) -> str:
    ratio = keys["sqrt"] / keys["none"]
    if d_k == 1:
        verdict = "the three are the same, as √1 = 1: there is nothing to scale"
    else:
        importance = name_importance(ratio)
        times, much = (f"{ratio:.3g}", "") if importance == "much" else (f"{ratio:.2f}", f" {importance}")
        verdict = f"{times} times as many with 1/√dₖ as without: at this size scaling matters{much}"
    listed = ", ".join(f"{_name_count(keys[policy])} with {name_policy(policy)}" for policy in POLICIES)
    return f"In short: of {n} keys a query attends to about {listed} (effective keys); {verdict}."


def _name_count(keys: float) -> str:
    return f"{keys:.3g}" if keys < 100 else f"{keys:.0f}"
