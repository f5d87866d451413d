"""Statistics of attention rows: the measured fields, the numbers derived from them, and their means."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from sqrtdk import checks
from sqrtdk.errors import InvalidValueError, unknown_name
from sqrtdk.show.table import Shown, Table, count
from sqrtdk.theory.softmax import namespace_of, saturation_index
from sqrtdk.wording.numbers import write_number

__all__ = ["ROW_FIELDS", "ROW_STATISTICS", "AttentionStatistics", "Sample"]

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """Rows of a sample: indices of queries `[n]`, int64 and ascending, out of `rows` per head."""

    positions: Array
    rows: int


def _array(value: Any) -> Array:
    # Tensors pass under the type of arrays: this module uses only operations that both have.
    return cast(Array, value)


def _on_host(tensor: Any, dtype: npt.DTypeLike) -> Array:
    return np.asarray(tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu().numpy(), dtype=dtype)


def same_bits(one: Any, two: Any) -> bool:
    """Return whether two arrays, or tensors on one device, are the same to the bit; every NaN equals every other."""
    xp = namespace_of(one)
    if xp is not namespace_of(two) or one.dtype != two.dtype or one.shape != two.shape:
        return False
    if xp is not np and one.device != two.device:
        return False
    same = (one == two) & (xp.signbit(one) == xp.signbit(two))
    return bool((same | (xp.isnan(one) & xp.isnan(two))).all())


def _axes(axis: int | tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """Return the axes as numbers from 0 on, from an axis argument as NumPy's."""
    if axis is None:
        return tuple(range(rank))
    kind = "an integer, a tuple of integers or None"
    axes = [checks.integer("axis", at, kind=kind) for at in (axis if isinstance(axis, tuple) else (axis,))]
    places = tuple(at + rank if at < 0 else at for at in axes)
    if any(not 0 <= at < rank for at in places) or len(set(places)) < len(places):
        raise InvalidValueError("axis", f"must name different axes from {-rank} to {rank - 1}, got {axis!r}")
    return places


