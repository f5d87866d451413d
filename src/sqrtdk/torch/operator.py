"""The operators sqrtdk::forward and sqrtdk::backward, for torch.compile, vmap and the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.errors import InvalidValueError
from sqrtdk.operation.call import (
    ARRAYS,
    BY_ROW,
    FIELDS,
    Backward,
    Call,
    Forward,
    GradientRequest,
    Wanted,
    flatten,
    restore,
)
from sqrtdk.statistics import COUNTS, MEASURES
from sqrtdk.torch.engines.choose import choose_engine
from sqrtdk.torch.engines.tiles import wide_dtype

_LIBRARY: Any = torch.library.Library("sqrtdk", "DEF")  # type: ignore[no-untyped-call]

_CALL = ", ".join(f"{field.schema} {name}" for name, field in FIELDS.items())
_FLAT = len(FIELDS)


def _define(name: str, further: Iterable[str], results: tuple[str, ...]) -> None:
    _LIBRARY.define(f"{name}({', '.join((_CALL, *further))}) -> ({', '.join('Tensor' for _ in results)})")


def _schema_of(request: str) -> str:
    default = GradientRequest._field_defaults.get(request, "")
    return f"{'bool' if isinstance(default, bool) else 'Tensor?' if default is None else 'Tensor'} request_{request}"


# Without the last item of `Wanted` and `GradientRequest`: operators have derivatives by autograd only.
_define("forward", (f"bool want_{name}" for name in Wanted._fields[:-1]), Forward._fields)
_define(
    "backward", ("Tensor? output", "Tensor? saved", *map(_schema_of, GradientRequest._fields[:-1])), Backward._fields
)


def run_forward(call: Call, wanted: Wanted) -> Forward:
    """Return the forward pass through the dispatcher, where observers see it and the engine is chosen."""
    done = Forward(*torch.ops.sqrtdk.forward.default(*flatten(call), *wanted[:-1]))
    if not wanted.statistics:
        done = done._replace(measures=None, counts=None)
    if not wanted.saved:
        done = done._replace(saved=None, exact=None)
    return done if wanted.weights else done._replace(weights=None)


def run_backward(call: Call, request: GradientRequest, done: Forward) -> Backward:
    """Return the gradients of a call through the dispatcher."""
    saved = torch.from_numpy(done.saved) if isinstance(done.saved, np.ndarray) else done.saved
    gradients = torch.ops.sqrtdk.backward.default(*flatten(call), done.output, saved, *request[:-1])
    named = zip(Backward._fields, gradients, strict=True)
    return Backward(*(x if request.gives(name, call) else None for name, x in named))


def register_autograd(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Register the function that autograd runs for the forward operator, of dispatch keys and flat arguments."""
    _LIBRARY.impl("forward", kernel, "Autograd", with_keyset=True)
    return kernel


def drop_unsaved(done: Forward) -> Forward:
    """Return the results without the zeros that stand for saved numbers where an engine saved none."""
    saved = done.saved
    is_there = saved is not None and saved.numel() and bool(saved.reshape(2, -1)[:, 0].any())
    return done if is_there else done._replace(saved=None)


def require_finite(call: Call) -> None:
    """Refuse a scale, sinks or slopes with NaN or infinity; only on the CPU, where reading does not stall a device."""
    for name in BY_ROW:
        tensor = getattr(call, name)
        # x − x is NaN unless x is finite: half the time of `isfinite`.
        if tensor is not None and tensor.is_cpu and bool((tensor - tensor).any()):
            raise InvalidValueError(name, f"must be finite, got {tensor}")


def _forward(*flat: Any) -> Forward:
    call, wanted = restore(flat[:_FLAT]), Wanted(*flat[_FLAT:])
    require_finite(call)
    plan = backends.plan()
    done = choose_engine(call, wanted, plan).forward(call, wanted, plan)
    query = call.query
    if wanted.saved and done.saved is None and query.is_cpu:
        # The graph was traced with saved numbers; a maximum and a sum of 0 mean that there are none (`drop_unsaved`).
        done = done._replace(saved=query.new_zeros((2, *call.rows), dtype=torch.float64))
    if _has_exact(query, wanted) and done.exact is None:
        done = done._replace(exact=done.output.float())
    dtypes = (query.dtype, wide_dtype(query.device), torch.int64, query.dtype, torch.float64, torch.float32)
    return Forward(*(_nothing(query, dtype) if x is None else x for x, dtype in zip(done, dtypes, strict=True)))


def _backward(*flat: Any) -> Backward:
    call = restore(flat[:_FLAT])
    output, saved, *given = flat[_FLAT:]
    request, plan = GradientRequest(*given), backends.plan()
    done = drop_unsaved(Forward(output, saved=saved, exact=output))
    gradients = choose_engine(call, request, plan).backward(call, request, done, plan)
    return Backward(*(_nothing(call.query, torch.float64) if x is None else x for x in gradients))


def _has_exact(query: Tensor, wanted: Wanted) -> bool:
    return wanted.saved and query.is_cpu and query.itemsize < 4


