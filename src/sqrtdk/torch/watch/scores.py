"""A product of two tensors on its way to a softmax: what was done to it, and the attention call that this makes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.watch.calls import MASKED_BELOW, SeenCall
from sqrtdk.torch.watch.coordinates import (
    Layout,
    Place,
    Step,
    UnevenError,
    stride_along,
    swap,
)
from sqrtdk.torch.watch.lineage import Lineage


class NotUnderstoodError(Exception):
    """What was done to the scores is not the operation that sqrtdk knows; the text says what."""


class NotAttentionError(Exception):
    """The softmax runs over something learnt: a router's experts, a vocabulary."""


@dataclass(eq=False)
class Product:
    """q `[N, L, D]` times k `[N, S, D]`, and where both came from."""

    q: Tensor
    k: Tensor
    q_lineage: Lineage | None
    k_lineage: Lineage | None
    # (B, H) where q had both before its batch axes were merged.
    split: tuple[int, int] | None
    # By what torch's own attention multiplied q and k before it multiplied them with each other.
    folded: float = 1.0
    # Whether q is a parameter, as the query of a pooling is.
    is_query_learnt: bool = False
    # The modules in which it was computed.
    stack: Any = ()
    addresses: list[int] = field(default_factory=list)


class Term(NamedTuple):
    """A tensor that met the scores, broadcast to their shape of that moment, and the place of those scores."""

    tensor: Tensor
    place: Place
    # Whether it comes from a product, as what queries say about positions does: then it is part of the scores.
    is_projected: bool = False

    def varies_along_keys(self) -> bool:
        """Whether it is not the same for all keys of a row."""
        return any(
            step.key and size > 1 and stride
            for step, size, stride in zip(self.place.steps, self.place.shape, self.tensor.stride(), strict=True)
        )


