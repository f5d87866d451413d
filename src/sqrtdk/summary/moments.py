"""Moments and histograms of many groups of numbers, computed in one pass and mergeable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidValueError
from sqrtdk.show.table import Shown, Table, count
from sqrtdk.statistics import same_bits
from sqrtdk.wording.numbers import write_number

Array = npt.NDArray[Any]

# Bin edges for quantiles: symmetric, linear to 1e-3 around zero and logarithmic beyond, so that entropy ratios
# (0 to 1), logits (±100) and variances (to 1e9) share one histogram with 3% relative resolution.
_DECADES = np.geomspace(1e-3, 1e9, 12 * 80 + 1)
BIN_EDGES = np.concatenate([-_DECADES[::-1], _DECADES])
BINS = len(BIN_EDGES) + 1
NEXT_EDGE = np.append(BIN_EDGES, np.inf)
"""The edge above each bin."""

# From this many numbers per group on, counting into all bins is faster than sorting.
_FEW = 256


@cache
def count_edges_below() -> Array:
    """Return, by the upper half of a float32, how many edges lie below all float64 numbers that round to it.

    Such numbers lie within 0.8% of each other, or within 1e-38 of zero, so there is at most one edge among them.
    """
    bits = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    away = bits | np.uint32(0xFFFF)  # the farthest from zero
    with np.errstate(invalid="ignore"):
        least = np.where(bits >> 31, away.view(np.float32), bits.view(np.float32)).astype(np.float64)
    least = np.clip(np.where(np.isnan(least), np.where(bits >> 31, -1e300, 1e300), least), -1e300, 1e300)
    lowest = least - np.abs(least) * 2.0**-23 - 2.0**-149
    return np.searchsorted(BIN_EDGES, lowest, side="right").astype(np.int16)


def find_bins(values: Array) -> Array:
    """Return the bin of each value: `np.searchsorted(BIN_EDGES, values, side="right")`, many times as fast.

    >>> find_bins(np.array([-2.0, 0.0, 1e-3, 1.0])).tolist()
    [696, 961, 962, 1202]
    """
    with np.errstate(over="ignore"):
        rounded = np.ascontiguousarray(values, np.float32)
    bins = count_edges_below().take(rounded.view(np.uint32) >> np.uint32(16))
    bins += NEXT_EDGE.take(bins) <= values
    return np.asarray(bins)


class Histogram(NamedTuple):
    """Numbers per bin of many groups, without empty bins; group g has the entries from `ends[g]` to `ends[g + 1]`.

    `bins` ascend within a group; `numbers` are the counts of the bins.
    """

    ends: Array
    bins: Array
    numbers: Array

    @staticmethod
    def of(bins_GN: Array, counted_GN: Array | None) -> Histogram:
        """Return the histogram of bins `[G, N]`; with `counted` only of the entries where it is True."""
        groups, size = bins_GN.shape
        if counted_GN is not None:
            bins_GN = np.where(counted_GN, bins_GN, BINS)
        if size < _FEW:
            ordered = np.sort(bins_GN, axis=1)
            is_first = np.ones(ordered.shape, dtype=bool)
            np.not_equal(ordered[:, 1:], ordered[:, :-1], out=is_first[:, 1:])
            places = np.flatnonzero(is_first)
            bins, numbers = ordered.ravel()[places], np.diff(places, append=ordered.size)
            group = places // max(size, 1)
        else:
            flat = bins_GN + (np.arange(groups) * (BINS + 1))[:, None]
            whole = np.bincount(flat.ravel(), minlength=groups * (BINS + 1))
            places = np.flatnonzero(whole > 0)  # many times as fast on booleans
            group, bins = np.divmod(places, BINS + 1)
            numbers = whole[places]
        if counted_GN is not None:
            kept = bins < BINS
            group, bins, numbers = group[kept], bins[kept], numbers[kept]
        return Histogram(_count_up(group, groups), bins.astype(np.int16), numbers)

    @staticmethod
    def of_table(table: Array) -> Histogram:
        """Return the histogram with this `table()`."""
        flat = np.reshape(table, (-1, BINS))
        group, bins = np.nonzero(flat)
        return Histogram(_count_up(group, len(flat)), bins.astype(np.int16), flat[group, bins])

    @staticmethod
    def join(parts: Sequence[Histogram]) -> Histogram:
        """Return the groups of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(part.ends[-1] for part in parts)])
        ends = [part.ends[:-1] + start for part, start in zip(parts, before[:-1], strict=True)]
        bins, numbers = (np.concatenate([part[at] for part in parts]) for at in (1, 2))
        return Histogram(np.append(np.concatenate(ends), before[-1]), bins, numbers)

    def take(self, first: int, last: int) -> Histogram:
        """Return the groups from `first` up to, not including, `last`."""
        ends = self.ends[first : last + 1]
        return Histogram(ends - ends[0], self.bins[ends[0] : ends[-1]], self.numbers[ends[0] : ends[-1]])

    def merge(self, other: Histogram) -> Histogram:
        """Return the histogram of both sets of numbers."""
        if np.array_equal(self.ends, other.ends) and np.array_equal(self.bins, other.bins):
            return self._replace(numbers=self.numbers + other.numbers)
        own, others = self._places(), other._places()
        places = np.union1d(own, others)
        numbers = np.zeros(len(places), np.int64)
        numbers[np.searchsorted(places, own)] += self.numbers
        numbers[np.searchsorted(places, others)] += other.numbers
        group, bins = np.divmod(places, BINS)
        return Histogram(_count_up(group, len(self.ends) - 1), bins.astype(np.int16), numbers)

    def table(self) -> Array:
        """Return all bins `[G, 1923]`, including empty ones."""
        groups = len(self.ends) - 1
        whole = np.zeros(groups * BINS, np.int64)
        whole[self._places()] = self.numbers
        return whole.reshape(groups, BINS)

    def _places(self) -> Array:
        return np.repeat(np.arange(len(self.ends) - 1) * BINS, np.diff(self.ends)) + self.bins


