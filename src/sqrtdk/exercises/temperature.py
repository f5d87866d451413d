"""Exercise 4: attention at temperatures τ below, at and above √dₖ: patterns, entropy, saturation, gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sqrtdk.attention import attention
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.exercises.gaussian_rows import SampledRows, draw_attention, require_sampling, sample_rows
from sqrtdk.records import Record

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
    draws: int = 64,
    seed: int = 0,
) -> Record:
    """Compare temperatures τ = t·√dₖ on the same Gaussian q, k and v: smaller is sharper, larger is softer.

    Args:
        d_k: length of queries and keys.
        n: keys per query.
        relatives: the t = τ/√dₖ to compare.
        queries: queries per draw, and rows of the pattern shown.
        draws: independent draws of q, k, v and the output's gradient.
        seed: of the random numbers.

    Returns:
        A record with the table ``temperature``, means over rows with the 95% interval over draws for the entropy ratio
        and ‖∂loss/∂q‖, and the weights of the first draw's queries in `curves`.

    >>> rows = temperature(draws=8).tables["temperature"]
    >>> [row["entropy_ratio"] for row in rows] == sorted(row["entropy_ratio"] for row in rows)
    True
    """
    require_sampling(d_k=d_k, n=n, draws=draws, queries=queries, seed=seed)
    _require_relatives(relatives)
    relatives = tuple(sorted(float(t) for t in relatives))
    multipliers = [1.0 / (t * math.sqrt(d_k)) for t in relatives]
    sampled = sample_rows(multipliers, d_k=d_k, n=n, draws=draws, queries=queries, seed=seed)
    rows = [_summarise(t, scale, measured) for t, scale, measured in zip(relatives, multipliers, sampled, strict=True)]
    q, k, v, _ = next(draw_attention(d_k=d_k, n=n, queries=queries, seed=seed))
    patterns = [attention(q, k, v, scale=scale, weights=True).weights for scale in multipliers]
    return Record(
        kind="temperature",
        spec={
            "d_k": d_k,
            "n": n,
            "relatives": list(relatives),
            "queries": queries,
            "draws": draws,
            "seed": seed,
        },
        tables={"temperature": rows},
        curves={
            "patterns": [
                {"relative": t, "weights": np.asarray(weights).tolist()}
                for t, weights in zip(relatives, patterns, strict=True)
            ]
        },
        sentences=_read(rows, d_k, n, draws * queries, seed),
        headline=f"entropy ratio at dₖ = {d_k}, n = {n}: "
        + ", ".join(f"{row['entropy_ratio']:.3f} (τ = {row['relative']:g}·√dₖ)" for row in rows)
        + ".",
    )


def _require_relatives(relatives: Sequence[float]) -> None:
    if not isinstance(relatives, Sequence) or isinstance(relatives, str):
        raise InvalidTypeError("relatives", f"must be a sequence of numbers, got {relatives!r}")
    if not relatives:
        raise InvalidValueError("relatives", "must name at least one temperature, got none")
    for relative in relatives:
        if isinstance(relative, str) or not (math.isfinite(relative) and relative > 0):
            raise InvalidValueError("relatives", f"must be positive and finite, got {relative!r}", each=True)
    if len(set(relatives)) < len(relatives):
        raise InvalidValueError("relatives", f"must not repeat a temperature, got {tuple(relatives)}")


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
            f"τ = {row['relative']:g}·√dₖ = {row['tau']:.3g}: entropy ratio {row['entropy_ratio']:.3f} (95% interval "
            f"{row['entropy_ratio_low']:.3f} to {row['entropy_ratio_high']:.3f}), saturation index "
            f"{row['saturation_index']:.2f}, largest weight {row['max_weight']:.2f}, "
            f"{row['effective_keys']:.1f} effective keys of {n}."
        )
        for row in rows
    }
    if len(rows) > 1:
        trace = "smaller" if sharp["jacobian_trace"] < soft["jacobian_trace"] else "not smaller"
        gradient = "larger" if sharp["grad_q"] > soft["grad_q"] else "smaller"
        sentences["sharpest to softest"] = (
            f"At the sharpest temperature the Jacobian's trace is {trace} than at the softest "
            f"({sharp['jacobian_trace']:.2f} "
            f"against {soft['jacobian_trace']:.2f}), while the mean gradient of the queries is {gradient} "
            f"({sharp['grad_q']:.2f} against {soft['grad_q']:.2f}): a small 1 − Σp² does not by itself mean a small "
            f"gradient."
            if trace == "smaller" and gradient == "larger"
            else f"From the sharpest to the softest temperature the Jacobian's trace goes from "
            f"{sharp['jacobian_trace']:.2f} to "
            f"{soft['jacobian_trace']:.2f} and the mean gradient of the queries from {sharp['grad_q']:.2f} to "
            f"{soft['grad_q']:.2f}."
        )
    sentences["samples"] = (
        f"Means over {count} rows at dₖ = {d_k}, seed {seed}; the intervals are over independent draws."
    )
    return sentences
