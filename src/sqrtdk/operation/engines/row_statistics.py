"""Row statistics computed from logits: one definition for arrays and tensors, in float64 where the device has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from sqrtdk.statistics import ROW_FIELDS
from sqrtdk.theory.softmax import namespace_of


def describe(logits: Any, scores: Any, visible: Any, sink: Any) -> dict[str, Any]:
    """Return the fields of `AttentionStatistics` for each row, by name.

    Args:
        logits: `[..., L, S]`, −inf where not visible.
        scores: the scores before soft cap and additive mask `[..., L, S]`; None if the logits are the same numbers.
        visible: boolean, of the logits' shape.
        sink: one more logit, broadcasts to `[..., L]`; None without sinks.
    """
    xp = namespace_of(logits)
    count = visible.sum(-1)
    some = count > 0
    top, at = _find_largest(xp, logits)
    if logits.shape[-1]:
        # If all visible logits are −inf, hidden ones are −inf as well: the first visible key is the largest.
        at = xp.where(top == -xp.inf, (visible * 1).argmax(-1), at)
    largest = top[..., None]
    # The largest term is exactly 1 and is kept apart, so that rounding never hides the sum of the others.
    below = largest - logits
    is_tail = visible & (_key_numbers(xp, logits) != at[..., None])
    tail = xp.where(is_tail, xp.exp(-below), 0.0)
    rest = tail.sum(-1)
    total = 1.0 + rest
    mean, variance = _mean_and_variance(xp, logits, visible, largest)
    score_max, score_variance = top, variance
    if scores is not None:
        scores = xp.where(visible, scores, -xp.inf)
        score_max = _find_largest(xp, scores)[0]
        score_variance = _mean_and_variance(xp, scores, visible, score_max[..., None])[1]
    logsumexp = xp.where(xp.isfinite(top), top + xp.log1p(rest), top)
    # Rounding may lift a uniform row an ulp above the largest possible entropy.
    entropy = xp.log1p(rest) + xp.where(tail > 0, tail * below, 0.0).sum(-1) / total
    entropy = xp.minimum(entropy, xp.log(xp.ones_like(rest) * count.clip(1, None)))
    tail_p2, tail_p3 = (tail * tail).sum(-1) / total**2, (tail * tail * tail).sum(-1) / total**3
    poison = xp.where(some, top * 0.0, 0.0)  # NaN where a visible logit is NaN or the largest is infinite
    nothing = xp.zeros_like(rest)
    return {
        "visible_keys": count,
        "max_key": xp.where(some, at, -1),
        "max_logit": top,
        "logsumexp": logsumexp,
        "entropy": xp.where(some, entropy, nothing) + poison,
        "tail_weight": xp.where(some, rest / total, nothing) + poison,
        "tail_p2": xp.where(some, tail_p2, nothing) + poison,
        "tail_p3": xp.where(some, tail_p3, nothing) + poison,
        "logit_mean": mean,
        "logit_variance": variance,
        "score_max": score_max,
        "score_variance": score_variance,
        "sink_weight": nothing if sink is None else 1.0 / (1.0 + xp.exp(logsumexp - sink)),
    }


def describe_blind(counts: Any, measures: Any, has_sinks: bool) -> None:
    """Write the statistics of rows that see nothing into the blocks of integers and of numbers."""
    no_keys = np.empty((1, 0))
    with np.errstate(invalid="ignore"):
        described = describe(no_keys, None, no_keys > 0, 0.0 if has_sinks else None)
    for field, name in zip((*counts, *measures), ROW_FIELDS, strict=True):
        field[...] = described[name].item()


def _key_numbers(xp: Any, logits: Any) -> Any:
    return xp.arange(logits.shape[-1], device=logits.device)


def _find_largest(xp: Any, x: Any) -> tuple[Any, Any]:
    """Return the largest number of each row, NaN if the row has one, and the first key with it."""
    if not x.shape[-1]:
        rows = x.sum(-1)
        return xp.full_like(rows, -xp.inf), xp.zeros_like(rows, dtype=xp.int64)
    return xp.amax(x, -1), x.argmax(-1)


def _mean_and_variance(xp: Any, x: Any, visible: Any, origin: Any) -> tuple[Any, Any]:
    """Return mean and population variance over the visible keys; NaN without visible keys.

    Two passes over distances from `origin`, one of the numbers: the distances are exact in a row whose numbers differ
    by an ulp, so the rounding of the mean cannot hide the spread. Distances beyond the range of float64 are infinite;
    the mean of such numbers is the sum of x/n.
    """
    count = visible.sum(-1)
    n = count.clip(1, None)[..., None]
    first = origin[..., 0]
    apart = xp.where(visible, x - origin, 0.0)
    centre = (apart / n).sum(-1)
    far = xp.isfinite(first) & ~xp.isfinite(centre)
    plain = xp.where(visible, x / n, 0.0).sum(-1)
    mean = xp.where(far, plain, first + centre)
    deviation = xp.where(far[..., None], x - plain[..., None], apart - centre[..., None])
    deviation = xp.where(visible, deviation, 0.0)
    variance = (deviation * (deviation / n)).sum(-1)
    some = count > 0
    return xp.where(some, mean, xp.nan), xp.where(some, variance, xp.nan)
