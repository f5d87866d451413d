"""Row statistics from their definition, with tolerances."""

from __future__ import annotations

import numpy as np

from .definition import Bounded, Problem, Real, Softmax

_CLOSE = Real("2e-6")  # error of sums in float32 blocks, relative to the size of the terms


def describe(problem: Problem, soft: Softmax) -> dict[str, Bounded]:
    """Return every field of `AttentionStatistics` except `max_key`, `[N, H, L]`."""
    with np.errstate(all="ignore"):
        return _describe(problem, soft)


def _describe(problem: Problem, soft: Softmax) -> dict[str, Bounded]:
    visible, blind, unit = problem.visible, soft.blind, Real(problem.rounding.unit)
    close = _CLOSE if problem.rounding.working == "float32" else Real("1e-13")
    count = visible.sum(axis=-1)
    if not visible.shape[-1]:
        soft = _with_one_hidden_key(soft)
        visible = np.zeros(soft.logits.shape, bool)
    logits, error = soft.logits, soft.logits_error
    at = logits.argmax(axis=-1)[..., None]
    top = np.take_along_axis(logits, at, -1)[..., 0]
    origin = np.where(blind, 0, top)[..., None]
    below = np.where(visible, logits - origin, -np.inf)
    is_tail = visible & np.isfinite(logits) & (np.arange(logits.shape[-1]) != at)
    below = np.where(is_tail, below, -np.inf)
    apart = np.where(is_tail, error + np.take_along_axis(error, at, -1) + 2 * unit * np.minimum(-below, 1e4), 0)
    floor = 2 * problem.rounding.smallest_normal

    def tail(power, sign):
        e = np.exp(np.clip(below + sign * apart, -11000 / power, 11000 / power) * power)
        e = np.where(is_tail, e, 0)
        if sign < 0:  # numbers below the smallest normal number may count as 0
            e = np.where(np.exp(below - apart) < floor, 0, e)
        return e.sum(axis=-1)

    exact, most, least = ([tail(power, sign) for power in (1, 2, 3)] for sign in (0, 1, -1))
    fields = {}
    poison = np.where(soft.poisoned, Real(np.nan), 0)
    for name, power in (("tail_weight", 1), ("tail_p2", 2), ("tail_p3", 3)):
        value = exact[power - 1] / (1 + exact[0]) ** power
        high = most[power - 1] / (1 + least[0]) ** power
        low = least[power - 1] / (1 + most[0]) ** power
        if power == 1:
            high, low = most[0] / (1 + most[0]), least[0] / (1 + least[0])
        tolerance = np.maximum(high - value, value - low) + 4 * close * value
        fields[name] = Bounded(np.where(blind, 0, value) + poison, tolerance)
    # d ln(1 + x) and dH = −Σ p (ln p + H) dl. If the errors are not small, only a nearly empty tail must stay so.
    weighted = np.where(is_tail, np.exp(below), 0) / (1 + exact[0])[..., None]
    largest_error = np.where(weighted > 1e-9, apart, 0).max(axis=-1, initial=0)
    log_total = np.log1p(exact[0])
    lse_error = np.maximum(np.log1p(most[0]) - log_total, log_total - np.log1p(least[0]))
    own_error = np.take_along_axis(error, at, -1)[..., 0]
    lse_error = lse_error + own_error + close * np.minimum(exact[0], 1) + 4 * Real(2.0**-53) * np.abs(origin[..., 0])
    fields["logsumexp"] = Bounded(np.where(blind, -np.inf, top + log_total), lse_error)
    entropy = log_total - np.where(is_tail, weighted * below, 0).sum(axis=-1)
    surprise = np.where(is_tail, np.abs(below - log_total[..., None] + entropy[..., None]), 0)
    linear = 2 * (weighted * surprise * apart).sum(axis=-1) + 4 * close * entropy
    vanished = np.where(is_tail & (np.exp(below) < floor), weighted * surprise, 0).sum(axis=-1)
    keys = Real(max(logits.shape[-1], 2))
    bound = most[0] * (1 + np.log1p(keys / np.where(most[0] > 0, most[0], 1)))
    tolerance = np.where(largest_error < 0.1, linear + 2 * vanished, np.where(most[0] < 1e-3, bound, np.inf))
    fields["entropy"] = Bounded(np.where(blind, 0, entropy) + poison, tolerance)
    # Squares below the smallest normal number may be lost.
    lost = problem.rounding.smallest_normal
    equal = _are_equal(problem) if visible.any() and problem.rounding.by_kernel else np.zeros(blind.shape, bool)
    _add_moments(fields, "logit", logits, error, visible, equal, close, lost)
    fields["max_logit"] = Bounded(top, np.where(visible, error, 0).max(axis=-1, initial=0))
    if problem.softcap is None and problem.bias is None:
        fields["score_max"], fields["score_variance"] = fields["max_logit"], fields["logit_variance"]
    else:
        scores = np.where(visible, soft.scores, -np.inf) if problem.visible.shape[-1] else logits
        scores_error = soft.scores_error if problem.visible.shape[-1] else error
        _add_moments(fields, "score", scores, scores_error, visible, equal, close, lost)
        score_error = np.where(visible, scores_error, 0).max(axis=-1, initial=0)
        fields["score_max"] = Bounded(scores.max(axis=-1), score_error)
        del fields["score_mean"]
    _add_sink_weight(fields, problem, soft, lse_error)
    for name, bounded in fields.items():
        # With a visible NaN or infinity only results of weights must be NaN. The others depend on comparisons.
        strange = soft.undefined | (soft.poisoned & ~np.isin(name, ("entropy", "tail_weight", "tail_p2", "tail_p3")))
        if name in ("logit_mean", "logit_variance", "score_variance", "score_max"):
            strange = strange | (visible & ~np.isfinite(soft.scores)).any(axis=-1)
        fields[name] = Bounded(bounded.value, np.where(strange, np.inf, bounded.tolerance))
    fields["visible_keys"] = Bounded(count.astype(Real), np.zeros(count.shape, Real))
    return fields


