"""Normal numbers from a counter: Python and, in `try_it.js`, a browser compute the same ones.

Entry (row, column) of a table of standard normal numbers depends on the seed, the row and the column alone: a longer
or a wider table has the shorter one inside. Every operation is on 32-bit integers or rounded as IEEE 754 says, but for
log, cos and sin, which two good libraries give within a unit in the last place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["mix", "sample_normal"]

_UNIT = 2.0**-32
_ROW, _SEED = 0x9E3779B1, 0x85EBCA77


def mix(values: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Scramble 32-bit integers, one to one (`lowbias32` of Wellons 2018: each bit of input flips each of output in half
    of the cases, but for 0.2 per mille).

    >>> [int(x) for x in mix([0, 1, 2])]
    [0, 1753845952, 3507691905]
    """
    x = np.asarray(values, dtype=np.uint32).copy()
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def sample_normal(rows: int, columns: int, *, seed: int = 0, first_row: int = 0) -> npt.NDArray[np.float64]:
    """Return rows `first_row` to `first_row + rows` of the seed's table of standard normal numbers, `[rows, columns]`.

    Columns 2i and 2i + 1 are the two numbers of Box and Muller (1958) from one pair of uniform ones:
    √(−2 ln u₁)·cos 2πu₂ and √(−2 ln u₁)·sin 2πu₂, each u = (h + ½)/2³² with h a 32-bit hash.

    >>> wide, narrow = sample_normal(3, 8), sample_normal(1, 5, first_row=2)
    >>> bool((wide[2:, :5] == narrow).all())
    True
    """
    pairs = (columns + 1) // 2
    index = np.arange(first_row, first_row + rows, dtype=np.uint32)
    key = mix(index * np.uint32(_ROW) + mix(np.array([seed]) * _SEED & 0xFFFFFFFF))[:, np.newaxis]
    # Scrambled as well: with plain counters the windows of two rows whose keys are close would overlap.
    place = mix(np.arange(1, 2 * pairs + 1, dtype=np.uint32))
    radius = np.sqrt(-2.0 * np.log((mix(key ^ place[0::2]) + 0.5) * _UNIT))
    angle = 2.0 * np.pi * ((mix(key ^ place[1::2]) + 0.5) * _UNIT)
    table = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return np.ascontiguousarray(table.reshape(rows, 2 * pairs)[:, :columns])
