"""A call of attention cut into tiles of rows, with the numbers and the visibility of each.

Shape legend: N batch entries, G key/value heads, R query heads per key/value head (H = G·R), L queries, S keys,
D = dₖ, V = dᵥ; small letters count what a tile has of them. Logits of a tile are `[n, g, R, l, s]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.call import OPEN_ABOVE, OPEN_BELOW
from sqrtdk.torch.call import TensorCall

# Logits held at once, in elements: 2 MiB of float32 per temporary, whatever the sequence length.
BLOCK_ELEMENTS = 2**19
# Devices that start every operation anew need longer ones.
_MORE_ON_DEVICES = 16


def _block_elements(call: TensorCall) -> int:
    return BLOCK_ELEMENTS if call.query.is_cpu else _MORE_ON_DEVICES * BLOCK_ELEMENTS


@dataclass(eq=False)
class Entries:
    """A call of rank 4: `[N, H, L, ·]`, scale `[N, H, L]`, mask `[N, H, L, S]`, sinks `[N, H]`, all views."""

    call: TensorCall
    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    at: tuple[int, ...]

    @property
    def shared(self) -> int:
        """R, the query heads per key/value head."""
        return int(self.q.shape[1]) // max(int(self.k.shape[1]), 1)


def cut_entries(call: TensorCall) -> Iterator[Entries]:
    """The call cut along its outer leading axes, which need not lie evenly in memory, down to rank 4.

    Without any query there is nothing to cut.
    """
    if not call.query.numel():
        return
    rows = call.query.shape[:-1]
    keys = call.key.shape[-2]
    scale = None if call.scale is None else call.scale.expand(rows)
    mask = None if call.mask is None else call.mask.expand(*call.heads_shape, rows[-1], keys)
    sinks = None if call.sinks is None else call.sinks.expand(call.heads_shape)
    outer = rows[:-3]
    for at in itertools.product(*map(range, outer)):
        yield Entries(
            call,
            as_rank(call.query[at], 4),
            as_rank(call.key[at], 4),
            as_rank(call.value[at], 4),
            None if scale is None else as_rank(scale[at], 3),
            None if mask is None else as_rank(mask[at], 4),
            None if sinks is None else as_rank(sinks[at], 2),
            at,
        )


def as_rank(x: Tensor, rank: int) -> Tensor:
    """A view with axes of size 1 in front, up to `rank` axes in all."""
    return x[(None,) * (rank - x.dim())]


class Tile(NamedTuple):
    """Batch entries n, key/value heads g, queries i and the keys j that any of them may see; its number in the call."""

    n: slice
    g: slice
    i: slice
    j: slice
    number: int


def cut_tiles(entries: Entries, first_number: int) -> Iterator[Tile]:
    """Tiles of about BLOCK_ELEMENTS logits each, whole batch entries and heads as long as they fit."""
    batch, _, queries = entries.q.shape[:3]
    groups, keys = entries.k.shape[1:3]
    block = _block_elements(entries.call)
    rows_at_once = max(block // max(entries.shared * keys, 1), 1)
    # Keys and values of several heads may have to be gathered: they are held within the same limit.
    gathered = keys * max(entries.k.shape[-1], entries.v.shape[-1], 1)
    groups_at_once = max(min(rows_at_once // max(queries, 1), block // max(gathered, 1)), 1)
    batch_at_once = max(groups_at_once // max(groups, 1), 1)
    corners = itertools.product(
        range(0, batch, batch_at_once), range(0, groups, groups_at_once), range(0, queries, rows_at_once)
    )
    for number, (n, g, i) in enumerate(corners, first_number):
        rows = slice(i, min(i + rows_at_once, queries))
        yield Tile(
            slice(n, min(n + batch_at_once, batch)),
            slice(g, min(g + groups_at_once, groups)),
            rows,
            _keys_of(entries.call, rows, keys),
            number,
        )


def _keys_of(call: TensorCall, rows: slice, keys: int) -> slice:
    """The keys that lie in the range of some row; all of them where positions are given."""
    if call.positions is not None:
        return slice(0, keys)
    start = 0 if call.first == OPEN_BELOW else min(max(rows.start + call.first, 0), keys)
    stop = keys if call.last == OPEN_ABOVE else min(max(rows.stop - 1 + call.last + 1, start), keys)
    return slice(start, stop)


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
    softcap: float
    sink: Tensor | None
    keep: Tensor | None
    kept_share: float
    may_be_traced: bool = False


def by_group(x: Tensor, shared: int) -> Tensor:
    """`[n, h, ...]` as `[n, g, R, ...]`."""
    parted: Tensor = x.unflatten(1, (-1, shared))  # type: ignore[no-untyped-call]
    return parted


def cut_block(entries: Entries, tile: Tile, dtype: torch.dtype) -> Block:
    """The numbers of a tile in the given precision."""
    call, shared = entries.call, entries.shared
    n, g, i, j, _ = tile
    h = slice(g.start * shared, g.stop * shared)
    visible, bias = _visibility(entries, tile, h, dtype)
    scale: Tensor | float = call.factor
    if entries.scale is not None:
        scale = by_group(entries.scale[n, h, i].to(dtype), shared)[..., None]
    sink = None
    if entries.sinks is not None:
        sink = by_group(entries.sinks[n, h].to(dtype), shared)[..., None, None]
    block = Block(
        q=by_group(entries.q[n, h, i].to(dtype), shared),
        k=entries.k[n, g, j].to(dtype),
        v=entries.v[n, g, j].to(dtype),
        scale=scale,
        visible=visible,
        bias=bias,
        softcap=call.softcap,
        sink=sink,
        keep=None,
        kept_share=1.0 - call.dropout,
    )
    if call.dropout > 0.0:
        block.keep = _draw_kept(call, tile, (*block.q.shape[:-1], j.stop - j.start))
    return block


def _draw_kept(call: TensorCall, tile: Tile, shape: tuple[int, ...]) -> Tensor:
    """Which weights of a tile dropout keeps: the same for forward and backward, as the seed and the tile decide."""
    assert call.seed is not None
    generator = torch.Generator(call.query.device)
    generator.manual_seed((int(call.seed) + tile.number) % 2**63)
    # The dtype is named: the process's default may be another by the time of the backward pass.
    drawn = torch.rand(shape, generator=generator, device=call.query.device, dtype=torch.float32)
    return drawn >= call.dropout


def _visibility(entries: Entries, tile: Tile, h: slice, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Which keys each row of a tile sees, broadcastable to the logits (None: all), and what is added to the scores."""
    visible = _in_range(entries.call, tile.i, tile.j)
    if entries.mask is None:
        return visible, None
    mask = by_group(entries.mask[tile.n, h, tile.i, tile.j], entries.shared)
    if mask.dtype == torch.bool:
        return mask if visible is None else mask & visible, None
    allowed = mask != -torch.inf
    return allowed if visible is None else allowed & visible, mask.to(dtype)


