"""The operators sqrtdk::forward and sqrtdk::backward: what torch.compile, vmap and the dispatcher see of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.call import FLAT_TENSORS, Backward, Call, Forward, Slopes, Wanted, flatten, restore
from sqrtdk.errors import InvalidValueError
from sqrtdk.torch.engines import choose_engine
from sqrtdk.torch.tiles import wide_dtype

_LIBRARY: Any = torch.library.Library("sqrtdk", "DEF")  # type: ignore[no-untyped-call]

_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? scale, Tensor? mask, Tensor? sinks, Tensor? seed, "
    "float factor, float softcap, float dropout, SymInt first, SymInt last"
)
_LIBRARY.define(
    f"forward({_CALL}, bool statistics, bool weights, bool saved) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    f"backward({_CALL}, Tensor? output, Tensor? saved, Tensor grad_output, Tensor? grad_weights, bool scale_too, "
    "bool mask_too) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_WANTED, _SLOPES = 3, 6  # how many arguments follow those of the call


def run_forward(call: Call, wanted: Wanted) -> Forward:
    """The forward pass by way of the dispatcher: whoever watches is told, and the choice of an engine is made there."""
    done = torch.ops.sqrtdk.forward.default(*flatten(call), *wanted[:_WANTED])
    is_there = (True, wanted.statistics, wanted.statistics, wanted.weights, wanted.saved, wanted.saved)
    return Forward(*(x if there else None for x, there in zip(done, is_there, strict=True)))


def run_backward(call: Call, slopes: Slopes, done: Forward) -> Backward:
    """The gradients of a call by way of the dispatcher."""
    saved = torch.from_numpy(done.saved) if isinstance(done.saved, np.ndarray) else done.saved
    gradients = torch.ops.sqrtdk.backward.default(*flatten(call), done.output, saved, *slopes[:4])
    is_there = (True, True, True, slopes.scale, call.sinks is not None, slopes.mask)
    return Backward(*(x if there else None for x, there in zip(gradients, is_there, strict=True)))


def register_autograd(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of the dispatch keys and the flat arguments what autograd sees of the forward operator."""
    _LIBRARY.impl("forward", kernel, "Autograd", with_keyset=True)
    return kernel


def drop_unsaved(done: Forward) -> Forward:
    """Without the zeros that the operator gives where an engine saved nothing for the backward pass."""
    saved = done.saved
    is_there = saved is not None and saved.numel() and bool(saved.reshape(2, -1)[:, 0].any())
    return done if is_there else done._replace(saved=None)


def require_finite(call: Call) -> None:
    """Refuse a scale or sinks with NaN or infinity; only on the CPU, where looking does not stall a device."""
    for name, tensor in (("scale", call.scale), ("sinks", call.sinks)):
        if tensor is not None and tensor.is_cpu and not bool(torch.isfinite(tensor).all()):
            raise InvalidValueError(name, f"must be finite, got {tensor}")


def _forward(*flat: Any) -> Forward:
    call, wanted = restore(flat[:-_WANTED]), Wanted(*flat[-_WANTED:])
    require_finite(call)
    plan = backends.plan()
    done = choose_engine(call, wanted, plan).forward(call, wanted, plan)
    query = call.query
    if wanted.saved and done.saved is None and query.is_cpu:
        # The graph was traced with them: a largest logit and a sum of 0 say that there are none (`drop_unsaved`).
        done = done._replace(saved=query.new_zeros((2, *call.rows), dtype=torch.float64))
    if _has_exact(query, wanted) and done.exact is None:
        done = done._replace(exact=done.output.float())
    dtypes = (query.dtype, wide_dtype(query.device), torch.int64, query.dtype, torch.float64, torch.float32)
    return Forward(*(_nothing(query, dtype) if x is None else x for x, dtype in zip(done, dtypes, strict=True)))


def _backward(*flat: Any) -> Backward:
    call = restore(flat[:-_SLOPES])
    output, saved, *given = flat[-_SLOPES:]
    slopes, plan = Slopes(*given), backends.plan()
    done = drop_unsaved(Forward(output, saved=saved, exact=output))
    gradients = choose_engine(call, slopes, plan).backward(call, slopes, done, plan)
    return Backward(*(_nothing(call.query, torch.float64) if x is None else x for x in gradients))


def _has_exact(query: Tensor, wanted: Wanted) -> bool:
    return wanted.saved and query.is_cpu and query.itemsize < 4


def _nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def _forward_shapes(*flat: Any) -> Forward:
    call, wanted = restore(flat[:-_WANTED]), Wanted(*flat[-_WANTED:])
    query = call.query
    rows, wide = query.shape[:-1], wide_dtype(query.device)
    return Forward(
        query.new_empty((*rows, call.value.shape[-1])),
        query.new_empty((11, *rows), dtype=wide) if wanted.statistics else _nothing(query, wide),
        query.new_empty((2, *rows), dtype=torch.int64) if wanted.statistics else _nothing(query, torch.int64),
        query.new_empty((*rows, call.key.shape[-2])) if wanted.weights else _nothing(query, query.dtype),
        query.new_empty((2, *rows) if wanted.saved and query.is_cpu else 0, dtype=torch.float64),
        query.new_empty((*rows, call.value.shape[-1]) if _has_exact(query, wanted) else 0, dtype=torch.float32),
    )


