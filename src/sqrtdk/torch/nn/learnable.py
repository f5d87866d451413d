"""Learnable scales: a temperature per head, a temperature per query, and normalised q and k with a gain.

Each is 1/√dₖ times the exponential of a number that is exactly 0 at the start. So step 0 is the default, the scale is
positive without a constraint, and weight decay pulls towards the default instead of towards a scale of 1.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sqrtdk import checks
from sqrtdk.errors import InvalidValueError, unknown_name
from sqrtdk.scales import LEARNABLE, Cosine, Policy, default_factor
from sqrtdk.scales import QKNorm as FixedQKNorm
from sqrtdk.torch.scales import LearnableScale, TensorContext


def make_learnable(name: str, d_k: int, heads: int | None = None) -> LearnableScale:
    """Return a learnable scale by its name in `sqrtdk.scales.LEARNABLE`, with one parameter per head.

    >>> make_learnable("position", d_k=64, heads=8)
    QueryTemperature(d_k=64, heads=8, source='position')
    """
    if name not in LEARNABLE:
        raise unknown_name("learnable scale", name, list(LEARNABLE))
    if name == "learned":
        return LearnedTemperature(d_k, heads)
    if name == "qk_norm":
        return QKNorm(d_k, heads)
    return QueryTemperature(d_k, heads, source="query" if name == "query" else "position")


class HeadScale(LearnableScale):
    """Base class of the three scales: dₖ and the number of heads."""

    def __init__(self, d_k: int, heads: int | None) -> None:
        super().__init__()
        self.d_k = checks.integer("d_k", d_k, 1)
        self.heads = None if heads is None else checks.integer("heads", heads, 1)

    def require_fit(self, d_k: int, heads: int) -> None:
        """Refuse a call whose dₖ or number of query heads is not the module's."""
        if d_k != self.d_k:
            raise InvalidValueError(f"scale was made for d_k = {self.d_k}, got queries of length {d_k}")
        if self.heads not in (None, heads):
            raise InvalidValueError(f"scale was made for {self.heads} heads, got {heads} query heads")

    def _require_call(self, query: Tensor) -> None:
        self.require_fit(query.shape[-1], query.shape[-3] if query.ndim > 2 else 1)

    def _zeros(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape if self.heads is None else (self.heads, *shape)))

    def _beside_rows(self, per_head: Tensor, query: Tensor) -> Tensor:
        """Return `[H, ...]` as `[H, 1, ...]`, which broadcasts to rows `[..., H, L, ...]`; a shared one as it is."""
        if self.heads is None:
            return per_head
        return per_head.unsqueeze(1) if query.ndim > 2 else per_head

    def extra_repr(self) -> str:
        """The dₖ and the heads, for `print`."""
        return f"d_k={self.d_k}, heads={self.heads}"


class _HeadGain(HeadScale):
    """One learned factor per head, or for all heads: start·e^log_gain."""

    def __init__(self, d_k: int, heads: int | None, max_log_scale: float | None, log_start: float) -> None:
        super().__init__(d_k, heads)
        self.log_gain = self._zeros()
        self.max_log_scale = max_log_scale
        self._most = None if max_log_scale is None else _require_above(max_log_scale, log_start) - log_start

    @property
    def temperature(self) -> Tensor:
        """Present τ/√dₖ, `[H]` or `[]`, detached: below 1 sharper than the default, above 1 softer."""
        return (-self._bounded(self.log_gain.detach())).exp()

    def factor(self, context: TensorContext) -> Tensor:
        """Return e^log_gain/√dₖ, `[H, 1]` or `[]`."""
        self._require_call(context.query)
        gain = self._bounded(self.log_gain.to(_working_dtype(context.query, self.log_gain))).exp()
        return self._beside_rows(gain * default_factor(self.d_k), context.query)

    def _bounded(self, log_gain: Tensor) -> Tensor:
        return log_gain if self._most is None else _clamp_above(log_gain, self._most)

    def extra_repr(self) -> str:
        """The dₖ, the heads and the clamp, for `print`."""
        clamp = "" if self.max_log_scale is None else f", max_log_scale={self.max_log_scale:.4g}"
        return super().extra_repr() + clamp


