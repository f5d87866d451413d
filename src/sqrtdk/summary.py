"""Rows added up per head: moments and quantiles of their statistics, and where their most attended keys are."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk.display import Shown, Table, count, shade_sharpness
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name
from sqrtdk.statistics import AttentionStatistics, same_bits

__all__ = ["BIN_EDGES", "FARTHEST", "SUMMARISED", "HeadSummary", "MaxKeys", "Moments"]

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
"""The row statistics a `HeadSummary` follows."""

# Bin edges for quantiles: symmetric, linear to 1e-3 around zero and logarithmic beyond, so that entropy ratios
# (0 to 1), logits (±100) and variances (to 1e9) share one histogram with 3% relative resolution.
_PER_DECADE = 80
_DECADES = np.geomspace(1e-3, 1e9, 12 * _PER_DECADE + 1)
BIN_EDGES = np.concatenate([-_DECADES[::-1], _DECADES])
_LAST = len(_DECADES) - 1


def find_bins(values: Array) -> Array:
    """How many edges are at most each value: `np.searchsorted(BIN_EDGES, values, side="right")`, four times as fast.

    Found by a logarithm, which may miss by one bin, and a comparison with the edges there.

    >>> find_bins(np.array([-2.0, 0.0, 1e-3, 1.0])).tolist()
    [696, 961, 962, 1202]
    """
    size = np.abs(values)
    # int32 and rounding to zero are the fast ones; the least size is at the first edge, so nothing is negative.
    guess: Array = ((np.log10(np.clip(size, 1e-3, 1e9)) + 3.0) * _PER_DECADE).astype(np.int32)
    np.minimum(guess, _LAST, out=guess)
    beyond = _DECADES.take(np.minimum(guess + 1, _LAST))
    below = guess - (_DECADES.take(guess) > size) + ((beyond <= size) & (guess < _LAST)) + 1  # edges that are not above
    is_negative = values < 0
    if not is_negative.any():
        return np.asarray(below + len(_DECADES))
    on_edge = (below > 0) & (_DECADES.take(np.maximum(below - 1, 0)) == size)
    return np.asarray(np.where(is_negative, len(_DECADES) - below + on_edge, below + len(_DECADES)))


@dataclass(frozen=True, eq=False, repr=False)
class Moments(Shown):
    """Count, mean, sum of squared deviations, least, largest and histogram of one statistic, one entry per head `[H]`.

    Rows whose value is NaN or infinite are not in it; `left_out` counts them. Without rows the mean is NaN, the least
    +inf and the largest −inf.
    """

    count: Array
    left_out: Array
    mean: Array
    m2: Array
    least: Array
    largest: Array
    histogram: Array

    @staticmethod
    def of(values_HN: Array) -> Moments:
        """Summarise values `[H, N]`, one row per head."""
        finite = np.isfinite(values_HN)
        count = finite.sum(axis=1)
        some = np.maximum(count, 1)
        kept = np.where(finite, values_HN, 0.0).astype(np.float64)
        mean = np.where(count > 0, kept.sum(axis=1) / some, np.nan)
        deviation = np.where(finite, kept - mean[:, None], 0.0)
        bins = find_bins(kept)
        histogram = (
            np.stack(
                [np.bincount(row[use], minlength=len(BIN_EDGES) + 1) for row, use in zip(bins, finite, strict=True)]
            )
            if len(values_HN)
            else np.zeros((0, len(BIN_EDGES) + 1), dtype=np.int64)
        )
        return Moments(
            count=count,
            left_out=values_HN.shape[1] - count,
            mean=mean,
            m2=(deviation * deviation).sum(axis=1),
            least=np.where(finite, values_HN, np.inf).min(axis=1, initial=np.inf),
            largest=np.where(finite, values_HN, -np.inf).max(axis=1, initial=-np.inf),
            histogram=histogram,
        )

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of rows together (Chan, Golub, LeVeque 1979)."""
        count = self.count + other.count
        some = np.maximum(count, 1)
        own_mean = np.where(self.count > 0, self.mean, 0.0)
        other_mean = np.where(other.count > 0, other.mean, 0.0)
        apart = other_mean - own_mean
        return Moments(
            count=count,
            left_out=self.left_out + other.left_out,
            mean=np.where(count > 0, (self.count * own_mean + other.count * other_mean) / some, np.nan),
            m2=self.m2 + other.m2 + apart * apart * (self.count * (other.count / some)),
            least=np.minimum(self.least, other.least),
            largest=np.maximum(self.largest, other.largest),
            histogram=self.histogram + other.histogram,
        )

    @property
    def variance(self) -> Array:
        """Population variance per head; NaN without rows."""
        return np.where(self.count > 0, self.m2 / np.maximum(self.count, 1), np.nan)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Moments):
            return NotImplemented
        return all(same_bits(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def _table(self) -> Table:
        columns = [self.mean, np.sqrt(self.variance), self.least, self.largest]
        rows = [
            (str(head), str(seen), str(left_out), *(f"{number[head]:.3g}" if seen else "-" for number in columns))
            for head, (seen, left_out) in enumerate(zip(self.count, self.left_out, strict=True))
        ]
        names = ("head", "rows", "left out", "mean", "deviation", "least", "largest")
        return Table(f"Moments of {count(len(rows), 'head')}", names, rows)

    def quantile(self, probability: float) -> Array:
        """A quantile per head from the histogram, to 3% of a value up to 1e9 (1e-3 near zero); NaN without rows."""
        if not 0.0 <= probability <= 1.0:
            raise InvalidValueError(f"probability must lie in [0, 1], got {probability}")
        upper = np.append(BIN_EDGES, np.inf)
        lower = np.insert(BIN_EDGES, 0, -np.inf)
        cumulative = self.histogram.cumsum(axis=1)
        bins = (cumulative >= np.maximum(np.ceil(probability * self.count), 1)[:, None]).argmax(axis=1)
        some = self.count > 0
        low = np.where(some, np.maximum(lower[bins], self.least), np.nan)
        high = np.where(some, np.minimum(upper[bins], self.largest), np.nan)
        return np.asarray(low + 0.5 * (high - low))


FARTHEST = 64
"""Offsets up to this far from a query's own position are counted one by one."""


@dataclass(frozen=True, eq=False, repr=False)
class MaxKeys(Shown):
    """Where the most attended keys of a head's rows are, in bounded space; one entry per head `[H]`.

    `offsets` `[H, 131]` counts rows by max_key − position: less than −64, then −64, −63, …, 64, then more than 64. Rows
    whose positions are not known (`first_position` None, as in cross-attention) are in none of the bins.

    In one sequence (batch entry) the commonest `max_key` holds some share of the rows: 1 if all rows look at one key.
    `share_sum` adds these shares up over `sequences` sequences; one with a single row says nothing and is not counted.
    Rows that see nothing, or whose logits are not finite, have no most attended key and are not counted anywhere.

    >>> from sqrtdk import attention
    >>> import numpy as np
    >>> k = np.eye(6)                                    # one head, six keys; query i asks for key i − 1
    >>> rows = attention(np.roll(k, 1, axis=0), k, k, causal=True, scale=9.0).statistics
    >>> HeadSummary.of(rows).max_keys
    Most attended keys of 1 head
    head  rows  commonest offset  its share  commonest key's share  sequences
       0     6                -1      0.833                  0.333          1
    """

    offsets: Array
    share_sum: Array
    sequences: Array

    @staticmethod
    def of(statistics: AttentionStatistics) -> MaxKeys:
        """Look at row statistics `[..., H, L]` (or `[L]`, one head) of NumPy arrays."""
        key = _by_head(statistics.max_key)
        counted = _by_head((statistics.max_key >= 0) & np.isfinite(statistics.entropy))
        heads = len(key)
        bins = 2 * FARTHEST + 3
        offsets = np.zeros((heads, bins), np.int64)
        if statistics.positions is not None:
            apart = np.clip(key - statistics.positions, -FARTHEST - 1, FARTHEST + 1) + FARTHEST + 1
            by_head = np.arange(heads)[:, None, None] * bins + apart
            offsets = np.bincount(by_head[counted], minlength=heads * bins).reshape(heads, bins)
        rows = counted.sum(axis=-1)
        several = rows > 1
        share = np.where(several, _count_commonest(np.where(counted, key, -1)) / np.maximum(rows, 1), 0.0)
        return MaxKeys(offsets, share.sum(axis=1), several.sum(axis=1))

    def merge(self, other: MaxKeys) -> MaxKeys:
        """Both sets of sequences together: counts exactly, shares to about 1e-12."""
        return MaxKeys(self.offsets + other.offsets, self.share_sum + other.share_sum, self.sequences + other.sequences)

    @property
    def rows(self) -> Array:
        """How many rows `[H]` have a most attended key and a known position."""
        return np.asarray(self.offsets.sum(axis=1))

    def offset_share(self, offset: int) -> Array:
        """The share `[H]` of rows with max_key − position = offset (−1: the token before); NaN without rows.

        Raises:
            InvalidValueError: for an offset that is not counted apart.
        """
        if isinstance(offset, bool) or not isinstance(offset, int | np.integer) or abs(offset) > FARTHEST:
            raise InvalidValueError(f"offset must be an integer from {-FARTHEST} to {FARTHEST}, got {offset!r}")
        rows = self.rows
        return np.where(rows > 0, self.offsets[:, offset + FARTHEST + 1] / np.maximum(rows, 1), np.nan)

    @property
    def commonest_share(self) -> Array:
        """The share `[H]` of a sequence's rows that its commonest `max_key` holds, mean over sequences; NaN without."""
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
                names[commonest[head]] if rows else "-",
                f"{self.offsets[head].max() / rows:.3g}" if rows else "-",
                f"{self.commonest_share[head]:.3g}" if self.sequences[head] else "-",
                str(self.sequences[head]),
            )
            for head, rows in enumerate(self.rows)
        ]
        columns = ("head", "rows", "commonest offset", "its share", "commonest key's share", "sequences")
        return Table(f"Most attended keys of {count(len(lines), 'head')}", columns, lines)


