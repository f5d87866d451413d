"""Attention for tensors: check the call, work out its scale, run it with gradients, return what NumPy's returns."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from sqrtdk.arguments import (
    Window,
    require_flag,
    validate_range,
    validate_shapes,
    validate_softcap,
    warn_of_truth_values,
)
from sqrtdk.attention import Attention
from sqrtdk.call import OPEN_ABOVE, OPEN_BELOW
from sqrtdk.errors import InvalidTypeError
from sqrtdk.scales import Policy
from sqrtdk.statistics import AttentionStatistics, Sample
from sqrtdk.torch.arguments import (
    broadcast_heads,
    cast_for_autocast,
    require_dropout,
    require_finite_number,
    require_mask,
    require_sinks,
    require_tensors,
)
from sqrtdk.torch.autograd import run
from sqrtdk.torch.call import TensorCall
from sqrtdk.torch.kernel import attend_directly, is_unobserved
from sqrtdk.torch.operator import run_forward
from sqrtdk.torch.policies import TensorScale, apply_scale
from sqrtdk.torch.pressure import TemperaturePressure
from sqrtdk.torch.sampling import check_sample, sample_positions
from sqrtdk.torch.scales import LearnableScale


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: TensorScale = None,
    mask: Tensor | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    statistics: bool = True,
    weights: bool = False,
    dropout: float = 0.0,
    sample_rows: int | None = None,
    sample_seed: int = 0,
    pressure: TemperaturePressure | None = None,
) -> Attention:
    """softmax(cap(scale·q·kᵀ) + mask)·v on tensors, differentiable, with statistics of every row from the same pass.

    Args:
        q: queries `[..., H, L, D]`, or `[L, D]` for one head; float16, bfloat16, float32 or float64, any device.
        k: keys `[..., G, S, D]`; H is a multiple of G, each key/value head serves H/G query heads in a row.
        v: values `[..., G, S, V]`.
        scale: multiplies q·k. None (1/√dₖ), a number, a tensor that broadcasts to `[..., H, L]` (per head `[H, 1]`, per
            query `[H, L]`), a policy of `sqrtdk.scales` or its name, or a module of `sqrtdk.torch.nn` that learns it.
        mask, causal, causal_offset, window, softcap, sinks, weights: as in `sqrtdk.attention`, tensors for arrays.
        statistics: also return `AttentionStatistics` of tensors `[..., H, L]`; they have no gradient.
        dropout: probability with which a weight is set to zero (the others grow by 1/(1 − p)), drawn from torch's
            generator; statistics and weights describe the weights before it.
        sample_rows: statistics of that many query positions per head only, one from each of as many equal strata
            (`statistics.sample` tells which); maxima are then lower bounds. No random stream is touched.
        sample_seed: which rows are sampled.
        pressure: is told the q that enters the product, and has ∂loss/∂log scale per head after backward.

    Returns:
        `Attention(output, statistics, weights)`, output and weights in the dtype of q. On the CPU the kernel computes
        (`sqrtdk.backends`), elsewhere torch in blocks of rows. Gradients flow to q, k, v, scale, sinks and an additive
        mask, from output and weights; the softmax is computed anew for them, block by block. Second derivatives work,
        but hold all weights. A row that sees nothing gives zeros and zero gradients; what is masked has no influence.
        Under autocast q, k and v are cast as for torch's own attention.

    Raises:
        InvalidValueError, InvalidTypeError: both `SqrtdkError`, naming the argument. Whether a scale tensor or sinks
            are finite is looked up on the CPU alone.

    >>> q, k, v = torch.randn(3, 2, 8, 16, 64, generator=torch.Generator().manual_seed(0))
    >>> log_scale = torch.full((8, 1), -2.0, requires_grad=True)
    >>> result = attention(q, k, v, causal=True, scale=log_scale.exp())
    >>> result.output.sum().backward()
    >>> result.output.shape, result.statistics.entropy.shape, log_scale.grad.shape
    (torch.Size([2, 8, 16, 64]), torch.Size([2, 8, 16]), torch.Size([8, 1]))
    """
    if (
        (scale is None or type(scale) is float)
        and mask is None
        and causal_offset is None
        and window is None
        and softcap is None
        and sinks is None
        and not weights
        and dropout == 0.0
        and sample_rows is None
        and pressure is None
    ):
        plain = attend_directly(q, k, v, scale, causal, statistics)
        if plain is not None:
            output, numbers, counts = plain
            return Attention(cast(Any, output), _describe(counts, numbers) if statistics else None, None)
    q, k, v = require_tensors(*cast_for_autocast(q, k, v))
    heads, _ = validate_shapes(q.shape, k.shape, v.shape)
    offset, first, last = 0, OPEN_BELOW, OPEN_ABOVE
    if causal is not False or window is not None or causal_offset is not None:
        asks = isinstance(scale, str | Policy | LearnableScale)
        offset, first, last = validate_range(causal, causal_offset, window, q.shape[-2], k.shape[-2], asks)
    if mask is not None and is_unobserved() and isinstance(mask, Tensor) and mask.is_cpu and mask.is_floating_point():
        warn_of_truth_values(mask.detach())
    call = TensorCall(
        q,
        k,
        v,
        None,
        None if mask is None else require_mask(mask, q, (*q.shape[:-3], heads, q.shape[-2], k.shape[-2])),
        None if sinks is None else require_sinks(sinks, q, heads),
        None,
        None,
        1.0,
        0.0 if softcap is None else validate_softcap(softcap),
        first,
        last,
        require_dropout(dropout),
    )
    call = call._replace(factor=1.0 / math.sqrt(q.shape[-1])) if scale is None else apply_scale(call, scale, offset)
    if pressure is not None:
        if not isinstance(pressure, TemperaturePressure):
            raise InvalidTypeError(f"pressure must be a TemperaturePressure, got {type(pressure).__name__}")
        call = call._replace(query=pressure.follow(call.query))
    if call.dropout:
        call = call._replace(seed=_draw_seed(q))
    if sample_rows is None:
        found = run(call, statistics, weights)
        described = _describe(found.counts, found.numbers) if statistics else None
    else:
        check_sample(sample_rows, sample_seed)
        described = _describe_sample(call, sample_rows, sample_seed) if statistics else None
        found = run(call, False, weights)
    return Attention(
        # A policy that normalises works in float32 or better; the output is as the query was given.
        cast(Any, found.output if found.output.dtype == q.dtype else found.output.to(q.dtype)),
        described,
        cast(Any, found.weights).to(q.dtype) if weights else None,
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` to the letter of its signature, computed by sqrtdk.

    Args:
        query, key, value: `[..., H, L, D]`, `[..., G, S, D]`, `[..., G, S, V]`; leading axes broadcast.
        attn_mask: boolean (True: may attend) or additive float, broadcast to `[..., H, L, S]`.
        dropout_p: probability of dropping a weight, drawn from torch's generator.
        is_causal: query i sees key j ≤ i, aligned at the start whatever L and S; intersected with attn_mask.
        scale: multiplies q·k; None is 1/√dₖ.
        enable_gqa: H may be a multiple of G.

    It differs from torch's where torch's answer is wrong or undefined: key and value of different lengths and a scale
    that is not finite raise; a mask together with is_causal is their intersection; rows that see nothing are zero, with
    zero gradients; what is masked has no influence, even if it is NaN.

    >>> q, k, v = torch.randn(3, 1, 8, 5, 64, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(scaled_dot_product_attention(q, k, v),
    ...                torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)
    True
    """
    if attn_mask is None and dropout_p == 0.0 and (scale is None or type(scale) is float):
        plain = attend_directly(query, key, value, scale, is_causal, False)
        if plain is not None:
            return plain[0]
    query, key, value = require_tensors(*cast_for_autocast(query, key, value))
    if query.shape[:-2] != key.shape[:-2] or key.shape[:-2] != value.shape[:-2]:
        query, key, value = broadcast_heads(query, key, value, enable_gqa)
    heads, _ = validate_shapes(query.shape, key.shape, value.shape)
    if attn_mask is not None:
        shape = (*query.shape[:-3], heads, query.shape[-2], key.shape[-2])
        attn_mask = require_mask(attn_mask, query, shape, "attn_mask")
    call = TensorCall(
        query,
        key,
        value,
        None,
        attn_mask,
        None,
        None,
        None,
        1.0 / math.sqrt(query.shape[-1]) if scale is None else require_finite_number("scale", scale),
        0.0,
        OPEN_BELOW,
        0 if require_flag("is_causal", is_causal) else OPEN_ABOVE,
        0.0 if dropout_p == 0.0 else require_dropout(dropout_p, "dropout_p"),
    )
    if call.dropout:
        call = call._replace(seed=_draw_seed(query))
    return run(call, False, False).output


