"""Attention for tensors: with the arguments and the result of `sqrtdk.attention`, and with torch's own signature."""

from __future__ import annotations

from typing import Never, TypeGuard

from torch import Tensor

from sqrtdk.operation.arguments import Window
from sqrtdk.operation.attention import Attention
from sqrtdk.operation.hints import explain_unknown, hide_unknown, warn_of_inverse_scale, warn_of_truth_values
from sqrtdk.torch.autograd import record_plain
from sqrtdk.torch.compute import TORCHS, TORCHS_GROUPED, compute
from sqrtdk.torch.engines.kernel import TENSOR_KERNEL
from sqrtdk.torch.internals import is_unobserved
from sqrtdk.torch.pressure import TemperaturePressure
from sqrtdk.torch.scales import TensorScale

_shortcut = TENSOR_KERNEL.shortcut
_NUMBERS = (float, int)


@hide_unknown
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
    alibi: Tensor | None = None,
    statistics: bool = True,
    weights: bool = False,
    dropout: float = 0.0,
    sample_rows: int | None = None,
    sample_seed: int = 0,
    pressure: TemperaturePressure | None = None,
    **unknown: Never,
) -> Attention:
    """Return softmax(cap(scale·q·kᵀ) + mask + alibi)·v on tensors, differentiable, with statistics of every row.

    Args:
        q: queries `[..., H, L, D]`, or `[L, D]` for one head; float16, bfloat16, float32 or float64, any device.
        k: keys `[..., G, S, D]`; H is a multiple of G, each key/value head serves H/G query heads in a row.
        v: values `[..., G, S, V]`.
        scale: multiplies q·k. None (1/√dₖ), a number, a tensor that broadcasts to `[..., H, L]` (per head `[H, 1]`, per
            query `[H, L]`), a policy of `sqrtdk.scales` or its name, or a module of `sqrtdk.torch.nn` that learns it.
        mask, causal, causal_offset, window, softcap, sinks, alibi, weights: as in `sqrtdk.attention`, but tensors.
        statistics: also return `AttentionStatistics` of tensors `[..., H, L]`; they have no gradient.
        dropout: probability with which a weight is set to zero (the others grow by 1/(1 − p)); the seed comes from
            torch's generator. Statistics and weights describe the weights before dropout.
        sample_rows: statistics of that many query positions per head only, one from each of as many equal strata
            (`statistics.sample` has them); maxima are then lower bounds. No random stream is used.
        sample_seed: selects the sampled rows.
        pressure: follows the q that enters the product, and has ∂loss/∂log scale per head after the backward pass.

    Returns:
        `Attention(output, statistics, weights)`, output and weights in the dtype of q, and its `engine`: the kernel on
        the CPU (`sqrtdk.backends`), torch in blocks of rows elsewhere. Gradients flow from output and weights to q, k,
        v, scale, sinks, alibi and an additive mask; the backward pass recomputes the softmax block by block.
        Second derivatives work, but hold all weights. A row that sees nothing gives zeros and zero gradients. Masked
        keys have no influence. Under autocast q, k and v are cast as for torch's own attention.

    Raises:
        InvalidValueError, InvalidTypeError: both `SqrtdkError`, naming the argument. Scale tensors and sinks are
            checked for NaN and infinity on the CPU only.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 8, 16, 64, generator=torch.Generator().manual_seed(0))
    >>> log_scale = torch.full((8, 1), -2.0, requires_grad=True)
    >>> result = attention(q, k, v, causal=True, scale=log_scale.exp())
    >>> result.output.sum().backward()
    >>> result.output.shape, result.statistics.entropy.shape, log_scale.grad.shape
    (torch.Size([2, 8, 16, 64]), torch.Size([2, 8, 16]), torch.Size([8, 1]))
    """
    if unknown:
        raise explain_unknown(attention, unknown)
    if scale is not None and isinstance(scale, _NUMBERS) and scale > 1.0 and _is_readable(q) and _is_readable(k):
        warn_of_inverse_scale(scale, q, k)
    if mask is not None and _is_readable(mask) and mask.is_floating_point():
        warn_of_truth_values(mask.detach())
    per_head = None if sinks is None and alibi is None else {"sinks": sinks, "alibi": alibi}
    return compute(
        q,
        k,
        v,
        scale,
        mask,
        causal,
        dropout,
        causal_offset=causal_offset,
        window=window,
        softcap=softcap,
        per_head=per_head,
        statistics=statistics,
        weights=weights,
        sample_rows=sample_rows,
        sample_seed=sample_seed,
        pressure=pressure,
    )


def _is_readable(tensor: object) -> TypeGuard[Tensor]:
    """Return whether the numbers of a tensor can be read here: it is on the CPU, and nothing traces the call."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_cpu
        and not tensor.is_nested
        and not tensor.is_sparse
        and is_unobserved()
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
    """Return the output of attention, with the signature of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query, key, value: `[..., H, L, D]`, `[..., G, S, D]`, `[..., G, S, V]`; leading axes broadcast.
        attn_mask: boolean (True: may attend) or additive float, broadcast to `[..., H, L, S]`.
        dropout_p: probability of dropping a weight; the seed comes from torch's generator.
        is_causal: query i sees key j ≤ i, aligned at the start whatever L and S; intersected with attn_mask.
        scale: multiplies q·k; None is 1/√dₖ.
        enable_gqa: H may be a multiple of G.

    It differs from torch's function where torch's answer is wrong or undefined. Key and value of different lengths and
    a scale that is not finite raise. A mask together with is_causal is their intersection. Rows that see nothing are
    zero, with zero gradients. Masked keys have no influence, even if they are NaN.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 8, 5, 64, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(scaled_dot_product_attention(q, k, v),
    ...                torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)
    True
    """
    if attn_mask is None and dropout_p == 0.0:
        # `compute` begins in the same way, but passing its arguments and result takes a part of a short call.
        plain = _shortcut(query, key, value, scale, is_causal, False, record_plain)
        if plain is not None:
            return plain[0]
    dialect = TORCHS_GROUPED if enable_gqa else TORCHS
    output: Tensor = compute(query, key, value, scale, attn_mask, is_causal, dropout_p, dialect)[0]  # type: ignore[assignment]
    return output