def _count_up(group: Array, groups: int) -> Array:
    return np.searchsorted(group, np.arange(groups + 1))


class Uncounted(NamedTuple):
    """Groups that are counted into bins when first needed: counting is half of the work, and few groups need it.

    Each part is the numbers `[G, N]` of some groups, or their histogram.
    """

    parts: tuple[Array | Histogram, ...]

    def take(self, first: int, last: int) -> Uncounted:
        """Return the groups from `first` up to, not including, `last`."""
        taken: list[Array | Histogram] = []
        for part in self.parts:
            size = len(part.ends) - 1 if isinstance(part, Histogram) else len(part)
            begin, end = max(first, 0), min(last, size)
            if begin < end:
                taken.append(part.take(begin, end) if isinstance(part, Histogram) else part[begin:end])
            first, last = first - size, last - size
        return Uncounted(tuple(taken))

    def counted(self) -> Histogram:
        """Return the histogram of all groups."""
        return Histogram.join([part if isinstance(part, Histogram) else _count(part) for part in self.parts])


def _count(values_GN: Array) -> Histogram:
    finite = np.isfinite(values_GN)
    return Histogram.of(find_bins(values_GN), None if finite.all() else finite)


@dataclass(frozen=True, eq=False, repr=False)
class Moments(Shown):
    """Count, mean, sum of squared deviations, least, largest and histogram of one statistic, one entry per head `[H]`.

    Rows whose value is NaN or infinite are left out; `left_out` counts them. Without rows the mean is NaN, the least
    +inf and the largest −inf. A summary holds the moments of all its statistics in one record with entries `[15, H]`.
    """

    count: Array
    left_out: Array
    mean: Array
    m2: Array
    least: Array
    largest: Array
    bins: Histogram | Uncounted

    @staticmethod
    def of(values: Array, rows: Array | None = None) -> Moments:
        """Return the moments of values `[H, N]`, one line per head, or `[..., N]`.

        Args:
            values: the numbers; NaN and infinite ones are left out.
            rows: the number of rows, if not N, broadcast to `[...]`.
        """
        shape, size = values.shape[:-1], values.shape[-1]
        measured = _measure(np.reshape(values, (math.prod(shape), size)))
        count, mean, m2, least, largest = (array.reshape(shape) for array in measured[:-1])
        return Moments(count, (size if rows is None else rows) - count, mean, m2, least, largest, measured[-1])

    @property
    def filled_bins(self) -> Histogram:
        """The histogram without its empty bins; computed at the first access."""
        if isinstance(self.bins, Uncounted):
            object.__setattr__(self, "bins", self.bins.counted())
        assert isinstance(self.bins, Histogram)
        return self.bins

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bins": self.filled_bins}

    @staticmethod
    def join(parts: Sequence[Moments]) -> Moments:
        """Return the entries of all parts, one after another along the first axis."""
        if len(parts) == 1:
            return parts[0]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        bins = [part.bins.parts if isinstance(part.bins, Uncounted) else (part.bins,) for part in parts]
        return Moments(**arrays, bins=Uncounted(tuple(part for some in bins for part in some)))

    @property
    def histogram(self) -> Array:
        """Rows per bin `[H, 1923]`; the numbers of bin i are below `BIN_EDGES[i]`."""
        return self.filled_bins.table().reshape(*self.count.shape, BINS)

    def __getitem__(self, at: int) -> Moments:
        """Return one entry of the first axis."""
        inner = math.prod(self.count.shape[1:])
        arrays = {name: getattr(self, name)[at] for name in _ARRAYS}
        return Moments(**arrays, bins=self.bins.take(at * inner, (at + 1) * inner))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows (Chan, Golub, LeVeque 1979)."""
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
            bins=self.filled_bins.merge(other.filled_bins),
        )

    @property
    def variance(self) -> Array:
        """Population variance per head; NaN without rows."""
        return np.where(self.count > 0, self.m2 / np.maximum(self.count, 1), np.nan)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Moments):
            return NotImplemented
        return all(same_bits(getattr(self, name), getattr(other, name)) for name in _ARRAYS) and all(
            map(np.array_equal, self.filled_bins, other.filled_bins)
        )

    __hash__ = None  # type: ignore[assignment]

    def _table(self) -> Table:
        columns = [self.mean, np.sqrt(self.variance), self.least, self.largest]
        rows = [
            (
                str(head),
                str(seen),
                str(left_out),
                *(write_number(number[head] if seen else None, 3) for number in columns),
            )
            for head, (seen, left_out) in enumerate(zip(self.count, self.left_out, strict=True))
        ]
        names = ("head", "rows", "left out", "mean", "deviation", "least", "largest")
        return Table(f"Moments of {count(len(rows), 'head')}", names, rows)

    def quantile(self, probability: float) -> Array:
        """Return a quantile per head from the histogram, to 3% up to 1e9 (1e-3 near zero); NaN without rows."""
        if not 0.0 <= probability <= 1.0:
            raise InvalidValueError("probability", f"must lie in [0, 1], got {probability}")
        lower = np.insert(BIN_EDGES, 0, -np.inf)
        cumulative = self.histogram.cumsum(axis=-1)
        bins = (cumulative >= np.maximum(np.ceil(probability * self.count), 1)[..., None]).argmax(axis=-1)
        some = self.count > 0
        low = np.where(some, np.maximum(lower[bins], self.least), np.nan)
        high = np.where(some, np.minimum(NEXT_EDGE[bins], self.largest), np.nan)
        return np.asarray(low + 0.5 * (high - low))


_ARRAYS = tuple(item.name for item in fields(Moments))[:-1]


def _measure(values_GN: Array) -> tuple[Any, ...]:
    """Return count, mean, sum of squared deviations, least and largest of each group, and the histogram."""
    groups, size = values_GN.shape
    finite = np.isfinite(values_GN)
    counted = None if finite.all() else finite
    number = np.full(groups, size) if counted is None else counted.sum(axis=1)
    least, largest = (
        find.reduce(values_GN if counted is None else np.where(counted, values_GN, most), axis=1, initial=most)
        for find, most in ((np.minimum, np.inf), (np.maximum, -np.inf))
    )
    if size and counted is None and (least == largest).all():
        # The same number in every row, such as visible keys without a mask or sink weights without sinks.
        one_each = Histogram(np.arange(groups + 1), find_bins(least), number)
        return number, least, np.zeros(groups), least, largest, one_each
    kept = values_GN if counted is None else np.where(counted, values_GN, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.where(number > 0, kept.sum(axis=1) / np.maximum(number, 1), np.nan)
        apart = kept - mean[:, None]
        if counted is not None:
            np.copyto(apart, 0.0, where=~counted)
        square = np.einsum("gn,gn->g", apart, apart)
    return number, mean, square, least, largest, Uncounted((values_GN,))
