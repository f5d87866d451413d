"""Describes one observed attention call (q, k, scale, mask, soft cap), measures it, and checks its weights."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sqrtdk.statistics import ROW_FIELDS, AttentionStatistics
from sqrtdk.torch.functional import attention
from sqrtdk.torch.internals import unseen
from sqrtdk.torch.minus_infinity import hides, shows
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.lineage import Lineage
from sqrtdk.torch.watch.recognise.masks import close_masked, read_mask
from sqrtdk.torch.watch.recognise.vectors import Span
from sqrtdk.wording.numbers import write_number

_MOST_ROWS_COMPARED = 4


class NotUnderstoodError(Exception):
    """The scores were changed in a way that sqrtdk's attention does not support; the message says how."""


@dataclass(frozen=True)
class SeenCall:
    """Attention weights softmax(cap(scale·q·kᵀ) + mask) with q `[B, H, L, D]`, k `[B, G, S, D]`.

    `scale` is a number or a tensor `[B, H, L]` (any axis may be 1). `mask` is boolean or additive `[B, H, L, S]` (any
    axis but the last may be 1). Query i sees the keys from i + first to i + last, where None means no limit.
    """

    q: Tensor
    k: Tensor
    scale: float | Tensor
    mask: Tensor | None = None
    first: int | None = None
    last: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    how: str = "fused"
    # The part of the call's scale that q and k already contain: torch multiplies each by its square root.
    folded: float = 1.0
    q_lineage: Lineage | None = None
    k_lineage: Lineage | None = None
    # Query i is at the position of key i + first_position; None if queries and keys are of different sequences.
    first_position: int | None = field(default=None)
    # The factor that a finite mask was multiplied by after it was added; None if no such mask was added.
    on_the_mask: float | None = None
    # The largest difference between these weights and the model's own; None if the model's weights were not seen.
    difference: float | None = None
    # The logits `[B, H, L, S]` if q·k went through more than scale, cap and mask: heads were mixed.
    logits: Tensor | None = None
    # The positions of q and k in the outputs of their projections, if known.
    q_span: Span | None = None
    k_span: Span | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes B, H, L, S."""
        batch, heads, queries = self.q.shape[:3]
        return batch, heads, queries, self.k.shape[-2]


def four_axes(x: Tensor) -> Tensor:
    """Return `[L, D]`, `[H, L, D]` or `[..., H, L, D]` as `[B, H, L, D]`."""
    if x.ndim < 4:
        return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    return x if x.ndim == 4 else x.flatten(0, x.ndim - 4)


def measure(call: SeenCall) -> AttentionStatistics:
    """Return the statistics of every row, from one pass of sqrtdk's attention. No scores are kept.

    Raises:
        NotUnderstoodError: the scale or the sinks are NaN or infinite.
    """
    for name, value in (("scale", call.scale if call.logits is None else None), ("sinks", call.sinks)):
        if not (value is None or (value.isfinite().all() if isinstance(value, Tensor) else math.isfinite(value))):
            raise NotUnderstoodError(f"its {name} must be finite, got {value}")
    given: dict[str, Any] = {}
    if call.last is not None:
        # A causal call from the first key on is a plain call, which takes two thirds of the time if it is small.
        is_plain = call.last == 0 and call.q.shape[-2] == call.k.shape[-2]
        given = {"causal": True} if is_plain else {"causal": True, "causal_offset": call.last}
        if call.first is not None:
            given["window"] = (call.last - call.first, None)
    elif call.first is not None:
        given = {"window": (0, None), "causal_offset": call.first}
    kind = call.q.device.type
    is_cast = torch.is_autocast_enabled(kind)
    with unseen(), torch.autocast(kind, enabled=False) if is_cast else nullcontext():
        q, k, mask = call.q.detach(), call.k.detach(), call.mask
        if call.logits is not None:
            # The logits are passed as a mask that is added to scores of 0.
            mask = call.logits.to(torch.promote_types(call.logits.dtype, torch.float32))
            q, k = mask.new_zeros(*mask.shape[:3], 1), mask.new_zeros(1, 1, mask.shape[3], 1)
        elif q.dtype != k.dtype:
            q, k = q.float(), k.float()
        k = k.expand(q.shape[0], -1, -1, -1)
        seen = attention(
            q,
            k,
            k[..., :0],  # without values the pass has no output to compute
            scale=call.scale if call.logits is None else 1.0,
            mask=None if mask is None else close_masked(mask.detach(), q.dtype),
            softcap=call.softcap if call.logits is None else None,
            sinks=None if call.sinks is None else call.sinks.detach(),
            **given,
        )
    rows = seen.statistics
    assert rows is not None
    if call.logits is not None:
        named = {name: getattr(rows, name) for name in ROW_FIELDS}
        scores = {"score_max": rows.max_logit, "score_variance": rows.logit_variance}
        rows = AttentionStatistics(**{**named, **scores})
    return rows


def read_slopes(call: SeenCall) -> Tensor | None:
    """Return ALiBi's slopes `[H]`, the bias increase per key, or None if the bias is not linear in every head."""
    mask = call.mask
    if mask is None or mask.dtype == torch.bool or mask.shape[1] < 2:
        return None
    bias = mask.detach()[0, :, -1].double()  # the last query sees the most keys
    shown = ~hides(bias).any(dim=0)
    steps = bias.diff()[:, shown[1:] & shown[:-1]]
    if steps.shape[-1] < 2:
        return None
    slopes = steps.mean(dim=-1)
    largest = bias[:, shown].abs().amax(dim=-1, keepdim=True)
    is_straight = (steps - slopes[:, None]).abs() <= 4 * torch.finfo(mask.dtype).eps * largest
    return slopes if bool((is_straight & (slopes[:, None] != 0)).all()) else None