def _with_one_hidden_key(soft: Softmax) -> Softmax:
    """Return the softmax of a call without keys as if it had one hidden key."""
    shape = (*soft.logits.shape[:-1], 1)
    return Softmax(
        **{
            **soft.__dict__,
            "logits": np.full(shape, -np.inf, Real),
            "logits_error": np.zeros(shape, Real),
            "scores": np.full(shape, 0, Real),
        }
    )


def is_same_key(problem: Problem, at: np.ndarray) -> np.ndarray:
    """Return whether each key `[N, H, L, S]` is the same vector as the row's key at an index `[N, H, L, 1]`."""
    names: dict[bytes, int] = {}
    vectors = problem.k.astype(np.float64).reshape(-1, problem.k.shape[-1])
    numbered = np.array([names.setdefault(vector.tobytes(), len(names)) for vector in vectors])
    numbered = np.broadcast_to(numbered.reshape(problem.k.shape[:-1])[:, :, None], problem.visible.shape)
    return numbered == np.take_along_axis(numbered, at, -1)


def _are_equal(problem: Problem) -> np.ndarray:
    """Return the rows whose visible keys are all the same vector with the same bias, so that their logits are equal."""
    first = problem.visible.argmax(axis=-1)[..., None]
    same = is_same_key(problem, first)
    if problem.bias is not None:
        same &= problem.bias == np.take_along_axis(problem.bias, first, -1)
    return (same | ~problem.visible).all(axis=-1)


def _add_moments(fields, name, x, error, visible, equal, close, lost):
    """Add mean and variance; tolerances grow with the errors of the numbers and with their distances."""
    count = visible.sum(axis=-1)
    n = np.where(count > 0, count, 1)
    x = np.where(visible, x, 0)
    mean = x.sum(axis=-1) / n
    deviation = np.where(visible, x - mean[..., None], 0)
    variance = np.where(equal, 0, (deviation**2).sum(axis=-1) / n)
    error = np.where(visible, error, 0)
    mean_square = (error**2).sum(axis=-1) / n
    tolerance = 2 * np.sqrt(variance * mean_square) + mean_square + 4 * close * variance + lost
    largest = np.abs(x).max(axis=-1, initial=0)
    # Equal numbers have no spread, for any size and any common error.
    tolerance = np.where(equal, (Real(2.0**-60) * largest) ** 2, tolerance)
    spread = np.where(visible, np.abs(x - x.max(axis=-1, keepdims=True, initial=-np.inf)), 0).sum(axis=-1) / n
    # Below the smallest normal number each of n terms may be off by the smallest number.
    mean_error = error.sum(axis=-1) / n + close * spread + 8 * Real(2.0**-53) * largest + n * Real(2.0**-1074)
    nothing = count == 0
    fields[f"{name}_mean"] = Bounded(np.where(nothing, np.nan, mean), mean_error)
    beyond = variance > Real("1e307")
    fields[f"{name}_variance"] = Bounded(np.where(nothing, np.nan, variance), np.where(beyond, np.inf, tolerance))


def _add_sink_weight(fields, problem, soft, lse_error):
    if problem.sinks is None:
        zero = np.zeros(soft.blind.shape, Real)
        fields["sink_weight"] = Bounded(zero, zero)
        return
    value = np.where(soft.blind, 1, soft.sink_weight)
    sizes = np.abs(problem.sinks[:, None]) + np.abs(np.where(soft.blind, 0, fields["logsumexp"].value))
    tolerance = value * np.expm1(np.minimum(lse_error + 8 * Real(2.0**-53) * sizes, 100)) + 1e-12 * value
    fields["sink_weight"] = Bounded(value, np.minimum(tolerance, 1 - value + tolerance) + Real(2.0**-1022))
