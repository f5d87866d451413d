"""Head summaries for tests of patterns and findings: computed ones, and ones with every number set by hand."""

import numpy as np

from sqrtdk import AttentionStatistics, HeadSummary, attention


def fresh_heads(seed, *, heads=2, batch=2, length=160, d_k=16, causal=True, sharpness=1.0, dtype=np.float64, **options):
    """Return heads of a freshly initialised model, with independent normal q, k and v."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, batch, heads, length, d_k)).astype(dtype)
    return HeadSummary.of(attention(sharpness * q, k, v, causal=causal, **options).statistics)


def head_at_offset(offset, *, length=320, sharpness=40.0, causal=False):
    """Return a head whose query i attends only to key i + offset: H ≈ 0 at this sharpness."""
    k = np.eye(length)
    return HeadSummary.of(attention(np.roll(k, -offset, axis=0), k, k, causal=causal, scale=sharpness).statistics)


def sink_head(*, key=0, length=320, sharpness=40.0):
    """Return a head that attends to one key of each sequence from every query."""
    k = np.eye(length)
    q = np.repeat(k[key : key + 1], length, axis=0)
    return HeadSummary.of(attention(np.stack([q, q]), np.stack([k, k]), np.stack([k, k]), scale=sharpness).statistics)


def set_head(
    *, rows=300, visible_keys=64, ratio=0.5, trace=0.5, score_max=5.0, logit_mean=0.0, max_key=None, positions=True
):
    """Return one head of one sequence with these numbers in every row, or with one number per row."""
    keys = np.broadcast_to(np.asarray(visible_keys), (rows,)).astype(np.int64)

    def fill(value):
        return np.array(np.broadcast_to(np.asarray(value, np.float64), (rows,)))

    # Σp² = 1 − trace, all of it in the tail's weight t: 1 − Σp² = t(2 − t) − Σ'p² with Σ'p² = 0.
    tail = 1.0 - np.sqrt(1.0 - fill(trace))
    if max_key is None:
        max_key = np.random.default_rng(0).integers(0, 10_000, rows)
    statistics = AttentionStatistics(
        visible_keys=keys,
        max_key=np.array(np.broadcast_to(np.asarray(max_key), (rows,))),
        max_logit=fill(score_max),
        logsumexp=fill(score_max) + 1.0,
        entropy=fill(ratio) * np.log(np.maximum(keys, 1)),
        tail_weight=tail,
        tail_p2=fill(0.0),
        tail_p3=fill(0.0),
        logit_mean=fill(logit_mean),
        logit_variance=fill(1.0),
        score_max=fill(score_max),
        score_variance=fill(1.0),
        sink_weight=fill(0.0),
        first_position=0 if positions else None,
    )
    return HeadSummary.of(statistics)


def rules(findings):
    """Return rule and severity of each finding."""
    return [(finding.rule, finding.severity) for finding in findings]
