"""Which columns of which parameters make the queries and keys of a head, found and checked by numbers.

A projection gives E numbers per token, and a head's vector is some of them, evenly apart, times one factor and perhaps
rotated: its length tells which. No name and no layout is taken for granted: columns count as a head's if their lengths
over several tokens are those of its vectors, and those of no other columns are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.internals import without_modes
from sqrtdk.torch.sampling import sample_positions

if TYPE_CHECKING:
    from sqrtdk.torch.watch.calls import SeenCall
    from sqrtdk.torch.watch.lineage import Lineage

# Tokens whose outputs are kept, and how many of them at least must tell.
_TOKENS = 24
_FEWEST = 4
# A vocabulary is no projection of queries.
_MOST_COLUMNS = 1 << 15
# Columns that fit have to fit so much better than all others.
_CLEARLY = 4.0


class UntoldError(Exception):
    """It cannot be told which parameters make the queries or keys; the text says why."""


class Stored(NamedTuple):
    """Where a tensor lies in the memory of a parameter, or lay in that of a copy of it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    entries: int  # of the whole memory

    @staticmethod
    def of(tensor: Tensor, origin: int) -> Stored:
        """Of a tensor that is, or is a copy of, the memory at `origin`."""
        entries = tensor.untyped_storage().nbytes() // tensor.element_size()
        return Stored(origin, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), entries)


@dataclass(frozen=True, eq=False)
class Projection:
    """A product with a parameter `[in, E]`, a bias `[E]` if any, and what it gave for some of its tokens."""

    weight: Stored
    bias: Stored | None
    count: int  # of its tokens
    outputs: Tensor  # [n, E] of some of them

    @staticmethod
    def of(weight: Tensor, origin: int, bias: Tensor | None, bias_origin: int, output: Tensor) -> Projection | None:
        """Of output `[..., E]` = input · weight + bias, both in memory of these origins; None if it is no head's."""
        rows = output.detach().reshape(-1, output.shape[-1])
        count, columns = rows.shape
        if weight.ndim != 2 or columns > _MOST_COLUMNS or columns != weight.shape[1] or not count:
            return None
        stored = None if bias is None else Stored.of(bias, bias_origin)
        outputs = rows.index_select(0, _tokens_of(count, rows.device))
        return Projection(Stored.of(weight, origin), stored, count, outputs)

    def plus(self, bias: Tensor, origin: int) -> Projection | None:
        """The same with a bias that was added afterwards; None if it is not one number per column."""
        if self.bias is not None or bias.ndim != 1 or bias.numel() != self.outputs.shape[1]:
            return None
        return replace(self, bias=Stored.of(bias, origin), outputs=self.outputs + bias.detach())

    def is_same(self, other: Projection) -> bool:
        """Whether both multiply by the same parameter."""
        return self.weight == other.weight and self.bias == other.bias


class Columns(NamedTuple):
    """`width` columns of a projection from `start`, every `step`-th."""

    projection: Projection
    start: int
    step: int
    width: int

    @property
    def key(self) -> tuple[Stored, int, int, int]:
        """What tells it from other columns of the model."""
        return (self.projection.weight, self.start, self.step, self.width)

    @property
    def slice(self) -> slice:
        """Of the columns of the projection."""
        return slice(self.start, self.start + (self.width - 1) * self.step + 1, self.step)


class HeadParts(NamedTuple):
    """The columns that make one head's query and key, part by part: with MLA a part without and one with rotation."""

    queries: tuple[Columns, ...]
    keys: tuple[Columns, ...]


