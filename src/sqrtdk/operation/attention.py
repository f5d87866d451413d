"""Attention for NumPy arrays: check the call, hand it to the backend, return output, statistics and weights."""

from __future__ import annotations

from typing import Any, NamedTuple, Never

import numpy as np
import numpy.typing as npt

from sqrtdk import backends
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.operation.arguments import ScaleLike, Window, as_float_array, validate
from sqrtdk.operation.call import FIELDS, PER_HEAD, Backward, Call, Forward, GradientRequest, PerHead, Wanted
from sqrtdk.operation.engines.choose import Engine, choose
from sqrtdk.operation.engines.kernel import KERNEL
from sqrtdk.operation.engines.reference import REFERENCE_ENGINE, sum_to
from sqrtdk.operation.hints import explain_unknown, hide_unknown
from sqrtdk.show.table import Table, describe_array
from sqrtdk.statistics import AttentionStatistics

Array = npt.NDArray[Any]


class _Triple(NamedTuple):
    output: Array
    statistics: AttentionStatistics | None
    weights: Array | None


class Attention(_Triple):
    """Result of `attention`: output `[..., H, L, V]`, statistics, and weights `[..., H, L, S]`; None if not asked for.

    A tuple of these three. `engine` names the engine that computed them in one pass; it is None in a traced graph.
    """

    engine: str | None = None

    def _replace(self, **changes: Any) -> Attention:
        """Return the result with another output, other statistics or other weights."""
        result = Attention(*super()._replace(**changes))
        result.engine = self.engine
        return result

    def __repr__(self) -> str:
        return self._say_shapes() if self.statistics is None else f"{self._say_shapes()}\n{self.statistics!r}"

    def _repr_html_(self) -> str:
        statistics = "" if self.statistics is None else self.statistics._repr_html_()
        return Table(self._say_shapes(), (), []).as_html() + statistics

    def _say_shapes(self) -> str:
        weights = "no weights" if self.weights is None else f"weights {describe_array(self.weights)}"
        statistics = "no statistics" if self.statistics is None else "statistics"
        by = "" if self.engine is None else f", by {self.engine}"
        return f"Attention: output {describe_array(self.output)}, {statistics}, {weights}{by}"


new_attention = tuple.__new__  # makes an `Attention` in half the time


class Gradients(NamedTuple):
    """Result of `attention_gradients`: gradients of q, k and v in their shapes, of the scale per row `[..., H, L]`, of
    the sinks `[H]` and of the ALiBi slopes in their shape; None without sinks or slopes."""

    query: Array
    key: Array
    value: Array
    scale: Array
    sinks: Array | None
    alibi: Array | None = None

    def __repr__(self) -> str:
        return self._table().as_text()

    def _repr_html_(self) -> str:
        return self._table().as_html()

    def _table(self) -> Table:
        parts = [(name, "none" if part is None else describe_array(part)) for name, part in self._asdict().items()]
        return Table(f"Gradients({', '.join(self._fields)})", ("", ""), parts, left=2)


