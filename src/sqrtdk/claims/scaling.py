"""Claims about the scaling policies."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sqrtdk import attention, attention_gradients, scales, softmax
from sqrtdk.claims.claim import Effort, Finding, claim
from sqrtdk.claims.models import survey

Array = npt.NDArray[np.float64]


def _weights(effort: Effort, scale: object, d_k: int = 64) -> tuple[Array, Array]:
    """Weights of one head under a scale, and the raw scores q·k."""
    q, k = np.random.default_rng(effort.seed).standard_normal((2, 48, d_k))
    found = attention(q, k, k, scale=scale, weights=True).weights  # type: ignore[arg-type]
    assert found is not None
    return found, q @ k.T


def _divides_by(effort: Effort, policy: str, divisor: float, why: str) -> Finding:
    found, scores = _weights(effort, policy)
    apart = float(np.abs(found - softmax(scores / divisor)).max())
    other = float(np.abs(found - softmax(scores / (1.5 * divisor))).max())
    return Finding(
        f"{policy}: equal to softmax(q·k/{divisor:g}) within {apart:.0e}; "
        f"a divisor 1.5 times as large differs by {other:.1g}",
        "holds" if apart < 1e-12 and other > 1e-3 else "wrong",
        why,
        {"difference": apart, "difference_if_wrong": other},
    )


@claim("scale.none", "S0", "no scaling")
def _none(effort: Effort) -> Finding:
    return _divides_by(effort, "none", 1.0, "Policy `none`, at dₖ = 64.")


@claim("scale.sqrt", "all", "1/√dₖ, the default")
def _sqrt(effort: Effort) -> Finding:
    default, _ = _weights(effort, None)
    named, _ = _weights(effort, "sqrt")
    finding = _divides_by(effort, "sqrt", 8.0, "Policy `sqrt` at dₖ = 64, and what `scale=None` does, to the bit.")
    return finding if np.array_equal(default, named) else Finding("scale=None differs from sqrt", "wrong", finding.why)


@claim("scale.inverse", "S1", "1/dₖ")
def _inverse(effort: Effort) -> Finding:
    return _divides_by(effort, "inverse", 64.0, "Policy `inverse`, at dₖ = 64.")


@claim("scale.fixed", "S0", "any constant divisor (2, 10, …)")
def _fixed(effort: Effort) -> Finding:
    findings = [_divides_by(effort, f"fixed:{c}", float(c), "Policy `fixed` knows nothing of dₖ.") for c in (2, 10)]
    right = all(finding.verdict == "holds" for finding in findings)
    return Finding("; ".join(f.computed for f in findings), "holds" if right else "wrong", findings[0].why)


def _fit_log_temperature(effort: Effort, *, per_query: bool) -> tuple[float, float, Array, Array]:
    """Learn temperatures by gradient descent from the outputs of a teacher; first and last loss, truth and fit."""
    rng = np.random.default_rng(effort.seed)
    queries, d_k = 12, 16
    q, k, v = rng.standard_normal((queries, d_k)), rng.standard_normal((64, d_k)), rng.standard_normal((64, 8))
    truth = np.linspace(-1.0, 1.0, queries) if per_query else np.full(queries, -0.7)
    target = attention(q, k, v, scale=np.exp(-truth) / math.sqrt(d_k)).output
    fitted = np.zeros(queries)
    losses = []
    moment, square = np.zeros(queries), np.zeros(queries)
    for step in range(1, 401):
        scale = np.exp(-fitted) / math.sqrt(d_k)
        error = attention(q, k, v, scale=scale, statistics=False).output - target
        losses.append(0.5 * float((error**2).sum()))
        # ∂loss/∂log τ = −scale·∂loss/∂scale, with the scale's own gradient from the operation.
        slope = -scale * attention_gradients(q, k, v, error, scale=scale).scale
        slope = slope if per_query else np.full(queries, slope.sum())
        moment = 0.9 * moment + 0.1 * slope
        square = 0.99 * square + 0.01 * slope**2
        fitted = fitted - 0.05 * (moment / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-12)
    return losses[0], losses[-1], np.exp(truth), np.exp(fitted)


@claim(
    "scale.temperature",
    "S3",
    "a temperature τ in place of √dₖ, fixed or learned; τ < √dₖ sharper, τ > √dₖ softer",
)
def _temperature(effort: Effort) -> Finding:
    q, k = np.random.default_rng(effort.seed).standard_normal((2, 256, 64))
    ratios = []
    for t in (0.5, 1.0, 2.0):
        statistics = attention(q, k, k, scale=scales.Temperature(t)).statistics
        assert statistics is not None
        ratios.append(float(statistics.entropy_ratio.mean()))
    first, last, truth, fitted = _fit_log_temperature(effort, per_query=False)
    found = abs(math.log(fitted[0] / truth[0])) < 0.01 and last < 1e-3 * first
    return Finding(
        f"entropy ratio at τ = ½, 1, 2 × √dₖ: {ratios[0]:.3f}, {ratios[1]:.3f}, {ratios[2]:.3f}; learned from outputs: "
        f"τ/√dₖ {fitted[0]:.3f}, the teacher's {truth[0]:.3f}",
        "holds" if ratios[0] < ratios[1] < ratios[2] and found else "wrong",
        "Sharper and softer as said, and gradient descent on the scale's own gradient finds a teacher's temperature.",
        {"entropy_ratio": ratios, "learned": float(fitted[0]), "teacher": float(truth[0])},
    )


@claim("scale.query", "S3", "a temperature that depends on the query, learned, so that queries differ in sharpness")
def _query(effort: Effort) -> Finding:
    first, last, truth, fitted = _fit_log_temperature(effort, per_query=True)
    off = float(np.abs(np.log(fitted / truth)).max())
    return Finding(
        f"learned τ/√dₖ per query from {fitted.min():.2f} to {fitted.max():.2f}, the teacher's {truth.min():.2f} to "
        f"{truth.max():.2f}, worst off by {off:.1%}; loss {first:.3g} → {last:.1g}",
        "holds" if off < 0.05 and last < 1e-3 * first else "wrong",
        "A scale per query `[L]` and its gradient per row are enough to learn twelve different temperatures at once.",
        {"learned": fitted.tolist(), "teacher": truth.tolist(), "worst_log_error": off},
    )


@claim("scale.models", "S3", "modern LLMs universally use √dₖ")
def _models(effort: Effort) -> Finding:
    rows = survey()
    plain = [item.model for item in rows if item.is_sqrt]
    others = [
        f"{item.model} ({item.scale:.4g} for 1/√{item.d_k} = {item.d_k**-0.5:.4g})" for item in rows if not item.is_sqrt
    ]
    how = "measured in the models' code" if all(item.measured for item in rows) else "from published configurations"
    return Finding(
        f"{how}: 1/√dₖ in {len(plain)} of {len(rows)}: {', '.join(plain)}; not in {', '.join(others)}",
        "wrong" if others and plain else ("holds" if plain else "depends"),
        "The most common choice, not a universal one.",
        {
            "models": [
                {"model": item.model, "d_k": item.d_k, "scale": item.scale, "measured": item.measured} for item in rows
            ]
        },
    )
