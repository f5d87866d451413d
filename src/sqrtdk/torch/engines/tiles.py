"""Tiles of rows of a call, with their numbers and their visibility.

Shape legend: N batch entries, G key/value heads, R query heads per key/value head (H = G·R), L queries, S keys,
D = dₖ, V = dᵥ; small letters are the sizes of a tile. Logits of a tile are `[n, g, R, l, s]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.operation.call import ARRAYS, FIELDS, Call, full_shape
from sqrtdk.operation.dropout import draw_kept, growth_of_kept
from sqrtdk.operation.visibility import as_truth

# Logits held at once, in elements: 2 MiB of float32 per temporary, whatever the sequence length.
BLOCK_ELEMENTS = 2**19
# Devices with a start-up cost per operation need longer tiles.
_MORE_ON_DEVICES = 16


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of row sums and statistics: float64 where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which logits are computed: float64 for float64, float32 for narrower dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _block_elements(call: Call) -> int:
    return BLOCK_ELEMENTS if call.query.is_cpu else _MORE_ON_DEVICES * BLOCK_ELEMENTS


@dataclass(eq=False)
class Entries:
    """A call of rank 4, its arrays broadcast in full: `[N, H, L, ·]`, numbers per row `[N, H, L]`, per head `[N, H]`.

    `at` is where it lies in the outer leading axes of a call of higher rank, `first_row` the number of its first row.
    """

    call: Call
    at: tuple[int, ...]
    first_row: int = 0

    @property
    def shared(self) -> int:
        """R, the query heads per key/value head."""
        return self.call.shared


def cut_entries(call: Call) -> Iterator[Entries]:
    """Yield the call cut along its outer leading axes, which may have any strides, down to rank 4.

    A call without queries yields nothing.
    """
    if not call.query.numel():
        return
    rows, arrays = call.rows, list(expand_arrays(call))
    for number, at in enumerate(itertools.product(*map(range, rows[:-3]))):
        part: dict[str, Any] = {name: as_rank(x[at], rank) for name, x, rank in arrays}
        yield Entries(call._replace(**part), at, number * math.prod(rows[-3:]))


def expand_arrays(call: Call) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the name of each array that the call has, the array broadcast in full, and its axes in a call of rank 4."""
    for name, x in zip(ARRAYS, call.arrays, strict=True):
        if x is not None:
            yield name, x.expand(full_shape(name, call)), 4 - (FIELDS[name].lacks or 0)


def as_rank(x: Tensor, rank: int) -> Tensor:
    """Return a view with axes of size 1 in front, `rank` axes in all."""
    return x[(None,) * (rank - x.dim())]


class Tile(NamedTuple):
    """Batch entries n, key/value heads g, queries i and the keys j that any of them may see."""

    n: slice
    g: slice
    i: slice
    j: slice


