"""Attention for the models of transformers: the attention function and the mask function that belong together."""

from __future__ import annotations

import inspect
import math
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError, MissingExtraError, missing_extra
from sqrtdk.torch.compute import MODELS, compute

# What a model hands to the attention function in place of a mask. Ignoring one of them would give another operation.
_NOT_UNDERSTOOD = {
    "cache": "a paged cache (continuous batching)",
    "indices": "a sparse selection of keys",
    "block_indices": "a sparse selection of key blocks",
}
# transformers reads a meaning of its own into names with these parts.
_RESERVED = ("eager", "sdpa", "flash", "flex", "paged")
_LAYERS: dict[type, str] = {}


def register_huggingface(name: str = "sqrtdk") -> None:
    """Make `attn_implementation=name` known to transformers: the attention function and its mask function.

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
    registrations = list(zip(_import_interfaces(), (attend, make_mask), strict=True))
    if any(registry().get(name, function) is not function for registry, function in registrations):
        raise InvalidValueError(f"name {name!r} is taken: transformers has another function of that name")
    # What a tracer need not follow. Marked here, not at import: it loads torch's compiler, longer to load than torch.
    torch.compiler.assume_constant_result(_read_layers)  # type: ignore[no-untyped-call]
    for registry, function in registrations:
        registry.register(name, function)


def _import_interfaces() -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError:
        raise missing_extra("transformers", "hf") from None
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        if {"q_length", "q_offset", "kv_offset"} <= set(inspect.signature(sdpa_mask).parameters):
            return AttentionInterface, AttentionMaskInterface
    except ImportError:
        pass
    raise MissingExtraError(
        f"transformers {transformers.__version__} has no mask interface that tells where queries and keys begin; "
        'a newer one comes with: pip install --upgrade "sqrtdk[hf]"'
    )


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
    """The mask function: a boolean mask `[B, 1, L, S]` (True: may attend), or None where `attend` knows it.

    None means: a causal module sees up to its own position, the last query being at the last key; another module sees
    everything. So it is returned only without padding, and for causal masks only if the ends lie on each other, as
    they do in training, in prefill and in every step with a cache that grows. A window is always written into the
    mask: not every model that masks one also hands it to the attention function. Where some layers compute attention
    in code of their own, the mask is the additive one that they add.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    layers = _read_layers(type(config))
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
    write: Any = sdpa_mask if layers == "dispatched" else eager_mask
    options = {"attention_mask": attention_mask, "local_size": local_size, "allow_is_causal_skip": False, **kwargs}
    mask: Tensor | None = write(batch_size, q_length, kv_length, q_offset, kv_offset, **options)
    return mask


def _read_layers(config_class: type) -> str:
    """Which attention layers of a model ask transformers for their function: "dispatched" (all), "mixed", "own" (none).

    A layer that does not ask would add the mask that is made here to its scores. As transformers itself does, this
    reads the source; a model whose source is not there, or has no attention layers, counts as dispatched.
    """
    if config_class not in _LAYERS:
        module = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
        try:
            source = "" if module is None else inspect.getsource(module)
        except (OSError, TypeError):
            source = ""
        parts = re.split(r"^(?=class |def |@)", source, flags=re.MULTILINE)
        layers = [part for part in parts if re.match(r"class \w*Attention\w*\(nn\.Module\)", part)]
        asking = "ALL_ATTENTION_FUNCTIONS"
        own = [part for part in layers if asking not in part and "oftmax(" in part and "mask" in part]
        _LAYERS[config_class] = "own" if layers and asking not in source else "mixed" if own else "dispatched"
    return _LAYERS[config_class]


def _has_no_padding(padding: Tensor | None, kv_offset: int, kv_length: int) -> bool:
    if padding is None:
        return True
    # While a graph is traced the values are not there to be read.
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
    """The attention function, with the signature that the models of transformers call.

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
        attention_mask = _close_masked(attention_mask, query.dtype)
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
        sinks=s_aux,
        weights=_wants_weights(kwargs),
        dropout=dropout,
        dialect=MODELS,
        **visible,
    )
    return result.output.transpose(1, 2).contiguous(), result.weights


def _align_ends(queries: int, keys: int, causal: bool, sliding_window: int | None) -> dict[str, Any]:
    """What says to the operation that a layer without a mask is causal, or has a window, up to its last key."""
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


def _close_masked(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask with −inf in place of the finite "minus infinity" that models write."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        came = getattr(mask, "dtype", type(mask).__name__)
        raise InvalidTypeError("attention_mask", f"must be None or a boolean or floating-point tensor, got {came}")
    if mask.ndim != 4:
        raise InvalidValueError("attention_mask", f"must have shape [B, H, L, S], got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(dtype).min) / 2
    return mask.masked_fill(mask <= lowest, -math.inf)


def _add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask


def _wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether weights were asked for: by argument, or (GPT-2 keeps the argument to itself) by an active recorder."""
    if kwargs.get("output_attentions") or torch.compiler.is_compiling():
        return bool(kwargs.get("output_attentions"))
    recorder = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return recorder is not None and any("attentions" in key for key in recorder.get() or ())
