"""Attention maps of a run: the weights of one example's queries at a few dozen steps, a byte per weight."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["count_right", "list_steps", "pack", "unpack"]

_EVEN_STEPS = 30


def list_steps(total: int) -> list[int]:
    """Return the steps at which a run of so many updates has a map: 0, powers of two, then even steps to the end.

    >>> list_steps(600)[:9], list_steps(600)[-1], len(list_steps(600))
    ([0, 1, 2, 4, 8, 16, 20, 40, 60], 600, 36)
    """
    stride = max(1, math.ceil(total / _EVEN_STEPS))
    early = {2**power for power in range(stride.bit_length()) if 2**power < stride}
    return sorted({0, *early, *range(stride, total, stride), total})


def pack(weights: npt.NDArray[Any]) -> str:
    """Return weights in 0 … 1 as base64 text of bytes, 255 for a weight of 1; what is not finite counts as 0.

    >>> unpack({"tokens": ["A", "B"], "first": 1, "weights": [pack(np.array([[0.2, 0.8]]))]}, 0).tolist()
    [[51, 204]]
    """
    known = np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)
    return base64.b64encode(np.rint(255.0 * known).astype(np.uint8).tobytes()).decode()


def unpack(maps: Mapping[str, Any], at: int) -> npt.NDArray[np.uint8]:
    """Return the map at a place in `maps["steps"]`: a row of bytes per query, a column per key.

    Args:
        maps: what a run recorded: `tokens` as they are written, the position of the `first` query, `steps`, `weights`.
        at: the place.
    """
    bytes_of_map = np.frombuffer(base64.b64decode(maps["weights"][at]), np.uint8)
    return bytes_of_map.reshape(len(maps["tokens"]) - maps["first"], len(maps["tokens"]))


def count_right(maps: Mapping[str, Any], at: int) -> int:
    """Return how many queries give the right key more weight than any other key; `replay.js` does the same.

    >>> maps = {"tokens": ["A", "B", "A"], "first": 2, "right": [1], "weights": [pack(np.array([[0.2, 0.7, 0.1]]))]}
    >>> count_right(maps, 0)
    1
    """
    rows = zip(unpack(maps, at), maps["right"], strict=True)
    return sum(all(row[right] > byte for key, byte in enumerate(row) if key != right) for row, right in rows)
