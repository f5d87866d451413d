"""The compiled kernel on arrays, and the arguments of its binding for arrays and tensors alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk.backends import Plan
from sqrtdk.operation.arguments import FLOATS, float_code
from sqrtdk.operation.call import ARRAYS, BY_ROW, Backward, Call, Forward, GradientRequest, Wanted, list_numbers
from sqrtdk.operation.engines.row_statistics import describe_blind
from sqrtdk.statistics import COUNTS, MEASURES

Array = npt.NDArray[Any]

# The numbers of mask kinds in kernel.h.
NO_MASK, BOOLEAN_MASK, FIRST_FLOAT_MASK = 0, 1, 2
VECTORS = ("query", "key", "value")
_empty = np.empty
_BFLOAT16 = FLOATS.index("bfloat16")


def pack(call: Call, code: int, mask_kind: int, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return the binding's arguments for a call: arrays as buffers, or tensors as (address, bytes per element, shape,
    strides), then the numbers, in the order of kernel.h."""
    return (code, mask_kind, *arrays, 0 if call.seed is None else int(call.seed), *list_numbers(call))


def kind_of_mask(code: int | None) -> int:
    """Return the number that kernel.h gives to a mask of the float dtype `code`, or to a boolean one (None)."""
    return BOOLEAN_MASK if code is None else FIRST_FLOAT_MASK + code


class KernelCaller(ABC):
    """The CPU engine: C++ on the level that `backends` chose.

    Subclasses read and make arrays or tensors; the steps of a call are the same for both.
    """

    name = "kernel"
    integer: Any
    single: Any
    double: Any

    @abstractmethod
    def make(self, like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Return uninitialised memory for the kernel's results beside `like`, in the dtype that the binding takes."""

    @abstractmethod
    def make_zeros(self, like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Return zeros beside `like`, in its dtype."""

    @abstractmethod
    def run(self, kernel: Any, plan: Plan, call: Call, others: tuple[Any, ...]) -> bool:
        """Run the kernel on the call and the other arrays it reads and writes; False if elements are not aligned."""

    @abstractmethod
    def read(self, saved: Any, output: Any, grad_output: Any) -> tuple[Any, Any, Any]:
        """Return the numbers that a backward pass starts from, as the kernel reads them."""

    @abstractmethod
    def convert(self, x: Any, dtype: Any) -> Any:
        """Return what the kernel wrote in the caller's dtype."""

    @abstractmethod
    def align(self, x: Any) -> Any:
        """Return a copy if elements do not lie at multiples of their size, else the argument."""

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Return the output, and statistics and weights if wanted, from one pass over the inputs in place."""
        query, value, make = call.query, call.value, self.make
        dtype, rows, d_v, keys = query.dtype, query.shape[:-1], value.shape[-1], call.key.shape[-2]
        measures = make(query, (len(MEASURES), *rows), self.double) if wanted.statistics else None
        counts = make(query, (len(COUNTS), *rows), self.integer) if wanted.statistics else None
        if 0 in query.shape or not keys:
            if counts is not None:
                describe_blind(counts, measures, call.sinks is not None)
            weights = self.make_zeros(query, (*rows, keys)) if wanted.weights else None
            return Forward(self.make_zeros(query, (*rows, d_v)), measures, counts, weights)
        output = make(query, (*rows, d_v))
        weights = make(query, (*rows, keys)) if wanted.weights else None
        saved = make(query, (2, *rows), self.double) if wanted.saved else None
        # ⟨grad, output⟩ of a rounded output would cost the gradients of peaked rows their digits.
        exact = make(query, (*rows, d_v), self.single) if wanted.saved and query.itemsize < 4 else None
        if not self.run(plan.forward, plan, call, (output, measures, counts, weights, saved, exact)):
            return self.forward(self._align_call(call), wanted, plan)
        if output.dtype is not dtype:
            output, weights = self.convert(output, dtype), None if weights is None else self.convert(weights, dtype)
        return Forward(output, measures, counts, weights, saved, exact)

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """Return the gradients from the forward pass's maxima and sums; without them the forward pass is run first."""
        query, dtype, vectors = call.query, call.query.dtype, call[:3]
        by_row = {name: self.make_zeros(query, call.rows, self.double) for name in BY_ROW if request.gives(name, call)}
        if any(0 in x.shape for x in vectors):
            return Backward(*(self.make_zeros(x, x.shape) for x in vectors), **by_row)
        if call.has_far_softcap and query.itemsize < 8:
            *wide, grad_output = (self.convert(x, self.double) for x in (*vectors, request.output))
            widened = call._replace(query=wide[0], key=wide[1], value=wide[2])
            gradients = self.backward(widened, request._replace(output=grad_output), Forward(None), plan)
            return gradients._replace(**{name: self.convert(getattr(gradients, name), dtype) for name in VECTORS})
        exact = done.exact if query.itemsize < 4 else done.output
        if done.saved is None or exact is None:
            done = self.forward(call, Wanted(saved=True), plan)
            exact = done.output if done.exact is None else done.exact
        written = [self.make(x, x.shape) for x in vectors]
        others = (*self.read(done.saved, exact, request.output), *written, *map(by_row.get, BY_ROW))
        if not self.run(plan.backward, plan, call, others):
            request = request._replace(output=self.align(request.output))
            return self.backward(self._align_call(call), request, done, plan)
        return Backward(*(self.convert(x, dtype) for x in written), **by_row)

    def _align_call(self, call: Call) -> Call:
        return call._replace(**{name: self.align(getattr(call, name)) for name in ARRAYS})


class Kernel(KernelCaller):
    """The kernel's engine for arrays."""

    integer, single, double = np.int64, np.dtype(np.float32), np.dtype(np.float64)

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Return None: the kernel computes every call of arrays."""
        return None

    def make(self, like: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Return an uninitialised array."""
        return _empty(shape, _raw_dtype(like.dtype) if dtype is None else dtype)

    def make_zeros(self, like: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Return an array of zeros."""
        return np.zeros(shape, like.dtype if dtype is None else dtype)

    def run(self, kernel: Any, plan: Plan, call: Call, others: tuple[Any, ...]) -> bool:
        """Run the kernel on as many threads as `backends` says."""
        done: bool = kernel(plan.level, plan.threads, 0, *_as_problem(call), *others)
        return done

    def read(self, saved: Array, output: Array, grad_output: Array) -> tuple[Array, Array, Array]:
        """Return the arrays in the dtypes that the binding takes."""
        return saved, _as_kernel_reads(output), _as_kernel_reads(grad_output)

    def convert(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """Return an array in another dtype: bits read as bfloat16, the other byte order, or rounded."""
        if x.dtype is dtype:
            return x
        if x.dtype == np.uint16:
            return x.view(dtype)
        with np.errstate(all="ignore"):
            return x.astype(dtype, copy=False)

    def align(self, x: Any) -> Any:
        """Return a copy of an array that NumPy calls unaligned."""
        return x if x is None or x.flags.aligned else x.copy()


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
    """Return the dtype that the binding takes: uint16 for bfloat16, which has no buffer format; native byte order."""
    if dtype.name == "bfloat16":
        return np.dtype(np.uint16)
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _as_kernel_reads(array: Array) -> Array:
    raw = _raw_dtype(array.dtype)
    return array if raw is array.dtype else array.view(raw) if raw == np.uint16 else array.astype(raw)


KERNEL = Kernel()
