"""The compiled kernel on arrays, and what its binding is given for arrays and tensors alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk.arguments import FLOATS, float_code
from sqrtdk.backends import Plan
from sqrtdk.call import Backward, Call, Forward, Slopes, Wanted
from sqrtdk.engines.describe import describe_blind

Array = npt.NDArray[Any]

# How kernel.h numbers mask kinds and bfloat16.
NO_MASK, BOOLEAN_MASK, FIRST_FLOAT_MASK = 0, 1, 2
_BFLOAT16 = FLOATS.index("bfloat16")


class Problem(NamedTuple):
    """`Problem` of kernel.h: arrays by their buffers, tensors as (address, bytes per element, shape, strides)."""

    dtype: int
    query: Any
    key: Any
    value: Any
    factor: float
    scale: Any
    mask_kind: int
    mask: Any
    first: int
    last: int
    softcap: float
    sinks: Any
    dropout: float
    seed: int


class Kernel:
    """The engine of the CPU: C++ on the level that `backends` chose."""

    name = "kernel"

    def takes(self, call: Call, wanted: Wanted | Slopes, plan: Plan) -> str | None:
        """Everything that arrays can ask for."""
        return None

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Output, statistics and weights from one pass; the arrays are read where they lie."""
        query, value = call.query, call.value
        dtype, rows = query.dtype, query.shape[:-1]
        counts = np.empty((2, *rows), np.int64) if wanted.statistics else None
        measures = np.empty((11, *rows)) if wanted.statistics else None
        if not (query.size and call.key.size):
            if counts is not None:
                describe_blind(counts, measures, call.sinks is not None)
            weights = np.zeros((*rows, call.key.shape[-2]), dtype) if wanted.weights else None
            return Forward(np.zeros((*rows, value.shape[-1]), dtype), measures, counts, weights)
        if not value.shape[-1]:  # values without features: the rows have statistics all the same
            padded = np.zeros((*value.shape[:-1], 1), dtype)
            whole = self.forward(call._replace(value=padded), wanted, plan)
            return whole._replace(output=whole.output[..., :0])
        problem = _as_problem(call)
        output = np.empty((*rows, value.shape[-1]), problem.query.dtype)
        weights = np.empty((*rows, call.key.shape[-2]), problem.query.dtype) if wanted.weights else None
        saved = np.empty((2, *rows)) if wanted.saved else None
        # ⟨grad, output⟩ of a rounded output would cost the gradients of peaked rows their digits.
        is_rounded = wanted.saved and dtype.itemsize < 4
        exact = np.empty(output.shape, np.float32) if is_rounded else None
        assert plan.forward is not None
        if not plan.forward(plan.level, plan.threads, *problem, output, measures, counts, 0, weights, saved, exact):
            return self.forward(_copy_misaligned(call), wanted, plan)
        if output.dtype is not dtype:
            output, weights = _as_given(output, dtype), None if weights is None else _as_given(weights, dtype)
        return Forward(output, measures, counts, weights, saved, exact)

    def backward(self, call: Call, slopes: Slopes, done: Forward, plan: Plan) -> Backward:
        """The gradients, from the forward pass's maxima and sums; without them it is run first."""
        query, key, value, rows = call.query, call.key, call.value, call.query.shape[:-1]
        to_scale = np.zeros(rows) if slopes.scale else None
        to_sinks = None if call.sinks is None else np.zeros(rows)
        if not (query.size and key.size and value.size):
            to_query, to_key, to_value = (np.zeros(x.shape, x.dtype) for x in (query, key, value))
            return Backward(to_query, to_key, to_value, to_scale, to_sinks)
        if call.has_far_softcap and query.dtype.itemsize < 8:
            double = np.float64
            wide = call._replace(query=query.astype(double), key=key.astype(double), value=value.astype(double))
            return self.backward(wide, slopes._replace(output=slopes.output.astype(double)), Forward(None), plan)
        if done.saved is None:
            done = self.forward(call, Wanted(saved=True), plan)
        problem = _as_problem(call)
        to_query, to_key, to_value = (np.empty(x.shape, problem.query.dtype) for x in (query, key, value))
        assert plan.backward is not None
        if not plan.backward(
            plan.level,
            plan.threads,
            *problem,
            done.saved,
            _as_kernel_reads(done.output if done.exact is None else done.exact),
            _as_kernel_reads(slopes.output),
            to_query,
            to_key,
            to_value,
            to_scale,
            to_sinks,
        ):
            slopes = slopes._replace(output=_align(slopes.output))
            return self.backward(_copy_misaligned(call), slopes, done, plan)
        to_query, to_key, to_value = (_as_given(x, query.dtype) for x in (to_query, to_key, to_value))
        return Backward(to_query, to_key, to_value, to_scale, to_sinks)


def _as_problem(call: Call) -> Problem:
    query, key, value, mask = call.query, call.key, call.value, call.mask
    code = float_code(query.dtype)
    if code == _BFLOAT16 or not query.dtype.isnative:
        query, key, value = _as_kernel_reads(query), _as_kernel_reads(key), _as_kernel_reads(value)
    mask_kind = NO_MASK
    if mask is not None:
        mask_kind = BOOLEAN_MASK if mask.dtype == np.bool_ else FIRST_FLOAT_MASK + float_code(mask.dtype)
        mask = _as_kernel_reads(mask)
    band = call.band
    return Problem(
        code,
        query,
        key,
        value,
        call.factor,
        call.scale,
        mask_kind,
        mask,
        band.first,
        band.last,
        call.softcap,
        call.sinks,
        call.dropout,
        0 if call.seed is None else int(call.seed),
    )


def _as_kernel_reads(array: Array) -> Array:
    """bfloat16, which has no buffer format, as uint16; the other byte order turned round."""
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _as_given(array: Array, dtype: np.dtype[Any]) -> Array:
    """What the kernel wrote, in the dtype of the call: its bits as bfloat16, or the other byte order."""
    return array.view(dtype) if array.dtype == np.uint16 else array.astype(dtype, copy=False)


def _copy_misaligned(call: Call) -> Call:
    """The call with every array copied whose elements do not lie at a multiple of their size."""

    mask = None if call.mask is None else _align(call.mask)
    return call._replace(query=_align(call.query), key=_align(call.key), value=_align(call.value), mask=mask)


def _align(array: Array) -> Array:
    return array if array.flags.aligned else array.copy()


KERNEL = Kernel()
