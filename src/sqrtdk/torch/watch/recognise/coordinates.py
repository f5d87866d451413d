"""Locates the entries of a view among the rows and keys of the product that they came from.

A product q·kᵀ of N batches of L queries and S keys has N·L rows of S entries. A model may split heads, transpose,
expand or slice the product before its softmax. Each axis of the result still steps through rows or keys by a constant
number. A `Step` describes such an axis, so that rows and keys are known without copying scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.watch.recognise.copying import replace


class UnevenError(Exception):
    """The view does not step evenly through rows or keys."""


class Step(NamedTuple):
    """Number of rows and of keys by which an axis moves."""

    row: int
    key: int

    def times(self, factor: int) -> Step:
        """Return the step between every `factor`-th entry."""
        return Step(self.row * factor, self.key * factor)

    def plus(self, other: Step) -> Step:
        """Return the sum of two steps."""
        return Step(self.row + other.row, self.key + other.key)


STILL = Step(0, 0)


class Spot(NamedTuple):
    """Position of a tensor in its storage: shape, strides and offset."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Spot:
        """Return the spot of a tensor. A complex number counts as two entries."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        return Spot(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class Place:
    """Rows and keys of a tensor: a step per axis, and the row and key of the first entry."""

    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    start: Step = STILL


@dataclass(frozen=True)
class Layout:
    """A place together with its strides and offset in memory, so that views of the same memory can be located."""

    place: Place
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor, place: Place) -> Layout:
        """Return the layout of a dense tensor at a place."""
        return Layout(place, tensor.stride(), int(tensor.storage_offset()))

    def locate(self, view: Tensor | Spot) -> Place:
        """Return the place of a view of the same memory.

        Raises:
            UnevenError: an axis of the view does not step evenly.
        """
        shape, strides, offset = view if isinstance(view, Spot) else Spot.of(view)
        if (shape, strides, offset) == (self.place.shape, self.strides, self.offset):
            return self.place
        axes = self._axes()
        start, reached = _walk(offset - self.offset, axes)
        steps = []
        for size, stride in zip(shape, strides, strict=True):
            if size == 1 or stride == 0:
                steps.append(STILL)
                continue
            step, at, extent = _step_of(size, stride, axes)
            if at is not None:
                reached[at] += extent
            steps.append(step)
        if any(index >= axis[1] for index, axis in zip(reached, axes, strict=True)):
            raise UnevenError  # the view wraps around the end of an axis
        return Place(shape, tuple(steps), self.place.start.plus(start))

    def step(self, size: int, stride: int) -> Step:
        """Return the step of one axis of a view.

        Raises:
            UnevenError: the axis does not step evenly.
        """
        return STILL if size == 1 or stride == 0 else _step_of(size, stride, self._axes())[0]

    def divide(self, size: int, stride: int) -> list[tuple[int, Step]]:
        """Return size and step of one axis of a view, or of the axes merged into it, outermost first.

        A merged axis of batch and heads becomes two axes, which step through tokens and through columns.

        Raises:
            UnevenError: the axis does not consist of whole axes.
        """
        if size == 1 or stride == 0:
            return [(size, STILL)]
        axes = self._axes()
        try:
            return [(size, _step_of(size, stride, axes)[0])]
        except UnevenError:
            return _divide(size, stride, axes)

    def _axes(self) -> list[tuple[int, int, Step]]:
        """Return stride, size and step of the axes in memory, largest stride first."""
        return _sort(zip(self.strides, self.place.shape, self.place.steps, strict=True))


def _sort(axes: Iterable[tuple[int, int, Step]]) -> list[tuple[int, int, Step]]:
    return sorted((axis for axis in axes if axis[1] > 1 and axis[0] > 0), key=lambda axis: -axis[0])


def _walk(ahead: int, axes: list[tuple[int, int, Step]]) -> tuple[Step, list[int]]:
    """Return the step to an entry that is `ahead` entries further in memory, and its index along each axis."""
    reached, indices = STILL, []
    for stride, size, step in axes:
        index = min(ahead // stride, size - 1) if ahead > 0 else 0
        ahead -= index * stride
        reached = reached.plus(step.times(index))
        indices.append(index)
    if ahead:
        raise UnevenError
    return reached, indices


def _step_of(size: int, stride: int, axes: list[tuple[int, int, Step]]) -> tuple[Step, int | None, int]:
    """Return the step of one axis of a view, which may be part of an axis in memory or several axes merged.

    For part of an axis, also return the index of that axis and how far along it the view reaches.
    """
    at = next((i for i, axis in enumerate(axes) if axis[0] <= stride), None)
    if at is None or stride % axes[at][0]:
        raise UnevenError
    inner, capacity, step = axes[at]
    factor = stride // inner
    extent = (size - 1) * factor
    if extent < capacity:
        return step.times(factor), at, extent
    while extent >= capacity:
        at -= 1
        if at < 0:
            raise UnevenError
        outer, outer_size, outer_step = axes[at]
        if outer != inner * capacity or outer_step != step.times(capacity):
            raise UnevenError
        capacity *= outer_size
    return step.times(factor), None, 0


def _divide(size: int, stride: int, axes: list[tuple[int, int, Step]]) -> list[tuple[int, Step]]:
    at = next((i for i, axis in enumerate(axes) if axis[0] <= stride), None)
    if at is None or stride % axes[at][0] or axes[at][1] % (stride // axes[at][0]):
        raise UnevenError
    factor = stride // axes[at][0]
    parts = [(axes[at][1] // factor, axes[at][2].times(factor))]
    while (have := math.prod(count for count, _ in parts)) < size:
        at -= 1
        if at < 0 or axes[at][0] != stride * have or size % have:
            raise UnevenError
        parts.insert(0, (min(axes[at][1], size // have), axes[at][2]))
    return parts


def stride_along(step: Step, size: int, place: Place, strides: tuple[int, ...]) -> int:
    """Return the distance in memory between entries of a tensor at `place` that are `step` apart; 0 if broadcast.

    Raises:
        UnevenError: the step crosses several axes of the tensor that are not contiguous.
    """
    if step == STILL or size == 1:
        return 0
    by_key = step.key != 0
    return _step_of(size, step.key if by_key else step.row, _axes_along(by_key, place, strides))[0].row


def memory_ahead(distance: int, by_key: bool, place: Place, strides: tuple[int, ...]) -> int:
    """Return the distance in memory of a tensor at `place` that corresponds to a distance in keys or in rows.

    Raises:
        UnevenError: the tensor has no entry at that distance.
    """
    return _walk(distance, _axes_along(by_key, place, strides))[0].row if distance else 0


def _axes_along(by_key: bool, place: Place, strides: tuple[int, ...]) -> list[tuple[int, int, Step]]:
    """Return the axes that step through keys alone, or through rows alone, with their strides as steps."""
    return _sort(
        ((own.key, size, Step(stride, 0)) if by_key else (own.row, size, Step(stride, 0)))
        for own, size, stride in zip(place.steps, place.shape, strides, strict=True)
        if (own.row if by_key else own.key) == 0
    )


def swap(place: Place, queries: int, keys: int) -> Place:
    """Return the same place in the product with its sides swapped, where rows become keys.

    Raises:
        UnevenError: an axis steps through both rows and keys, or crosses batches unevenly.
    """

    def turn(step: Step) -> Step:
        if step.key:
            if step.row:
                raise UnevenError
            return Step(step.key, 0)
        if step.row % queries == 0:
            return Step(step.row // queries * keys, 0)
        if step.row < queries:
            return Step(0, step.row)
        raise UnevenError

    batch, query = divmod(place.start.row, queries)
    return replace(place, steps=tuple(map(turn, place.steps)), start=Step(batch * keys + place.start.key, query))
