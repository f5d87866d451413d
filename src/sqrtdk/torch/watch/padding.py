"""Finds padding: rows without a token, which statistics leave out."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from sqrtdk.torch.minus_infinity import shows
from sqrtdk.torch.watch.recognise.calls import SeenCall
from sqrtdk.torch.watch.recognise.masks import read_mask

Padding = Literal["attention mask", "key padding", "rows", "unknown"]
"""Source of the padding mask; "rows" is the choice of a monitor's user."""

# Arguments of forward that mark tokens (1 or True), and arguments that mark padding (True or −inf).
_PRESENT = ("attention_mask", "decoder_attention_mask", "decoder_input_mask")
_ABSENT = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask", "padding_mask")


def read_tokens(given: dict[str, Any], batch: int, queries: int, keys: int | None) -> tuple[bool, Tensor | None]:
    """Return whether a module received a token mask `[B, L]`, and the mask: (True, None) if all rows are tokens.

    Args:
        given: the arguments of the module's forward by name.
        batch, queries: the sizes of the call.
        keys: the number of keys if they are of the same sequence. A mask may then also cover a cache, and the queries
            are its last entries.
    """
    for name in (*_PRESENT, *_ABSENT):
        if name not in given:
            continue
        mask = given[name]
        if mask is None:
            if name == "attention_mask":
                return True, None
            continue
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != batch:
            continue
        if mask.shape[1] not in (queries, keys) or mask.shape[1] < queries:
            continue
        if name in _ABSENT:
            mask = ~mask if mask.dtype == torch.bool else shows(mask)
        elif mask.is_floating_point() and bool((mask <= 0).all()):
            mask = shows(mask)
        return True, (mask != 0)[:, mask.shape[1] - queries :]
    return False, None


def read_keys(call: SeenCall) -> Tensor | None:
    """Return a mask `[B, L]` of tokens that any query sees; None if all are seen or queries are not among the keys."""
    batch, _, queries, keys = call.shape
    first = call.first_position
    if first is None or first < 0 or first + queries > keys:
        return None
    if call.logits is not None:
        seen = shows(call.logits).flatten(1, 2).any(dim=1)
    elif call.mask is not None:
        seen = read_mask(call.mask).seen
    else:
        return None
    tokens = seen.expand(batch, keys)[:, first : first + queries]
    return None if bool(tokens.all()) else tokens
