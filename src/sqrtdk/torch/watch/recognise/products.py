"""Classifies products of tensors: projections, scores, scores of mixed heads, and weights times values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sqrtdk.torch.internals import unseen
from sqrtdk.torch.watch.recognise.coordinates import Layout, Place, Step, UnevenError
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.following import Known, resample
from sqrtdk.torch.watch.recognise.known_tensors import KnownTensor
from sqrtdk.torch.watch.recognise.parts import Candidate
from sqrtdk.torch.watch.recognise.scores import Done, Factors, Product, Scores, Term

if TYPE_CHECKING:
    from sqrtdk.torch.watch.recognise.recogniser import Recogniser

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
    path: str | None = None,
) -> bool:
    """Record a matrix product as weights times values, a projection, or scores.

    Return whether a factor is known to be computed from more than learnt tensors. `path` is that of the module, None
    for the one that runs.
    """
    is_of_data = False
    for one, other, axis in ((a, b, a.ndim - 1), (b, a, b.ndim - 2)):
        fact = watcher.memory.look_up(one)
        if fact is None:
            continue
        is_of_data = is_of_data or not fact.is_learnt
        has_scores = fact.scores is not None or fact.candidates
        if has_scores and _see_values(watcher, fact, one, other, axis, output):
            return True
    has_bias = added is not None and added.ndim == 1
    plain = alpha == beta == 1.0 and (added is None or has_bias)
    is_learnt = watcher.is_learnt(b)
    projection = watcher.read_projection(b, output, added) if plain and is_learnt else None
    # Each head has its own weights, and all heads have the same tokens.
    per_head = is_learnt and b.ndim == 3 and b.shape[0] > 1 and b.stride(0) != 0 and a.stride(0) == 0
    lineage = watcher.root(output, a, projection, (-1, 0) if per_head else (-1,), path=path)
    if is_learnt or has_bias or a.ndim not in (2, 3) or not output.is_floating_point():
        return is_of_data
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
    return is_of_data


def _see_values(watcher: Recogniser, fact: KnownTensor, one: Tensor, other: Tensor, axis: int, output: Tensor) -> bool:
    """Return whether one side was weights or scores, which are multiplied with values or mixed between heads."""
    candidates, scores = fact.candidates, fact.scores
    is_learnt = watcher.is_learnt(other)
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
    # Several softmax results may have been joined along their keys.
    together = sum(candidate.width for candidate in candidates) == contracted
    met = [
        candidate
        for candidate in candidates
        # Weights that were not understood may have been rearranged, such as the diagonals of a sliding window.
        if (candidate.is_softmax or not is_learnt)
        and not candidate.needs_exponential
        and (candidate.reason is not None or together or candidate.keys <= contracted <= candidate.width)
    ]
    watcher.confirm(*met)
    if not any(candidate.is_softmax for candidate in candidates) and not met:
        return False
    watcher.root(output, None)
    if others is not None and others.candidates:
        watcher.memory.note(output, candidates=others.candidates)
    return True


def note_mixing(candidates: tuple[Candidate, ...]) -> None:
    """Add the remark that weights of several heads were mixed."""
    for candidate in candidates:
        if _MIXED_AFTER not in candidate.remarks:
            candidate.remarks.append(_MIXED_AFTER)


def _see_mixing(watcher: Recogniser, scores: Scores, one: Tensor, axis: int, output: Tensor) -> bool:
    """Return whether heads of scores are mixed by a learnt tensor. With an unchanged shape, they are still scores."""
    queries = scores.product.q.vectors.shape[1]
    try:
        step = scores.layout.step(one.shape[axis], one.stride(axis))
    except UnevenError:
        return False
    if step.key or not step.row or step.row % queries:
        return False  # a product used as features, and its projection
    trace = scores.trace.move(one, output) if output.shape == one.shape else None
    if trace is None:
        watcher.root(output, one, is_projection=False)
    else:
        mixed = replace(scores, layout=trace.lay_out(), done=(*scores.done, Done("mix", None)))
        watcher.memory.write(output, scores=mixed)
    return True


def _see_without(watcher: Recogniser, scores: Scores, one: Tensor, other: Tensor, axis: int) -> bool:
    """Record scores multiplied with values without a softmax. Always False: the output is treated as a new product."""
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
    """Record a convolution or an opaque product operation. Applied to scores or weights, it mixes heads."""
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
    # The column axis of a convolution follows the batch axis.
    columns = (1,) if "conv" in name and output.ndim > 2 else (-1,)
    # A product of two computed tensors gives scores, whatever the operation is called.
    both = len(others) > 0 and not any(map(watcher.is_learnt, others)) and "conv" not in name
    # A depthwise convolution keeps columns separate, so the heads are those of the projection before.
    by_column = name == "aten::convolution" and args[-1] == x.shape[1] > 1
    trace = resample(x, fact, output) if by_column else None
    watcher.root(output, x, None, columns, is_projection=not both)
    if trace is not None:
        watcher.memory.note(output, trace=trace)


def see_factors(watcher: Recogniser, known: list[Known], output: Tensor) -> None:
    """Record an elementwise product of two projections, which may be the start of dot products of queries and keys."""
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


def see_sum(watcher: Recogniser, x: Tensor, fact: KnownTensor, axis: int, output: Tensor) -> bool:
    """Return whether elementwise products were summed to dot products: scores, or pairs in an unknown order."""
    axis %= x.ndim
    if fact.factors is None:
        if not fact.is_pair or axis != x.ndim - 1:
            return False
        pairs = Candidate(watcher.locate(), 0, 0, reason=_PAIRS, is_softmax=False, needs_exponential=True)
        watcher.memory.write(output, candidates=(pairs,))
        return True
    with unseen():
        scores = fact.factors.add_up(axis, output)
    if scores is not None and fact.lineage is not None:
        lineage = replace(fact.lineage.lost("sum"), is_projection=False)
        watcher.memory.write(output, scores=scores, lineage=lineage)
    return scores is not None


def see_weighted(watcher: Recogniser, candidates: tuple[Candidate, ...], tensors: list[Tensor], output: Tensor) -> bool:
    """Return whether weights were multiplied with values elementwise, the same weight for several entries."""
    if len(tensors) != 2:
        return False
    for weights, values in (tensors, tensors[::-1]):
        own, other = watcher.memory.look_up(weights), watcher.memory.look_up(values)
        if own is None or other is None or other.lineage is None or other.candidates:
            continue
        # Elementwise values after a softmax of unknown origin prove nothing: a mixture of experts looks the same.
        met = [one for one in candidates if one.is_of_scores and not one.needs_exponential]
        if not own.candidates or not met:
            continue
        sizes = zip(weights.shape, values.shape, output.shape, strict=False)
        if weights.ndim == values.ndim and any(own == 1 < size == whole for own, size, whole in sizes):
            watcher.confirm(*met)
            watcher.root(output, None)
            return True
    return False
