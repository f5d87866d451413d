"""What each number about a row of attention means, and how rows add up to a summary per head."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from sqrtdk.display import Shown, Table, count
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name
from sqrtdk.theory import namespace_of, saturation_index

Array = npt.NDArray[Any]


class Sample(NamedTuple):
    """Which rows were looked at: query positions `[n]`, int64 and ascending, out of `rows` per head."""

    positions: Array
    rows: int


def _array(value: Any) -> Array:
    # Tensors pass under the type of arrays: what is done with them here, both can.
    return cast(Array, value)


def _on_host(tensor: Any, dtype: npt.DTypeLike) -> Array:
    return np.asarray(tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu().numpy(), dtype=dtype)


def _are_same(one: Any, two: Any) -> bool:
    """Whether two arrays, or two tensors on one device, are the same to the bit; any NaN is the same as any other."""
    xp = namespace_of(one)
    if xp is not namespace_of(two) or one.dtype != two.dtype or one.shape != two.shape:
        return False
    if xp is not np and one.device != two.device:
        return False
    same = (one == two) & (xp.signbit(one) == xp.signbit(two))
    return bool((same | (xp.isnan(one) & xp.isnan(two))).all())


def _axes(axis: int | tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """The axes that are meant, in NumPy's way of saying it."""
    if axis is None:
        return tuple(range(rank))
    axes = axis if isinstance(axis, tuple) else (axis,)
    for at in axes:
        if isinstance(at, bool) or not hasattr(at, "__index__"):
            raise InvalidTypeError(f"axis must be an integer, a tuple of integers or None, got {axis!r}")
    places = tuple(at + rank if at < 0 else at for at in axes)
    if any(not 0 <= at < rank for at in places) or len(set(places)) < len(places):
        raise InvalidValueError(f"axis must name different axes from {-rank} to {rank - 1}, got {axis!r}")
    return places


