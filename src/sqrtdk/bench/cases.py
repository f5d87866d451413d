"""What is computed in a benchmark: shapes, masks and memory layouts, their inputs, and the right answer to them.

Shape legend: B batch, H query heads, G key/value heads, L queries, S keys, D = dₖ = dᵥ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import backends
from sqrtdk.attention import attention

Array = npt.NDArray[Any]

# Errors are taken over this many queries of every head: the truth in float64 is slow, and rows are independent.
CHECKED_ROWS = 128


class Inputs(NamedTuple):
    """Arrays of one call: q `[B, H, L, D]`, k and v `[B, G, S, D]` in float32, a boolean mask `[B, 1, 1, S]` if any."""

    q: Array
    k: Array
    v: Array
    mask: Array | None


class Truth(NamedTuple):
    """The answer in float64 for the queries `rows`: output `[B, H, R, D]` and entropy `[B, H, R]`."""

    rows: Array
    output: Array
    entropy: Array


@dataclass(frozen=True)
class Case:
    """One computation that every contender is timed on.

    Args:
        suite: the suite it belongs to.
        name: what tables and figures call it; unique within the suite.
        batch, heads, queries, d_k: B, H, L, D.
        keys: S; None is L.
        groups: G; None is H.
        causal: query i sees the keys up to i.
        window: with causal, only the last `window` of these beside key i itself; None sees all.
        padding: None has no mask; else a boolean mask hides the last keys of each sequence, up to this share of them.
        by_token: q, k and v lie in memory as `[B, L, H, D]`, as a projection leaves them.
        sets: so many inputs are used in turn; enough of them, and keys and values come from memory, not from a cache.
        bound_by_reading: judged by the bytes of k and v it reads, not by its multiply-adds.
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

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """(B, H, G, L, S, D) with the defaults filled in."""
        groups = self.heads if self.groups is None else self.groups
        keys = self.queries if self.keys is None else self.keys
        return self.batch, self.heads, groups, self.queries, keys, self.d_k

    def options(self) -> dict[str, Any]:
        """What `sqrtdk.attention` is told beside the arrays."""
        if self.window is not None:
            return {"causal": True, "window": (self.window, None)}
        return {"causal": True} if self.causal else {}

    def lengths(self) -> Array:
        """Keys of each sequence that are not padding `[B]`.

        >>> Case("real", "padded", 3, 1, 8, 4, padding=0.5).lengths().tolist()
        [8, 6, 4]
        """
        keys = self.shape[4]
        hidden = np.linspace(0.0, self.padding or 0.0, self.batch)
        return np.round(keys * (1.0 - hidden)).astype(np.int64)

    def visible_pairs(self) -> int:
        """Pairs of a query and a key it sees, over all heads and sequences.

        >>> Case("square", "causal", 1, 2, 4, 8, causal=True).visible_pairs()
        20
        """
        first, last = self._limits(np.arange(self.queries))
        seen = np.minimum(last, self.lengths()[:, None] - 1) - first + 1
        return int(self.heads * np.maximum(seen, 0).sum())

    def multiply_adds(self) -> int:
        """Multiply-adds of both products, hidden pairs left out."""
        return 2 * self.d_k * self.visible_pairs()

    def bytes_of_keys_and_values(self) -> int:
        """Bytes of k and v in float32."""
        batch, _, groups, _, keys, d_k = self.shape
        return 2 * batch * groups * keys * d_k * 4

    def visible(self, rows: Array | None = None) -> Array | None:
        """Who sees whom as a boolean array `[B or 1, 1, R, S]` for the queries `rows`; None if everybody sees all."""
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

    def _limits(self, rows: Array) -> tuple[Array, Array]:
        bounded = self.causal or self.window is not None
        last = rows if bounded else np.full_like(rows, self.shape[4] - 1)
        first = np.zeros_like(rows) if self.window is None else np.maximum(rows - self.window, 0)
        return first, last


def make_inputs(case: Case, rng: np.random.Generator) -> list[Inputs]:
    """Standard normal q, k, v for a case, one set after another.

    >>> case = Case("real", "by token", 1, 2, 3, 4, by_token=True)
    >>> q = make_inputs(case, np.random.default_rng(0))[0].q
    >>> q.shape, q.flags.c_contiguous
    ((1, 2, 3, 4), False)
    """
    batch, heads, groups, queries, keys, d_k = case.shape
    mask = None
    if case.padding is not None:
        mask = (np.arange(keys) < case.lengths()[:, None])[:, None, None, :]

    def draw(heads: int, length: int) -> Array:
        if case.by_token:
            return rng.standard_normal((batch, length, heads, d_k), dtype=np.float32).swapaxes(1, 2)
        return rng.standard_normal((batch, heads, length, d_k), dtype=np.float32)

    return [Inputs(draw(heads, queries), draw(groups, keys), draw(groups, keys), mask) for _ in range(case.sets)]


def compute_truth(case: Case, inputs: Inputs) -> Truth:
    """The reference's answer in float64 for `CHECKED_ROWS` queries spread evenly, the first and the last among them."""
    rows = np.unique(np.linspace(0, case.queries - 1, min(case.queries, CHECKED_ROWS)).round().astype(np.int64))
    q, k, v = (array.astype(np.float64) for array in (inputs.q[:, :, rows], inputs.k, inputs.v))
    with backends.use(backends.REFERENCE):
        exact = attention(q, k, v, mask=case.visible(rows))
    assert exact.statistics is not None
    return Truth(rows, exact.output, exact.statistics.entropy)
