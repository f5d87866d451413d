"""Rows of random attention for tests of records and summaries."""

import numpy as np

from sqrtdk import AttentionStatistics, attention
from sqrtdk.statistics import ROW_FIELDS, Sample


def statistics_of_noise(seed, batch, queries, sharpness=1.0, **options):
    """Return causal rows `[batch, 3, queries]` of standard normal q and k."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, batch, 3, queries, 4))
    return attention(sharpness * q, k, v, causal=True, **options).statistics


def blocks_of(rows):
    """Return the counts `[2, ...]` and the floats `[11, ...]` of rows."""
    parts = [getattr(rows, name) for name in ROW_FIELDS]
    return np.stack(parts[:2]), np.stack(parts[2:])


def take(rows, positions):
    """Return the rows at these query positions, marked as a sample."""
    counts, measures = (block[..., positions] for block in blocks_of(rows))
    sample = Sample(np.array(positions), rows.shape[-1])
    return AttentionStatistics.from_blocks(counts, measures, sample=sample, first_position=rows.first_position)
