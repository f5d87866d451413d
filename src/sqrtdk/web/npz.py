"""Reads q, k and v from an .npz that nobody vouches for: no pickle, bounded sizes, every fault named."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.web.experiment import BOUNDS, MOST_PRODUCTS

Array = npt.NDArray[Any]

MOST_BYTES = 16 * 2**20
"""The largest file."""
_MOST_UNPACKED = 64 * 2**20
_MOST_MEMBERS = 16
_LONGEST_HEADER = 4096
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HOW = 'save it with np.savez("mine.npz", q=q, k=k)'


class Given(NamedTuple):
    """q `[L, dₖ]`, k `[n, dₖ]` and v `[n, dᵥ]` (None if it is not there) as float64, and how many are not finite."""

    q: Array
    k: Array
    v: Array | None
    not_finite: int


def read_npz(content: bytes) -> Given:
    """The arrays of an .npz.

    Raises:
        InvalidValueError: it is no such file, larger than 16 MiB or 64 MiB unpacked, lacks q or k, or they have a
            dtype or shape that cannot be used.

    >>> file = io.BytesIO()
    >>> np.savez(file, q=np.zeros((2, 4)), k=np.ones((3, 4)))
    >>> read_npz(file.getvalue()).k.shape
    (3, 4)
    """
    if len(content) > MOST_BYTES:
        raise InvalidValueError(f"the file must be at most {MOST_BYTES} bytes, got {len(content)}")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return _read_archive(archive)
    except SqrtdkError:
        raise
    # What the zip and its compression may raise on bytes that somebody chose.
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError),
        *(ArithmeticError, LookupError, MemoryError, struct.error),
    ) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InvalidValueError(f"the file must be an .npz of NumPy, got {reason}; {_HOW}") from None


def _read_archive(archive: zipfile.ZipFile) -> Given:
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(names) > _MOST_MEMBERS or len(set(names)) < len(names):
        raise InvalidValueError(f"the file must hold at most {_MOST_MEMBERS} arrays, each once, got {len(names)}")
    missing = [name for name in ("q", "k") if f"{name}.npy" not in names]
    if missing:
        shown = ", ".join(repr(name[:40]) for name in names[:5]) or "nothing"
        raise InvalidValueError(f"the file must hold arrays named q and k, got {shown}; {_HOW}")
    arrays: dict[str, Array] = {}
    left = _MOST_UNPACKED
    for name in ("q", "k", "v"):
        if f"{name}.npy" in names:
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type not in _METHODS:
                raise InvalidValueError(name, f"must be stored or deflated, got method {member.compress_type}; {_HOW}")
            with archive.open(member) as file:
                arrays[name] = _read_array(name, file, left)
            left -= arrays[name].nbytes
    return _check(arrays["q"], arrays["k"], arrays.get("v"))


def _read_array(name: str, file: IO[bytes], most: int) -> Array:
    try:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran, dtype = read_header(file, max_header_size=_LONGEST_HEADER)
    except Exception as error:  # NumPy parses the header as Python: whatever that raises on bytes that somebody chose
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InvalidValueError(name, f"must be an array in NumPy's format, got {reason}") from None
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise InvalidValueError(
            name, f"must hold float16, float32, float64 or integers, got dtype {str(dtype)[:40]}; convert it first"
        )
    if len(shape) != 2 or any(isinstance(size, bool) or size < 1 for size in shape):
        raise InvalidValueError(
            name, f"must have the shape [vectors, length] of one head, got {list(shape)[:8]}; pick one head"
        )
    size = math.prod(shape) * dtype.itemsize
    # float64 is what it becomes.
    if math.prod(shape) * 8 > most:
        raise InvalidValueError(
            f"the arrays must have at most {_MOST_UNPACKED // 8} numbers together, got {name} of shape {list(shape)}"
        )
    data = file.read(size)
    if len(data) < size:
        raise InvalidValueError(name, f"must have {size} bytes for its shape {list(shape)}, got {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C").astype(np.float64, order="C")


def _check(q: Array, k: Array, v: Array | None) -> Given:
    d_k, keys = BOUNDS["d_k"], BOUNDS["n"]
    if q.shape[1] != k.shape[1]:
        raise InvalidValueError(f"q and k must have vectors of one length, got {q.shape[1]} and {k.shape[1]}")
    if q.shape[1] > d_k.largest:
        raise InvalidValueError(f"q and k must have a length of at most {d_k.largest:g}, got {q.shape[1]}")
    if not keys.least <= len(k) <= keys.largest:
        raise InvalidValueError("k", f"must have {keys.least:g} to {keys.largest:g} keys, got {len(k)}")
    if v is not None and (len(v) != len(k) or v.shape[1] > d_k.largest):
        raise InvalidValueError(
            "v", f"must have one vector per key, {len(k)}, of length up to {d_k.largest:g}, got {list(v.shape)}"
        )
    width = max(q.shape[1], 0 if v is None else v.shape[1])
    if len(q) * len(k) * width > MOST_PRODUCTS or len(q) * len(k) > MOST_PRODUCTS // 256:
        raise InvalidValueError(
            f"queries times keys must be at most {min(MOST_PRODUCTS // width, MOST_PRODUCTS // 256)} at this length, "
            f"got {len(q)} times {len(k)}; take fewer queries"
        )
    not_finite = sum(int((~np.isfinite(array)).sum()) for array in (q, k, v) if array is not None)
    return Given(q, k, v, not_finite)
