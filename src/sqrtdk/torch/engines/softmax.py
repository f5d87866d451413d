"""The softmax of a block of logits and its gradients, in operations that torch can trace and differentiate.

Shape legend as in `tiles`: logits of a block are `[n, g, R, l, s]`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.operation.call import Backward
from sqrtdk.operation.engines.row_statistics import describe
from sqrtdk.torch.engines.tiles import Block, wide_dtype
from sqrtdk.torch.internals import softmax_gradient


class Softmax(NamedTuple):
    """Numbers that both passes need, `[n, g, R, l, s]` each: tanh(scores/cap) if there is a cap, and
    `sink_weight` `[n, g, R, l, 1]` if there is a sink."""

    scores: Tensor
    squashed: Tensor | None
    logits: Tensor
    weights: Tensor
    sink_weight: Tensor | None


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a `[n, g, R, l, x]` times b `[n, g, x, y]`; the query heads of a group are stacked as rows."""
    n, g, shared, length, _ = a.shape
    return torch.bmm(a.reshape(n * g, shared * length, a.shape[-1]), b.reshape(n * g, *b.shape[2:])).view(
        n, g, shared, length, b.shape[-1]
    )


def compute_softmax(block: Block) -> Softmax:
    """Return the softmax of a block's logits, with the numbers it was computed from."""
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
    if block.may_be_traced or not math.isfinite(weights.sum()):
        # A row with a NaN logit has NaN weights on what it sees, and still 0 on what it does not see.
        weights = _hide(weights, block)
    return Softmax(scores, squashed, logits, weights, sink_weight)


def _logsumexp(logits: Tensor) -> Tensor:
    if not logits.shape[-1]:
        return logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    return torch.logsumexp(logits, dim=-1, keepdim=True)


def visible_like(block: Block, shape: tuple[int, ...]) -> Tensor:
    """Return which keys each row of a block sees, as a view in the shape of its logits."""
    if block.visible is None:
        return torch.ones((), dtype=torch.bool, device=block.q.device).expand(shape)
    return block.visible.expand(shape)


def weigh(weights: Tensor, values: Tensor, visible: Tensor, is_finite: bool) -> Tensor:
    """Return weights `[n, g, R, l, s]` times values `[n, g, s, x]`; values a row does not see have no influence."""
    # A finite sum has finite terms; one pass suffices. An infinite sum may be an overflow, so it only leads to a check.
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
    """Return Σ weights `[n, g, R, l, s]` · rows `[n, g, R, l, x]` over query heads and rows: `[n, g, s, x]`."""
    stacked = weights.flatten(2, 3).transpose(-1, -2)[:, :, None]
    seen_by = visible.flatten(2, 3).transpose(-1, -2)[:, :, None]
    return weigh(stacked, rows.flatten(2, 3), seen_by, is_finite)[:, :, 0]


def drop(weights: Tensor, block: Block) -> Tensor:
    """Return the weights after dropout: dropped ones are 0, kept ones grow by 1/(1 − p)."""
    if block.keep is None:
        return weights
    return torch.where(block.keep, weights * block.growth, 0.0)


def describe_block(block: Block, soft: Softmax, first_key: int) -> dict[str, Tensor]:
    """Return the statistics of a block's rows, by name; keys count from `first_key`."""
    wide = wide_dtype(block.q.device)
    visible = visible_like(block, soft.logits.shape)
    scores = None if soft.squashed is None and block.bias is None else soft.scores.to(wide)
    sink = None if block.sink is None else block.sink[..., 0].to(wide)
    described = describe(soft.logits.to(wide), scores, visible, sink)
    key = described["max_key"]
    described["max_key"] = torch.where(key < 0, -1, key + first_key)
    return described


def differentiate_block(
    block: Block, soft: Softmax, grad: Tensor, grad_weights: Tensor | None, scale_too: bool
) -> tuple[Backward, Tensor]:
    """Return a tile's gradients, and those of its logits; every operation can be differentiated again."""
    visible, finite = visible_like(block, soft.logits.shape), block.may_be_traced
    grad = grad.to(block.q.dtype)
    grad_weights = None if grad_weights is None else grad_weights.to(block.q.dtype)
    grad_soft = drop(_hide(multiply(grad, block.v.transpose(-1, -2)), block), block)
    if grad_weights is not None:
        grad_soft = grad_soft + _hide(grad_weights, block)
    to_sinks = to_scale = None
    if soft.sink_weight is None:
        grad_logits = _hide(softmax_gradient(grad_soft, soft.weights), block)
    else:
        delta = (soft.weights * grad_soft).sum(dim=-1, keepdim=True)
        grad_logits = _hide((grad_soft - delta) * soft.weights, block)
        to_sinks = torch.where(visible.any(dim=-1), -(soft.sink_weight * delta)[..., 0], 0.0)
    grad_scores = grad_logits
    if soft.squashed is not None:
        grad_scores = _hide(grad_logits * (1.0 - soft.squashed.square()), block)
    # Σ dscore·k of each row: times the scale it is the gradient of q, times q that of the scale.
    along_keys = weigh(grad_scores, block.k, visible, finite)
    if scale_too:
        to_scale = torch.where(visible.any(dim=-1), (along_keys * block.q).sum(dim=-1), 0.0)
    gradients = Backward(
        query=along_keys * block.scale,
        key=_weigh_by_keys(grad_scores, block.q * block.scale, visible, finite),
        value=_weigh_by_keys(drop(soft.weights, block), grad, visible, finite),
        scale=to_scale,
        sinks=to_sinks,
        alibi=None if block.distances is None else (grad_logits * block.distances).sum(dim=-1),
    )
    return gradients, grad_logits


def _hide(x: Tensor, block: Block) -> Tensor:
    """Return the tensor with zeros where the row does not see the key, which may hold NaN."""
    return x if block.visible is None else torch.where(block.visible, x, 0.0)
