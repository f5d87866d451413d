"""The scale that a layer really uses: what multiplies the product of its projections' outputs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.torch.internals import without_modes
from sqrtdk.torch.watch.calls import SeenCall
from sqrtdk.torch.watch.lineage import Ratio, ratio_of


@dataclass(frozen=True)
class ScaleRecord:
    """The scale of one layer, measured from the running model.

    Attributes:
        layer: module path, with the call where a module is called several times in a forward pass.
        d_k: width of the head vectors, columns that are zero in all queries and keys left out.
        at_the_call: what multiplies q·kᵀ; None if it differs between heads or rows.
        before_the_call: what q and k were multiplied by after their projections, together; None if it cannot be told.
        effective: the product of both; where `normalised`, of what multiplies the normalised vectors.
        normalised: whether q or k passes a norm after its projection.
        softcap: the soft cap of the scores.
        how: how `before_the_call` was obtained: "exact" (multiplied by numbers that were seen) or "lengths".
        reason: why a number is None.
        on_the_mask: what a mask with finite entries was multiplied by after it was added; None if none was added.
        difference: the largest difference between the weights that follow from q, k and the scale and the model's own;
            None where attention is one operation, whose weights nobody sees.
        dtype: what q and k are rounded to.
        logits_dtype: what the logits are rounded to before the softmax: of half precision those of a fused kernel stay
            in float32, those of a product that the model computes itself do not.
        call: which call of its module in a forward pass it is; None for a module that is called once.
        after_the_norm: what normalised q and k were multiplied by since their norms, together; None if neither is.
    """

    layer: str
    d_k: int
    at_the_call: float | None
    before_the_call: float | None
    effective: float | None
    normalised: bool
    softcap: float | None
    how: str
    reason: str | None
    on_the_mask: float | None = None
    difference: float | None = None
    dtype: str = "float32"
    logits_dtype: str = "float32"
    call: int | None = None
    after_the_norm: float | None = None

    @property
    def path(self) -> str:
        """The module path."""
        return self.layer if self.call is None else self.layer.removesuffix(f"(call {self.call})").rstrip()

    def as_json(self) -> dict[str, Any]:
        """The record as numbers, texts and null."""
        return asdict(self)


def read_scale(path: str, call: SeenCall) -> ScaleRecord:
    """The scale record of a call."""
    with without_modes(), torch.no_grad():
        dimension = _count_columns(call.q, call.k)
        # torch multiplies both by the root of its scale.
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
    """The dtype of q and k, and that of the logits; of fused operations nobody sees the logits, but all add in float32.

    The fast path of encoders chooses between a fused kernel and a product by device; it is believed to be fused.
    """
    name, kept = (
        str(dtype).removeprefix("torch.") for dtype in (call.q.dtype, torch.promote_types(call.q.dtype, torch.float32))
    )
    return name, name if call.how in ("recovered", "math path") else kept


def _join(q: Ratio, k: Ratio) -> tuple[float | None, str]:
    if q.factor is None or k.factor is None:
        return None, ""
    return q.factor * k.factor, "exact" if q.how == k.how == "exact" else "lengths"


def _read_factor(call: SeenCall) -> tuple[float | None, list[str]]:
    if not isinstance(call.scale, Tensor):
        return call.scale * call.folded, []
    least, largest = float(call.scale.min()), float(call.scale.max())
    if least == largest:
        return least * call.folded, []
    return None, [f"the scale at the call is a tensor from {least:.6g} to {largest:.6g}"]


def _count_columns(q: Tensor, k: Tensor) -> int:
    """dₖ without the columns that are zero everywhere in q or in k, as padding to a faster width leaves them."""
    if not q.numel() or not k.numel():
        return q.shape[-1]
    # A column of padding is at the end: one look tells that there is none, mostly at the first tokens alone.
    if all(bool(x[:, :, :1, -1].any()) or bool(x[..., -1].any()) for x in (q, k)):
        return q.shape[-1]
    used = q.flatten(0, -2).any(dim=0) & k.flatten(0, -2).any(dim=0)
    return int(used.sum()) or q.shape[-1]