class Done(NamedTuple):
    """One thing done to scores: "multiply", "divide", "add", "fill" or "tanh", by a number or a term."""

    kind: str
    by: float | Term | None
    value: float | Term | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Entries of a product after `done`, at a place in memory; `stage` is "logits", "exp" or "sum" (of exp)."""

    product: Product
    layout: Layout
    done: tuple[Done, ...] = ()
    stage: str = "logits"
    sink: Term | None = None

    def then(self, tensor: Tensor, place: Place, *done: Done, **changes: Any) -> Scores:
        """The scores after one more thing was done, lying in `tensor`."""
        return replace(self, layout=Layout.of(tensor, place), done=self.done + done, **changes)


class Axes(NamedTuple):
    """The axes of scores read as attention: sizes and steps of what is batch and head, of the queries, of the keys."""

    batch: list[tuple[int, Step]]
    heads: list[tuple[int, Step]]
    rows: tuple[int, Step]
    keys: tuple[int, Step]


def recover(scores: Scores, place: Place, axis: int, heads: int | None) -> tuple[SeenCall, list[int]]:
    """The attention call whose logits lie at `place`, with a softmax over `axis`.

    Args:
        scores: what is known about them.
        place: of the softmax's input.
        axis: over which the softmax runs.
        heads: how many heads the module says it has.

    Returns:
        The call, and the order of axes that brings the softmax's result to `[batch…, heads…, L, S]`.

    Raises:
        NotUnderstoodError, UnevenError: it is not attention that sqrtdk could compute.
    """
    product = scores.product
    done = list(scores.done)
    queries, keys = product.q.shape[1], product.k.shape[1]
    q, k, q_lineage, k_lineage = product.q, product.k, product.q_lineage, product.k_lineage
    moved = [place, *(entry.place for entry in _terms(done))]
    if place.steps[axis].key == 0 and place.shape[axis] > 1:
        # Keys times queries: what the softmax runs over are the rows of the product.
        if product.is_query_learnt:
            raise NotAttentionError
        moved = [swap(one, queries, keys) for one in moved]
        done = _with_places(done, moved[1:])
        place, q, k, queries, keys = moved[0], k, q, keys, queries
        q_lineage, k_lineage = k_lineage, q_lineage
    if scores.sink is None and place.shape[axis] > 1 and place.steps[axis] != Step(0, 1):
        raise NotUnderstoodError("its softmax does not run over consecutive keys")
    axes, order = _read_axes(place, axis, queries, product.split, heads, done)
    count = axes.keys[0] - (0 if scores.sink is None else 1)
    axes = axes._replace(keys=(count, Step(0, 1)))
    key_start = place.start.key
    leading = [*axes.batch, *axes.heads]
    lead = (math.prod(size for size, _ in axes.batch), math.prod(size for size, _ in axes.heads))
    dimension = q.shape[-1]
    rows = q.reshape(-1, dimension)
    start, first_batch = place.start.row, place.start.row // queries
    q_seen = rows.as_strided(
        (*(size for size, _ in leading), axes.rows[0], dimension),
        (*(step.row * rows.stride(0) for _, step in leading), axes.rows[1].row * rows.stride(0), rows.stride(1)),
        rows.storage_offset() + start * rows.stride(0),
    ).reshape(*lead, axes.rows[0], dimension)
    columns = k.reshape(-1, dimension)
    k_seen = columns.as_strided(
        (*(size for size, _ in leading), count, dimension),
        (
            *(_batch_step(size, step, queries) * keys * columns.stride(0) for size, step in leading),
            *columns.stride(),
        ),
        columns.storage_offset() + (first_batch * keys + key_start) * columns.stride(0),
    )
    k_seen = k_seen.reshape(*lead, count, dimension)
    call = SeenCall(q_seen, k_seen, 1.0, how="recovered", q_lineage=q_lineage, k_lineage=k_lineage)
    call = _apply(call, done, axes, place.start)
    if scores.sink is not None:
        sink = _read_term(scores.sink, axes._replace(keys=(1, Step(0, 0))), place.start)
        per_head = sink[:1, :, :1, 0].expand(1, lead[1], 1).reshape(-1)
        if not bool((sink[..., 0] == per_head[None, :, None]).all()):
            raise NotUnderstoodError("a column is added to its scores that differs between rows")
        call = replace(call, sinks=per_head)
    return call, order


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


def _read_axes(
    place: Place, axis: int, queries: int, split: tuple[int, int] | None, heads: int | None, done: list[Done]
) -> tuple[Axes, list[int]]:
    """Which axes are batch, heads and queries: queries step by one row, heads come after the batch."""
    others = [i for i in range(len(place.shape)) if i != axis]
    # With one query each, it is batches that are one row apart.
    by_one = [i for i in others if place.steps[i].row == 1 and place.shape[i] > 1] if queries > 1 else []
    still = [i for i in others if place.shape[i] == 1]
    if by_one:
        at = by_one[0]
    elif axis - 1 in still:
        at = axis - 1
    elif still:
        at = still[-1]
    else:
        raise NotUnderstoodError("its scores have no axis of queries")
    rest = [i for i in others if i != at]
    sized = [(place.shape[i], place.steps[i]) for i in rest]
    order = [*rest, at, axis]
    if len(rest) == 1:
        sized = _split_heads(sized[0], split, heads, done)
        batch, head = sized[:1], sized[1:]
    elif len(rest) == 2 and heads in (sized[0][0],) and sized[1][0] != heads:
        batch, head = sized[1:], sized[:1]
        order = [rest[1], rest[0], at, axis]
    elif len(rest) > 2 and heads is not None and sized[1][0] == heads:
        # Blocks of a long sequence: they are no heads.
        keep = [0, *range(2, len(rest)), 1]
        batch, head = [sized[i] for i in keep[:-1]], [sized[1]]
        order = [*(rest[i] for i in keep), at, axis]
    else:
        batch, head = sized[:1], sized[1:]
    return Axes(batch, head, (place.shape[at], place.steps[at]), (place.shape[axis], place.steps[axis])), order


def _split_heads(
    merged: tuple[int, Step], split: tuple[int, int] | None, heads: int | None, done: list[Done]
) -> list[tuple[int, Step]]:
    """Batch and heads of an axis that holds both: as q had them, or a term, or the module's number of heads says."""
    size, step = merged
    hints = [
        split,
        *((term.place.shape[0], term.place.shape[1]) for term in _terms(done) if len(term.place.shape) == 4),
    ]
    if heads is not None and size % heads == 0:
        hints.append((size // heads, heads))
    for hint in hints:
        if hint is not None and hint[0] * hint[1] == size:
            return [(hint[0], step.times(hint[1])), (hint[1], step)]
    return [(size, step), (1, Step(0, 0))]


def _read_term(term: Term, axes: Axes, start: Step) -> Tensor:
    """A term as `[B, H, L, S]`, every axis that it is broadcast along being 1.

    Broadcast along one of two axes that the scores have merged since (windows of an image, Swin) it is written out.
    """
    try:
        return _show_term(term, axes, start)
    except UnevenError:
        return _show_term(term._replace(tensor=term.tensor.contiguous()), axes, start)


def _show_term(term: Term, axes: Axes, start: Step) -> Tensor:
    strides = term.tensor.stride()
    named = [*axes.batch, *axes.heads, axes.rows, axes.keys]
    along = [stride_along(step, size, term.place, strides) for size, step in named]
    ahead = 0
    for part, by_key in ((start.row - term.place.start.row, False), (start.key - term.place.start.key, True)):
        ahead += _memory_ahead(part, by_key, term)
    shown = term.tensor.as_strided(
        [size if stride else 1 for (size, _), stride in zip(named, along, strict=True)],
        [stride or 1 for stride in along],
        term.tensor.storage_offset() + ahead,
    )
    lead = len(axes.batch)
    parts = [shown.shape[:lead], shown.shape[lead:-2]]
    sizes = [[size for size, _ in axes.batch], [size for size, _ in axes.heads]]
    # Several axes that become one are either all broadcast or all there.
    merged = [list(own) if math.prod(own) == 1 else list(full) for own, full in zip(parts, sizes, strict=True)]
    shown = shown.expand(*merged[0], *merged[1], *shown.shape[-2:])
    return shown.reshape(math.prod(merged[0]), math.prod(merged[1]), *shown.shape[-2:])


def _memory_ahead(distance: int, by_key: bool, term: Term) -> int:
    if distance == 0:
        return 0
    axes = sorted(
        (
            (step.key if by_key else step.row, size, stride)
            for step, size, stride in zip(term.place.steps, term.place.shape, term.tensor.stride(), strict=True)
            if size > 1 and (step.key if by_key else step.row) > 0
        ),
        reverse=True,
    )
    ahead = 0
    for step, size, stride in axes:
        index = min(max(distance // step, 0), size - 1)
        distance -= index * step
        ahead += index * stride
    if distance:
        raise UnevenError
    return ahead


def _apply(call: SeenCall, done: list[Done], axes: Axes, start: Step) -> SeenCall:
    """Read what was done to the scores, in order, into scale, soft cap and mask."""
    scale: float | Tensor = 1.0
    softcap: float | None = None
    bias: list[Tensor] = []
    hidden: list[Tensor] = []
    on_the_mask: float | None = None
    for kind, by, value in done:
        shown = _read_term(by, axes, start) if isinstance(by, Term) else by
        if kind in ("multiply", "divide"):
            factor = shown if shown is not None else 1.0
            if isinstance(factor, Tensor) and factor.shape[-1] > 1:
                if bool(((factor == 0) | (factor == 1)).all()):
                    continue  # zeros where a mask will be added
                raise NotUnderstoodError("its scores are multiplied by a tensor that differs between keys")
            if isinstance(factor, Tensor):
                factor = factor[..., 0].to(torch.promote_types(factor.dtype, torch.float32))
                factor = float(factor) if factor.numel() == 1 else factor
            factor = 1.0 / factor if kind == "divide" else factor
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
                if isinstance(by, Term) and not by.is_projected and _adds_something(shown):
                    on_the_mask = 1.0
        elif kind == "fill":
            if isinstance(value, Term):
                value = float(_read_term(value, axes, start).max())
            if value is None or value > MASKED_BELOW:
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


def _adds_something(mask: Tensor) -> bool:
    """Whether a mask does more than hide: a finite "minus infinity" stays one, whatever it is multiplied by."""
    return bool(((mask != 0) & (mask > MASKED_BELOW)).any())


def _per_row(scale: float | Tensor) -> float | Tensor:
    return float(scale) if not isinstance(scale, Tensor) else scale


def _join(bias: list[Tensor], hidden: list[Tensor], keys: int) -> Tensor | None:
    """One mask: additive if something was added, else boolean (True: may attend)."""
    mask: Tensor | None = None
    for one in bias:
        mask = one if mask is None else mask + one
    closed: Tensor | None = None
    for one in hidden:
        closed = one if closed is None else closed | one
    if closed is not None:
        mask = ~closed if mask is None else torch.where(closed, -torch.inf, mask)
    return None if mask is None else mask.expand(*mask.shape[:-1], keys)
