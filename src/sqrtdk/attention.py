"""Attention for NumPy arrays: check the call, hand it to the backend, return output, statistics and weights."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import backends
from sqrtdk.arguments import ScaleLike, Window, as_float_array, float_code, validate
from sqrtdk.call import Call
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.reference import attend, differentiate
from sqrtdk.scales import Policy
from sqrtdk.statistics import AttentionStatistics

Array = npt.NDArray[Any]

# How kernel.h numbers mask kinds and bfloat16.
_BOOLEAN_MASK, _FIRST_FLOAT_MASK = 1, 2
_BFLOAT16 = 1


class Attention(NamedTuple):
    """What `attention` returns: output `[..., H, L, V]`; statistics and weights `[..., H, L, S]` if asked for."""

    output: Array
    statistics: AttentionStatistics | None
    weights: Array | None


class Gradients(NamedTuple):
    """What `attention_gradients` returns: gradients shaped as q, k and v, of the scale per row `[..., H, L]`,
    and of the sinks `[H]` (None without sinks)."""

    query: Array
    key: Array
    value: Array
    scale: Array
    sinks: Array | None


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    scale: ScaleLike = None,
    mask: npt.ArrayLike | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    statistics: bool = True,
    weights: bool = False,
) -> Attention:
    """softmax(cap(scale·q·kᵀ) + mask)·v, with statistics of every row from the same pass.

    Args:
        q: queries `[..., H, L, D]`, or `[L, D]` for one head; float16, bfloat16, float32 or float64.
        k: keys `[..., G, S, D]`; H is a multiple of G, each key/value head serves H/G query heads in a row.
        v: values `[..., G, S, V]`.
        scale: multiplies q·k. None (1/√dₖ), a number, an array that broadcasts to `[..., H, L]` (per head
            `[H, 1]`, per query `[H, L]`; one-dimensional only for one head `[L, D]`), a policy or its name.
        mask: boolean (True: may attend) or additive float (−inf: may not), broadcast to `[..., H, L, S]`.
        causal: query i sees key j ≤ i + causal_offset; combined with the mask by intersection.
        causal_offset: 0 if L = S; must be given otherwise: S − L aligns the ends, 0 the starts. It is the first query's
            absolute position, also for policies that ask for positions.
        window: (left, right): query i sees keys from i + offset − left to i + offset + right, ends included;
            None leaves a side open.
        softcap: logits become softcap·tanh(scores/softcap).
        sinks: one extra logit per query head `[H]` in the denominator.
        statistics: also return `AttentionStatistics`, arrays `[..., H, L]`.
        weights: also return the weights, an L×S matrix per head.

    Returns:
        `Attention(output, statistics, weights)`, output and weights in the dtype of q. The kernel computes in float64
        for float64 and in float32 for the others, its row sums in float64; the backend `reference` in float64
        (`sqrtdk.backends`). Neither holds all logits at once. A row that sees nothing gives zeros. What is masked has
        no influence, even if it is NaN; what is visible and NaN, or gives logits beyond float64, makes its rows NaN.

    With L = 2 and S = 4 the two usual alignments see (x: visible)::

        causal_offset=0 (starts)   x . . .      causal_offset=2 (ends)   x x x .
                                   x x . .                               x x x x

    Raises:
        InvalidValueError, InvalidTypeError: both `SqrtdkError`, naming the argument.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 16, 64))       # batch 2, 8 heads, 16 tokens
    >>> result = attention(q, k, v, causal=True)
    >>> result.output.shape, result.statistics.entropy.shape
    ((2, 8, 16, 64), (2, 8, 16))
    """
    call = validate(q, k, v, scale, mask, causal, causal_offset, window, softcap, sinks)
    plan = backends.plan()
    if plan.forward is None:
        backends.warn_without_kernel()
        return _run_reference(call, statistics, weights)
    if call.query.size == 0 or call.value.size == 0:  # nothing to compute, only shapes to get right
        return _run_reference(call, statistics, weights)
    output, described = _run_kernel(call, plan, statistics)
    return Attention(output, described, _run_reference(call, False, True).weights if weights else None)


def _run_reference(call: Call, statistics: bool, weights: bool) -> Attention:
    output = np.zeros((*call.rows_shape, call.d_v), dtype=call.dtype)
    every_weight = np.zeros((*call.rows_shape, call.keys), dtype=call.dtype) if weights else None
    described = _empty_statistics(call.rows_shape) if statistics else None
    for tile in call.tiles():
        attended = attend(call.rows(tile), statistics=statistics)
        with np.errstate(all="ignore"):
            output[tile] = attended.output
            if every_weight is not None:
                every_weight[tile] = attended.weights
        if described is not None and attended.statistics is not None:
            for name, array in described.items():
                array[tile] = getattr(attended.statistics, name)
    return Attention(
        output=call.restore(output),
        statistics=None
        if described is None
        else AttentionStatistics(**{name: call.restore(array) for name, array in described.items()}),
        weights=None if every_weight is None else call.restore(every_weight),
    )


def _run_kernel(call: Call, plan: backends.Plan, statistics: bool) -> tuple[Array, AttentionStatistics | None]:
    forward, level, threads = plan
    assert forward is not None
    query, key, value = call.query, call.key, call.value
    code, dtype, factor, mask = call.code, query.dtype, call.factor, call.mask
    if type(call.policy).prepare is not Policy.prepare:
        code, query, key, value = _prepare(call)
    elif code == _BFLOAT16 or not dtype.isnative:
        query, key, value = _as_kernel_reads(query), _as_kernel_reads(key), _as_kernel_reads(value)
    rows = query.shape[:-1]
    output = np.empty((*rows, value.shape[-1]), query.dtype)
    counts = np.empty((2, *rows), np.int64) if statistics else None
    numbers = np.empty((11, *rows)) if statistics else None
    is_number = type(factor) is float
    mask_kind = 0
    if mask is not None:
        mask_kind = _BOOLEAN_MASK if mask.dtype == np.bool_ else _FIRST_FLOAT_MASK + float_code(mask.dtype)
        mask = _as_kernel_reads(mask)
    done = forward(
        level,
        threads,
        code,
        query,
        key,
        value,
        factor if is_number else 0.0,
        None if is_number else factor,
        mask_kind,
        mask,
        call.first,
        call.last,
        0.0 if call.softcap is None else call.softcap,
        call.sinks,
        output,
        numbers,
        counts,
    )
    if not done:
        return _run_kernel(_copy_misaligned(call), plan, statistics)
    if output.dtype is not dtype:
        with np.errstate(all="ignore"):
            output = output.view(dtype) if code == _BFLOAT16 else output.astype(dtype)
    if counts is None or numbers is None:
        return output, None
    return output, AttentionStatistics.from_blocks(counts, numbers)


def _prepare(call: Call) -> tuple[int, Array, Array, Array]:
    """q and k as the policy wants them, and v, in the precision the kernel works in."""
    working = np.dtype(np.float64 if call.dtype.itemsize == 8 else np.float32)
    with np.errstate(all="ignore"):
        q, k = call.policy.prepare(call.q.astype(np.float64, order="C"), call.k.astype(np.float64, order="C"))
        return (
            float_code(working),
            np.asarray(q).astype(working, copy=False).reshape(call.query.shape),
            np.asarray(k).astype(working, copy=False).reshape(call.key.shape),
            call.value.astype(working, copy=False),
        )


def _as_kernel_reads(array: Array) -> Array:
    """bfloat16, which has no buffer format, as uint16; the other byte order turned round."""
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _copy_misaligned(call: Call) -> Call:
    """The call with every array copied whose elements do not lie at a multiple of their size."""

    def aligned(array: Array) -> Array:
        return array if array.flags.aligned else array.copy()

    mask = None if call.mask is None else aligned(call.mask)
    return replace(call, query=aligned(call.query), key=aligned(call.key), value=aligned(call.value), mask=mask)


def attention_gradients(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    grad_output: npt.ArrayLike,
    *,
    scale: ScaleLike = None,
    mask: npt.ArrayLike | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
) -> Gradients:
    """Gradients of Σ output·grad_output for the same call of `attention`, by recomputation in blocks of rows.

    Args:
        grad_output: ∂loss/∂output `[..., H, L, V]`, dtype of q; everything else as in `attention`.

    Returns:
        `Gradients(query, key, value, scale, sinks)`. The scale's is per row, Σⱼ ∂loss/∂scoreⱼ·(q·kⱼ), defined at
        scale 0 too; summed over a head and times the scale it is ∂loss/∂log scale, the temperature pressure.
        A row that sees nothing has and gives zero gradients.

    >>> import numpy as np
    >>> q, k, v, g = np.random.default_rng(0).standard_normal((4, 5, 8))
    >>> gradients = attention_gradients(q, k, v, g)
    >>> bool(np.isclose(gradients.scale.sum() / np.sqrt(8), (q * gradients.query).sum()))   # Euler's identity
    True
    """
    call = validate(q, k, v, scale, mask, causal, causal_offset, window, softcap, sinks)
    grad = as_float_array("grad_output", grad_output)
    expected = (*call.batch, *call.head_shape, call.queries, call.d_v)
    if grad.shape != expected:
        raise InvalidValueError(f"grad_output must have the output's shape {expected}, got {grad.shape}")
    if grad.dtype != call.dtype:
        raise InvalidTypeError(f"grad_output must have the dtype of query, {call.dtype}, got {grad.dtype}")
    grad = grad.reshape(*call.rows_shape, call.d_v)
    grad_q = np.zeros(call.q.shape)
    grad_k = np.zeros(call.k.shape)
    grad_v = np.zeros(call.v.shape)
    grad_scale = np.zeros(call.rows_shape)
    grad_sinks = np.zeros(call.rows_shape)
    for tile in call.tiles():
        found = differentiate(call.rows(tile), grad[tile].astype(np.float64, order="C"))
        n, g, _, _ = tile
        grad_q[tile] = found.query
        grad_k[n, g] += found.key.sum(axis=2, keepdims=True)
        grad_v[n, g] += found.value.sum(axis=2, keepdims=True)
        grad_scale[tile] = found.scale
        grad_sinks[tile] = found.sink
    with np.errstate(all="ignore"):
        wide_q, wide_k = call.q.astype(np.float64, order="C"), call.k.astype(np.float64, order="C")
        grad_q, grad_k = call.policy.pull_back(wide_q, wide_k, grad_q, grad_k)
        return Gradients(
            query=call.restore(grad_q.astype(call.dtype)),
            key=grad_k.astype(call.dtype).reshape(call.key.shape),
            value=grad_v.astype(call.dtype).reshape(*call.key.shape[:-1], call.d_v),
            scale=call.restore(grad_scale),
            sinks=None if call.sinks is None else grad_sinks.sum(axis=(0, 3)).reshape(-1),
        )


def _empty_statistics(shape: tuple[int, ...]) -> dict[str, Array]:
    whole = {"visible_keys": 0, "max_key": -1}
    return {
        item.name: np.full(shape, whole.get(item.name, 0), dtype=np.int64 if item.name in whole else np.float64)
        for item in fields(AttentionStatistics)
    }
