"""Attention in one piece, by operations that torch differentiates in any mode and any number of times.

It holds every logit: for second derivatives and for forward-mode ones only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError
from sqrtdk.torch.arguments import without_autocast
from sqrtdk.torch.call import Backward, TensorCall, working_dtype
from sqrtdk.torch.chunked import compute_softmax, differentiate_block, multiply, visible_like
from sqrtdk.torch.tiles import Block, Entries, Tile, as_rank, by_group, cut_block


def attend_in_one_piece(call: TensorCall) -> tuple[Tensor, Tensor]:
    """Output `[..., H, L, V]` and weights `[..., H, L, S]`.

    Vectors with NaN or infinity count as zero, so that hidden ones give no gradient; rows that see one are NaN.
    """
    _require_no_dropout(call)
    rows, d_v, keys = call.query.shape[:-1], call.value.shape[-1], call.key.shape[-2]
    if not call.query.numel():
        return call.query.new_zeros((*rows, d_v)), call.query.new_zeros((*rows, keys))
    with without_autocast(call.query):
        block, poison = _cut_whole(call)
        weights = compute_softmax(block).weights * poison
        output = multiply(weights, block.v)
    return _restore(output, (*rows, d_v), call), _restore(weights, (*rows, keys), call)


def differentiate_in_one_piece(
    call: TensorCall, grad_output: Tensor, grad_weights: Tensor | None, *, scale_too: bool, mask_too: bool
) -> Backward:
    """The gradients, as `chunked.differentiate` gives them, by operations that can be differentiated in their turn."""
    _require_no_dropout(call)
    rows = call.query.shape[:-1]
    query, key, value, mask = call.query, call.key, call.value, call.mask
    if not query.numel():
        return Backward(
            torch.zeros_like(query),
            torch.zeros_like(key),
            torch.zeros_like(value),
            query.new_zeros(rows),
            query.new_zeros(rows),
            query.new_zeros(0) if mask is None else torch.zeros_like(mask),
        )
    shared = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    with without_autocast(query):
        block, poison = _cut_whole(call)
        soft = compute_softmax(block)
        soft = soft._replace(weights=soft.weights * poison)

        def as_block(x: Tensor) -> Tensor:
            return by_group(as_rank(x, 4).flatten(0, -4).to(block.q.dtype), shared)

        also = None if grad_weights is None else as_block(grad_weights)
        found, grad_logits = differentiate_block(block, soft, as_block(grad_output), also, scale_too)
    to_mask = found.mask
    if mask is not None and mask_too:
        whole = grad_logits.flatten(1, 2).reshape(*call.heads_shape, rows[-1], key.shape[-2])
        to_mask = whole.sum_to_size(mask.shape).to(mask.dtype)
    return Backward(
        _restore(found.query, query.shape, call),
        found.key.reshape(key.shape).to(key.dtype),
        found.value.reshape(value.shape).to(value.dtype),
        found.scale.reshape(rows) if scale_too else found.scale,
        found.sinks.reshape(rows) if call.sinks is not None else found.sinks,
        to_mask,
    )


def _require_no_dropout(call: TensorCall) -> None:
    if call.dropout:
        raise InvalidValueError(
            "dropout must be 0 for second and forward-mode derivatives of attention, as its draw is not in their graph"
        )


def _cut_whole(call: TensorCall) -> tuple[Block, Tensor]:
    """All of the call as one block with its non-finite vectors zeroed, and NaN for the rows that see one, else 1."""
    rows, keys = call.query.shape[:-1], call.key.shape[-2]
    q, k, v = (as_rank(x, 4).flatten(0, -4) for x in (call.query, call.key, call.value))
    scale = None if call.scale is None else as_rank(call.scale.expand(rows), 3).flatten(0, -3)
    mask = None
    if call.mask is not None:
        mask = as_rank(call.mask.expand(*call.heads_shape, rows[-1], keys), 4).flatten(0, -4)
    sinks = None if call.sinks is None else as_rank(call.sinks.expand(call.heads_shape), 2).flatten(0, -2)
    tile = Tile(slice(0, q.shape[0]), slice(0, k.shape[1]), slice(0, q.shape[2]), slice(0, keys), 0)
    block = cut_block(Entries(call, q, k, v, scale, mask, sinks, ()), tile, working_dtype(q.dtype))
    visible = visible_like(block, (*block.q.shape[:-1], keys))
    (block.q, bad_q), (block.k, bad_k), (block.v, bad_v) = (_set_aside(x) for x in (block.q, block.k, block.v))
    block.may_be_traced = True
    bad = bad_q[..., None] | (bad_k | bad_v)[:, :, None, None]
    blighted = (visible & bad).any(dim=-1, keepdim=True)
    return block, torch.zeros_like(blighted, dtype=block.q.dtype).masked_fill(blighted, torch.nan) + 1.0


def _restore(x: Tensor, shape: tuple[int, ...], call: TensorCall) -> Tensor:
    """`[n, g, R, l, ·]` in the caller's shape and dtype."""
    return x.flatten(1, 2).reshape(shape).to(call.query.dtype)


def _set_aside(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[..., D]` with its non-finite vectors zeroed, and which they were `[...]`."""
    bad = ~torch.isfinite(x).all(dim=-1)
    return torch.where(bad[..., None], 0.0, x), bad
