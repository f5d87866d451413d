"""Traces vectors: finds the tokens and columns of a projection's output that a call's queries and keys are.

A projection gives E columns for each of T tokens. Views, copies and operations on single vectors (rotations, norms)
keep every vector in its place. A trace is therefore only recorded while a model runs, and evaluated when a call needs
it. An axis that steps through columns is a head axis, and an axis that steps through tokens is not.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from sqrtdk.torch.watch.recognise.coordinates import STILL, Layout, Place, Spot, Step, UnevenError

# Limit for the moves between a projection and a query. A longer chain is the residual stream.
_MOST_MOVES = 24
_resamplings = count(1)


class Origin(NamedTuple):
    """Identifies a projection's output: the number of the product among all seen, its tokens and its columns."""

    number: int
    tokens: int
    columns: int


class Projected(NamedTuple):
    """A projection's output and its column axes (as negative indices, innermost first)."""

    spot: Spot
    columns: tuple[int, ...] = (-1,)

    def lay_out(self) -> Layout:
        """Return the layout with tokens as rows and columns as keys."""
        shape = self.spot.shape
        of_columns = [axis % len(shape) for axis in self.columns]
        steps, token, column = [STILL] * len(shape), 1, 1
        for axis in of_columns:
            steps[axis], column = Step(0, column), column * shape[axis]
        for axis in reversed(range(len(shape))):
            if axis not in of_columns:
                steps[axis], token = Step(token, 0), token * shape[axis]
        return Layout(Place(shape, tuple(steps)), self.spot.strides, self.spot.offset)


class Joined(NamedTuple):
    """Tensors joined along an axis."""

    parts: tuple[tuple[Way, Spot], ...]
    axis: int
    spot: Spot

    def lay_out(self) -> Layout:
        """Return one layout of contiguous parts in any order, as a rotation swaps the halves of its vectors.

        Raises:
            UnevenError: the parts are not contiguous.
        """
        laid = [(way.lay_out(), spot) for way, spot in self.parts]
        sizes = _find_sizes(*laid[0])
        axis = sum(map(len, sizes[: self.axis]))
        places = [layout.locate(_split(spot, sizes, self.axis)) for layout, spot in laid]
        whole = _split(self.spot, sizes, self.axis)
        places.sort(key=lambda place: place.start)
        first, second = places[:2]
        steps = list(first.steps)
        apart = Step(second.start.row - first.start.row, second.start.key - first.start.key)
        if first.shape[axis] == 1:
            steps[axis] = apart
        elif apart != steps[axis].times(first.shape[axis]):
            raise UnevenError
        for number, place in enumerate(places):
            wanted = Step(first.start.row + number * apart.row, first.start.key + number * apart.key)
            if place != Place(first.shape, first.steps, wanted):
                raise UnevenError
        return Layout(Place(whole.shape, tuple(steps), first.start), whole.strides, whole.offset)


class Resampled(NamedTuple):
    """A selection of a tensor's tokens in an unknown order. The axes stay, and tokens are numbered anew."""

    way: Way
    before: Spot
    after: Spot

    def lay_out(self) -> Layout:
        """Return the layout with columns unchanged and tokens numbered along the new axes."""
        layout = self.way.lay_out()
        sizes = _find_sizes(layout, self.before)
        place = layout.locate(_split(self.before, sizes))
        changed = [own != now for own, now in zip(self.before.shape, self.after.shape, strict=True)]
        kinds = iter(place.steps)
        steps: list[Step] = []
        for parts, is_changed in zip(sizes, changed, strict=True):
            own = [next(kinds) for _ in parts]
            if is_changed and (len(own) > 1 or own[0].key):
                raise UnevenError
            steps += own
        now = zip(sizes, self.after.shape, changed, strict=True)
        after = _split(self.after, [[size] if is_changed else own for own, size, is_changed in now])
        token = 1
        for at in reversed(range(len(steps))):
            if not steps[at].key:
                steps[at], token = Step(token, 0), token * after.shape[at]
        return Layout(Place(after.shape, tuple(steps), Step(0, place.start.key)), after.strides, after.offset)


class Weighed(NamedTuple):
    """Scores or weights with `queries` per head, laid out by rows and keys instead of tokens and columns."""

    layout: Layout
    queries: int

    def lay_out(self) -> Layout:
        """Return the layout unchanged."""
        return self.layout


class Way(NamedTuple):
    """Moves of entries between places in memory. They are equal in every layer and evaluated once."""

    source: Projected | Joined | Resampled | Weighed
    moves: tuple[tuple[Spot, Spot], ...] = ()

    def lay_out(self) -> Layout:
        """Return the layout of the entries among tokens (rows) and columns (keys).

        Raises:
            UnevenError: the entries were rearranged in a way that is not followed.
        """
        layout = _lay_out(self)
        if layout is None:
            raise UnevenError
        return layout


@lru_cache(maxsize=4096)
def _lay_out(way: Way) -> Layout | None:
    try:
        layout = way.source.lay_out()
        for before, after in way.moves:
            before = _expand(before, after.shape)
            sizes = _find_sizes(layout, before)
            after = _split(after, sizes)
            layout = Layout(layout.locate(_split(before, sizes)), after.strides, after.offset)
    except UnevenError:
        return None
    return layout


