"""The textbook operation in float64 NumPy: readable, and the definition of a right result.

Shape legend: L queries, S keys, D = dₖ, V = dᵥ; `...` any leading axes, broadcast as in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk.backends import Plan
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.operation.call import BY_ROW, Backward, Call, Forward, GradientRequest, Wanted
from sqrtdk.operation.dropout import draw_kept, growth_of_kept
from sqrtdk.operation.engines.row_statistics import describe
from sqrtdk.operation.visibility import as_truth
from sqrtdk.scales import default_factor
from sqrtdk.statistics import COUNTS, MEASURES, ROW_FIELDS, AttentionStatistics

Array = npt.NDArray[Any]


def softmax(x: npt.ArrayLike, axis: int = -1) -> Array:
    """Return exp(x − max x)/Σ exp(x − max x): no overflow for any finite input; −inf entries get weight 0.

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
    """Return output and weights of the textbook's attention, softmax(QKᵀ·scale)·V with scale 1/√dₖ.

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
    factor = default_factor(max(Q.shape[-1], 1)) if scale is None else scale
    if not np.isfinite(factor):
        raise InvalidValueError("scale", f"must be finite, got {scale}")
    with np.errstate(all="ignore"):
        scores = Q @ np.swapaxes(K, -1, -2) * factor
        visible = _textbook_mask(mask, scores.shape)
        weights = softmax(np.where(visible, scores, -np.inf))
        return _weigh(weights, V, visible).astype(dtype), weights.astype(dtype)


def _textbook_mask(mask: npt.ArrayLike | None, shape: tuple[int, ...]) -> Array:
    visible = np.asarray(True if mask is None else mask)
    if visible.dtype != np.bool_:
        # An additive mask taken as truth values would show exactly the keys it hides.
        raise InvalidTypeError("mask", f"must be boolean (True: may attend), got {visible.dtype}")
    try:
        return np.broadcast_to(visible, shape)
    except ValueError:
        raise InvalidValueError("mask", f"must broadcast to [..., L, S] = {shape}, got {visible.shape}") from None


@dataclass(frozen=True)
class Rows:
    """Query rows with all their keys, in float64, masks already turned into visibility and bias.

    Args:
        q, k, v: `[..., L, D]`, `[..., S, D]`, `[..., S, V]`.
        scale: `[..., L, 1]`.
        visible: boolean `[..., L, S]`: may this query see this key.
        bias: `[..., L, S]` added to the (capped) scores, or None.
        distances: `[L, S]` from each query to each key, where slopes of ALiBi are a part of the bias, or None.
        softcap: logits become cap·tanh(scores/cap), or None.
        sink: `[..., 1, 1]`, one more logit in the denominator, or None.
        kept: boolean `[..., L, S]`: which weights dropout keeps, or None.
        growth: the factor by which they grow.
    """

    q: Array
    k: Array
    v: Array
    scale: Array
    visible: Array
    bias: Array | None = None
    distances: Array | None = None
    softcap: float | None = None
    sink: Array | None = None
    kept: Array | None = None
    growth: float = 1.0


class _Softmax(NamedTuple):
    """Numbers that both passes need: all `[..., L, S]` but `largest` and `total` `[..., L, 1]`."""

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
    shares, whole = exponentials, total
    if rows.sink is not None:
        # The larger of sink and logits is the origin: the other way round a sink 710 above would overflow.
        shift = np.where(np.isfinite(origin), np.maximum(origin, rows.sink), origin)
        shares = np.exp(logits - shift)
        whole = shares.sum(axis=-1, keepdims=True) + np.exp(rows.sink - shift)
    # A row with a NaN logit has NaN weights on what it sees, and still 0 on what it does not see.
    weights = np.where(rows.visible, shares / np.where(whole == 0.0, 1.0, whole), 0.0)
    return _Softmax(products, scores, squashed, logits, largest, exponentials, total, weights)


def _weigh(weights: Array, values: Array, visible: Array) -> Array:
    """Return weights @ values; a value that a row does not see has no influence on the row, even if it is NaN."""
    finite = np.asarray(np.isfinite(values).all(axis=-1))
    if finite.all():
        return np.asarray(weights @ values)
    # 0·NaN is NaN: non-finite values are left out of the product and added to the rows that see them.
    result = weights @ np.where(finite[..., None], values, 0.0)
    for j in np.flatnonzero(~finite.reshape(-1, finite.shape[-1]).all(axis=0)):
        reaches = visible[..., :, j, None] & ~finite[..., None, j, None]
        result = result + np.where(reaches, weights[..., :, j, None] * values[..., None, j, :], 0.0)
    return np.asarray(result)


def _drop(weights: Array, rows: Rows) -> Array:
    """Return the weights after dropout: dropped ones are 0, kept ones grow by 1/(1 − p)."""
    return weights if rows.kept is None else np.where(rows.kept, weights * rows.growth, 0.0)


class Attended(NamedTuple):
    """Output `[..., L, V]`, weights `[..., L, S]` and statistics `[..., L]` (None if not asked for) of some rows."""

    output: Array
    weights: Array
    statistics: AttentionStatistics | None


def attend(rows: Rows, *, statistics: bool = True) -> Attended:
    """Return softmax(cap(scale·q·kᵀ) + bias)·v over the visible keys, with the statistics of every row."""
    with np.errstate(all="ignore"):
        soft = _compute_softmax(rows)
        output = _weigh(_drop(soft.weights, rows), rows.v, rows.visible)
        if not statistics:
            return Attended(output, soft.weights, None)
        visible = np.broadcast_to(rows.visible, soft.logits.shape)
        scores = None if soft.squashed is None and rows.bias is None else soft.scores
        sink = None if rows.sink is None else rows.sink[..., 0]
        return Attended(output, soft.weights, AttentionStatistics(**describe(soft.logits, scores, visible, sink)))


class RowGradients(NamedTuple):
    """Gradients from some rows, shaped as q, k, v of `Rows`; scale, sinks, alibi `[..., L]`; logits `[..., L, S]`."""

    query: Array
    key: Array
    value: Array
    scale: Array
    sinks: Array
    alibi: Array
    logits: Array


def differentiate(rows: Rows, grad_output: Array, grad_weights: Array | None = None) -> RowGradients:
    """Return the gradients of Σ output·grad_output (+ Σ weights·grad_weights) for every argument of the rows.

    With P the weights (sink in the denominator), dP = drop(grad_output·vᵀ) + grad_weights and δ = Σ P∘dP:
    dlogit = P∘(dP − δ), dscore = dlogit·(1 − tanh²), ∂scale of a row = Σ dscore·(q·k), ∂sink = −p_sink·δ, ∂slope of a
    row = Σ dlogit·distance.
    """
    with np.errstate(all="ignore"):
        soft = _compute_softmax(rows)
        visible = np.broadcast_to(rows.visible, soft.logits.shape)
        grad_soft = _drop(grad_output @ np.swapaxes(rows.v, -1, -2), rows)
        grad_soft = grad_soft + (0.0 if grad_weights is None else grad_weights)
        grad_soft = np.where(visible, grad_soft, 0.0)
        delta = (soft.weights * grad_soft).sum(axis=-1, keepdims=True)
        grad_scores = grad_logits = np.where(visible, soft.weights * (grad_soft - delta), 0.0)
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
            value=_weigh(np.swapaxes(_drop(soft.weights, rows), -1, -2), grad_output, seen_by),
            scale=np.where(visible, grad_scores * soft.products, 0.0).sum(axis=-1),
            sinks=np.where(visible.any(axis=-1), grad_sink, 0.0),
            alibi=(grad_logits * (0.0 if rows.distances is None else rows.distances)).sum(axis=-1),
            logits=grad_logits,
        )


# Logits held at once, in elements: 2 MiB of float64 per temporary, whatever the sequence length.
BLOCK_ELEMENTS = 2**18

Tile = tuple[slice, slice, slice, slice]


class Tiles:
    """A call on arrays in the layout q `[N, G, R, L, D]`, k and v `[N, G, 1, S, ·]`, cut into tiles of rows.

    N batch entries (all leading axes), G key/value heads, R query heads of each, L queries.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.batch = call.heads_shape[:-1]
        self.shape = math.prod(self.batch), call.groups, call.shared, call.queries
        self.q = call.query.reshape(*self.shape, call.query.shape[-1])
        self.k = call.key.reshape(*self.shape[:2], 1, *call.key.shape[-2:])
        self.v = call.value.reshape(*self.shape[:2], 1, *call.value.shape[-2:])
        factor = call.factor if call.scale is None else call.scale
        self.factors = np.broadcast_to(factor, call.rows).reshape(self.shape)
        self.mask = None if call.mask is None else np.broadcast_to(call.mask, call.logits_shape)
        self.slopes = None if call.alibi is None else np.broadcast_to(call.alibi, call.rows).reshape(self.shape)

    def __iter__(self) -> Iterator[Tile]:
        """Blocks of rows (batch, kv head, all its query heads, query) of about BLOCK_ELEMENTS logits each."""
        batch, groups, shared, queries = self.shape
        rows_at_once = max(BLOCK_ELEMENTS // max(shared * self.call.keys, 1), 1)
        # Keys and values of several heads are widened together, up to a similar limit.
        gathered = self.call.keys * max(self.q.shape[-1], self.v.shape[-1], 1)
        heads_at_once = max(min(rows_at_once // max(queries, 1), 8 * BLOCK_ELEMENTS // max(gathered, 1)), 1)
        batch_at_once = max(heads_at_once // max(groups, 1), 1)
        for n in range(0, batch, batch_at_once):
            for g in range(0, groups, heads_at_once):
                for i in range(0, queries, rows_at_once):
                    yield (
                        slice(n, min(n + batch_at_once, batch)),
                        slice(g, min(g + heads_at_once, groups)),
                        slice(0, shared),
                        slice(i, min(i + rows_at_once, queries)),
                    )

    def rows(self, tile: Tile) -> Rows:
        """Return the float64 rows of a tile, with visibility and bias."""
        n, g, _, _ = tile
        call = self.call
        visible, bias = self._visibility(tile)
        distances = None
        if self.slopes is not None:
            rows, keys = np.arange(tile[3].start, tile[3].stop), np.arange(call.keys)
            distances = call.band.distances(rows, keys).astype(np.float64)
            bias = (0.0 if bias is None else bias) + self.slopes[tile][..., None] * distances
        return Rows(
            # C order whatever the caller's strides: the product's rounding follows the layout.
            q=self.q[tile].astype(np.float64, order="C"),
            k=self.k[n, g].astype(np.float64, order="C"),
            v=self.v[n, g].astype(np.float64, order="C"),
            scale=self.factors[tile][..., None],
            visible=visible,
            bias=bias,
            distances=distances,
            softcap=call.softcap or None,
            sink=None if call.sinks is None else call.sinks.reshape(self.shape[1:3])[None, g, :, None, None],
            kept=self._draw_kept(tile) if call.dropout else None,
            growth=growth_of_kept(call.dropout),
        )

    def _draw_kept(self, tile: Tile) -> Array:
        rows = np.arange(math.prod(self.shape)).reshape(self.shape)[tile]
        kept: Array = draw_kept(self.call.dropout, int(self.call.seed), rows[..., None], np.arange(self.call.keys))
        return kept

    def _visibility(self, tile: Tile) -> tuple[Array, Array | None]:
        """Return which keys each row of a tile sees, broadcastable to `[n, g, R, l, S]`, and the bias of the scores."""
        n, g, _, i = tile
        visible = self.call.band.sees(np.arange(i.start, i.stop), np.arange(self.call.keys))
        if visible is None:
            visible = np.ones((i.stop - i.start, self.call.keys), dtype=bool)
        if self.mask is None:
            return visible, None
        shared = all(stride == 0 for stride in self.mask.strides[: len(self.batch)])
        entries = range(1) if shared else range(n.start, n.stop)
        # Sliced before it is copied: a broadcast mask never grows beyond the tile.
        part = np.stack([self._mask_of(entry)[g, :, i] for entry in entries])
        bias = None if part.dtype == np.bool_ else part.astype(np.float64)
        return visible & as_truth(part), bias

    def _mask_of(self, entry: int) -> Array:
        assert self.mask is not None
        mask = self.mask[np.unravel_index(entry, self.batch)] if self.batch else self.mask
        return mask.reshape(*self.shape[1:3], *mask.shape[-2:])


class Reference:
    """The engine that is always available: float64 NumPy, a tile of rows at a time."""

    name = "reference"

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Return None for every call of arrays; the reason if torch is to differentiate the results."""
        return "its operations are not torch's" if wanted.derivatives else None

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Return output, statistics and weights from one pass over the tiles."""
        tiles, dtype = Tiles(call), call.query.dtype
        output = np.zeros((*tiles.shape, call.d_v), dtype)
        weights = np.zeros((*tiles.shape, call.keys), dtype) if wanted.weights else None
        counts = np.zeros((len(COUNTS), *tiles.shape), np.int64) if wanted.statistics else None
        measures = np.zeros((len(MEASURES), *tiles.shape)) if wanted.statistics else None
        for tile in tiles:
            attended = attend(tiles.rows(tile), statistics=wanted.statistics)
            with np.errstate(all="ignore"):
                output[tile] = attended.output
                if weights is not None:
                    weights[tile] = attended.weights
            if counts is not None and measures is not None and attended.statistics is not None:
                described = [getattr(attended.statistics, name) for name in ROW_FIELDS]
                for field, values in zip((*counts, *measures), described, strict=True):
                    field[tile] = values
        return Forward(
            output.reshape(*call.rows, call.d_v),
            None if measures is None else measures.reshape(len(MEASURES), *call.rows),
            None if counts is None else counts.reshape(len(COUNTS), *call.rows),
            None if weights is None else weights.reshape(*call.rows, call.keys),
        )

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """Return the gradients in float64; the softmax of each tile is recomputed."""
        tiles = Tiles(call)
        given = request.output.reshape(*tiles.shape, call.d_v)
        given_weights = None if request.weights is None else request.weights.reshape(*tiles.shape, call.keys)
        to_q, to_k, to_v = np.zeros(tiles.q.shape), np.zeros(tiles.k.shape), np.zeros(tiles.v.shape)
        by_row = {name: np.zeros(tiles.shape) for name in BY_ROW if request.gives(name, call)}
        # As large as the mask would be if it were not broadcast: only where its gradient is wanted.
        to_logits = np.zeros((*tiles.shape, call.keys)) if request.mask else None
        for tile in tiles:
            also = None if given_weights is None else given_weights[tile].astype(np.float64, order="C")
            part = differentiate(tiles.rows(tile), given[tile].astype(np.float64, order="C"), also)
            n, g, _, _ = tile
            to_q[tile] = part.query
            to_k[n, g] += part.key.sum(axis=2, keepdims=True)
            to_v[n, g] += part.value.sum(axis=2, keepdims=True)
            for name, to in by_row.items():
                to[tile] = getattr(part, name)
            if to_logits is not None:
                to_logits[tile] = part.logits
        return Backward(
            to_q.reshape(call.query.shape),
            to_k.reshape(call.key.shape),
            to_v.reshape(call.value.shape),
            mask=None if to_logits is None else sum_to(to_logits.reshape(call.logits_shape), call.mask.shape),
            **{name: to.reshape(call.rows) for name, to in by_row.items()},
        )


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return x summed over the axes along which an array of the given shape was broadcast to it."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return np.asarray(x.sum(axis=tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True))


REFERENCE_ENGINE = Reference()
