"""Reads additive masks: the keys that they show, and whether they add anything else to scores."""

from __future__ import annotations

import threading
from functools import cached_property

import torch
from torch import Tensor

from sqrtdk.torch.internals import WeakStorage, storage_address
from sqrtdk.torch.minus_infinity import hides
from sqrtdk.torch.watch.recognise.coordinates import Spot


class MaskReading:
    """Meaning of a boolean or additive mask `[B, H, L, S]`. Several steps of an observation ask for it."""

    def __init__(self, mask: Tensor) -> None:
        self.shown: Tensor = mask if mask.dtype == torch.bool else ~hides(mask)
        """True for keys that the mask leaves visible."""
        self.adds: bool = mask.dtype != torch.bool and not bool(((mask == 0) | ~self.shown).all())
        """Whether the mask has finite nonzero entries. A finite stand-in for −inf only hides, even when multiplied."""

    @cached_property
    def seen(self) -> Tensor:
        """Keys `[B, S]` that any query sees."""
        return self.shown.flatten(1, 2).any(dim=1)


class _Last(threading.local):
    def __init__(self) -> None:
        self.key: tuple[WeakStorage, Spot] | None = None
        self.reading: MaskReading | None = None


_last = _Last()


def read_mask(mask: Tensor) -> MaskReading:
    """Return the reading of a mask, from the step before if it is the same mask."""
    if mask.dtype == torch.bool or not storage_address(mask):
        return MaskReading(mask)
    key = (WeakStorage(mask), Spot.of(mask))
    if _last.reading is None or _last.key != key:
        _last.key, _last.reading = key, MaskReading(mask)
    return _last.reading


def forget_mask() -> None:
    """Forget the last reading: before another operation is looked at, since a model may change its mask in between."""
    _last.key = _last.reading = None


def close_masked(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask with −inf for finite stand-ins of −inf, or a boolean mask if nothing else is added."""
    reading = read_mask(mask)
    return mask.masked_fill(~reading.shown, -torch.inf).to(dtype) if reading.adds else reading.shown
