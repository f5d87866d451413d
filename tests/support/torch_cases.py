"""Calls of the tensor layer that several test modules share, and assertions against the NumPy reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import sqrtdk
from levels import RUNNING
from oracle import draw as draw_arrays
from sqrtdk import backends
from sqrtdk.statistics import ROW_FIELDS
from sqrtdk.torch import attention

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
FIELDS = ROW_FIELDS
DERIVED = (
    "max_weight",
    "sum_p2",
    "sum_p3",
    "effective_keys",
    "entropy_ratio",
    "saturation_index",
    "jacobian_trace",
    "jacobian_norm",
)
COUNTS = ("visible_keys", "max_key")

# torch behaves the same around the operation for every level of the kernel, so two backends are enough.
ON_THE_BEST_AND_THE_REFERENCE = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.parametrize("backend", sorted({RUNNING[0], RUNNING[-1]}), indirect=True, scope="module"),
    # Some calls need second derivatives, which torch computes on any backend.
    pytest.mark.filterwarnings("ignore::sqrtdk.errors.FallbackWarning"),
]


def to_tensor(array):
    """Return a tensor with its own memory; bfloat16 is passed as its bits."""
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_array(value):
    """Return a tensor as the NumPy array of the same numbers; other values are unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().resolve_neg()
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def widen(value):
    """Return floats as float64 arrays; booleans and values that are not tensors are unchanged."""
    value = to_array(value)
    floating = isinstance(value, np.ndarray) and value.dtype.kind != "b"
    return value.astype(np.float64) if floating else value


def draw(seed, q_shape, k_shape, d_v, dtype=torch.float64, sharpness=2.0):
    """Return q, k, v of a call with sharp attention, as tensors."""
    return tuple(torch.from_numpy(x).to(dtype) for x in draw_arrays(seed, q_shape, k_shape, d_v, sharpness=sharpness))


def draw_like(seed, tensor):
    """Return standard normal numbers of a tensor's shape and dtype."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(tensor.shape))).to(tensor.dtype)


def attend_in_reference(q, k, v, **call):
    """Return the same call by `sqrtdk.attention` with the NumPy reference in float64."""
    with backends.use(backends.REFERENCE):
        arrays = {name: widen(value) for name, value in call.items()}
        return sqrtdk.attention(widen(q), widen(k), widen(v), weights=True, **arrays)


def differentiate_in_reference(q, k, v, grad, **call):
    """Return gradients of the same call by `sqrtdk.attention_gradients`, in float64."""
    arrays = {name: widen(value) for name, value in call.items()}
    return sqrtdk.attention_gradients(widen(q), widen(k), widen(v), widen(grad), **arrays)


def unit(dtype):
    """Return the distance from 1 to the next number of a dtype."""
    return torch.finfo(dtype).eps


def assert_close(result, expected, tolerance, what):
    """Assert that numbers are within a tolerance of float64 numbers, with NaN and infinities at the same places."""
    np.testing.assert_allclose(widen(result), expected, rtol=tolerance, atol=tolerance, err_msg=what)


def assert_statistics(result, expected, dtype):
    """Assert that every field and derived number is the reference's, to the precision of the dtype."""
    tolerance = 1e-9 if dtype == torch.float64 else 3e-5
    for name in FIELDS:
        value = getattr(result, name)
        assert value.dtype == (torch.int64 if name in COUNTS else torch.float64), name
        assert value.shape == getattr(expected, name).shape, name
        assert not value.requires_grad, name
        if name in COUNTS:
            np.testing.assert_array_equal(value.numpy(), getattr(expected, name), err_msg=name)
        else:
            assert_close(value, getattr(expected, name), tolerance, name)
    for name in DERIVED:
        value = getattr(result, name)
        assert isinstance(value, torch.Tensor), name
        assert_close(value, getattr(expected, name), tolerance, name)