class Side(NamedTuple):
    """The vectors of a call's queries or keys at some tokens, and what is known of where they came from."""

    name: str
    heads: int
    width: int
    # None where nothing is known.
    is_normalised: bool | None
    projection: Projection | None
    # Widths of what it was put together from, with the projection; None for columns that come from none.
    parts: tuple[tuple[int, Projection | None], ...]
    # `[n, H, D]` by how many tokens a projection has: in the ways that these may have been ordered.
    vectors: dict[int, list[Tensor]]

    @staticmethod
    def of(name: str, x_BHLD: Tensor, lineage: Lineage | None, newest: int | None) -> Side:
        """Of queries or keys; in a cache the newest tokens are the last, or begin at `newest`."""
        heads, width = x_BHLD.shape[1], x_BHLD.shape[-1]
        if lineage is None:
            return Side(name, heads, width, None, None, (), {})
        parts = _parts_of(lineage)
        counts = {one.count for one in _projections_of(lineage.projection, parts)}
        vectors = {count: list(_vectors_at(x_BHLD.detach(), count, newest)) for count in counts}
        return Side(name, heads, width, lineage.normalised, lineage.projection, parts, vectors)


class HeadEvidence(NamedTuple):
    """What tells which parameters make the heads of a call; its tensors are few and small."""

    queries: Side
    keys: Side
    # Why no columns make a head's scores, whatever its vectors are.
    reason: str | None = None

    @staticmethod
    def of(call: SeenCall) -> HeadEvidence:
        """Of a call while its tensors are there."""
        reason = None if call.logits is None else "its heads are mixed before the softmax"
        with without_modes(), torch.no_grad():
            return HeadEvidence(
                Side.of("q", call.q, call.q_lineage, None),
                Side.of("k", call.k, call.k_lineage, call.first_position),
                reason,
            )

    def is_of(self, call: SeenCall) -> bool:
        """Whether a call came from the same parameters."""
        own = [one for side in self[:2] for one in _projections_of(side.projection, side.parts)]
        lineages = [lineage for lineage in (call.q_lineage, call.k_lineage) if lineage is not None]
        others = [one for lineage in lineages for one in _projections_of(lineage.projection, _parts_of(lineage))]
        return len(own) == len(others) and all(one.is_same(two) for one, two in zip(own, others, strict=True))


_Parts = tuple[tuple[int, Projection | None], ...]


def _parts_of(lineage: Lineage) -> _Parts:
    return tuple((width, None if part is None or part.normalised else part.projection) for width, part in lineage.parts)


def _projections_of(whole: Projection | None, parts: _Parts) -> list[Projection]:
    return [one for one in (whole, *(projection for _, projection in parts)) if one is not None]


