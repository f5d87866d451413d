"""Comparison of no scaling, 1/√dₖ and 1/dₖ at one size: measured, predicted exactly, and put into sentences."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sqrtdk import checks, theory
from sqrtdk.exercises.estimates import estimate_mean, judge_jointly
from sqrtdk.exercises.gaussian_rows import (
    POLICIES,
    SampledRows,
    choose_effort,
    many_key_limit,
    name_importance,
    policy_factors,
    rank_weights,
    require_sampling,
    sample_attention,
    sample_policies,
    state_crossing,
)
from sqrtdk.operation.attention import attention
from sqrtdk.records.record import Record
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import write_number, write_percent
from sqrtdk.wording.quantities import title_column

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
# The other predictions restate one of these: ρ is σ in other units, and 1 − Σp² follows from Σp².
_INDEPENDENT = ("logit_std", "entropy_ratio", "sum_p2")
_TERMS = (
    "σ is the standard deviation of the logits. ρ = σ/√(2 ln n) is the saturation index. H/ln n is the entropy ratio: "
    "1 for uniform weights, 0 for one-hot weights. Σp² is the sum of squared weights: 1/n for uniform weights, 1 for "
    "one-hot weights. 1 − Σp² is the trace of the softmax Jacobian. Effective keys are 1/Σp² of a row. "
    "‖∂loss/∂q‖ is the gradient of one query when the gradient at the output has standard "
    "normal entries"
)


def explain(
    d_k: int = 64, n: int = 1024, seed: int = 0, samples: int | None = None, queries: int | None = None
) -> Record:
    """Compare no scaling, 1/√dₖ and 1/dₖ for Gaussian attention with this dₖ and n, predicted and measured.

    q, k, v (dᵥ = dₖ) and the gradient at the output have independent standard normal entries. Predictions are exact
    averages at this dₖ and n (`theory.expected_rows`). The prediction for ‖∂loss/∂q‖ is its root mean square
    (`theory.gradient_scale`), and the measured mean is given as a multiple of it. The many-key limit n → ∞
    (`theory.condensation`) is given where its error is known: n ≥ 64, the entropy up to ρ = ½, Σp² from ρ = 2 on.

    Args:
        d_k: length of queries and keys.
        n: keys per query.
        seed: seed of the random numbers.
        samples: independent samples of q, k, v. None uses the number that `gradients` uses at this size.
        queries: queries per sample. None uses the number that `gradients` uses at this size.

    Returns:
        A record with three tables. ``side_by_side`` has one row per quantity and two columns per scaling: the measured
        value, and the prediction with whether it lies in the 95% interval of the measurement. At dₖ = 1, where all
        scales are 1, it has the columns of 1/√dₖ alone. ``explain`` has one row per policy and quantity with `limit`
        (n → ∞), `predicted`, `measured`, the interval, `inside` and, for the gradient, `ratio` (measured mean over
        predicted root mean square); a value that theory does not give is None. ``joint`` judges the predictions at
        once, because they share their samples.

    >>> explain(d_k=4, n=64, samples=8, queries=4).spec["regime"]
    'spread'
    """
    checks.integer("d_k", d_k, 1)
    checks.integer("n", n, 2)
    usual = choose_effort(d_k, n)
    samples, queries = (usual.samples if samples is None else samples), (usual.queries if queries is None else queries)
    require_sampling(d_k=d_k, n=n, samples=samples, queries=queries, seed=seed)
    sampled = sample_policies(d_k=d_k, n=n, samples=samples, queries=queries, seed=seed)
    factors = dict(zip(POLICIES, policy_factors(d_k), strict=True))
    rows = [row for policy in POLICIES for row in _compare(policy, factors[policy], sampled[policy], d_k)]
    joint = _judge(rows, sampled, d_k)
    sentences = _read(rows, joint, sampled, d_k, n)
    return Record(
        kind="explain",
        spec={"d_k": d_k, "n": n, "seed": seed, "samples": samples, "queries": queries, "regime": _name_regime(d_k, n)},
        tables={"side_by_side": _put_side_by_side(rows, d_k), "explain": rows, "joint": [joint]},
        curves={
            "limit": _limit_curve(n, float(theory.saturation_index(math.sqrt(d_k), n))),
            "ranked": _ranked_weights(list(factors.values()), d_k, n, seed, queries),
            "map": _map_concentration(d_k, n),
        },
        reading=[
            *sentences,
            f"Measured on {samples * queries} rows, seed {seed}; 95% intervals are over {samples} independent samples."
            + _warn_of_few_rows(samples * queries, math.prod(choose_effort(d_k, n, budget=1))),
            f"Terms: {_TERMS}.",
        ],
        headline=sentences[0],
    )


def _warn_of_few_rows(rows: int, fewest: int) -> str:
    return (
        ""
        if rows >= fewest
        else f" With fewer than {fewest} rows they contain the true value less often than in 95% of seeds."
    )


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
    limit = many_key_limit(sigma, n)
    rows = []
    for quantity in _QUANTITIES:
        estimate, predicted = measured.mean(quantity), predictions.get(quantity)
        estimated = quantity == "grad_q"
        rows.append(
            {
                "scale": policy,
                "quantity": quantity,
                "limit": limit.get(quantity),
                "predicted": predicted,
                "measured": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "inside": None if predicted is None or estimated else estimate.holds(predicted),
                "ratio": estimate.value / predicted if estimated and predicted else None,
            }
        )
    return rows


def _list_different(d_k: int) -> tuple[str, ...]:
    """Return the policies that differ at this dₖ: at 1 all scales are 1, and one column or prediction says all."""
    return ("sqrt",) if d_k == 1 else POLICIES


def _put_side_by_side(rows: Sequence[Mapping[str, Any]], d_k: int) -> list[dict[str, Any]]:
    by = {(row["scale"], row["quantity"]): row for row in rows}
    table = []
    for quantity in _QUANTITIES:
        line: dict[str, Any] = {"quantity": quantity}
        for policy in _list_different(d_k):
            row = by[policy, quantity]
            line |= {policy: row["measured"], f"{policy}_predicted": _state_prediction(row)}
        table.append(line)
    return table


def _state_prediction(row: Mapping[str, Any]) -> str | None:
    if row["predicted"] is None:
        return None
    if row["ratio"] is not None:
        return f"rms {write_number(row['predicted'], 3)} (mean {write_number(row['ratio'], 2)} × that)"
    return f"{write_number(row['predicted'])} {'inside' if row['inside'] else 'outside'}"


def _name_regime(d_k: int, n: int) -> str:
    if n == 2:
        return "two keys"
    if d_k >= theory.concentration_crossing(n):
        return "concentrated"
    return "spread" if d_k < theory.crossover_without_scaling(n).begins else "concentrating"


def _limit_curve(n: int, rho: float) -> dict[str, list[float | None]]:
    width = math.sqrt(2.0 * math.log(n))
    grid = np.linspace(0.0, max(3.0, 1.15 * rho), 121)
    limit = [many_key_limit(float(x) * width, n) for x in grid]
    exact = [theory.expected_softmax(float(x) * width, n) for x in grid]
    return {
        "rho": grid.tolist(),
        "entropy_ratio": [point.get("entropy_ratio") for point in limit],
        "sum_p2": [point.get("sum_p2") for point in limit],
        "exact_rho": grid.tolist(),
        "exact_entropy_ratio": [point.entropy_ratio for point in exact],
        "exact_sum_p2": [point.sum_p2 for point in exact],
    }


def _ranked_weights(factors: Sequence[float], d_k: int, n: int, seed: int, queries: int) -> list[dict[str, Any]]:
    """Return the typical (median) weight by rank under each policy, for the first sample of the measurement."""
    q, k, v, _ = next(sample_attention(d_k=d_k, n=n, queries=queries, seed=seed))
    curves = []
    for policy, factor in zip(POLICIES, factors, strict=True):
        weights = attention(q, k, v, scale=factor, weights=True).weights
        assert weights is not None
        curves.append({"scale": policy, **rank_weights(weights)})
    return curves


def _map_concentration(d_k: int, n: int) -> dict[str, Any]:
    last = max(65536.0, 4.0 * n)
    ns = np.unique(np.geomspace(2, last, 60).round().astype(int)).tolist()
    crossings = [theory.crossover_without_scaling(count) for count in ns]
    exact = [*dict.fromkeys([3, *np.geomspace(4, last, 8).round().astype(int).tolist()])]
    return {
        "n": ns,
        "begins": [crossing.begins for crossing in crossings],
        "concentrated": [crossing.concentrated for crossing in crossings],
        "exact_n": exact,
        "concentrated_from": [theory.concentration_crossing(count) for count in exact],
        "here": {"d_k": d_k, "n": n},
    }


def _list_judged(rows: Sequence[Mapping[str, Any]], d_k: int) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["quantity"] in _INDEPENDENT and row["scale"] in _list_different(d_k)]


def _judge(rows: Sequence[Mapping[str, Any]], sampled: Mapping[str, SampledRows], d_k: int) -> dict[str, Any]:
    """Judge at once the predictions that do not restate each other."""
    judged = _list_judged(rows, d_k)
    samples, predictions = [], []
    for row in judged:
        # σ is the root of the mean square of the logits, and a mean is what is judged.
        of_sigma = row["quantity"] == "logit_std"
        samples.append(getattr(sampled[row["scale"]], "logit_square" if of_sigma else row["quantity"]).mean(axis=1))
        predictions.append(row["predicted"] ** 2 if of_sigma else row["predicted"])
    return {
        "predictions": len(judged),
        "inside": sum(row["inside"] for row in judged),
        **judge_jointly(np.stack(samples, axis=1), predictions)._asdict(),
    }


def _read(
    rows: Sequence[Mapping[str, Any]], joint: Mapping[str, Any], sampled: Mapping[str, SampledRows], d_k: int, n: int
) -> list[str]:
    """Return sentences that follow from the numbers, the short answer first."""
    by = {(row["scale"], row["quantity"]): row for row in rows}
    keys = {policy: by[policy, "effective_keys"]["measured"] for policy in POLICIES}
    sum_p2 = by["none", "sum_p2"]
    way = (sum_p2["predicted"] - 1 / n) / (1 - 1 / n)
    where = "" if d_k == 1 else "Without scaling "
    mean_keys, keys_of_mean = (write_number(value, 3) for value in (keys["none"], 1.0 / sum_p2["measured"]))
    return [
        _conclude(keys, d_k, n),
        state_crossing(n, d_k),
        f"{where}Σp² is {write_number(sum_p2['measured'], 3)} (predicted {write_number(sum_p2['predicted'], 3)}). The "
        f"prediction is {write_percent(way)} of the way from uniform weights ({write_number(1 / n, 3)}) to one-hot "
        "weights (1)."
        + (
            f" Effective keys are the mean of 1/Σp² over rows ({mean_keys}), not 1 over the mean Σp² ({keys_of_mean})."
            if mean_keys != keys_of_mean
            else ""
        ),
        _read_gradients(by, sampled, d_k),
        _read_predictions(rows, joint, d_k),
    ]


def _read_gradients(
    by: Mapping[tuple[str, str], Mapping[str, Any]], sampled: Mapping[str, SampledRows], d_k: int
) -> str:
    """Compare each policy's mean gradient with that of 1/√dₖ, sample by sample."""
    own = by["sqrt", "grad_q"]["measured"]
    if d_k == 1:
        return f"The mean gradient of a query is {write_number(own, 3)}."
    sentences = [f"The mean gradient of a query is {write_number(own, 3)} with 1/√dₖ."]
    for policy in ("none", "inverse"):
        apart = estimate_mean((sampled[policy].grad_q - sampled["sqrt"].grad_q).mean(axis=1))
        measured = by[policy, "grad_q"]["measured"]
        same = " (not distinguishable from 1)" if apart.holds(0.0) else ""
        sentences.append(
            f"With {name_policy(policy)} it is {write_number(measured, 3)}, which is {write_number(measured / own, 3)} "
            f"times as large{same}."
        )
    return " ".join(sentences)


