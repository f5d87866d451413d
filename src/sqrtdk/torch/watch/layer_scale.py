"""Measures a layer's scale: the factor between q·k of its projections' outputs and the scores of a call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.audits.audit import ScaleRecord
from sqrtdk.torch.internals import unseen
from sqrtdk.torch.watch.recognise.calls import SeenCall
from sqrtdk.torch.watch.recognise.lineage import LengthRatio, ratio_of
from sqrtdk.wording.numbers import write_number


def read_scale(path: str, call: SeenCall) -> ScaleRecord:
    """Return the scale record of a call. Unknown values are None, and the record says why."""
    with unseen():
        dimension = _count_columns(call.q, call.k)
        # torch multiplies q and k each by the square root of its scale.
        half = math.sqrt(call.folded)
        q, k = ratio_of(call.q, call.q_lineage, half), ratio_of(call.k, call.k_lineage, half)
        at_the_call, reasons = _read_factor(call)
    normalised = q.normalised or k.normalised
    factor, how = _join(q, k)
    reasons += [f"{name}: {side.reason}" for name, side in (("q", q), ("k", k)) if side.reason is not None]
    after_the_norm = factor if normalised else None
    if factor is None and normalised and not (q.is_uneven or k.is_uneven):
        factor = math.prod(side.numbers if side.factor is None else side.factor for side in (q, k))
    return ScaleRecord(
        path,
        dimension,
        at_the_call,
        None if normalised else factor,
        None if at_the_call is None or factor is None else at_the_call * factor,
        normalised,
        call.softcap,
        how,
        "; ".join(dict.fromkeys(reasons)) or None,
        call.on_the_mask,
        call.difference,
        *_name_dtypes(call),
        after_the_norm=after_the_norm,
    )


def _name_dtypes(call: SeenCall) -> tuple[str, str]:
    """Return the dtype names of q and k and of the logits. Fused operations hide their logits but add in float32.

    The encoders' fast path picks a fused kernel or a product by device, and counts as fused.
    """
    name, kept = (
        str(dtype).removeprefix("torch.") for dtype in (call.q.dtype, torch.promote_types(call.q.dtype, torch.float32))
    )
    return name, name if call.how in ("recovered", "math path") else kept


def _join(q: LengthRatio, k: LengthRatio) -> tuple[float | None, str]:
    if q.factor is None or k.factor is None:
        return None, ""
    return q.factor * k.factor, "exact" if q.how == k.how == "exact" else "lengths"


def _read_factor(call: SeenCall) -> tuple[float | None, list[str]]:
    if not isinstance(call.scale, Tensor):
        return call.scale * call.folded, []
    least, largest = float(call.scale.min()), float(call.scale.max())
    if least == largest:
        return least * call.folded, []
    return None, [f"the scale at the call is a tensor from {write_number(least, 6)} to {write_number(largest, 6)}"]


def _count_columns(q: Tensor, k: Tensor) -> int:
    """Return dₖ, not counting columns that are zero throughout q or k, such as padding to a faster width."""
    if not q.numel() or not k.numel():
        return q.shape[-1]
    # Padding is at the end, so a nonzero last column rules it out, mostly by its first entry.
    if all(bool(x[0, 0, 0, -1]) or bool(x[..., -1].any()) for x in (q, k)):
        return q.shape[-1]
    used = q.flatten(0, -2).any(dim=0) & k.flatten(0, -2).any(dim=0)
    return int(used.sum()) or q.shape[-1]