def find_heads(evidence: HeadEvidence) -> list[HeadParts]:
    """The columns of every query head and of its key.

    Raises:
        UntoldError: with the reason, if they cannot be told for all heads.
    """
    if evidence.reason is not None:
        raise UntoldError(evidence.reason)
    with without_modes(), torch.no_grad():
        groups = evidence.queries.heads // evidence.keys.heads
        keys = _find_side(evidence.keys)
        widths = [columns.width for columns in keys[0]]
        queries = _find_side(evidence.queries, widths if len(widths) > 1 else None)
    return [HeadParts(own, keys[head // groups]) for head, own in enumerate(queries)]


def _find_side(side: Side, widths: list[int] | None = None) -> list[tuple[Columns, ...]]:
    """The columns of each head: of these widths, or as the vector was put together if it does not fit whole."""
    name = side.name
    if side.is_normalised is None:
        raise UntoldError(f"no projection was seen before {name}")
    if side.is_normalised:
        raise UntoldError(f"{name} is normalised after its projection, which undoes a change of its weights")
    reason = f"{name} is not the output of one product with a parameter"
    if side.projection is not None and widths is None:
        columns = _match(side, slice(0, side.width), side.projection)
        if not isinstance(columns, str):
            return [(one,) for one in columns]
        reason = f"{name}: {columns}"
    parts = list(side.parts)
    if widths is not None and [width for width, _ in parts] != widths:
        parts = [(width, side.projection) for width in widths]
    if sum(width for width, _ in parts) != side.width or not parts:
        raise UntoldError(reason)
    by_part, start = [], 0
    for width, projection in parts:
        if projection is None:
            raise UntoldError(f"a part of {name} is not the output of one product with a parameter")
        columns = _match(side, slice(start, start + width), projection)
        if isinstance(columns, str):
            raise UntoldError(f"a part of {name}: {columns}")
        by_part.append(columns)
        start += width
    return [tuple(of_head) for of_head in zip(*by_part, strict=True)]


def _match(side: Side, part: slice, projection: Projection) -> list[Columns] | str:
    """The columns of a projection whose lengths are those of each head's vectors, or why there are none."""
    outputs, heads = projection.outputs, side.heads
    reason = "its vectors could not be found among the tokens of its projection"
    for whole in side.vectors.get(projection.count, []):
        vectors = _without_zeros(whole[..., part])
        width = vectors.shape[-1]
        if width > outputs.shape[1]:
            return f"its projection gives {outputs.shape[1]} numbers, a head has {width}"
        resolution = max(float(torch.finfo(one.dtype).eps) for one in (vectors, outputs))
        squares = vectors.double().square().sum(dim=-1)
        use = (squares > 0).all(dim=-1)
        if int(use.sum()) < _FEWEST:
            reason = f"{int(use.sum())} tokens are too few to tell its columns by"
            continue
        for step in dict.fromkeys((1, heads, 3, 3 * heads, 2, 2 * heads)):
            if outputs.shape[1] % step == 0 and outputs.shape[1] // step >= width:
                starts = _find_starts(outputs[use], squares[use], width, step, resolution)
                if starts is not None:
                    return [Columns(projection, start, step, width) for start in starts]
                reason = "the lengths of its vectors are not those of any columns of its projection"
    return reason


def _find_starts(outputs: Tensor, squares_NH: Tensor, width: int, step: int, resolution: float) -> list[int] | None:
    """The first column of each head among those `step` apart; None unless every head has one that clearly fits best."""
    columns = outputs.shape[1]
    apart = columns // step
    # Columns `step` apart side by side, as [N, step, E / step].
    energy = outputs.double().square().reshape(-1, apart, step).transpose(1, 2)
    sums = torch.nn.functional.pad(energy.cumsum(dim=-1), (1, 0))
    lengths = (sums[..., width:] - sums[..., :-width]).flatten(1)  # [N, step · places]
    places = apart - width + 1
    starts: list[int] = []
    for square in squares_NH.unbind(dim=1):
        ratios = lengths / square[:, None]
        mean = ratios.mean(dim=0)
        spread = torch.where(mean > 0, ratios.std(dim=0) / mean, torch.inf)
        best = int(spread.argmin())
        others = spread.clone()
        others[best] = torch.inf
        error = float(spread[best])
        allowed = max(resolution, 1e-5)
        if error > allowed or float(others.min()) < _CLEARLY * max(error, resolution / 8):
            return None
        starts.append(best % places * step + best // places)
    ordered = sorted(set(starts))
    # Two heads share all of their columns, as keys of a group do, or none.
    if step == 1 and any(after - before < width for before, after in pairwise(ordered)):
        return None
    return starts


def _vectors_at(x_BHLD: Tensor, count: int, newest: int | None) -> Iterator[Tensor]:
    """The vectors `[n, H, D]` of the tokens that a projection of so many keeps, in the ways its rows may be ordered."""
    batch, _, length, _ = x_BHLD.shape
    if batch == 0 or count % batch or count > batch * length:
        return
    tokens = _tokens_of(count, x_BHLD.device)
    own = count // batch
    starts = [length - own] if newest is None else [length - own, newest]
    for start in dict.fromkeys(starts):
        if 0 <= start <= length - own:
            yield x_BHLD[tokens // own, :, start + tokens % own]
            if batch > 1:
                yield x_BHLD[tokens % batch, :, start + tokens // batch]


@lru_cache(maxsize=64)
def _tokens_of(count: int, device: torch.device) -> Tensor:
    """Which of so many tokens are kept."""
    return sample_positions(count, _TOKENS, 0, device)


def _without_zeros(vectors_NHD: Tensor) -> Tensor:
    """Without the last columns if they are all zero, as padding to a faster width leaves them."""
    if not vectors_NHD.numel() or bool(vectors_NHD[..., -1].any()):
        return vectors_NHD
    used = vectors_NHD.flatten(0, -2).any(dim=0).nonzero()
    return vectors_NHD[..., : int(used[-1]) + 1] if len(used) else vectors_NHD
