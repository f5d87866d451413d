"""Rules for a run: scores that pass 100 or soon will, and collapsing entropy. A finding holds until recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sqrtdk.diagnosis.findings import Finding, Severity, Threshold
from sqrtdk.diagnosis.patterns import NOT_ENOUGH_DATA, OTHER, has_enough_data, patterns
from sqrtdk.diagnosis.score_size import CauseSplit, explain_growth, explain_size
from sqrtdk.summary import HeadSummary
from sqrtdk.summary.heads import Array
from sqrtdk.wording.numbers import write_number

__all__ = ["TrendLine", "TrendPoint", "fit_line", "holds_since", "judge_trend"]

TREND_SNAPSHOTS = 5
"""Least number of snapshots for a trend: a line through n points leaves n − 2 degrees of freedom for its error."""

LOGIT_LIMIT = Threshold(100.0, "the threshold of QK-clip: Kimi K2 technical report, 2025, §2.1")
FIRST_FACTOR, MOST_LIMIT, JUMP = 2.0, 1000.0, 10.0
"""A head that starts above 50 has twice its first spread as limit, at most 1000. A jump is tenfold. Chosen here."""
RECOVERED = 0.5
"""A head has recovered if its spread is below this part of its limit; chosen here."""
GROWTH_RISE = 10.0
"""Least rise of a fitted line within its snapshots that counts as growth: a tenth of the limit, chosen here."""
COLLAPSED = Threshold(
    0.1, "chosen here for the 'pathologically low entropy' of Zhai et al. 2023, Stabilizing Transformer Training"
)
REOPENED = 0.2
"""A collapsed head has recovered at this entropy ratio, twice `COLLAPSED`; chosen here."""
OPEN_RATIO = 0.3
"""A head can collapse only if its entropy ratio was at least this, three times `COLLAPSED`; chosen here."""

# Student's t that chance exceeds once in a thousand, by the reciprocal of the degrees of freedom (∞, 20, 12, 8, …, 3).
_DEGREES = np.array([np.inf, 20.0, 12.0, 8.0, 6.0, 5.0, 4.0, 3.0])
_STUDENT = np.array([3.090, 3.552, 3.930, 4.501, 5.208, 5.893, 7.173, 10.215])


@dataclass(frozen=True, eq=False)
class TrendPoint:
    """Part of a summary that a trend keeps, a thousandth of its size, with one entry per head.

    Attributes:
        enough: whether there is enough data to judge.
        spread: the largest score above the mean of scores.
        ratio: mean entropy ratio.
        patterns: names of the patterns.
    """

    enough: Array
    spread: Array
    ratio: Array
    patterns: tuple[str, ...]

    @staticmethod
    def of(summary: HeadSummary | TrendPoint) -> TrendPoint:
        """Return the point of a summary; a point is returned unchanged."""
        if isinstance(summary, TrendPoint):
            return summary
        ratio = np.array(summary["entropy_ratio"].mean)
        return TrendPoint(has_enough_data(summary), spread_of_scores(summary), ratio, tuple(patterns(summary)))

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.patterns)


Causes = Sequence[tuple[float, CauseSplit]]


class TrendLine(NamedTuple):
    """Least-squares line: slope per step with its standard error, height at the last step, and whether the line rises.

    `rises` is whether the slope is significant: chance alone reaches it in one of a thousand level series with
    independent normal noise.
    """

    slope: float
    error: float
    last: float
    rises: bool


def fit_line(steps: Array, values: Array) -> TrendLine:
    """Fit a line to values `[N]` at steps `[N]`, N ≥ 3: slope Σxy/Σx², its error √(Σr²/((N−2)Σx²)).

    >>> fit_line(np.array([0.0, 10.0, 20.0]), np.array([1.0, 2.0, 3.0]))
    TrendLine(slope=0.1, error=0.0, last=3.0, rises=True)
    """
    x = steps - steps.mean()
    y = values - values.mean()
    squares = float(x @ x)
    slope = float(x @ y) / squares
    rest = y - slope * x
    degrees = len(steps) - 2
    error = float(np.sqrt(rest @ rest / (degrees * squares)))
    critical = float(np.interp(1.0 / degrees, 1.0 / _DEGREES, _STUDENT))
    return TrendLine(slope, error, float(values.mean() + slope * x[-1]), slope > critical * error)


def holds_since(is_raised: Array, is_recovered: Array) -> int | None:
    """Return the index of the observation from which a rule holds up to the last one; None if it does not hold now.

    A rule holds from an observation that raises it until one that has recovered, and stays between the two thresholds.

    >>> spreads = np.array([20.0, 120.0, 70.0, 80.0])
    >>> holds_since(spreads > 100, spreads < 50), holds_since(spreads > 100, spreads < 75)
    (1, None)
    """
    recovered = np.flatnonzero(is_recovered)
    start = int(recovered[-1]) + 1 if len(recovered) else 0
    raised = np.flatnonzero(is_raised[start:])
    return start + int(raised[0]) if len(raised) else None


def judge_trend(
    layer: str | None,
    layer_index: int,
    trend: Sequence[tuple[float, HeadSummary | TrendPoint]],
    causes: Causes = (),
    all_heads: Sequence[CauseSplit] = (),
    *,
    scale: Finding | None = None,
    is_clipped: bool = False,
) -> list[Finding]:
    """Return the findings about one layer's heads from its pairs (step, summary) in the order of steps.

    One observation is enough for large scores. A slope and a collapse need `TREND_SNAPSHOTS` snapshots with enough
    data. `causes` are those of the layer at some of the steps, `all_heads` those of all layers at the last step.
    `scale` is a finding about the layer's scale, which then explains large scores. If `is_clipped`, QK-clip is not a
    remedy.
    """
    if not trend:
        return []
    steps = np.array([step for step, _ in trend], np.float64)
    points = [TrendPoint.of(summary) for _, summary in trend]
    spreads_NH, ratios_NH = (np.array([getattr(point, name) for point in points]) for name in ("spread", "ratio"))
    is_seen = np.isfinite(spreads_NH)
    is_enough = is_seen & np.isfinite(ratios_NH) & np.array([point.enough for point in points])
    remedies = "lower the learning rate or normalise q and k (QK-norm)"
    remedies = remedies if is_clipped else "lower the learning rate, normalise q and k (QK-norm) or use qk_clip_"
    findings = []
    for head in range(points[-1].heads):
        where, seen, enough = (layer, layer_index, head), is_seen[:, head], is_enough[:, head]
        if not seen.any():
            continue
        growth = _judge_size(where, steps[seen], spreads_NH[seen, head], remedies)
        collapse = None
        if enough.sum() >= TREND_SNAPSHOTS:
            series = (steps[enough], spreads_NH[enough, head])
            growth = growth or _judge_slope(where, *series, remedies)
            collapse = _judge_collapse(where, *series, ratios_NH[enough, head], points[-1].patterns[head], remedies)
        if growth is not None:
            if not seen[-1]:
                # Scores that are not finite now have not recovered; another rule reports them.
                growth = replace(growth, severity="info")
            if scale is None:
                findings.append(_with_causes(growth, causes, all_heads))
            else:
                findings.append(replace(growth, cause=f"{growth.cause} {scale.cause}", remedy=scale.remedy))
        if collapse is not None:
            # Warn once per cause: if the scores are too large, that finding already warns.
            quiet = collapse if growth is None else replace(collapse, severity="info")
            findings.append(_with_causes(quiet, causes, all_heads))
    return findings


def fell_just_now(before: TrendPoint, now: TrendPoint) -> Array:
    """Return whether each head `[H]` has the entropy and scores of a collapse now, but had not one observation ago."""
    return np.asarray(
        (now.ratio < COLLAPSED.value)
        & (before.ratio >= COLLAPSED.value)
        & (now.spread >= RECOVERED * LOGIT_LIMIT.value)
        & now.enough
    )


def _with_causes(finding: Finding, causes: Causes, all_heads: Sequence[CauseSplit]) -> Finding:
    """Return the finding with the head's length of q, spread of k and alignment, and a sentence that explains them."""
    if not causes or finding.head is None:
        return finding
    head = finding.head
    since = float(finding.evidence.get("from_step", causes[0][0]))
    window = [(step, split) for step, split in causes if step >= since] or list(causes[-1:])
    said = explain_growth(window, head) if len(window) > 1 else explain_size(all_heads, causes[-1][1], head)
    evidence = dict(finding.evidence)
    if len(window) > 1:
        evidence |= {f"{name}_at_first": value for name, value in window[0][1].of_head(head).items()}
    cause = finding.cause if said is None else f"{finding.cause} {said}"
    return replace(finding, evidence=evidence | window[-1][1].of_head(head), cause=cause)


