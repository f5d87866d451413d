"""Claims about the scaling policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk import attention, scales, softmax
from sqrtdk.claims.claim import Verdict, VerdictName, claim
from sqrtdk.claims.evidence import Evidence
from sqrtdk.claims.learning_claims import explain_doubt, require_runs, solves_more_by
from sqrtdk.errors import SqrtdkError
from sqrtdk.lab.ablation import show_difference
from sqrtdk.lab.intervals import share_difference
from sqrtdk.records.families import is_usual, load_zoo
from sqrtdk.show.table import count
from sqrtdk.wording.numbers import write_loss, write_number, write_percent

Array = npt.NDArray[np.float64]
_MOST_NAMED = 12


def _weights(evidence: Evidence, scale: object, d_k: int = 64) -> tuple[Array, Array]:
    """Return the weights of one head under a scale, and the dot products q·k."""
    q, k = np.random.default_rng(evidence.seed).standard_normal((2, 48, d_k))
    weights = attention(q, k, k, scale=scale, weights=True).weights  # type: ignore[arg-type]
    assert weights is not None
    return weights, q @ k.T


def _divides_by(evidence: Evidence, policy: str, divisor: float, why: str) -> Verdict:
    weights, scores = _weights(evidence, policy)
    apart = float(np.abs(weights - softmax(scores / divisor)).max())
    other = float(np.abs(weights - softmax(scores / (1.5 * divisor))).max())
    return Verdict(
        f"{policy}: equal to softmax(q·k/{divisor:g}) within {write_number(apart, 2)}; a divisor 1.5 times as large "
        f"differs by {write_number(other, 1)}",
        "holds" if apart < 1e-12 and other > 1e-3 else "wrong",
        why,
        {"difference": apart, "difference_if_wrong": other},
    )


@claim("scale.none", "S0", "no scaling")
def _none(evidence: Evidence) -> Verdict:
    return _divides_by(evidence, "none", 1.0, "Policy `none`, at dₖ = 64.")


@claim("scale.sqrt", "all", "1/√dₖ, the default")
def _sqrt(evidence: Evidence) -> Verdict:
    default, _ = _weights(evidence, None)
    named, _ = _weights(evidence, "sqrt")
    finding = _divides_by(evidence, "sqrt", 8.0, "Policy `sqrt` at dₖ = 64, and what `scale=None` does, to the bit.")
    return finding if np.array_equal(default, named) else Verdict("scale=None differs from sqrt", "wrong", finding.why)


@claim("scale.inverse", "S1", "1/dₖ")
def _inverse(evidence: Evidence) -> Verdict:
    return _divides_by(evidence, "inverse", 64.0, "Policy `inverse`, at dₖ = 64.")


@claim("scale.fixed", "S0", "any constant divisor (2, 10, …)")
def _fixed(evidence: Evidence) -> Verdict:
    findings = [_divides_by(evidence, f"fixed:{c}", float(c), "Policy `fixed` does not depend on dₖ.") for c in (2, 10)]
    right = all(finding.verdict == "holds" for finding in findings)
    return Verdict("; ".join(f.computed for f in findings), "holds" if right else "wrong", findings[0].why)


@dataclass(frozen=True)
class _Trained:
    """Results of a learned scale and of 1/√dₖ in the ablation, and the learned temperatures."""

    row: Mapping[str, Any]
    beside: Mapping[str, Any]
    paired: Mapping[str, Any]
    runs: list[Mapping[str, Any]]

    def judge(self, learned: bool) -> VerdictName:
        """Return the verdict on whether the scale learned something. Too few seeds leave it undecided."""
        n, others = self.row["n"], self.beside["n"]
        # With so few seeds not even a scale that fails in every run is distinguishable.
        if self.beside["solved_fraction"] < 0.5 or share_difference(n, n, 0, others).low <= 0.0:
            return "undecided"
        return "holds" if learned and not self.is_worse else "depends"

    @property
    def is_worse(self) -> bool:
        """Return whether the task is solved less often than with 1/√dₖ, by the 95% interval of the difference."""
        return solves_more_by(self.beside, self.row).low > 0.0

    @property
    def verdict_on_learning(self) -> str:
        """Return a comparison with 1/√dₖ in words."""
        less = "the task is solved less often than with √dₖ" if self.is_worse else "the task is solved about as often"
        return f"{less}, and beside √dₖ {show_difference(self.paired)} ({self.paired['outcome']})"

    @property
    def words(self) -> str:
        """Return losses, shares of solved runs, and paired comparisons in words."""
        row, beside, paired = self.row, self.beside, self.paired
        return (
            f"recall, {count(row['n'], 'seed')}: median loss {write_loss(row['final_loss_median'])} "
            f"({write_percent(row['solved_fraction'])} solved), with √dₖ {write_loss(beside['final_loss_median'])} "
            f"({write_percent(beside['solved_fraction'])}), above it in {paired['higher']} of "
            f"{count(paired['n'], 'pair')}"
        )

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the numbers for scripts."""
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
        raise SqrtdkError(f"every training run with the scale {scale!r} diverged: there is no temperature to report")
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
def _temperature(evidence: Evidence) -> Verdict:
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
    return Verdict(
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
def _query(evidence: Evidence) -> Verdict:
    trained = _train(evidence, "query")
    spreads = [run["temperature_spread"] for run in trained.runs]
    differ = min(spreads) > _LEAST_CHANGE
    verdict = trained.judge(differ)
    why = (
        f"The queries of a head {'come to differ' if differ else 'hardly differ'} in temperature: "
        f"{trained.verdict_on_learning}."
    )
    return Verdict(
        f"{trained.words}; ln τ over the queries of a head: standard deviation 0 at the start, "
        f"{write_number(min(spreads), 2)} to {write_number(max(spreads), 2)} after training",
        verdict,
        explain_doubt(trained.beside, evidence.steps) if verdict == "undecided" else why,
        trained.numbers,
    )


@claim("scale.models", "S3", "modern LLMs universally use √dₖ")
def _models(evidence: Evidence) -> Verdict:
    record = load_zoo()
    rows = [row for row in record.tables["families"] if row["measured"] is not None]
    others = [row for row in rows if not is_usual(row)]
    # Families that declare their scale come first: a declaration says more than the code alone.
    others.sort(key=lambda row: (row["declared"] is None, row["normalised"], row["family"]))
    named = [
        f"{row['family']} ({write_number(row['measured'])}, 1/√{row['d_k']} = {write_number(row['d_k'] ** -0.5)})"
        for row in others
    ]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    plain = len(rows) - len(others)
    not_in = f"; not in {', '.join(named[:_MOST_NAMED])}{more}" if named else ""
    return Verdict(
        f"measured in small models of {len(rows)} families of the transformers library "
        f"({record.versions['transformers']}, {record.spec['date']}): 1/√dₖ in {plain}{not_in}",
        "wrong" if others and plain else ("holds" if plain else "depends"),
        f"{plain} of {len(rows)} families use 1/√dₖ: "
        + ("the most common choice" if 2 * plain > len(rows) else "not even the most common choice")
        + (", not a universal one." if others else ".")
        + " Families are counted, not models in use.",
        {"date": record.spec["date"], "families": rows},
    )
