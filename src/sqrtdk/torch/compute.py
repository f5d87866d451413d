"""The one path of every call on tensors: the kernel's shortcut, or check, choose an engine, run, describe."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError
from sqrtdk.operation.arguments import (
    QKV,
    Names,
    Window,
    check_per_head,
    validate_band,
    validate_shapes,
    validate_softcap,
)
from sqrtdk.operation.attention import Attention, new_attention
from sqrtdk.operation.call import Call, PerHead, Wanted, has_positions
from sqrtdk.operation.visibility import ALIGNED, OPEN, Band, as_truth
from sqrtdk.scales import Policy, default_factor
from sqrtdk.statistics import AttentionStatistics, Sample
from sqrtdk.torch.arguments import (
    broadcast_heads,
    cast_for_autocast,
    require_dropout,
    require_finite_number,
    require_mask,
    require_per_head,
    require_tensors,
)
from sqrtdk.torch.autograd import record_plain, run
from sqrtdk.torch.engines.kernel import TENSOR_KERNEL
from sqrtdk.torch.engines.tiles import find_position_bias
from sqrtdk.torch.internals import without_derivatives
from sqrtdk.torch.pressure import TemperaturePressure
from sqrtdk.torch.sampling import check_sample, sample_positions
from sqrtdk.torch.scales import LearnableScale, Scaled, TensorScale, apply_scale


class Dialect(NamedTuple):
    """Argument names of a signature, for errors, and its meaning of broadcasting and causality.

    Args:
        tensors: the names of queries, keys and values, for errors.
        mask, causal, dropout: the names of further arguments.
        broadcasts: None, or leading axes broadcast as in torch: "heads" too, or all axes but "grouped" heads.
        starts_aligned: causal means key j ≤ i whatever L and S.
    """

    tensors: Names = QKV
    mask: str = "mask"
    causal: str = "causal"
    dropout: str = "dropout"
    broadcasts: str | None = None
    starts_aligned: bool = False


OURS = Dialect()
TORCHS = Dialect(("query", "key", "value"), "attn_mask", "is_causal", "dropout_p", "heads", True)
TORCHS_GROUPED = TORCHS._replace(broadcasts="grouped")
MODELS = Dialect(TORCHS.tensors, "attention_mask")


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: TensorScale = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    dialect: Dialect = OURS,
    *,
    causal_offset: int | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    per_head: PerHead = None,
    statistics: bool = False,
    weights: bool = False,
    sample_rows: int | None = None,
    sample_seed: int = 0,
    pressure: TemperaturePressure | None = None,
) -> Attention:
    """Return the result of `sqrtdk.torch.attention` for a call through any of the signatures."""
    if (
        dialect.broadcasts is None  # torch's signature has tried the shortcut
        and mask is None
        and causal_offset is None
        and window is None
        and softcap is None
        and per_head is None
        and not weights
        and dropout == 0.0
        and sample_rows is None
        and pressure is None
    ):
        plain = TENSOR_KERNEL.shortcut(q, k, v, scale, causal, statistics, record_plain)
        if plain is not None:
            output, measures, counts = plain
            described = None
            if statistics:
                first = 0 if q.shape[-2] == k.shape[-2] else None
                described = AttentionStatistics.from_blocks(counts, measures, first_position=first)  # type: ignore[arg-type]
            result = new_attention(Attention, (output, described, None))
            result.engine = TENSOR_KERNEL.name
            return result
    q, k, v = require_tensors(*cast_for_autocast(q, k, v), dialect.tensors)
    if dialect.broadcasts is not None and (q.shape[:-2] != k.shape[:-2] or k.shape[:-2] != v.shape[:-2]):
        q, k, v = broadcast_heads(q, k, v, dialect.broadcasts == "grouped")
    heads = validate_shapes(q.shape, k.shape, v.shape, dialect.tensors)
    band = _find_band(q, k, scale, causal, causal_offset, window, has_positions(per_head), dialect)
    if mask is not None:
        mask = require_mask(mask, q, (*q.shape[:-3], heads, q.shape[-2], k.shape[-2]), dialect.mask)
    p = 0.0 if dropout == 0.0 else require_dropout(dropout, dialect.dropout)
    if scale is None:
        scaled = Scaled(q, k, v, None, default_factor(q.shape[-1]))
    else:
        scale = require_finite_number("scale", cast(float, scale)) if dialect.broadcasts is not None else scale
        scaled = apply_scale(scale, q, k, v, mask, band)
    query, by_head = _follow(pressure, scaled.query), check_per_head(require_per_head, per_head, q)
    seed = torch.randint(2**62, (), dtype=torch.int64, device=q.device) if p else None
    cap = 0.0 if softcap is None else validate_softcap(softcap)
    vectors = (query, scaled.key, scaled.value)
    call = Call._make((*vectors, scaled.scale, mask, *by_head, seed, scaled.factor, cap, p, band, None))
    sample = described = None
    if sample_rows is not None:
        check_sample(sample_rows, sample_seed)
        sample = sample_positions(call.queries, sample_rows, sample_seed, q.device) if statistics else None
    done, engine = run(call, Wanted(statistics and sample is None, weights))
    if sample is not None:
        described = _describe_sample(call, sample)
    elif statistics:
        described = AttentionStatistics.from_blocks(done.counts, done.measures, first_position=band.offset)
    # A policy that normalises works in float32 or better; the output has the dtype of the given query.
    output = _narrow(done.output, q.dtype)
    result = new_attention(Attention, (output, described, _narrow(done.weights, q.dtype) if weights else None))
    if engine is not None:
        result.engine = engine
    return result


def _narrow(tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _find_band(
    q: Tensor,
    k: Tensor,
    scale: TensorScale,
    causal: bool,
    causal_offset: int | None,
    window: Window | None,
    uses_positions: bool,
    dialect: Dialect,
) -> Band:
    if causal is not False or window is not None or causal_offset is not None or uses_positions:
        if dialect.starts_aligned and checks.flag(dialect.causal, causal):
            causal_offset = 0
        asks = isinstance(scale, str | Policy | LearnableScale)
        return validate_band(causal, causal_offset, window, q.shape[-2], k.shape[-2], asks, uses_positions)
    return ALIGNED if q.shape[-2] == k.shape[-2] else OPEN


def _follow(pressure: TemperaturePressure | None, query: Tensor) -> Tensor:
    if pressure is None:
        return query
    if not isinstance(pressure, TemperaturePressure):
        raise InvalidTypeError("pressure", f"must be a TemperaturePressure, got {type(pressure).__name__}")
    return pressure.follow(query)


def _describe_sample(call: Call, positions: Tensor) -> AttentionStatistics:
    """Return the statistics of sampled rows: a second call, of those rows alone, without values."""
    queries = call.queries

    def pick(x: Tensor | None, axis: int) -> Tensor | None:
        if x is None or x.dim() < -axis or x.shape[axis] != queries or queries == 1:
            return x
        return x.index_select(axis, positions)

    mask, keys = pick(call.mask, -2), torch.arange(call.keys, device=positions.device)
    in_range = call.band.sees(positions, keys)
    bias = find_position_bias(call, positions, keys, lambda x: cast(Tensor, pick(x.detach(), -1)), torch.float64).bias
    if bias is not None:
        # The sampled rows are not consecutive: their distances go into the mask.
        if mask is None:
            mask = bias
        elif mask.dtype == torch.bool:
            mask = bias.masked_fill(~as_truth(mask), -torch.inf)
        else:
            mask = mask + bias
    if in_range is not None:
        # The visible range of rows that are not consecutive goes into the mask.
        if mask is None:
            mask = in_range
        elif mask.dtype == torch.bool:
            mask = as_truth(mask) & in_range
        else:
            mask = mask.masked_fill(~in_range, -torch.inf)
    with without_derivatives():
        sampled = Call(
            call.query.detach().index_select(-2, positions),
            call.key.detach(),
            call.value.detach()[..., :0],
            pick(None if call.scale is None else call.scale.detach(), -1),
            None if mask is None else mask.detach(),
            None if call.sinks is None else call.sinks.detach(),
            factor=call.factor,
            softcap=call.softcap,
        )
        done, _ = run(sampled, Wanted(statistics=True))
    sample = Sample(cast(Any, positions), queries)
    return AttentionStatistics.from_blocks(done.counts, done.measures, sample=sample, first_position=call.band.offset)
