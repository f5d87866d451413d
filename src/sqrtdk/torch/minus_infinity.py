"""Finite numbers that mean minus infinity in an additive mask: they hide their keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# −1e4 (−9984 in bfloat16) is the smallest such number in use; its exponential is 0 in every dtype.
_HIDDEN_BELOW = -9000.0


def hides(entries: Any) -> Any:
    """Return whether additions to logits (a number, an array or a tensor) hide their keys.

    >>> hides(-1e4), hides(-math.inf), hides(-1000.0)
    (True, True, False)
    """
    return entries <= _HIDDEN_BELOW


def shows(mask: Tensor) -> Tensor:
    """Return which keys a boolean or an additive mask leaves visible."""
    return mask if mask.dtype == torch.bool else ~hides(mask)


def close_hidden(mask: Tensor) -> Tensor:
    """Return the mask with −inf in place of finite numbers that mean it; a boolean mask is returned as it is."""
    return mask if mask.dtype == torch.bool else mask.masked_fill(hides(mask), -math.inf)


def is_closed(mask: Tensor) -> bool:
    """Return whether no finite number of a mask means minus infinity."""
    return mask.dtype == torch.bool or not bool((hides(mask) & (mask != -math.inf)).any())