def _count_commonest(keys: Array) -> Array:
    """How often the commonest number ≥ 0 stands in each line of the last axis."""
    ordered = np.sort(keys, axis=-1)
    at = np.arange(keys.shape[-1])
    is_new = np.ones(keys.shape, dtype=bool)
    is_new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    run = at - np.maximum.accumulate(np.where(is_new, at, 0), axis=-1) + 1
    return np.asarray(np.where(ordered >= 0, run, 0).max(axis=-1, initial=0))


@dataclass(frozen=True, eq=False, repr=False)
class HeadSummary(Shown):
    """Row statistics added up per head; summaries of batches or ranks merge into the summary of the whole.

    `summary["entropy"]` has the moments of a row statistic, `max_keys` where the most attended keys are.
    `rows_seen` of `rows_in_all` rows per head `[H]` are in it. Of a sample the means estimate those of all rows, but
    `largest` is only a lower bound and `least` an upper one: `is_sample` says so, and the printed table writes "≥".

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

    moments: dict[str, Moments]
    rows_seen: Array
    rows_in_all: Array
    max_keys: MaxKeys

    @staticmethod
    def of(statistics: AttentionStatistics) -> HeadSummary:
        """Summarise row statistics `[..., H, L]` (or `[L]`, one head) over batch and rows; tensors go to the host."""
        if not isinstance(statistics, AttentionStatistics):
            raise InvalidTypeError(f"statistics must be AttentionStatistics, got {type(statistics).__name__}")
        statistics = statistics.numpy()
        heads = statistics.shape[-2] if len(statistics.shape) > 1 else 1
        queries = statistics.shape[-1]
        batch = math.prod(statistics.shape[:-2])
        in_all = queries if statistics.sample is None else statistics.sample.rows
        nothing = statistics.visible_keys == 0
        moments = {}
        for name in SUMMARISED:
            values = np.asarray(getattr(statistics, name))
            if name != "visible_keys":
                values = np.where(nothing, np.nan, values)
            moments[name] = Moments.of(_by_head(values).reshape(heads, batch * queries))
        return HeadSummary(
            moments, np.full(heads, batch * queries), np.full(heads, batch * in_all), MaxKeys.of(statistics)
        )

    def merge(self, other: HeadSummary) -> HeadSummary:
        """The summary of both sets of rows together; counts exactly, floats to about 1e-12."""
        if self.heads != other.heads:
            raise InvalidValueError(f"other must have {self.heads} heads, got {other.heads}")
        return HeadSummary(
            moments={name: own.merge(other.moments[name]) for name, own in self.moments.items()},
            rows_seen=self.rows_seen + other.rows_seen,
            rows_in_all=self.rows_in_all + other.rows_in_all,
            max_keys=self.max_keys.merge(other.max_keys),
        )

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.rows_seen)

    @property
    def is_sample(self) -> bool:
        """Whether rows are missing, so that each `largest` is a lower bound and each `least` an upper one."""
        return bool((self.rows_seen < self.rows_in_all).any())

    def write_largest(self, name: str) -> list[str]:
        """The largest value of a statistic per head as text, "≥ 7.2" where rows are missing, "-" without rows."""
        missing = self.rows_seen < self.rows_in_all
        return [
            f"{'≥ ' if sampled else ''}{largest:.3g}" if count else "-"
            for largest, sampled, count in zip(self[name].largest, missing, self[name].count, strict=True)
        ]

    def __getitem__(self, name: str) -> Moments:
        if name not in self.moments:
            raise unknown_name("row statistic", name, list(self.moments))
        return self.moments[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadSummary):
            return NotImplemented
        rows = ((self.rows_seen, other.rows_seen), (self.rows_in_all, other.rows_in_all))
        return (
            all(same_bits(one, two) for one, two in rows)
            and self.moments == other.moments
            and self.max_keys == other.max_keys
        )

    __hash__ = None  # type: ignore[assignment]

    def _table(self) -> Table:
        seen, in_all = int(self.rows_seen.max(initial=0)), int(self.rows_in_all.max(initial=0))
        rows = [
            (str(head), *(f"{self[name].mean[head]:.3g}" for name in _SHOWN), largest)
            for head, largest in enumerate(self.write_largest("max_logit"))
        ]
        title = f"HeadSummary: {count(self.heads, 'head')}, {seen} of {in_all} rows each"
        shades = [shade_sharpness(ratio) for ratio in self["entropy_ratio"].mean]
        return Table(title, ("head", *_SHOWN, "largest logit"), rows, shades={1: shades})


def _by_head(values: Array) -> Array:
    """`[..., H, L]` or `[L]` as `[H, N, L]`, N batch entries."""
    heads, queries = (values.shape[-2] if values.ndim > 1 else 1), values.shape[-1]
    batch = math.prod(values.shape[:-2])
    return np.moveaxis(values.reshape(batch, heads, queries), 1, 0)


# What the printed table shows the mean of.
_SHOWN = ("entropy_ratio", "saturation_index", "effective_keys")
