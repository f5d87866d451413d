"""Attention for Hugging Face models: the attention function and the mask function that goes with it."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.torch.compute import MODELS, compute
from sqrtdk.torch.minus_infinity import close_hidden
from sqrtdk.torch.transformers_internals import (
    are_weights_recorded,
    import_interfaces,
    import_mask_functions,
    read_layers,
)

# Arguments that models pass in place of a mask. Ignoring one of them would compute another operation.
_NOT_UNDERSTOOD = {
    "cache": "a paged cache (continuous batching)",
    "indices": "a sparse selection of keys",
    "block_indices": "a sparse selection of key blocks",
}
# transformers gives names with these parts a meaning of its own.
_RESERVED = ("eager", "sdpa", "flash", "flex", "paged")


def register_huggingface(name: str = "sqrtdk") -> None:
    """Register `attn_implementation=name` with transformers: the attention function and its mask function.

    After it `AutoModel.from_pretrained(..., attn_implementation="sqrtdk")`, `from_config` and
    `model.set_attn_implementation("sqrtdk")` work for every model whose attention goes through the
    `AttentionInterface` of transformers. Calling it again changes nothing::

        sqrtdk.torch.register_huggingface()
        model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", attn_implementation="sqrtdk")

    Both functions are needed: transformers makes no mask for an implementation that has only the first, and a padded
    batch would lose its padding without a word.

    Args:
        name: letters, digits, `_` and `-`; not a name that transformers or somebody else has registered.

    Raises:
        MissingExtraError, InvalidValueError: transformers is not there or too old; the name cannot be used.
    """
    if not isinstance(name, str):
        raise InvalidTypeError("name", f"must be a str, got {type(name).__name__}")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or any(part in name for part in _RESERVED):
        raise InvalidValueError(
            "name",
            f"must consist of letters, digits, _ and - and contain none of {', '.join(_RESERVED)}, "
            f"which transformers reads its own way; got {name!r}",
        )
    registrations = list(zip(import_interfaces(), (attend, make_mask), strict=True))
    if any(registry().get(name, function) is not function for registry, function in registrations):
        raise InvalidValueError(f"name {name!r} is taken: transformers has another function of that name")
    # A tracer need not follow this function. It is marked here, not at import, because marking loads torch's compiler.
    torch.compiler.assume_constant_result(read_layers)  # type: ignore[no-untyped-call]
    for registry, function in registrations:
        registry.register(name, function)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return a boolean mask `[B, 1, L, S]` (True: may attend), or None if `attend` can derive it.

    None means: a causal module sees up to its own position, the last query being at the last key; another module sees
    everything. So it is returned only without padding, and for causal masks only if the ends lie on each other, as
    they do in training, in prefill and in every step with a cache that grows. A window is always written into the
    mask: not every model that masks one also hands it to the attention function. Where some layers compute attention
    in code of their own, the mask is the additive one that they add.
    """
    layers = read_layers(type(config))
    if layers == "own":
        refused = f"attn_implementation: the model of {type(config).__name__} computes attention in code of its own"
        raise InvalidValueError(f'{refused} and asks for no other; use attn_implementation="eager"')
    if (
        layers == "dispatched"
        and allow_is_causal_skip
        and (local_size is None or kv_length < local_size)
        and not isinstance(q_offset, Tensor)  # a cache of fixed size: there are keys behind the last query
        and q_offset + q_length == kv_offset + kv_length
        and _has_no_padding(attention_mask, kv_offset, kv_length)
    ):
        return None
    write_boolean, write_additive = import_mask_functions()
    write = write_boolean if layers == "dispatched" else write_additive
    options = {"attention_mask": attention_mask, "local_size": local_size, "allow_is_causal_skip": False, **kwargs}
    mask: Tensor | None = write(batch_size, q_length, kv_length, q_offset, kv_offset, **options)
    return mask


