"""What a scale does to a call: its factor, and q and k as a policy wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import scales
from sqrtdk.errors import InvalidTypeError
from sqrtdk.scales import Policy, ScaleContext
from sqrtdk.torch.arguments import require_finite_number, require_scale_tensor
from sqrtdk.torch.call import TensorCall, wide_dtype, working_dtype
from sqrtdk.torch.scales import LearnableScale, TensorContext
from sqrtdk.torch.tiles import count_visible

TensorScale = float | Tensor | str | Policy | LearnableScale | None


def apply_scale(call: TensorCall, scale: TensorScale, offset: int) -> TensorCall:
    """The call with its scale as a number or a tensor, and with q and k as the policy wants them."""
    if isinstance(scale, str | Policy):
        return _apply_policy(call, scales.resolve(scale), offset)
    if isinstance(scale, LearnableScale):
        context = TensorContext(
            call.query,
            lambda: make_positions(call, offset),
            lambda: count_visible(call),
        )
        what = f"the factor of {type(scale).__name__}"
        factor = require_scale_tensor(what, scale.factor(context), call.query, rows_known=True)
        return _prepare(call._replace(scale=factor), scale.prepare)
    if isinstance(scale, Tensor):
        return call._replace(scale=require_scale_tensor("scale", scale, call.query))
    if isinstance(scale, torch.nn.Module):
        raise InvalidTypeError(f"scale must be a LearnableScale to be a module, got {type(scale).__name__}")
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.number | torch.SymFloat):
        came = scale if isinstance(scale, bool) else type(scale).__name__
        raise InvalidTypeError(f"scale must be a number, a tensor, a policy or its name, got {came}")
    return call._replace(factor=require_finite_number("scale", float(scale)))


def _apply_policy(call: TensorCall, policy: Policy, offset: int) -> TensorCall:
    context = ScaleContext(d_k=call.query.shape[-1], **_describe_rows(call, offset, policy.takes_tensors))
    factor: Any = policy.factor(context)
    if isinstance(factor, Tensor | np.ndarray) and factor.ndim:
        rows = torch.as_tensor(factor, dtype=wide_dtype(call.query.device), device=call.query.device)
        # What a user wrote into a temperature is his own; the others count rows themselves.
        known = not isinstance(policy, scales.Temperature)
        what = f"the factor of policy {policy.name}"
        call = call._replace(scale=require_scale_tensor(what, rows, call.query, rows_known=known))
    else:
        call = call._replace(factor=require_finite_number(f"the factor of policy {policy.name}", float(factor)))
    return call if type(policy).prepare is Policy.prepare else _prepare(call, policy.prepare)


def _describe_rows(call: TensorCall, offset: int, as_tensors: bool) -> dict[str, Any]:
    """What a policy may ask about the rows, on the query's device or in NumPy."""
    if as_tensors:
        return {"positions": make_positions(call, offset), "count_visible": lambda: count_visible(call)}
    return {
        "positions": np.arange(call.query.shape[-2], dtype=np.int64) + offset,
        "count_visible": lambda: count_visible(call).cpu().numpy(),
    }


def make_positions(call: TensorCall, offset: int) -> Tensor:
    """Absolute position of each query, int64 `[L]`."""
    return torch.arange(call.query.shape[-2], device=call.query.device) + offset


def _prepare(call: TensorCall, prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> TensorCall:
    """The call with q and k prepared in the working precision.

    Vectors with NaN or infinity are left out and come back as NaN: what they touch is NaN, but where nobody sees them
    they give no gradient, which 0·NaN would be.
    """
    if getattr(prepare, "__func__", None) is LearnableScale.prepare:
        return call
    working = working_dtype(call.query.dtype)
    given = call.query.to(working), call.key.to(working)
    finite = [torch.isfinite(x).all(dim=-1, keepdim=True) for x in given]
    prepared = prepare(*(torch.where(ok, x, 1.0) for ok, x in zip(finite, given, strict=True)))
    q, k = (torch.where(ok, x, torch.nan) for ok, x in zip(finite, prepared, strict=True))
    return call._replace(query=q.to(working), key=k.to(working), value=call.value.to(working))
