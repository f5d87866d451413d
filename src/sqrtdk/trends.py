"""What only a trend can tell: logits that grow towards 100 and entropies that collapse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sqrtdk.causes import CauseSplit, explain_growth, explain_size
from sqrtdk.findings import Finding, Threshold
from sqrtdk.patterns import NOT_ENOUGH_DATA, has_enough_data, patterns
from sqrtdk.summary import Array, HeadSummary

__all__ = ["Line", "TrendPoint", "fit_line", "judge_trend"]

TREND_SNAPSHOTS = 5
"""Fewer snapshots are no trend: a line through n points leaves n − 2 of them to tell how uncertain its slope is."""

LOGIT_LIMIT = Threshold(100.0, "the threshold of QK-clip: Kimi K2 technical report, 2025, §2.1")
GROWTH_RISE = 10.0
"""A line that rises by less within the snapshots it is fitted to is no growth: a tenth of the limit, chosen here."""
COLLAPSED = Threshold(
    0.1, "chosen here for the 'pathologically low entropy' of Zhai et al. 2023, Stabilizing Transformer Training"
)
OPEN_RATIO = 0.3
"""Only a head whose entropy ratio once was at least this can collapse: three times `COLLAPSED`, chosen here."""

# Student's t exceeded by chance in one of a thousand, by the reciprocal of the degrees of freedom (∞, 20, 12, 8, …, 3).
_DEGREES = np.array([np.inf, 20.0, 12.0, 8.0, 6.0, 5.0, 4.0, 3.0])
_STUDENT = np.array([3.090, 3.552, 3.930, 4.501, 5.208, 5.893, 7.173, 10.215])


@dataclass(frozen=True, eq=False)
class TrendPoint:
    """What a trend keeps of a summary, a thousandth of its size; one entry per head.

    Attributes:
        enough: whether there is enough data to judge.
        height: the largest score above the mean of scores.
        ratio: mean entropy ratio.
        patterns: their names.
    """

    enough: Array
    height: Array
    ratio: Array
    patterns: tuple[str, ...]

    @staticmethod
    def of(summary: HeadSummary | TrendPoint) -> TrendPoint:
        """The point of a summary; a point is its own."""
        if isinstance(summary, TrendPoint):
            return summary
        ratio = np.array(summary["entropy_ratio"].mean)
        return TrendPoint(has_enough_data(summary), _height_of_scores(summary), ratio, tuple(patterns(summary)))

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.patterns)


Causes = Sequence[tuple[float, CauseSplit]]


class Line(NamedTuple):
    """A least-squares line: slope per step with its standard error, its height at the last step, and whether it rises.

    `rises`: the slope is so many standard errors above 0 as chance alone gives in one of a thousand level series with
    independent normal noise.
    """

    slope: float
    error: float
    last: float
    rises: bool


def fit_line(steps: Array, values: Array) -> Line:
    """Fit a line to values `[N]` at steps `[N]`, N ≥ 3: slope Σxy/Σx², its error √(Σr²/((N−2)Σx²)).

    >>> fit_line(np.array([0.0, 10.0, 20.0]), np.array([1.0, 2.0, 3.0]))
    Line(slope=0.1, error=0.0, last=3.0, rises=True)
    """
    x = steps - steps.mean()
    y = values - values.mean()
    squares = float(x @ x)
    slope = float(x @ y) / squares
    rest = y - slope * x
    degrees = len(steps) - 2
    error = float(np.sqrt(rest @ rest / (degrees * squares)))
    critical = float(np.interp(1.0 / degrees, 1.0 / _DEGREES, _STUDENT))
    return Line(slope, error, float(values.mean() + slope * x[-1]), slope > critical * error)


def judge_trend(
    layer: str | None,
    layer_index: int,
    trend: Sequence[tuple[float, HeadSummary | TrendPoint]],
    causes: Causes = (),
    all_heads: Sequence[CauseSplit] = (),
) -> list[Finding]:
    """The findings about one layer's heads from its (step, summary) in the order of steps.

    A head's snapshots without enough data are left out; with fewer than `TREND_SNAPSHOTS` nothing is said. `causes` are
    the layer's at some of the steps, `all_heads` those of all layers at the last.
    """
    if len(trend) < TREND_SNAPSHOTS:
        return []
    steps = np.array([step for step, _ in trend], np.float64)
    points = [TrendPoint.of(summary) for _, summary in trend]
    heights = np.array([point.height for point in points])
    ratios = np.array([point.ratio for point in points])
    usable = np.array([point.enough for point in points]) & np.isfinite(heights) & np.isfinite(ratios)
    findings = []
    for head, name in enumerate(points[-1].patterns):
        use = usable[:, head]
        if use.sum() >= TREND_SNAPSHOTS:
            where = (layer, layer_index, head)
            about = [
                *_judge_growth(where, steps[use], heights[use, head]),
                *_judge_collapse(where, steps[use], ratios[use, head], heights[use, head], name),
            ]
            findings += [_with_causes(finding, causes, all_heads) for finding in about]
    return findings


def _with_causes(finding: Finding, causes: Causes, all_heads: Sequence[CauseSplit]) -> Finding:
    """The finding with its head's length of q, spread of k and alignment, and what they say."""
    if not causes or finding.head is None:
        return finding
    head = finding.head
    since = float(finding.evidence.get("from_step", causes[0][0]))
    window = [(step, split) for step, split in causes if step >= since] or list(causes[-1:])
    said = explain_growth(window, head) or explain_size(all_heads, causes[-1][1], head)
    if said is None:
        return finding
    evidence = dict(finding.evidence)
    if len(window) > 1:
        evidence |= {f"{name}_at_first": value for name, value in window[0][1].of_head(head).items()}
    return replace(finding, evidence=evidence | window[-1][1].of_head(head), cause=f"{finding.cause} {said}")


