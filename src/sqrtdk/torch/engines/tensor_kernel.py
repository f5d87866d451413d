"""The compiled kernel on tensors: addresses and strides go in, nothing is copied."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.arguments import FLOATS
from sqrtdk.backends import MAX_THREADS, Plan
from sqrtdk.call import (
    ARRAYS,
    BY_ROW,
    FIELDS,
    OPEN_ABOVE,
    OPEN_BELOW,
    TENSORS,
    Backward,
    Call,
    Forward,
    GradientRequest,
    Wanted,
)
from sqrtdk.engines.describe import describe_blind
from sqrtdk.engines.kernel import NO_MASK, kind_of_mask, pack
from sqrtdk.statistics import COUNTS, MEASURES
from sqrtdk.torch.internals import is_unobserved
from sqrtdk.torch.openmp import find_team

_CODES = {getattr(torch, name): code for code, name in enumerate(FLOATS)}
# What `record` is told of a plain call: output, saved, factor, last.
Plain = tuple[Tensor, npt.NDArray[np.float64] | None, float, int]
_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]

# Looked up once: finding them by their full names takes as long as calling them.
_is_grad_enabled = torch.is_grad_enabled
_count_threads = torch.get_num_threads
_empty_like = torch.empty_like
_empty_array = np.empty
_IN_ORDER = torch.contiguous_format

# What a plain call has in the place of further arrays and a seed, and of the numbers between factor and band.
_NO_ARRAYS = (*(None,) * (len(ARRAYS) - 3), 0)
_NO_NUMBERS = tuple(Call._field_defaults[name] for name in list(FIELDS)[TENSORS + 1 : -3])


class TensorKernel:
    """The engine of tensors on the CPU: C++ on as many threads as torch uses."""

    name = "kernel"

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Tensors that lie in memory; gradients but those of a mask, and from the output alone."""
        query = call.query
        if not query.is_cpu:
            return f"tensors are on {query.device}"
        if wanted.derivatives:
            return "its operations are not torch's"
        if type(wanted) is GradientRequest and (wanted.weights is not None or wanted.mask):
            return "it has no gradient of masks, nor from weights"
        if call.sinks is not None and call.sinks.dim() != 1:
            return "sinks differ within a batch"
        # Zeros that torch keeps nowhere, a storage that was given back.
        arrays = call.arrays
        for x in (*arrays, wanted.output) if type(wanted) is GradientRequest else arrays:
            if x is not None and not x.data_ptr() and x.numel():
                return "a tensor has no memory"
        return None

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Output, and statistics if wanted, from one pass."""
        query, value = call.query, call.value
        rows, d_v, keys = query.shape[:-1], value.shape[-1], call.key.shape[-2]
        if not (query.numel() and call.key.numel()):
            measures, counts = _make_statistics(query, rows) if wanted.statistics else (None, None)
            if counts is not None:
                describe_blind(counts, measures, call.sinks is not None)
            weights = query.new_zeros((*rows, keys)) if wanted.weights else None
            return Forward(query.new_zeros((*rows, d_v)), measures, counts, weights)
        if not d_v:  # values without features: the rows have statistics all the same
            padded = value.new_zeros((*value.shape[:-1], 1))
            whole = self.forward(call._replace(value=padded), wanted, plan)
            return whole._replace(output=whole.output[..., :0])
        # The copies that a call may need live as long as their addresses are in use.
        call = _as_in_memory(call)
        output = (
            _empty_like(query, memory_format=_IN_ORDER) if d_v == query.shape[-1] else query.new_empty((*rows, d_v))
        )
        measures, counts = _make_statistics(query, rows) if wanted.statistics else (None, None)
        weights = query.new_empty((*rows, keys)) if wanted.weights else None
        saved = query.new_empty((2, *rows), dtype=torch.float64) if wanted.saved else None
        # ⟨grad, output⟩ of a rounded output would cost the gradients of peaked rows their digits.
        is_rounded = wanted.saved and query.itemsize < 4
        exact = query.new_empty((*rows, d_v), dtype=torch.float32) if is_rounded else None
        assert plan.forward is not None
        done = plan.forward(
            plan.level,
            min(_count_threads(), MAX_THREADS),
            find_team(),
            *_as_problem(call),
            _view(output),
            None if measures is None else _view(measures),
            None if counts is None else _view(counts),
            None if weights is None else _view(weights),
            None if saved is None else _view(saved),
            None if exact is None else _view(exact),
        )
        if not done:
            return self.forward(_copy_misaligned(call), wanted, plan)
        return Forward(output, measures, counts, weights, saved, exact)

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """The gradients, from the forward pass's maxima and sums; without them it is run first."""
        query, key, value = call.query, call.key, call.value
        by_row = {name: query.new_zeros(call.rows, dtype=torch.float64) for name in BY_ROW if request.gives(name, call)}
        if not (query.numel() and key.numel() and value.numel()):
            return Backward(*(x.new_zeros(x.shape) for x in (query, key, value)), **by_row)
        if call.has_far_softcap and query.itemsize < 8:
            wide = self.backward(
                _widen(call, torch.float64), request._replace(output=request.output.double()), Forward(None), plan
            )
            to_query, to_key, to_value = (x.to(query.dtype) for x in (wide.query, wide.key, wide.value))
            return wide._replace(query=to_query, key=to_key, value=to_value)
        exact = done.exact if query.itemsize < 4 else done.output
        if done.saved is None or exact is None:
            done = self.forward(call, Wanted(saved=True), plan)
            exact = done.output if done.exact is None else done.exact
        call, output, slope = _as_in_memory(call), exact.contiguous(), request.output.resolve_neg()
        gradients = [_empty_like(x, memory_format=_IN_ORDER) for x in (query, key, value)]
        assert plan.backward is not None
        if not plan.backward(
            plan.level,
            min(_count_threads(), MAX_THREADS),
            find_team(),
            *_as_problem(call),
            done.saved if type(done.saved) is np.ndarray else _view(done.saved.contiguous()),
            _view(output),
            _view(slope),
            *map(_view, gradients),
            *(_view(by_row[name]) if name in by_row else None for name in BY_ROW),
        ):
            request = request._replace(output=_align(request.output))
            return self.backward(_copy_misaligned(call), request, done, plan)
        return Backward(*gradients, **by_row)

    @staticmethod
    def shortcut(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        causal: bool,
        statistics: bool,
        record: Callable[[Tensor, Tensor, Tensor, Plain], Tensor],
    ) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Output, measures and counts of the plain operation, causal from the start or not; None if it is unusual.

        Before there is a `Call`: the way around all that takes longer than computing a small one. Plain tensors
        of one dtype on the CPU, shapes that fit, nobody who watches. Whatever is refused here is checked, explained or
        computed by the longer way, so this may refuse too much, never too little. It is one function because a call of
        another costs a fiftieth of it.

        Args:
            record: gives the output a history, where a gradient is needed.
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
                and shape[-1]
                and not (query.is_neg() or key.is_neg() or value.is_neg())
            ):
                return None
            plan, item = backends.plan(), query.itemsize
            factor = 1.0 / math.sqrt(shape[-1]) if scale is None else scale
            if plan.forward is None or factor - factor != 0.0:
                return None
            at_query, at_key, at_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
            # No elements, zeros that are nowhere, a storage that was given back.
            if not (at_query and at_key and at_value):
                return None
            is_recorded = _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
            if is_recorded and item < 4:  # gradients need more of the output than its own digits
                return None
            output = _empty_like(query, memory_format=_IN_ORDER)
            measures, counts = _make_statistics(query, shape[:-1]) if statistics else (None, None)
            # NumPy makes an array in a sixth of the time that torch takes for a tensor.
            saved = _empty_array((2, *shape[:-1])) if is_recorded else None
            last = 0 if causal else OPEN_ABOVE
            threads = _count_threads()
            if not plan.forward(
                plan.level,
                threads if threads < MAX_THREADS else MAX_THREADS,
                find_team(),
                _CODES[dtype],
                NO_MASK,
                (at_query, item, shape, query.stride()),
                (at_key, item, others, key.stride()),
                (at_value, item, others, value.stride()),
                *_NO_ARRAYS,
                factor,
                *_NO_NUMBERS,
                OPEN_BELOW,
                last,
                0,
                (output.data_ptr(), item, shape, output.stride()),
                None if measures is None else _view(measures),
                None if counts is None else _view(counts),
                None,
                saved,
            ):
                return None
        except (AttributeError, KeyError, RuntimeError):  # no tensor, no floating one, none with strides
            return None
        if is_recorded:
            output = record(query, key, value, (output, saved, factor, last))
        return output, measures, counts


