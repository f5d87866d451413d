"""Lineage of queries and keys: their projection, and what multiplied their vectors since.

A projection's output is followed by its memory. Copies and multiplications by one number are exact. Through anything
else (rotation, a scale per head) only the lengths of the vectors are kept: a rotation leaves them, a constant factor
multiplies all of them alike. After a norm the vectors are followed anew: what multiplies them from there on is a gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


@dataclass(eq=False)
class Lineage:
    """What is known of a tensor: `name` of the projection, its input, the factor since, or pieces of it.

    `factor` is the product of the numbers that it was multiplied by. Exact, every entry is an entry of the projection's
    output times that; with `pieces` the lengths of its vectors tell; else it was `changed_by` something after which
    they tell nothing. `normalised`, all this holds from its last norm on.
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
    # Of the product among all that were seen, and of the module's call in which it was normalised.
    number: int = 0
    normalised_in: int = 0
    # Learnt tensors that it was multiplied by, an entry for each column or head.
    gains: tuple[Tensor, ...] = ()

    @property
    def is_lost(self) -> bool:
        """Whether nothing but its origin is known."""
        return not self.is_exact and not self.pieces

    def times(self, factor: float) -> Lineage:
        """After a multiplication by one number; lengths, if they are known, will tell it as well."""
        return self._with(factor=self.factor * factor, fresh=False)

    def gain(self, gain: Tensor) -> Lineage:
        """After a multiplication by something learnt."""
        return self._with(gains=(*self.gains, gain), fresh=False)

    def _with(self, **changes: Any) -> Lineage:
        """Like dataclasses.replace, in a fifth of its time."""
        changed = object.__new__(Lineage)
        changed.__dict__.update(self.__dict__, **changes)
        return changed

    def norm(self, frame: int) -> Lineage:
        """After a norm of its vectors in a module's call of this number, with the gain that is part of the norm."""
        return Lineage(
            self.name,
            self.sources,
            normalised=True,
            is_projection=self.is_projection,
            projection=self.projection,
            number=self.number,
            normalised_in=frame,
        )

    def lost(self, operation: str, *, reduced: bool = False) -> Lineage:
        """After something that no factor describes: a sum with another tensor, a power."""
        return Lineage(
            self.name,
            self.sources,
            self.factor,
            is_exact=False,
            normalised=self.normalised,
            reduced=self.reduced or reduced,
            changed_by=tuple(dict.fromkeys([*self.changed_by, operation])),
            is_projection=self.is_projection,
            projection=self.projection,
            number=self.number,
            normalised_in=self.normalised_in,
            gains=self.gains,
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
    memory = (WeakStorage(shown), first, last)
    return (Piece(_lengths_of(shown), shown.shape[-1], lineage.factor, memory, lineage.name),)


def _lengths_of(x: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    return lengths


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
        one.factor,
        pieces=kept,
        is_exact=False,
        normalised=any(lineage.normalised for lineage in whole),
        reduced=all(lineage.reduced for _, lineage in inputs),
        changed_by=tuple(changed),
        is_projection=all(lineage.is_projection for _, lineage in inputs),
        parts=one.parts if len(inputs) == 1 else (),
        projection=_common_projection(whole),
        number=one.number,
        normalised_in=one.normalised_in,
        gains=one.gains,
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
    first = known[0][1]
    if len(known) == len(tensors) and all(_is_like(first, lineage) for _, lineage in known):
        return replace(first, fresh=False)
    if axis == tensors[0].ndim - 1:
        pairs = list(zip(tensors, lineages, strict=True))
        own = [(x, lineage if lineage is None else merge([(x, lineage)], "cat")) for x, lineage in pairs]
        joined = merge([(x, lineage) for x, lineage in own if lineage is not None], "cat")
        return replace(joined, parts=tuple((x.shape[-1], lineage) for x, lineage in own))
    joined = merge(known, "cat")
    whole = len(known) == len(tensors)
    pieces = [piece_of(tensor, lineage if whole else _settle(tensor, lineage)) for tensor, lineage in known]
    if all(len(own) == 1 for own in pieces) and len({own[0].width for own in pieces}) == 1:
        piece = pieces[0][0]
        lengths = [(own[0].lengths * (piece.factor / own[0].factor)).flatten() for own in pieces]
        # Keys from elsewhere (learnt, or of a prefix) are followed with the others: what becomes of all of them counts.
        others = [tensor for tensor, lineage in zip(tensors, lineages, strict=True) if lineage is None]
        lengths += [_lengths_of(tensor).flatten() for tensor in others if tensor.shape[-1] == piece.width]
        return replace(
            joined, pieces=(Piece(torch.cat(lengths), piece.width, piece.factor, (None, 0, -1), piece.name),)
        )
    return joined


def _is_like(one: Lineage, other: Lineage) -> bool:
    """Whether both are parts of one projection's output, changed alike and exactly known."""
    if not (one.is_exact and other.is_exact and one.projection is other.projection) or other.parts:
        return False
    if [id(gain) for gain in one.gains] != [id(gain) for gain in other.gains]:
        return False
    return all(getattr(one, name) == getattr(other, name) for name in ("number", "name", "factor", "normalised"))


def _settle(tensor: Tensor, lineage: Lineage) -> Lineage:
    """The lineage with the factor that its vectors have now, if they tell one: what joins them has none."""
    if lineage.is_exact or len(lineage.pieces) != 1 or tensor.ndim != 4:
        return lineage
    ratio = _compare(tensor, lineage, 1.0)
    return lineage if ratio.factor is None else replace(lineage, is_exact=True, factor=ratio.factor, pieces=())


class Ratio(NamedTuple):
    """By what vectors were multiplied since their projection or norm; None with a reason where there is no one number.

    `is_uneven` tells that it was measured and differs between vectors or columns; `numbers` are those that were seen to
    multiply them, whatever else did.
    """

    factor: float | None
    how: str
    reason: str | None = None
    normalised: bool = False
    is_uneven: bool = False
    numbers: float = 1.0


def ratio_of(x_BHLD: Tensor, lineage: Lineage | None, folded: float = 1.0) -> Ratio:
    """The factor between a projection's output, or what a norm made of it, and the queries or keys of a call.

    Args:
        x_BHLD: the queries or keys.
        lineage: what is known about them.
        folded: a factor that they hold and that belongs to the call: torch's own attention multiplied them by it.
    """
    if lineage is None:
        return Ratio(None, "", "no projection was seen before it")
    ratio = _with_gains(_ratio_of(x_BHLD, lineage, folded), lineage.gains)
    if not (lineage.normalised or ratio.normalised):
        return ratio
    since = (
        "" if ratio.factor is None or abs(ratio.factor - 1.0) < 1e-4 else f" and multiplied by {ratio.factor:.4g} since"
    )
    part = "a part of it" if not lineage.normalised else "it"
    reason = f"{part} is normalised after its projection{since}"
    return ratio._replace(
        normalised=True,
        reason=reason if ratio.reason is None else f"{reason}; from there on {ratio.reason}",
        numbers=lineage.factor / folded,
    )


def _with_gains(ratio: Ratio, gains: tuple[Tensor, ...]) -> Ratio:
    """The ratio together with what is learnt: one number if all of its entries are the same."""
    for gain in gains:
        least, largest = float(gain.min()), float(gain.max())
        if largest - least > 1e-4 * abs(largest):
            reason = f"its entries are multiplied by {least:.4g} to {largest:.4g}, which is learnt"
            return Ratio(None, "", reason, ratio.normalised, True)
        ratio = ratio._replace(factor=None if ratio.factor is None else ratio.factor * largest)
    return ratio


def _ratio_of(x_BHLD: Tensor, lineage: Lineage, folded: float) -> Ratio:
    if lineage.is_exact:
        return Ratio(lineage.factor / folded, "exact")
    if lineage.is_lost:
        since = "" if lineage.normalised else " after its projection"
        return Ratio(None, "", f"it is changed{since} ({', '.join(lineage.changed_by)})")
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
    normalised = any(ratio.normalised for _, ratio in ratios)
    if normalised and not all(ratio.normalised for _, ratio in ratios):
        return Ratio(None, "", None, True)
    known = [(width, ratio.factor) for width, ratio in ratios if ratio.factor is not None]
    if len(known) < len(ratios) or not known:
        reason = next((ratio.reason for _, ratio in ratios if ratio.reason), "no projection was seen before it")
        return Ratio(None, "", f"of a part of its columns: {reason}", normalised)
    factors = [factor for _, factor in known]
    if max(factors) - min(factors) > 1e-3 * abs(max(factors)):
        by_part = " and ".join(f"{factor:.4g} ({width} columns)" for width, factor in known)
        return Ratio(None, "", f"its parts are multiplied by {by_part}", normalised, True)
    return Ratio(factors[0], "lengths", None, normalised)


def _compare(x_BHLD: Tensor, lineage: Lineage, folded: float) -> Ratio:
    wide = torch.promote_types(x_BHLD.dtype, torch.float32)
    now = _lengths_of(x_BHLD) / folded
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
        since = "norm" if lineage.normalised else "projection"
        reason = f"its vectors are multiplied by {least:.4g} to {largest:.4g} after their {since} ({changed})"
        return Ratio(None, "", reason, is_uneven=True)
    return Ratio(factor * float(ratios.median()), "lengths")


def _put_together(pieces: tuple[Piece, ...]) -> tuple[Tensor, int, float] | None:
    """Lengths of the vectors of several pieces of one projection, side by side."""
    if not pieces or len({(tuple(piece.lengths.shape), piece.factor) for piece in pieces}) > 1:
        return None
    square = sum((piece.lengths.square() for piece in pieces), start=torch.zeros(()).to(pieces[0].lengths))
    return square.sqrt(), sum(piece.width for piece in pieces), pieces[0].factor
