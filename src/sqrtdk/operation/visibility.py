"""Visible keys: the band around the diagonal, and how many keys each query sees."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sqrtdk.theory.softmax import namespace_of

# The limits of kernel.h that leave a side of the visible range open.
OPEN_BELOW, OPEN_ABOVE = -(2**63), 2**63 - 1

# Mask entries read at once when visible keys are counted.
_COUNTED_AT_ONCE = 2**18


class Band(NamedTuple):
    """The visible range: query i, at position i + offset, sees key j if first ≤ j − i ≤ last.

    The offset is None where queries and keys have no positions in common (cross-attention).
    """

    first: int = OPEN_BELOW
    last: int = OPEN_ABOVE
    offset: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether the band hides nothing."""
        return self.first == OPEN_BELOW and self.last == OPEN_ABOVE

    def sees(self, rows: Any, keys: Any) -> Any:
        """Return which keys `[s]` each row `[l]` sees, boolean `[l, s]`, or None for all; integer arrays or tensors."""
        if self.is_open:
            return None
        apart = keys - rows[:, None]
        if self.first == OPEN_BELOW:
            return apart <= self.last
        if self.last == OPEN_ABOVE:
            return apart >= self.first
        return (apart >= self.first) & (apart <= self.last)

    def distances(self, rows: Any, keys: Any) -> Any:
        """Return j − i − offset for each row `[l]` and key `[s]`, integers `[l, s]`; negative before the row."""
        return keys - rows[:, None] - (self.offset or 0)

    def keys_of(self, rows: slice, keys: int) -> slice:
        """Return the range of keys that any of the rows sees."""
        start = 0 if self.first == OPEN_BELOW else min(max(rows.start + self.first, 0), keys)
        stop = keys if self.last == OPEN_ABOVE else min(max(rows.stop + self.last, start), keys)
        return slice(start, stop)

    def count_keys(self, rows: Any, keys: int) -> Any:
        """Return how many of the keys each row `[l]` (an integer array or tensor) sees."""
        # Clipped before they are subtracted: an open or far side is near the limits of int64.
        most = (rows + min(self.last, keys)).clip(-1, keys - 1)
        least = (rows + self.first).clip(0, keys)
        return (most - least + 1).clip(0, None)


OPEN, ALIGNED = Band(), Band(offset=0)


def row_numbers(query: Any) -> Any:
    """Return 0, 1, …, L − 1 as an int64 array, or as a tensor on the query's device."""
    return namespace_of(query).arange(query.shape[-2], device=query.device)


def as_truth(mask: Any) -> Any:
    """Return whether each mask entry shows its key; bytes that are neither 0 nor 1 count as true."""
    xp = namespace_of(mask)
    return mask.view(xp.uint8) != 0 if mask.dtype == xp.bool else mask != -xp.inf


def count_visible(query: Any, keys: int, mask: Any, band: Band) -> Any:
    """Return how many keys each row sees, integers that broadcast to `[..., H, L]`, with the mask's own axes only."""
    xp = namespace_of(query)
    rows = row_numbers(query)
    if mask is None:
        return band.count_keys(rows, keys)
    if mask.ndim > len(query.shape):  # one head without an axis, which its mask may have
        mask = mask[0]
    mask = mask[(None,) * (2 - mask.ndim)]
    mask = xp.broadcast_to(mask, (*mask.shape[:-1], keys))
    queries = rows.shape[0]
    every_key = xp.arange(keys, device=rows.device)
    at_once = max(_COUNTED_AT_ONCE // max(keys * math.prod(mask.shape[:-2]), 1), 1)
    counts = []
    for start in range(0, max(queries, 1), at_once):
        i = slice(start, min(start + at_once, queries))
        visible = as_truth(mask if mask.shape[-2] == 1 else mask[..., i, :])
        in_range = band.sees(rows[i], every_key)
        if in_range is None:
            seen = visible.sum(-1)
            counts.append(xp.broadcast_to(seen, (*seen.shape[:-1], i.stop - i.start)))
        else:
            counts.append((visible & in_range).sum(-1))
    return xp.concatenate(counts, -1)
