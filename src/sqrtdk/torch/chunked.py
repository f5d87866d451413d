"""Attention in pure torch, a tile of rows at a time, with statistics and gradients: for every device.

Shape legend as in `tiles`: logits of a tile are `[n, g, R, l, s]`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.arguments import without_autocast
from sqrtdk.torch.call import Backward, Forward, TensorCall, wide_dtype, working_dtype
from sqrtdk.torch.tiles import Block, Entries, Tile, as_rank, by_group, cut_block, cut_entries, cut_tiles

_SMALL, _LARGE = 2.0**-40, 2.0**40
# Weights below this one may be subnormal numbers in float32, or have been on the way.
_LEAST = 2.0**-100


class Softmax(NamedTuple):
    """What forward and backward both need, `[n, g, R, l, s]` each: tanh(scores/cap) if there is a cap, and
    `sink_weight` `[n, g, R, l, 1]` if there is a sink."""

    scores: Tensor
    squashed: Tensor | None
    logits: Tensor
    weights: Tensor
    sink_weight: Tensor | None


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a `[n, g, R, l, x]` times b `[n, g, x, y]`, the query heads of a group stacked as rows: b is never repeated."""
    n, g, shared, length, _ = a.shape
    return torch.bmm(a.reshape(n * g, shared * length, a.shape[-1]), b.reshape(n * g, *b.shape[2:])).view(
        n, g, shared, length, b.shape[-1]
    )


