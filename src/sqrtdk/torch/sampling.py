"""Samples of query positions: stratified and seeded, without using any random stream."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk import checks
from sqrtdk.operation.dropout import WORD, mix

# An odd step: neighbouring strata have distant words before they are mixed.
_STEP = 0x1E3779B9


def sample_positions(rows: int, count: int, seed: int, device: torch.device | str | None = None) -> Tensor:
    """Return one position from each of n = min(count, rows) strata [⌊i·rows/n⌋, ⌊(i+1)·rows/n⌋), uniform within it.

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
    """Refuse a `sample_rows` or `sample_seed` that cannot be used."""
    for name, value, least in (("sample_rows", count, 1), ("sample_seed", seed, 0)):
        checks.integer(name, value, least, 2**63 - 1)


def _hash(counter: Tensor, seed: int) -> Tensor:
    """Return a 32-bit word per counter, keyed by the seed: two rounds of a counter-based generator (Salmon 2011)."""
    seeds = torch.full_like(counter, seed)
    key = mix((seeds & WORD) ^ mix((seeds >> 32) + 1))
    words: Tensor = mix(mix((counter * _STEP + key) & WORD) ^ key)
    return words