def assert_as_reference(q, k, v, **call):
    """Assert that output, weights and statistics of a call are those of the NumPy reference; return the result."""
    result = attention(q, k, v, weights=True, **call)
    expected = attend_in_reference(q, k, v, **call)
    assert result.output.dtype == result.weights.dtype == q.dtype
    assert result.output.shape == expected.output.shape
    assert result.weights.shape == expected.weights.shape
    # One rounding to the dtype, plus the errors of float32 if the computation uses float32.
    tolerance = 1e-12 if q.dtype == torch.float64 else 0.51 * unit(q.dtype) + 6e-6
    largest = max(1.0, float(np.nanmax(np.abs(expected.output), initial=0.0)))
    assert_close(result.output / largest, expected.output / largest, tolerance, "output")
    assert_close(result.weights, expected.weights, tolerance, "weights")
    assert_statistics(result.statistics, expected.statistics, q.dtype)
    return result


def assert_same_bits(one, other):
    """Assert that two results are equal to the bit: output, weights, every statistic (NaN equals NaN)."""
    torch.testing.assert_close(one.output, other.output, rtol=0, atol=0, equal_nan=True)
    if one.weights is not None and other.weights is not None:
        torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=0, equal_nan=True)
    if one.statistics is not None and other.statistics is not None:
        for name in FIELDS:
            left, right = getattr(one.statistics, name), getattr(other.statistics, name)
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True, msg=name)


def require_grad(*tensors):
    """Return the tensors as leaves that collect a gradient."""
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def everything(seed=0, dtype=torch.float64, queries=5, keys=6):
    """Return all features of a call at once for q `[2, 4, queries, ·]` and k `[2, 2, keys, ·]`."""
    rng = np.random.default_rng(seed)
    mask = np.where(rng.random((4, queries, keys)) < 0.8, rng.standard_normal((4, queries, keys)), -np.inf)
    return {
        "scale": torch.linspace(0.2, 2.0, 4 * queries, dtype=dtype).reshape(4, queries),
        "softcap": 3.0,
        "sinks": torch.tensor([0.5, -0.5, 1.0, 0.0], dtype=dtype),
        "mask": torch.from_numpy(mask).to(dtype),
        "causal": True,
        "causal_offset": 1,
        "window": (3, None),
    }


def everything_seen():
    """Return all features with a visible key in every row, because opcheck does not treat NaN as equal."""
    call = everything()
    call["mask"].diagonal(dim1=1, dim2=2).fill_(0.25)
    return call


CALLS = {
    "plain": {},
    "everything": everything_seen(),
    "boolean mask": {"mask": torch.from_numpy(np.random.default_rng(0).random((2, 1, 5, 6)) < 0.7), "scale": 0.7},
    "cosine": {"scale": "cosine"},
    "log_n": {"scale": "log_n", "causal": True, "causal_offset": 1},
    "log_n under a mask": {
        "scale": "log_n",
        "mask": torch.from_numpy(np.random.default_rng(1).random((2, 1, 5, 6)) < 0.8),
    },
    "sampled": {"sample_rows": 3},
}
"""Calls for the tensors of `small_tensors`, each with a feature that is hard for a tracer or a wrapper."""


def small_tensors(seed=0, dtype=torch.float64, queries=5, keys=6):
    """Return q `[2, 4, queries, 3]`, k `[2, 2, keys, 3]`, v `[2, 2, keys, 2]`."""
    return draw(seed, (2, 4, queries, 3), (2, 2, keys, 3), 2, dtype)


def assert_same_with_gradients(one, other, leaves, others=None):
    """Assert that two results agree, and so do the gradients of the same loss."""
    torch.testing.assert_close(one.output, other.output, rtol=1e-12, atol=1e-13)
    for name in FIELDS if other.statistics is not None else ():
        left, right = getattr(one.statistics, name), getattr(other.statistics, name)
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12, equal_nan=True, msg=name)
    grad = draw_like(9, other.output)
    result = torch.autograd.grad(one.output, leaves, grad)
    for left, right in zip(result, torch.autograd.grad(other.output, others or leaves, grad), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def seeded(function, seed=0):
    """Return the function with torch's generator seeded before each call and restored after it."""

    def call(*args):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return function(*args)

    return call
