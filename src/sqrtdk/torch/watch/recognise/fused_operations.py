"""Reads fused attention operations of torch and sqrtdk: turns their arguments into calls."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.operation.call import Forward
from sqrtdk.operation.visibility import OPEN_ABOVE, OPEN_BELOW
from sqrtdk.scales import default_factor
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch.internals import WeakStorage, name_arguments, storage_address
from sqrtdk.torch.minus_infinity import is_closed
from sqrtdk.torch.watch.recognise.calls import SeenCall, four_axes
from sqrtdk.torch.watch.recognise.coordinates import Spot, UnevenError
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.lineage import Lineage
from sqrtdk.torch.watch.recognise.projections import Projection
from sqrtdk.torch.watch.recognise.scores import Side
from sqrtdk.torch.watch.recognise.vectors import find_span

Arguments = dict[str, Any]
OWN = "sqrtdk::forward"


def _read_torch(given: Arguments) -> list[SeenCall]:
    """Return the call of a fused kernel behind F.scaled_dot_product_attention: q `[B, H, L, D]`, causal from key 0."""
    q, k = given["query"], given["key"]
    mask = given.get("attn_mask", given.get("attn_bias"))
    scale = given.get("scale")
    return [
        SeenCall(
            four_axes(q),
            four_axes(k),
            default_factor(q.shape[-1]) if scale is None else float(scale),
            mask=None if mask is None else four_axes(mask),
            last=0 if given.get("is_causal") else None,
        )
    ]


def arrange(call: SeenCall, q: Side, k: Side) -> SeenCall:
    """Return the call with the head axis of its projection, because its second axis may be windows or sequences."""
    span = find_span(q.trace, Spot.of(call.q), 1)
    if span is not None or q.trace is None:
        return replace(call, q_span=span, k_span=find_span(k.trace, Spot.of(call.k), 1))
    lead = tuple(call.q.shape[:2])
    try:
        layout = q.trace.lay_out()
        parts = [
            part for size, stride in zip(lead, call.q.stride(), strict=False) for part in layout.divide(size, stride)
        ]
    except UnevenError:
        return call
    sizes = [size for size, _ in parts]
    heads = [at for at, (_, step) in enumerate(parts) if step.key and not step.row]
    order = [*(at for at in range(len(parts)) if at not in heads), *heads]
    if tuple(call.k.shape[:2]) != lead or math.prod(sizes) != math.prod(lead):
        return call

    def show(x: Tensor) -> Tensor:
        view = x.expand(*lead, -1, -1).reshape(*sizes, *x.shape[2:]).permute(*order, -2, -1)
        batch = math.prod(sizes[at] for at in order[: len(order) - len(heads)])
        return view.reshape(batch, -1, *x.shape[2:])

    mask = call.mask
    if mask is not None and mask.shape[:2] != (1, 1):
        mask = show(mask)
    return replace(call, q=show(call.q), k=show(call.k), mask=mask)


def _read_own(given: Arguments) -> list[SeenCall]:
    """Return the call of sqrtdk's operation, which is fully described by its arguments."""
    if not given["value"].shape[-1]:
        return []  # an observation of some rows of a call that is seen as well
    q = given["query"]
    scale, sinks, mask = given["scale"], given["sinks"], given["mask"]
    factor: float | Tensor = given["factor"]
    if scale is not None:
        factor = _pad(scale, 3)
    return [
        SeenCall(
            four_axes(q),
            four_axes(given["key"]),
            factor,
            mask=None if mask is None else four_axes(mask),
            first=None if given["first"] == OPEN_BELOW else given["first"],
            last=None if given["last"] == OPEN_ABOVE else given["last"],
            softcap=given["softcap"] or None,
            sinks=sinks,
            how="sqrtdk",
        )
    ]


def with_statistics(func: Any, args: Any) -> Any:
    """Return the arguments of sqrtdk's operation with statistics requested, which leaves its output bit-identical."""
    at = name_arguments(func).index("want_statistics")
    return (*args[:at], True, *args[at + 1 :])


