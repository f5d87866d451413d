"""Finds the parameter columns that compute the queries and keys of each head, and checks them numerically.

A projection gives E numbers per token. A head's vector is an evenly spaced selection of these numbers, times one
factor and possibly rotated, so its length identifies the columns. No name and no layout is assumed. Columns belong
to a head if only their lengths match those of the head's vectors over several tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.internals import unseen
from sqrtdk.torch.sampling import sample_positions
from sqrtdk.torch.watch.recognise.copying import replace

if TYPE_CHECKING:
    from sqrtdk.torch.watch.recognise.calls import SeenCall
    from sqrtdk.torch.watch.recognise.lineage import Lineage

# Number of tokens whose outputs are kept, and the fewest that must be usable.
_TOKENS = 24
_FEWEST = 4
# A wider projection, such as one to a vocabulary, does not compute queries.
_MOST_COLUMNS = 1 << 15
# Matching columns must fit better than all others by this factor.
_CLEARLY = 4.0


class UntoldError(Exception):
    """The parameters that compute the queries or keys are unknown; the message says why."""


class Stored(NamedTuple):
    """Position of a tensor in the storage of a parameter, or in that of a copy of the parameter."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    entries: int  # in the whole storage

    @staticmethod
    def of(tensor: Tensor, origin: int) -> Stored:
        """Return the position of a tensor in, or copied from, the storage at `origin`."""
        entries = tensor.untyped_storage().nbytes() // tensor.element_size()
        return Stored(origin, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), entries)


@dataclass(frozen=True, eq=False)
class Projection:
    """A product with a parameter `[in, E]` and an optional bias `[E]`, and its outputs for some tokens."""

    weight: Stored
    bias: Stored | None
    count: int  # number of tokens
    outputs: Tensor  # [n, E], of some tokens

    @staticmethod
    def of(weight: Tensor, origin: int, bias: Tensor | None, bias_origin: int, output: Tensor) -> Projection | None:
        """Return the projection with output `[..., E]` = input · weight + bias, or None if it cannot compute heads."""
        rows = output if output.ndim == 2 else output.reshape(-1, output.shape[-1])
        count, columns = rows.shape
        if weight.ndim != 2 or columns > _MOST_COLUMNS or columns != weight.shape[1] or not count:
            return None
        stored = None if bias is None else Stored.of(bias, bias_origin)
        outputs = rows.detach().index_select(0, _tokens_of(count, rows.device))
        return Projection(Stored.of(weight, origin), stored, count, outputs)

    def plus(self, bias: Tensor, origin: int) -> Projection | None:
        """Return the projection with a bias added afterwards, or None if the bias is not one number per column."""
        if self.bias is not None or bias.ndim != 1 or bias.numel() != self.outputs.shape[1]:
            return None
        return replace(self, bias=Stored.of(bias, origin), outputs=self.outputs + bias.detach())

    def is_same(self, other: Projection) -> bool:
        """Return whether both use the same weight and bias."""
        return self.weight == other.weight and self.bias == other.bias


class Columns(NamedTuple):
    """Selection of `width` columns of a projection from `start`, every `step`-th."""

    projection: Projection
    start: int
    step: int
    width: int

    @property
    def key(self) -> tuple[Stored, int, int, int]:
        """Identifies the columns within the model."""
        return (self.projection.weight, self.start, self.step, self.width)

    @property
    def slice(self) -> slice:
        """The slice of the projection's columns."""
        return slice(self.start, self.start + (self.width - 1) * self.step + 1, self.step)


class HeadParts(NamedTuple):
    """Columns that compute one head's query and key, in parts. With MLA, one part is rotated and one is not."""

    queries: tuple[Columns, ...]
    keys: tuple[Columns, ...]


class Side(NamedTuple):
    """Vectors of a call's queries or keys at some tokens, and their known projections."""

    name: str
    heads: int
    width: int
    # None if unknown.
    is_normalised: bool | None
    projection: Projection | None
    # Width and projection of each joined part; None for columns without a projection.
    parts: tuple[tuple[int, Projection | None], ...]
    # Vectors `[n, H, D]` by the projection's number of tokens, in each possible token order.
    vectors: dict[int, tuple[Tensor, ...]]

    @staticmethod
    def of(name: str, x_BHLD: Tensor, lineage: Lineage | None, newest: int | None) -> Side:
        """Return one side of a call. In a cache, the newest tokens are the last ones or begin at `newest`."""
        heads, width = x_BHLD.shape[1], x_BHLD.shape[-1]
        if lineage is None:
            return Side(name, heads, width, None, None, (), {})
        parts = _parts_of(lineage)
        counts = {one.count for one in _projections_of(lineage.projection, parts)}
        vectors = {count: _vectors_at(x_BHLD.detach(), count, newest) for count in counts}
        return Side(name, heads, width, lineage.normalised, lineage.projection, parts, vectors)