def spread_of_scores(summary: HeadSummary) -> Array:
    """Return the largest score `[H]` above the mean of scores, because softmax ignores a common shift.

    Under a soft cap or an additive mask, where the variances of scores and logits differ, the mean of the scores is
    unknown. The result is then the largest score itself.
    """
    same = summary["score_variance"].mean == summary["logit_variance"].mean
    return np.asarray(summary["score_max"].largest - np.where(same, summary["logit_mean"].mean, 0.0))


_Where = tuple[str | None, int, int]


def _judge_size(where: _Where, steps: Array, spreads: Array, remedies: str) -> Finding | None:
    """Return a finding for scores beyond the limit, or beyond half of it and tenfold since the observation before."""
    limit = float(np.clip(FIRST_FACTOR * spreads[0], LOGIT_LIMIT.value, MOST_LIMIT))
    is_jump = np.zeros(len(spreads), bool)
    is_jump[1:] = spreads[1:] >= JUMP * spreads[:-1]  # below half of the limit a jump has recovered at once
    at = holds_since((spreads > limit) | is_jump, spreads < RECOVERED * limit)
    if at is None:
        return None
    now, jumped = float(spreads[-1]), bool(is_jump[at])
    begin = at - 1 if jumped else 0
    evidence = {
        "score_max_above_mean": now,
        "score_max_above_mean_at_first": float(spreads[begin]),
        "from_step": float(steps[begin]),
        "to_step": float(steps[-1]),
        "since_step": float(steps[at]),
    }
    cause = f"The largest score is {write_number(now)} above the mean (limit {limit:g})"
    if jumped:
        cause += (
            f"; from step {steps[begin]:g} to {steps[at]:g} it went from {write_number(spreads[begin], 3)} to "
            f"{write_number(spreads[at], 3)}"
        )
        remedies = f"look at the batches of these steps, {remedies}"
    elif at > 0:
        cause += f", {write_number(spreads[0], 3)} at step {steps[0]:g}"
    source = (
        f"{FIRST_FACTOR:g} times the head's first spread, from {LOGIT_LIMIT.value:g} to {MOST_LIMIT:g}: chosen here"
    )
    threshold = LOGIT_LIMIT if limit == LOGIT_LIMIT.value else Threshold(limit, source)
    severity: Severity = "error" if now > JUMP * limit else "warning"
    return Finding("logit-growth", severity, *where, evidence, threshold, f"{cause}.", _sentence(remedies))


