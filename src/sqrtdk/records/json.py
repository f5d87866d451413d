"""Conversion of records to plain JSON values and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Self

__all__ = ["FlatRecord", "PlainRecord", "plain", "round_numbers"]


def plain(value: Any) -> Any:
    """Return a value as JSON has it: None for NaN and infinities, lists for sequences and arrays, texts for keys.

    A record is converted by its own `as_json`.

    >>> plain({1: (float("nan"), 2.0)})
    {'1': [None, 2.0]}
    """
    if hasattr(value, "as_json"):
        return value.as_json()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float) else str(value)


class PlainRecord:
    """A dataclass whose JSON is its fields by name."""

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values. NaN and infinities become null."""
        return {item.name: plain(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


class FlatRecord(PlainRecord):
    """A record that contains no other records and can be read back."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the record that `as_json` was called on.

        Raises:
            KeyError: a field without a default is missing.
        """
        own = fields(cls)  # type: ignore[arg-type]
        optional = {one.name for one in own if one.default is not MISSING or one.default_factory is not MISSING}
        given = {one.name: content[one.name] for one in own if one.name in content or one.name not in optional}
        return cls(**given)


def round_numbers(value: Any, digits: int = 4) -> Any:
    """Return plain data whose numbers have at most so many significant digits, for records that ship.

    >>> round_numbers({"loss": [0.123456, 7]})
    {'loss': [0.1235, 7]}
    """
    if isinstance(value, dict):
        return {name: round_numbers(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