@dataclass(frozen=True, eq=False, repr=False)
class AttentionStatistics(Shown):
    """Per-row statistics of attention, arrays `[..., H, L]`, float64 (counts and indices int64).

    The fields are NumPy arrays or torch tensors; the derived numbers are of the same kind, on the same device.

    A row is one query of one head; its p are the softmax weights over its visible keys alone (sinks left out, their
    share is `sink_weight`). A row that sees nothing has entropy and weights 0, `max_key` −1, maxima and logsumexp −inf,
    mean and variances NaN; summaries count such rows and leave them out of all but `visible_keys`.

    `max_key` is the first of the keys with the largest logit. If a visible logit is NaN, it is the first of those, as
    `numpy.argmax` has it, and `max_logit` and what follows from the weights are NaN; `score_max` is NaN if a visible
    score is. If the largest logit is infinite, `logsumexp` is the same infinity; weights, mean and variance are NaN.

    The largest weight is kept apart: `tail_weight`, `tail_p2`, `tail_p3` are Σp, Σp², Σp³ over all keys but the
    largest. So 1 − Σp² and the Jacobian's norm keep their relative accuracy when the row is one-hot but for 1e-20,
    where 1 − Σp² taken from a rounded Σp² would be 0.

    `sample` says which queries the rows are if they are a sample; it is None if the rows are complete.
    `first_position` is the position of the first query among the keys, so `max_key − positions` is the offset that
    a row attends to; None if queries and keys have no common positions, as in cross-attention.

    Two are equal if they are of one kind (arrays, or tensors on one device) and all fields are the same to the bit, NaN
    equal to NaN; like arrays they have no hash.

    >>> from sqrtdk import attention
    >>> import numpy as np
    >>> rows = attention(np.ones((1, 4)), np.zeros((8, 4)), np.zeros((8, 2))).statistics
    >>> float(rows.effective_keys[0]), float(rows.entropy_ratio[0])
    (8.0, 1.0)
    """

    visible_keys: Counts
    max_key: Counts
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
    first_position: int | None = None

    @classmethod
    def from_blocks(
        cls, counts: Array, measures: Array, *, sample: Sample | None = None, first_position: int | None = None
    ) -> AttentionStatistics:
        """Return statistics whose fields, in the order above, are views of two blocks: `COUNTS`, then `MEASURES`.

        A view is made at its first access: thirteen of them would cost as much as a small call of the kernel.
        """
        rows = cls.__new__(cls)
        state = rows.__dict__
        state["_blocks"] = (counts, measures)
        if sample is not None:
            state["sample"] = sample
        if first_position is not None:
            state["first_position"] = first_position
        return rows

    def __getattr__(self, name: str) -> Array:
        blocks = self.__dict__.get("_blocks")
        if blocks is None or name not in ROW_FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        at = ROW_FIELDS.index(name)
        value: Array = blocks[0][at] if at < len(COUNTS) else blocks[1][at - len(COUNTS)]
        self.__dict__[name] = value
        return value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionStatistics):
            return NotImplemented
        if self is other:
            return True
        if self.first_position != other.first_position or (self.sample is None) != (other.sample is None):
            return False
        if self.sample is not None and other.sample is not None:
            one, two = self.sample, other.sample
            if one.rows != two.rows or not same_bits(one.positions, two.positions):
                return False
        return all(same_bits(getattr(self, name), getattr(other, name)) for name in ROW_FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def mean(self, name: str, axis: int | tuple[int, ...] | None = None) -> Array:
        """Return the mean of a row statistic over the rows that have one, e.g. `statistics.mean("entropy_ratio")`.

        Rows whose value is NaN or infinite are left out (with a causal mask the first row sees one key and has no
        entropy ratio), and so are rows that see nothing, except for `visible_keys`. A `HeadSummary` does the same.

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
        # [()] makes NumPy's number of an array without axes; a tensor stays a tensor.
        return _array(xp.where(count > 0, total / xp.clip(count, 1, None), xp.nan)[()])

    def _counted(self, name: str) -> tuple[Array, Array]:
        """Return the values of a row statistic in the precision of the floats, and which rows have one."""
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
            title += self._say_nan()
        except RuntimeError:  # a tensor without numbers: on the device meta, or inside a transform
            return Table(title + ", without numbers", (), [])
        return Table(title, ("", "mean", "least", "largest", "rows counted"), rows, left=1)

    def _say_nan(self) -> str:
        nan = int((self._namespace.isnan(self.max_logit) & (self.visible_keys > 0)).sum())
        if not nan:
            return ""
        where = f"{nan} of {count(math.prod(self.shape), 'row')}"
        return f"\nNaN logits in {where}: look for NaN or infinity in q, in a key that the row sees, in the mask"

    def _describe(self, name: str) -> tuple[str, ...]:
        """Return a line of the overview; the extremes of a sample are bounds."""
        xp = self._namespace
        values, counted = self._counted(name)
        rows = int(counted.sum())
        if not rows:
            return name, "–", "–", "–", "0"
        below, above = ("", "") if self.sample is None or self.shape[-1] >= self.sample.rows else ("≤ ", "≥ ")
        least, largest = xp.where(counted, values, xp.inf).min(), xp.where(counted, values, -xp.inf).max()
        mean, low, high = (write_number(float(one), 3) for one in (self.mean(name), least, largest))
        return name, mean, f"{below}{low}", f"{above}{high}", str(rows)

    def numpy(self) -> AttentionStatistics:
        """Return the rows as NumPy arrays on the host, without gradients; NumPy arrays are returned as they are."""
        if namespace_of(self.visible_keys) is np:
            return self
        sample = None if self.sample is None else Sample(_on_host(self.sample.positions, np.int64), self.sample.rows)
        blocks = self.__dict__.get("_blocks")
        if blocks is None:
            arrays = [_on_host(getattr(self, name), np.float64) for name in ROW_FIELDS]
            blocks = np.stack(arrays[: len(COUNTS)]).astype(np.int64), np.stack(arrays[len(COUNTS) :])
        return AttentionStatistics.from_blocks(
            _on_host(blocks[0], np.int64),
            _on_host(blocks[1], np.float64),
            sample=sample,
            first_position=self.first_position,
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
        """1/Σp²: the number of equally weighted keys with the same Σp²; 0 where nothing is visible."""
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
    def positions(self) -> Array | None:
        """The position of each row's query among the keys, int64 `[L]`; None if `first_position` is not known."""
        if self.first_position is None:
            return None
        if self.sample is not None:
            return self.sample.positions + self.first_position
        xp = self._namespace
        where = {} if xp is np else {"device": cast(Any, self.visible_keys).device}
        return _array(xp.arange(self.shape[-1], dtype=xp.int64, **where) + self.first_position)

    @property
    def shape(self) -> tuple[int, ...]:
        """The common shape `[..., H, L]` of all fields."""
        return tuple(self.visible_keys.shape)


COUNTS, MEASURES = (
    tuple(item.name for item in fields(AttentionStatistics) if item.type == kind) for kind in ("Counts", "Array")
)
"""The fields that hold an integer per row, and those that hold a float64 number."""

ROW_FIELDS = (*COUNTS, *MEASURES)
"""The fields that hold a number per row, in the order of the blocks and of row_statistics.h."""

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

# The statistics in the printed overview.
_OVERVIEW = ("entropy_ratio", "saturation_index", "effective_keys", "max_weight", "max_logit", "visible_keys")
