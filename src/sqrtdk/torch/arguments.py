"""Checks of the tensors of a call: a wrong one raises and says what was expected, what came and what to do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.operation.arguments import (
    Names,
    refuse_mask_dtype,
    require_mask_shape,
    require_per_head_shape,
    require_scale_shape,
)
from sqrtdk.operation.call import FIELDS

_broadcast_shapes: Any = torch.broadcast_shapes

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which products keep their precision, with autocast off for the tensor's device."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast_on(tensor) else nullcontext()


def require_tensors(q: Tensor, k: Tensor, v: Tensor, names: Names) -> tuple[Tensor, Tensor, Tensor]:
    """Return three dense tensors of one floating dtype on one device; errors use the caller's `names`."""
    dtype = getattr(q, "dtype", None)
    if (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and dtype in _FLOATS
        and k.dtype == dtype == v.dtype
        and q.device == k.device == v.device
        and q.layout == k.layout == v.layout == torch.strided
        and not (q.is_nested or k.is_nested or v.is_nested)
    ):
        return q, k, v
    raise _explain_tensors(q, k, v, names)


def _explain_tensors(q: Any, k: Any, v: Any, names: Names) -> InvalidTypeError:
    """Build the error for tensors that do not fit; it names the first fault."""
    named = dict(zip(names, (q, k, v), strict=True))
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            return InvalidTypeError(
                name, f"must be a torch tensor, got {type(tensor).__name__}; sqrtdk.attention takes arrays"
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            return InvalidTypeError(name, f"must be a dense strided tensor, got {_name_layout(tensor)}")
        if tensor.dtype not in _FLOATS:
            return InvalidTypeError(name, f"must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    for name, tensor in named.items():
        if tensor.device != q.device:
            return InvalidTypeError(name, f"must be on {names[0]}'s device {q.device}, got {tensor.device}")
    return InvalidTypeError(
        f"{names[0]}, {names[1]} and {names[2]} must have one dtype, "
        f"got {q.dtype}, {k.dtype} and {v.dtype}; convert them with .to"
    )


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors in the autocast dtype if autocast is on; float64 stays, as in torch's own attention."""
    if not isinstance(q, Tensor) or not is_autocast_on(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in _FLOATS[:3] else x for x in (q, k, v))
    return q, k, v


def is_autocast_on(tensor: Tensor) -> bool:
    """Return whether autocast is on for the device of a tensor."""
    if tensor.is_cpu:
        return torch.is_autocast_enabled("cpu")
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def broadcast_heads(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return views with common leading axes, as torch's attention broadcasts them; heads too unless grouped."""
    own = 3 if grouped else 2
    if min(query.dim(), key.dim(), value.dim()) < own:
        return query, key, value
    try:
        common = _broadcast_shapes(*(x.shape[:-own] for x in (query, key, value)))
    except RuntimeError:
        hint = "" if grouped else "; enable_gqa=True lets a key/value head serve several query heads"
        raise InvalidValueError(
            "query, key and value must have leading axes that broadcast, "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}{hint}"
        ) from None
    query, key, value = (x.expand(*common, *x.shape[-own:]) for x in (query, key, value))
    return query, key, value


def require_mask(mask: Tensor, q: Tensor, shape: tuple[int, ...], name: str = "mask") -> Tensor:
    """Return a boolean or floating mask that broadcasts to `shape`."""
    if not isinstance(mask, Tensor):
        raise InvalidTypeError(name, f"must be a torch tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and mask.dtype not in _FLOATS:
        raise refuse_mask_dtype(name, mask.dtype)
    # Compared by name because importing the module takes a second. The elements of such a tensor are not the mask.
    if type(mask).__module__ == "torch.nn.attention.bias":
        raise InvalidTypeError(
            name, f"must be a tensor of elements, got {type(mask).__name__}; ask for a causal range by its argument"
        )
    _require_place(name, mask, q)
    require_mask_shape(name, mask.shape, shape)
    return mask


def _require_place(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise InvalidTypeError(name, f"must be on the queries' device {q.device}, got {tensor.device}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise InvalidTypeError(name, f"must be a dense strided tensor, got {_name_layout(tensor)}")


def _name_layout(tensor: Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"


def require_per_head(name: str, tensor: Tensor, q: Tensor) -> Tensor:
    """Return floating numbers per query head as a view in the shape of their field."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _FLOATS:
        came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        meaning = FIELDS[name].per_head
        raise InvalidTypeError(name, f"must be a floating tensor, one {meaning} per query head, got {came}")
    _require_place(name, tensor, q)
    shape = require_per_head_shape(name, tensor.shape, q.shape)
    return tensor if shape == tensor.shape else tensor.reshape(shape)


_NUMBERS = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)


def require_dropout(p: float, name: str = "dropout") -> float:
    """Return a probability as a float."""
    if isinstance(p, bool) or not isinstance(p, _NUMBERS):
        raise InvalidTypeError(name, f"must be a probability, got {p!r}")
    if not 0.0 <= p <= 1.0:
        raise InvalidValueError(name, f"must lie in [0, 1], got {p}")
    return float(p)


def require_finite_number(name: str, value: float, *, kind: str = "a number") -> float:
    """Return a finite number; like torch's scale, it may be a tensor of one number."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and value.dtype != torch.bool:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise InvalidTypeError(name, f"must be {kind}, got {value!r}")
    # A symbolic number of the compiler supports subtraction, but not isfinite.
    if not value - value == 0.0:
        raise InvalidValueError(name, f"must be finite, got {value}")
    return float(value)


def require_scale_tensor(name: str, scale: Tensor, q: Tensor, *, rows_known: bool = False) -> Tensor:
    """Return a floating scale that broadcasts to `[..., H, L]`; the engines check that it is finite."""
    if scale.dtype not in _FLOATS:
        raise InvalidTypeError(name, f"must be floating, got {scale.dtype}")
    if scale.dim():  # a tensor that is one number may lie anywhere, as torch has it
        _require_place(name, scale, q)
    require_scale_shape(name, "tensor", scale.shape, q.shape[:-1], rows_known)
    return scale.to(q.device)