def _in_range(call: TensorCall, i: slice, j: slice) -> Tensor | None:
    if call.first == OPEN_BELOW and call.last == OPEN_ABOVE:
        return None
    device = call.query.device
    rows = torch.arange(i.start, i.stop, device=device) if call.positions is None else call.positions[i]
    apart = torch.arange(j.start, j.stop, device=device) - rows[:, None]
    if call.first == OPEN_BELOW:
        return apart <= call.last
    if call.last == OPEN_ABOVE:
        return apart >= call.first
    return (apart >= call.first) & (apart <= call.last)


def count_visible(call: TensorCall) -> Tensor:
    """How many keys each row sees, int64, broadcastable to `[..., H, L]`: along the mask's own axes, never more."""
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    if call.mask is None:
        return _count_in_range(queries, keys, call)
    mask = as_rank(call.mask, 2)
    if mask.dim() > call.query.dim():  # one head without an axis, which its mask may have
        mask = mask[0]
    mask = mask.expand(*mask.shape[:-1], keys)
    rows_at_once = max(_block_elements(call) // max(keys * math.prod(mask.shape[:-2]), 1), 1)
    parts = []
    for start in range(0, max(queries, 1), rows_at_once):
        i = slice(start, min(start + rows_at_once, queries))
        part = mask if mask.shape[-2] == 1 else mask[..., i, :]
        visible = part if part.dtype == torch.bool else part != -torch.inf
        in_range = _in_range(call, i, slice(0, keys))
        if in_range is None:
            parts.append(visible.sum(dim=-1).expand(*visible.shape[:-2], i.stop - i.start))
        else:
            parts.append((visible & in_range).sum(dim=-1))
    return torch.cat(parts, dim=-1)


def _count_in_range(queries: int, keys: int, call: TensorCall) -> Tensor:
    i = torch.arange(queries, device=call.query.device)
    # Clipped first: i + OPEN_ABOVE would be beyond int64.
    most = (i + min(call.last, keys)).clip(max=keys - 1)
    least = (i + max(call.first, -queries)).clip(min=0)
    return (most - least + 1).clip(min=0)
