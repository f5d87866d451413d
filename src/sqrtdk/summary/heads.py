"""Summaries of rows per head: moments and quantiles of row statistics, and positions of the most attended keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name
from sqrtdk.show.table import Shown, Table, count, shade_sharpness
from sqrtdk.statistics import ROW_FIELDS, AttentionStatistics, same_bits
from sqrtdk.summary.in_kernel import summarise_rows
from sqrtdk.summary.moments import Moments
from sqrtdk.wording.numbers import write_number

Array = npt.NDArray[Any]

SUMMARISED = (
    "entropy",
    "entropy_ratio",
    "saturation_index",
    "max_weight",
    "effective_keys",
    "sum_p2",
    "jacobian_trace",
    "jacobian_norm",
    "max_logit",
    "logit_mean",
    "logit_variance",
    "score_max",
    "score_variance",
    "sink_weight",
    "visible_keys",
)
"""The row statistics that a `HeadSummary` holds."""

FARTHEST = 64
"""Offsets up to this far from a query's own position are counted one by one."""


@dataclass(frozen=True, eq=False, repr=False)
class MaxKeys(Shown):
    """Positions of the most attended keys of a head's rows, in bounded space; one entry per head `[H]`.

    `offsets` `[H, 131]` counts rows by max_key − position: less than −64, then −64, −63, …, 64, then more than 64. Rows
    of unknown position (`first_position` None, as in cross-attention) are in none of the bins.

    In each sequence (batch entry) the most attended key has a share of the rows: 1 if all rows attend to one key.
    `share_sum` is the sum of these shares over `sequences` sequences; a sequence of one row is not counted.
    Rows that see nothing, or whose logits are not finite, have no most attended key and are not counted anywhere.

    >>> from sqrtdk import attention
    >>> import numpy as np
    >>> k = np.eye(6)                                    # one head, six keys; query i asks for key i − 1
    >>> rows = attention(np.roll(k, 1, axis=0), k, k, causal=True, scale=9.0).statistics
    >>> HeadSummary.of(rows).max_keys
    Most attended keys of 1 head
    head  rows  commonest offset  its share  share on the most attended key  sequences
       0     6                -1      0.833                           0.333          1
    """

    offsets: Array
    share_sum: Array
    sequences: Array

    def merge(self, other: MaxKeys) -> MaxKeys:
        """Return the summary of both sets of sequences; counts are exact, shares to about 1e-12."""
        return MaxKeys(self.offsets + other.offsets, self.share_sum + other.share_sum, self.sequences + other.sequences)

    @property
    def rows(self) -> Array:
        """Number of rows `[H]` with a most attended key and a known position."""
        return np.asarray(self.offsets.sum(axis=1))

    def offset_share(self, offset: int) -> Array:
        """Return the share `[H]` of rows with max_key − position = offset (−1: the token before); NaN without rows.

        Raises:
            InvalidValueError: for an offset beyond ±64, which has no bin of its own.
        """
        offset = checks.integer("offset", offset, -FARTHEST, FARTHEST)
        rows = self.rows
        return np.where(rows > 0, self.offsets[:, offset + FARTHEST + 1] / np.maximum(rows, 1), np.nan)

    @property
    def commonest_share(self) -> Array:
        """Share `[H]` of rows on their sequence's most attended key, mean over sequences; NaN without sequences."""
        return np.where(self.sequences > 0, self.share_sum / np.maximum(self.sequences, 1), np.nan)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaxKeys):
            return NotImplemented
        return all(same_bits(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def _table(self) -> Table:
        names = [f"< {-FARTHEST}", *map(str, range(-FARTHEST, FARTHEST + 1)), f"> {FARTHEST}"]
        commonest = self.offsets.argmax(axis=1)
        lines = [
            (
                str(head),
                str(rows),
                names[commonest[head]] if rows else "–",
                write_number(self.offsets[head].max() / rows if rows else None, 3),
                write_number(self.commonest_share[head], 3),
                str(self.sequences[head]),
            )
            for head, rows in enumerate(self.rows)
        ]
        columns = ("head", "rows", "commonest offset", "its share", "share on the most attended key", "sequences")
        return Table(f"Most attended keys of {count(len(lines), 'head')}", columns, lines)


def _count_commonest(keys: Array) -> Array:
    """Return how often the most frequent number ≥ 0 occurs in each line of the last axis."""
    ordered = np.sort(keys, axis=-1)
    at = np.arange(keys.shape[-1])
    is_new = np.ones(keys.shape, dtype=bool)
    is_new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    run = at - np.maximum.accumulate(np.where(is_new, at, 0), axis=-1) + 1
    return np.asarray(np.where(ordered >= 0, run, 0).max(axis=-1, initial=0))


@dataclass(frozen=True, eq=False, repr=False)
class HeadSummary(Shown):
    """Summary of row statistics per head; summaries of batches or ranks merge into the summary of all rows.

    `summary["entropy"]` has the moments of a row statistic, `max_keys` the positions of the most attended keys.
    The summary holds `rows_seen` of `rows_in_all` rows per head `[H]`. For a sample the means estimate those of all
    rows, `largest` is a lower bound and `least` an upper bound; `is_sample` is True and the printed table writes "≥".

    >>> from sqrtdk import attention
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 16, 8))
    >>> whole = HeadSummary.of(attention(q, k, v).statistics)
    >>> halves = [HeadSummary.of(attention(q[i:i+1], k[i:i+1], v[i:i+1]).statistics) for i in range(2)]
    >>> merged = halves[0].merge(halves[1])
    >>> bool(np.allclose(merged["entropy"].mean, whole["entropy"].mean, rtol=1e-12))
    True
    >>> merged
    HeadSummary: 4 heads, 32 of 32 rows each
    head  entropy_ratio  saturation_index  effective_keys  largest logit
       0          0.831             0.416            8.06           4.99
       1          0.851             0.401            8.37           2.85
       2          0.852             0.378            9.06           3.97
       3          0.875             0.363            9.39           2.74
    """

    by_statistic: Moments
    rows_seen: Array
    rows_in_all: Array
    max_keys: MaxKeys

    @staticmethod
    def of(statistics: AttentionStatistics) -> HeadSummary:
        """Summarise row statistics `[..., H, L]` (or `[L]`, one head) over batch and rows; tensors go to the host."""
        if not isinstance(statistics, AttentionStatistics):
            raise InvalidTypeError("statistics", f"must be AttentionStatistics, got {type(statistics).__name__}")
        (summary,) = summarise([RowBlock.of(statistics)])
        return summary

    @property
    def moments(self) -> dict[str, Moments]:
        """Moments of every row statistic by its name."""
        return {name: self.by_statistic[at] for at, name in enumerate(SUMMARISED)}

    def merge(self, other: HeadSummary) -> HeadSummary:
        """Return the summary of both sets of rows; counts are exact, floats to about 1e-12."""
        if self.heads != other.heads:
            raise InvalidValueError("other", f"must have {self.heads} heads, got {other.heads}")
        return HeadSummary(
            by_statistic=self.by_statistic.merge(other.by_statistic),
            rows_seen=self.rows_seen + other.rows_seen,
            rows_in_all=self.rows_in_all + other.rows_in_all,
            max_keys=self.max_keys.merge(other.max_keys),
        )

    def forget_rows(self) -> None:
        """Fill the histograms now, so that the numbers of single rows can be freed."""
        _ = self.by_statistic.filled_bins

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.rows_seen)

    @property
    def is_sample(self) -> bool:
        """Whether rows are missing, so that each `largest` is a lower bound and each `least` an upper bound."""
        return bool((self.rows_seen < self.rows_in_all).any())

    def write_largest(self, name: str) -> list[str]:
        """Return the largest value of a statistic per head as text: "≥ 7.2" if rows are missing, "–" without rows."""
        missing = self.rows_seen < self.rows_in_all
        return [
            f"{'≥ ' if sampled else ''}{write_number(largest, 3)}" if count else "–"
            for largest, sampled, count in zip(self[name].largest, missing, self[name].count, strict=True)
        ]

    def __getitem__(self, name: str) -> Moments:
        if name not in SUMMARISED:
            raise unknown_name("row statistic", name, list(SUMMARISED))
        return self.by_statistic[SUMMARISED.index(name)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadSummary):
            return NotImplemented
        rows = ((self.rows_seen, other.rows_seen), (self.rows_in_all, other.rows_in_all))
        return (
            all(same_bits(one, two) for one, two in rows)
            and self.by_statistic == other.by_statistic
            and self.max_keys == other.max_keys
        )

    __hash__ = None  # type: ignore[assignment]

    def _table(self) -> Table:
        seen, in_all = int(self.rows_seen.max(initial=0)), int(self.rows_in_all.max(initial=0))
        rows = [
            (str(head), *(write_number(self[name].mean[head], 3) for name in _SHOWN), largest)
            for head, largest in enumerate(self.write_largest("max_logit"))
        ]
        title = f"HeadSummary: {count(self.heads, 'head')}, {seen} of {in_all} rows each"
        shades = [shade_sharpness(ratio) for ratio in self["entropy_ratio"].mean]
        return Table(title, ("head", *_SHOWN, "largest logit"), rows, shades={1: shades})


# The means in the printed table.
_SHOWN = ("entropy_ratio", "saturation_index", "effective_keys")
# Statistics with the same numbers if there is neither a soft cap nor an additive mask.
_TWINS = {"score_max": "max_logit", "score_variance": "logit_variance"}
# Number of rows that are summarised together: their numbers fit into the cache.
_AT_ONCE = 1 << 13


class RowBlock(NamedTuple):
    """Rows of several sequences with the same number of queries, and which rows count.

    `counts` and `measures` `[·, B, H, L]` are those of `AttentionStatistics.from_blocks`. `positions` `[B, L]` are the
    positions of the queries among the keys, None if unknown. `present` `[B, L]` is False for padding. `rows_in_all`
    counts rows per head, including rows outside a sample.
    """

    counts: Array
    measures: Array
    positions: Array | None
    present: Array
    rows_in_all: int

    @staticmethod
    def of(statistics: AttentionStatistics, present: Array | None = None) -> RowBlock:
        """Return the rows of a call `[..., H, L]` (or `[L]`, one head); `present` `[B, L]` is False for padding."""
        statistics = statistics.numpy()
        blocks = statistics.__dict__.get("_blocks")
        if blocks is None:
            arrays = [np.asarray(getattr(statistics, name)) for name in ROW_FIELDS]
            blocks = np.stack(arrays[:2]), np.stack(arrays[2:])
        shape = statistics.shape
        batch, (heads, queries) = math.prod(shape[:-2]), (1, *shape)[-2:]
        counts, measures = (block.reshape(len(block), batch, heads, queries) for block in blocks)
        positions = statistics.positions
        if positions is not None:
            positions = np.broadcast_to(positions, (batch, queries))
        present = np.broadcast_to(np.True_, (batch, queries)) if present is None else present
        in_all = present.sum(axis=1)
        if statistics.sample is not None and queries:
            # Rows outside the sample are taken to have the same share of padding.
            expected = np.round(statistics.sample.rows * in_all / queries).astype(np.int64)
            in_all = np.where(in_all > 0, np.maximum(in_all, expected), 0)
        return RowBlock(counts, measures, positions, present, int(in_all.sum()))

    @property
    def rows(self) -> int:
        """Rows of all heads."""
        return math.prod(self.counts.shape[1:])


def join_blocks(blocks: Sequence[RowBlock]) -> list[RowBlock]:
    """Return the sequences of all blocks, in one block for each number of heads and queries."""
    alike: dict[Any, list[RowBlock]] = {}
    for block in blocks:
        alike.setdefault((block.counts.shape[2:], block.positions is None), []).append(block)
    return [some[0] if len(some) == 1 else _join(some) for some in alike.values()]


def _join(blocks: list[RowBlock]) -> RowBlock:
    counts, measures = (np.concatenate([block[at] for block in blocks], axis=1) for at in (0, 1))
    positions = [block.positions for block in blocks if block.positions is not None]
    present = np.concatenate([block.present for block in blocks])
    in_all = sum(block.rows_in_all for block in blocks)
    return RowBlock(counts, measures, np.concatenate(positions) if positions else None, present, in_all)


def summarise(blocks: Sequence[RowBlock], threads: int = 1, team: int = 0) -> list[HeadSummary]:
    """Return a summary of each block: by the kernel, or in NumPy, where blocks of the same shape go together."""
    summaries: dict[int, HeadSummary] = {}
    for at, block in enumerate(blocks):
        compiled = summarise_rows(SUMMARISED, FARTHEST, *block[:4], threads, team)
        if compiled is not None:
            summaries[at] = _complete(block, compiled[0], MaxKeys(*compiled[1]))
    alike: dict[Any, list[int]] = {}
    for at, block in enumerate(blocks):
        if at not in summaries:
            alike.setdefault((block.counts.shape, block.positions is None), []).append(at)
    for places in alike.values():
        step = max(_AT_ONCE // max(blocks[places[0]].rows, 1), 1)
        for first in range(0, len(places), step):
            some = places[first : first + step]
            summaries.update(zip(some, _summarise_alike([blocks[at] for at in some]), strict=True))
    return [summaries[at] for at in range(len(blocks))]


class _Rows(AttentionStatistics):
    """Row statistics that cache the numbers that several others are computed from."""

    @cached_property
    def _keys(self) -> Array:
        return super()._keys

    @cached_property
    def _uniform_weight(self) -> Array:
        return super()._uniform_weight

    @cached_property
    def max_weight(self) -> Array:
        """The largest weight."""
        return super().max_weight

    @cached_property
    def sum_p2(self) -> Array:
        """Σp²."""
        return super().sum_p2


def _summarise_alike(blocks: list[RowBlock]) -> Iterator[HeadSummary]:
    """Yield the summaries of n blocks `[B, H, L]`."""
    counts = _stack([block.counts for block in blocks], 1)  # [2, n, B, H, L]
    rows = _Rows.from_blocks(counts, _stack([block.measures for block in blocks], 1))
    present = _stack([block.present for block in blocks], 0)  # [n, B, L]
    if rows.visible_keys.size <= _AT_ONCE:
        whole = _measure(rows, present, SUMMARISED)
        moments = [whole[at] for at in range(len(blocks))]
    else:  # one block, one statistic after another, so that its numbers fit into the cache
        parts: dict[str, Moments] = {}
        for name in SUMMARISED:
            twin = _TWINS.get(name)
            is_same = twin is not None and np.array_equal(getattr(rows, name), getattr(rows, twin))
            parts[name] = parts[twin] if twin is not None and is_same else _measure(rows, present, (name,))[0]
        moments = [Moments.join(list(parts.values()))]
    positions = [block.positions for block in blocks if block.positions is not None]
    keys = _find_max_keys(rows, present, _stack(positions, 0) if positions else None)
    for at, (block, own) in enumerate(zip(blocks, moments, strict=True)):
        yield _complete(block, own, MaxKeys(*(array[at] for array in keys)))


def _complete(block: RowBlock, moments: Moments, keys: MaxKeys) -> HeadSummary:
    heads = block.counts.shape[2]
    rows_seen, rows_in_all = (np.full(heads, number) for number in (block.present.sum(), block.rows_in_all))
    return HeadSummary(moments, rows_seen, rows_in_all, keys)


def _measure(rows: AttentionStatistics, present: Array, names: Sequence[str]) -> Moments:
    """Return the moments `[n, S, H]` of some statistics of rows `[n, B, H, L]`."""
    number, batch, heads, queries = rows.shape
    values: Array = np.empty((number, len(names), heads, batch, queries))
    hidden = np.swapaxes(rows.visible_keys == 0, 1, 2)
    has_hidden, has_padding = bool(hidden.any()), not present.all()
    for at, name in enumerate(names):
        values[:, at] = np.swapaxes(getattr(rows, name), 1, 2)
        if has_hidden and name != "visible_keys":
            np.copyto(values[:, at], np.nan, where=hidden)
        if has_padding:
            np.copyto(values[:, at], np.nan, where=~present[:, None])
    values = values.reshape(number, len(names), heads, batch * queries)
    return Moments.of(values, present.sum(axis=(1, 2))[:, None, None])


def _stack(arrays: list[Array], axis: int) -> Array:
    """Return `np.stack` of the arrays; a single array is not copied."""
    return np.expand_dims(arrays[0], axis) if len(arrays) == 1 else np.stack(arrays, axis)


def _find_max_keys(rows: AttentionStatistics, present: Array, positions: Array | None) -> tuple[Array, Array, Array]:
    """Return the fields of `MaxKeys` of n blocks: offsets `[n, H, 131]`, sums of shares and sequences `[n, H]`."""
    number, _, heads, _ = rows.shape
    key = np.swapaxes(rows.max_key, 1, 2)  # [n, H, B, L]
    counted = np.swapaxes((rows.max_key >= 0) & np.isfinite(rows.entropy), 1, 2) & present[:, None]
    bins = 2 * FARTHEST + 3
    offsets = np.zeros((number, heads, bins), np.int64)
    if positions is not None:
        apart = np.clip(key - positions[:, None], -FARTHEST - 1, FARTHEST + 1) + FARTHEST + 1
        by_head = np.arange(number * heads).reshape(number, heads, 1, 1) * bins + apart
        offsets = np.bincount(by_head[counted], minlength=offsets.size).reshape(offsets.shape)
    times = counted.sum(axis=-1)
    several = times > 1
    share = np.where(several, _count_commonest(np.where(counted, key, -1)) / np.maximum(times, 1), 0.0)
    return offsets, share.sum(axis=2), several.sum(axis=2)
