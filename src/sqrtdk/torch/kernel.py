"""The compiled kernel on tensors: addresses and strides go in, nothing is copied."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sqrtdk import backends
from sqrtdk.call import OPEN_ABOVE, OPEN_BELOW
from sqrtdk.torch.call import TensorCall
from sqrtdk.torch.team import find_team

# How kernel.h numbers dtypes and mask kinds.
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_BOOLEAN_MASK, _FIRST_FLOAT_MASK = 1, 2

# Looked up once: finding them by their full names takes as long as calling them.
_is_compiling = torch.compiler.is_compiling
_tracing_state: Callable[[], object] = torch._C._get_tracing_state
_count_modes = torch._C._len_torch_dispatch_stack
_peek_transforms = torch._C._functorch.peek_interpreter_stack
_is_autocast_enabled = torch.is_autocast_enabled
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_is_grad_enabled = torch.is_grad_enabled
_count_threads = torch.get_num_threads
_empty_like = torch.empty_like


def attend_directly(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Output, numbers and counts of the plain operation, causal from the start or not; None if anything is unusual.

    The way around all that other calls go through, which takes longer than computing a small one: plain tensors of one
    dtype on the CPU, shapes that fit, nobody who watches, no gradient. Whatever is refused here is checked, explained
    or computed by the longer way, so this may refuse too much, never too little.
    """
    if not is_unobserved() or type(causal) is not bool:
        return None
    try:
        dtype, shape, others = query.dtype, query.shape, key.shape
        if not (
            type(query) is type(key) is type(value) is Tensor
            and dtype is key.dtype is value.dtype
            and query.is_cpu
            and key.is_cpu
            and value.is_cpu
            and others == value.shape
            and (shape == others or (shape[:-2] == others[:-2] and shape[-1] == others[-1] and not causal))
            and len(shape) > 1
            and query.numel()
            and key.numel()
            and not (_is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
            and not (query.is_neg() or key.is_neg() or value.is_neg())
        ):
            return None
        plan = backends.plan()
        factor = 1.0 / math.sqrt(shape[-1]) if scale is None else scale
        if plan.forward is None or factor - factor != 0.0:
            return None
        at_query, at_key, at_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if not (at_query and at_key and at_value):  # zeros that are nowhere, a storage that was given back
            return None
        # Contiguous in any case: a query that is dense in another order would hand that order on.
        output = _empty_like(query) if query.is_contiguous() else query.new_empty(shape)
        numbers = query.new_empty((11, *shape[:-1]), dtype=torch.float64) if statistics else None
        counts = query.new_empty((2, *shape[:-1]), dtype=torch.int64) if statistics else None
        item = query.itemsize
        done = plan.forward(
            plan.level,
            min(_count_threads(), backends.MAX_THREADS),
            _CODES[dtype],
            (at_query, item, shape, query.stride()),
            (at_key, item, others, key.stride()),
            (at_value, item, others, value.stride()),
            factor,
            None,
            0,
            None,
            OPEN_BELOW,
            0 if causal else OPEN_ABOVE,
            0.0,
            None,
            (output.data_ptr(), item, shape, output.stride()),
            None if numbers is None else _view(numbers),
            None if counts is None else _view(counts),
            find_team(),
        )
    except (AttributeError, KeyError, RuntimeError):  # no tensor, no floating one, none with strides
        return None
    return (output, numbers, counts) if done else None


def is_unobserved() -> bool:
    """Whether nothing between Python and the kernel has to be told of a call: no tracer, mode, profiler or autocast."""
    return not (
        _is_compiling()
        or _tracing_state() is not None
        or _count_modes()
        or _peek_transforms() is not None
        or forward_ad._current_level >= 0
        or _is_autocast_enabled("cpu")
        or _is_profiling()
    )


def kernel_takes(call: TensorCall) -> bool:
    """Whether the kernel computes this kind of call: no dropout, no sampled rows, no sinks that differ in a batch.

    Nor tensors without elements, or without memory: zeros that torch keeps nowhere.
    """
    return bool(
        call.positions is None
        and call.dropout == 0.0
        and (call.sinks is None or call.sinks.dim() == 1)
        and call.query.numel()
        and call.value.numel()
        and all(x is None or x.data_ptr() for x in call[:5])
    )


def run_kernel(call: TensorCall, plan: backends.Plan, statistics: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, and numbers and counts if statistics are wanted, on as many threads as torch uses."""
    query, key, value, scale, mask, sinks, _, _, factor, softcap, first, last, _ = call
    assert plan.forward is not None
    # The imaginary part of a conjugate has the other sign in memory; the copy must live as long as its address.
    query, key, value = _as_in_memory(query), _as_in_memory(key), _as_in_memory(value)
    shape = query.shape
    if value.shape[-1] == shape[-1] and query.is_contiguous():
        output = _empty_like(query)
    else:
        output = query.new_empty((*shape[:-1], value.shape[-1]))
    numbers = query.new_empty((11, *shape[:-1]), dtype=torch.float64) if statistics else None
    counts = query.new_empty((2, *shape[:-1]), dtype=torch.int64) if statistics else None
    mask_kind = 0
    if mask is not None:
        mask = _as_in_memory(mask)
        mask_kind = _BOOLEAN_MASK if mask.dtype == torch.bool else _FIRST_FLOAT_MASK + _CODES[mask.dtype]
    if scale is not None:
        scale = _as_in_memory(scale.double())
    if sinks is not None:
        sinks = _as_in_memory(sinks.double()).contiguous()
    done = plan.forward(
        plan.level,
        min(_count_threads(), backends.MAX_THREADS),
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
        find_team(),
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