def _judge_slope(where: _Where, steps: Array, spreads: Array, remedies: str) -> Finding | None:
    # Use only the later half if it is long enough: growth that has settled does not count.
    recent = max(len(steps) // 2, TREND_SNAPSHOTS)
    steps, spreads = steps[-recent:], spreads[-recent:]
    line = fit_line(steps, spreads)
    span = float(steps[-1] - steps[0])
    # Exponential growth is far from a line, but its logarithm is a line.
    rises = line.rises or (spreads.min() > 0.0 and fit_line(steps, np.log(spreads)).rises)
    if not rises or line.slope * span < GROWTH_RISE:
        return None
    crossing = float(steps[-1]) + (LOGIT_LIMIT.value - line.last) / line.slope
    if crossing > steps[-1] + span:
        return None
    passing = "passed" if crossing <= steps[-1] else "will pass"
    evidence = {
        "score_max_above_mean": float(spreads[-1]),
        "slope_per_step": line.slope,
        "slope_error": line.error,
        "from_step": float(steps[0]),
        "to_step": float(steps[-1]),
        "passes_100_at_step": crossing,
    }
    cause = (
        f"The largest score is {write_number(spreads[-1])} above the mean, rises by {write_number(line.slope, 3)} ± "
        f"{write_number(line.error, 2)} per step and {passing} {LOGIT_LIMIT.value:g} at step {crossing:.0f}."
    )
    return Finding("logit-growth", "warning", *where, evidence, LOGIT_LIMIT, cause, _sentence(remedies))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _judge_collapse(
    where: _Where, steps: Array, spreads: Array, ratios: Array, pattern: str, remedies: str
) -> Finding | None:
    # Use two snapshots at either end, because a single batch may be unusual.
    first = float(ratios[:2].mean())
    if first < OPEN_RATIO or pattern == NOT_ENOUGH_DATA:
        return None
    pairs = np.maximum(ratios[1:], ratios[:-1])
    at = holds_since(pairs < COLLAPSED.value, pairs >= REOPENED)
    if at is None:
        return None
    evidence = {
        "entropy_ratio_at_first": first,
        "entropy_ratio_at_last": float(ratios[-1]),
        "below_since_step": float(steps[at]),
        "score_max_above_mean_at_first": float(spreads[0]),
        "score_max_above_mean_at_last": float(spreads[-1]),
        "pattern": pattern,
    }
    cause = f"The mean entropy ratio fell from {write_number(first, 3)} to {write_number(ratios[-1], 3)}"
    remedy = "None by itself; the change of loss with the head switched off tells whether it is needed."
    severity: Severity = "info"
    if pattern != OTHER:
        cause += f" as the head took the pattern {pattern!r}, which heads of healthy models have."
    elif spreads[-1] < RECOVERED * LOGIT_LIMIT.value:
        cause += (
            f"; its largest score, {write_number(spreads[-1], 3)} above the mean, is one that heads of healthy models "
            "have."
        )
    else:
        before, after = write_number(spreads[0], 3), write_number(spreads[-1], 3)
        moved = f"{'rose' if spreads[-1] > spreads[0] else 'fell'} from {before} to {after}"
        cause += f" and no position explains it; the largest score {moved if before != after else f'stayed at {after}'}"
        cause += " above the mean."
        remedy = f"Compare the loss before and after step {steps[at]:g}; where it suffers, {remedies}."
        severity = "warning"
    return Finding("entropy-collapse", severity, *where, evidence, COLLAPSED, cause, remedy)
