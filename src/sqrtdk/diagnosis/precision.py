"""Resolution of each dtype: its epsilon and its largest number."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqrtdk.errors import unknown_name

__all__ = ["PRECISIONS", "Precision", "name_dtype"]


class Precision(NamedTuple):
    """Spacing of numbers above 1, and the largest finite number."""

    epsilon: float
    largest: float


PRECISIONS = {
    "bfloat16": Precision(2.0**-7, (2.0 - 2.0**-7) * 2.0**127),
    "float16": Precision(2.0**-10, 65504.0),
    "float32": Precision(2.0**-23, (2.0 - 2.0**-23) * 2.0**127),
    "float64": Precision(2.0**-52, (2.0 - 2.0**-52) * 2.0**1023),
}
"""Epsilon (the spacing above 1) and largest finite number of each dtype that logits are rounded to (IEEE 754)."""


def name_dtype(dtype: Any) -> str:
    """Return the name of a NumPy, torch or ml_dtypes dtype, or of a dtype given as a string.

    >>> name_dtype("torch.bfloat16")
    'bfloat16'
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    name = name.removeprefix("torch.")
    if name not in PRECISIONS:
        raise unknown_name("dtype", name, list(PRECISIONS))
    return name
