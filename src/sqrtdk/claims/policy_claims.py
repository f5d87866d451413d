"""Claims about the scaling policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk import attention, scales, softmax
from sqrtdk.claims.claim import Finding, Verdict, claim
from sqrtdk.claims.evidence import Evidence
from sqrtdk.claims.learning_claims import explain_doubt, require_runs, solves_more_by
from sqrtdk.display import count
from sqrtdk.errors import SqrtdkError
from sqrtdk.families import is_usual, load_zoo
from sqrtdk.lab.ablation import show_difference, show_loss
from sqrtdk.lab.intervals import share_difference

Array = npt.NDArray[np.float64]
_MOST_NAMED = 12


def _weights(evidence: Evidence, scale: object, d_k: int = 64) -> tuple[Array, Array]:
    """Weights of one head under a scale, and the raw scores q·k."""
    q, k = np.random.default_rng(evidence.seed).standard_normal((2, 48, d_k))
    weights = attention(q, k, k, scale=scale, weights=True).weights  # type: ignore[arg-type]
    assert weights is not None
    return weights, q @ k.T


def _divides_by(evidence: Evidence, policy: str, divisor: float, why: str) -> Finding:
    weights, scores = _weights(evidence, policy)
    apart = float(np.abs(weights - softmax(scores / divisor)).max())
    other = float(np.abs(weights - softmax(scores / (1.5 * divisor))).max())
    return Finding(
        f"{policy}: equal to softmax(q·k/{divisor:g}) within {apart:.0e}; "
        f"a divisor 1.5 times as large differs by {other:.1g}",
        "holds" if apart < 1e-12 and other > 1e-3 else "wrong",
        why,
        {"difference": apart, "difference_if_wrong": other},
    )


@claim("scale.none", "S0", "no scaling")
def _none(evidence: Evidence) -> Finding:
    return _divides_by(evidence, "none", 1.0, "Policy `none`, at dₖ = 64.")


@claim("scale.sqrt", "all", "1/√dₖ, the default")
def _sqrt(evidence: Evidence) -> Finding:
    default, _ = _weights(evidence, None)
    named, _ = _weights(evidence, "sqrt")
    finding = _divides_by(evidence, "sqrt", 8.0, "Policy `sqrt` at dₖ = 64, and what `scale=None` does, to the bit.")
    return finding if np.array_equal(default, named) else Finding("scale=None differs from sqrt", "wrong", finding.why)


@claim("scale.inverse", "S1", "1/dₖ")
def _inverse(evidence: Evidence) -> Finding:
    return _divides_by(evidence, "inverse", 64.0, "Policy `inverse`, at dₖ = 64.")


@claim("scale.fixed", "S0", "any constant divisor (2, 10, …)")
def _fixed(evidence: Evidence) -> Finding:
    findings = [_divides_by(evidence, f"fixed:{c}", float(c), "Policy `fixed` knows nothing of dₖ.") for c in (2, 10)]
    right = all(finding.verdict == "holds" for finding in findings)
    return Finding("; ".join(f.computed for f in findings), "holds" if right else "wrong", findings[0].why)


@dataclass(frozen=True)
class _Trained:
    """How a learned scale did beside √dₖ in the ablation, and what it learned."""

    row: Mapping[str, Any]
    beside: Mapping[str, Any]
    paired: Mapping[str, Any]
    runs: list[Mapping[str, Any]]

    def judge(self, learned: bool) -> Verdict:
        """Whether the scale learned something, unless the seeds are too few or it solves the task less often."""
        n, others = self.row["n"], self.beside["n"]
        # With so few seeds not even a scale that fails in every run would be seen to fail.
        if self.beside["solved_fraction"] < 0.5 or share_difference(n, n, 0, others).low <= 0.0:
            return "undecided"
        return "holds" if learned and not self.is_worse else "depends"

    @property
    def is_worse(self) -> bool:
        """Whether the task is solved less often than with √dₖ, by the 95% interval of the difference."""
        return solves_more_by(self.beside, self.row).low > 0.0

    @property
    def verdict_on_learning(self) -> str:
        """Whether it does as well as √dₖ, in words."""
        less = "the task is solved less often than with √dₖ" if self.is_worse else "the task is solved about as often"
        return f"{less}, and beside √dₖ {show_difference(self.paired)} ({self.paired['outcome']})"

    @property
    def words(self) -> str:
        """Losses, how often the task was solved, and the pairs."""
        row, beside, paired = self.row, self.beside, self.paired
        return (
            f"recall, {count(row['n'], 'seed')}: median loss {show_loss(row['final_loss_median'])} "
            f"({row['solved_fraction']:.0%} solved), with √dₖ {show_loss(beside['final_loss_median'])} "
            f"({beside['solved_fraction']:.0%}), above it in {paired['higher']} of {count(paired['n'], 'pair')}"
        )

    @property
    def numbers(self) -> dict[str, Any]:
        """What scripts may want."""
        shown = ("final_loss_median", "solved_fraction", "n", "temperature_median", "temperature_range")
        return {
            **{name: self.row[name] for name in (*shown, "temperature_spread_median")},
            "sqrt_final_loss_median": self.beside["final_loss_median"],
            "sqrt_solved_fraction": self.beside["solved_fraction"],
            "wilcoxon_p": self.paired["wilcoxon_p"],
            "outcome": self.paired["outcome"],
            "difference_interval": self.paired["difference_interval"],
            "temperatures": [run["temperatures"] for run in self.runs],
            "spreads": [run["temperature_spread"] for run in self.runs],
        }


def _train(evidence: Evidence, scale: str) -> _Trained:
    tables = evidence.temperatures.tables
    require_runs(tables["summary"])
    learned = [run for run in tables["runs"] if run["scale"] == scale and "temperature" in run]
    if not learned:
        raise SqrtdkError(f"every training run with the scale {scale!r} diverged: there is no temperature to look at")
    row, beside = (next(row for row in tables["summary"] if row["scale"] == name) for name in (scale, "sqrt"))
    paired = next(row for row in tables["comparisons"] if row["scale"] == scale)
    return _Trained(row, beside, paired, learned)


# A change of 1% in ln τ is far beyond rounding and would be seen in the weights.
_LEAST_CHANGE = 0.01


@claim(
    "scale.temperature",
    "S3",
    "a temperature τ in place of √dₖ, fixed or learned; τ < √dₖ sharper, τ > √dₖ softer",
    trains=True,
)
def _temperature(evidence: Evidence) -> Finding:
    q, k = np.random.default_rng(evidence.seed).standard_normal((2, 256, 64))
    ratios = []
    for t in (0.5, 1.0, 2.0):
        statistics = attention(q, k, k, scale=scales.Temperature(t)).statistics
        assert statistics is not None
        ratios.append(float(statistics.entropy_ratio.mean()))
    ordered = ratios[0] < ratios[1] < ratios[2]
    trained = _train(evidence, "learned")
    moved = all(np.abs(np.log(run["temperatures"])).max() > _LEAST_CHANGE for run in trained.runs)
    by_layer = np.median([run["temperatures"] for run in trained.runs], axis=0)
    verdict = trained.judge(moved) if ordered else "wrong"
    why = (
        f"Sharper and softer as said; learned, it {'moves' if moved else 'hardly moves'}: "
        f"{trained.verdict_on_learning}. "
        "Where it ends is not how sharp the head is: W_q and W_k can grow or shrink in its place."
    )
    return Finding(
        f"entropy ratio at τ = ½, 1, 2 × √dₖ (dₖ 64, n 256): {ratios[0]:.3f}, {ratios[1]:.3f}, {ratios[2]:.3f}; "
        f"learned per head, {trained.words}; τ/√dₖ ends at {', '.join(f'{t:.2f}' for t in by_layer)} (layers, medians)",
        verdict,
        explain_doubt(trained.beside, evidence.steps) if verdict == "undecided" else why,
        {"entropy_ratio": ratios, **trained.numbers},
    )


@claim(
    "scale.query",
    "S3",
    "a temperature that depends on the query, learned, so that queries differ in sharpness",
    trains=True,
)
def _query(evidence: Evidence) -> Finding:
    trained = _train(evidence, "query")
    spreads = [run["temperature_spread"] for run in trained.runs]
    differ = min(spreads) > _LEAST_CHANGE
    verdict = trained.judge(differ)
    why = (
        f"The queries of a head {'come to differ' if differ else 'hardly differ'} in temperature: "
        f"{trained.verdict_on_learning}."
    )
    return Finding(
        f"{trained.words}; ln τ over the queries of a head: standard deviation 0 at the start, "
        f"{min(spreads):.2g} to {max(spreads):.2g} after training",
        verdict,
        explain_doubt(trained.beside, evidence.steps) if verdict == "undecided" else why,
        trained.numbers,
    )


@claim("scale.models", "S3", "modern LLMs universally use √dₖ")
def _models(evidence: Evidence) -> Finding:
    record = load_zoo()
    rows = [row for row in record.tables["families"] if row["measured"] is not None]
    others = [row for row in rows if not is_usual(row)]
    # Those that say so first: what a model means is worth more than what it does.
    others.sort(key=lambda row: (row["declared"] is None, row["normalised"], row["family"]))
    named = [f"{row['family']} ({row['measured']:.4g}, 1/√{row['d_k']} = {row['d_k'] ** -0.5:.4g})" for row in others]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    plain = len(rows) - len(others)
    not_in = f"; not in {', '.join(named[:_MOST_NAMED])}{more}" if named else ""
    return Finding(
        f"measured in small models of {len(rows)} families of the transformers library "
        f"({record.versions['transformers']}, {record.spec['date']}): 1/√dₖ in {plain}{not_in}",
        "wrong" if others and plain else ("holds" if plain else "depends"),
        (
            "The most common choice, not a universal one."
            if 2 * plain > len(rows)
            else "Not even the most common choice."
        )
        + " Families are counted, not models in use.",
        {"date": record.spec["date"], "families": rows},
    )
