"""Attention in pure torch, a tile of rows at a time, with statistics and gradients: for every device."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from sqrtdk.backends import Plan
from sqrtdk.operation.call import BY_ROW, Backward, Call, Forward, GradientRequest, Wanted
from sqrtdk.statistics import COUNTS, MEASURES, ROW_FIELDS
from sqrtdk.torch.arguments import without_autocast
from sqrtdk.torch.engines.softmax import (
    Softmax,
    compute_softmax,
    describe_block,
    differentiate_block,
    drop,
    visible_like,
    weigh,
)
from sqrtdk.torch.engines.tiles import (
    Block,
    Entries,
    Tile,
    as_rank,
    by_group,
    cut_block,
    cut_entries,
    cut_tiles,
    wide_dtype,
    working_dtype,
)

_SMALL, _LARGE = 2.0**-40, 2.0**40
# Weights below this one may be subnormal in float32, or intermediate results may have been.
_LEAST = 2.0**-100


class Blocks:
    """The engine for every device: one tile's softmax after another, recomputed for the gradients."""

    name = "blocks"

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Return None, or the reason: its gradients have no derivatives, because tiles are written in place."""
        return "it writes in place, which has no derivatives" if wanted.derivatives else None

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Return the output, and statistics and weights if wanted, from one pass over the tiles."""
        with without_autocast(call.query):
            return _attend(call, wanted)

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """Return the gradients; each tile's softmax is recomputed, so only one tile's logits are held at once.

        With P the weights (sink in the denominator), dP = drop(grad_output·vᵀ) + grad_weights and δ = Σ P∘dP:
        dlogit = P∘(dP − δ), dscore = dlogit·(1 − tanh²), ∂scale of a row = Σ dscore·(q·k), ∂sink = −p_sink·δ.
        """
        # A transform may call with gradients on, but the blocks are written in place.
        with without_autocast(call.query), torch.no_grad():
            return _differentiate(call, request)


BLOCKS = Blocks()


def _attend(call: Call, wanted: Wanted) -> Forward:
    query, rows = call.query, call.rows
    output = query.new_zeros((*rows, call.value.shape[-1]))
    measures = query.new_zeros((len(MEASURES), *rows), dtype=wide_dtype(query.device)) if wanted.statistics else None
    counts = query.new_zeros((len(COUNTS), *rows), dtype=torch.int64) if wanted.statistics else None
    weights = query.new_zeros((*rows, call.key.shape[-2])) if wanted.weights else None
    for entries in cut_entries(call):
        at, shared = entries.at, entries.shared
        to_output = as_rank(output[at], 4)
        to_weights = None if weights is None else as_rank(weights[at], 4)
        to_fields = []
        if counts is not None and measures is not None:
            to_fields = [as_rank(field[at], 3) for field in (*counts, *measures)]
        for tile in cut_tiles(entries):
            n, g, i, j = tile
            h = slice(g.start * shared, g.stop * shared)
            for part, (block, soft) in enumerate(_soften(entries, tile, every_score=wanted.statistics)):
                visible = visible_like(block, soft.logits.shape)
                mixed = weigh(drop(soft.weights, block), block.v, visible, False)
                to_output[n, h, i] += mixed.flatten(1, 2).to(query.dtype)
                if to_weights is not None:
                    to_weights[n, h, i, j] += soft.weights.flatten(1, 2).to(query.dtype)
                if to_fields:
                    seeing = visible.any(dim=-1).flatten(1, 2)
                    described = describe_block(block, soft, j.start)
                    for field, name in zip(to_fields, ROW_FIELDS, strict=True):
                        own = described[name].flatten(1, 2).to(field.dtype)
                        field[n, h, i] = own if part == 0 else torch.where(seeing, own, field[n, h, i])
    return Forward(output, measures, counts, weights)


def _soften(entries: Entries, tile: Tile, *, every_score: bool) -> list[tuple[Block, Softmax]]:
    """Return a tile's softmax, and a second one in float64 of the rows whose numbers leave the range of float32.

    Each row sees its keys in one of the two and nothing in the other, so the results can be added, and the bits of a
    row do not depend on other rows.
    """
    dtype, wide = working_dtype(entries.call.query.dtype), wide_dtype(entries.call.query.device)
    block = cut_block(entries, tile, dtype)
    soft = compute_softmax(block)
    if dtype == wide or entries.call.query.device.type == "meta":
        return [(block, soft)]
    rows = _find_wide_rows(entries.call, block, soft, every_score)
    if rows is None:
        return [(block, soft)]
    wide_block = cut_block(entries, tile, wide)
    for part, seen in ((block, ~rows), (wide_block, rows)):
        part.visible = visible_like(part, soft.logits.shape) & seen
    return [(part, compute_softmax(part)) for part in (block, wide_block)]


