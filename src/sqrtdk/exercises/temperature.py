"""Exercise 4: attention at temperatures τ below, at and above √dₖ, by pattern, entropy, saturation and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sqrtdk import checks
from sqrtdk.exercises.gaussian_rows import SampledRows, require_sampling, sample_attention, sample_rows
from sqrtdk.operation.attention import attention
from sqrtdk.records.record import Record
from sqrtdk.wording.numbers import write_number

_COLUMNS = (
    "logit_std",
    "saturation_index",
    "entropy_ratio",
    "effective_keys",
    "max_weight",
    "jacobian_trace",
    "grad_q",
    "grad_k",
)


def temperature(
    d_k: int = 64,
    n: int = 32,
    relatives: Sequence[float] = (0.5, 1.0, 2.0),
    queries: int = 16,
    samples: int = 64,
    seed: int = 0,
) -> Record:
    """Compare temperatures τ = t·√dₖ on the same Gaussian q, k and v: smaller is sharper, larger is softer.

    Args:
        d_k: length of queries and keys.
        n: keys per query.
        relatives: the t = τ/√dₖ to compare.
        queries: queries per sample, and rows of the pattern shown.
        samples: independent samples of q, k, v and the output's gradient.
        seed: seed of the random numbers.

    Returns:
        A record with the table ``temperature``: means over rows, with 95% intervals over samples for the entropy ratio
        and ‖∂loss/∂q‖. `curves` has the weights of the first sample's queries.

    >>> rows = temperature(samples=8).tables["temperature"]
    >>> [row["entropy_ratio"] for row in rows] == sorted(row["entropy_ratio"] for row in rows)
    True
    """
    require_sampling(d_k=d_k, n=n, samples=samples, queries=queries, seed=seed)
    checks.distinct("relatives", relatives, "temperature")
    for relative in relatives:
        checks.number("relatives", relative, above=0.0, each=True)
    relatives = tuple(sorted(float(t) for t in relatives))
    multipliers = [1.0 / (t * math.sqrt(d_k)) for t in relatives]
    sampled = sample_rows(multipliers, d_k=d_k, n=n, samples=samples, queries=queries, seed=seed)
    rows = [_summarise(t, scale, measured) for t, scale, measured in zip(relatives, multipliers, sampled, strict=True)]
    q, k, v, _ = next(sample_attention(d_k=d_k, n=n, queries=queries, seed=seed))
    patterns = [attention(q, k, v, scale=scale, weights=True).weights for scale in multipliers]
    return Record(
        kind="temperature",
        spec={
            "d_k": d_k,
            "n": n,
            "relatives": list(relatives),
            "queries": queries,
            "samples": samples,
            "seed": seed,
        },
        tables={"temperature": rows},
        curves={
            "patterns": [
                {"relative": t, "weights": np.asarray(weights).tolist()}
                for t, weights in zip(relatives, patterns, strict=True)
            ]
        },
        sentences=_read(rows, d_k, n, samples * queries, seed),
        headline=f"entropy ratio at dₖ = {d_k}, n = {n}: "
        + ", ".join(f"{row['entropy_ratio']:.3f} (τ = {row['relative']:g}·√dₖ)" for row in rows)
        + ".",
    )


def _summarise(relative: float, scale: float, measured: SampledRows) -> dict[str, Any]:
    row: dict[str, Any] = {"relative": relative, "tau": 1.0 / scale, "factor": scale}
    for name in _COLUMNS:
        estimate = measured.mean(name)
        row[name] = estimate.value
        if name in ("entropy_ratio", "grad_q"):
            row |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return row


def _read(rows: Sequence[dict[str, Any]], d_k: int, n: int, count: int, seed: int) -> dict[str, str]:
    sharp, soft = rows[0], rows[-1]
    sentences = {
        f"relative {row['relative']}": (
            f"τ = {row['relative']:g}·√dₖ = {write_number(row['tau'], 3)}: entropy ratio {row['entropy_ratio']:.3f} "
            f"(95% interval {row['entropy_ratio_low']:.3f} to {row['entropy_ratio_high']:.3f}), saturation index "
            f"{row['saturation_index']:.2f}, largest weight {row['max_weight']:.2f}, {row['effective_keys']:.1f} "
            f"effective keys of {n}."
        )
        for row in rows
    }
    if len(rows) > 1:
        is_trace_misleading = sharp["jacobian_trace"] < soft["jacobian_trace"] and sharp["grad_q"] > soft["grad_q"]
        sentences["sharpest to softest"] = (
            f"The Jacobian trace is {sharp['jacobian_trace']:.2f} at τ = {write_number(sharp['tau'], 3)} and "
            f"{soft['jacobian_trace']:.2f} at τ = {write_number(soft['tau'], 3)}. The mean gradient of a query is "
            f"{sharp['grad_q']:.2f} at τ = {write_number(sharp['tau'], 3)} and {soft['grad_q']:.2f} at τ = "
            f"{write_number(soft['tau'], 3)}."
            + (" A smaller Jacobian trace does not by itself mean a smaller gradient." if is_trace_misleading else "")
        )
    sentences["samples"] = (
        f"Means over {count} rows at dₖ = {d_k}, seed {seed}; the intervals are over independent samples."
    )
    return sentences
