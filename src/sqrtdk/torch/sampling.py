"""Which query positions a sample of rows looks at: stratified, seeded, without touching any random stream."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.draws import WORD, mix
from sqrtdk.errors import InvalidTypeError, InvalidValueError

# Odd: strata next to each other have words far apart before they are mixed.
_STEP = 0x1E3779B9


def sample_positions(rows: int, count: int, seed: int, device: torch.device | str | None = None) -> Tensor:
    """Draw one position from each of n = min(count, rows) strata [⌊i·rows/n⌋, ⌊(i+1)·rows/n⌋), uniform within it.

    Positions are a hash of seed and stratum in integer arithmetic: the same on every device and under torch.compile,
    and no generator is involved, so the random numbers of a model stay what they were.

    Args:
        rows: how many query positions there are, below 2³¹.
        count: how many to look at (the `sample_rows` of attention), at least 1.
        seed: from 0 to 2⁶³ − 1 (its `sample_seed`).
        device: where the positions shall lie.

    Returns:
        int64 `[min(count, rows)]`, ascending and distinct; all positions if count ≥ rows.

    >>> sample_positions(1000, 4, 0)
    tensor([173, 291, 542, 757])
    """
    check_sample(count, seed)
    n = min(count, rows)
    stratum = torch.arange(n, dtype=torch.int64, device=device)
    begin = torch.div(stratum * rows, max(n, 1), rounding_mode="floor")
    end = torch.div((stratum + 1) * rows, max(n, 1), rounding_mode="floor")
    # A 32-bit word as a fraction of the stratum's width; off uniform by at most width/2³².
    return begin + ((_hash(stratum, seed) * (end - begin)) >> 32)


def check_sample(count: int, seed: int) -> None:
    """Raise the error that names `sample_rows` or `sample_seed` if a sample cannot be drawn with them."""
    for name, value, least in (("sample_rows", count, 1), ("sample_seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidTypeError(name, f"must be an integer, got {type(value).__name__}")
        if not least <= value < 2**63:
            raise InvalidValueError(name, f"must be at least {least} and below 2**63, got {value}")


def _hash(counter: Tensor, seed: int) -> Tensor:
    """A 32-bit word per counter, keyed by the seed: a counter-based generator (Salmon et al. 2011) of two rounds."""
    seeds = torch.full_like(counter, seed)
    key = mix((seeds & WORD) ^ mix((seeds >> 32) + 1))
    words: Tensor = mix(mix((counter * _STEP + key) & WORD) ^ key)
    return words
