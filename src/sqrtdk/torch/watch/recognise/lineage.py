"""Tracks the lineage of queries and keys: their projection and the factors applied since.

A projection's output is followed by its memory. Copies and multiplications by one number are exact. For any other
operation (rotation, a scale per head), only vector lengths are kept. A rotation preserves lengths, and a constant
factor multiplies all of them equally. After a norm, lineage starts again, and later factors count as a gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.internals import WeakStorage
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.projections import Projection
from sqrtdk.wording.numbers import write_number

# Limit for the products of one lineage. A residual stream comes from all products before it.
_MOST_PRODUCTS = 32
# Relative spread of length ratios that rounding explains, in units of the dtype's resolution, with a wide margin.
_SPREAD = 64.0


class Piece(NamedTuple):
    """Lengths `[...]` of the vectors of a projection's output, or of a part of it, before later changes."""

    lengths: Tensor
    width: int
    factor: float
    memory: tuple[WeakStorage | None, int, int]  # the storage, and its first and last entry
    name: str = ""

    def lies_in(self, other: Piece) -> bool:
        """Return whether this is part of another piece or of its copy, like the halves that a rotation takes."""
        (own, first, last), (others, start, end) = self.memory, other.memory
        size, whole = self.lengths.numel() * self.width, other.lengths.numel() * other.width
        if own != others:
            return self.name == other.name and 2 * size <= whole
        return start <= first and last <= end and size < whole


@dataclass(eq=False)
class Lineage:
    """Known origin of a tensor: `name` of the projection, its inputs, and the factor or pieces since.

    `factor` is the product of the numbers that multiplied the tensor. If exact, every entry is an entry of the
    projection's output times `factor`. With `pieces`, vector lengths determine the factor. Otherwise the operations in
    `changed_by` made lengths uninformative. If `normalised`, all of this counts from the last norm on.
    """

    name: str
    # Storage of the projection's inputs and of their own sources. Queries and keys of one sequence share some of it.
    sources: frozenset[WeakStorage] = frozenset()
    factor: float = 1.0
    pieces: tuple[Piece, ...] = ()
    is_exact: bool = True
    normalised: bool = False
    # Whether the tensor has one number per vector of the projection.
    reduced: bool = False
    changed_by: tuple[str, ...] = ()
    # Whether the product was with a learnt tensor. Scores are products of two computed tensors.
    is_projection: bool = True
    # If joined along the last axis: the width and lineage of each part.
    parts: tuple[tuple[int, Lineage | None], ...] = ()
    # Whether the tensor is an unchanged product, so that a bias may follow.
    fresh: bool = False
    # The single product that the tensor comes from.
    projection: Projection | None = None
    # The number of the product among all seen, and the number of the module call that normalised the tensor.
    number: int = 0
    normalised_in: int = 0
    # Learnt factors with an entry per column or head.
    gains: tuple[Tensor, ...] = ()
    # The numbers of all products that the tensor comes from without another product in between. Negative numbers are
    # outputs of modules that were not followed.
    products: frozenset[int] = frozenset()

    @property
    def is_lost(self) -> bool:
        """Whether only the origin is known."""
        return not self.is_exact and not self.pieces

    def times(self, factor: float) -> Lineage:
        """Return the lineage after a multiplication by one number. Known lengths show this factor as well."""
        return replace(self, factor=self.factor * factor, fresh=False)

    def gain(self, gain: Tensor) -> Lineage:
        """Return the lineage after a multiplication by a learnt tensor."""
        return replace(self, gains=(*self.gains, gain), fresh=False)

    def norm(self, frame: int) -> Lineage:
        """Return the lineage after a norm, including the norm's gain, in the module call with this number."""
        return Lineage(
            self.name,
            self.sources,
            normalised=True,
            is_projection=self.is_projection,
            projection=self.projection,
            number=self.number,
            normalised_in=frame,
            products=self.products,
        )

    def lost(self, operation: str, *, reduced: bool = False) -> Lineage:
        """Return the lineage after an operation that no factor describes, such as a power or a sum of tensors."""
        return self._changed(operation, pieces=(), reduced=self.reduced or reduced, parts=())

    def measured(self, tensor: Tensor, operation: str) -> Lineage:
        """Return the lineage of an operation's output with the lengths of its only input that has one."""
        return self._changed(operation, pieces=piece_of(tensor, self))

    def _changed(self, operation: str, **changes: Any) -> Lineage:
        changed_by = self.changed_by if operation in self.changed_by else (*self.changed_by, operation)
        return replace(self, is_exact=False, changed_by=changed_by, fresh=False, **changes)


