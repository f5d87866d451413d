"""Reads flex_attention calls: evaluates the score function and identifies its factor, soft cap and bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sqrtdk.torch.internals import map_places
from sqrtdk.torch.watch.recognise.calls import SeenCall

FLEXIBLE = "flex_attention"
# Limit for the number of scores, which are all computed here as in the eager operation.
_MOST_ENTRIES = 1 << 26
_TOLERANCE = 1e-4


def read_flexible(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> list[SeenCall] | str:
    """Return the call behind flex_attention's arguments, or the reason why it cannot be read."""
    batch, heads, queries, _ = query.shape
    sizes = (batch, heads, queries, key.shape[2])
    if batch * heads * queries * key.shape[2] > _MOST_ENTRIES:
        return "flex_attention of this length is not followed"
    key = key.expand(batch, -1, -1, -1)
    keys = key.repeat_interleave(heads // key.shape[1], dim=1)
    scores = query.float() @ keys.float().transpose(-1, -2) * scale
    visible = map_places(block_mask[-1], sizes, query.device, None, mask_mod_other_buffers)

    def change(x: Tensor) -> Tensor:
        return map_places(score_mod, sizes, query.device, x, score_mod_other_buffers)

    bias = change(torch.zeros_like(scores))
    visible = visible & (bias != -torch.inf)
    bias = bias.masked_fill(~visible, 0.0)

    def rise(x: Tensor) -> Tensor:
        """Return the score function's value minus the bias, 0 where hidden."""
        return (change(x) - bias).masked_fill(~visible, 0.0)

    factor, softcap = _read_rise(rise, scores, visible)
    if factor is None:
        return "the score function of flex_attention is more than a factor, a soft cap and a bias"
    mask: Tensor | None = None if bool(visible.all()) else visible
    if bool(bias.any()):
        mask = bias.masked_fill(~visible, -torch.inf)
    return [SeenCall(query, key, scale * factor, mask=mask, softcap=softcap)]


def _read_rise(rise: Callable[[Tensor], Tensor], scores: Tensor, visible: Tensor) -> tuple[float | None, float | None]:
    """Return the factor and the soft cap of a score function, or (None, None) if it has another form."""
    given = rise(scores)
    hidden = scores.masked_fill(~visible, 0.0)
    allowed = _TOLERANCE * (1.0 + float(given.abs().max())) if given.numel() else 0.0
    small = 2.0**-10
    slopes = (rise(torch.full_like(scores, small)) / small)[visible]
    if not slopes.numel() or not bool(slopes.isfinite().all()) or float(slopes.max() - slopes.min()) > 1e-2:
        return None, None
    slope = float(slopes.double().median())
    factor = float(rise(torch.ones_like(scores))[visible].double().median())
    if float((given - factor * hidden).abs().max()) <= allowed:
        return factor, None
    cap = float(rise(torch.full_like(scores, 1e6))[visible].double().median())
    if 0.0 < cap < 1e5:
        # The slope at 0 is only as exact as its small step. A cap without a factor has slope 1.
        slope = 1.0 if abs(slope - 1.0) < 1e-3 else slope
        if float((given - cap * torch.tanh(slope * hidden / cap)).abs().max()) <= allowed:
            return slope, cap
    return None, None