def weigh(call: SeenCall, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights `[B, H, n, S]` of some query positions, and their logits, in plain torch operations.

    A model's own weights are compared with these weights, so this function shares no code with sqrtdk's attention.
    """
    if call.logits is not None:
        logits = call.logits.index_select(-2, rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.softmax(logits, dim=-1), logits
    q = call.q.index_select(-2, rows)
    wide = torch.promote_types(torch.promote_types(q.dtype, call.k.dtype), torch.float32)
    groups = q.shape[1] // call.k.shape[1]
    k = call.k if groups == 1 else call.k.repeat_interleave(groups, dim=1)
    logits = q.to(wide) @ k.to(wide).transpose(-1, -2)
    scale = call.scale
    if isinstance(scale, Tensor):
        scale = scale.to(wide)
        if scale.shape[-1] > 1:
            scale = scale.index_select(-1, rows)
        scale = scale[..., None]
    logits = logits * scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.mask is not None:
        reading = read_mask(call.mask)
        shown, added = (
            mask if mask.shape[-2] == 1 else mask.index_select(-2, rows) for mask in (reading.shown, call.mask)
        )
        logits = (logits + added if reading.adds else logits).masked_fill(~shown, -torch.inf)
    if call.last is not None or call.first is not None:
        key = torch.arange(logits.shape[-1], device=rows.device)
        if call.last is not None:
            logits = logits.masked_fill(key > rows[:, None] + call.last, -torch.inf)
        if call.first is not None:
            logits = logits.masked_fill(key < rows[:, None] + call.first, -torch.inf)
    if call.sinks is None:
        return torch.softmax(logits, dim=-1), logits
    sinks = call.sinks.to(wide).reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
    weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., : call.k.shape[-2]]
    return weights, logits


def compare(call: SeenCall, weights: Tensor) -> float:
    """Return the largest difference between a model's own weights `[..., L, S]` and those of a call, on some rows.

    Raises:
        NotUnderstoodError: the weights differ by more than rounding explains.
    """
    batch, heads, queries, keys = call.shape
    rows = _pick_rows(queries, weights.device)
    own = weights.index_select(-2, rows).reshape(batch, heads, len(rows), keys)
    expected, logits = weigh(call, rows)
    own = own.to(expected.dtype)
    if call.sinks is None:
        own = own / own.sum(dim=-1, keepdim=True)  # the model may divide by the sum later
    difference = (own - expected).abs()
    worst = float(difference.max()) if own.numel() else 0.0
    if math.isnan(worst):  # rows without visible keys have no weights to compare
        worst = float(difference.masked_fill(expected.isnan(), 0).nan_to_num(nan=2.0).max())
    resolution = max(torch.finfo(x.dtype).eps for x in (weights, call.q, call.k))
    # Rounding grows with the logits, which are looked at only where that matters.
    if worst > 1e-6 + 16 * resolution:
        hidden = logits == -torch.inf if call.logits is None else hides(logits)
        largest = float(logits.masked_fill(hidden, 0).abs().amax())
        if worst > 1e-6 + 16 * resolution * (1 + largest):
            raise NotUnderstoodError(f"recovered weights differ from the model's own by {write_number(worst, 2)}")
    return worst


@lru_cache(maxsize=64)
def _pick_rows(queries: int, device: torch.device) -> Tensor:
    """Return evenly spaced query positions, from the first to the last."""
    count = min(queries, _MOST_ROWS_COMPARED)
    return torch.linspace(0, queries - 1, count, device=device).round().long()


def are_one_sequence(call: SeenCall) -> bool:
    """Return whether queries and keys are known to come from the same tensors."""
    q, k = call.q_lineage, call.k_lineage
    return q is not None and k is not None and bool(q.sources & k.sources)


def place_queries(call: SeenCall, *, one_sequence: bool | None = None) -> SeenCall:
    """Return the call with the position of its first query among the keys, if both are of one sequence.

    Args:
        call: the call.
        one_sequence: whether they are; None reads it from the lineages.
    """
    _, _, queries, keys = call.shape
    if call.last is not None:
        return replace(call, first_position=call.last)
    is_one = are_one_sequence(call) if one_sequence is None else one_sequence
    if not is_one or queries > keys:
        return call
    if queries < keys:
        ahead = _count_ahead(call)
        if ahead is not None:
            return replace(call, first_position=ahead)
        mask = call.mask if call.logits is None else call.logits
        last = None if mask is None else mask[..., -1, :]
        if last is not None:
            seen = shows(last).nonzero()
            if len(seen):
                return replace(call, first_position=int(seen[:, -1].max()) - queries + 1)
    return replace(call, first_position=keys - queries)


def _count_ahead(call: SeenCall) -> int | None:
    """Return the number of keys before the first query, or None unless both are tokens of one projection's input."""
    q, k = call.q_span, call.k_span
    if q is None or k is None or q.origin.tokens != k.origin.tokens or q.batch != k.batch:
        return None
    ahead, step = q.start.row - k.start.row, k.rows[1].row
    fits = step > 0 and ahead % step == 0 and 0 <= ahead // step <= k.rows[0] - q.rows[0]
    return ahead // step if fits else None
