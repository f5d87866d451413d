"""Products of tensors under a watch: projections, scores, scores of mixed heads, and weights that meet values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.torch.internals import without_modes
from sqrtdk.torch.watch.coordinates import Layout, Place, Step, UnevenError
from sqrtdk.torch.watch.following import Known, resample
from sqrtdk.torch.watch.memory import Fact
from sqrtdk.torch.watch.parts import Candidate
from sqrtdk.torch.watch.scores import Done, Factors, Product, Scores, Term

if TYPE_CHECKING:
    from sqrtdk.torch.watch.recognise import Recogniser

_MIXED_AFTER = "heads are mixed after the softmax, and statistics are of the weights before that"
_WITHOUT = "a product of queries and keys meets values without a softmax"
_LINEAR = "queries meet a product of keys and values: linear attention, without a softmax of scores"
_EITHER = "three projections are multiplied without a softmax, as in linear attention"
_PAIRS = "its softmax is taken over pairs of queries and keys, one by one"


def see_product(
    watcher: Recogniser,
    a: Tensor,
    b: Tensor,
    output: Tensor,
    alpha: float = 1.0,
    added: Tensor | None = None,
    beta: float = 1.0,
) -> None:
    """A matrix product: values with weights, a projection, or scores."""
    for one, other, axis in ((a, b, a.ndim - 1), (b, a, b.ndim - 2)):
        fact = watcher.memory.look_up(one)
        if fact is not None and _see_values(watcher, fact, one, other, axis, output):
            return
    has_bias = added is not None and added.ndim == 1
    plain = alpha == beta == 1.0 and (added is None or has_bias)
    is_learnt = watcher.is_learnt(b)
    projection = watcher.read_projection(b, output, added) if plain and is_learnt else None
    # Weights of their own for each head, and the same tokens for all.
    per_head = is_learnt and b.ndim == 3 and b.shape[0] > 1 and b.stride(0) != 0 and a.stride(0) == 0
    lineage = watcher.root(output, [a], projection, (-1, 0) if per_head else (-1,))
    if is_learnt or has_bias or a.ndim not in (2, 3) or not output.is_floating_point():
        return
    q, k = (a, b.transpose(-1, -2)) if a.ndim == 3 else (a[None], b.t()[None])
    product = Product(
        watcher.side_of(a)._replace(vectors=q),
        watcher.side_of(b)._replace(vectors=k),
        watcher.is_learnt(a),
        watcher.locate(),
    )
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    steps = (Step(queries, 0), Step(1, 0), Step(0, 1))
    shape = (batch, queries, keys)
    place = Place(shape, steps) if a.ndim == 3 else Place(shape[1:], steps[1:])
    done: tuple[Done, ...] = () if alpha == 1.0 else (Done("multiply", alpha),)
    if added is not None and beta != 0.0:
        done += (Done("add", Term(added.expand(output.shape), place), beta),)
    watcher.memory.write(
        output,
        scores=Scores(product, Layout.of(output, place), done),
        lineage=replace(lineage, is_projection=False) if product.is_followed else None,
    )


def _see_values(watcher: Recogniser, fact: Fact, one: Tensor, other: Tensor, axis: int, output: Tensor) -> bool:
    """Whether one side of a product was weights or scores, which then meet values or are mixed."""
    is_learnt = watcher.is_learnt(other)
    candidates, scores = fact.candidates, fact.scores
    if scores is not None and not candidates:
        if scores.stage == "logits":
            return (
                _see_mixing(watcher, scores, one, axis, output)
                if is_learnt
                else _see_without(watcher, scores, one, other, axis)
            )
        if scores.stage == "exp" and not is_learnt:
            candidate = watcher.judge(scores, one, one, axis, is_block=True)
            candidates = fact.candidates = () if candidate is None else (candidate,)
    others = watcher.memory.look_up(other)
    if not candidates or others is fact:
        return False
    if fact.trace is not None and fact.trace.is_over_heads(one, axis):
        note_mixing(candidates)
        trace = fact.trace.move(one, output) if output.shape == one.shape else None
        watcher.memory.write(output, candidates=candidates, trace=trace)
        return True
    contracted = one.shape[axis]
    # Several softmaxes may have been put together along their keys.
    together = sum(candidate.width for candidate in candidates) == contracted
    met = [
        candidate
        for candidate in candidates
        # What was not understood may have been rearranged since, as the diagonals of a sliding window are.
        if (candidate.is_softmax or not is_learnt)
        and not candidate.needs_exponential
        and (candidate.reason is not None or together or candidate.keys <= contracted <= candidate.width)
    ]
    watcher.confirm(*met)
    if not any(candidate.is_softmax for candidate in candidates) and not met:
        return False
    watcher.root(output, [])
    if others is not None and others.candidates:
        watcher.memory.note(output, candidates=others.candidates)
    return True


def note_mixing(candidates: tuple[Candidate, ...]) -> None:
    """Weights of several heads were added up."""
    for candidate in candidates:
        if _MIXED_AFTER not in candidate.remarks:
            candidate.remarks.append(_MIXED_AFTER)


def _see_mixing(watcher: Recogniser, scores: Scores, one: Tensor, axis: int, output: Tensor) -> bool:
    """Whether heads of scores meet something learnt: as many as before they are scores still, mixed."""
    queries = scores.product.q.vectors.shape[1]
    try:
        step = scores.layout.step(one.shape[axis], one.stride(axis))
    except UnevenError:
        return False
    if step.key or not step.row or step.row % queries:
        return False  # a product as features, and a projection of it
    trace = scores.trace.move(one, output) if output.shape == one.shape else None
    if trace is None:
        watcher.root(output, [one], is_projection=False)
    else:
        mixed = replace(scores, layout=trace.lay_out(), done=(*scores.done, Done("mix", None)))
        watcher.memory.write(output, scores=mixed)
    return True


def _see_without(watcher: Recogniser, scores: Scores, one: Tensor, other: Tensor, axis: int) -> bool:
    """Note scores that meet values as they are; what comes out of it is a product like any other."""
    values, product = watcher.memory.look_up(other), scores.product
    if values is None or values.scores is not None or values.lineage is None or not values.lineage.is_projection:
        return False
    try:
        is_over_keys = scores.layout.step(one.shape[axis], one.stride(axis)).key > 0
    except UnevenError:
        return False
    is_over_tokens = product.is_over_tokens
    if is_over_tokens is None and any(one.kind == "add" for one in scores.done):
        return False  # a residual stream
    if product.is_of_projections and is_over_keys is not is_over_tokens:
        reason = _EITHER if is_over_tokens is None else _LINEAR if is_over_tokens else _WITHOUT
        watcher.confirm(Candidate(product.stack, 0, 0, reason=reason))
        watcher.memory.release(product)
    return False


def see_filter(watcher: Recogniser, name: str, args: Any, output: Tensor) -> None:
    """A convolution, or a product by an operation that is not taken apart: of scores or weights it mixes heads."""
    x, *others = [arg for arg in args if isinstance(arg, Tensor)]
    fact = watcher.memory.look_up(x)
    if fact is not None and output.shape == x.shape and x.ndim > 2:
        if fact.candidates and fact.trace is not None and fact.trace.is_over_heads(x, 1):
            note_mixing(fact.candidates)
            watcher.memory.write(output, candidates=fact.candidates, trace=fact.trace.move(x, output))
            return
        if (
            fact.scores is not None
            and fact.scores.stage == "logits"
            and _see_mixing(watcher, fact.scores, x, 1, output)
        ):
            return
    # A convolution has its columns after the batch.
    columns = (1,) if "conv" in name and output.ndim > 2 else (-1,)
    # Two tensors that the model computed make scores, whatever the operation is called.
    both = len(others) > 0 and not any(map(watcher.is_learnt, others)) and "conv" not in name
    # Each column by itself, perhaps head by head: the heads are those of the projection before.
    by_column = name == "aten::convolution" and args[-1] == x.shape[1] > 1
    trace = resample(x, fact, output) if by_column else None
    watcher.root(output, [x], None, columns, is_projection=not both)
    if trace is not None:
        watcher.memory.note(output, trace=trace)


def see_factors(watcher: Recogniser, known: list[Known], output: Tensor) -> None:
    """Two tensors multiplied entry by entry: dot products of queries and keys begin like that."""
    (a, one), (b, two) = known
    if any(fact.lineage is None or not fact.lineage.is_projection or fact.is_learnt for fact in (one, two)):
        return
    if one is two:
        return
    if a.shape == b.shape:
        watcher.memory.note(output, is_pair=True)
        return
    q, k = (side._replace(vectors=side.vectors.expand(output.shape)) for side in map(watcher.side_of, (a, b)))
    watcher.memory.note(output, factors=Factors(q, k, watcher.locate()))


def see_sum(watcher: Recogniser, x: Tensor, fact: Fact, axis: int, output: Tensor) -> bool:
    """Whether products of entries were added up to dot products: scores, or pairs that nobody can line up."""
    axis %= x.ndim
    if fact.factors is None:
        if not fact.is_pair or axis != x.ndim - 1:
            return False
        pairs = Candidate(watcher.locate(), 0, 0, reason=_PAIRS, is_softmax=False, needs_exponential=True)
        watcher.memory.write(output, candidates=(pairs,))
        return True
    with without_modes(), torch.no_grad():
        scores = fact.factors.add_up(axis, output)
    if scores is not None and fact.lineage is not None:
        lineage = replace(fact.lineage.lost("sum"), is_projection=False)
        watcher.memory.write(output, scores=scores, lineage=lineage)
    return scores is not None


def see_weighted(watcher: Recogniser, candidates: tuple[Candidate, ...], tensors: list[Tensor], output: Tensor) -> bool:
    """Whether weights were multiplied with values entry by entry, the same weight for several entries."""
    if len(tensors) != 2:
        return False
    for weights, values in (tensors, tensors[::-1]):
        own, other = watcher.memory.look_up(weights), watcher.memory.look_up(values)
        if own is None or other is None or other.lineage is None or other.candidates:
            continue
        # Of a softmax of something unknown, values by entries tell nothing: a mixture of experts looks the same.
        met = [one for one in candidates if one.is_of_scores and not one.needs_exponential]
        if not own.candidates or not met:
            continue
        sizes = zip(weights.shape, values.shape, output.shape, strict=False)
        if weights.ndim == values.ndim and any(own == 1 < size == whole for own, size, whole in sizes):
            watcher.confirm(*met)
            watcher.root(output, [])
            return True
    return False
