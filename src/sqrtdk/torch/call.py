"""A checked call of attention on tensors, as it goes through the operators, and what comes back from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TensorCall(NamedTuple):
    """A call whose arguments have been checked, in the order of the operators' schema.

    `scale`, `mask` and `sinks` broadcast to `[..., H, L]`, `[..., H, L, S]` and `[..., H]`; without a scale `factor` is
    it. The query in row i, at `positions[i]` or at i without them, sees key j if first ≤ j − position ≤ last and the
    mask lets it. `seed` draws the dropout. A softcap of 0 is none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    positions: Tensor | None
    seed: Tensor | None
    factor: float
    softcap: float
    first: int
    last: int
    dropout: float

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """`[..., H]`; (1,) for a call without an axis of heads."""
        return tuple(self.query.shape[:-2]) or (1,)


TENSORS = 8
"""How many of a call's fields are tensors; they come first."""


class Forward(NamedTuple):
    """Output `[..., H, L, V]`, numbers `[11, ..., H, L]` and counts `[2, ..., H, L]` in the order of
    `AttentionStatistics`, weights `[..., H, L, S]`; what was not asked for has no elements or is None."""

    output: Tensor
    numbers: Tensor | None
    counts: Tensor | None
    weights: Tensor | None


class Backward(NamedTuple):
    """Gradients shaped as query, key, value; of the scale and of the sinks per row `[..., H, L]`; of the mask.

    What was not asked for, or is not there, has no elements.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor
    sinks: Tensor
    mask: Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of row sums and statistics: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits are computed: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32