@dataclass(frozen=True, eq=False, repr=False)
class AttentionStatistics(Shown):
    """Per-row statistics of attention, arrays `[..., H, L]`, float64 (counts and indices int64).

    The fields are NumPy arrays or torch tensors; the derived numbers are of the same kind, on the same device.

    A row is one query of one head; its p are the softmax weights over its visible keys alone (sinks left out, their
    share is `sink_weight`). A row that sees nothing has entropy and weights 0, `max_key` −1, maxima and logsumexp −inf,
    mean and variances NaN; summaries count such rows and leave them out of all but `visible_keys`.

    The largest weight is kept apart: `tail_weight`, `tail_p2`, `tail_p3` are Σp, Σp², Σp³ over all keys but the
    largest. So 1 − Σp² and the Jacobian's norm keep their relative accuracy when the row is one-hot but for 1e-20,
    where 1 − Σp² taken from a rounded Σp² would be 0.

    `sample` tells which query positions the rows are, if only some were looked at; None if the rows are all there are.

    Two are equal if they are of one kind (arrays, or tensors on one device) and all fields are the same to the bit, NaN
    equal to NaN; like arrays they have no hash.

    >>> from sqrtdk import attention
    >>> import numpy as np
    >>> rows = attention(np.ones((1, 4)), np.zeros((8, 4)), np.zeros((8, 2))).statistics
    >>> float(rows.effective_keys[0]), float(rows.entropy_ratio[0])
    (8.0, 1.0)
    """

    visible_keys: Array
    max_key: Array
    max_logit: Array
    logsumexp: Array
    entropy: Array
    tail_weight: Array
    tail_p2: Array
    tail_p3: Array
    logit_mean: Array
    logit_variance: Array
    score_max: Array
    score_variance: Array
    sink_weight: Array
    sample: Sample | None = None

    @classmethod
    def from_blocks(cls, counts: Array, numbers: Array, *, sample: Sample | None = None) -> AttentionStatistics:
        """The fields in the order above as views of two blocks, int64 `[2, ...]` and float64 `[11, ...]`.

        A view is made when it is first asked for: thirteen of them would cost as much as a small call of the kernel.
        """
        rows = cls.__new__(cls)
        rows.__dict__["_blocks"] = (counts, numbers)
        rows.__dict__["sample"] = sample
        return rows

    def __getattr__(self, name: str) -> Array:
        blocks = self.__dict__.get("_blocks")
        if blocks is None or name not in ROW_FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        at = ROW_FIELDS.index(name)
        value: Array = blocks[0][at] if at < 2 else blocks[1][at - 2]
        self.__dict__[name] = value
        return value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionStatistics):
            return NotImplemented
        if self is other:
            return True
        if (self.sample is None) != (other.sample is None):
            return False
        if self.sample is not None and other.sample is not None:
            one, two = self.sample, other.sample
            if one.rows != two.rows or not _are_same(one.positions, two.positions):
                return False
        return all(_are_same(getattr(self, name), getattr(other, name)) for name in ROW_FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def mean(self, name: str, axis: int | tuple[int, ...] | None = None) -> Array:
        """The mean of a row statistic over the rows that have one, e.g. `statistics.mean("entropy_ratio")`.

        Left out are rows whose value is NaN or infinite (with a causal mask the first row sees one key and has no
        entropy ratio) and, but for `visible_keys`, rows that see nothing: as in a `HeadSummary`.

        Args:
            name: a field, or a number derived from the fields.
            axis: as NumPy's: None for one number over all rows, −1 for one per head `[..., H]`, a tuple for several.

        Returns:
            A float64 number or array; for tensors a tensor on their device. NaN where no row counts.

        Raises:
            InvalidValueError: for a name that is no row statistic, or an axis that is not there.

        >>> from sqrtdk import attention
        >>> import numpy as np
        >>> rows = attention(np.zeros((4, 8)), np.zeros((4, 8)), np.zeros((4, 8)), causal=True).statistics
        >>> float(rows.entropy_ratio.mean()), float(rows.mean("entropy_ratio"))
        (nan, 1.0)
        """
        if name not in ROW_STATISTICS:
            raise unknown_name("row statistic", name, list(ROW_STATISTICS))
        over = _axes(axis, len(self.shape))
        xp = self._namespace
        values, counted = self._counted(name)
        count, total = xp.asarray(counted, dtype=xp.int64), xp.where(counted, values, 0.0)
        if over:  # torch would take no axis for all
            count, total = count.sum(axis=over), total.sum(axis=over)
        # Indexed by nothing: NumPy's number instead of an array without axes; a tensor stays what it is.
        return _array(xp.where(count > 0, total / xp.clip(count, 1, None), xp.nan)[()])

    def _counted(self, name: str) -> tuple[Array, Array]:
        """The values of a row statistic in the precision of the floats, and which rows have one."""
        xp = self._namespace
        values = xp.asarray(getattr(self, name), dtype=self.entropy.dtype)
        counted = xp.isfinite(values)
        return values, counted if name == "visible_keys" else counted & (self.visible_keys > 0)

    def _table(self) -> Table:
        title = f"AttentionStatistics of rows {list(self.shape)}"
        device = getattr(self.visible_keys, "device", "cpu")
        if self._namespace is not np:
            title += f", tensors on {device}"
        if self.sample is not None:
            title += f", a sample of {self.shape[-1]} of {self.sample.rows} query positions"
        try:
            rows = [self._describe(name) for name in _OVERVIEW]
        except RuntimeError:  # a tensor without numbers: on the device meta, or inside a transform
            return Table(title + ", without numbers", ("",), [])
        return Table(title, ("", "mean", "least", "largest", "rows counted"), rows, left=1)

    def _describe(self, name: str) -> tuple[str, ...]:
        """A line of the overview; of a sample the extremes are bounds."""
        xp = self._namespace
        values, counted = self._counted(name)
        rows = int(counted.sum())
        if not rows:
            return name, "-", "-", "-", "0"
        below, above = ("", "") if self.sample is None or self.shape[-1] >= self.sample.rows else ("≤ ", "≥ ")
        least, largest = xp.where(counted, values, xp.inf).min(), xp.where(counted, values, -xp.inf).max()
        mean = float(self.mean(name))
        return name, f"{mean:.3g}", f"{below}{float(least):.3g}", f"{above}{float(largest):.3g}", str(rows)

    def numpy(self) -> AttentionStatistics:
        """The same rows as NumPy arrays on the host, without gradients; rows that are NumPy arrays come back as is."""
        if namespace_of(self.visible_keys) is np:
            return self
        sample = None if self.sample is None else Sample(_on_host(self.sample.positions, np.int64), self.sample.rows)
        blocks = self.__dict__.get("_blocks")
        if blocks is None:
            arrays = [_on_host(getattr(self, name), np.float64) for name in ROW_FIELDS]
            blocks = np.stack(arrays[:2]).astype(np.int64), np.stack(arrays[2:])
        return AttentionStatistics.from_blocks(
            _on_host(blocks[0], np.int64), _on_host(blocks[1], np.float64), sample=sample
        )

    @property
    def max_weight(self) -> Array:
        """The largest weight, from 1/n to 1; 0 where nothing is visible."""
        xp = self._namespace
        return _array(xp.where(self.visible_keys > 0, xp.maximum(1.0 - self.tail_weight, self._uniform_weight), 0.0))

    @property
    def _namespace(self) -> Any:
        return namespace_of(self.visible_keys)

    @property
    def _keys(self) -> Array:
        # The count in the precision of the numbers: torch would take the logarithm of an int64 in float32.
        return _array(self._namespace.asarray(self.visible_keys, dtype=self.entropy.dtype))

    @property
    def _uniform_weight(self) -> Array:
        # 1/n, the bound that rounding could pass by an ulp on uniform rows.
        return _array(1.0 / self._namespace.clip(self._keys, 1.0, None))

    @property
    def sum_p2(self) -> Array:
        """Σp², from 1/n (uniform) to 1 (one-hot); 0 where nothing is visible."""
        xp = self._namespace
        square = xp.maximum(self.max_weight**2 + self.tail_p2, self._uniform_weight)
        return _array(xp.where(self.visible_keys > 0, square, 0.0))

    @property
    def sum_p3(self) -> Array:
        """Σp³."""
        return self.max_weight**3 + self.tail_p3

    @property
    def effective_keys(self) -> Array:
        """1/Σp²: how many equal weights would be as concentrated; 0 where nothing is visible."""
        xp = self._namespace
        visible = self.visible_keys > 0
        return _array(xp.where(visible, xp.minimum(1.0 / xp.where(visible, self.sum_p2, 1.0), self._keys), 0.0))

    @property
    def entropy_ratio(self) -> Array:
        """H/ln n: 1 uniform, 0 one-hot; NaN with fewer than two visible keys."""
        xp = self._namespace
        several = self.visible_keys > 1
        return _array(xp.where(several, self.entropy / xp.log(xp.where(several, self._keys, 2.0)), xp.nan))

    @property
    def saturation_index(self) -> Array:
        """ρ = σ/√(2 ln n) with σ the standard deviation of the row's logits; NaN with fewer than two visible keys."""
        return saturation_index(self._namespace.sqrt(self.logit_variance), self.visible_keys)

    @property
    def jacobian_trace(self) -> Array:
        """1 − Σp², the trace of the softmax Jacobian: 0 for one-hot rows; 0 where nothing is visible."""
        xp = self._namespace
        # 1 − (1−t)² = t(2−t): no cancellation for a small tail t.
        trace = self.tail_weight * (2.0 - self.tail_weight) - self.tail_p2
        return _array(xp.where(self.visible_keys > 0, xp.minimum(trace, 1.0 - self._uniform_weight), 0.0))

    @property
    def jacobian_norm(self) -> Array:
        """√(Σp² − 2Σp³ + (Σp²)²), the Frobenius norm of the softmax Jacobian."""
        xp = self._namespace
        # With the largest weight a = 1 − t apart: a²t² + Σ'p²(1 + 2a²) − 2Σ'p³ + (Σ'p²)², every part ≥ 0.
        a2 = self.max_weight**2
        square = a2 * self.tail_weight**2 + self.tail_p2 * (1.0 + 2.0 * a2) - 2.0 * self.tail_p3 + self.tail_p2**2
        return _array(xp.asarray(xp.sqrt(xp.clip(square, 0.0, None))))

    @property
    def shape(self) -> tuple[int, ...]:
        """The common shape `[..., H, L]` of all fields."""
        return tuple(self.visible_keys.shape)


ROW_FIELDS = tuple(item.name for item in fields(AttentionStatistics) if item.name != "sample")
"""The fields that hold a number per row, in the order of the blocks: two of counts, eleven of floats."""

ROW_STATISTICS = (
    *ROW_FIELDS,
    "max_weight",
    "sum_p2",
    "sum_p3",
    "effective_keys",
    "entropy_ratio",
    "saturation_index",
    "jacobian_trace",
    "jacobian_norm",
)
"""Every number of a row: the fields and what is derived from them."""

# What is shown of many rows.
_OVERVIEW = ("entropy_ratio", "saturation_index", "effective_keys", "max_weight", "max_logit", "visible_keys")

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
_DECADES = np.geomspace(1e-3, 1e9, 12 * 80 + 1)
BIN_EDGES = np.concatenate([-_DECADES[::-1], _DECADES])


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
        bins = np.searchsorted(BIN_EDGES, kept, side="right")
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
        return all(_are_same(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

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
        found = (cumulative >= np.maximum(np.ceil(probability * self.count), 1)[:, None]).argmax(axis=1)
        some = self.count > 0
        low = np.where(some, np.maximum(lower[found], self.least), np.nan)
        high = np.where(some, np.minimum(upper[found], self.largest), np.nan)
        return np.asarray(low + 0.5 * (high - low))


@dataclass(frozen=True, eq=False, repr=False)
class HeadSummary(Shown):
    """Row statistics added up per head; summaries of batches or ranks merge into the summary of the whole.

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
            by_head = np.moveaxis(values.reshape(batch, heads, queries), 1, 0)
            moments[name] = Moments.of(by_head.reshape(heads, batch * queries))
        return HeadSummary(moments, np.full(heads, batch * queries), np.full(heads, batch * in_all))

    def merge(self, other: HeadSummary) -> HeadSummary:
        """The summary of both sets of rows together; counts exactly, floats to about 1e-12."""
        if self.heads != other.heads:
            raise InvalidValueError(f"other must have {self.heads} heads, got {other.heads}")
        return HeadSummary(
            moments={name: own.merge(other.moments[name]) for name, own in self.moments.items()},
            rows_seen=self.rows_seen + other.rows_seen,
            rows_in_all=self.rows_in_all + other.rows_in_all,
        )

    def all_reduce(self, group: Any = None) -> HeadSummary:
        """The summary of all ranks of a torch.distributed process group (None: all), the same bits on every rank.

        Every rank of the group must call it, as often as the others; ranks without rows as well.

        Raises:
            InvalidValueError: on every rank, if the ranks do not have the same number of heads, or if
                torch.distributed is not initialised.
        """
        reduced: HeadSummary = importlib.import_module("sqrtdk.torch.distributed").all_reduce(self, group)
        return reduced

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
        return self.moments == other.moments and all(_are_same(one, two) for one, two in rows)

    __hash__ = None  # type: ignore[assignment]

    def _table(self) -> Table:
        seen, in_all = int(self.rows_seen.max(initial=0)), int(self.rows_in_all.max(initial=0))
        rows = [
            (str(head), *(f"{self[name].mean[head]:.3g}" for name in _SHOWN), largest)
            for head, largest in enumerate(self.write_largest("max_logit"))
        ]
        title = f"HeadSummary: {count(self.heads, 'head')}, {seen} of {in_all} rows each"
        return Table(title, ("head", *_SHOWN, "largest logit"), rows)


# What the printed table shows the mean of.
_SHOWN = ("entropy_ratio", "saturation_index", "effective_keys")
