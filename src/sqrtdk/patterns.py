"""Patterns of heads: broad, a fixed offset, a sink or content. They are information, never a verdict."""

from __future__ import annotations

import numpy as np

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.summary import BIN_EDGES, FARTHEST, Array, HeadSummary

__all__ = [
    "BROAD_RATIO",
    "ENOUGH_KEYS",
    "ENOUGH_ROWS",
    "NOT_ENOUGH_DATA",
    "OFFSET_LEAD",
    "OFFSET_SHARE",
    "SINK_SHARE",
    "has_enough_data",
    "pattern_of",
    "patterns",
    "rows_that_see",
]

# The names of heads and their thresholds are conventions of this project; the kinds are those of Clark et al. 2019,
# "What does BERT look at?", §3, and of Xiao et al. 2024, "Efficient streaming language models with attention sinks".
BROAD_RATIO = 0.95
"""`broad`: mean entropy ratio H/ln n of at least this."""
OFFSET_LEAD = 4.0
"""`previous`, `next`, `self`, `offset −3` …: an offset max_key − position with so many times the rows of any other."""
OFFSET_SHARE = 1 / 3
"""The share of rows that such an offset has at least: with 32 keys and more, ten times what chance gives."""
SINK_SHARE = 0.60
"""`sink`: one key per sequence is the most attended one in at least this share of rows."""
ENOUGH_KEYS = 32
"""A row counts as data from this many visible keys: with fewer, one key of several is common by chance."""
ENOUGH_ROWS = 256
"""A head is judged from this many such rows: a share is then known to ±3% (one standard deviation, √(¼/256))."""
NOT_ENOUGH_DATA = "not enough data"
"""The pattern of a head with fewer than `ENOUGH_ROWS` rows of `ENOUGH_KEYS` visible keys."""

_NAMED_OFFSETS = {-1: "previous", 0: "self", 1: "next"}


def rows_that_see(summary: HeadSummary, keys: int) -> Array:
    """How many rows `[H]` see at least so many keys, exactly; for `keys` up to 33.

    The bins of a summary's histogram are 2.9% wide, so that up to 33 neighbouring integers are never in one bin.

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
    """Which heads `[H]` have at least `ENOUGH_ROWS` rows with at least `ENOUGH_KEYS` visible keys."""
    return np.asarray(rows_that_see(summary, ENOUGH_KEYS) >= ENOUGH_ROWS)


def pattern_of(summary: HeadSummary, head: int) -> str:
    """The pattern of one head; the first that matches of `broad`, an offset, `sink`, `content`.

    - `broad`: the mean entropy ratio is at least 0.95;
    - `previous` (−1), `next` (+1), `self` (0), else `offset −3`: the most attended key is at this offset from the query
      in a third of the rows or more, and in at least four times as many as at any other offset; where a sink has more
      of the rows, it is one. Offsets beyond ±64 are not told apart and are none;
    - `sink`: in a sequence one key, first or not, is the most attended one of at least 60% of rows (mean of sequences);
    - `content`: none of these: where the head looks depends on what is there;
    - `not enough data`: fewer than 256 rows with at least 32 visible keys; or no sequence has two rows (decoding one
      token at a time), and so no sink could be told from content.

    The shares and the mean are those of all rows of the summary; rows with fewer keys are part of them.

    >>> from sqrtdk import HeadSummary, attention
    >>> k = np.eye(300)                                  # query i asks for key i − 1
    >>> rows = attention(np.roll(k, 1, axis=0), k, k, causal=True, scale=20.0).statistics
    >>> pattern_of(HeadSummary.of(rows), 0)
    'previous'

    Raises:
        InvalidValueError: if there is no such head.
    """
    _check(summary)
    if isinstance(head, bool) or not isinstance(head, int | np.integer) or not 0 <= head < summary.heads:
        raise InvalidValueError("head", f"must be an integer from 0 to {summary.heads - 1}, got {head!r}")
    return patterns(summary)[head]


def patterns(summary: HeadSummary) -> list[str]:
    """The pattern of each head, as `pattern_of` names them."""
    _check(summary)
    enough = has_enough_data(summary)
    ratio = summary["entropy_ratio"].mean
    keys = summary.max_keys
    # Without the two outer bins, which hold many offsets each.
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
            names.append("sink" if is_sink[head] else "content")
    return names


def _name_offset(offset: int) -> str:
    return _NAMED_OFFSETS.get(offset, f"offset {'−' if offset < 0 else '+'}{abs(offset)}")


def _check(summary: HeadSummary) -> None:
    if not isinstance(summary, HeadSummary):
        raise InvalidTypeError("summary", f"must be a HeadSummary, got {type(summary).__name__}")
