"""The compiled kernel on arrays, and what its binding is given for arrays and tensors alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk.arguments import FLOATS, float_code
from sqrtdk.backends import Plan
from sqrtdk.call import ARRAYS, BY_ROW, TENSORS, Backward, Call, Forward, GradientRequest, Wanted, flatten
from sqrtdk.engines.describe import describe_blind
from sqrtdk.statistics import COUNTS, MEASURES

Array = npt.NDArray[Any]

# How kernel.h numbers mask kinds and bfloat16.
NO_MASK, BOOLEAN_MASK, FIRST_FLOAT_MASK = 0, 1, 2
_BFLOAT16 = FLOATS.index("bfloat16")


def pack(call: Call, code: int, mask_kind: int, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the binding is told of a call: its arrays by their buffers, tensors as (address, bytes per element, shape,
    strides), then its numbers, in the order of kernel.h."""
    return (code, mask_kind, *arrays, 0 if call.seed is None else int(call.seed), *flatten(call)[TENSORS:])


def kind_of_mask(code: int | None) -> int:
    """How kernel.h numbers a mask of the float dtype `code`, or a boolean one."""
    return BOOLEAN_MASK if code is None else FIRST_FLOAT_MASK + code


class Kernel:
    """The engine of the CPU: C++ on the level that `backends` chose."""

    name = "kernel"

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Everything that arrays can ask for."""
        return None

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Output, statistics and weights from one pass; the arrays are read where they lie."""
        query, value = call.query, call.value
        dtype, rows = query.dtype, query.shape[:-1]
        counts = np.empty((len(COUNTS), *rows), np.int64) if wanted.statistics else None
        measures = np.empty((len(MEASURES), *rows)) if wanted.statistics else None
        if not (query.size and call.key.size):
            if counts is not None:
                describe_blind(counts, measures, call.sinks is not None)
            weights = np.zeros((*rows, call.key.shape[-2]), dtype) if wanted.weights else None
            return Forward(np.zeros((*rows, value.shape[-1]), dtype), measures, counts, weights)
        if not value.shape[-1]:  # values without features: the rows have statistics all the same
            padded = np.zeros((*value.shape[:-1], 1), dtype)
            whole = self.forward(call._replace(value=padded), wanted, plan)
            return whole._replace(output=whole.output[..., :0])
        raw = _raw_dtype(dtype)
        output = np.empty((*rows, value.shape[-1]), raw)
        weights = np.empty((*rows, call.key.shape[-2]), raw) if wanted.weights else None
        saved = np.empty((2, *rows)) if wanted.saved else None
        # ⟨grad, output⟩ of a rounded output would cost the gradients of peaked rows their digits.
        is_rounded = wanted.saved and dtype.itemsize < 4
        exact = np.empty(output.shape, np.float32) if is_rounded else None
        assert plan.forward is not None
        if not plan.forward(
            plan.level, plan.threads, 0, *_as_problem(call), output, measures, counts, weights, saved, exact
        ):
            return self.forward(_copy_misaligned(call), wanted, plan)
        if output.dtype is not dtype:
            output, weights = _as_given(output, dtype), None if weights is None else _as_given(weights, dtype)
        return Forward(output, measures, counts, weights, saved, exact)

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """The gradients, from the forward pass's maxima and sums; without them it is run first."""
        query, key, value = call.query, call.key, call.value
        by_row = {name: np.zeros(call.rows) for name in BY_ROW if request.gives(name, call)}
        if not (query.size and key.size and value.size):
            return Backward(*(np.zeros(x.shape, x.dtype) for x in (query, key, value)), **by_row)
        if call.has_far_softcap and query.dtype.itemsize < 8:
            double = np.float64
            wide = call._replace(query=query.astype(double), key=key.astype(double), value=value.astype(double))
            return self.backward(wide, request._replace(output=request.output.astype(double)), Forward(None), plan)
        if done.saved is None:
            done = self.forward(call, Wanted(saved=True), plan)
        raw = _raw_dtype(query.dtype)
        gradients = [np.empty(x.shape, raw) for x in (query, key, value)]
        assert plan.backward is not None
        if not plan.backward(
            plan.level,
            plan.threads,
            0,
            *_as_problem(call),
            done.saved,
            _as_kernel_reads(done.output if done.exact is None else done.exact),
            _as_kernel_reads(request.output),
            *gradients,
            *map(by_row.get, BY_ROW),
        ):
            request = request._replace(output=_align(request.output))
            return self.backward(_copy_misaligned(call), request, done, plan)
        return Backward(*(_as_given(x, query.dtype) for x in gradients), **by_row)


def _as_problem(call: Call) -> tuple[Any, ...]:
    dtype, mask = call.query.dtype, call.mask
    code, mask_kind = float_code(dtype), NO_MASK
    arrays: tuple[Any, ...] = call.arrays
    if mask is not None:
        mask_kind = kind_of_mask(None if mask.dtype == np.bool_ else float_code(mask.dtype))
    if mask is not None or code == _BFLOAT16 or not dtype.isnative:
        arrays = tuple(None if x is None else _as_kernel_reads(x) for x in arrays)
    return pack(call, code, mask_kind, arrays)


@cache
def _raw_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which numbers cross: bfloat16, which has no buffer format, as uint16; in this byte order."""
    if dtype.name == "bfloat16":
        return np.dtype(np.uint16)
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _as_kernel_reads(array: Array) -> Array:
    raw = _raw_dtype(array.dtype)
    return array if raw is array.dtype else array.view(raw) if raw == np.uint16 else array.astype(raw)


def _as_given(array: Array, dtype: np.dtype[Any]) -> Array:
    """What the kernel wrote, in the dtype of the call: its bits as bfloat16, or the other byte order."""
    return array.view(dtype) if array.dtype == np.uint16 else array.astype(dtype, copy=False)


def _copy_misaligned(call: Call) -> Call:
    """The call with every array copied whose elements do not lie at a multiple of their size."""

    return call._replace(**{name: _align(getattr(call, name)) for name in ARRAYS})


def _align(array: Any) -> Any:
    return array if array is None or array.flags.aligned else array.copy()


KERNEL = Kernel()
