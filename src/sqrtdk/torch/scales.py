"""Scales on tensors: the base class of learnable scales, and how a scale changes a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from sqrtdk import scales
from sqrtdk.errors import InvalidTypeError
from sqrtdk.operation.visibility import Band, count_visible, row_numbers
from sqrtdk.scales import Policy, ScaleContext
from sqrtdk.torch.arguments import require_finite_number, require_scale_tensor
from sqrtdk.torch.engines.tiles import wide_dtype, working_dtype


@dataclass(frozen=True, eq=False)
class TensorContext:
    """Properties of a call that a learnable scale may use; the tensors lie on the device of the query.

    Args:
        query: the q that was given `[..., H, L, D]`, before `prepare`.
        make_positions: returns the absolute position of each query, int64 `[L]`.
        count_visible: returns how many keys each query sees, int64, broadcasts to `[..., H, L]`.
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
    """Base class of scales with parameters: differentiable `prepare` and `factor`, like those of a policy."""

    name: ClassVar[str] = ""

    def factor(self, context: TensorContext) -> Tensor:
        """Return the multiplier of q·k, a tensor that broadcasts to `[..., H, L]`."""
        raise TypeError(f"{type(self).__name__} must define factor(context)")

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensors that enter the product in place of q `[..., H, L, D]` and k `[..., G, S, D]`."""
        return q, k


TensorScale = float | Tensor | str | Policy | LearnableScale | None


class Scaled(NamedTuple):
    """The q and k that enter the product, v, and the scale: a tensor, or the number `factor`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor | None
    factor: float


def apply_scale(scale: TensorScale, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, band: Band) -> Scaled:
    """Return the scale as a number or a tensor, with q and k as the scale prepares them."""

    def count() -> Tensor:
        counts: Tensor = count_visible(q, k.shape[-2], mask, band)
        return counts

    def make_positions() -> Tensor:
        positions: Tensor = row_numbers(q) + (band.offset or 0)
        return positions

    if isinstance(scale, str | Policy):
        policy = scales.resolve(scale)
        return _apply_policy(policy, q, k, v, band.offset or 0, count)
    if isinstance(scale, LearnableScale):
        name = f"the factor of {type(scale).__name__}"
        factor = scale.factor(TensorContext(q, make_positions, count))
        factor = require_scale_tensor(name, factor, q, rows_known=True)
        return _prepare(Scaled(q, k, v, factor, 0.0), scale.prepare)
    if isinstance(scale, Tensor):
        return Scaled(q, k, v, require_scale_tensor("scale", scale, q), 0.0)
    if isinstance(scale, torch.nn.Module):
        raise InvalidTypeError("scale", f"must be a LearnableScale to be a module, got {type(scale).__name__}")
    number = require_finite_number("scale", cast(float, scale), kind="a number, a tensor, a policy or its name")
    return Scaled(q, k, v, None, number)


def _apply_policy(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: int,
    count: Callable[[], Tensor],
) -> Scaled:
    """Apply a policy; its factor is computed on the query's device if it takes tensors, else in NumPy."""

    def on_host(tensor: Tensor) -> Any:
        return tensor if policy.takes_tensors else tensor.cpu().numpy()

    # A policy that takes no tensors gets NumPy positions: they follow from the shape, so nothing is copied to the host.
    positions: Any = (row_numbers(q) if policy.takes_tensors else np.arange(q.shape[-2])) + offset
    context = ScaleContext(q.shape[-1], positions, lambda: on_host(count()))
    factor: Any = policy.factor(context)
    name = f"the factor of policy {policy.name}"
    if isinstance(factor, Tensor | np.ndarray) and factor.ndim:
        rows = torch.as_tensor(factor, dtype=wide_dtype(q.device), device=q.device)
        # The array in a temperature comes from the caller; other policies count rows themselves.
        known = not isinstance(policy, scales.Temperature)
        scaled = Scaled(q, k, v, require_scale_tensor(name, rows, q, rows_known=known), 0.0)
    else:
        scaled = Scaled(q, k, v, None, require_finite_number(name, float(factor)))
    return scaled if type(policy).prepare is Policy.prepare else _prepare(scaled, policy.prepare)


def _prepare(scaled: Scaled, prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Scaled:
    """Return the call with q and k prepared in the working precision.

    Vectors with NaN or infinity are left out and returned as NaN. Rows that see them are NaN, and where no row sees
    them they give a zero gradient, while 0·NaN would be NaN.
    """
    if getattr(prepare, "__func__", None) is LearnableScale.prepare:
        return scaled
    working = working_dtype(scaled.query.dtype)
    given = scaled.query.to(working), scaled.key.to(working)
    finite = [torch.isfinite(x).all(dim=-1, keepdim=True) for x in given]
    prepared = prepare(*(torch.where(ok, x, 1.0) for ok, x in zip(finite, given, strict=True)))
    q, k = (torch.where(ok, x, torch.nan) for ok, x in zip(finite, prepared, strict=True))
    return scaled._replace(query=q.to(working), key=k.to(working), value=scaled.value.to(working))
