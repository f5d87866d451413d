"""Identifies the batch, head, query and key axes of scores, from the traces of the queries where possible."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from sqrtdk.torch.watch.recognise.calls import NotUnderstoodError
from sqrtdk.torch.watch.recognise.coordinates import STILL, Layout, Place, Spot, Step, UnevenError
from sqrtdk.torch.watch.recognise.vectors import Way


class Axes(NamedTuple):
    """Size and step of each axis of the scores: the batch and head axes, the query axis, the key axis."""

    batch: list[tuple[int, Step]]
    heads: list[tuple[int, Step]]
    rows: tuple[int, Step]
    keys: tuple[int, Step]


class Named(NamedTuple):
    """One axis of the scores: its size, its step, and whether it is a head axis."""

    size: int
    step: Step
    is_head: bool = False


@lru_cache(maxsize=4096)
def read_axes(
    place: Place, axis: int, vectors: Spot, way: Way | None, columns: int | None, heads: int | None
) -> tuple[Axes, list[int], list[int]]:
    """Return the batch, head, query and key axes of scores.

    A head axis steps through the columns of the projection, all other axes through its tokens. Without a trace,
    queries step by one row, and heads come after the batch, as many as the module declares.

    Args:
        place: the place of the scores.
        axis: the key axis.
        vectors: the memory of the queries `[N, L, D]`.
        way: the moves of the queries from their projection; None if unknown.
        columns: the number of columns of the projection.
        heads: the number of heads that the module declares.

    Returns:
        The axes, the shape of the scores with merged axes split, and the order of `[batch…, heads…, L, S]` in it.

    Raises:
        NotUnderstoodError, UnevenError: there is no query axis, or it does not step evenly.
    """
    # A projection as wide as one head means that heads were projected one by one. The module declares their number.
    is_of_one_head = columns == vectors.shape[2] and heads not in (None, 1)
    traced = None if way is None or is_of_one_head else _read_traced(place, axis, vectors, way)
    named, queries = _read_plain(place, axis, vectors, heads) if traced is None else traced
    shape: list[int] = []
    rest: list[tuple[int, Named]] = []
    for at, parts in enumerate(named):
        for part in parts:
            if at not in (axis, queries):
                rest.append((len(shape), part))
            shape.append(part.size)
    flat = [sum(map(len, named[:at])) for at in (queries, axis)]
    batch, head = ([pair for pair in rest if pair[1].is_head == wanted] for wanted in (False, True))
    order = [*(at for at, _ in batch), *(at for at, _ in head), *flat]
    rows, keys = named[queries][0], named[axis][0]
    sized = [[(part.size, part.step) for _, part in pairs] for pairs in (batch, head)]
    return Axes(sized[0], sized[1], (rows.size, rows.step), (keys.size, STILL)), shape, order


def spot_of_rows(vectors: Spot, axes: list[tuple[int, Step]], start: int) -> Spot:
    """Return the memory of the queries `[..., L, D]` behind the rows of scores, within vectors `[N, L, D]`.

    Raises:
        UnevenError: an axis does not step evenly through the vectors.
    """
    per_batch = vectors.shape[1]
    sizes, strides = [], []
    for size, step in axes:
        if step.row % per_batch == 0:
            stride = step.row // per_batch * vectors.strides[0]
        elif (size - 1) * step.row < per_batch:
            stride = step.row * vectors.strides[1]
        else:
            raise UnevenError
        sizes.append(size)
        strides.append(stride)
    batch, row = divmod(start, per_batch)
    offset = vectors.offset + batch * vectors.strides[0] + row * vectors.strides[1]
    return Spot((*sizes, vectors.shape[2]), (*strides, vectors.strides[2]), offset)


def _read_traced(place: Place, axis: int, vectors: Spot, way: Way) -> tuple[list[list[Named]], int] | None:
    """Return the axes and the query axis by the moves of the queries, or None if the moves leave an axis open."""
    queries, width = vectors.shape[1:]
    named: list[list[Named]] = []
    within: list[int] = []
    try:
        layout = way.lay_out()
        if layout.step(width, vectors.strides[2]).row:
            return None  # the product sums over tokens
        for at, (size, step) in enumerate(zip(place.shape, place.steps, strict=True)):
            if at == axis or size == 1 or not step.row:
                named.append([Named(size, step)])
                continue
            parts = _divide(size, step, vectors, layout)
            named.append(parts)
            if len(parts) == 1 and not parts[0].is_head and (size - 1) * step.row < queries:
                within.append(at)
    except UnevenError:
        return None
    # Of several axes within the queries of a product, the one with the smallest step is the query axis.
    within.sort(key=lambda at: place.steps[at].row)
    still = [at for at, size in enumerate(place.shape) if size == 1 and at != axis]
    return named, _pick_queries(within if queries > 1 else [], still, axis)


def _divide(size: int, step: Step, vectors: Spot, layout: Layout) -> list[Named]:
    """Return an axis of the scores, or the axes that were merged into it since the projection."""
    stride = spot_of_rows(vectors, [(size, step)], 0).strides[0]
    parts: list[Named] = []
    for count, own in reversed(layout.divide(size, stride)):
        inner = math.prod(part.size for part in parts)
        parts.insert(0, Named(count, step.times(inner), own.key > 0 and own.row == 0))
    # The rows and columns of a window's pixels are one token axis.
    is_mixed = any(part.is_head for part in parts) and not all(part.is_head for part in parts)
    return parts if is_mixed else [Named(size, step, parts[0].is_head)]


def _read_plain(place: Place, axis: int, vectors: Spot, heads: int | None) -> tuple[list[list[Named]], int]:
    """Return the axes and the query axis by their steps and by the number of heads that the module declares."""
    others = [at for at in range(len(place.shape)) if at != axis]
    # With one query per sequence, sequences are one row apart.
    by_one = [at for at in others if place.steps[at].row == 1 and place.shape[at] > 1]
    still = [at for at in others if place.shape[at] == 1]
    queries = _pick_queries(by_one if vectors.shape[1] > 1 else [], still, axis)
    named = [[Named(size, step)] for size, step in zip(place.shape, place.steps, strict=True)]
    rest = [at for at in others if at != queries]
    sizes = [place.shape[at] for at in rest]
    if len(rest) == 1:
        step, count = place.steps[rest[0]], 1 if heads is None or sizes[0] % heads else heads
        named[rest[0]] = [Named(sizes[0] // count, step.times(count)), Named(count, step, True)]
        return named, queries
    own = rest[1:]
    if heads is not None and math.prod(sizes[1:]) != heads:
        # Blocks of a long sequence and windows of an image are not heads.
        equal = [at for at in (*rest[1:], rest[0]) if place.shape[at] == heads]
        if equal:
            own = equal[:1]
    for at in own:
        named[at] = [named[at][0]._replace(is_head=True)]
    return named, queries


def _pick_queries(moving: list[int], still: list[int], axis: int) -> int:
    if moving:
        return moving[0]
    if axis - 1 in still:
        return axis - 1
    if still:
        return still[-1]
    raise NotUnderstoodError("its scores have no axis of queries")