@hide_unknown
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
    alibi: npt.ArrayLike | None = None,
    statistics: bool = True,
    weights: bool = False,
    **unknown: Never,
) -> Attention:
    """Return softmax(cap(scale·q·kᵀ) + mask + alibi)·v, with statistics of every row from the same pass.

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
        alibi: slopes, one per query head `[H]` or `[..., H]`: slope·(j − i − causal_offset) is added to the logit of
            query i and key j (ALiBi's linear bias, Press et al. 2021, with slopes > 0 for a causal head).
        statistics: also return `AttentionStatistics`, arrays `[..., H, L]`.
        weights: also return the weights, an L×S matrix per head.

    Returns:
        `Attention(output, statistics, weights)`, output and weights in the dtype of q. The kernel computes in float64
        for float64 and in float32 for the others, its row sums in float64; the backend `reference` in float64
        (`sqrtdk.backends`). Neither holds all logits at once. A row that sees nothing gives zeros. Masked keys have no
        influence, even if they are NaN. A visible NaN, or a logit beyond float64, makes its rows NaN without an error;
        `print(result)` counts such rows.

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
    if unknown:
        raise explain_unknown(attention, unknown)
    per_head = None if sinks is None and alibi is None else {"sinks": sinks, "alibi": alibi}
    call = validate(q, k, v, scale, mask, causal, causal_offset, window, softcap, per_head)
    plan = backends.plan()
    wanted = Wanted(statistics, weights)
    engine = _choose(call, wanted, plan)
    done = engine.forward(call if call.policy is None else _prepare(call, engine), wanted, plan)
    dtype = call.query.dtype
    described = None
    if statistics:
        described = AttentionStatistics.from_blocks(done.counts, done.measures, first_position=call.band.offset)
    output = done.output if done.output.dtype is dtype else _narrow(done.output, dtype)
    result = new_attention(Attention, (output, described, _narrow(done.weights, dtype) if weights else None))
    result.engine = engine.name
    return result


def _choose(call: Call, wanted: Wanted | GradientRequest, plan: backends.Plan) -> Engine:
    if plan.forward is None:
        backends.warn_without_kernel()
        return choose((REFERENCE_ENGINE,), call, wanted, plan)
    return choose((KERNEL, REFERENCE_ENGINE), call, wanted, plan)


def _prepare(call: Call, engine: Engine) -> Call:
    """Return the call with q and k prepared by its policy, in the precision in which the engine computes."""
    assert call.policy is not None
    is_wide = engine is REFERENCE_ENGINE or call.query.dtype.itemsize == 8
    working = np.dtype(np.float64 if is_wide else np.float32)
    with np.errstate(all="ignore"):
        q, k = call.policy.prepare(_widen(call.query), _widen(call.key))
        return call._replace(
            query=np.asarray(q).astype(working, copy=False),
            key=np.asarray(k).astype(working, copy=False),
            value=call.value.astype(working, copy=False),
            policy=None,
        )


def _widen(array: Array) -> Array:
    return array.astype(np.float64, order="C")


def _narrow(array: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)


@hide_unknown
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
    alibi: npt.ArrayLike | None = None,
    **unknown: Never,
) -> Gradients:
    """Return the gradients of Σ output·grad_output for the same call of `attention`, recomputed in blocks of rows.

    Args:
        grad_output: ∂loss/∂output `[..., H, L, V]`, dtype of q; everything else as in `attention`.

    Returns:
        `Gradients(query, key, value, scale, sinks, alibi)`. The gradient of the scale is per row,
        Σⱼ ∂loss/∂scoreⱼ·(q·kⱼ), also defined at scale 0. Its sum over a head, times the scale, is ∂loss/∂log scale, the
        temperature pressure. A row that sees nothing has zero gradients and adds nothing to those of keys and values.

    >>> import numpy as np
    >>> q, k, v, g = np.random.default_rng(0).standard_normal((4, 5, 8))
    >>> gradients = attention_gradients(q, k, v, g)
    >>> bool(np.isclose(gradients.scale.sum() / np.sqrt(8), (q * gradients.query).sum()))   # Euler's identity
    True
    """
    if unknown:
        raise explain_unknown(attention_gradients, unknown)
    per_head = None if sinks is None and alibi is None else {"sinks": sinks, "alibi": alibi}
    call = validate(q, k, v, scale, mask, causal, causal_offset, window, softcap, per_head)
    grad = as_float_array("grad_output", grad_output)
    expected = (*call.query.shape[:-1], call.d_v)
    if grad.shape != expected:
        raise InvalidValueError("grad_output", f"must have the output's shape {expected}, got {grad.shape}")
    dtype = call.query.dtype
    if grad.dtype != dtype:
        raise InvalidTypeError("grad_output", f"must have the dtype of q, {dtype}, got {grad.dtype}")
    plan, request = backends.plan(), GradientRequest(grad)
    engine = _choose(call, request, plan)
    ready = call if call.policy is None else _prepare(call, engine)
    request = request._replace(output=grad.astype(ready.query.dtype, copy=False))
    gradients = engine.backward(ready, request, Forward(None), plan)
    to_query, to_key = gradients.query, gradients.key
    if call.policy is not None:
        with np.errstate(all="ignore"):
            to_query, to_key = call.policy.pull_back(
                _widen(call.query), _widen(call.key), to_query.astype(np.float64), to_key.astype(np.float64)
            )
    return Gradients(
        query=_narrow(to_query, dtype),
        key=_narrow(to_key, dtype),
        value=_narrow(gradients.value, dtype),
        scale=gradients.scale,
        **{name: _sum_per_head(gradients, call, name, per_head) for name in PER_HEAD},
    )


def _sum_per_head(gradients: Backward, call: Call, name: str, per_head: PerHead) -> Array | None:
    """Return the gradient of a field per head, summed over the rows to the shape of its argument."""
    if per_head is None or per_head[name] is None:
        return None
    per_row, field = getattr(gradients, name), getattr(call, name)
    if FIELDS[name].lacks == 2:
        axes = tuple(axis for axis in range(per_row.ndim) if axis != per_row.ndim - 2)
        return np.asarray(per_row.sum(axis=axes)).reshape(field.shape)
    return sum_to(per_row, field.shape).reshape(np.shape(per_head[name]))