def _backward_shapes(*flat: Any) -> Backward:
    call, slopes = restore(flat[:-_SLOPES]), Slopes(*flat[-_SLOPES + 2 :])
    query, mask, has_sinks = call.query, call.mask, call.sinks is not None
    rows, wide = query.shape[:-1], wide_dtype(query.device)
    return Backward(
        query.new_empty(query.shape),
        query.new_empty(call.key.shape),
        query.new_empty(call.value.shape),
        query.new_empty(rows if slopes.scale else 0, dtype=wide if slopes.scale else torch.float64),
        query.new_empty(rows if has_sinks else 0, dtype=wide if has_sinks else torch.float64),
        query.new_empty(mask.shape, dtype=mask.dtype) if slopes.mask else _nothing(query, torch.float64),
    )


def _to_front(tensor: Any, axis: Any, size: int, rank: int) -> Any:
    """A tensor with its mapped axis in front and padded to `rank` axes behind it; expanded where it is not mapped."""
    if tensor is None:
        return None
    moved = tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return moved.reshape(size, *(1,) * (rank - moved.dim() + 1), *moved.shape[1:])


def _map_call(size: int, in_dims: Any, flat: Any) -> tuple[tuple[Any, ...], int, bool]:
    """A flat call of one rank more, its first axis the mapped one; the rank of the calls within; whether they had no
    heads. One head `[L, D]` is given an axis of heads, so the rank is at least 3."""
    query, axes = flat[0], in_dims
    own = query.dim() - (axes[0] is not None)
    rank = max(own, 3)
    # What each tensor's rank must be beside a call of this rank: query, key, value, scale, mask.
    ranks = (rank, rank, rank, rank - 1, rank)
    mapped = [_to_front(x, axis, size, own_rank) for x, axis, own_rank in zip(flat, axes, ranks, strict=False)]
    # One-dimensional sinks are the same for all; the kernel takes no others.
    sinks = flat[5] if axes[5] is None else _to_front(flat[5], axes[5], size, rank - 2)
    return (*mapped, sinks, *flat[FLAT_TENSORS - 1 :]), rank, own == 2


def _map_by_entry(operator: Any, size: int, in_dims: tuple[Any, ...], flat: tuple[Any, ...]) -> tuple[Any, Any]:
    """One call after the other: dropout draws by a call's own seed and the numbers of its own rows."""
    results = [
        operator(*(x if axis is None else x.select(axis, at) for x, axis in zip(flat, in_dims, strict=True)))
        for at in range(size)
    ]
    stacked = tuple(torch.stack(entries) for entries in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _map_forward(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
    if restore(flat[:-_WANTED]).dropout:
        return _map_by_entry(torch.ops.sqrtdk.forward.default, info.batch_size, in_dims, flat)
    call, _, headless = _map_call(info.batch_size, in_dims[:-_WANTED], flat[:-_WANTED])
    wanted = Wanted(*flat[-_WANTED:])
    done = torch.ops.sqrtdk.forward.default(*call, *flat[-_WANTED:])
    axes = (0, int(wanted.statistics), int(wanted.statistics), 0, int(done[4].dim() > 1), 0)
    return _unmap(done, axes, headless, info.batch_size), axes


def _map_backward(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
    size = info.batch_size
    if restore(flat[:-_SLOPES]).dropout:
        return _map_by_entry(torch.ops.sqrtdk.backward.default, size, in_dims, flat)
    call, rank, headless = _map_call(size, in_dims[:-_SLOPES], flat[:-_SLOPES])
    _, _, grad_output, grad_weights, scale_too, mask_too = flat[-_SLOPES:]
    axes = in_dims[-_SLOPES:]
    # What the forward pass saved of each call is not what it would have saved of all: the engine computes it anew.
    *gradients, to_mask = torch.ops.sqrtdk.backward.default(
        *call,
        None,
        None,
        _to_front(grad_output, axes[2], size, rank),
        _to_front(grad_weights, axes[3], size, rank),
        scale_too,
        mask_too,
    )
    own = (0,)
    if mask_too:
        mask = flat[4]
        own = mask.shape if in_dims[4] is None else mask.movedim(in_dims[4], 0).shape[1:]
    return (*_unmap(gradients, (0,) * 5, headless, size), to_mask.reshape(size, *own)), (0,) * 6


def _unmap(results: Any, axes: tuple[int, ...], headless: bool, size: int) -> tuple[Tensor, ...]:
    """Results without the axis of heads that headless calls were given; what is not there is mapped as well."""
    return tuple(
        x.new_empty((size, 0)) if x.dim() == 1 else x.squeeze(axis + 1) if headless else x
        for x, axis in zip(results, axes, strict=True)
    )


def _register() -> None:
    _LIBRARY.impl("forward", _forward, "CompositeExplicitAutograd")
    _LIBRARY.impl("backward", _backward, "CompositeExplicitAutograd")
    library: Any = torch.library
    library.register_fake("sqrtdk::forward", _forward_shapes, lib=_LIBRARY)
    library.register_fake("sqrtdk::backward", _backward_shapes, lib=_LIBRARY)
    library.register_vmap("sqrtdk::forward", _map_forward, lib=_LIBRARY)
    library.register_vmap("sqrtdk::backward", _map_backward, lib=_LIBRARY)


_register()