TENSOR_KERNEL = TensorKernel()


def _make_statistics(query: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Measures and counts beside the query, whatever the default device is."""
    measures = query.new_empty((len(MEASURES), *rows), dtype=torch.float64)
    return measures, query.new_empty((len(COUNTS), *rows), dtype=torch.int64)


def _as_problem(call: Call) -> tuple[Any, ...]:
    mask, mask_kind = call.mask, NO_MASK
    if mask is not None:
        mask_kind = kind_of_mask(None if mask.dtype == torch.bool else _CODES[mask.dtype])
    views = tuple(None if x is None else _view(x) for x in call.arrays)
    return pack(call, _CODES[call.query.dtype], mask_kind, views)


def _view(tensor: Tensor) -> _View:
    return tensor.data_ptr(), tensor.itemsize, tensor.shape, tensor.stride()


def _as_in_memory(call: Call) -> Call:
    """The call with every tensor as the kernel reads it: those of rows and heads in float64, signs as they are written.

    The imaginary part of a conjugate has the other sign in memory.
    """
    query, key, value, *others = call.arrays
    if all(x is None for x in others) and not (query.is_neg() or key.is_neg() or value.is_neg()):
        return call
    changes = {}
    for name, x in zip(ARRAYS, call.arrays, strict=True):
        if x is not None:
            changes[name] = (x.double().contiguous() if name in BY_ROW else x).resolve_neg()
    return call._replace(**changes)


def _widen(call: Call, dtype: torch.dtype) -> Call:
    """The call with q, k and v in a precision in which their gradients keep their digits."""
    return call._replace(query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))


def _copy_misaligned(call: Call) -> Call:
    """The call with every tensor copied whose elements do not lie at a multiple of their size."""
    return call._replace(**{name: _align(getattr(call, name)) for name in ARRAYS})


def _align(tensor: Any) -> Any:
    return tensor if tensor is None or tensor.data_ptr() % tensor.itemsize == 0 else tensor.clone()
