"""What a scale that learns must offer: the protocol of scaling policies, on tensors and with parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class TensorContext:
    """What a learnable scale may know about a call; the tensors lie on the device of the query.

    Args:
        query: the q that was given `[..., H, L, D]`, before `prepare`.
        make_positions: gives the absolute position of each query, int64 `[L]`.
        count_visible: gives how many keys each query sees, int64, broadcasts to `[..., H, L]`.
    """

    query: Tensor
    make_positions: Callable[[], Tensor]
    count_visible: Callable[[], Tensor]

    @property
    def d_k(self) -> int:
        """Length of a query vector."""
        return int(self.query.shape[-1])

    @property
    def positions(self) -> Tensor:
        """Absolute position of each query, int64 `[L]`."""
        return self.make_positions()

    @property
    def visible_keys(self) -> Tensor:
        """Number of keys each query sees, int64, broadcasts to `[..., H, L]`."""
        return self.count_visible()


class LearnableScale(nn.Module):
    """Base of the scales with parameters: `prepare` and `factor` as a policy has them, differentiable."""

    name: ClassVar[str] = ""

    def factor(self, context: TensorContext) -> Tensor:
        """The multiplier of q·k, a tensor that broadcasts to `[..., H, L]`."""
        raise TypeError(f"{type(self).__name__} must define factor(context)")

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the product in place of q `[..., H, L, D]` and k `[..., G, S, D]`."""
        return q, k