class HeadEvidence(NamedTuple):
    """Evidence for the parameters that compute the heads of a call. Its tensors are few and small."""

    queries: Side
    keys: Side
    # The reason why no columns can compute a head's scores, or None.
    reason: str | None = None

    @staticmethod
    def of(call: SeenCall) -> HeadEvidence:
        """Return the evidence from a call, while its tensors exist."""
        reason = None if call.logits is None else "its heads are mixed before the softmax"
        with unseen():
            return HeadEvidence(
                Side.of("q", call.q, call.q_lineage, None),
                Side.of("k", call.k, call.k_lineage, call.first_position),
                reason,
            )

    def is_of(self, call: SeenCall) -> bool:
        """Return whether a call uses the same parameters."""
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
    """Return the columns of every query head and of its key head.

    Raises:
        UntoldError: the columns of some head are unknown; the message says why.
    """
    if evidence.reason is not None:
        raise UntoldError(evidence.reason)
    with unseen():
        groups = evidence.queries.heads // evidence.keys.heads
        keys = _find_side(evidence.keys)
        widths = [columns.width for columns in keys[0]]
        queries = _find_side(evidence.queries, widths if len(widths) > 1 else None)
    return [HeadParts(own, keys[head // groups]) for head, own in enumerate(queries)]


def _find_side(side: Side, widths: list[int] | None = None) -> list[tuple[Columns, ...]]:
    """Return the columns of each head, in parts of these widths or as joined if the whole vector does not match."""
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
    """Return the columns of a projection whose lengths match each head's vectors, or the reason if there are none."""
    outputs, heads = projection.outputs, side.heads
    reason = "its vectors could not be found among the tokens of its projection"
    for whole in side.vectors.get(projection.count, ()):
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
    """Return the first column of each head for this `step`, or None unless every head has one clearly best match."""
    columns = outputs.shape[1]
    apart = columns // step
    # Columns that are `step` apart become adjacent, as [N, step, E / step].
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
    # Two heads share either all of their columns, such as the keys of a group, or none.
    if step == 1 and any(after - before < width for before, after in pairwise(ordered)):
        return None
    return starts


def _vectors_at(x_BHLD: Tensor, count: int, newest: int | None) -> tuple[Tensor, ...]:
    """Return the vectors `[n, H, D]` of the tokens that a projection of `count` tokens keeps, in each token order."""
    batch, _, length, _ = x_BHLD.shape
    if batch == 0 or count % batch or count > batch * length:
        return ()
    sequences, positions = _places_of(count, batch, length, newest, x_BHLD.device)
    return torch.split(x_BHLD[sequences, :, positions], min(count, _TOKENS))


@lru_cache(maxsize=64)
def _places_of(count: int, batch: int, length: int, newest: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sequence and position of the kept tokens, in each possible order of tokens, one order after another."""
    tokens = _tokens_of(count, device)
    own = count // batch
    orders = []
    for start in dict.fromkeys([length - own] if newest is None else [length - own, newest]):
        if 0 <= start <= length - own:
            orders.append((tokens // own, start + tokens % own))
            if batch > 1:
                orders.append((tokens % batch, start + tokens // batch))
    sequences, positions = (torch.cat(part) for part in zip(*orders, strict=True))
    return sequences, positions


@lru_cache(maxsize=64)
def _tokens_of(count: int, device: torch.device) -> Tensor:
    """Return the positions of the kept tokens among `count`."""
    return sample_positions(count, _TOKENS, 0, device)


def _without_zeros(vectors_NHD: Tensor) -> Tensor:
    """Return the vectors without trailing zero columns, such as padding to a faster width."""
    if not vectors_NHD.numel() or bool(vectors_NHD[..., -1].any()):
        return vectors_NHD
    used = vectors_NHD.flatten(0, -2).any(dim=0).nonzero()
    return vectors_NHD[..., : int(used[-1]) + 1] if len(used) else vectors_NHD