def compute_softmax(block: Block) -> Softmax:
    """The softmax of a block's logits, with what it was computed from."""
    # The scale goes into q: one pass over q instead of one over all scores.
    scores = multiply(block.q * block.scale, block.k.transpose(-1, -2))
    squashed = torch.tanh(scores / block.softcap) if block.softcap else None
    logits = scores if squashed is None else squashed * block.softcap
    if block.bias is not None:
        logits = logits + block.bias
    blind = None
    if block.visible is not None:
        logits = logits.masked_fill(~block.visible, -torch.inf)
        # Seeing nothing gives zeros, not NaN; seeing only logits of −inf (an infinite key) stays NaN.
        blind = ~block.visible.any(dim=-1, keepdim=True)
        blind = blind if block.may_be_traced or bool(blind.any()) else None
    # Rows of −inf alone have neither a softmax nor derivatives: they stand at 0 until their weights are set to 0.
    softened = logits if blind is None else logits.masked_fill(blind, 0.0)
    weights = torch.softmax(softened, dim=-1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    sink_weight = None
    if block.sink is not None:
        above = block.sink - _logsumexp(softened)
        sink_weight = torch.sigmoid(above)
        # Not 1 − sigmoid: where the sink dominates nothing would be left of the difference.
        weights = weights * torch.sigmoid(-above)
    return Softmax(scores, squashed, logits, weights, sink_weight)


def _logsumexp(logits: Tensor) -> Tensor:
    if not logits.shape[-1]:
        return logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    return torch.logsumexp(logits, dim=-1, keepdim=True)


def visible_like(block: Block, shape: tuple[int, ...]) -> Tensor:
    """Which keys each row of a block sees, as a view of the shape of its logits."""
    if block.visible is None:
        return torch.ones((), dtype=torch.bool, device=block.q.device).expand(shape)
    return block.visible.expand(shape)


def _weigh(weights: Tensor, values: Tensor, visible: Tensor, is_finite: bool) -> Tensor:
    """weights `[n, g, R, l, s]` times values `[n, g, s, x]`; a value that a row does not see has no influence on it."""
    # A finite sum has finite terms, and takes one pass; an infinite one may be an overflow, so it only makes careful.
    if is_finite or math.isfinite(values.sum()):
        return multiply(weights, values)
    finite = torch.isfinite(values).all(dim=-1)
    # 0·NaN is NaN: non-finite values are left out of the product and added to the rows that see them.
    result = multiply(weights, torch.where(finite[..., None], values, 0.0))
    for j in torch.nonzero(~finite.flatten(0, 1).all(dim=0)).flatten().tolist():
        reaches = visible[..., j, None] & ~finite[:, :, None, None, j, None]
        result = result + torch.where(reaches, weights[..., j, None] * values[:, :, None, None, j], 0.0)
    return result


def _weigh_by_keys(weights: Tensor, rows: Tensor, visible: Tensor, is_finite: bool) -> Tensor:
    """Σ over query heads and rows of weights `[n, g, R, l, s]` times rows `[n, g, R, l, x]`: `[n, g, s, x]`."""
    stacked = weights.flatten(2, 3).transpose(-1, -2)[:, :, None]
    seen_by = visible.flatten(2, 3).transpose(-1, -2)[:, :, None]
    return _weigh(stacked, rows.flatten(2, 3), seen_by, is_finite)[:, :, 0]


def _drop(weights: Tensor, block: Block) -> Tensor:
    if block.keep is None:
        return weights
    return torch.where(block.keep, weights / block.kept_share if block.kept_share else weights, 0.0)


def _is_computable(block: Block, soft: Softmax, every_score: bool) -> bool:
    """Whether the visible scores and logits are finite: every one, or at least those that decide the weights."""
    if not every_score and math.isfinite(soft.weights.sum()):
        return True
    finite = torch.isfinite(soft.scores)
    if block.bias is not None:
        finite = finite & torch.isfinite(soft.logits)
    if block.visible is not None:
        finite = finite | ~block.visible
    return bool(finite.all())


def _is_extreme(entries: Entries) -> bool:
    """Whether a scale is so large or small that its product with q alone may leave the range of float32."""
    if entries.scale is None:
        size = abs(entries.call.factor)
        return size != 0.0 and not _SMALL <= size <= _LARGE
    sizes = entries.scale.abs()
    return bool(((sizes > _LARGE) | ((sizes < _SMALL) & (sizes != 0.0))).any())


def _is_drowned(block: Block, soft: Softmax) -> bool:
    """Whether a sink leaves so little to the keys that weights in float32 lose digits to underflow."""
    if block.sink is None:
        return False
    weights = soft.weights.amax(dim=-1) if soft.weights.shape[-1] else soft.weights.sum(dim=-1)
    return bool(((weights < _LEAST) & (visible_like(block, soft.logits.shape).any(dim=-1))).any())


def _soften(entries: Entries, tile: Tile, *, every_score: bool) -> tuple[Block, Softmax]:
    """A tile's softmax, in float64 where products of finite numbers or shares of sinks pass what float32 can hold."""
    dtype = working_dtype(entries.q.dtype)
    block = cut_block(entries, tile, dtype)
    soft = compute_softmax(block)
    wide = wide_dtype(entries.q.device)
    if dtype != wide and (
        _is_extreme(entries) or not _is_computable(block, soft, every_score) or _is_drowned(block, soft)
    ):
        return _soften_widely(entries, tile)
    return block, soft


def _soften_widely(entries: Entries, tile: Tile) -> tuple[Block, Softmax]:
    block = cut_block(entries, tile, wide_dtype(entries.q.device))
    return block, compute_softmax(block)


def attend(call: TensorCall, *, statistics: bool, weights: bool, output: bool = True) -> Forward:
    """The forward pass; `output=False` leaves the output empty, where only the rest is wanted."""
    with without_autocast(call.query):
        return _attend(call, statistics, weights, output)


def _attend(call: TensorCall, statistics: bool, weights: bool, output: bool) -> Forward:
    query = call.query
    rows, d_v, keys = query.shape[:-1], call.value.shape[-1], call.key.shape[-2]
    wide = wide_dtype(query.device)
    found = query.new_zeros((*rows, d_v) if output else 0)
    numbers = query.new_zeros((11, *rows) if statistics else 0, dtype=wide)
    counts = query.new_zeros((2, *rows) if statistics else 0, dtype=torch.int64)
    every = query.new_zeros((*rows, keys) if weights else 0)
    number = 0
    for entries in cut_entries(call):
        at, shared = entries.at, entries.shared
        to_output = as_rank(found[at], 4) if output else None
        to_weights = as_rank(every[at], 4) if weights else None
        to_fields = [as_rank(field[at], 3) for field in (*counts, *numbers)] if statistics else []
        for tile in cut_tiles(entries, number):
            number = tile.number + 1
            n, g, i, j, _ = tile
            h = slice(g.start * shared, g.stop * shared)
            block, soft = _soften(entries, tile, every_score=statistics)
            if to_output is not None:
                visible = visible_like(block, soft.logits.shape)
                to_output[n, h, i] = (
                    _weigh(_drop(soft.weights, block), block.v, visible, False).flatten(1, 2).to(query.dtype)
                )
            if to_weights is not None:
                to_weights[n, h, i, j] = soft.weights.flatten(1, 2).to(query.dtype)
            if statistics:
                described = _describe(block, soft, wide, j.start)
                for field, values in zip(to_fields, described, strict=True):
                    field[n, h, i] = values.flatten(1, 2)
    return Forward(found, numbers, counts, every)


def _describe(block: Block, soft: Softmax, wide: torch.dtype, first_key: int) -> list[Tensor]:
    """The statistics of a tile's rows, as `reference.py` defines them, in the order of `AttentionStatistics`."""
    visible = visible_like(block, soft.logits.shape)
    count = visible.sum(dim=-1)
    some = count > 0
    keys = soft.logits.shape[-1]
    logits = soft.logits.to(wide)
    largest, at = logits.max(dim=-1, keepdim=True) if keys else (_logsumexp(logits), count[..., None])
    top = largest[..., 0]
    # The largest term is exactly 1 and is kept apart, so that what is left of it never drowns in rounding.
    below = largest - logits
    tail = torch.where(visible & (torch.arange(keys, device=at.device) != at), torch.exp(-below), 0.0)
    rest = tail.sum(dim=-1)
    total = 1.0 + rest
    mean, variance = _mean_and_variance(logits, visible, largest)
    score_max, score_variance = top, variance
    if soft.squashed is not None or block.bias is not None:
        scores = torch.where(visible, soft.scores.to(wide), -torch.inf)
        highest = scores.amax(dim=-1, keepdim=True) if keys else largest
        score_max, score_variance = highest[..., 0], _mean_and_variance(scores, visible, highest)[1]
    logsumexp = torch.where(some, top + torch.log1p(rest), -torch.inf)
    entropy = torch.log1p(rest) + torch.where(tail > 0, tail * below, 0.0).sum(dim=-1) / total
    poison = torch.where(some, top * 0.0, 0.0)  # NaN where a visible logit is NaN or the largest is infinite
    nothing = torch.zeros_like(rest)
    sink_weight = nothing if block.sink is None else torch.sigmoid(block.sink[..., 0].to(wide) - logsumexp)
    # Rounding may lift a uniform row an ulp above the largest entropy there is.
    entropy = torch.minimum(entropy, torch.log(count.clip(min=1).to(wide)))
    return [
        count,
        torch.where(some, at[..., 0] + first_key, -1),
        top,
        logsumexp,
        torch.where(some, entropy, nothing) + poison,
        torch.where(some, rest / total, nothing) + poison,
        torch.where(some, tail.square().sum(dim=-1) / total**2, nothing) + poison,
        torch.where(some, tail.pow(3).sum(dim=-1) / total**3, nothing) + poison,
        mean,
        variance,
        score_max,
        score_variance,
        sink_weight,
    ]


def _mean_and_variance(x: Tensor, visible: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance over the visible keys, measured from `origin`, one of them; NaN without any."""
    count = visible.sum(dim=-1)
    n = count.clip(min=1)
    apart = torch.where(visible, x - origin, 0.0)
    centre = apart.sum(dim=-1) / n
    deviation = torch.where(visible, apart - centre[..., None], 0.0)
    variance = deviation.square().sum(dim=-1) / n
    some = count > 0
    return torch.where(some, origin[..., 0] + centre, torch.nan), torch.where(some, variance, torch.nan)


def differentiate(
    call: TensorCall, grad_output: Tensor, grad_weights: Tensor | None, *, scale_too: bool, mask_too: bool
) -> Backward:
    """The gradients, each tile's softmax computed anew: no more is held at once than a tile's logits.

    Those of the scale and of an additive mask only if they are wanted; without sinks there are none of them.

    With P the weights (sink in the denominator), dP = grad_output·vᵀ + grad_weights and δ = Σ P∘dP:
    dlogit = P∘(dP − δ), dscore = dlogit·(1 − tanh²), ∂scale of a row = Σ dscore·(q·k), ∂sink = −p_sink·δ.
    """
    with without_autocast(call.query):
        return _differentiate(call, grad_output, grad_weights, scale_too, mask_too)


def _differentiate(
    call: TensorCall, grad_output: Tensor, grad_weights: Tensor | None, scale_too: bool, mask_too: bool
) -> Backward:
    query, key, value, mask = call.query, call.key, call.value, call.mask
    sums = working_dtype(query.dtype)
    rows, wide = query.shape[:-1], wide_dtype(query.device)
    result = Backward(
        torch.zeros_like(query, memory_format=torch.contiguous_format),
        torch.zeros_like(key, dtype=sums, memory_format=torch.contiguous_format),
        torch.zeros_like(value, dtype=sums, memory_format=torch.contiguous_format),
        query.new_zeros(rows if scale_too else 0, dtype=wide),
        query.new_zeros(rows if call.sinks is not None else 0, dtype=wide),
        query.new_zeros(0) if mask is None or not mask_too else query.new_zeros(mask.shape, dtype=sums),
    )
    number = 0
    for entries in cut_entries(call):
        at, shared = entries.at, entries.shared
        to_query, to_key, to_value = (as_rank(x[at], 4) for x in result[:3])
        to_scale, to_sinks = (as_rank(x[at], 3) if x.numel() else None for x in result[3:5])
        given = as_rank(grad_output[at], 4)
        given_weights = None if grad_weights is None else as_rank(grad_weights[at], 4)
        for tile in cut_tiles(entries, number):
            number = tile.number + 1
            n, g, i, j, _ = tile
            h = slice(g.start * shared, g.stop * shared)
            block, soft = _soften(entries, tile, every_score=scale_too)
            slope = by_group(given[n, h, i], shared)
            also = None if given_weights is None else by_group(given_weights[n, h, i, j], shared)
            found, grad_logits = differentiate_block(block, soft, slope, also, scale_too)
            if block.q.dtype != wide and not _is_finite(found):
                # Sums of finite numbers may pass float32 although what comes of them does not.
                block, soft = _soften_widely(entries, tile)
                found, grad_logits = differentiate_block(block, soft, slope, also, scale_too)
            to_query[n, h, i] = found.query.flatten(1, 2).to(query.dtype)
            to_key[n, g, j] += found.key
            to_value[n, g, j] += found.value
            if to_scale is not None:
                to_scale[n, h, i] = found.scale.flatten(1, 2).to(wide)
            if to_sinks is not None:
                to_sinks[n, h, i] = found.sinks.flatten(1, 2).to(wide)
            if mask_too:
                _add_to_mask(result.mask, grad_logits, call, at, (n, h, i, j))
    dtype = query.dtype
    return result._replace(
        key=result.key.to(dtype),
        value=result.value.to(dtype),
        mask=result.mask if mask is None or not mask_too else result.mask.to(mask.dtype),
    )


def differentiate_block(
    block: Block, soft: Softmax, grad: Tensor, grad_weights: Tensor | None, scale_too: bool
) -> tuple[Backward, Tensor]:
    """A tile's gradients, and those of its logits; every operation can be differentiated in its turn."""
    visible, finite = visible_like(block, soft.logits.shape), block.may_be_traced
    grad = grad.to(block.q.dtype)
    grad_weights = None if grad_weights is None else grad_weights.to(block.q.dtype)
    grad_soft = _drop(_hide(multiply(grad, block.v.transpose(-1, -2)), block), block)
    if grad_weights is not None:
        grad_soft = grad_soft + _hide(grad_weights, block)
    nothing = grad.new_zeros(0)
    to_sinks = to_scale = nothing
    if soft.sink_weight is None:
        softmax_backward = torch.ops.aten._softmax_backward_data.default
        grad_logits = _hide(softmax_backward(grad_soft, soft.weights, -1, grad_soft.dtype), block)
    else:
        delta = (soft.weights * grad_soft).sum(dim=-1, keepdim=True)
        grad_logits = _hide((grad_soft - delta) * soft.weights, block)
        to_sinks = torch.where(visible.any(dim=-1), -(soft.sink_weight * delta)[..., 0], 0.0)
    grad_scores = grad_logits
    if soft.squashed is not None:
        grad_scores = _hide(grad_logits * (1.0 - soft.squashed.square()), block)
    # Σ dscore·k of each row: times the scale it is the gradient of q, times q that of the scale.
    along_keys = _weigh(grad_scores, block.k, visible, finite)
    if scale_too:
        to_scale = torch.where(visible.any(dim=-1), (along_keys * block.q).sum(dim=-1), 0.0)
    found = Backward(
        query=along_keys * block.scale,
        key=_weigh_by_keys(grad_scores, block.q * block.scale, visible, finite),
        value=_weigh_by_keys(_drop(soft.weights, block), grad, visible, finite),
        scale=to_scale,
        sinks=to_sinks,
        mask=nothing,
    )
    return found, grad_logits


def _is_finite(gradients: Backward) -> bool:
    return all(math.isfinite(x.sum()) for x in gradients)


def _hide(x: Tensor, block: Block) -> Tensor:
    """Zero where the row does not see the key: what was computed there may be NaN."""
    return x if block.visible is None else torch.where(block.visible, x, 0.0)


def _add_to_mask(
    to: Tensor, grad_logits: Tensor, call: TensorCall, at: tuple[int, ...], where: tuple[slice, slice, slice, slice]
) -> None:
    """Add a tile's gradients to the mask's, summed over the axes along which the mask was broadcast."""
    full = (*call.heads_shape, call.query.shape[-2], call.key.shape[-2])
    target = as_rank(to, max(len(full), 4))
    tile = grad_logits.flatten(1, 2)
    indices = [slice(index, index + 1) for index in at] + list(where)
    tile = tile[(None,) * (target.dim() - tile.dim())]
    for axis in range(target.dim()):
        if target.shape[axis] == 1:
            tile = tile.sum(dim=axis, keepdim=True)
            indices[axis] = slice(0, 1)
    target[tuple(indices)] += tile