def _nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def _forward_shapes(*flat: Any) -> Forward:
    call, wanted = restore(flat[:_FLAT]), Wanted(*flat[_FLAT:])
    query = call.query
    rows, wide = query.shape[:-1], wide_dtype(query.device)
    return Forward(
        query.new_empty((*rows, call.value.shape[-1])),
        query.new_empty((len(MEASURES), *rows), dtype=wide) if wanted.statistics else _nothing(query, wide),
        query.new_empty((len(COUNTS), *rows), dtype=torch.int64) if wanted.statistics else _nothing(query, torch.int64),
        query.new_empty((*rows, call.key.shape[-2])) if wanted.weights else _nothing(query, query.dtype),
        query.new_empty((2, *rows) if wanted.saved and query.is_cpu else 0, dtype=torch.float64),
        query.new_empty((*rows, call.value.shape[-1]) if _has_exact(query, wanted) else 0, dtype=torch.float32),
    )


def _backward_shapes(*flat: Any) -> Backward:
    call, request = restore(flat[:_FLAT]), GradientRequest(*flat[_FLAT + 2 :])
    query: Tensor = call.query
    wide = wide_dtype(query.device)

    def make(name: str) -> Tensor:
        if not request.gives(name, call):
            return _nothing(query, torch.float64)
        if name in BY_ROW:
            return query.new_empty(query.shape[:-1], dtype=wide)
        like = getattr(call, name)
        return query.new_empty(like.shape, dtype=like.dtype)

    return Backward(*map(make, Backward._fields))


def _to_front(tensor: Any, axis: Any, size: int, rank: int) -> Any:
    """Return a tensor with its mapped axis in front, padded to `rank` axes behind it; expanded if it is not mapped."""
    if tensor is None:
        return None
    moved = tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return moved.reshape(size, *(1,) * (rank - moved.dim() + 1), *moved.shape[1:])


def _map_call(size: int, in_dims: Any, flat: Any) -> tuple[tuple[Any, ...], int, bool]:
    """A flat call of one rank more, its first axis the mapped one; the rank of the calls within; whether they had no
    heads. One head `[L, D]` is given an axis of heads, so the rank is at least 3."""
    own = flat[0].dim() - (in_dims[0] is not None)
    rank = max(own, 3)
    mapped = []
    for name, x, axis in zip(ARRAYS, flat, in_dims, strict=False):
        lacks = FIELDS[name].lacks or 0
        # Arrays with one number per head are the same for all calls; the kernel takes no other sinks.
        mapped.append(x if lacks == 2 and axis is None else _to_front(x, axis, size, rank - lacks))
    return (*mapped, *flat[len(ARRAYS) :]), rank, own == 2


def _map_by_entry(operator: Any, size: int, in_dims: tuple[Any, ...], flat: tuple[Any, ...]) -> tuple[Any, Any]:
    """Run one call after another: dropout uses each call's own seed and row numbers."""
    results = [
        operator(*(x if axis is None else x.select(axis, at) for x, axis in zip(flat, in_dims, strict=True)))
        for at in range(size)
    ]
    stacked = tuple(torch.stack(entries) for entries in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _map_forward(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
    if restore(flat[:_FLAT]).dropout:
        return _map_by_entry(torch.ops.sqrtdk.forward.default, info.batch_size, in_dims, flat)
    call, _, headless = _map_call(info.batch_size, in_dims[:_FLAT], flat[:_FLAT])
    done = Forward(*torch.ops.sqrtdk.forward.default(*call, *flat[_FLAT:]))
    # Blocks of several numbers per row have that axis in front of the mapped one.
    blocks = ("measures", "counts", "saved")
    axes = tuple(int(name in blocks and x.dim() > 1) for name, x in done._asdict().items())
    return _unmap(done, axes, headless, info.batch_size), axes


def _map_backward(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[Any, Any]:
    size = info.batch_size
    if restore(flat[:_FLAT]).dropout:
        return _map_by_entry(torch.ops.sqrtdk.backward.default, size, in_dims, flat)
    call, rank, headless = _map_call(size, in_dims[:_FLAT], flat[:_FLAT])
    request, axes = GradientRequest(*flat[_FLAT + 2 :]), GradientRequest(*in_dims[_FLAT + 2 :])
    request = request._replace(
        output=_to_front(request.output, axes.output, size, rank),
        weights=_to_front(request.weights, axes.weights, size, rank),
    )
    # The numbers saved by single calls are not those of the joint call: the engine recomputes them.
    gradients = Backward(*torch.ops.sqrtdk.backward.default(*call, None, None, *request[:-1]))
    every = (0,) * len(gradients)
    result = Backward(*_unmap(gradients, every, headless, size))
    if request.mask:
        mask, axis = restore(flat[:_FLAT]).mask, in_dims[ARRAYS.index("mask")]
        own = mask.shape if axis is None else mask.movedim(axis, 0).shape[1:]
        result = result._replace(mask=gradients.mask.reshape(size, *own))
    return tuple(result), every


def _unmap(results: Any, axes: tuple[int, ...], headless: bool, size: int) -> tuple[Tensor, ...]:
    """Return results without the head axis that headless calls were given; absent results are mapped as well."""
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