class LearnedTemperature(_HeadGain):
    """scale = e^s/√dₖ, so τ = √dₖ·e^−s, with s learned: one for all heads, or one for each.

    The parameter `log_gain` holds s, 0 at the start. After Radford et al. 2021 (CLIP: the temperature is
    learned as a logarithm, and scales above 100 are cut off) and Liu et al. 2022 (Swin Transformer V2: one per head).

    Args:
        d_k: length of queries and keys.
        heads: query heads H, each with an s of its own; None: one s for all.
        max_log_scale: upper limit of ln(scale), such as ln 100. Beyond it the scale stays at the limit and a gradient
            passes only if it lowers s, so that the parameter neither runs away nor gets stuck. None: no limit.

    >>> import sqrtdk.torch
    >>> q, k, v = torch.randn(3, 2, 8, 10, 64, generator=torch.Generator().manual_seed(0))
    >>> scale = LearnedTemperature(d_k=64, heads=8)
    >>> torch.equal(sqrtdk.torch.attention(q, k, v, scale=scale).output, sqrtdk.torch.attention(q, k, v).output)
    True
    >>> scale.temperature.shape                                                 # τ/√dₖ, one per head
    torch.Size([8])
    """

    name = "learned"

    def __init__(self, d_k: int, heads: int | None = None, *, max_log_scale: float | None = None) -> None:
        super().__init__(d_k, heads, max_log_scale, log_start=-0.5 * math.log(checks.integer("d_k", d_k, 1)))


class QueryTemperature(HeadScale):
    """A temperature for each query: scale = e^s/√dₖ with s learned from the query vector or from its position.

    From the query s = w_h·q/√dₖ + b_h (q and w of unit variance give s unit variance at any dₖ); from the position
    s = a_h·ln(1 + pos) + b_h, so the scale follows a power of the position. All of w, a, b are 0 at the start.
    After Zhang et al. 2024 (Selective Self-Attention), who let τ depend on both; in log space here.

    Args:
        d_k: length of queries and keys.
        heads: query heads H, each with parameters of its own; None: all share them.
        source: ``"query"`` (`weight` `[H, dₖ]`, `bias` `[H]`) or ``"position"`` (`slope` `[H]`, `bias` `[H]`).
            Positions count from 0 at the first key, with a cache too; before the first key they count as 0.

    >>> import sqrtdk.torch
    >>> q, k, v = torch.randn(3, 2, 8, 10, 64, generator=torch.Generator().manual_seed(0))
    >>> scale = QueryTemperature(d_k=64, heads=8)
    >>> default = sqrtdk.torch.attention(q, k, v).output
    >>> torch.equal(sqrtdk.torch.attention(q, k, v, scale=scale).output, default)
    True
    >>> _ = nn.init.normal_(scale.weight)                                       # queries now differ in sharpness
    >>> torch.allclose(sqrtdk.torch.attention(q, k, v, scale=scale).output, default)
    False
    """

    name = "query"

    def __init__(self, d_k: int, heads: int | None = None, *, source: Literal["query", "position"] = "query") -> None:
        super().__init__(d_k, heads)
        if source not in ("query", "position"):
            raise unknown_name("source", source, ["query", "position"])
        self.source = source
        if source == "query":
            self.weight = self._zeros(self.d_k)
        else:
            self.slope = self._zeros()
        self.bias = self._zeros()

    def factor(self, context: TensorContext) -> Tensor:
        """Return e^s/√dₖ, `[..., H, L]` from the query, `[H, L]` or `[L]` from the position."""
        query = context.query
        self._require_call(query)
        dtype = _working_dtype(query, self.bias)
        bias = self._beside_rows(self.bias.to(dtype), query)
        if self.source == "query":
            weight = self._beside_rows(self.weight.to(dtype), query)
            # A NaN query affects its own row only, and nothing if it sees no key: its temperature stays a number.
            query = torch.where(torch.isfinite(query).all(dim=-1, keepdim=True), query, 0.0)
            # Not a matrix product: autocast would compute it, and so ln τ, in half precision.
            log_gain = (query.to(dtype) * weight).sum(dim=-1) / math.sqrt(self.d_k) + bias
        else:
            position = context.positions.clamp(min=0).to(dtype).log1p()
            log_gain = self._beside_rows(self.slope.to(dtype), query) * position + bias
            # A factor shared by all heads is still one per query: two axes say so to a call with heads.
            log_gain = log_gain.unsqueeze(0) if log_gain.ndim == 1 and query.ndim > 2 else log_gain
        return log_gain.exp() * default_factor(self.d_k)

    def extra_repr(self) -> str:
        """The dₖ, the heads and the source, for `print`."""
        return f"{super().extra_repr()}, source={self.source!r}"


