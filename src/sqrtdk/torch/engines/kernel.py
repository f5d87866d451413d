"""The compiled kernel on tensors: it gets addresses and strides, and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.backends import MAX_THREADS, Plan
from sqrtdk.operation.arguments import FLOATS
from sqrtdk.operation.call import ARRAYS, BY_ROW, FIELDS, TENSORS, Call, GradientRequest, Wanted
from sqrtdk.operation.engines.kernel import NO_MASK, KernelCaller, kind_of_mask, pack
from sqrtdk.operation.visibility import OPEN_ABOVE, OPEN_BELOW
from sqrtdk.scales import known_default_factor
from sqrtdk.statistics import COUNTS, MEASURES
from sqrtdk.torch.engines.openmp import find_team
from sqrtdk.torch.internals import is_recorded, is_unobserved

DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(FLOATS)}
"""The numbers of dtypes in kernel.h."""

# Arguments of `record` for a plain call: output, saved, factor, last.
Plain = tuple[Tensor, npt.NDArray[np.float64] | None, float, int]
_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]

# Looked up once: the attribute lookups take as long as the calls.
_count_threads = torch.get_num_threads
_empty_like = torch.empty_like
_empty_array = np.empty
_Array = np.ndarray
_IN_ORDER = torch.contiguous_format

# Values of a plain call for further arrays and the seed, and for the numbers between factor and band.
_NO_ARRAYS = (*(None,) * (len(ARRAYS) - 3), 0)
_NO_NUMBERS = tuple(Call._field_defaults[name] for name in list(FIELDS)[TENSORS + 1 : -3])


class TensorKernel(KernelCaller):
    """The kernel's engine for tensors on the CPU, on as many threads as torch uses."""

    integer, single, double = torch.int64, torch.float32, torch.float64

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Return None, or the reason: only tensors in CPU memory, no gradients of masks, none from weights."""
        query = call.query
        if not query.is_cpu:
            return f"tensors are on {query.device}"
        if wanted.derivatives:
            return "its operations are not torch's"
        if type(wanted) is GradientRequest and (wanted.weights is not None or wanted.mask):
            return "it has no gradient of masks, nor from weights"
        if call.sinks is not None and call.sinks.dim() != 1:
            return "sinks differ within a batch"
        # Some tensors have no memory: zeros that torch does not store, a freed storage.
        arrays = call.arrays
        for x in (*arrays, wanted.output) if type(wanted) is GradientRequest else arrays:
            if x is not None and not x.data_ptr() and x.numel():
                return "a tensor has no memory"
        return None

    def make(self, like: Tensor, shape: tuple[int, ...], dtype: Any = None) -> Tensor:
        """Return an uninitialised tensor."""
        if dtype is None and shape == like.shape:
            return _empty_like(like, memory_format=_IN_ORDER)
        return like.new_empty(shape, dtype=dtype)

    def make_zeros(self, like: Tensor, shape: tuple[int, ...], dtype: Any = None) -> Tensor:
        """Return a tensor of zeros."""
        return like.new_zeros(shape, dtype=dtype)

    def run(self, kernel: Any, plan: Plan, call: Call, others: tuple[Any, ...]) -> bool:
        """Run the kernel on addresses and strides."""
        # Keeps the copies that a call may need alive while their addresses are in use.
        call = _as_in_memory(call)
        problem, threads = _as_problem(call), min(_count_threads(), MAX_THREADS)
        shown = [x if x is None or type(x) is _Array else _view(x) for x in others]
        done: bool = kernel(plan.level, threads, find_team(), *problem, *shown)
        return done

    def read(self, saved: Any, output: Tensor, grad_output: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return the tensors in row order, with signs as they are in memory."""
        return (
            saved if type(saved) is np.ndarray else saved.contiguous(),
            output.contiguous(),
            grad_output.resolve_neg(),
        )

    def convert(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor in another dtype."""
        return x if x.dtype is dtype else x.to(dtype)

    def align(self, x: Any) -> Any:
        """Return a copy of a tensor whose address is no multiple of its element size."""
        return x if x is None or x.data_ptr() % x.itemsize == 0 else x.clone()

    @staticmethod
    def shortcut(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Any,
        causal: Any,
        statistics: bool,
        record: Callable[[Tensor, Tensor, Tensor, Plain], Tensor],
    ) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Return output, measures and counts of a plain call, causal from the start or not; None for any other call.

        It skips the steps that take longer than computing a small call, before a `Call` exists. A plain call has plain
        tensors of one dtype on the CPU and shapes that fit, and nothing observes it. Every other call is checked,
        explained or computed by the longer path, so this function may refuse too much, never too little. It is one
        function because a call of another costs a fiftieth of it.

        Args:
            record: gives the output an autograd history if a gradient is needed.
        """
        if (scale is not None and type(scale) is not float) or type(causal) is not bool or not is_unobserved():
            return None
        try:
            dtype, shape, others, values = query.dtype, query.shape, key.shape, value.shape
            if not (
                type(query) is type(key) is type(value) is Tensor
                and dtype is key.dtype is value.dtype
                and query.is_cpu
                and key.is_cpu
                and value.is_cpu
                and (others == values or others[:-1] == values[:-1])
                and (shape == others or (shape[:-2] == others[:-2] and shape[-1] == others[-1] and not causal))
                and len(shape) > 1
                and shape[-1]
                and not (query.is_neg() or key.is_neg() or value.is_neg())
            ):
                return None
            plan, item = backends.plan(), query.itemsize
            factor = known_default_factor(shape[-1]) if scale is None else scale
            if plan.forward is None or factor - factor != 0.0:
                return None
            at_query, at_key, at_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
            # No elements, zeros that torch does not store, or a freed storage.
            if not (at_query and at_key and (at_value or not values[-1])):
                return None
            has_history = is_recorded(query, key, value)
            if has_history and item < 4:  # gradients need more of the output than its own digits
                return None
            if others == values:
                output = _empty_like(query, memory_format=_IN_ORDER)
            else:
                output = query.new_empty((*shape[:-1], values[-1]))
            measures, counts = _make_statistics(query, shape[:-1]) if statistics else (None, None)
            # NumPy makes an array in a sixth of the time that torch takes for a tensor.
            saved = _empty_array((2, *shape[:-1])) if has_history else None
            last = 0 if causal else OPEN_ABOVE
            threads = _count_threads()
            if not plan.forward(
                plan.level,
                threads if threads < MAX_THREADS else MAX_THREADS,
                find_team(),
                DTYPE_CODES[dtype],
                NO_MASK,
                (at_query, item, shape, query.stride()),
                (at_key, item, others, key.stride()),
                (at_value, item, values, value.stride()),
                *_NO_ARRAYS,
                factor,
                *_NO_NUMBERS,
                OPEN_BELOW,
                last,
                0,
                (output.data_ptr(), item, output.shape, output.stride()),
                None if measures is None else _view(measures),
                None if counts is None else _view(counts),
                None,
                saved,
            ):
                return None
        except (AttributeError, KeyError, RuntimeError):  # not a tensor, not floating, without strides
            return None
        if has_history:
            output = record(query, key, value, (output, saved, factor, last))
        return output, measures, counts


TENSOR_KERNEL = TensorKernel()


def _make_statistics(query: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return measures and counts on the query's device, whatever the default device is."""
    measures = query.new_empty((len(MEASURES), *rows), dtype=torch.float64)
    return measures, query.new_empty((len(COUNTS), *rows), dtype=torch.int64)


def _as_problem(call: Call) -> tuple[Any, ...]:
    mask, mask_kind = call.mask, NO_MASK
    if mask is not None:
        mask_kind = kind_of_mask(None if mask.dtype == torch.bool else DTYPE_CODES[mask.dtype])
    views = [None if x is None else _view(x) for x in call.arrays]
    return pack(call, DTYPE_CODES[call.query.dtype], mask_kind, views)


def _view(tensor: Tensor) -> _View:
    return tensor.data_ptr(), tensor.itemsize, tensor.shape, tensor.stride()


def _as_in_memory(call: Call) -> Call:
    """Return the call as the kernel reads it: tensors per row or head in float64, signs as in memory.

    The imaginary part of a conjugate view has the opposite sign in memory.
    """
    query, key, value, *others = call.arrays
    is_so = not (query.is_neg() or key.is_neg() or value.is_neg())
    for x in others:  # half the time of `all`
        is_so = is_so and x is None
    if is_so:
        return call
    changes = {}
    for name, x in zip(ARRAYS, call.arrays, strict=True):
        if x is not None:
            changes[name] = (x.double().contiguous() if name in BY_ROW else x).resolve_neg()
    return call._replace(**changes)
