"""Patterns of heads: broad, a fixed offset, a fixed key or other. A pattern is information, not a problem."""

from __future__ import annotations

import numpy as np

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.summary import BIN_EDGES, FARTHEST, HeadSummary
from sqrtdk.summary.heads import Array

__all__ = [
    "BROAD_RATIO",
    "ENOUGH_KEYS",
    "ENOUGH_ROWS",
    "FIXED_KEY",
    "NOT_ENOUGH_DATA",
    "OFFSET_LEAD",
    "OFFSET_SHARE",
    "OTHER",
    "SINK_SHARE",
    "has_enough_data",
    "pattern_of",
    "patterns",
    "rows_that_see",
]

# The names and thresholds are conventions of this project. The kinds of heads follow Clark et al. 2019, "What does
# BERT look at?", §3, and Xiao et al. 2024, "Efficient streaming language models with attention sinks".
BROAD_RATIO = 0.95
"""`broad`: the mean entropy ratio H/ln n is at least this."""
OFFSET_LEAD = 4.0
"""`previous`, `next`, `self`, `offset −3` …: this offset max_key − position has that many times the rows of others."""
OFFSET_SHARE = 1 / 3
"""Least share of rows at such an offset: with 32 or more keys, ten times the share by chance."""
SINK_SHARE = 0.60
"""`fixed key`: one key per sequence is the most attended key in at least this share of rows."""
ENOUGH_KEYS = 32
"""Least number of visible keys for a row to count: with fewer keys, one key is often ahead by chance."""
ENOUGH_ROWS = 256
"""Least number of such rows to judge a head: a share is then known to ±3% (one standard deviation, √(¼/256))."""
FIXED_KEY, OTHER = "fixed key", "other"
"""Patterns of a head that attends to one key of each sequence, and of a head without any named pattern."""
NOT_ENOUGH_DATA = "not enough data"
"""Pattern of a head with fewer than `ENOUGH_ROWS` rows of `ENOUGH_KEYS` visible keys."""

_NAMED_OFFSETS = {-1: "previous", 0: "self", 1: "next"}


def rows_that_see(summary: HeadSummary, keys: int) -> Array:
    """Return the exact number of rows `[H]` that see at least `keys` keys, for `keys` up to 33.

    The bins of a summary's histogram are 2.9% wide, so that each integer up to 33 has its own bin.

    >>> from sqrtdk import HeadSummary, attention
    >>> rows = HeadSummary.of(attention(*np.zeros((3, 40, 4)), causal=True).statistics)   # row i sees i + 1 keys
    >>> [int(rows_that_see(rows, keys)[0]) for keys in (1, 2, 32)]
    [40, 39, 9]
    """
    if not 0 <= keys <= 33:
        raise InvalidValueError("keys", f"must lie in 0 to 33, where the histogram tells neighbours apart, got {keys}")
    first = np.searchsorted(BIN_EDGES, keys, side="right")
    return np.asarray(summary["visible_keys"].histogram[:, first:].sum(axis=1))


def has_enough_data(summary: HeadSummary) -> Array:
    """Return whether each head `[H]` has at least `ENOUGH_ROWS` rows with at least `ENOUGH_KEYS` visible keys."""
    return np.asarray(rows_that_see(summary, ENOUGH_KEYS) >= ENOUGH_ROWS)


def pattern_of(summary: HeadSummary, head: int) -> str:
    """Return the pattern of one head: the first that matches of `broad`, an offset, `fixed key`, `other`.

    - `broad`: the mean entropy ratio is at least 0.95;
    - `previous` (−1), `next` (+1), `self` (0), else `offset −3`: the most attended key is at this offset from the query
      in at least a third of the rows, and in at least four times as many rows as at any other offset. If a fixed key
      has more rows, the pattern is `fixed key`. Offsets beyond ±64 share a bin and do not count;
    - `fixed key`: one key per sequence, first or not, is the most attended key in at least 60% of rows (mean over
      sequences);
    - `other`: none of these;
    - `not enough data`: fewer than 256 rows with at least 32 visible keys, or no sequence with two rows (decoding one
      token at a time), so that a fixed key cannot be recognised.

    Shares and mean are over all rows of the summary, including rows with fewer keys.

    >>> from sqrtdk import HeadSummary, attention
    >>> k = np.eye(300)                                  # query i asks for key i − 1
    >>> rows = attention(np.roll(k, 1, axis=0), k, k, causal=True, scale=20.0).statistics
    >>> pattern_of(HeadSummary.of(rows), 0)
    'previous'

    Raises:
        InvalidValueError: if there is no such head.
    """
    _check(summary)
    return patterns(summary)[checks.integer("head", head, 0, summary.heads - 1)]


def patterns(summary: HeadSummary) -> list[str]:
    """Return the pattern of each head, named as in `pattern_of`."""
    _check(summary)
    enough = has_enough_data(summary)
    ratio = summary["entropy_ratio"].mean
    keys = summary.max_keys
    # Leave out the two outer bins, which hold many offsets each.
    offsets = keys.offsets[:, 1:-1]
    commonest = offsets.argmax(axis=1) - FARTHEST
    second, first = np.partition(offsets, -2, axis=1)[:, -2:].T
    offset_share = first / np.maximum(keys.rows, 1)
    leads = (offset_share >= OFFSET_SHARE) & (first >= OFFSET_LEAD * second)
    sink_share = keys.commonest_share
    is_sink = sink_share >= SINK_SHARE
    names = []
    for head in range(summary.heads):
        if not enough[head]:
            names.append(NOT_ENOUGH_DATA)
        elif ratio[head] >= BROAD_RATIO:
            names.append("broad")
        elif leads[head] and not (is_sink[head] and sink_share[head] > offset_share[head]):
            names.append(_name_offset(int(commonest[head])))
        elif np.isnan(sink_share[head]):
            names.append(NOT_ENOUGH_DATA)
        else:
            names.append(FIXED_KEY if is_sink[head] else OTHER)
    return names


def _name_offset(offset: int) -> str:
    return _NAMED_OFFSETS.get(offset, f"offset {'−' if offset < 0 else '+'}{abs(offset)}")


def _check(summary: HeadSummary) -> None:
    if not isinstance(summary, HeadSummary):
        raise InvalidTypeError("summary", f"must be a HeadSummary, got {type(summary).__name__}")