def read_statistics(result: Any) -> AttentionStatistics:
    """Return the statistics that sqrtdk's operation computed with its output, as `[B, H, L]`."""
    done = Forward(*result)
    blocks = [x.reshape(x.shape[0], *_pad(x[0], 3).flatten(0, -3).shape) for x in (done.counts, done.measures)]
    return AttentionStatistics.from_blocks(*blocks)


def find_rows(name: str, call: SeenCall, result: Any) -> AttentionStatistics | None:
    """Return the statistics that an operation computed itself, or None if the call is to be measured."""
    has_rows = name == OWN and (call.mask is None or is_closed(call.mask))
    return read_statistics(result) if has_rows else None


@lru_cache(maxsize=1024)
def looks_like_attention(name: str) -> bool:
    """Return whether the name of an unlisted operation suggests attention."""
    return re.search(r"attention|attn", name) is not None


def _pad(x: Tensor, rank: int) -> Tensor:
    return x.reshape((1,) * (rank - x.ndim) + tuple(x.shape)) if x.ndim < rank else x


def _read_encoder_layer(given: Arguments) -> list[SeenCall]:
    """Return the calls of the encoder layer's fast path, recomputing queries and keys from its input."""
    x = given["src"]
    weight, bias, heads = given["qkv_weight"], given["qkv_bias"], given["num_heads"]
    if given["norm_first"]:
        x = functional.layer_norm(x, (given["embed_dim"],), given["norm_weight_1"], given["norm_bias_1"], given["eps"])
    return _project(x, x, weight, bias, heads, given["mask"], given["mask_type"])


def _read_native(given: Arguments) -> list[SeenCall]:
    """Return the calls of nn.MultiheadAttention's fast path."""
    weight, bias = given["qkv_weight"], given["qkv_bias"]
    return _project(given["query"], given["key"], weight, bias, given["num_head"], given["mask"], given["mask_type"])


def _project(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, heads: int, mask: Tensor | None, kind: int | None
) -> list[SeenCall]:
    """Return calls from inputs `[B, L, E]` and the joint weight `[3·E, E]` of q, k and v, one per nested sequence."""
    if x.is_nested:
        return [call for one in x.unbind() for call in _project(one[None], one[None], weight, bias, heads, None, None)]
    width = weight.shape[0] // 3

    def split(projected: Tensor) -> Tensor:
        return projected.reshape(*projected.shape[:2], heads, -1).transpose(1, 2)

    same = frozenset({WeakStorage(x)})
    sides, lineages = [], []
    for at, z in enumerate((x, y)):
        own_weight, own_bias = (one[at * width : (at + 1) * width] for one in (weight, bias))
        output = functional.linear(z, own_weight, own_bias)
        addresses = storage_address(weight), storage_address(bias)
        projection = Projection.of(own_weight.t(), addresses[0], own_bias, addresses[1], output)
        sides.append(split(output))
        lineages.append(Lineage("in_proj", same if z is x else frozenset(), projection=projection))
    q, k = sides
    return [
        SeenCall(
            q,
            k,
            default_factor(q.shape[-1]),
            mask=_open(mask, kind),
            how="fast path",
            q_lineage=lineages[0],
            k_lineage=lineages[1],
        )
    ]


def _open(mask: Tensor | None, kind: int | None) -> Tensor | None:
    """Return the fast path's mask (True or −inf: hidden) in sqrtdk's form; kind 0: `[L, S]`, 1: `[B, S]`, 2: 4 axes."""
    if mask is None:
        return None
    mask = mask.logical_not() if mask.dtype == torch.bool else mask
    return mask[:, None, None, :] if kind == 1 else four_axes(mask)


FUSED: dict[str, Callable[[Arguments], list[SeenCall]]] = {
    **{
        f"aten::_scaled_dot_product_{kind}": _read_torch
        for kind in (
            "flash_attention_for_cpu",
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    OWN: _read_own,
    "aten::_transformer_encoder_layer_fwd": _read_encoder_layer,
    "aten::_native_multi_head_attention": _read_native,
}
"""Reader of each fused operation, by operator name."""
