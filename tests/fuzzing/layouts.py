"""The same numbers in other memory: strides of every kind, odd addresses, bytes that are not the usual ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

_FOR_BOTH = ("plain", "transposed", "sliced", "broadcast", "misaligned")
FOR_TENSORS = (*_FOR_BOTH, "conjugate", "nowhere")
FOR_ARRAYS = (*_FOR_BOTH, "negative", "read-only")


def lay_out(array, layout, rng):
    """An array of the same shape and dtype in another layout; `broadcast` repeats an axis, `nowhere` holds zeros."""
    if layout == "byte order":  # bfloat16 and booleans have no other one
        return array.astype(array.dtype.newbyteorder(">")) if array.dtype.kind == "f" else array
    if layout in ("plain", "conjugate") or not array.size:  # torch alone has the latter, see `to_tensor`
        return array
    if layout == "nowhere":
        return np.zeros_like(array)
    axis = int(rng.integers(array.ndim))
    if layout == "transposed":
        other = int(rng.integers(array.ndim))
        return np.ascontiguousarray(array.swapaxes(axis, other)).swapaxes(axis, other)
    if layout == "sliced":
        # What lies between the elements is NaN: reading it shows.
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
    """The same boolean mask, its True stored as any byte but 0."""
    odd = rng.integers(1, 256, mask.shape, dtype=np.uint8)
    return np.where(mask, odd, 0).astype(np.uint8).view(bool)


def is_true(mask):
    """Which entries of a boolean mask are True, whatever their bytes."""
    return mask.view(np.uint8) != 0


def to_tensor(array, layout="plain"):
    """A tensor on the same memory, strides and all; bfloat16 crosses as its bits.

    In the layout `conjugate` it is the imaginary part of a conjugate, whose sign is the other one in memory; in the
    layout `nowhere` zeros that torch keeps in no memory.
    """
    array = np.asarray(array)
    if layout == "nowhere" and array.size and not array.astype(bool).any():
        return torch._efficientzerotensor(array.shape, dtype=getattr(torch, array.dtype.name))
    if layout == "conjugate" and array.dtype.name in ("float32", "float64"):
        return torch.complex(torch.from_numpy(array), torch.from_numpy(-array)).conj().imag
    if not array.flags.writeable:
        # torch would warn; a repeated axis is kept.
        kept = tuple(
            slice(0, 1) if stride == 0 and size else slice(None)
            for stride, size in zip(array.strides, array.shape, strict=True)
        )
        return to_tensor(array[kept].copy()).expand(array.shape)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(tensor):
    """The NumPy array of a tensor's numbers."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
