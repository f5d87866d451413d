"""Multi-head attention as a module: four projections around `sqrtdk.torch.attention`, with any scale.

Axes: B any leading axes, H query heads, G key/value heads, L queries, S keys, D = dₖ, V = dᵥ.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name
from sqrtdk.operation.arguments import Window
from sqrtdk.operation.attention import Attention
from sqrtdk.scales import LEARNABLE, Policy, names, resolve
from sqrtdk.torch.arguments import require_dropout
from sqrtdk.torch.functional import attention
from sqrtdk.torch.nn.cache import KVCache
from sqrtdk.torch.nn.learnable import HeadScale, make_learnable
from sqrtdk.torch.pressure import TemperaturePressure
from sqrtdk.torch.scales import LearnableScale

Context = Tensor | tuple[Tensor, Tensor]


class ScaledAttention(nn.Module):
    """Multi-head attention: x·W_q, x·W_k, x·W_v split into heads, `sqrtdk.torch.attention`, joined by W_o.

    Args:
        d_model: width of the input and of the output.
        heads: query heads H.
        kv_heads: key/value heads G, a divisor of H; None: H.
        scale: None (1/√dₖ), a number, a policy or its name, a `LearnableScale`, or the name of one (``"learned"``,
            ``"query"``, ``"position"``, ``"qk_norm"``), which is then made for these heads.
        d_k: length of a head's queries and keys; None: d_model / heads.
        d_v: length of a head's values; None: d_k.
        d_context: width of what keys and values are made of, or a pair of widths; None: d_model.
        causal: query i sees no key after it.
        window: (left, right), as in `sqrtdk.attention`.
        softcap: as in `sqrtdk.attention`.
        sinks: learn one extra logit per head in the denominator, 0 at the start.
        dropout: probability for a weight to be left out while training.
        bias: whether the four projections have a bias.
        device, dtype: of the parameters.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: the projections, initialised as `nn.Linear` is.
        scale: what multiplies q·k; a submodule if it learns.
        pressure: a `TemperaturePressure` that is told every query, or None.

    `load_state_dict` also takes the state of an `nn.MultiheadAttention`, by itself or inside a larger model;
    `from_multihead` makes the whole module from one.

    >>> attention = ScaledAttention(d_model=64, heads=8, kv_heads=2, scale="learned", causal=True)
    >>> x = torch.randn(3, 10, 64, generator=torch.Generator().manual_seed(0))
    >>> attention(x).shape
    torch.Size([3, 10, 64])
    >>> attention.attend(x).statistics.entropy.shape                            # one number per head and query
    torch.Size([3, 8, 10])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        scale: float | str | Policy | LearnableScale | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        d_context: int | tuple[int, int] | None = None,
        causal: bool = False,
        window: Window | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model = checks.integer("d_model", d_model, 1)
        self.heads = checks.integer("heads", heads, 1)
        self.kv_heads = self._count_kv_heads(kv_heads)
        self.d_k = self._default_d_k() if d_k is None else checks.integer("d_k", d_k, 1)
        self.d_v = self.d_k if d_v is None else checks.integer("d_v", d_v, 1)
        self.d_context = _pair_widths(self.d_model if d_context is None else d_context)
        self.causal, self.window, self.softcap = checks.flag("causal", causal), window, softcap
        self.dropout = require_dropout(dropout)
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(self.d_model, self.heads * self.d_k, **made)
        self.k_proj = nn.Linear(self.d_context[0], self.kv_heads * self.d_k, **made)
        self.v_proj = nn.Linear(self.d_context[1], self.kv_heads * self.d_v, **made)
        self.out_proj = nn.Linear(self.heads * self.d_v, self.d_model, **made)
        self.scale = _make_scale(scale, self.d_k, self.heads)
        if isinstance(self.scale, LearnableScale):
            self.scale.to(device=device, dtype=dtype)
        self.sinks = nn.Parameter(torch.zeros(self.heads, device=device, dtype=dtype)) if sinks else None
        self.pressure: TemperaturePressure | None = None
        self.register_load_state_dict_pre_hook(_translate_multihead)  # type: ignore[no-untyped-call]

    @classmethod
    def from_multihead(
        cls,
        multihead: nn.MultiheadAttention,
        *,
        scale: float | str | Policy | LearnableScale | None = None,
        causal: bool = False,
        window: Window | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> ScaledAttention:
        """Return the attention of an `nn.MultiheadAttention`, with copies of its weights, its heads and its dropout.

        Called as ``self_attention(x)`` or ``cross_attention(x, (for_keys, for_values))`` with the batch first, whatever
        `batch_first` was. Masks have the other sign: here True means "may attend".

        >>> multihead = nn.MultiheadAttention(64, 8, batch_first=True)
        >>> x = torch.randn(3, 10, 64, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(ScaledAttention.from_multihead(multihead)(x), multihead(x, x, x)[0], atol=1e-6)
        True
        """
        if not isinstance(multihead, nn.MultiheadAttention):
            raise InvalidTypeError("multihead", f"must be an nn.MultiheadAttention, got {type(multihead).__name__}")
        if multihead.add_zero_attn:
            raise InvalidValueError("multihead", "must be without add_zero_attn: there is no key of zeros here")
        assert multihead.kdim is not None
        assert multihead.vdim is not None
        weight = multihead.out_proj.weight
        made = cls(
            multihead.embed_dim,
            multihead.num_heads,
            scale=scale,
            d_context=(multihead.kdim, multihead.vdim),
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dropout=multihead.dropout,
            bias=multihead.in_proj_bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        made.load_state_dict(multihead.state_dict())
        return made.train(multihead.training)

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the output of attention.

        Args:
            x: `[..., L, d_model]`.
            context: what is attended to, `[..., S, d_context]`, or a pair (for the keys, for the values); None: x.
            mask: boolean (True: may attend) or additive float, broadcasts to `[..., H, L, S]`.
            key_mask: `[..., S]`, True where a key may be seen: `~key_padding_mask` of `nn.MultiheadAttention`.
            cache: the keys and values of the tokens before x, to which those of x are added; S counts both, and
                positions go on where the cache ends.

        Returns:
            `[..., L, d_model]`. A query that sees nothing gets the bias of the output projection.
        """
        return cast(Tensor, self._attend(x, context, mask, key_mask, cache, statistics=False).output)

    def attend(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        cache: KVCache | None = None,
        weights: bool = False,
        sample_rows: int | None = None,
        sample_seed: int = 0,
    ) -> Attention:
        """Return `Attention(output, statistics, weights)`; the output is that of `forward`.

        Args:
            x, context, mask, key_mask, cache: as in `forward`.
            weights: also return the weights `[..., H, L, S]`.
            sample_rows: statistics of this many queries per head only; None: of all.
            sample_seed: chooses them.
        """
        wanted = {"weights": weights, "sample_rows": sample_rows, "sample_seed": sample_seed}
        return self._attend(x, context, mask, key_mask, cache, statistics=True, **wanted)

    def _attend(
        self,
        x: Tensor,
        context: Context | None,
        mask: Tensor | None,
        key_mask: Tensor | None,
        cache: KVCache | None,
        **wanted: Any,
    ) -> Attention:
        q, k, v = self._project(x, context)
        offset = extension = None
        if cache is not None:
            self._require_cacheable(context)
            offset = cache.length
            extension = cache.extend(k, v)
            k, v = extension.keys, extension.values
        result = attention(
            q,
            k,
            v,
            scale=self.scale,
            mask=_hide_keys(mask, key_mask, k.shape[-2]),
            causal=self.causal,
            causal_offset=offset,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=self.dropout if self.training else 0.0,
            pressure=self.pressure,
            **wanted,
        )
        joined = cast(Any, result.output).transpose(-3, -2).flatten(-2)
        result = result._replace(output=self.out_proj(joined))
        if cache is not None and extension is not None:
            cache.keep(extension)
        return result

    def _project(self, x: Tensor, context: Context | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q `[..., H, L, D]`, k `[..., G, S, D]`, v `[..., G, S, V]`."""
        if self.causal and context is not None:
            raise InvalidValueError("context", "must be None with causal=True: its keys have no order with the queries")
        if context is None and self.d_context != (self.d_model, self.d_model):
            raise InvalidValueError(
                "context",
                f"must be given: d_context {self.d_context} is not d_model ({self.d_model}), x cannot stand in",
            )
        for_keys, for_values = context if isinstance(context, tuple) else (context, context)
        for_keys, for_values = (x if given is None else given for given in (for_keys, for_values))
        _require_width("x", x, self.d_model)
        _require_width("x" if context is None else "context", for_keys, self.d_context[0])
        _require_width("x" if context is None else "context", for_values, self.d_context[1])
        _require_fit(x, for_keys, for_values)
        return (
            self.q_proj(x).unflatten(-1, (self.heads, self.d_k)).transpose(-3, -2),
            self.k_proj(for_keys).unflatten(-1, (self.kv_heads, self.d_k)).transpose(-3, -2),
            self.v_proj(for_values).unflatten(-1, (self.kv_heads, self.d_v)).transpose(-3, -2),
        )

    def _require_cacheable(self, context: Context | None) -> None:
        if context is not None:
            raise InvalidValueError("cache holds the keys of earlier x: give context or cache, got both")
        if not self.causal:
            raise InvalidValueError(
                "cache needs causal=True: without it, what earlier tokens saw would change with every later one"
            )

    def _count_kv_heads(self, kv_heads: int | None) -> int:
        count = self.heads if kv_heads is None else checks.integer("kv_heads", kv_heads, 1)
        if self.heads % count:
            raise InvalidValueError("heads", f"must be a multiple of kv_heads ({count}), got {self.heads}")
        return count

    def _default_d_k(self) -> int:
        if self.d_model % self.heads:
            raise InvalidValueError(
                "d_model", f"must be a multiple of heads ({self.heads}), got {self.d_model}; or give d_k"
            )
        return self.d_model // self.heads

    def extra_repr(self) -> str:
        """Sizes and options, for `print`."""
        text = f"d_model={self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}, d_k={self.d_k}, d_v={self.d_v}"
        if not isinstance(self.scale, LearnableScale):
            text += f", scale={self.scale}"
        options = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "dropout": self.dropout}
        return text + "".join(f", {name}={value}" for name, value in options.items() if value)


def _make_scale(
    scale: float | str | Policy | LearnableScale | None, d_k: int, heads: int
) -> float | Policy | LearnableScale | None:
    if scale is None or isinstance(scale, Policy):
        return scale
    if isinstance(scale, str):
        if scale in LEARNABLE:
            return make_learnable(scale, d_k, heads)
        known = {*names(), *LEARNABLE}
        if scale.partition(":")[0] not in known:
            raise unknown_name("scaling policy", scale, list(known), "scale")
        return resolve(scale)
    if isinstance(scale, LearnableScale):
        if isinstance(scale, HeadScale):
            scale.require_fit(d_k, heads)
        return scale
    return checks.number("scale", scale, kind="a number, a policy, a LearnableScale, the name of one or None")


def _pair_widths(d_context: int | tuple[int, int]) -> tuple[int, int]:
    for_keys, for_values = d_context if isinstance(d_context, tuple) else (d_context, d_context)
    return checks.integer("d_context", for_keys, 1), checks.integer("d_context", for_values, 1)


def _require_width(name: str, x: Tensor, width: int) -> None:
    if not isinstance(x, Tensor):
        raise InvalidTypeError(name, f"must be a tensor, got {type(x).__name__}")
    if x.ndim < 2 or x.shape[-1] != width:
        raise InvalidValueError(name, f"must have shape [..., tokens, {width}], got {tuple(x.shape)}")


def _require_fit(x: Tensor, for_keys: Tensor, for_values: Tensor) -> None:
    for shape in (tuple(for_keys.shape), tuple(for_values.shape)):
        if shape[:-2] != tuple(x.shape[:-2]):
            raise InvalidValueError(
                "context", f"must have the leading axes {tuple(x.shape[:-2])} of x, got shape {shape}"
            )
    tokens = (for_keys.shape[-2], for_values.shape[-2])
    if tokens[0] != tokens[1]:
        raise InvalidValueError(
            "context", f"must have as many tokens for the keys as for the values, got {tokens[0]} and {tokens[1]}"
        )


def _hide_keys(mask: Tensor | None, key_mask: Tensor | None, keys: int) -> Tensor | None:
    """Return one mask that hides what either mask hides."""
    if key_mask is None:
        return mask
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        came = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise InvalidTypeError("key_mask", f"must be a boolean tensor (True: may be seen), got {came}")
    if key_mask.shape[-1:] != (keys,):
        raise InvalidValueError(
            "key_mask", f"must have shape [..., {keys}], one entry per key, got {tuple(key_mask.shape)}"
        )
    visible = key_mask[..., None, None, :]
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)


def _translate_multihead(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the saved tensors of an `nn.MultiheadAttention`; scale and sinks, which it lacks, keep their values."""
    assert isinstance(module, ScaledAttention)
    packed = f"{prefix}in_proj_weight"
    apart = [f"{prefix}{name}_proj_weight" for name in "qkv"]
    if packed not in state and apart[0] not in state:
        return
    if f"{prefix}bias_k" in state or f"{prefix}bias_v" in state:
        raise InvalidValueError("the state must be of a MultiheadAttention without add_bias_kv: no learned key here")
    weights = state.pop(packed).chunk(3) if packed in state else [state.pop(name) for name in apart]
    biases = state.pop(f"{prefix}in_proj_bias").chunk(3) if f"{prefix}in_proj_bias" in state else ()
    for kind, parts in (("weight", weights), ("bias", biases)):
        state |= {f"{prefix}{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=False)}
    present = module.state_dict(prefix=prefix)
    own = [name for name in present if name.startswith((f"{prefix}scale.", f"{prefix}sinks"))]
    state |= {name: present[name] for name in own if name not in state}
