"""The textbook operation in float64 NumPy: readable, and the definition of what is right.

Shape legend: L queries, S keys, D = dₖ, V = dᵥ; `...` any leading axes, broadcast as in NumPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.statistics import AttentionStatistics

Array = npt.NDArray[Any]


def softmax(x: npt.ArrayLike, axis: int = -1) -> Array:
    """exp(x − max x)/Σ exp(x − max x): no overflow for any finite input; −inf entries get weight 0.

    A slice that is −inf throughout (it sees nothing) or empty gives zeros.

    >>> softmax([1000.0, 1000.0]).tolist()
    [0.5, 0.5]
    """
    x = np.asarray(x)
    x = x.astype(np.result_type(x.dtype, np.float32), copy=False)
    largest = x.max(axis=axis, keepdims=True, initial=-np.inf)
    # Two finite numbers may lie further apart than the dtype reaches; their difference −inf gives the right weight, 0.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        e = np.exp(x - np.where(largest == -np.inf, 0.0, largest).astype(x.dtype))
        total = e.sum(axis=axis, keepdims=True)
        return np.asarray(e / np.where(total == 0.0, 1.0, total).astype(x.dtype))


def scaled_dot_product_attention(
    Q: npt.ArrayLike,
    K: npt.ArrayLike,
    V: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """The textbook's attention, softmax(QKᵀ·scale)·V with scale 1/√dₖ; returns the output and the weights.

    Args:
        Q, K, V: arrays `[..., L, D]`, `[..., S, D]`, `[..., S, V]`.
        mask: boolean, broadcast to `[..., L, S]`; True means "may attend".
        scale: multiplies QKᵀ; None is 1/√dₖ.

    Returns:
        `(output, weights)`: `[..., L, V]` and `[..., L, S]`; rows of weights sum to 1 (0 if they see nothing). Computed
        in float64, returned in the common dtype of Q, K and V (float64 for integers). What is masked has no influence.

    Raises:
        InvalidValueError, InvalidTypeError: shapes that do not fit, a mask that is not boolean, a scale not finite.

    >>> import numpy as np
    >>> output, weights = scaled_dot_product_attention(np.eye(2), np.eye(2), np.eye(2))
    >>> weights.round(3).tolist()
    [[0.67, 0.33], [0.33, 0.67]]
    """
    Q, K, V = np.asarray(Q), np.asarray(K), np.asarray(V)
    if min(Q.ndim, K.ndim, V.ndim) < 2 or Q.shape[-1] != K.shape[-1] or K.shape[-2] != V.shape[-2]:
        raise InvalidValueError(
            "Q, K, V must have shapes [..., L, D], [..., S, D], [..., S, V] with the same D and S, "
            f"got {Q.shape}, {K.shape}, {V.shape}"
        )
    try:
        np.broadcast_shapes(Q.shape[:-2], K.shape[:-2], V.shape[:-2])
    except ValueError:
        raise InvalidValueError(
            f"Q, K, V must have leading axes that broadcast, got {Q.shape}, {K.shape}, {V.shape}"
        ) from None
    dtype = np.result_type(Q, K, V)
    dtype = np.dtype(np.float64) if dtype.kind in "biu" else dtype
    Q, K, V = Q.astype(np.float64), K.astype(np.float64), V.astype(np.float64)
    factor = 1.0 / math.sqrt(max(Q.shape[-1], 1)) if scale is None else scale
    if not np.isfinite(factor):
        raise InvalidValueError(f"scale must be finite, got {scale}")
    with np.errstate(all="ignore"):
        scores = Q @ np.swapaxes(K, -1, -2) * factor
        visible = _textbook_mask(mask, scores.shape)
        weights = softmax(np.where(visible, scores, -np.inf))
        return _weigh(weights, V, visible).astype(dtype), weights.astype(dtype)


def _textbook_mask(mask: npt.ArrayLike | None, shape: tuple[int, ...]) -> Array:
    visible = np.asarray(True if mask is None else mask)
    if visible.dtype != np.bool_:
        # An additive mask taken as truth values would show exactly the keys it hides.
        raise InvalidTypeError(f"mask must be boolean (True: may attend), got {visible.dtype}")
    try:
        return np.broadcast_to(visible, shape)
    except ValueError:
        raise InvalidValueError(f"mask must broadcast to [..., L, S] = {shape}, got {visible.shape}") from None


@dataclass(frozen=True)
class Rows:
    """Some query rows in front of all their keys, everything float64, masks already worked out.

    Args:
        q, k, v: `[..., L, D]`, `[..., S, D]`, `[..., S, V]`.
        scale: `[..., L, 1]`.
        visible: boolean `[..., L, S]`: may this query see this key.
        bias: `[..., L, S]` added to the (capped) scores, or None.
        softcap: logits become cap·tanh(scores/cap), or None.
        sink: `[..., 1, 1]`, one more logit in the denominator, or None.
    """

    q: Array
    k: Array
    v: Array
    scale: Array
    visible: Array
    bias: Array | None = None
    softcap: float | None = None
    sink: Array | None = None


class _Softmax(NamedTuple):
    """What forward and backward both need: all `[..., L, S]` but `largest` and `total` `[..., L, 1]`."""

    products: Array
    scores: Array
    squashed: Array | None
    logits: Array
    largest: Array
    exponentials: Array
    total: Array
    weights: Array


def _compute_softmax(rows: Rows) -> _Softmax:
    products = rows.q @ np.swapaxes(rows.k, -1, -2)
    scores = rows.scale * products
    squashed = None if rows.softcap is None else np.tanh(scores / rows.softcap)
    logits = scores if squashed is None or rows.softcap is None else rows.softcap * squashed
    if rows.bias is not None:
        logits = logits + rows.bias
    logits = np.where(rows.visible, logits, -np.inf)
    largest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    # Seeing nothing gives zeros; seeing only logits of −inf (an infinite key) is 0/0 and must not look like it.
    origin = np.where(rows.visible.any(axis=-1, keepdims=True), largest, 0.0)
    exponentials = np.exp(logits - origin)
    total = exponentials.sum(axis=-1, keepdims=True)
    with_sink = total if rows.sink is None else total + np.exp(rows.sink - origin)
    weights = exponentials / np.where(with_sink == 0.0, 1.0, with_sink)
    return _Softmax(products, scores, squashed, logits, largest, exponentials, total, weights)


def _weigh(weights: Array, values: Array, visible: Array) -> Array:
    """weights @ values in which a value that a row does not see has no influence on it, even if it is NaN."""
    finite = np.asarray(np.isfinite(values).all(axis=-1))
    if finite.all():
        return np.asarray(weights @ values)
    # 0·NaN is NaN: non-finite values are left out of the product and added to the rows that see them.
    result = weights @ np.where(finite[..., None], values, 0.0)
    for j in np.flatnonzero(~finite.reshape(-1, finite.shape[-1]).all(axis=0)):
        reaches = visible[..., :, j, None] & ~finite[..., None, j, None]
        result = result + np.where(reaches, weights[..., :, j, None] * values[..., None, j, :], 0.0)
    return np.asarray(result)


class Attended(NamedTuple):
    """Output `[..., L, V]`, weights `[..., L, S]` and statistics `[..., L]` (None if not asked for) of some rows."""

    output: Array
    weights: Array
    statistics: AttentionStatistics | None


def attend(rows: Rows, *, statistics: bool = True) -> Attended:
    """softmax(cap(scale·q·kᵀ) + bias)·v over the visible keys, with the statistics of every row."""
    with np.errstate(all="ignore"):
        soft = _compute_softmax(rows)
        output = _weigh(soft.weights, rows.v, rows.visible)
        return Attended(output, soft.weights, _describe(rows, soft) if statistics else None)


def _describe(rows: Rows, soft: _Softmax) -> AttentionStatistics:
    visible = np.broadcast_to(rows.visible, soft.logits.shape)
    count = visible.sum(axis=-1)
    some = count > 0
    largest = soft.largest[..., 0]
    keys = soft.logits.shape[-1]
    max_key = soft.logits.argmax(axis=-1) if keys else np.zeros(count.shape, dtype=np.int64)
    # The largest term is exactly 1 and is kept apart, so that what is left of it never drowns in rounding.
    tail = np.where(np.arange(keys) == max_key[..., None], 0.0, soft.exponentials)
    rest = tail.sum(axis=-1)
    total = 1.0 + rest
    below = np.where(tail > 0, soft.largest - soft.logits, 0.0)
    mean, variance = _mean_and_variance(soft.logits, visible, soft.largest)
    if soft.squashed is None and rows.bias is None:
        score_max, score_variance = largest, variance
    else:
        scores = np.where(visible, soft.scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        score_max, score_variance = top[..., 0], _mean_and_variance(scores, visible, top)[1]
    logsumexp = np.where(some, largest + np.log1p(rest), -np.inf)
    entropy = np.log1p(rest) + (tail * below).sum(axis=-1) / total
    poison = largest * 0.0 if keys else 0.0  # NaN where a visible logit is NaN or the largest is infinite
    poison = np.where(some, poison, 0.0)
    return AttentionStatistics(
        visible_keys=count.astype(np.int64),
        max_key=np.where(some, max_key, -1).astype(np.int64),
        max_logit=largest,
        logsumexp=logsumexp,
        # Rounding may lift a uniform row an ulp above the largest entropy there is.
        entropy=np.where(some, np.minimum(entropy, np.log(np.maximum(count, 1))), 0.0) + poison,
        tail_weight=np.where(some, rest / total, 0.0) + poison,
        tail_p2=np.where(some, (tail * tail).sum(axis=-1) / total**2, 0.0) + poison,
        tail_p3=np.where(some, (tail * tail * tail).sum(axis=-1) / total**3, 0.0) + poison,
        logit_mean=mean,
        logit_variance=variance,
        score_max=score_max,
        score_variance=score_variance,
        sink_weight=np.zeros(count.shape)
        if rows.sink is None
        else np.broadcast_to(1.0 / (1.0 + np.exp(logsumexp - rows.sink[..., 0])), count.shape).copy(),
    )


def _mean_and_variance(x: Array, visible: Array, origin: Array) -> tuple[Array, Array]:
    """Mean and population variance over the visible keys; NaN without any.

    Measured from `origin`, one of the numbers: the distances of a row that differs by an ulp are exact, so the rounding
    of their mean cannot hide the spread; then two passes.
    """
    count = visible.sum(axis=-1)
    n = np.where(count > 0, count, 1)
    apart = np.where(visible, x - origin, 0.0)
    centre = apart.sum(axis=-1) / n
    deviation = np.where(visible, apart - centre[..., None], 0.0)
    some = count > 0
    variance = (deviation * deviation).sum(axis=-1) / n
    return np.where(some, origin[..., 0] + centre, np.nan), np.where(some, variance, np.nan)


class RowGradients(NamedTuple):
    """Gradients from some rows, shaped as q, k, v of `Rows`; scale and sink `[..., L]`."""

    query: Array
    key: Array
    value: Array
    scale: Array
    sink: Array


def differentiate(rows: Rows, grad_output: Array) -> RowGradients:
    """Gradients of Σ output·grad_output with respect to q, k, v, each row's scale and each row's sink.

    With P the weights (sink in the denominator), dP = grad_output·vᵀ and δ = Σ P∘dP:
    dlogit = P∘(dP − δ), dscore = dlogit·(1 − tanh²), ∂scale of a row = Σ dscore·(q·k), ∂sink = −p_sink·δ.
    """
    with np.errstate(all="ignore"):
        soft = _compute_softmax(rows)
        visible = np.broadcast_to(rows.visible, soft.logits.shape)
        grad_weights = np.where(visible, grad_output @ np.swapaxes(rows.v, -1, -2), 0.0)
        delta = (soft.weights * grad_weights).sum(axis=-1, keepdims=True)
        grad_scores = np.where(visible, soft.weights * (grad_weights - delta), 0.0)
        if soft.squashed is not None:
            grad_scores = np.where(visible, grad_scores * (1.0 - soft.squashed * soft.squashed), 0.0)
        grad_products = np.where(visible, rows.scale * grad_scores, 0.0)
        seen_by = np.swapaxes(visible, -1, -2)
        if rows.sink is None:
            grad_sink = np.zeros(delta.shape[:-1])
        else:
            sink_weight = 1.0 / (1.0 + np.exp(soft.largest + np.log(soft.total) - rows.sink))
            grad_sink = -(sink_weight * delta)[..., 0]
        return RowGradients(
            query=_weigh(grad_products, rows.k, visible),
            key=_weigh(np.swapaxes(grad_products, -1, -2), rows.q, seen_by),
            value=_weigh(np.swapaxes(soft.weights, -1, -2), grad_output, seen_by),
            scale=np.where(visible, grad_scores * soft.products, 0.0).sum(axis=-1),
            sink=np.where(visible.any(axis=-1), grad_sink, 0.0),
        )
