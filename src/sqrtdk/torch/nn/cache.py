"""Cache of keys and values for decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError


class Extension(NamedTuple):
    """A cache with further tokens, not yet kept: the memory, and how many of its entries count."""

    key_room: Tensor
    value_room: Tensor
    length: int

    @property
    def keys(self) -> Tensor:
        """The keys of all tokens `[..., G, S, D]`."""
        return self.key_room.narrow(-2, 0, self.length)

    @property
    def values(self) -> Tensor:
        """The values of all tokens `[..., G, S, V]`."""
        return self.value_room.narrow(-2, 0, self.length)


class KVCache:
    """The keys `[..., G, S, D]` and values `[..., G, S, V]` of the tokens so far, for one attention layer.

    For inference: what requires a gradient is refused. The room doubles when it is full, so that decoding n tokens
    copies each key at most twice on average. The tensors that `append` returns are views, valid until the next one.

    >>> cache = KVCache()
    >>> keys, values = cache.append(torch.zeros(2, 8, 5, 64), torch.zeros(2, 8, 5, 64))
    >>> keys, values = cache.append(torch.ones(2, 8, 1, 64), torch.ones(2, 8, 1, 64))
    >>> keys.shape, cache.length
    (torch.Size([2, 8, 6, 64]), 6)
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the next tokens and return those of all tokens; nothing is added if it raises."""
        extension = self.extend(k, v)
        self.keep(extension)
        return extension.keys, extension.values

    def extend(self, k: Tensor, v: Tensor) -> Extension:
        """Return the keys and values of all tokens and the next ones, which count only after `keep`.

        A call that fails between `extend` and `keep` leaves the cache as it was, so that it can be repeated.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise InvalidValueError(
                "cache is for inference: call under torch.no_grad() or torch.inference_mode(), got keys or values that "
                "require a gradient"
            )
        if k.shape[-2] != v.shape[-2]:
            raise InvalidValueError("v", f"must have {k.shape[-2]} tokens like k, got {v.shape[-2]}")
        keys, values = self._store("keys", self._keys, k), self._store("values", self._values, v)
        return Extension(keys, values, self.length + k.shape[-2])

    def keep(self, extension: Extension) -> None:
        """Add the tokens of an extension to the cache."""
        self._keys, self._values, self.length = extension

    def _store(self, name: str, room: Tensor | None, new: Tensor) -> Tensor:
        """Return the memory with the new entries behind the old ones; it is larger if they did not fit."""
        length = self.length + new.shape[-2]
        if room is not None and (_shape_of_entry(room) != _shape_of_entry(new) or room.dtype != new.dtype):
            raise InvalidValueError(
                f"cache holds {name} of shape {_shape_of_entry(room)} per token and {room.dtype}, "
                f"got {_shape_of_entry(new)} and {new.dtype}; begin another sequence with another KVCache"
            )
        # A tensor made in inference mode cannot be written to outside of it.
        stuck = room is not None and room.is_inference() and not torch.is_inference_mode_enabled()
        if room is None or stuck or room.shape[-2] < length:
            capacity = length if room is None else max(length, 2 * room.shape[-2])
            larger = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
            if room is not None:
                larger.narrow(-2, 0, self.length).copy_(room.narrow(-2, 0, self.length))
            room = larger
        room.narrow(-2, self.length, new.shape[-2]).copy_(new)
        return room


def _shape_of_entry(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1])
