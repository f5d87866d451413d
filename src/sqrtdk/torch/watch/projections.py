"""Which columns of which parameters make the queries and keys of a head, found and checked by numbers.

A projection gives E numbers per token, and a head's vector is some of them, evenly apart, times one factor and perhaps
rotated: its length tells which. No name and no layout is taken for granted: columns count as a head's if their lengths
over several tokens are those of its vectors, and those of no other columns are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sqrtdk.torch.internals import without_modes

if TYPE_CHECKING:
    from sqrtdk.torch.watch.calls import SeenCall
    from sqrtdk.torch.watch.lineage import Lineage

# Tokens whose outputs are kept, and how many of them at least must tell.
_TOKENS = 12
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
    tokens: Tensor  # which rows
    count: int  # of how many
    outputs: Tensor  # [n, E]

    @staticmethod
    def of(weight: Tensor, origin: int, bias: Tensor | None, bias_origin: int, output: Tensor) -> Projection | None:
        """Of output `[..., E]` = input · weight + bias, both in memory of these origins; None if it is no head's."""
        rows = output.detach().reshape(-1, output.shape[-1])
        count, columns = rows.shape
        if weight.ndim != 2 or columns > _MOST_COLUMNS or columns != weight.shape[1] or not count:
            return None
        tokens = torch.linspace(0, count - 1, min(count, _TOKENS), device=rows.device).round().long()
        stored = None if bias is None else Stored.of(bias, bias_origin)
        return Projection(Stored.of(weight, origin), stored, tokens, count, rows.index_select(0, tokens))

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


def find_heads(call: SeenCall) -> list[HeadParts]:
    """The columns of every query head and of its key.

    Raises:
        UntoldError: with the reason, if they cannot be told for all heads.
    """
    with without_modes(), torch.no_grad():
        groups = call.q.shape[1] // call.k.shape[1]
        keys = _find_side("k", call.k, call.k_lineage)
        widths = [columns.width for columns in keys[0]]
        queries = _find_side("q", call.q, call.q_lineage, widths if len(widths) > 1 else None)
    return [HeadParts(own, keys[head // groups]) for head, own in enumerate(queries)]


def _find_side(
    name: str, x_BHLD: Tensor, lineage: Lineage | None, widths: list[int] | None = None
) -> list[tuple[Columns, ...]]:
    """The columns of each head: of these widths, or as the vector was put together if it does not fit whole."""
    if lineage is None:
        raise UntoldError(f"no projection was seen before {name}")
    if lineage.normalised:
        raise UntoldError(f"{name} is normalised after its projection, which undoes a change of its weights")
    reason = f"{name} is not the output of one product with a parameter"
    if lineage.projection is not None and widths is None:
        found = _match(x_BHLD, lineage.projection)
        if not isinstance(found, str):
            return [(columns,) for columns in found]
        reason = f"{name}: {found}"
    parts = [(width, part) for width, part in lineage.parts if part is not None]
    if widths is not None and [width for width, _ in parts] != widths:
        parts = [(width, lineage) for width in widths]
    if sum(width for width, _ in parts) > x_BHLD.shape[-1] or not parts:
        raise UntoldError(reason)
    by_part, start = [], 0
    for width, part in parts:
        if part.normalised or part.projection is None:
            raise UntoldError(f"a part of {name} is not the output of one product with a parameter")
        found = _match(x_BHLD[..., start : start + width], part.projection)
        if isinstance(found, str):
            raise UntoldError(f"a part of {name}: {found}")
        by_part.append(found)
        start += width
    return [tuple(of_head) for of_head in zip(*by_part, strict=True)]


def _match(x_BHLD: Tensor, projection: Projection) -> list[Columns] | str:
    """The columns of a projection whose lengths are those of each head's vectors, or why there are none."""
    x = _without_zeros(x_BHLD)
    heads, width = x.shape[1], x.shape[-1]
    outputs = projection.outputs.to(x.device)
    resolution = max(float(torch.finfo(one.dtype).eps) for one in (x, outputs))
    if width > outputs.shape[1]:
        return f"its projection gives {outputs.shape[1]} numbers, a head has {width}"
    reason = "its vectors could not be found among the tokens of its projection"
    for vectors in _vectors_at(x, projection):
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
        most = ratios.amax(dim=0)
        spread = torch.where(most > 0, (most - ratios.amin(dim=0)) / most, torch.inf)
        best = int(spread.argmin())
        others = spread.clone()
        others[best] = torch.inf
        error = float(spread[best])
        allowed = max(4 * resolution, 1e-5)
        if error > allowed or float(others.min()) < _CLEARLY * max(error, resolution):
            return None
        starts.append(best % places * step + best // places)
    ordered = sorted(set(starts))
    # Two heads share all of their columns, as keys of a group do, or none.
    if step == 1 and any(after - before < width for before, after in pairwise(ordered)):
        return None
    return starts


def _vectors_at(x_BHLD: Tensor, projection: Projection) -> list[Tensor]:
    """The vectors `[n, H, D]` of the projection's kept tokens, in the ways that its rows may have been ordered."""
    batch, _, length, _ = x_BHLD.shape
    tokens, count = projection.tokens.to(x_BHLD.device), projection.count
    if batch == 0 or count % batch or count > batch * length:
        return []
    own = count // batch
    # Of a cache the newest tokens are the last.
    by_sequence = x_BHLD[tokens // own, :, length - own + tokens % own]
    by_token = x_BHLD[tokens % batch, :, length - own + tokens // batch]
    return [by_sequence] if batch == 1 else [by_sequence, by_token]


def _without_zeros(x_BHLD: Tensor) -> Tensor:
    """Without the last columns if they are all zero, as padding to a faster width leaves them."""
    if not x_BHLD.numel() or bool(x_BHLD[..., -1].any()):
        return x_BHLD
    used = x_BHLD.flatten(0, -2).any(dim=0).nonzero()
    return x_BHLD[..., : int(used[-1]) + 1] if len(used) else x_BHLD
