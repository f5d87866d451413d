"""Recovers the attention call behind scores: identifies its axes, and reads scale, soft cap, mask and sinks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.minus_infinity import hides
from sqrtdk.torch.watch.recognise.axes import Axes, read_axes, spot_of_rows
from sqrtdk.torch.watch.recognise.calls import NotUnderstoodError, SeenCall
from sqrtdk.torch.watch.recognise.coordinates import (
    STILL,
    Place,
    Spot,
    Step,
    UnevenError,
    memory_ahead,
    stride_along,
    swap,
)
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.masks import read_mask
from sqrtdk.torch.watch.recognise.scores import Done, Scores, Term
from sqrtdk.torch.watch.recognise.vectors import find_span


class NotAttentionError(Exception):
    """The softmax runs over a learnt axis, such as a router's experts or a vocabulary."""


class Reading(NamedTuple):
    """Describes how to view scores or weights: the shape with merged axes split, the axis order, and the first key."""

    shape: list[int]
    order: list[int]
    front: int

    def show(self, x: Tensor, keys: int) -> Tensor:
        """Return a tensor of that shape as `[batch…, heads…, L, S]`."""
        return x.detach().view(self.shape).permute(self.order)[..., self.front : self.front + keys]


def recover(scores: Scores, x: Tensor, axis: int, heads: int | None) -> tuple[SeenCall, Reading]:
    """Return the attention call whose logits lie in `x`, with a softmax over `axis`.

    Args:
        scores: the known facts about the scores.
        x: the softmax's input, or its exponentials if `scores.stage` says so.
        axis: the softmax axis.
        heads: the number of heads that the module declares, used if the projections do not determine the heads.

    Returns:
        The call, and the reading for the softmax's result.

    Raises:
        NotAttentionError: the softmax runs over a learnt axis.
        NotUnderstoodError, UnevenError: sqrtdk could not compute this attention.
    """
    product, place = scores.product, scores.layout.locate(x)
    done, q, k = list(scores.done), product.q, product.k
    queries, keys = q.vectors.shape[1], k.vectors.shape[1]
    moved = [place, *(entry.place for entry in _terms(done))]
    if place.steps[axis].key == 0 and place.shape[axis] > 1:
        # The product is keys times queries, so the softmax runs over its rows.
        if product.is_query_learnt:
            raise NotAttentionError
        moved = [swap(one, queries, keys) for one in moved]
        done = _with_places(done, moved[1:])
        place, q, k, queries, keys = moved[0], k, q, keys, queries
    if not scores.sinks and place.shape[axis] > 1 and place.steps[axis] != Step(0, 1):
        raise NotUnderstoodError("its softmax does not run over consecutive keys")
    if queries == 1 and all(size > 1 for at, size in enumerate(place.shape) if at != axis):
        # Each sequence has one query, without an axis.
        place = replace(place, shape=(*place.shape, 1), steps=(*place.steps, STILL))
    lying, trace = Spot.of(q.vectors), q.trace
    way, origin = (None, None) if trace is None else (trace.way, trace.origin)
    axes, shape, order = read_axes(place, axis, lying, way, None if origin is None else origin.columns, heads)
    count = axes.keys[0] - len(scores.sinks)
    axes = axes._replace(keys=(count, Step(0, 1)))
    start = Step(place.start.row, place.start.key + scores.front)
    leading = [*axes.batch, *axes.heads]
    lead = (math.prod(size for size, _ in axes.batch), math.prod(size for size, _ in axes.heads))
    q_spot = spot_of_rows(lying, [*leading, axes.rows], start.row)
    steps = [(size, _batch_step(size, step, queries)) for size, step in leading]
    k_spot = _spot_of_keys(k.vectors, steps, start.row // queries, start.key, count)
    q_seen, k_seen = (side.vectors.as_strided(*spot) for side, spot in ((q, q_spot), (k, k_spot)))
    call = SeenCall(
        q_seen.reshape(*lead, *q_seen.shape[-2:]),
        k_seen.reshape(*lead, *k_seen.shape[-2:]),
        1.0,
        how="recovered",
        q_lineage=q.lineage,
        k_lineage=k.lineage,
        q_span=find_span(q.trace, q_spot, len(axes.batch)),
        k_span=find_span(k.trace, k_spot, len(axes.batch)),
    )
    call = _apply(call, done, axes, start)
    reading = Reading(shape, order, scores.front)
    if scores.is_mixed:
        if scores.sinks:
            raise NotUnderstoodError("its heads are mixed, and columns are added to their scores")
        logits = reading.show(x, count).reshape(*lead, axes.rows[0], count)
        call = replace(call, logits=logits.log() if scores.stage == "exp" else logits)
    if scores.sinks:
        call = replace(call, sinks=_read_sinks(scores.sinks, axes, start, lead[1]))
    return call, reading


def _read_sinks(columns: tuple[Term, ...], axes: Axes, start: Step, heads: int) -> Tensor:
    """Return sinks `[H]` from columns that are equal for all rows of a head; several are joined by log-sum-exp."""
    found = []
    for column in columns:
        sink = _read_term(column, axes._replace(keys=(1, STILL)), start._replace(key=0))
        per_head = sink[:1, :, :1, 0].expand(1, heads, 1).reshape(-1)
        if not bool((sink[..., 0] == per_head[None, :, None]).all()):
            raise NotUnderstoodError("a column is added to its scores that differs between rows")
        found.append(per_head)
    return found[0] if len(found) == 1 else torch.stack(found).logsumexp(dim=0)


def _spot_of_keys(vectors: Tensor, leading: list[tuple[int, int]], batch: int, first: int, count: int) -> Spot:
    """Return the memory of the keys `[..., S, D]` behind scores."""
    sizes, strides = [size for size, _ in leading], [step * vectors.stride(0) for _, step in leading]
    offset = int(vectors.storage_offset()) + batch * vectors.stride(0) + first * vectors.stride(1)
    return Spot((*sizes, count, vectors.shape[2]), (*strides, *vectors.stride()[1:]), offset)


def _terms(done: list[Done]) -> list[Term]:
    return [part for entry in done for part in (entry.by, entry.value) if isinstance(part, Term)]


def _with_places(done: list[Done], places: list[Place]) -> list[Done]:
    left = iter(places)

    def move(part: float | Term | None) -> float | Term | None:
        return part._replace(place=next(left)) if isinstance(part, Term) else part

    return [Done(entry.kind, move(entry.by), move(entry.value)) for entry in done]


def _batch_step(size: int, step: Step, queries: int) -> int:
    if step.row % queries == 0:
        return step.row // queries
    if (size - 1) * step.row < queries:
        return 0
    raise UnevenError


def _read_term(term: Term, axes: Axes, start: Step) -> Tensor:
    """Return a term as `[B, H, L, S]`, with size 1 for every broadcast axis.

    A term that is broadcast along one of two axes merged since (image windows in Swin) is copied to a dense tensor.
    """
    try:
        return _show_term(term, axes, start)
    except UnevenError:
        return _show_term(term._replace(tensor=term.tensor.contiguous()), axes, start)


def _show_term(term: Term, axes: Axes, start: Step) -> Tensor:
    strides = term.tensor.stride()
    named = [*axes.batch, *axes.heads, axes.rows, axes.keys]
    along = [stride_along(step, size, term.place, strides) for size, step in named]
    first = term.place.start
    ahead = sum(
        memory_ahead(distance, by_key, term.place, strides)
        for distance, by_key in ((start.row - first.row, False), (start.key - first.key, True))
    )
    shown = term.tensor.as_strided(
        [size if stride else 1 for (size, _), stride in zip(named, along, strict=True)],
        [stride or 1 for stride in along],
        term.tensor.storage_offset() + ahead,
    )
    lead = len(axes.batch)
    parts = [shown.shape[:lead], shown.shape[lead:-2]]
    sizes = [[size for size, _ in axes.batch], [size for size, _ in axes.heads]]
    # Axes that are merged into one are either all broadcast or all expanded.
    merged = [list(own) if math.prod(own) == 1 else list(full) for own, full in zip(parts, sizes, strict=True)]
    shown = shown.expand(*merged[0], *merged[1], *shown.shape[-2:])
    return shown.reshape(math.prod(merged[0]), math.prod(merged[1]), *shown.shape[-2:])


def _apply(call: SeenCall, done: list[Done], axes: Axes, start: Step) -> SeenCall:
    """Return the call with scale, soft cap and mask from the changes to the scores, in order."""
    scale: float | Tensor = 1.0
    softcap: float | None = None
    bias: list[Tensor] = []
    hidden: list[Tensor] = []
    on_the_mask: float | None = None
    for kind, by, value in done:
        if kind == "mix":
            break  # later changes are contained in the logits
        shown = _read_term(by, axes, start) if isinstance(by, Term) else by
        if kind in ("multiply", "divide"):
            factor = shown if shown is not None else 1.0
            if isinstance(factor, Tensor) and factor.shape[-1] > 1:
                if bool(((factor == 0) | (factor == 1)).all()):
                    continue  # zeros at positions that a mask hides later
                raise NotUnderstoodError("its scores are multiplied by a tensor that differs between keys")
            if isinstance(factor, Tensor):
                factor = factor[..., 0].to(torch.promote_types(factor.dtype, torch.float32))
                factor = float(factor) if factor.numel() == 1 else factor
            factor = _invert(factor) if kind == "divide" else factor
            scale = scale * factor
            if softcap is not None:
                if isinstance(factor, Tensor):
                    raise NotUnderstoodError("its capped scores are multiplied by a tensor")
                softcap *= factor
            if on_the_mask is not None:
                on_the_mask *= 1.0 if isinstance(factor, Tensor) else factor
            by_row = factor[..., None] if isinstance(factor, Tensor) else factor
            bias = [one * by_row for one in bias]
        elif kind == "add":
            if isinstance(shown, Tensor) and shown.shape[-1] > 1:
                bias.append(shown * value if isinstance(value, float) and value != 1.0 else shown)
                if isinstance(by, Term) and not by.is_projected and read_mask(shown).adds:
                    on_the_mask = 1.0
        elif kind == "fill":
            if isinstance(value, Term):
                value = float(_read_term(value, axes, start).max())
            if value is None or not hides(value):
                raise NotUnderstoodError(f"some of its scores are replaced by {value}")
            assert isinstance(shown, Tensor)
            hidden.append(shown)
        elif kind == "tanh":
            if bias:
                raise NotUnderstoodError("its scores are capped after something was added to them")
            if softcap is not None:
                raise NotUnderstoodError("its scores are capped twice")
            softcap = 1.0
    if softcap is not None and softcap <= 0:
        raise NotUnderstoodError("the cap of its scores is not positive")
    mask = _join(bias, hidden, axes.keys[0])
    return replace(call, scale=_per_row(scale), softcap=softcap, mask=mask, on_the_mask=on_the_mask)


def _invert(divisor: float | Tensor) -> float | Tensor:
    return 1.0 / divisor if isinstance(divisor, Tensor) or divisor else math.inf


def _per_row(scale: float | Tensor) -> float | Tensor:
    return float(scale) if not isinstance(scale, Tensor) else scale


def _join(bias: list[Tensor], hidden: list[Tensor], keys: int) -> Tensor | None:
    """Return one mask, additive if a bias was added, otherwise boolean (True: may attend), or None."""
    mask: Tensor | None = None
    for one in bias:
        mask = one if mask is None else mask + one
    closed: Tensor | None = None
    for one in hidden:
        closed = one if closed is None else closed | one
    if closed is not None:
        mask = ~closed if mask is None else torch.where(closed, -torch.inf, mask)
    return None if mask is None else mask.expand(*mask.shape[:-1], keys)