def piece_of(tensor: Tensor, lineage: Lineage) -> tuple[Piece, ...]:
    """Return the vector lengths of a tensor that is still its projection's output, else its known pieces."""
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
    """Return the lineage of an operation's output from inputs with lineage."""
    if len(inputs) == 1:
        return inputs[0][1].measured(inputs[0][0], operation)
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
        products=join_products([lineage for _, lineage in inputs]),
    )


def join_products(lineages: Iterable[Lineage]) -> frozenset[int]:
    """Return the products of all lineages. If there are too many, 0 stands for those that are followed."""
    products = frozenset().union(*(lineage.products for lineage in lineages))
    if len(products) <= _MOST_PRODUCTS:
        return products
    return frozenset({0, min(0, *products)})


def _common_projection(lineages: list[Lineage]) -> Projection | None:
    """Return the common projection, or None. A cache holds outputs of earlier calls, so the latest is returned."""
    last = lineages[-1].projection
    if last is None or any(one.projection is None or not one.projection.is_same(last) for one in lineages):
        return None
    return last


def join(tensors: list[Tensor], lineages: list[Lineage | None], axis: int) -> Lineage | None:
    """Return the lineage of joined tensors: parts if joined along the last axis, otherwise more vectors."""
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
        # Keys from elsewhere (learnt, or of a prefix) join the others, because later factors apply to all keys.
        others = [tensor for tensor, lineage in zip(tensors, lineages, strict=True) if lineage is None]
        lengths += [_lengths_of(tensor).flatten() for tensor in others if tensor.shape[-1] == piece.width]
        return replace(
            joined, pieces=(Piece(torch.cat(lengths), piece.width, piece.factor, (None, 0, -1), piece.name),)
        )
    return joined


def _is_like(one: Lineage, other: Lineage) -> bool:
    """Return whether both are parts of one projection's output with the same exactly known changes."""
    if not (one.is_exact and other.is_exact and one.projection is other.projection) or other.parts:
        return False
    if [id(gain) for gain in one.gains] != [id(gain) for gain in other.gains]:
        return False
    return all(getattr(one, name) == getattr(other, name) for name in ("number", "name", "factor", "normalised"))


def _settle(tensor: Tensor, lineage: Lineage) -> Lineage:
    """Return the lineage with the factor measured from its vectors, if there is one, before tensors are joined."""
    if lineage.is_exact or len(lineage.pieces) != 1 or tensor.ndim != 4:
        return lineage
    ratio = _compare(tensor, lineage, 1.0)
    return lineage if ratio.factor is None else replace(lineage, is_exact=True, factor=ratio.factor, pieces=())


class LengthRatio(NamedTuple):
    """Factor applied to vectors since their projection or norm, or None with a reason if it is not one number.

    `is_uneven` means that the measured factor differs between vectors or columns. `numbers` is the product of the
    single numbers that were seen to multiply the vectors, apart from other changes.
    """

    factor: float | None
    how: str
    reason: str | None = None
    normalised: bool = False
    is_uneven: bool = False
    numbers: float = 1.0


def ratio_of(x_BHLD: Tensor, lineage: Lineage | None, folded: float = 1.0) -> LengthRatio:
    """Return the factor between the output of a projection or its norm and the queries or keys of a call.

    Args:
        x_BHLD: the queries or keys.
        lineage: the lineage of the queries or keys.
        folded: a factor that torch's own attention multiplied them by; it belongs to the call.
    """
    if lineage is None:
        return LengthRatio(None, "", "no projection was seen before it")
    ratio = _with_gains(_ratio_of(x_BHLD, lineage, folded), lineage.gains)
    if not (lineage.normalised or ratio.normalised):
        return ratio
    since = (
        ""
        if ratio.factor is None or abs(ratio.factor - 1.0) < 1e-4
        else f" and multiplied by {write_number(ratio.factor)} since"
    )
    part = "a part of it" if not lineage.normalised else "it"
    reason = f"{part} is normalised after its projection{since}"
    return ratio._replace(
        normalised=True,
        reason=reason if ratio.reason is None else f"{reason}; from there on {ratio.reason}",
        numbers=lineage.factor / folded,
    )


def _with_gains(ratio: LengthRatio, gains: tuple[Tensor, ...]) -> LengthRatio:
    """Return the ratio times the learnt gains, which is one number if all entries of each gain are equal."""
    for gain in gains:
        least, largest = float(gain.min()), float(gain.max())
        if largest - least > 1e-4 * abs(largest):
            reason = f"its entries are multiplied by {write_number(least)} to {write_number(largest)}, which is learnt"
            return LengthRatio(None, "", reason, ratio.normalised, True)
        ratio = ratio._replace(factor=None if ratio.factor is None else ratio.factor * largest)
    return ratio


