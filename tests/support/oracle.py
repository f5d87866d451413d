"""Attention written key by key from its definition, for tests to compare with. Shares no code with the package."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field

import ml_dtypes
import mpmath
import numpy as np

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def draw(seed, q_shape, k_shape, d_v, dtype=np.float64, sharpness=2.0):
    """Return q, k, v of a call with sharp attention, because a wrong scale is invisible in near-uniform attention."""
    rng = np.random.default_rng(seed)
    q = sharpness * rng.standard_normal(q_shape)
    k = rng.standard_normal(k_shape)
    v = rng.standard_normal((*k_shape[:-1], d_v))
    return tuple(x.astype(dtype) for x in (q, k, v))


@dataclass
class Expected:
    """Expected results from the definition: arrays `[..., H, L]` by name; output and weights have one more axis."""

    output: np.ndarray
    weights: np.ndarray
    rows: dict[str, np.ndarray] = field(default_factory=dict)


ROW_FIELDS = (
    "visible_keys",
    "max_key",
    "max_logit",
    "logsumexp",
    "entropy",
    "sum_p2",
    "sum_p3",
    "logit_mean",
    "logit_variance",
    "score_max",
    "score_variance",
    "sink_weight",
)


def is_visible(i, j, *, causal, offset, window, entry):
    """Return whether query i sees key j by the rule of the design; `entry` is the mask's, True without a mask."""
    left, right = window or (None, None)
    if causal and j > i + offset:
        return False
    if left is not None and j < i + offset - left:
        return False
    if right is not None and j > i + offset + right:
        return False
    return bool(entry) if isinstance(entry, bool | np.bool_) else entry != -math.inf


def _mean_and_variance(x):
    mean = math.fsum(x) / len(x)
    return mean, math.fsum((value - mean) ** 2 for value in x) / len(x)


def describe_row(logits, scores, keys, sink):
    """Return the statistics of a row that sees `keys` with these logits and scores; empty lists for no keys."""
    if not keys:
        seen_nothing = dict.fromkeys(ROW_FIELDS, 0.0) | {"visible_keys": 0, "max_key": -1}
        seen_nothing |= dict.fromkeys(("max_logit", "logsumexp", "score_max"), -math.inf)
        seen_nothing |= dict.fromkeys(("logit_mean", "logit_variance", "score_variance"), math.nan)
        return seen_nothing | {"sink_weight": 0.0 if sink is None else 1.0}
    top = max(logits)
    e = [math.exp(x - top) for x in logits]
    total = math.fsum(e)
    p = [x / total for x in e]
    logsumexp = top + math.log(total)
    mean, variance = _mean_and_variance(logits)
    return {
        "visible_keys": len(keys),
        "max_key": keys[logits.index(top)],
        "max_logit": top,
        "logsumexp": logsumexp,
        "entropy": math.fsum(-x * math.log(x) for x in p if x > 0),
        "sum_p2": math.fsum(x**2 for x in p),
        "sum_p3": math.fsum(x**3 for x in p),
        "logit_mean": mean,
        "logit_variance": variance,
        "score_max": max(scores),
        "score_variance": _mean_and_variance(scores)[1],
        "sink_weight": 0.0 if sink is None else 1.0 / (1.0 + math.exp(logsumexp - sink)),
    }


