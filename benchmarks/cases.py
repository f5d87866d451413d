"""Benchmark cases: shapes, masks and memory layouts, with their inputs and exact results.

Shape legend: B batch, H query heads, G key/value heads, L queries, S keys, D = dₖ = dᵥ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.task import Array, ContenderResult, Errors, Truth
from sqrtdk import backends
from sqrtdk.operation.attention import attention

# Number of checked queries per head: float64 results are slow, and rows are independent.
CHECKED_ROWS = 128


def narrow_to_bfloat16(array: Array) -> Array:
    """Return finite float32 numbers rounded to bfloat16, ties to even, as bits in uint16.

    >>> [hex(bits) for bits in narrow_to_bfloat16(np.array([1.0, 1.00390625, -2.0], np.float32))]
    ['0x3f80', '0x3f80', '0xc000']
    """
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen_bfloat16(bits: Array) -> Array:
    """Return the float32 numbers of bfloat16 bits.

    >>> widen_bfloat16(np.array([0x3F80, 0xC000], np.uint16))
    array([ 1., -2.], dtype=float32)
    """
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Inputs(NamedTuple):
    """Arrays of one call: q `[B, H, L, D]`, k and v `[B, G, S, D]` in float32, a boolean mask `[B, 1, 1, S]` if any.

    The dtype of the case represents the values exactly. If gradients are computed, `grad_output` `[B, H, L, D]` is the
    gradient of the output.
    """

    q: Array
    k: Array
    v: Array
    mask: Array | None
    grad_output: Array | None = None


class OutputTruth(NamedTuple):
    """Exact result in float64 for the queries `rows`: output `[B, H, R, D]` and entropy `[B, H, R]`."""

    rows: Array
    output: Array
    entropy: Array

    def compare(self, answer: ContenderResult) -> Errors:
        """Return the largest absolute errors of output and entropy."""
        error = float(np.abs(answer.output[:, :, self.rows] - self.output).max())
        if answer.entropy is None:
            return Errors(error)
        return Errors(error, float(np.abs(answer.entropy[:, :, self.rows] - self.entropy).max()))


@dataclass(frozen=True)
class Case:
    """Attention of one shape, mask and memory layout.

    Args:
        suite: name of the suite.
        name: name in tables and figures; unique within the suite.
        batch, heads, queries, d_k: B, H, L, D.
        keys: S; None for L.
        groups: G; None for H.
        causal: whether query i sees only keys up to i.
        window: with causal, the number of keys before key i that query i sees; None for all.
        padding: None for no mask; else a boolean mask hides the last keys of each sequence, up to this share.
        by_token: whether q, k and v lie in memory as `[B, L, H, D]`, the layout after a projection.
        sets: number of inputs used in turn. With enough of them, keys and values come from memory, not from a cache.
        bound_by_reading: whether the case is judged by the bytes of k and v that it reads, not by multiply-adds.
        dtype: dtype of the inputs and of the computation, "float32" or "bfloat16".
    """

    suite: str
    name: str
    batch: int
    heads: int
    queries: int
    d_k: int
    keys: int | None = None
    groups: int | None = None
    causal: bool = False
    window: int | None = None
    padding: float | None = None
    by_token: bool = False
    sets: int = 1
    bound_by_reading: bool = False
    dtype: str = "float32"

    error_of: ClassVar[str] = "output"

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Return (B, H, G, L, S, D) with the defaults filled in."""
        groups = self.heads if self.groups is None else self.groups
        keys = self.queries if self.keys is None else self.keys
        return self.batch, self.heads, groups, self.queries, keys, self.d_k

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `sqrtdk.attention`."""
        if self.window is not None:
            return {"causal": True, "window": (self.window, None)}
        return {"causal": True} if self.causal else {}

    def lengths(self) -> Array:
        """Return the number of keys without padding per sequence `[B]`.

        >>> Case("real", "padded", 3, 1, 8, 4, padding=0.5).lengths().tolist()
        [8, 6, 4]
        """
        keys = self.shape[4]
        hidden = np.linspace(0.0, self.padding or 0.0, self.batch)
        return np.round(keys * (1.0 - hidden)).astype(np.int64)

    def visible_pairs(self) -> int:
        """Return the number of pairs of a query and a visible key, over all heads and sequences.

        >>> Case("square", "causal", 1, 2, 4, 8, causal=True).visible_pairs()
        20
        """
        first, last = self._limits(np.arange(self.queries))
        seen = np.minimum(last, self.lengths()[:, None] - 1) - first + 1
        return int(self.heads * np.maximum(seen, 0).sum())

    def multiply_adds(self) -> int:
        """Return the multiply-adds of both products, without hidden pairs."""
        return 2 * self.d_k * self.visible_pairs()

    def bytes_read(self) -> int | None:
        """Return the bytes of k and v if the case is bound by reading; else None."""
        if not self.bound_by_reading:
            return None
        batch, _, groups, _, keys, d_k = self.shape
        return 2 * batch * groups * keys * d_k * (2 if self.dtype == "bfloat16" else 4)

    def visible(self, rows: Array | None = None) -> Array | None:
        """Return visibility as a boolean array `[B or 1, 1, R, S]` for the queries `rows`; None if all are visible."""
        rows = np.arange(self.queries) if rows is None else rows
        keys = np.arange(self.shape[4])
        seen = None
        if self.causal or self.window is not None:
            first, last = self._limits(rows)
            seen = ((keys >= first[:, None]) & (keys <= last[:, None]))[None, None]
        if self.padding is not None:
            inside = (keys < self.lengths()[:, None])[:, None, None, :]
            seen = inside if seen is None else seen & inside
        return seen

    def shorten(self, longest: int) -> Case | None:
        """Return the case, or None if it has more than `longest` queries."""
        return self if self.queries <= longest else None

    def make_inputs(self, rng: np.random.Generator) -> list[Inputs]:
        """Return standard normal q, k, v, one entry per set.

        >>> case = Case("real", "by token", 1, 2, 3, 4, by_token=True)
        >>> q = case.make_inputs(np.random.default_rng(0))[0].q
        >>> q.shape, q.flags.c_contiguous
        ((1, 2, 3, 4), False)
        """
        _, heads, groups, queries, keys, _ = self.shape
        mask = None
        if self.padding is not None:
            mask = (np.arange(keys) < self.lengths()[:, None])[:, None, None, :]
        return [
            Inputs(self.draw(rng, heads, queries), self.draw(rng, groups, keys), self.draw(rng, groups, keys), mask)
            for _ in range(self.sets)
        ]

    def draw(self, rng: np.random.Generator, heads: int, length: int) -> Array:
        """Return standard normal numbers `[B, heads, length, D]` in the layout of the case, rounded to its dtype."""
        shape = (self.batch, length, heads, self.d_k) if self.by_token else (self.batch, heads, length, self.d_k)
        drawn = rng.standard_normal(shape, dtype=np.float32)
        if self.dtype == "bfloat16":
            drawn = widen_bfloat16(narrow_to_bfloat16(drawn))
        return drawn.swapaxes(1, 2) if self.by_token else drawn

    def compute_truth(self, inputs: Inputs) -> Truth:
        """Return the reference's float64 result for `CHECKED_ROWS` evenly spaced queries, including first and last."""
        rows = np.unique(np.linspace(0, self.queries - 1, min(self.queries, CHECKED_ROWS)).round().astype(np.int64))
        q, k, v = (array.astype(np.float64) for array in (inputs.q[:, :, rows], inputs.k, inputs.v))
        with backends.use(backends.REFERENCE):
            exact = attention(q, k, v, mask=self.visible(rows))
        assert exact.statistics is not None
        return OutputTruth(rows, exact.output, exact.statistics.entropy)

    def _limits(self, rows: Array) -> tuple[Array, Array]:
        bounded = self.causal or self.window is not None
        last = rows if bounded else np.full_like(rows, self.shape[4] - 1)
        first = np.zeros_like(rows) if self.window is None else np.maximum(rows - self.window, 0)
        return first, last