def _draw_seed(q: Tensor) -> Tensor:
    return torch.randint(2**62, (), dtype=torch.int64, device=q.device)


def _describe(counts: Tensor | None, numbers: Tensor | None, sample: Sample | None = None) -> AttentionStatistics:
    return AttentionStatistics.from_blocks(cast(Any, counts), cast(Any, numbers), sample=sample)


def _describe_sample(call: TensorCall, count: int, seed: int) -> AttentionStatistics:
    """Statistics of sampled rows, apart from the pass that computes the output."""
    queries = call.query.shape[-2]
    positions = sample_positions(queries, count, seed, call.query.device)

    def pick(x: Tensor | None, axis: int) -> Tensor | None:
        if x is None or x.dim() < -axis or x.shape[axis] != queries or queries == 1:
            return x
        return x.detach().index_select(axis, positions)

    sampled = call._replace(
        query=call.query.detach().index_select(-2, positions),
        key=call.key.detach(),
        value=call.value.detach()[..., :0],
        scale=pick(call.scale, -1),
        mask=pick(call.mask, -2),
        positions=positions,
        dropout=0.0,
        seed=None,
    )
    with torch.no_grad():
        found = run_forward(sampled, True, False)
    return _describe(found.counts, found.numbers, Sample(cast(Any, positions), queries))
