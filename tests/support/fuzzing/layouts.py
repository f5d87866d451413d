"""Copies of arrays in other memory layouts: all kinds of strides, odd addresses, unusual byte orders."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

_FOR_BOTH = ("plain", "transposed", "sliced", "broadcast", "misaligned")
FOR_TENSORS = (*_FOR_BOTH, "conjugate", "nowhere")
FOR_ARRAYS = (*_FOR_BOTH, "negative", "read-only")


def lay_out(array, layout, rng):
    """Return the array with its shape and dtype in another layout; `broadcast` repeats an axis, `nowhere` has zeros."""
    if layout == "byte order":  # bfloat16 and booleans have only one byte order
        return array.astype(array.dtype.newbyteorder(">")) if array.dtype.kind == "f" else array
    if layout in ("plain", "conjugate") or not array.size:  # only torch has conjugates, see `to_tensor`
        return array
    if layout == "nowhere":
        return np.zeros_like(array)
    axis = int(rng.integers(array.ndim))
    if layout == "transposed":
        other = int(rng.integers(array.ndim))
        return np.ascontiguousarray(array.swapaxes(axis, other)).swapaxes(axis, other)
    if layout == "sliced":
        # The memory between the elements is NaN, so that reading it shows.
        step = int(rng.integers(2, 4))
        room = [2 * size + 1 for size in array.shape]
        room[axis] = step * array.shape[axis] + 1
        memory = np.full(room, True if array.dtype == bool else np.nan, dtype=array.dtype)
        view = memory[tuple(slice(1, 1 + size) for size in array.shape)]
        if rng.random() < 0.5:
            at = [slice(1, 1 + size) for size in array.shape]
            at[axis] = slice(1, 1 + step * array.shape[axis], step)
            view = memory[tuple(at)]
        view[...] = array
        return view
    if layout == "broadcast":
        first = array[tuple(slice(0, 1) if i == axis else slice(None) for i in range(array.ndim))]
        return np.broadcast_to(first, array.shape)
    if layout == "misaligned":
        memory = np.zeros(array.nbytes + 1, dtype=np.uint8)
        view = memory[1:].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view
    if layout == "negative":
        return np.flip(np.ascontiguousarray(np.flip(array, axis)), axis)
    assert layout == "read-only"
    array = array.copy()
    array.flags.writeable = False
    return array


def with_odd_bytes(mask, rng):
    """Return the same boolean mask with True stored as random bytes other than 0."""
    odd = rng.integers(1, 256, mask.shape, dtype=np.uint8)
    return np.where(mask, odd, 0).astype(np.uint8).view(bool)


def is_true(mask):
    """Return which entries of a boolean mask are True, for any bytes."""
    return mask.view(np.uint8) != 0


def to_tensor(array, layout="plain"):
    """Return a tensor on the same memory with the same strides; bfloat16 is passed as its bits.

    In the layout `conjugate` the tensor is the imaginary part of a conjugate, stored with the opposite sign. In the
    layout `nowhere` the tensor holds zeros without memory.
    """
    array = np.asarray(array)
    if layout == "nowhere" and array.size and not array.astype(bool).any():
        return torch._efficientzerotensor(array.shape, dtype=getattr(torch, array.dtype.name))
    if layout == "conjugate" and array.dtype.name in ("float32", "float64"):
        return torch.complex(torch.from_numpy(array), torch.from_numpy(-array)).conj().imag
    if not array.flags.writeable:
        # torch would warn of memory that is not writeable; a repeated axis stays repeated.
        kept = tuple(
            slice(0, 1) if stride == 0 and size else slice(None)
            for stride, size in zip(array.strides, array.shape, strict=True)
        )
        return to_tensor(array[kept].copy()).expand(array.shape)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(tensor):
    """Return the NumPy array of a tensor's numbers."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