def cut_tiles(entries: Entries) -> Iterator[Tile]:
    """Yield tiles of about BLOCK_ELEMENTS logits each, with whole batch entries and heads if they fit."""
    call = entries.call
    batch, _, queries = call.query.shape[:3]
    groups, keys = call.key.shape[1:3]
    block = _block_elements(call)
    rows_at_once = max(block // max(entries.shared * keys, 1), 1)
    # Keys and values of several heads may have to be gathered, within the same limit.
    gathered = keys * max(call.key.shape[-1], call.value.shape[-1], 1)
    groups_at_once = max(min(rows_at_once // max(queries, 1), block // max(gathered, 1)), 1)
    batch_at_once = max(groups_at_once // max(groups, 1), 1)
    corners = itertools.product(
        range(0, batch, batch_at_once), range(0, groups, groups_at_once), range(0, queries, rows_at_once)
    )
    for n, g, i in corners:
        rows = slice(i, min(i + rows_at_once, queries))
        yield Tile(
            slice(n, min(n + batch_at_once, batch)),
            slice(g, min(g + groups_at_once, groups)),
            rows,
            call.band.keys_of(rows, keys),
        )


@dataclass(eq=False)
class Block:
    """A tile's numbers in the working precision: q `[n, g, R, l, D]`, k and v `[n, g, s, ·]`.

    `may_be_traced` if nothing may be decided by looking at the numbers; q, k and v are finite then.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor | float
    visible: Tensor | None
    bias: Tensor | None
    distances: Tensor | None
    softcap: float
    sink: Tensor | None
    keep: Tensor | None
    growth: float
    may_be_traced: bool = False


def by_group(x: Tensor, shared: int) -> Tensor:
    """Return `[n, h, ...]` as `[n, g, R, ...]`."""
    parted: Tensor = x.unflatten(1, (-1, shared))  # type: ignore[no-untyped-call]
    return parted


def cut_block(entries: Entries, tile: Tile, dtype: torch.dtype) -> Block:
    """Return the numbers of a tile in the given precision."""
    call, shared = entries.call, entries.shared
    n, g, i, j = tile
    h = slice(g.start * shared, g.stop * shared)
    visible, bias = _visibility(entries, tile, h, dtype)
    by_position = find_position_bias(call, _count(entries, i), _count(entries, j), lambda x: x[n, h, i], dtype)
    if by_position.bias is not None:
        sloped = by_group(by_position.bias, shared)
        bias = sloped if bias is None else bias + sloped
    scale: Tensor | float = call.factor
    if call.scale is not None:
        scale = by_group(call.scale[n, h, i].to(dtype), shared)[..., None]
    sink = None
    if call.sinks is not None:
        sink = by_group(call.sinks[n, h].to(dtype), shared)[..., None, None]
    return Block(
        q=by_group(call.query[n, h, i].to(dtype), shared),
        k=call.key[n, g, j].to(dtype),
        v=call.value[n, g, j].to(dtype),
        scale=scale,
        visible=visible,
        bias=bias,
        distances=by_position.distances,
        softcap=call.softcap,
        sink=sink,
        keep=_draw_kept(entries, tile, h) if call.dropout else None,
        growth=growth_of_kept(call.dropout),
    )


class PositionBias(NamedTuple):
    """Bias `[..., l, s]` that follows from positions, and the distances `[l, s]` in it; None for a call without."""

    bias: Tensor | None = None
    distances: Tensor | None = None


def find_position_bias(
    call: Call, rows: Tensor, keys: Tensor, pick: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> PositionBias:
    """Return slope·(j − i − offset) for the rows `[l]` and keys `[s]`; `pick` selects these rows of an array."""
    if call.alibi is None:
        return PositionBias()
    distances = call.band.distances(rows, keys).to(dtype)
    return PositionBias(pick(call.alibi).to(dtype)[..., None] * distances, distances)


def _draw_kept(entries: Entries, tile: Tile, h: slice) -> Tensor:
    """Return which weights of a tile dropout keeps: the same in both passes, and however the call is cut."""
    call = entries.call
    assert call.seed is not None
    heads, queries = call.heads, call.queries
    of_heads = _count(entries, tile.n)[:, None] * heads + _count(entries, h)
    rows = entries.first_row + of_heads[:, :, None] * queries + _count(entries, tile.i)
    every_row, keys = by_group(rows, entries.shared)[..., None], _count(entries, tile.j)
    kept: Tensor = draw_kept(call.dropout, call.seed, every_row, keys)
    return kept


def _count(entries: Entries, part: slice) -> Tensor:
    return torch.arange(part.start, part.stop, device=entries.call.query.device)


def _visibility(entries: Entries, tile: Tile, h: slice, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return which keys each row of a tile sees, broadcastable to the logits (None: all), and the bias."""
    visible = entries.call.band.sees(_count(entries, tile.i), _count(entries, tile.j))
    mask = entries.call.mask
    if mask is None:
        return visible, None
    mask = by_group(mask[tile.n, h, tile.i, tile.j], entries.shared)
    allowed = as_truth(mask)
    visible = allowed if visible is None else allowed & visible
    return visible, None if mask.dtype == torch.bool else mask.to(dtype)
