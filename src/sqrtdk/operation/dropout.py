"""Random words for dropout, functions of counters alone: the same from NumPy, torch and the kernel."""

from __future__ import annotations

from typing import Any

# 32 bits kept in an int64: a product with a multiplier below 2³¹ never overflows.
WORD = 0xFFFFFFFF
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = 0x21F0AAAD, 0x735A2D97


def mix(word: Any) -> Any:
    """Return 32-bit words permuted so that every bit changes every other (Mueller, Wellons: hash prospector)."""
    word = word ^ (word >> 16)
    word = (word * _FIRST_MULTIPLIER) & WORD
    word = word ^ (word >> 15)
    word = (word * _SECOND_MULTIPLIER) & WORD
    return word ^ (word >> 15)


def draw(seed: Any, rows: Any, keys: Any) -> Any:
    """Return a 32-bit word for each weight; tests find no dependence within a row or within a key.

    Nothing is carried from word to word, so that any part of them can be drawn alone, in any order: the backward pass
    draws what the forward pass drew. Each row goes through the words with a step of its own, so that no row mixes the
    numbers of another some keys later. `kernel/rows/dropout.h` has the same in C++.

    Args:
        seed: an integer, or an int64 array or tensor of one element.
        rows: int64 `[..., 1]`, the numbers of the rows in the call: batch entry, head and query counted through.
        keys: int64 `[s]`, the numbers of the keys.

    Returns:
        int64 `[..., s]`, from 0 to 2³² − 1.

    >>> import numpy as np
    >>> draw(7, np.arange(2)[:, None], np.arange(3)).tolist()
    [[56850723, 3030764397, 1333805479], [2752210711, 3669753654, 1490790325]]
    """
    low, high = seed & WORD, (seed >> 32) & WORD
    key, other_key = mix(low ^ mix((high + 1) & WORD)), mix(high ^ mix((low + 1) & WORD))
    start = mix((rows & WORD) ^ mix(((rows >> 32) & WORD) ^ key))
    twist = mix((start + other_key) & WORD)
    step = (mix(twist ^ key) >> 1) | 1
    word = (start + (keys & WORD) * step) & WORD
    word = word ^ (word >> 16)
    word = (word * _FIRST_MULTIPLIER) & WORD
    word = word ^ (word >> 15) ^ twist
    return (word * _SECOND_MULTIPLIER) & WORD


def draw_kept(probability: float, seed: Any, rows: Any, keys: Any) -> Any:
    """Return which weights dropout keeps, boolean `[..., s]`: those whose word is at least probability·2³².

    >>> import numpy as np
    >>> draw_kept(0.4, 7, np.arange(2)[:, None], np.arange(3)).tolist()
    [[False, True, False], [True, True, False]]
    """
    return draw(seed, rows, keys) >= min(int(probability * 2**32), WORD)


def growth_of_kept(probability: float) -> float:
    """Return the factor of kept weights, 1/(1 − p); 0 for p = 1, where nothing is kept.

    >>> growth_of_kept(0.2), growth_of_kept(1.0)
    (1.25, 0.0)
    """
    return 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
