"""Row statistics computed without sqrtdk: from the n×n matrix, or in a second pass over blocks of it.

Each function computes the fields of `AttentionStatistics` in float32, the dtype of the inputs, as carefully as a good
user would. The maximum is subtracted before exp, the mean before squaring, and hidden key blocks are left out.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import Inputs
from benchmarks.task import Array

# Queries per block of the second pass: n×256 logits of a head stay in the cache up to some thousand keys.
BLOCK = 256


class ByHand(NamedTuple):
    """Output `[B, H, L, D]` and statistics `[B, H, L]` by name, arrays or tensors."""

    output: Any
    statistics: dict[str, Any]


def attend_in_numpy(inputs: Inputs, visible: Array | None) -> ByHand:
    """Return output and every statistic from the textbook's n×n matrix in NumPy."""
    q, k, v = inputs[:3]
    logits = (q @ k.swapaxes(-1, -2)) * np.float32(1.0 / math.sqrt(q.shape[-1]))
    if visible is not None:
        logits = np.where(visible, logits, np.float32(-np.inf))
    max_logit = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - max_logit)
    total = weights.sum(axis=-1, keepdims=True)
    weights /= total
    logsumexp = max_logit + np.log(total)
    finite = logits if visible is None else np.where(visible, logits, np.float32(0.0))
    count = np.float32(logits.shape[-1]) if visible is None else visible.sum(axis=-1, dtype=np.float32)
    mean = finite.sum(axis=-1) / count
    apart = finite - mean[..., None]
    if visible is not None:
        apart = np.where(visible, apart, np.float32(0.0))
    squares = weights * weights
    statistics = {
        "max_key": logits.argmax(axis=-1),
        "max_logit": max_logit[..., 0],
        "logsumexp": logsumexp[..., 0],
        "entropy": logsumexp[..., 0] - (weights * finite).sum(axis=-1),
        "sum_p2": squares.sum(axis=-1),
        "sum_p3": (squares * weights).sum(axis=-1),
        "logit_mean": mean,
        "logit_variance": (apart * apart).sum(axis=-1) / count,
    }
    return ByHand(weights @ v, statistics)


def attend_in_torch(q: Any, k: Any, v: Any, visible: Any) -> ByHand:
    """Return output and every statistic from the n×n matrix in torch."""
    logits = (q @ k.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1]))
    statistics, weights = _describe_in_torch(logits, visible)
    return ByHand(weights @ v, statistics)


def attend_in_two_passes(q: Any, k: Any, v: Any, causal: bool) -> ByHand:
    """Return the output of torch's fused attention, and the statistics from a second pass over blocks of logits."""
    import torch

    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scale = 1.0 / math.sqrt(q.shape[-1])
    parts = []
    for start in range(0, q.shape[-2], BLOCK):
        stop = min(start + BLOCK, q.shape[-2])
        keys = stop if causal else k.shape[-2]
        visible = None
        if causal:
            visible = torch.arange(keys) <= torch.arange(start, stop)[:, None]
        logits = (q[..., start:stop, :] @ k[..., :keys, :].transpose(-1, -2)) * scale
        parts.append(_describe_in_torch(logits, visible)[0])
    return ByHand(output, {name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]})


def _describe_in_torch(logits: Any, visible: Any) -> tuple[dict[str, Any], Any]:
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    max_logit, max_key = logits.max(dim=-1)
    weights = (logits - max_logit[..., None]).exp_()
    total = weights.sum(dim=-1)
    weights /= total[..., None]
    logsumexp = max_logit + total.log()
    finite = logits if visible is None else logits.masked_fill(~visible, 0.0)
    count = float(logits.shape[-1]) if visible is None else visible.sum(dim=-1).float()
    mean = finite.sum(dim=-1) / count
    apart = finite - mean[..., None]
    if visible is not None:
        apart = apart.masked_fill(~visible, 0.0)
    squares = weights * weights
    statistics = {
        "max_key": max_key,
        "max_logit": max_logit,
        "logsumexp": logsumexp,
        "entropy": logsumexp - (weights * finite).sum(dim=-1),
        "sum_p2": squares.sum(dim=-1),
        "sum_p3": (squares * weights).sum(dim=-1),
        "logit_mean": mean,
        "logit_variance": (apart * apart).sum(dim=-1) / count,
    }
    return statistics, weights