class Trace(NamedTuple):
    """The moves from a projection's output to a tensor; `origin` is None for scores and weights."""

    origin: Origin | None
    way: Way

    def lay_out(self) -> Layout:
        """Return the layout of the way, with the same errors."""
        return self.way.lay_out()

    def is_over_heads(self, tensor: Tensor, axis: int) -> bool:
        """Return whether an axis of weights steps from head to head (or from sequence to sequence)."""
        source = self.way.source
        if not isinstance(source, Weighed):
            return False
        try:
            step = self.lay_out().step(tensor.shape[axis], tensor.stride(axis))
        except UnevenError:
            return False
        return step.row > 0 and step.key == 0 and step.row % source.queries == 0

    def move(self, before: Tensor, after: Tensor) -> Trace | None:
        """Return the trace after an operation on single entries or vectors, or None after too many moves."""
        if (
            before.shape == after.shape
            and before.stride() == after.stride()
            and before.storage_offset() == after.storage_offset()
            and before.is_complex() == after.is_complex()
        ):
            return self
        source, moves = self.way
        if len(moves) >= _MOST_MOVES:
            return None
        return Trace(self.origin, Way(source, (*moves, (Spot.of(before), Spot.of(after)))))

    def resample(self, before: Tensor, after: Tensor) -> Trace | None:
        """Return the trace after tokens were selected, repeated or extended, or None if the result cannot be traced."""
        origin = self.origin
        if origin is None or before.ndim != after.ndim or not after.numel():
            return None
        width = min(origin.columns, after.numel())
        own = Origin(-next(_resamplings), after.numel() // width, width)
        return Trace(own, Way(Resampled(self.way, Spot.of(before), Spot.of(after))))


def join_traces(parts: list[tuple[Trace | None, Tensor]], axis: int, output: Tensor) -> Trace | None:
    """Return the trace of tensors joined along an axis, or None unless all come from one projection's output."""
    known = [(trace, tensor) for trace, tensor in parts if trace is not None]
    if len(known) < len(parts) or len({trace.origin for trace, _ in known}) != 1:
        return None
    first, tensor = known[0]
    if first.origin is None or len(known) == 1:
        return None if first.origin is None else first.move(tensor, output)
    ways = tuple((trace.way, Spot.of(tensor)) for trace, tensor in known)
    return Trace(first.origin, Way(Joined(ways, axis, Spot.of(output))))


def _find_sizes(layout: Layout, spot: Spot) -> list[list[int]]:
    """Return the sizes of the axes merged into each axis of a view, such as batch and heads."""
    return [[count for count, _ in layout.divide(size, stride)] for size, stride in zip(*spot[:2], strict=True)]


def _split(spot: Spot, sizes: list[list[int]], whole: int | None = None) -> Spot:
    """Return a view with merged axes split, except the axis `whole`."""
    shape: list[int] = []
    strides: list[int] = []
    for at, (size, stride) in enumerate(zip(*spot[:2], strict=True)):
        parts = [size] if at == whole else sizes[at]
        shape += parts
        strides += [stride * math.prod(parts[inner + 1 :]) for inner in range(len(parts))]
    return Spot(tuple(shape), tuple(strides), spot.offset)


def _expand(spot: Spot, shape: tuple[int, ...]) -> Spot:
    """Return a spot broadcast to a shape. Raises UnevenError if the shapes do not fit."""
    if spot.shape == shape:
        return spot
    more = len(shape) - len(spot.shape)
    if more < 0:
        raise UnevenError
    sizes, strides = (1,) * more + spot.shape, (0,) * more + spot.strides
    if any(own not in (1, wanted) for own, wanted in zip(sizes, shape, strict=True)):
        raise UnevenError
    return Spot(
        shape,
        tuple(0 if own != wanted else stride for own, wanted, stride in zip(sizes, shape, strides, strict=True)),
        spot.offset,
    )


class Span(NamedTuple):
    """Vectors of a call within a projection's output: sizes and steps of batch, heads and rows from a start."""

    origin: Origin
    start: Step
    batch: tuple[tuple[int, Step], ...]
    heads: tuple[tuple[int, Step], ...]
    rows: tuple[int, Step]

    @property
    def columns(self) -> tuple[int, ...]:
        """The first column of each head."""
        return _walk([(size, step.key) for size, step in self.heads], self.start.key)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The first token of each sequence."""
        return _walk([(size, step.row) for size, step in self.batch], self.start.row)

    @property
    def tokens(self) -> tuple[tuple[int, ...], int, int]:
        """The first token of each sequence, the number of tokens per sequence, and their distance."""
        return self.sequences, self.rows[0], self.rows[1].row if self.rows[0] > 1 else 1

    @property
    def covered(self) -> int:
        """Number of tokens in the span."""
        return math.prod(size for size, _ in self.batch) * self.rows[0]


def _walk(axes: list[tuple[int, int]], start: int) -> tuple[int, ...]:
    reached = [start]
    for size, step in axes:
        reached = [first + index * step for first in reached for index in range(size)]
    return tuple(reached)


def find_span(trace: Trace | None, spot: Spot, batch: int) -> Span | None:
    """Return the span of the vectors `[..., L, D]` at a spot with `batch` leading batch axes, or None if unknown."""
    if trace is None or trace.origin is None:
        return None
    found = _find_span(trace.way, spot, batch)
    return None if found is None else Span(trace.origin, *found)


@lru_cache(maxsize=4096)
def _find_span(way: Way, spot: Spot, batch: int) -> tuple[Any, ...] | None:
    try:
        place = way.lay_out().locate(spot)
    except UnevenError:
        return None
    *leading, rows, entries = zip(place.shape, place.steps, strict=True)
    if entries[1].row or any(step.key for _, step in (*leading[:batch], rows)):
        return None  # the product sums over tokens, or a batch or query axis steps through heads
    return place.start, tuple(leading[:batch]), tuple(leading[batch:]), rows
