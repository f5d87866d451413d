"""What a scale does to a call: its factor, and q and k as a policy wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sqrtdk import scales
from sqrtdk.call import Band, count_visible, row_numbers
from sqrtdk.errors import InvalidTypeError
from sqrtdk.scales import Policy, ScaleContext
from sqrtdk.torch.scale_protocol import LearnableScale, TensorContext
from sqrtdk.torch.tensor_arguments import require_finite_number, require_scale_tensor
from sqrtdk.torch.tiles import wide_dtype, working_dtype

TensorScale = float | Tensor | str | Policy | LearnableScale | None


class Scaled(NamedTuple):
    """What enters the product in place of q and k, v beside it, and the scale: a tensor, or the number `factor`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor | None
    factor: float


def apply_scale(scale: TensorScale, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, band: Band) -> Scaled:
    """The scale as a number or a tensor, and q and k as it wants them."""

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
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.number | torch.SymFloat):
        came = scale if isinstance(scale, bool) else type(scale).__name__
        raise InvalidTypeError("scale", f"must be a number, a tensor, a policy or its name, got {came}")
    return Scaled(q, k, v, None, require_finite_number("scale", float(scale)))


def _apply_policy(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: int,
    count: Callable[[], Tensor],
) -> Scaled:
    """By its factor, which computes on the query's device or, if it cannot, in NumPy."""

    def on_host(tensor: Tensor) -> Any:
        return tensor if policy.takes_tensors else tensor.cpu().numpy()

    # A policy that asks for no tensors gets positions that need none: shapes alone have nothing to bring to the host.
    positions: Any = (row_numbers(q) if policy.takes_tensors else np.arange(q.shape[-2])) + offset
    context = ScaleContext(q.shape[-1], positions, lambda: on_host(count()))
    factor: Any = policy.factor(context)
    name = f"the factor of policy {policy.name}"
    if isinstance(factor, Tensor | np.ndarray) and factor.ndim:
        rows = torch.as_tensor(factor, dtype=wide_dtype(q.device), device=q.device)
        # What a user wrote into a temperature is his own; the others count rows themselves.
        known = not isinstance(policy, scales.Temperature)
        scaled = Scaled(q, k, v, require_scale_tensor(name, rows, q, rows_known=known), 0.0)
    else:
        scaled = Scaled(q, k, v, None, require_finite_number(name, float(factor)))
    return scaled if type(policy).prepare is Policy.prepare else _prepare(scaled, policy.prepare)


def _prepare(scaled: Scaled, prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Scaled:
    """q and k prepared in the working precision.

    Vectors with NaN or infinity are left out and come back as NaN: what they touch is NaN, but where nobody sees them
    they give no gradient, which 0·NaN would be.
    """
    if getattr(prepare, "__func__", None) is LearnableScale.prepare:
        return scaled
    working = working_dtype(scaled.query.dtype)
    given = scaled.query.to(working), scaled.key.to(working)
    finite = [torch.isfinite(x).all(dim=-1, keepdim=True) for x in given]
    prepared = prepare(*(torch.where(ok, x, 1.0) for ok, x in zip(finite, given, strict=True)))
    q, k = (torch.where(ok, x, torch.nan) for ok, x in zip(finite, prepared, strict=True))
    return scaled._replace(query=q.to(working), key=k.to(working), value=scaled.value.to(working))
