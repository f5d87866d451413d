"""A checked call of attention: its arguments in one layout and its rows cut into tiles.

Shape legend: N batch entries (all leading axes), G key/value heads, R query heads per key/value head (H = G·R),
L queries, S keys, D = dₖ, V = dᵥ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk.reference import Rows
from sqrtdk.scales import Policy

Array = npt.NDArray[Any]

# Logits held at once, in elements: 2 MiB of float64 per temporary, whatever the sequence length.
BLOCK_ELEMENTS = 2**18

# The limits of kernel.h that leave a side of the visible range open.
OPEN_BELOW, OPEN_ABOVE = -(2**63), 2**63 - 1

Tile = tuple[slice, slice, slice, slice]


@dataclass(eq=False)
class Call:
    """A call whose arguments have been checked: arrays as they were given, never copied here.

    `factor` and `mask` broadcast to `[..., H, L]` and `[..., H, L, S]`. Query i, at position i + offset, sees key j if
    first ≤ j − i ≤ last and the mask lets it; OPEN_BELOW and OPEN_ABOVE leave a side open. The properties `q`, `k`, `v`
    bring the arrays into the common layout q `[N, G, R, L, D]`, k and v `[N, G, 1, S, ·]`: the kernel does without.
    """

    query: Array
    key: Array
    value: Array
    code: int
    heads: int
    groups: int
    policy: Policy
    factor: float | Array
    mask: Array | None
    offset: int
    first: int
    last: int
    softcap: float | None
    sinks: Array | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of query, key, value and the output."""
        return self.query.dtype

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.query.shape[:-3]

    @property
    def head_shape(self) -> tuple[int, ...]:
        """(H,), or () where the call has no axis of heads."""
        return self.query.shape[-3:-2]

    @cached_property
    def rows_shape(self) -> tuple[int, int, int, int]:
        """N, G, R, L."""
        shared = self.heads // self.groups if self.groups else 1
        return math.prod(self.batch), self.groups, shared, self.queries

    @property
    def queries(self) -> int:
        """L."""
        return int(self.query.shape[-2])

    @property
    def keys(self) -> int:
        """S."""
        return int(self.key.shape[-2])

    @property
    def d_v(self) -> int:
        """V."""
        return int(self.value.shape[-1])

    @cached_property
    def q(self) -> Array:
        """`[N, G, R, L, D]`."""
        return self.query.reshape(*self.rows_shape, self.query.shape[-1])

    @cached_property
    def k(self) -> Array:
        """`[N, G, 1, S, D]`."""
        return self.key.reshape(*self.rows_shape[:2], 1, *self.key.shape[-2:])

    @cached_property
    def v(self) -> Array:
        """`[N, G, 1, S, V]`."""
        return self.value.reshape(*self.rows_shape[:2], 1, *self.value.shape[-2:])

    @cached_property
    def row_factors(self) -> Array:
        """The factor of every row `[N, G, R, L]`."""
        return np.broadcast_to(self.factor, self.query.shape[:-1]).reshape(self.rows_shape)

    @cached_property
    def whole_mask(self) -> Array:
        """The mask as `[..., H, L, S]`."""
        assert self.mask is not None
        return np.broadcast_to(self.mask, (*self.batch, self.heads, self.queries, self.keys))

    def restore(self, array: Array) -> Array:
        """`[N, G, R, L, ...]` back to the caller's `[..., H, L, ...]`."""
        return array.reshape(*self.batch, *self.head_shape, self.queries, *array.shape[4:])

    def tiles(self) -> Iterator[Tile]:
        """Blocks of rows (batch, kv head, all its query heads, query) of about BLOCK_ELEMENTS logits each."""
        batch, groups, shared, queries = self.rows_shape
        row = max(shared * self.keys, 1)
        rows_at_once = max(BLOCK_ELEMENTS // row, 1)
        heads_at_once = max(rows_at_once // max(queries, 1), 1)
        batch_at_once = max(heads_at_once // max(groups, 1), 1)
        for n in range(0, batch, batch_at_once):
            for g in range(0, groups, heads_at_once):
                for i in range(0, queries, rows_at_once):
                    yield (
                        slice(n, min(n + batch_at_once, batch)),
                        slice(g, min(g + heads_at_once, groups)),
                        slice(0, shared),
                        slice(i, min(i + rows_at_once, queries)),
                    )

    def rows(self, tile: Tile) -> Rows:
        """The float64 rows of a tile, with its masks worked out."""
        n, g, _, _ = tile
        # C order whatever the caller's strides: the product's rounding follows the layout.
        q, k = self.q[tile].astype(np.float64, order="C"), self.k[n, g].astype(np.float64, order="C")
        with np.errstate(all="ignore"):
            q, k = self.policy.prepare(q, k)
        visible, bias = self.visibility(tile)
        return Rows(
            q=q,
            k=k,
            v=self.v[n, g].astype(np.float64, order="C"),
            scale=self.row_factors[tile][..., None],
            visible=visible,
            bias=bias,
            softcap=self.softcap,
            sink=None if self.sinks is None else self.sinks.reshape(self.rows_shape[1:3])[None, g, :, None, None],
        )

    def visibility(self, tile: Tile) -> tuple[Array, Array | None]:
        """Which keys each row of a tile sees, broadcastable to `[n, g, R, l, S]`, and what is added to the scores."""
        visible = self._in_range(tile[3])
        if self.mask is None:
            return visible, None
        n, g, _, i = tile
        shared = all(stride == 0 for stride in self.whole_mask.strides[: len(self.batch)])
        entries = range(1) if shared else range(n.start, n.stop)
        # Sliced before it is copied: a broadcast mask never grows beyond the tile.
        part = np.stack([self._mask_of(entry)[g, :, i] for entry in entries])
        if part.dtype == np.bool_:
            return visible & part, None
        bias = part.astype(np.float64)
        return visible & (bias != -np.inf), bias

    def _mask_of(self, entry: int) -> Array:
        mask = self.whole_mask[np.unravel_index(entry, self.batch)] if self.batch else self.whole_mask
        return mask.reshape(*self.rows_shape[1:3], *mask.shape[-2:])

    def _in_range(self, i: slice) -> Array:
        apart = np.arange(self.keys, dtype=np.int64)[None, :] - np.arange(i.start, i.stop, dtype=np.int64)[:, None]
        visible = np.ones(apart.shape, dtype=bool)
        if self.first != OPEN_BELOW:
            visible &= apart >= self.first
        if self.last != OPEN_ABOVE:
            visible &= apart <= self.last
        return visible

    def count_visible(self) -> Array:
        """Number of visible keys per row, broadcastable to `[..., H, L]`."""
        if self.mask is None:
            i = np.arange(self.queries, dtype=np.int64)
            # Clipped first: i + OPEN_ABOVE would be beyond int64.
            most = np.minimum(i + min(self.last, self.keys), self.keys - 1)
            least = np.maximum(i + max(self.first, -self.queries), 0)
            return np.asarray(np.maximum(most - least + 1, 0))
        count = np.zeros(self.rows_shape, dtype=np.int64)
        for tile in self.tiles():
            count[tile] = self.visibility(tile)[0].sum(axis=-1)
        return self.restore(count)