def _find_wide_rows(call: Call, block: Block, soft: Softmax, every_score: bool) -> Tensor | None:
    """Return which rows `[n, g, R, l, 1]` need float64; None if none does."""
    rows = torch.zeros_like(soft.weights[..., :1], dtype=torch.bool)
    if call.has_far_softcap:
        return ~rows
    if call.scale is None:
        if _is_extreme(call.factor):
            return ~rows
    else:
        sizes = cast(Tensor, block.scale).abs()
        rows = rows | (sizes > _LARGE) | ((sizes < _SMALL) & (sizes != 0.0))
    if every_score or call.softcap or not math.isfinite(soft.weights.sum()):
        # Products of finite numbers may be infinite: every visible score must be finite, or those that decide. A soft
        # cap would hide an infinite one, and whether its sign is right.
        finite = torch.isfinite(soft.scores)
        if block.bias is not None:
            finite = finite & torch.isfinite(soft.logits)
        if block.visible is not None:
            finite = finite | ~block.visible
        rows = rows | ~finite.all(dim=-1, keepdim=True)
    if block.sink is not None and soft.weights.shape[-1]:
        # A sink may leave so little to the keys that weights in float32 lose digits to underflow.
        visible = visible_like(block, soft.logits.shape).any(dim=-1, keepdim=True)
        rows = rows | (visible & (soft.weights.amax(dim=-1, keepdim=True) < _LEAST))
    return rows if bool(rows.any()) else None


def _is_extreme(factor: float) -> bool:
    """Return whether a scale is so large or small that its product with q alone may leave the range of float32."""
    size = abs(factor)
    return size != 0.0 and not _SMALL <= size <= _LARGE


def _differentiate(call: Call, request: GradientRequest) -> Backward:
    query, key, value = call.query, call.key, call.value
    sums, rows, wide = working_dtype(query.dtype), call.rows, wide_dtype(query.device)
    to_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
    to_key, to_value = (torch.zeros_like(x, dtype=sums, memory_format=torch.contiguous_format) for x in (key, value))
    by_row = {name: query.new_zeros(rows, dtype=wide) for name in BY_ROW if request.gives(name, call)}
    to_mask = query.new_zeros(call.mask.shape, dtype=sums) if request.mask else None
    for entries in cut_entries(call):
        at, shared = entries.at, entries.shared
        at_query, at_key, at_value = (as_rank(x[at], 4) for x in (to_query, to_key, to_value))
        at_rows = {name: as_rank(x[at], 3) for name, x in by_row.items()}
        given = as_rank(request.output[at], 4)
        given_weights = None if request.weights is None else as_rank(request.weights[at], 4)
        for tile in cut_tiles(entries):
            n, g, i, j = tile
            h = slice(g.start * shared, g.stop * shared)
            slope = by_group(given[n, h, i], shared)
            also = None if given_weights is None else by_group(given_weights[n, h, i, j], shared)
            part, grad_logits = _differentiate_tile(entries, tile, slope, also, request.scale)
            at_query[n, h, i] = part.query.flatten(1, 2).to(query.dtype)
            at_key[n, g, j] += part.key
            at_value[n, g, j] += part.value
            for name, to in at_rows.items():
                to[n, h, i] = getattr(part, name).flatten(1, 2).to(wide)
            if to_mask is not None:
                _add_to_mask(to_mask, grad_logits, call, at, (n, h, i, j))
    dtype = query.dtype
    return Backward(
        to_query,
        to_key.to(dtype),
        to_value.to(dtype),
        mask=None if to_mask is None else to_mask.to(call.mask.dtype),
        **by_row,
    )


def _differentiate_tile(
    entries: Entries, tile: Tile, slope: Tensor, slope_of_weights: Tensor | None, scale_too: bool
) -> tuple[Backward, Tensor]:
    """Return the gradients of a tile, and those of its logits."""
    wide = wide_dtype(entries.call.query.device)
    parts = []
    for block, soft in _soften(entries, tile, every_score=scale_too):
        part = differentiate_block(block, soft, slope, slope_of_weights, scale_too)
        if block.q.dtype != wide and not _is_finite(part[0]):
            # Sums of finite numbers may leave the range of float32 although the result does not.
            wide_block = cut_block(entries, tile, wide)
            wide_block.visible = block.visible
            part = differentiate_block(wide_block, compute_softmax(wide_block), slope, slope_of_weights, scale_too)
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    (one, logits), (other, other_logits) = parts
    both = zip(one, other, strict=True)
    return Backward(*(None if x is None else x + y for x, y in both)), logits + other_logits


def _is_finite(gradients: Backward) -> bool:
    return all(x is None or math.isfinite(x.sum()) for x in gradients)


def _add_to_mask(
    to: Tensor, grad_logits: Tensor, call: Call, at: tuple[int, ...], where: tuple[slice, slice, slice, slice]
) -> None:
    """Add a tile's gradients to the mask's, summed over the axes along which the mask was broadcast."""
    target = as_rank(to, max(len(call.logits_shape), 4))
    tile = grad_logits.flatten(1, 2)
    indices = [slice(index, index + 1) for index in at] + list(where)
    tile = tile[(None,) * (target.dim() - tile.dim())]
    for axis in range(target.dim()):
        if target.shape[axis] == 1:
            tile = tile.sum(dim=axis, keepdim=True)
            indices[axis] = slice(0, 1)
    target[tuple(indices)] += tile