def attention_by_definition(
    q, k, v, *, scale=None, mask=None, causal=False, causal_offset=0, window=None, softcap=None, sinks=None
):
    """Return the whole operation in Python loops over float64 values; `scale` is a number or an array `[..., H, L]`."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    flat = q.ndim == 2
    if flat:
        q, k, v = q[None], k[None], v[None]
    *batch, heads, queries, d_k = q.shape
    groups, keys, d_v = k.shape[-3], k.shape[-2], v.shape[-1]
    scale = np.broadcast_to(1 / math.sqrt(d_k) if scale is None else scale, (*batch, heads, queries))
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), (*batch, heads, queries, keys))
    output = np.zeros((*batch, heads, queries, d_v))
    weights = np.zeros((*batch, heads, queries, keys))
    rows = {name: np.zeros((*batch, heads, queries)) for name in ROW_FIELDS}
    for *b, h, i in itertools.product(*map(range, (*batch, heads, queries))):
        b = tuple(b)
        g = h // (heads // groups)
        sink = None if sinks is None else float(np.asarray(sinks).astype(np.float64)[h])
        seen, scores, logits = [], [], []
        for j in range(keys):
            entry = mask[(*b, h, i, j)]
            if is_visible(i, j, causal=causal, offset=causal_offset, window=window, entry=entry):
                score = float(scale[(*b, h, i)]) * math.fsum(q[(*b, h, i)] * k[(*b, g, j)])
                capped = score if softcap is None else softcap * math.tanh(score / softcap)
                seen.append(j)
                scores.append(score)
                logits.append(capped if mask.dtype == bool else capped + float(entry))
        row = describe_row(logits, scores, seen, sink)
        for name, value in row.items():
            rows[name][(*b, h, i)] = value
        for j, logit in zip(seen, logits, strict=True):
            weights[(*b, h, i, j)] = math.exp(logit - row["logsumexp"]) * (1.0 - row["sink_weight"])
        for c in range(d_v):
            output[(*b, h, i, c)] = math.fsum(weights[(*b, h, i, j)] * v[(*b, g, j, c)] for j in seen)
    if flat:
        return Expected(output[0], weights[0], {name: value[0] for name, value in rows.items()})
    return Expected(output, weights, rows)


def exact_row(logits):
    """Return the statistics of one row of logits (float64, all visible) in arbitrary precision, as mpmath numbers.

    Results are cached, because tests ask for the same rows on every level of the kernel.
    """
    return _exact_row(np.asarray(logits, np.float64).tobytes())


@functools.cache
def _exact_row(numbers):
    logits = np.frombuffer(numbers)
    # The squared Jacobian norm is of order e^(−2·gap) beside terms of order one; gap is between the largest two logits.
    gap = float(np.diff(np.sort(logits)[-2:]).sum())
    with mpmath.workdps(40 + int(min(gap, 700.0))):
        x = [mpmath.mpf(float(value)) for value in logits]
        n = len(x)
        at = max(range(n), key=x.__getitem__)
        below = [value - x[at] for value in x]
        e = [mpmath.exp(value) for value in below]
        total = mpmath.fsum(e)
        tail = mpmath.fsum(e[:at] + e[at + 1 :])
        tail2 = mpmath.fsum(value * value for j, value in enumerate(e) if j != at)
        tail3 = mpmath.fsum(value**3 for j, value in enumerate(e) if j != at)
        p2, p3 = (tail2 + 1) / total**2, (tail3 + 1) / total**3
        mean = mpmath.fsum(x) / n
        return {
            "max_logit": x[at],
            "logsumexp": x[at] + mpmath.log1p(tail),
            "entropy": mpmath.log1p(tail) - mpmath.fsum(a * b for a, b in zip(e, below, strict=True)) / total,
            "max_weight": 1 / total,
            "tail_weight": tail / total,
            "sum_p2": p2,
            "sum_p3": p3,
            "jacobian_trace": 1 - p2,
            "jacobian_norm": mpmath.sqrt(max(p2 - 2 * p3 + p2 * p2, 0)),
            "logit_mean": mean,
            "logit_variance": mpmath.fsum((value - mean) ** 2 for value in x) / n,
        }


def same(one, other):
    """Assert that output, weights and every statistic are equal to the bit."""
    assert one.output.tobytes() == other.output.tobytes()
    if one.weights is not None and other.weights is not None:
        np.testing.assert_array_equal(one.weights, other.weights)
    # The sample and the first position are given, not computed.
    for name in set(one.statistics.__dataclass_fields__) - {"sample", "first_position"}:
        np.testing.assert_array_equal(getattr(one.statistics, name), getattr(other.statistics, name), err_msg=name)


FEATURES = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.array([-3.0, 0.0, 2.0, 30.0])},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.7},
    "integer scale": {"scale": 2},
    "zero-dimensional scale": {"scale": np.float32(0.75)},
    "scale per head": {"scale": np.array([0.1, 0.5, 2.0, -1.0])[:, None]},
    "scale per row": {"scale": np.linspace(-1, 3, 20).reshape(4, 5)},
    "scale per batch, head and row": {"scale": np.linspace(-1, 3, 40).reshape(2, 4, 5)},
    "scale per batch": {"scale": np.array([0.3, 1.7])[:, None, None]},
    "all": {
        "scale": np.linspace(0.2, 2, 20).reshape(4, 5),
        "softcap": 3.0,
        "sinks": np.array([0.5, -0.5, 1.0, 0.0]),
        "mask": np.where(np.random.default_rng(0).random((4, 5, 6)) < 0.8, 0.5, -np.inf),
        "causal": True,
        "causal_offset": 1,
        "window": (3, None),
    },
}
"""Keyword arguments for queries `[2, 4, 5, 3]` and keys `[2, 2, 6, 3]`, one feature per entry."""