class QKNorm(_HeadGain):
    """Logits e^s·√dₖ·cos(q, k) with s learned: the default's logit variance at the start, whatever the size of q, k.

    ``norm="rms"`` divides q and k by their root mean square and multiplies by e^s/√dₖ; ``norm="l2"`` divides by their
    length and multiplies by e^s·√dₖ. In exact arithmetic the two are one function; they differ in what enters the
    product (entries of size 1, or 1/√dₖ). At the start they equal the policies `sqrtdk.scales.QKNorm()` and
    `sqrtdk.scales.Cosine(½ ln dₖ)` (so Swin V2's start, a factor of 10, at dₖ = 100).
    Sources: Henry et al. 2020 (l2, learned gain), Liu et al. 2022 (Swin Transformer V2: l2, gain per head, at most
    100), Dehghani et al. 2023 (ViT-22B).

    Args:
        d_k: length of queries and keys.
        heads: query heads H, each with an s of its own; None: one s for all.
        norm: ``"rms"`` or ``"l2"``.
        max_log_scale: upper limit of the logarithm of what multiplies the cosine, ln 100 in Swin V2; gradients beyond
            it as in `LearnedTemperature`. None: no limit.

    The parameter `log_gain` holds s.

    >>> import sqrtdk.torch
    >>> q, k, v = torch.randn(3, 2, 8, 10, 64, generator=torch.Generator().manual_seed(0))
    >>> scale = QKNorm(d_k=64, heads=8, norm="l2", max_log_scale=math.log(100))
    >>> small, large = (sqrtdk.torch.attention(c * q, k, v, scale=scale).output for c in (1.0, 1000.0))
    >>> torch.allclose(small, large, atol=1e-5)
    True
    """

    name = "qk_norm"

    def __init__(
        self,
        d_k: int,
        heads: int | None = None,
        *,
        norm: Literal["rms", "l2"] = "rms",
        max_log_scale: float | None = None,
    ) -> None:
        super().__init__(d_k, heads, max_log_scale, log_start=0.5 * math.log(checks.integer("d_k", d_k, 1)))
        if norm not in ("rms", "l2"):
            raise unknown_name("norm", norm, ["rms", "l2"])
        self.norm = norm
        self._fixed: Policy = FixedQKNorm() if norm == "rms" else Cosine()

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k, each vector divided by its own size."""
        return self._fixed.prepare(q, k)

    def factor(self, context: TensorContext) -> Tensor:
        """Return e^s/√dₖ (rms) or e^s·√dₖ (l2), `[H, 1]` or `[]`."""
        factor = super().factor(context)
        return factor if self.norm == "rms" else factor * self.d_k

    def extra_repr(self) -> str:
        """The dₖ, the heads, the clamp and the norm, for `print`."""
        return f"{super().extra_repr()}, norm={self.norm!r}"


class _ClampAbove(torch.autograd.Function):
    """min(x, most); beyond the limit only a gradient that lowers x passes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, most: float) -> Tensor:
        return x.clamp(max=most)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.most = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        (grad,) = grads
        return torch.where((x < ctx.most) | (grad > 0), grad, 0.0), None


def _clamp_above(x: Tensor, most: float) -> Tensor:
    clamped: Tensor = _ClampAbove.apply(x, most)  # type: ignore[no-untyped-call]
    return clamped


def _working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if one of the tensors is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _require_above(max_log_scale: float, start: float) -> float:
    checks.number("max_log_scale", max_log_scale, kind="a number or None")
    if max_log_scale < start:
        raise InvalidValueError("max_log_scale", f"must not be below the start, {start:.4g}, got {max_log_scale}")
    return float(max_log_scale)
