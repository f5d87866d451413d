"""The compiled kernel on tensors: addresses and strides go in, nothing is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.torch.call import TensorCall

# How kernel.h numbers dtypes and mask kinds.
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_BOOLEAN_MASK, _FIRST_FLOAT_MASK = 1, 2


def kernel_takes(call: TensorCall) -> bool:
    """Whether the kernel computes this kind of call: no dropout, no sampled rows, no sinks that differ in a batch."""
    return bool(
        call.positions is None
        and call.dropout == 0.0
        and (call.sinks is None or call.sinks.dim() == 1)
        and call.query.numel()
        and call.value.numel()
    )


def run_kernel(call: TensorCall, plan: backends.Plan, statistics: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, and numbers and counts if statistics are wanted, on as many threads as torch uses."""
    query, key, value, scale, mask, sinks, _, _, factor, softcap, first, last, _ = call
    assert plan.forward is not None
    # The imaginary part of a conjugate has the other sign in memory; the copy must live as long as its address.
    query, key, value = _as_in_memory(query), _as_in_memory(key), _as_in_memory(value)
    shape = query.shape
    if value.shape[-1] == shape[-1] and query.is_contiguous():
        output = torch.empty_like(query)
    else:
        output = query.new_empty((*shape[:-1], value.shape[-1]))
    numbers = query.new_empty((11, *shape[:-1]), dtype=torch.float64) if statistics else None
    counts = query.new_empty((2, *shape[:-1]), dtype=torch.int64) if statistics else None
    mask_kind = 0
    if mask is not None:
        mask = _as_in_memory(mask)
        mask_kind = _BOOLEAN_MASK if mask.dtype == torch.bool else _FIRST_FLOAT_MASK + _CODES[mask.dtype]
    if scale is not None:
        scale = _as_in_memory(scale.double() * factor)
    if sinks is not None:
        sinks = _as_in_memory(sinks.double()).contiguous()
    done = plan.forward(
        plan.level,
        min(torch.get_num_threads(), backends.MAX_THREADS),
        _CODES[query.dtype],
        _view(query),
        _view(key),
        _view(value),
        factor,
        None if scale is None else _view(scale),
        mask_kind,
        None if mask is None else _view(mask),
        first,
        last,
        softcap,
        None if sinks is None else _view(sinks),
        _view(output),
        None if numbers is None else _view(numbers),
        None if counts is None else _view(counts),
    )
    return (output, numbers, counts) if done else run_kernel(_copy_misaligned(call), plan, statistics)


def _as_in_memory(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _view(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tensor.itemsize, tensor.shape, tensor.stride()


def _copy_misaligned(call: TensorCall) -> TensorCall:
    """The call with every tensor copied whose elements do not lie at a multiple of their size."""

    def aligned(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor

    return call._replace(
        query=aligned(call.query),
        key=aligned(call.key),
        value=aligned(call.value),
        scale=None if call.scale is None else aligned(call.scale),
        mask=None if call.mask is None else aligned(call.mask),
    )
