"""Checks of arguments: integer, number, flag, distinct items. NumPy's scalars count; a bool is no number."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from sqrtdk.errors import InvalidTypeError, InvalidValueError

__all__ = ["distinct", "flag", "integer", "is_number", "number"]

# Tuples, because every call of attention uses them: a union of types would be built each time.
_INTEGERS, _NUMBERS, _FLAGS = (int, np.integer), (int, float, np.integer, np.floating), (bool, np.bool_)


def integer(
    name: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    *,
    each: bool = False,
    kind: str = "an integer",
) -> int:
    """Return an integer from `least` to `most`, both included; None leaves the upper end, or both, open.

    With `each` the argument is a sequence and this one of its items; `kind` says in words what the argument may be.

    >>> integer("heads", np.int64(8), 1)
    8
    >>> integer("heads", 0, 1)
    Traceback (most recent call last):
    ...
    sqrtdk.errors.InvalidValueError: heads must be at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise InvalidTypeError(name, f"must be {kind}, got {_describe(value)}", each=each)
    if (least is not None and value < least) or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidValueError(name, f"must be {expected}, got {value}", each=each)
    return int(value)


def number(
    name: str, value: Any, *, above: float = -math.inf, finite: bool = True, each: bool = False, kind: str = "a number"
) -> float:
    """Return a number above a bound as a float; NaN is never one, infinity only where it need not be finite.

    >>> number("softcap", np.float32(30), above=0.0)
    30.0
    >>> number("softcap", 0.0, above=0.0)
    Traceback (most recent call last):
    ...
    sqrtdk.errors.InvalidValueError: softcap must be positive and finite, got 0.0
    """
    if type(value) is float and above < value < math.inf:
        return value
    if not is_number(value):
        raise InvalidTypeError(name, f"must be {kind}, got {_describe(value)}", each=each)
    value = value.item() if isinstance(value, np.generic) else value
    # NaN fails these comparisons; an integer may be larger than any float.
    is_bounded = finite or isinstance(value, int)
    if not value > above or (is_bounded and not abs(value) <= sys.float_info.max):
        bound = [] if above == -math.inf else ["positive" if above == 0 else f"above {above:g}"]
        expected = " and ".join([*bound, *(["finite"] if is_bounded else [])])
        raise InvalidValueError(name, f"must be {expected or kind}, got {value}", each=each)
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Return True or False; text, numbers and arrays are refused, because their truth value may mean something else.

    >>> flag("causal", np.True_)
    True
    """
    if not isinstance(value, _FLAGS):
        raise InvalidTypeError(name, f"must be True or False, got {value!r}")
    return bool(value)


def distinct(name: str, values: Any, kind: str = "value") -> None:
    """Refuse values that are no sequence, have no items or repeat one.

    >>> distinct("d_ks", (4, 4), "size")
    Traceback (most recent call last):
    ...
    sqrtdk.errors.InvalidValueError: d_ks must not repeat a size, got (4, 4)
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidTypeError(name, f"must be a sequence, got {type(values).__name__} {values!r}")
    if not values:
        raise InvalidValueError(name, f"must name at least one {kind}, got none")
    if any(value in values[:at] for at, value in enumerate(values)):
        raise InvalidValueError(name, f"must not repeat a {kind}, got {tuple(values)}")


def is_number(value: Any) -> bool:
    """Return whether a value is one real number.

    >>> [is_number(value) for value in (1, np.float32(0.5), float("nan"), True, 1j, "1", None)]
    [True, True, True, False, False, False, False]
    """
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _describe(value: Any) -> str:
    # Large values are described by their type alone.
    return repr(value) if value is None or isinstance(value, str | int | float | np.generic) else type(value).__name__