def _ratio_of(x_BHLD: Tensor, lineage: Lineage, folded: float) -> LengthRatio:
    if lineage.is_exact:
        return LengthRatio(lineage.factor / folded, "exact")
    if lineage.is_lost:
        since = "" if lineage.normalised else " after its projection"
        return LengthRatio(None, "", f"it is changed{since} ({', '.join(lineage.changed_by)})")
    if lineage.parts and sum(width for width, _ in lineage.parts) == x_BHLD.shape[-1]:
        by_parts = _ratio_of_parts(x_BHLD, lineage.parts, folded)
        if by_parts.factor is not None or by_parts.normalised:
            return by_parts
        # A rotation may join its halves last, and each half is computed from both.
        whole = _compare(x_BHLD, lineage, folded)
        return by_parts if whole.factor is None else whole
    return _compare(x_BHLD, lineage, folded)


def _ratio_of_parts(x_BHLD: Tensor, parts: tuple[tuple[int, Lineage | None], ...], folded: float) -> LengthRatio:
    ratios, start = [], 0
    for width, lineage in parts:
        part = x_BHLD[..., start : start + width]
        start += width
        if lineage is not None or bool(part.any()):  # otherwise padding columns
            ratios.append((width, ratio_of(part, lineage, folded)))
    normalised = any(ratio.normalised for _, ratio in ratios)
    if normalised and not all(ratio.normalised for _, ratio in ratios):
        return LengthRatio(None, "", None, True)
    known = [(width, ratio.factor) for width, ratio in ratios if ratio.factor is not None]
    if len(known) < len(ratios) or not known:
        reason = next((ratio.reason for _, ratio in ratios if ratio.reason), "no projection was seen before it")
        return LengthRatio(None, "", f"of a part of its columns: {reason}", normalised)
    factors = [factor for _, factor in known]
    if max(factors) - min(factors) > 1e-3 * abs(max(factors)):
        by_part = " and ".join(f"{write_number(factor)} ({width} columns)" for width, factor in known)
        return LengthRatio(None, "", f"its parts are multiplied by {by_part}", normalised, True)
    return LengthRatio(factors[0], "lengths", None, normalised)


def _compare(x_BHLD: Tensor, lineage: Lineage, folded: float) -> LengthRatio:
    wide = torch.promote_types(x_BHLD.dtype, torch.float32)
    now = _lengths_of(x_BHLD) / folded
    before = _put_together(lineage.pieces)
    changed = ", ".join(lineage.changed_by)
    if before is None:
        return LengthRatio(None, "", f"what its projection gave was changed in pieces ({changed})")
    lengths, width, factor = before
    dimension, heads = x_BHLD.shape[-1], x_BHLD.shape[1]
    if width == heads * dimension:
        now = torch.linalg.vector_norm(now, dim=1)
    elif width > dimension:
        return LengthRatio(
            None, "", f"{width} columns were changed together ({changed}), {dimension} of them are a head's"
        )
    old, new = (_keep_positive(one.flatten().to(wide)) for one in (lengths, now))
    if lengths.shape != now.shape:
        # The vectors may have been rearranged. A constant factor keeps their order by length.
        old, new = old.sort().values, new.sort().values
    if old.numel() and new.numel() > old.numel() and new.numel() % old.numel() == 0:
        old = old.repeat_interleave(new.numel() // old.numel())  # several heads share keys
    if old.numel() != new.numel() or not old.numel():
        return LengthRatio(None, "", f"{old.numel()} vectors of its projection became {new.numel()} ({changed})")
    ratios = new / old
    least, largest = map(float, ratios.aminmax())
    resolution = max(float(torch.finfo(lengths.dtype).eps), float(torch.finfo(x_BHLD.dtype).eps))
    if not math.isfinite(largest) or largest - least > max(_SPREAD * resolution, 1e-4) * largest:
        since = "norm" if lineage.normalised else "projection"
        reason = (
            f"its vectors are multiplied by {write_number(least)} to {write_number(largest)} after their {since} "
            f"({changed})"
        )
        return LengthRatio(None, "", reason, is_uneven=True)
    return LengthRatio(factor * float(ratios.median()), "lengths")


def _keep_positive(lengths: Tensor) -> Tensor:
    """Return the lengths above 0. A selection takes ten times as long or more as the check whether it is needed."""
    return lengths if lengths.numel() and float(lengths.min()) > 0 else lengths[lengths > 0]


def _put_together(pieces: tuple[Piece, ...]) -> tuple[Tensor, int, float] | None:
    """Return the lengths, total width and factor of adjacent pieces of one projection, or None if they differ."""
    if not pieces or len({(tuple(piece.lengths.shape), piece.factor) for piece in pieces}) > 1:
        return None
    if len(pieces) == 1:
        return pieces[0].lengths, pieces[0].width, pieces[0].factor
    square = sum((piece.lengths.square() for piece in pieces), start=torch.zeros(()).to(pieces[0].lengths))
    return square.sqrt(), sum(piece.width for piece in pieces), pieces[0].factor
