"""Attention in one piece, by operations that torch differentiates in any mode and any number of times.

It holds every logit, and is used for second derivatives and forward mode only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sqrtdk.backends import Plan
from sqrtdk.operation.call import BY_ROW, Backward, Call, Forward, GradientRequest, Wanted
from sqrtdk.statistics import COUNTS, MEASURES
from sqrtdk.torch.arguments import without_autocast
from sqrtdk.torch.engines.softmax import (
    Softmax,
    compute_softmax,
    describe_block,
    differentiate_block,
    drop,
    multiply,
    visible_like,
)
from sqrtdk.torch.engines.tiles import Block, Entries, Tile, as_rank, by_group, cut_block, expand_arrays, wide_dtype
from sqrtdk.torch.internals import without_derivatives


class Whole:
    """The engine for derivatives of any order and mode."""

    name = "whole"

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Return None: it computes every call."""
        return None

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Return output, weights and statistics; the statistics have no derivatives.

        Vectors with NaN or infinity count as zero, so hidden ones give no gradient; rows that see one are NaN.
        """
        query, rows, keys = call.query, call.rows, call.key.shape[-2]
        if not query.numel():
            return _nothing(call, wanted)
        with without_autocast(query):
            block, poison, poison_of_logits = _cut_whole(call)
            soft = compute_softmax(block)
            weights = soft.weights * poison
            output = multiply(drop(weights, block), block.v)
        measures = counts = None
        if wanted.statistics:
            counts, measures = _describe(call, block, soft, poison_of_logits)
        return Forward(
            _restore(output, (*rows, call.value.shape[-1]), call),
            measures,
            counts,
            _restore(weights, (*rows, keys), call) if wanted.weights else None,
        )

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """Return the gradients, by operations that can be differentiated again."""
        query, key, value, mask, rows = call.query, call.key, call.value, call.mask, call.rows
        given = [name for name in BY_ROW if request.gives(name, call)]
        if not query.numel():
            return Backward(
                torch.zeros_like(query),
                torch.zeros_like(key),
                torch.zeros_like(value),
                mask=torch.zeros_like(mask) if request.mask else None,
                **{name: query.new_zeros(rows) for name in given},
            )
        with without_autocast(query):
            block, poison, _ = _cut_whole(call)
            soft = compute_softmax(block)
            soft = soft._replace(weights=soft.weights * poison)

            def as_block(x: Tensor) -> Tensor:
                return by_group(as_rank(x, 4).flatten(0, -4).to(block.q.dtype), call.shared)

            also = None if request.weights is None else as_block(request.weights)
            part, grad_logits = differentiate_block(block, soft, as_block(request.output), also, request.scale)
        to_mask = None
        if request.mask:
            whole = grad_logits.flatten(1, 2).reshape(call.logits_shape)
            to_mask = whole.sum_to_size(mask.shape).to(mask.dtype)
        return Backward(
            _restore(part.query, query.shape, call),
            part.key.reshape(key.shape).to(key.dtype),
            part.value.reshape(value.shape).to(value.dtype),
            mask=to_mask,
            **{name: getattr(part, name).reshape(rows) for name in given},
        )


WHOLE = Whole()


def _nothing(call: Call, wanted: Wanted) -> Forward:
    """Return the result of a call without queries."""
    query, rows, wide = call.query, call.rows, wide_dtype(call.query.device)
    return Forward(
        query.new_zeros((*rows, call.value.shape[-1])),
        query.new_zeros((len(MEASURES), *rows), dtype=wide) if wanted.statistics else None,
        query.new_zeros((len(COUNTS), *rows), dtype=torch.int64) if wanted.statistics else None,
        query.new_zeros((*rows, call.key.shape[-2])) if wanted.weights else None,
    )


def _describe(call: Call, block: Block, soft: Softmax, poison: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts and numbers of every row; the numbers are NaN in a row that sees NaN or infinity."""
    with without_derivatives():
        fields = describe_block(block, soft, 0)
        counts = torch.stack([fields[name].flatten(1, 2).reshape(call.rows) for name in COUNTS])
        numbers = [fields[name] * poison[..., 0] for name in MEASURES]
        measures = torch.stack([x.flatten(1, 2).reshape(call.rows) for x in numbers])
    return counts, measures


def _cut_whole(call: Call) -> tuple[Block, Tensor, Tensor]:
    """All of the call as one block with its non-finite vectors zeroed; NaN for the rows that see one, else 1; and the
    same for rows whose logits one reaches: those of q and k alone."""
    keys = call.key.shape[-2]
    joined: dict[str, Any] = {name: as_rank(x, rank).flatten(0, -rank) for name, x, rank in expand_arrays(call)}
    q, k = joined["query"], joined["key"]
    tile = Tile(slice(0, q.shape[0]), slice(0, k.shape[1]), slice(0, q.shape[2]), slice(0, keys))
    block = cut_block(Entries(call._replace(**joined), ()), tile, wide_dtype(q.device))
    visible = visible_like(block, (*block.q.shape[:-1], keys))
    (block.q, bad_q), (block.k, bad_k), (block.v, bad_v) = (_set_aside(x) for x in (block.q, block.k, block.v))
    block.may_be_traced = True
    in_logits = bad_q[..., None] | bad_k[:, :, None, None]

    def poison(bad: Tensor) -> Tensor:
        blighted = (visible & bad).any(dim=-1, keepdim=True)
        return torch.zeros_like(blighted, dtype=block.q.dtype).masked_fill(blighted, torch.nan) + 1.0

    return block, poison(in_logits | bad_v[:, :, None, None]), poison(in_logits)


def _restore(x: Tensor, shape: tuple[int, ...], call: Call) -> Tensor:
    """Return `[n, g, R, l, ·]` in the caller's shape and dtype."""
    return x.flatten(1, 2).reshape(shape).to(call.query.dtype)


def _set_aside(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x `[..., D]` with its non-finite vectors zeroed, and which ones they were `[...]`."""
    bad = ~torch.isfinite(x).all(dim=-1)
    return torch.where(bad[..., None], 0.0, x), bad
