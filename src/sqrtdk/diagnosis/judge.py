"""Turns head summaries into findings: facts from a snapshot, other rules only with a trend or a backward pass.

No rule uses sharpness alone, because healthy heads can be sharp. The module `patterns` says what a head attends to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sqrtdk import checks
from sqrtdk.diagnosis.findings import Finding, severe_first
from sqrtdk.diagnosis.precision import PRECISIONS, name_dtype
from sqrtdk.diagnosis.row_rules import Layers, find_non_finite, judge_gradients, judge_precision
from sqrtdk.diagnosis.scale_rules import SCALE_RULES, judge_scales
from sqrtdk.diagnosis.score_size import CauseSplit
from sqrtdk.diagnosis.trend_rules import TrendPoint, judge_trend
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.summary import HeadSummary
from sqrtdk.summary.heads import Array


def diagnose(
    summaries: Mapping[str, HeadSummary] | HeadSummary,
    *,
    history: Sequence[tuple[float, Mapping[str, HeadSummary | TrendPoint] | HeadSummary | TrendPoint]] | None = None,
    causes: Mapping[str, CauseSplit] | Sequence[tuple[float, Mapping[str, CauseSplit]]] | None = None,
    pressures: Mapping[str, Any] | Any = None,
    scales: Sequence[Mapping[str, Any]] | None = None,
    dtype: Any = None,
    is_clipped: bool = False,
) -> list[Finding]:
    """Return findings for these layers, most severe first; an empty list if there are none.

    `summaries` alone give only facts: rows that are NaN or infinite (`non-finite-rows`).

    `dtype` adds `score-overflow` (scores beyond its largest number) and `score-rounding` (scores so large that rounding
    changes a logit by 1 or more). Numbers from 2/ε on are 2 apart: from 256 in bfloat16, from 2048 in float16.

    `scales` add `scale-differs-from-declared`, `scale-undeclared`, `scale-differs-between-layers` and
    `scale-on-mask`.

    `history` adds `logit-growth`, about the largest score above the mean. The limit is 100, or twice the first value if
    that is more, and at most 1000. The rule applies if the score passes the limit; if it is at least half the limit and
    ten times the previous snapshot; or, with at least 5 snapshots with enough data, if the score or its logarithm rises
    significantly (by chance in one of a thousand level series) and would pass 100 before the trend doubles in length.
    The finding holds until the score falls below half the limit. `history` also adds `entropy-collapse`, with at least
    5 snapshots with enough data: mean H/ln n falls from at least 0.3 in the first two to below 0.1 in two in a row.
    This finding holds until the ratio reaches 0.2. It is information if the head's pattern is a position, if its scores
    stay below 50, or if `logit-growth` already applies. `causes` tell both rules which of the length of q, the spread
    of k and their alignment grew or stands out. With `scales`, `logit-growth` names a wrong scale.

    `pressures`, from a backward pass, add `dead-gradient` (95% of rows with several keys have 1 − Σp² < 0.01;
    information if the pattern is a position) and `temperature-pressure`, which is always information.

    Args:
        summaries: summaries by layer path, in the order of the layers; or one summary.
        history: pairs (step, summaries) with ascending steps; the present summaries are the last pair. Instead of a
            summary, an entry may be `sqrtdk.diagnosis.trend_rules.TrendPoint.of(summary)`, which is smaller.
        causes: the split of score sizes by layer, as in `seen.causes` of a watch; or pairs (step, such a mapping).
        pressures: ∂loss/∂log scale `[H]` by layer path, None for layers without; or one array for one summary.
        scales: one record per layer with `layer`, `measured` (None if unknown) and `d_k`; optionally `declared`,
            `normalised` (whether q and k are), `on_the_mask` (the factor on the mask), `layer_index` and `dtype` (the
            rounding of q and k, by default that of `dtype`). Further entries are ignored.
        dtype: the dtype that logits are rounded to, by name or as a dtype, or by layer path; None if unknown. A fused
            kernel in bfloat16 rounds logits to float32.
        is_clipped: whether QK-clip is already on, so that it is not suggested as a remedy.

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
    dtypes = _name_dtypes(dtype, layers)
    findings = find_non_finite(layers, dtypes) + judge_precision(layers, dtypes)
    if scales is not None:
        epsilon = None if dtype is None or isinstance(dtype, Mapping) else PRECISIONS[name_dtype(dtype)].epsilon
        findings += judge_scales(scales, list(layers), epsilon)
    wrong = {one.layer: one for one in findings if one.rule in SCALE_RULES and one.severity != "info"}
    by_path = _check_pressures(pressures, layers)
    for at, (path, summary) in enumerate(layers.items()):
        points = [(step, seen[path]) for step, seen in trend if path in seen]
        own = [(step, by_layer[path]) for step, by_layer in splits if path in by_layer]
        findings += judge_trend(path, at, points, own, last, scale=wrong.get(path), is_clipped=is_clipped)
        if path in by_path:
            findings += judge_gradients(path, at, summary, by_path[path])
    return severe_first(findings)


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
    """Return the causes by step; causes without a step belong to the last step."""
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
        if not checks.is_number(entry[0]):
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
    """Return the dtype that logits are rounded to, for the layers where it is known."""
    if isinstance(dtype, Mapping):
        strange = [path for path in dtype if path not in layers]
        if strange:
            raise InvalidValueError("dtype", f"must name layers of summaries, got {strange[0]!r}")
        return {path: name_dtype(one) for path, one in dtype.items() if one is not None}
    return {} if dtype is None else dict.fromkeys(layers, name_dtype(dtype))
