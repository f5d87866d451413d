"""From head summaries to findings: facts from a snapshot, the rest only with a trend or a backward pass.

A sharp head is not a sick head: no rule looks at sharpness alone. What a head does is told by `sqrtdk.patterns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sqrtdk.causes import CauseSplit
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.findings import SEVERITIES, Finding, Severity, Threshold
from sqrtdk.patterns import NOT_ENOUGH_DATA, pattern_of, patterns, rows_that_see
from sqrtdk.precision import PRECISIONS, name_dtype
from sqrtdk.scale_findings import judge_scales
from sqrtdk.summary import BIN_EDGES, Array, HeadSummary
from sqrtdk.trends import TrendPoint, judge_trend

__all__ = ["Finding", "Threshold", "diagnose", "pattern_of", "patterns"]

Layers = Mapping[str | None, HeadSummary]


DEAD_TRACE = Threshold(0.01, "chosen here: a row's gradient is at most a hundredth of that of 1 − Σp² = 1")
DEAD_SHARE = 0.95
"""The share of rows that must lie below `DEAD_TRACE`: the 95th percentile does."""


def diagnose(
    summaries: Mapping[str, HeadSummary] | HeadSummary,
    *,
    history: Sequence[tuple[float, Mapping[str, HeadSummary | TrendPoint] | HeadSummary | TrendPoint]] | None = None,
    causes: Mapping[str, CauseSplit] | Sequence[tuple[float, Mapping[str, CauseSplit]]] | None = None,
    pressures: Mapping[str, Any] | Any = None,
    scales: Sequence[Mapping[str, Any]] | None = None,
    dtype: Any = None,
) -> list[Finding]:
    """What is wrong with the heads of these layers, the severe first; an empty list if nothing is.

    From `summaries` alone only facts: rows that are NaN or infinite (`non-finite-rows`).

    With `dtype`: scores beyond its largest number (`score-overflow`), or so large that rounding changes a logit by 1 or
    more (`score-rounding`): numbers of at least 2/ε are spaced 2 apart, so from 256 on in bfloat16, 2048 in float16.

    With `scales`: `scale-differs-from-declared`, `scale-undeclared`, `scale-differs-between-layers`,
    `scale-on-mask`.

    With `history`, of heads with enough data in at least 5 snapshots: `logit-growth` (the largest score above the mean
    rises, itself or its logarithm by a slope that chance gives in one of a thousand level series, and passes 100 before
    the trend has gone on as long again) and `entropy-collapse` (mean H/ln n from at least 0.3 in the first two
    snapshots to below 0.1 in the last two; information where the head took a position as its pattern). With `causes`
    both say which of the length of q, the spread of k and their alignment grew, or stands out.

    With `pressures`, so after a backward pass: `dead-gradient` (95% of rows with several keys have 1 − Σp² < 0.01;
    information where the pattern is a position) and `temperature-pressure`, always information.

    Args:
        summaries: a summary by layer path, in the order of the layers; or one summary.
        history: (step, summaries), steps ascending; the present ones belong to it as its last entry. Instead of a
            summary, what a trend keeps of it: `sqrtdk.trends.TrendPoint.of(summary)`.
        causes: per layer what its scores are made of, as `seen.causes` of a watch has it; or pairs (step, those).
        pressures: ∂loss/∂log scale `[H]` by layer path; or one array, for one summary. None for layers without.
        scales: per layer `layer`, `measured` (None where it could not be told), `d_k`; if known `declared`,
            `normalised` (q and k are), `on_the_mask` (what a mask was multiplied by), `layer_index`, `dtype` (what q
            and k are rounded to; else that of `dtype`). Further entries are ignored.
        dtype: what the model rounds its logits to, by name or as a dtype, or such by layer path: a fused kernel in
            bfloat16 rounds them to float32. None: not known.

    >>> from sqrtdk import HeadSummary, attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 300, 16))
    >>> healthy = HeadSummary.of(attention(q, k, v).statistics)
    >>> diagnose({"blocks.0": healthy})
    []
    >>> q[1, :30] = np.nan
    >>> diagnose({"blocks.0": healthy, "blocks.1": HeadSummary.of(attention(q, k, v).statistics)})[0]
    error: non-finite-rows in blocks.1, head 1: rows 30, of rows 300, heads [1], layers 1. blocks.1 is the only
    one of 2 layers with scores that are NaN or infinite.

    Raises:
        InvalidTypeError, InvalidValueError: for arguments that do not fit together.
    """
    layers: Layers = _by_path(summaries, "summaries")
    trend = _check_history(history)
    splits = _check_causes(causes)
    last = [split for _, by_layer in splits[-1:] for split in by_layer.values()]
    findings = _find_non_finite(layers)
    findings += _judge_precision(layers, _name_dtypes(dtype, layers))
    if scales is not None:
        epsilon = None if dtype is None or isinstance(dtype, Mapping) else PRECISIONS[name_dtype(dtype)].epsilon
        findings += judge_scales(scales, list(layers), epsilon)
    by_path = _check_pressures(pressures, layers)
    for at, (path, summary) in enumerate(layers.items()):
        points = [(step, seen[path]) for step, seen in trend if path in seen]
        own = [(step, by_layer[path]) for step, by_layer in splits if path in by_layer]
        findings += judge_trend(path, at, points, own, last)
        if path in by_path:
            findings += _judge_gradients(path, at, summary, by_path[path])
    return sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), one.layer_index))


def _by_path(summaries: Any, argument: str, kinds: tuple[type, ...] = (HeadSummary,)) -> Any:
    layers = {None: summaries} if isinstance(summaries, kinds) else summaries
    if not isinstance(layers, Mapping):
        kind = type(summaries).__name__
        raise InvalidTypeError(
            argument, f"must be a {kinds[0].__name__} or a mapping from layer path to one, got {kind}"
        )
    for path, summary in layers.items():
        if not isinstance(summary, kinds):
            raise InvalidTypeError(f"{argument}[{path!r}] must be a {kinds[0].__name__}, got {type(summary).__name__}")
    return layers


def _check_causes(causes: Any) -> list[tuple[float, Mapping[str | None, CauseSplit]]]:
    """The causes by step; those without a step are of the last."""
    if causes is None:
        return []
    if isinstance(causes, Mapping | CauseSplit):
        return [(np.inf, _by_path(causes, "causes", (CauseSplit,)))]
    for entry in causes:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise InvalidTypeError("causes", f"must be a mapping by layer path or pairs (step, mapping), got {entry!r}")
    return [(float(step), _by_path(layers, f"causes at step {step}", (CauseSplit,))) for step, layers in causes]


def _check_history(history: Any) -> list[tuple[float, Mapping[str | None, HeadSummary | TrendPoint]]]:
    if history is None:
        return []
    trend: list[tuple[float, Mapping[str | None, HeadSummary | TrendPoint]]] = []
    heads: dict[str | None, int] = {}
    for entry in history:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise InvalidTypeError("history", f"must be pairs (step, summaries), got {entry!r}")
        if not isinstance(entry[0], int | float | np.number):
            raise InvalidTypeError("history", f"must have numbers as steps, got {entry[0]!r}")
        step, layers = float(entry[0]), _by_path(entry[1], f"history at step {entry[0]}", (HeadSummary, TrendPoint))
        if not np.isfinite(step) or (trend and step <= trend[-1][0]):
            before = f" after step {trend[-1][0]:g}" if trend else ""
            raise InvalidValueError("history", f"must have finite, ascending steps, got {step:g}{before}")
        for path, summary in layers.items():
            if heads.setdefault(path, summary.heads) != summary.heads:
                raise InvalidValueError(
                    "history", f"must keep the number of heads of {path!r}, got {heads[path]}, then {summary.heads}"
                )
        trend.append((step, layers))
    return trend


def _check_pressures(pressures: Any, layers: Layers) -> dict[str | None, Array]:
    given = pressures if isinstance(pressures, Mapping) else {None: pressures}
    by_path = {}
    for path, values in given.items():
        if values is None:
            continue
        if path not in layers:
            expected = "a mapping from layer path to [H]" if path is None else "among the layers of summaries"
            raise InvalidValueError(
                "pressures", f"must be {expected}, got {'one array' if path is None else repr(path)}"
            )
        array = np.asarray(values, np.float64)
        if array.shape != (layers[path].heads,):
            raise InvalidValueError(f"pressures of {path!r} must have shape [{layers[path].heads}], got {array.shape}")
        by_path[path] = array
    return by_path


def _name_dtypes(dtype: Any, layers: Layers) -> dict[str | None, str]:
    """The dtype that logits are rounded to, of the layers where it is known."""
    if isinstance(dtype, Mapping):
        strange = [path for path in dtype if path not in layers]
        if strange:
            raise InvalidValueError("dtype", f"must name layers of summaries, got {strange[0]!r}")
        return {path: name_dtype(one) for path, one in dtype.items() if one is not None}
    return {} if dtype is None else dict.fromkeys(layers, name_dtype(dtype))


def _find_non_finite(layers: Layers) -> list[Finding]:
    """One finding for the first layer: what is NaN there is NaN in every layer after it."""
    lost = {path: count_non_finite(summary) for path, summary in layers.items()}
    struck = [path for path, rows in lost.items() if rows.any()]
    if not struck:
        return []
    first = struck[0]
    heads = np.flatnonzero(lost[first]).tolist()
    head = heads[0] if len(heads) == 1 else None
    evidence = {
        "rows": int(lost[first].sum()),
        "of_rows": int(layers[first].rows_seen[heads].sum()),
        "heads": heads,
        "layers": len(struck),
    }
    if len(layers) == 1:
        cause = "Scores of these rows are NaN or infinite."
    elif len(struck) == 1:
        cause = f"{first} is the only one of {len(layers)} layers with scores that are NaN or infinite."
    else:
        cause = f"{first} is the first of {len(struck)} layers with scores that are NaN or infinite."
    remedy = "Look at the input and the weights of this layer first: later layers take NaN over from it."
    threshold = Threshold(0.0, "by definition: finite inputs give finite scores")
    at = list(layers).index(first)
    return [Finding("non-finite-rows", "error", first, at, head, evidence, threshold, cause, remedy)]


def count_non_finite(summary: HeadSummary) -> Array:
    """Rows `[H]` whose logits or scores are not all finite; rows that see nothing have none and do not count."""
    left_out = np.maximum(summary["logit_mean"].left_out, summary["score_max"].left_out)
    sees_nothing = summary["visible_keys"].count - rows_that_see(summary, 1)
    return np.asarray(left_out - sees_nothing)


def _judge_precision(layers: Layers, dtypes: Mapping[str | None, str]) -> list[Finding]:
    """Scores that the dtype cannot hold, or holds with an error of 1 and more."""
    findings = []
    for at, (path, summary) in enumerate(layers.items()):
        if path not in dtypes:
            continue
        name = dtypes[path]
        epsilon, most = PRECISIONS[name]
        coarse = 2.0 / epsilon
        overflow = Threshold(most, f"the largest finite {name} (IEEE 754)")
        rounding = Threshold(coarse, f"2/ε with ε = {epsilon:g} of {name}: from here on numbers are at least 2 apart")
        seen = summary["score_max"]
        for head in np.flatnonzero(seen.count):
            size = float(max(abs(seen.largest[head]), abs(seen.least[head])))
            evidence = {"largest_score_in_size": size, "dtype": name}
            if size > most:
                cause = f"A score of size {size:.4g} is infinite in {name}, whose largest number is {most:.4g}."
                remedy = "Check the scale; compute the scores in float32 or with a fused kernel."
                findings.append(
                    Finding("score-overflow", "error", path, at, int(head), evidence, overflow, cause, remedy)
                )
            elif size >= coarse:
                spacing = epsilon * 2.0 ** np.floor(np.log2(size))
                evidence["spacing"] = float(spacing)
                cause = (
                    f"At {size:.4g} numbers of {name} are {spacing:g} apart: a logit is off by up to {spacing / 2:g}, "
                    f"a weight by a factor of up to {np.exp(min(spacing / 2, 700.0)):.3g}."
                )
                remedy = "Check the scale; keep logits in float32 (a fused kernel does); normalise q and k."
                findings.append(
                    Finding("score-rounding", "warning", path, at, int(head), evidence, rounding, cause, remedy)
                )
    return findings


def _judge_gradients(path: str | None, at: int, summary: HeadSummary, pressures: Array) -> list[Finding]:
    """What a backward pass adds: heads whose rows let no gradient through, and what the loss wants of the others."""
    several = rows_that_see(summary, 2)
    first_alive = np.searchsorted(BIN_EDGES, DEAD_TRACE.value, side="right")
    alive = summary["jacobian_trace"].histogram[:, first_alive:].sum(axis=1)
    names = patterns(summary)
    is_known = np.array([name != NOT_ENOUGH_DATA for name in names], bool)
    is_dead = is_known & (alive <= (1.0 - DEAD_SHARE) * several)
    findings = []
    for head in np.flatnonzero(is_dead):
        share = 1.0 - float(alive[head] / several[head])
        evidence = {
            "share_of_rows_below_0.01": share,
            "mean_1−Σp²": float(summary["jacobian_trace"].mean[head]),
            "pressure": float(pressures[head]),
            "pattern": names[head],
        }
        nearly = f"{share:.3g} of the rows are so close to one-hot that softmax passes next to no gradient to q and k"
        severity: Severity
        if names[head] == "content":
            severity, cause = "warning", f"{nearly}, and no position explains it."
        else:
            severity, cause = (
                "info",
                f"{nearly}; heads of healthy models with the pattern {names[head]!r} are like that.",
            )
        remedy = "Measure the loss with the head switched off and at a higher temperature before changing anything."
        findings.append(Finding("dead-gradient", severity, path, at, int(head), evidence, DEAD_TRACE, cause, remedy))
    sharper, softer = np.flatnonzero(pressures < 0).tolist(), np.flatnonzero(pressures > 0).tolist()
    if sharper or softer:
        most = int(np.nanargmax(np.abs(pressures)))
        evidence = {"sharper": sharper, "softer": softer, "pressures": pressures.tolist()}
        cause = (
            "The loss of these batches falls if the heads under 'sharper' get a larger scale and those under 'softer' "
            f"a smaller one; head {most} feels it most, {pressures[most]:.3g} per unit of log scale."
        )
        remedy = "None by itself; a learned temperature lets each head follow it."
        threshold = Threshold(0.0, "by definition: ∂loss/∂log scale = 0 is to want no change")
        findings.append(Finding("temperature-pressure", "info", path, at, None, evidence, threshold, cause, remedy))
    return findings
