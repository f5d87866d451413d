"""From which projection a query or key came, and by what its vectors were multiplied since.

A projection's output is followed by its memory. Copies and multiplications by one number are exact. Through anything
else (rotation, norm, a scale per head) only the lengths of the vectors are kept: a rotation leaves them, a constant
factor multiplies all of them alike, a norm does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.internals import WeakStorage
from sqrtdk.torch.watch.projections import Projection

# Relative spread of ratios of lengths that rounding explains: of the dtype's resolution, generously.
_SPREAD = 64.0


class Piece(NamedTuple):
    """Lengths `[...]` of the vectors of a projection's output, or of a part of it, before they were changed."""

    lengths: Tensor
    width: int
    factor: float
    memory: tuple[WeakStorage | None, int, int]  # the storage, and the first and last entry in it
    name: str = ""

    def lies_in(self, other: Piece) -> bool:
        """Whether this is part of another piece, as the halves that a rotation takes are, of it or of a copy of it."""
        (own, first, last), (others, start, end) = self.memory, other.memory
        size, whole = self.lengths.numel() * self.width, other.lengths.numel() * other.width
        if own != others:
            return self.name == other.name and 2 * size <= whole
        return start <= first and last <= end and size < whole


@dataclass(frozen=True, eq=False)
class Lineage:
    """What is known of a tensor: `name` of the projection, its input, the factor since, or pieces of it.

    Exact, every entry is an entry of the projection's output times `factor`; with `pieces` the lengths of its vectors
    tell; else it was `changed_by` something after which they tell nothing.
    """

    name: str
    # Memory of what went into the projection, and of what that came from: queries and keys of one sequence share it.
    sources: frozenset[WeakStorage] = frozenset()
    factor: float = 1.0
    pieces: tuple[Piece, ...] = ()
    is_exact: bool = True
    normalised: bool = False
    # One number where the projection gave a vector.
    reduced: bool = False
    changed_by: tuple[str, ...] = ()
    # Whether it was multiplied with something learnt, and not with what else the model computed, as scores are.
    is_projection: bool = True
    # Where it was put together along its last axis: widths and their lineage.
    parts: tuple[tuple[int, Lineage | None], ...] = ()
    # Whether it is a product's result as it was: a bias may follow.
    fresh: bool = False
    # The one product that it comes from.
    projection: Projection | None = None

    @property
    def is_lost(self) -> bool:
        """Whether nothing but its origin is known."""
        return not self.is_exact and not self.pieces

    def times(self, factor: float) -> Lineage:
        """After a multiplication by one number."""
        return replace(self, factor=self.factor * factor)

    def lost(self, operation: str, *, normalised: bool = False, reduced: bool = False) -> Lineage:
        """After something that no factor describes: a sum with another tensor, a norm, a power."""
        return Lineage(
            self.name,
            self.sources,
            is_exact=False,
            normalised=self.normalised or normalised,
            reduced=self.reduced or reduced,
            changed_by=tuple(dict.fromkeys([*self.changed_by, operation])),
            is_projection=self.is_projection,
            projection=self.projection,
        )


