"""Summaries of rows by the compiled kernel, in one pass; `heads` defines the numbers and computes them without it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk.compiled import load_kernel
from sqrtdk.statistics import ROW_FIELDS
from sqrtdk.summary.moments import BINS, NEXT_EDGE, Histogram, Moments, count_edges_below

Array = npt.NDArray[Any]

# Limit for the positions of keys: the kernel counts into an array of this length.
_MOST_KEYS = 1 << 20


class _Scratch(threading.local):
    """Arrays for the bins of one call, kept for the next call so that memory of their size is not freed each time."""

    def __init__(self) -> None:
        self._arrays = np.empty(0, np.int16), np.empty(0, np.int64)

    def get(self, most: int) -> tuple[Array, Array]:
        """Return uninitialised arrays for at least so many bins and their numbers."""
        if len(self._arrays[0]) < most:
            self._arrays = np.empty(most, np.int16), np.empty(most, np.int64)
        return self._arrays


_scratch = _Scratch()


def summarise_rows(
    names: tuple[str, ...],
    farthest: int,
    counts: Array,
    measures: Array,
    positions: Array | None,
    present: Array,
    threads: int = 1,
    team: int = 0,
) -> tuple[Moments, tuple[Array, Array, Array]] | None:
    """Return the moments `[S, H]` of rows and the fields of their `MaxKeys`; None if the kernel cannot compute them.

    Args:
        names: the statistics, in order.
        farthest: largest offset that is counted by itself.
        counts, measures: rows `[·, B, H, L]`, as in `RowBlock`.
        positions: positions of the queries among the keys `[B, L]`, None if unknown.
        present: `[B, L]`, False for padding.
        threads: threads of the kernel, on which no number depends.
        team: the address of the threads of a runtime, 0 for the kernel's own.
    """
    kernel, _ = load_kernel()
    if kernel is None or (ROW_FIELDS, names) != (kernel.ROW_FIELDS, kernel.SUMMARISED):
        return None
    batch, heads, queries = counts.shape[1:]
    keys = int(counts[1].max(initial=-1)) + 1
    if keys > _MOST_KEYS:
        return None
    rows = int(present.sum())
    shape, most = (len(names), heads), len(names) * heads * min(batch * queries, BINS)
    count, moments = np.empty(shape, np.int64), np.empty((4, *shape))
    ends = np.empty(len(names) * heads + 1, np.int64)
    filled, numbers = _scratch.get(most)
    max_keys = np.empty((heads, 2 * farthest + 3), np.int64), np.empty(heads), np.empty(heads, np.int64)
    kernel.summarise(
        threads,
        team,
        np.ascontiguousarray(counts, np.int64),
        np.ascontiguousarray(measures, np.float64),
        None if rows == batch * queries else np.ascontiguousarray(present, np.bool_),
        None if positions is None else np.ascontiguousarray(positions, np.int64),
        keys,
        farthest,
        NEXT_EDGE,
        count_edges_below(),
        count,
        moments,
        ends,
        filled,
        numbers,
        *max_keys,
    )
    bins = Histogram(ends, filled[: ends[-1]].copy(), numbers[: ends[-1]].copy())
    mean, m2, least, largest = moments
    return Moments(count, rows - count, mean, m2, least, largest, bins), max_keys
