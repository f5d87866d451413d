"""Padding: rows where no token stands, which say nothing about a head."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from sqrtdk.torch.watch.calls import MASKED_BELOW, SeenCall

Padding = Literal["attention mask", "key padding", "unknown"]
"""By whom it is told which rows are padding."""

# Arguments of forward that say which tokens are there (1 or True), and which are not (True, or −inf).
_PRESENT = ("attention_mask", "decoder_attention_mask", "decoder_input_mask")
_ABSENT = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask", "padding_mask")


def read_tokens(given: dict[str, Any], batch: int, queries: int, keys: int | None) -> tuple[bool, Tensor | None]:
    """Whether a module was told which tokens `[B, L]` are there, and which; (True, None) if it was told "all".

    Args:
        given: the arguments of its forward by name.
        batch, queries: of the call whose rows are looked at.
        keys: how many keys it has, if they are of the same sequence: a mask then covers a cache as well, and the
            queries are its end.
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
            mask = ~mask if mask.dtype == torch.bool else mask > MASKED_BELOW
        elif mask.is_floating_point() and bool((mask <= 0).all()):
            mask = mask > MASKED_BELOW
        return True, (mask != 0)[:, mask.shape[1] - queries :]
    return False, None


def read_keys(call: SeenCall) -> Tensor | None:
    """Which tokens `[B, L]` any query sees, where queries are among the keys; None if no mask hides one from all."""
    batch, _, queries, keys = call.shape
    first = call.first_position
    mask = call.mask if call.logits is None else call.logits
    if mask is None or first is None or first < 0 or first + queries > keys:
        return None
    visible = mask if mask.dtype == torch.bool else mask > MASKED_BELOW
    tokens = visible.flatten(1, 2).any(dim=1).expand(batch, keys)[:, first : first + queries]
    return None if bool(tokens.all()) else tokens
