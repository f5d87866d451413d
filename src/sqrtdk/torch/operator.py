"""The operators sqrtdk::forward and sqrtdk::backward: what torch.compile, vmap and the dispatcher see of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.errors import InvalidValueError
from sqrtdk.torch import chunked
from sqrtdk.torch.call import Backward, Forward, TensorCall, wide_dtype
from sqrtdk.torch.kernel import is_unobserved, kernel_takes, run_kernel

_LIBRARY: Any = torch.library.Library("sqrtdk", "DEF")  # type: ignore[no-untyped-call]

_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? scale, Tensor? mask, Tensor? sinks, Tensor? positions, "
    "Tensor? seed, float factor, float softcap, SymInt first, SymInt last, float dropout"
)
_LIBRARY.define(f"forward({_CALL}, bool statistics, bool weights) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"backward({_CALL}, Tensor grad_output, Tensor? grad_weights, bool scale_too, bool mask_too) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_PLAIN = (Tensor, torch.nn.Parameter)


def run_forward(call: TensorCall, statistics: bool, weights: bool) -> Forward:
    """The forward pass: straight into the kernel where nobody watches, by way of the dispatcher everywhere else.

    The dispatcher and the Python function behind it cost more than all the rest of a small call.
    """
    if _goes_directly(call):
        return _forward_on_cpu(call, statistics, weights)
    return Forward(*torch.ops.sqrtdk.forward.default(*call, statistics, weights))


def run_backward(
    call: TensorCall, grad_output: Tensor, grad_weights: Tensor | None, *, scale_too: bool, mask_too: bool
) -> Backward:
    """The gradients of a call, by recomputation in blocks of rows."""
    return Backward(*torch.ops.sqrtdk.backward.default(*call, grad_output, grad_weights, scale_too, mask_too))


def _goes_directly(call: TensorCall) -> bool:
    query, key, value, scale, mask, sinks = call[:6]
    return (
        query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and type(query) in _PLAIN
        and type(key) in _PLAIN
        and type(value) in _PLAIN
        # A subclass may have no memory of its own.
        and (scale is None or type(scale) in _PLAIN)
        and (mask is None or type(mask) in _PLAIN)
        and (sinks is None or type(sinks) in _PLAIN)
        and is_unobserved()
    )


def _forward_on_cpu(call: TensorCall, statistics: bool, weights: bool) -> Forward:
    """The kernel where it takes the call, else torch in blocks; None for what was not asked for."""
    if call.scale is not None or call.sinks is not None:
        _require_finite(call)
    plan = backends.plan()
    if plan.forward is None or not kernel_takes(call):
        output, numbers, counts, every = chunked.attend(call, statistics=statistics, weights=weights)
        return Forward(
            output, numbers if statistics else None, counts if statistics else None, every if weights else None
        )
    output, numbers, counts = run_kernel(call, plan, statistics)
    every = chunked.attend(call, statistics=False, weights=True, output=False).weights if weights else None
    return Forward(output, numbers, counts, every)


def _require_finite(call: TensorCall) -> None:
    """Refuse a scale or sinks with NaN or infinity; only on the CPU, where looking does not stall a device."""
    for name, tensor in (("scale", call.scale), ("sinks", call.sinks)):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise InvalidValueError(f"{name} must be finite, got {tensor}")


def _forward_of_cpu(*arguments: Any) -> Forward:
    *given, statistics, weights = arguments
    call = TensorCall(*given)
    found = _forward_on_cpu(call, statistics, weights)
    dtypes = (call.query.dtype, torch.float64, torch.int64, call.query.dtype)
    return Forward(*(_nothing(call.query, dtype) if x is None else x for x, dtype in zip(found, dtypes, strict=True)))


def _forward_of_any(*arguments: Any) -> Forward:
    *given, statistics, weights = arguments
    return chunked.attend(TensorCall(*given), statistics=statistics, weights=weights)


def _backward_of_any(*arguments: Any) -> Backward:
    *given, grad_output, grad_weights, scale_too, mask_too = arguments
    call = TensorCall(*given)
    # The gradient mode may be on where a transform calls: the blocks are written in place.
    with torch.no_grad():
        return chunked.differentiate(call, grad_output, grad_weights, scale_too=scale_too, mask_too=mask_too)


def _nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def _forward_shapes(*arguments: Any) -> Forward:
    *given, statistics, weights = arguments
    call = TensorCall(*given)
    query = call.query
    rows = query.shape[:-1]
    wide = wide_dtype(query.device)
    return Forward(
        query.new_empty((*rows, call.value.shape[-1])),
        query.new_empty((11, *rows), dtype=wide) if statistics else _nothing(query, wide),
        query.new_empty((2, *rows), dtype=torch.int64) if statistics else _nothing(query, torch.int64),
        query.new_empty((*rows, call.key.shape[-2])) if weights else _nothing(query, query.dtype),
    )


def _backward_shapes(*arguments: Any) -> Backward:
    *given, _, _, scale_too, mask_too = arguments
    call = TensorCall(*given)
    query, mask = call.query, call.mask
    rows, wide = query.shape[:-1], wide_dtype(query.device)
    return Backward(
        query.new_empty(query.shape),
        query.new_empty(call.key.shape),
        query.new_empty(call.value.shape),
        query.new_empty(rows if scale_too else 0, dtype=wide),
        query.new_empty(0 if call.sinks is None else rows, dtype=wide),
        query.new_empty(0) if mask is None or not mask_too else query.new_empty(mask.shape, dtype=mask.dtype),
    )


def _to_front(tensor: Any, axis: Any, size: int, rank: int) -> Any:
    """A tensor with its mapped axis in front and padded to `rank` axes behind it; expanded where it is not mapped."""
    if tensor is None:
        return None
    moved = tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return moved.reshape(size, *(1,) * (rank - moved.dim() + 1), *moved.shape[1:])


def _map_call(size: int, in_dims: Any, given: Any) -> tuple[TensorCall, int, bool]:
    """A call of one rank more, its first axis the mapped one; the rank of the calls within; whether they had no heads.

    One head `[L, D]` is given an axis of heads, so the rank is at least 3.
    """
    call, axes = TensorCall(*given), TensorCall(*in_dims)
    own = call.query.dim() - (axes.query is not None)
    rank = max(own, 3)
    mapped = call._replace(
        query=_to_front(call.query, axes.query, size, rank),
        key=_to_front(call.key, axes.key, size, rank),
        value=_to_front(call.value, axes.value, size, rank),
        scale=_to_front(call.scale, axes.scale, size, rank - 1),
        mask=_to_front(call.mask, axes.mask, size, rank),
        # One-dimensional sinks are the same for all; the kernel takes no others.
        sinks=call.sinks if axes.sinks is None else _to_front(call.sinks, axes.sinks, size, rank - 2),
    )
    return mapped, rank, own == 2


def _map_by_entry(operator: Any, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """One call after the other: what dropout draws hangs on seed and shape of a call, so both must be its own."""
    every = [
        operator(*(x if axis is None else x.select(axis, at) for x, axis in zip(arguments, in_dims, strict=True)))
        for at in range(size)
    ]
    found = tuple(torch.stack(entries) for entries in zip(*every, strict=True))
    return found, (0,) * len(found)


def _map_forward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    *given, statistics, weights = arguments
    if TensorCall(*given).dropout:
        return _map_by_entry(torch.ops.sqrtdk.forward.default, info.batch_size, in_dims, arguments)
    call, _, headless = _map_call(info.batch_size, in_dims[:-2], given)
    found = torch.ops.sqrtdk.forward.default(*call, statistics, weights)
    axes = (0, int(statistics), int(statistics), 0)
    return _unmap(found, axes, headless, info.batch_size), axes


def _map_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    *given, grad_output, grad_weights, scale_too, mask_too = arguments
    size = info.batch_size
    if TensorCall(*given).dropout:
        return _map_by_entry(torch.ops.sqrtdk.backward.default, size, in_dims, arguments)
    call, rank, headless = _map_call(size, in_dims[:-4], given)
    *found, to_mask = torch.ops.sqrtdk.backward.default(
        *call,
        _to_front(grad_output, in_dims[-4], size, rank),
        _to_front(grad_weights, in_dims[-3], size, rank),
        scale_too,
        mask_too,
    )
    own = (0,)
    if mask_too:
        own = given[4].shape if in_dims[4] is None else given[4].movedim(in_dims[4], 0).shape[1:]
    return (*_unmap(found, (0,) * 5, headless, size), to_mask.reshape(size, *own)), (0,) * 6


def _unmap(found: Any, axes: tuple[int, ...], headless: bool, size: int) -> tuple[Tensor, ...]:
    """Results without the axis of heads that headless calls were given; what is not there is mapped as well."""
    return tuple(
        x.new_empty((size, 0)) if x.dim() == 1 else x.squeeze(axis + 1) if headless else x
        for x, axis in zip(found, axes, strict=True)
    )


def _register() -> None:
    _LIBRARY.impl("forward", _forward_of_cpu, "CPU")
    _LIBRARY.impl("forward", _forward_of_any, "CompositeExplicitAutograd")
    _LIBRARY.impl("backward", _backward_of_any, "CompositeExplicitAutograd")
    library: Any = torch.library
    library.register_fake("sqrtdk::forward", _forward_shapes, lib=_LIBRARY)
    library.register_fake("sqrtdk::backward", _backward_shapes, lib=_LIBRARY)
    library.register_vmap("sqrtdk::forward", _map_forward, lib=_LIBRARY)
    library.register_vmap("sqrtdk::backward", _map_backward, lib=_LIBRARY)


_register()