def _read_predictions(rows: Sequence[Mapping[str, Any]], joint: Mapping[str, Any], d_k: int) -> str:
    outside = [row for row in _list_judged(rows, d_k) if not row["inside"]]
    named = ", ".join(f"{title_column(row['quantity'])} with {name_policy(row['scale'])}" for row in outside)
    # A probability too small for a float is not zero.
    chance = write_percent(max(joint["probability"], sys.float_info.min))
    return (
        f"{joint['inside']} of {joint['predictions']} predictions (σ, H/ln n and Σp²) lie inside the 95% interval of "
        f"their measurement{f'; outside: {named}' if outside else ''}. All intervals come from the same samples, so "
        f"they are not {joint['predictions']} independent tests. The largest distance is "
        f"{write_number(joint['standard_errors'], 2)} standard errors. If all predictions were exact, {chance} of "
        "seeds would show a distance as large."
    )


def _conclude(keys: Mapping[str, float], d_k: int, n: int) -> str:
    if d_k == 1:
        return (
            f"At dₖ = 1 all three scales are 1, so they do not differ. Of {n} keys a query attends to about "
            f"{write_number(keys['sqrt'], 3)} (effective keys)."
        )
    ratio = keys["sqrt"] / keys["none"]
    importance = name_importance(ratio)
    times, much = (write_number(ratio, 3), "") if importance == "much" else (f"{ratio:.2f}", f" {importance}")
    others = " and ".join(
        f"{write_number(keys[policy], 3)} with {name_policy(policy)}" for policy in ("none", "inverse")
    )
    return (
        f"Of {n} keys a query attends to about {write_number(keys['sqrt'], 3)} with 1/√dₖ, {others} (effective keys). "
        f"1/√dₖ keeps {times} times as many keys as no scaling: at this size scaling matters{much}."
    )