def _has_no_padding(padding: Tensor | None, kv_offset: int, kv_length: int) -> bool:
    if padding is None:
        return True
    # Values cannot be read while a graph is traced.
    if torch.compiler.is_compiling() or padding.is_meta or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return False
    seen = padding[:, kv_offset : kv_offset + kv_length]
    return seen.shape[-1] == kv_length and bool(seen.all())


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the signature that Hugging Face models call.

    Args:
        module: the attention layer; its `is_causal` holds where `is_causal` is None.
        query, key, value: `[B, H, L, D]`, `[B, G, S, D]`, `[B, G, S, V]`; key/value heads are not repeated.
        attention_mask: `[B or 1, H or 1, L, S]`, boolean or additive. If there is one it says everything: neither
            `is_causal` nor `sliding_window` is applied a second time.
        scaling, dropout: what multiplies q·k (None is 1/√dₖ), and the probability with which a weight is dropped.
        is_causal: without a mask, query i sees key j ≤ i + S − L: the ends are aligned.
        sliding_window: without a mask, a query sees W keys, itself the last; W − 1 more after it if not causal.
        softcap, s_aux, position_bias: soft cap (None or 0: none), a sink logit per query head `[H]`, and what T5 adds
            to the logits `[B or 1, H, L, S]`.
        kwargs: what else models pass on and does not concern the operation; `output_attentions` asks for the weights.

    Returns:
        The output `[B, L, H, V]`, and the weights `[B, H, L, S]` (before dropout) if they were asked for, else None.
    """
    for argument, meaning in _NOT_UNDERSTOOD.items():
        if kwargs.get(argument) is not None:
            passed = f"{argument}: {type(module).__name__} passes {meaning}, which sqrtdk does not compute"
            raise InvalidValueError(f'{passed}; use attn_implementation="sdpa" or "eager" for this model')
    visible: dict[str, Any] = {}
    if attention_mask is not None:
        attention_mask = _close_masked(attention_mask)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        visible = _align_ends(query.shape[-2], key.shape[-2], bool(causal), sliding_window)
    result: Any = compute(
        query,
        key,
        value,
        scale=scaling,
        mask=_add_bias(attention_mask, position_bias),
        softcap=softcap or None,
        per_head=None if s_aux is None else {"sinks": s_aux},
        weights=_wants_weights(kwargs),
        dropout=dropout,
        dialect=MODELS,
        **visible,
    )
    return result.output.transpose(1, 2).contiguous(), result.weights


def _align_ends(queries: int, keys: int, causal: bool, sliding_window: int | None) -> dict[str, Any]:
    """Return the arguments of a layer without a mask that is causal, or has a window, aligned at the last key."""
    if sliding_window is not None and sliding_window >= keys:
        sliding_window = None
    if not causal and sliding_window is None:
        return {}
    if queries > keys:
        raise InvalidValueError(
            "attention_mask",
            f"must be given where a causal or windowed layer has more queries ({queries}) "
            f"than keys ({keys}): the first queries would lie before the first key",
        )
    if queries == 1 and sliding_window is None:
        return {}  # the last query sees every key: the plain operation, which has a shorter way
    window = None if sliding_window is None else (sliding_window - 1, None if causal else sliding_window - 1)
    return {"causal": causal, "causal_offset": keys - queries, "window": window}


def _close_masked(mask: Tensor) -> Tensor:
    """Return the mask with −inf in place of the finite "minus infinity" that models write."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        came = getattr(mask, "dtype", type(mask).__name__)
        raise InvalidTypeError("attention_mask", f"must be None or a boolean or floating-point tensor, got {came}")
    if mask.ndim != 4:
        raise InvalidValueError("attention_mask", f"must have shape [B, H, L, S], got {tuple(mask.shape)}")
    return close_hidden(mask)


def _add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask


def _wants_weights(kwargs: dict[str, Any]) -> bool:
    """Return whether weights are wanted: by argument, or by a recorder of outputs."""
    if kwargs.get("output_attentions") or torch.compiler.is_compiling():
        return bool(kwargs.get("output_attentions"))
    return are_weights_recorded()