def _height_of_scores(summary: HeadSummary) -> Array:
    """The largest score `[H]` above the mean of scores, for softmax ignores a common shift.

    Under a soft cap or an additive mask the mean of the scores is not known (the variances of scores and logits tell);
    there it is the largest score itself.
    """
    same = summary["score_variance"].mean == summary["logit_variance"].mean
    return np.asarray(summary["score_max"].largest - np.where(same, summary["logit_mean"].mean, 0.0))


_Where = tuple[str | None, int, int]


def _judge_growth(where: _Where, steps: Array, heights: Array) -> list[Finding]:
    # The later half alone, where it is long enough: what grew and has settled does not grow.
    recent = max(len(steps) // 2, TREND_SNAPSHOTS)
    steps, heights = steps[-recent:], heights[-recent:]
    line = fit_line(steps, heights)
    span = float(steps[-1] - steps[0])
    # Growth by a factor is far from a line, but its logarithm is one.
    rises = line.rises or (heights.min() > 0.0 and fit_line(steps, np.log(heights)).rises)
    if not rises or line.slope * span < GROWTH_RISE:
        return []
    crossing = float(steps[-1]) + (LOGIT_LIMIT.value - line.last) / line.slope
    if crossing > steps[-1] + span:
        return []
    passing = "passed" if crossing <= steps[-1] else "will pass"
    evidence = {
        "score_max_above_mean": float(heights[-1]),
        "slope_per_step": line.slope,
        "slope_error": line.error,
        "from_step": float(steps[0]),
        "to_step": float(steps[-1]),
        "passes_100_at_step": crossing,
    }
    cause = (
        f"The largest score rises by {line.slope:.3g} ± {line.error:.2g} per step and {passing} "
        f"{LOGIT_LIMIT.value:g} at step {crossing:.0f}: q and k grow, or turn towards each other."
    )
    remedy = (
        "Clip with qk_clip_, normalise q and k (QK-norm), or lower the learning rate of the projections of q and k."
    )
    return [Finding("logit-growth", "warning", *where, evidence, LOGIT_LIMIT, cause, remedy)]


def _judge_collapse(where: _Where, steps: Array, ratios: Array, heights: Array, pattern: str) -> list[Finding]:
    # Two snapshots at either end: one batch alone may be out of the ordinary.
    first, last = float(ratios[:2].mean()), float(ratios[-2:].max())
    if first < OPEN_RATIO or last >= COLLAPSED.value or pattern == NOT_ENOUGH_DATA:
        return []
    open_until = int(np.flatnonzero(ratios >= COLLAPSED.value)[-1])
    evidence = {
        "entropy_ratio_at_first": first,
        "entropy_ratio_at_last": float(ratios[-1]),
        "below_since_step": float(steps[open_until + 1]),
        "score_max_above_mean_at_first": float(heights[0]),
        "score_max_above_mean_at_last": float(heights[-1]),
        "pattern": pattern,
    }
    fell = f"The mean entropy ratio fell from {first:.3g} to {ratios[-1]:.3g}"
    if pattern != "content":
        cause = f"{fell} as the head took the pattern {pattern!r}, which heads of healthy models have."
        remedy = "None by itself; the change of loss with the head switched off tells whether it is needed."
        return [Finding("entropy-collapse", "info", *where, evidence, COLLAPSED, cause, remedy)]
    before, after = f"{heights[0]:.3g}", f"{heights[-1]:.3g}"
    moved = f"{'rose' if heights[-1] > heights[0] else 'fell'} from {before} to {after}"
    cause = (
        f"{fell} and no position explains it; the largest score {moved if before != after else f'stayed at {after}'}."
    )
    remedy = (
        "Compare the loss before and after the collapse; where it suffers, lower the learning rate or lengthen the "
        "warm-up, normalise q and k, or clip with qk_clip_."
    )
    return [Finding("entropy-collapse", "warning", *where, evidence, COLLAPSED, cause, remedy)]