def piece_of(tensor: Tensor, lineage: Lineage) -> tuple[Piece, ...]:
    """The lengths of the vectors of a tensor that is still its projection's output."""
    if not lineage.is_exact:
        return lineage.pieces
    if tensor.ndim == 0 or tensor.numel() == 0:
        return ()
    shown = torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor
    first = int(shown.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(shown.shape, shown.stride(), strict=True))
    wide = torch.promote_types(shown.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(shown.detach(), dim=-1, dtype=wide)
    return (Piece(lengths, shown.shape[-1], lineage.factor, (WeakStorage(shown), first, last), lineage.name),)


def merge(inputs: list[tuple[Tensor, Lineage]], operation: str) -> Lineage:
    """The lineage of what an operation makes from tensors with lineage."""
    pieces: list[Piece] = []
    for tensor, lineage in inputs:
        for piece in piece_of(tensor, lineage):
            if not any(piece.memory == other.memory for other in pieces):
                pieces.append(piece)
    kept = tuple(piece for piece in pieces if not any(piece.lies_in(other) for other in pieces))
    whole = [lineage for _, lineage in inputs if not lineage.reduced] or [lineage for _, lineage in inputs]
    name = "+".join(dict.fromkeys(lineage.name for lineage in whole))
    changed = dict.fromkeys(change for _, lineage in inputs for change in lineage.changed_by)
    changed[operation] = None
    one = whole[0]
    return Lineage(
        name,
        frozenset().union(*(lineage.sources for lineage in whole)),
        pieces=kept,
        is_exact=False,
        normalised=any(lineage.normalised for lineage in whole),
        reduced=all(lineage.reduced for _, lineage in inputs),
        changed_by=tuple(changed),
        is_projection=all(lineage.is_projection for _, lineage in inputs),
        parts=one.parts if len(inputs) == 1 else (),
        projection=_common_projection(whole),
    )


def _common_projection(lineages: list[Lineage]) -> Projection | None:
    """The projection of all of them, the last in time (a cache holds what earlier calls gave)."""
    last = lineages[-1].projection
    if last is None or any(one.projection is None or not one.projection.is_same(last) for one in lineages):
        return None
    return last


def join(tensors: list[Tensor], lineages: list[Lineage | None], axis: int) -> Lineage | None:
    """The lineage of tensors put together: along the last axis as parts, along another as more vectors."""
    known = [(tensor, lineage) for tensor, lineage in zip(tensors, lineages, strict=True) if lineage is not None]
    if not known:
        return None
    joined = merge(known, "cat")
    if axis == tensors[0].ndim - 1:
        parts = tuple(
            (tensor.shape[-1], lineage if lineage is None else merge([(tensor, lineage)], "cat"))
            for tensor, lineage in zip(tensors, lineages, strict=True)
        )
        return replace(joined, parts=parts)
    lengths = [(piece_of(tensor, lineage), tensor.shape[-1]) for tensor, lineage in known]
    if all(len(pieces) == 1 for pieces, _ in lengths) and len({pieces[0].width for pieces, _ in lengths}) == 1:
        first = lengths[0][0][0]
        joined_lengths = torch.cat([(p[0].lengths * (first.factor / p[0].factor)).flatten() for p, _ in lengths])
        return replace(joined, pieces=(Piece(joined_lengths, first.width, first.factor, (None, 0, -1), first.name),))
    return joined


class Ratio(NamedTuple):
    """By what vectors were multiplied since their projection; None with a reason where there is no one number."""

    factor: float | None
    how: str
    reason: str | None = None
    normalised: bool = False


def ratio_of(x_BHLD: Tensor, lineage: Lineage | None, folded: float = 1.0) -> Ratio:
    """The factor between a projection's output and the queries or keys of a call.

    Args:
        x_BHLD: the queries or keys.
        lineage: what is known about them.
        folded: a factor that they hold and that belongs to the call: torch's own attention multiplied them by it.
    """
    if lineage is None:
        return Ratio(None, "", "no projection was seen before it")
    if lineage.is_exact:
        return Ratio(lineage.factor / folded, "exact")
    if lineage.normalised:
        return Ratio(None, "", "it is normalised after its projection", True)
    if lineage.is_lost:
        return Ratio(None, "", f"it is changed after its projection ({', '.join(lineage.changed_by)})")
    if lineage.parts and sum(width for width, _ in lineage.parts) == x_BHLD.shape[-1]:
        by_parts = _ratio_of_parts(x_BHLD, lineage.parts, folded)
        if by_parts.factor is not None or by_parts.normalised:
            return by_parts
        # A rotation may put its halves together last: each of them is made from both.
        whole = _compare(x_BHLD, lineage, folded)
        return by_parts if whole.factor is None else whole
    return _compare(x_BHLD, lineage, folded)


def _ratio_of_parts(x_BHLD: Tensor, parts: tuple[tuple[int, Lineage | None], ...], folded: float) -> Ratio:
    ratios, start = [], 0
    for width, lineage in parts:
        part = x_BHLD[..., start : start + width]
        start += width
        if lineage is not None or bool(part.any()):  # else columns of padding
            ratios.append((width, ratio_of(part, lineage, folded)))
    if any(ratio.normalised for _, ratio in ratios):
        return Ratio(None, "", "a part of it is normalised after its projection", True)
    known = [(width, ratio.factor) for width, ratio in ratios if ratio.factor is not None]
    if len(known) < len(ratios) or not known:
        reason = next((ratio.reason for _, ratio in ratios if ratio.reason), "no projection was seen before it")
        return Ratio(None, "", f"of a part of its columns: {reason}")
    factors = [factor for _, factor in known]
    if max(factors) - min(factors) > 1e-3 * abs(max(factors)):
        by_part = " and ".join(f"{factor:.4g} ({width} columns)" for width, factor in known)
        return Ratio(None, "", f"its parts are multiplied by {by_part}")
    return Ratio(factors[0], "lengths")


def _compare(x_BHLD: Tensor, lineage: Lineage, folded: float) -> Ratio:
    wide = torch.promote_types(x_BHLD.dtype, torch.float32)
    now = torch.linalg.vector_norm(x_BHLD.detach(), dim=-1, dtype=wide) / folded
    before = _put_together(lineage.pieces)
    changed = ", ".join(lineage.changed_by)
    if before is None:
        return Ratio(None, "", f"what its projection gave was changed in pieces ({changed})")
    lengths, width, factor = before
    dimension, heads = x_BHLD.shape[-1], x_BHLD.shape[1]
    if width == heads * dimension:
        now = torch.linalg.vector_norm(now, dim=1)
    elif width > dimension:
        return Ratio(None, "", f"{width} columns were changed together ({changed}), {dimension} of them are a head's")
    old, new = (one.flatten()[one.flatten() > 0].to(wide) for one in (lengths, now))
    if lengths.shape != now.shape:
        # The vectors may have been rearranged: a constant factor leaves their order by length.
        old, new = old.sort().values, new.sort().values
    if old.numel() and new.numel() > old.numel() and new.numel() % old.numel() == 0:
        old = old.repeat_interleave(new.numel() // old.numel())  # keys that several heads share
    if old.numel() != new.numel() or not old.numel():
        return Ratio(None, "", f"{old.numel()} vectors of its projection became {new.numel()} ({changed})")
    ratios = new / old
    least, largest = float(ratios.min()), float(ratios.max())
    resolution = max(float(torch.finfo(lengths.dtype).eps), float(torch.finfo(x_BHLD.dtype).eps))
    if not math.isfinite(largest) or largest - least > max(_SPREAD * resolution, 1e-4) * largest:
        reason = f"its vectors are multiplied by {least:.4g} to {largest:.4g} after their projection ({changed})"
        return Ratio(None, "", reason)
    return Ratio(factor * float(ratios.median()), "lengths")


def _put_together(pieces: tuple[Piece, ...]) -> tuple[Tensor, int, float] | None:
    """Lengths of the vectors of several pieces of one projection, side by side."""
    if not pieces or len({(tuple(piece.lengths.shape), piece.factor) for piece in pieces}) > 1:
        return None
    square = sum((piece.lengths.square() for piece in pieces), start=torch.zeros(()).to(pieces[0].lengths))
    return square.sqrt(), sum(piece.width for piece in pieces), pieces[0].factor
