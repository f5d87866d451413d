"""The scale that well-known models use: what their configurations say, and what their code does."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqrtdk.errors import missing_extra


@dataclass(frozen=True)
class ModelScale:
    """One model's multiplier of q·k.

    Args:
        model: its common name.
        d_k: length of a query vector.
        scale: what multiplies q·k.
        source: where the numbers stand.
        family: prefix of its configuration class in transformers.
        options: what to set in a small configuration so that its attention is the model's.
        measured: whether `scale` was measured in running code rather than read from the configuration.
    """

    model: str
    d_k: int
    scale: float
    source: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = False

    @property
    def is_sqrt(self) -> bool:
        """Whether the multiplier is 1/√dₖ within a tenth of a percent."""
        return abs(self.scale * math.sqrt(self.d_k) - 1.0) < 1e-3


def _small(d_k: int, **more: Any) -> dict[str, Any]:
    common = {
        "vocab_size": 32,
        "hidden_size": 2 * d_k,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": d_k,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return common | more


_GEMMA_2 = {"attn_logit_softcapping": None}

PUBLISHED = (
    ModelScale(
        "GPT-2", 64, 64**-0.5, "gpt2 config.json: n_embd 768, n_head 12, scale_attn_weights true", "GPT2",
        {"vocab_size": 32, "n_embd": 128, "n_head": 2, "n_layer": 1, "bos_token_id": 1, "eos_token_id": 2},
    ),
    ModelScale("LLaMA 2 7B", 128, 128**-0.5, "Llama-2-7b config.json: hidden_size 4096, 32 heads", "Llama",
               _small(128)),
    ModelScale("Qwen3 8B (norms q and k)", 128, 128**-0.5, "Qwen3-8B config.json: head_dim 128", "Qwen3", _small(128)),
    ModelScale(
        "Gemma 2 2B", 256, 256**-0.5, "gemma-2-2b config.json: head_dim 256, query_pre_attn_scalar 256", "Gemma2",
        _small(256, query_pre_attn_scalar=256, **_GEMMA_2),
    ),
    ModelScale(
        "Gemma 2 9B", 256, 256**-0.5, "gemma-2-9b config.json: head_dim 256, query_pre_attn_scalar 256", "Gemma2",
        _small(256, query_pre_attn_scalar=256, **_GEMMA_2),
    ),
    ModelScale(
        "Gemma 2 27B", 128, 144**-0.5, "gemma-2-27b config.json: head_dim 128, query_pre_attn_scalar 144", "Gemma2",
        _small(128, query_pre_attn_scalar=144, **_GEMMA_2),
    ),
    ModelScale(
        "T5", 64, 1.0, "t5-base config.json: d_kv 64; Raffel et al. 2020 fold the scale into the initialisation", "T5",
        {"vocab_size": 32, "d_model": 128, "d_kv": 64, "d_ff": 32, "num_layers": 1, "num_heads": 2,
         "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
    ),
    ModelScale(
        "GPT-Neo 1.3B", 128, 1.0, "gpt-neo-1.3B config.json: hidden_size 2048, 16 heads; no scale in its code",
        "GPTNeo",
        {"vocab_size": 32, "hidden_size": 256, "num_heads": 2, "num_layers": 1,
         "attention_types": [[["global"], 1]], "intermediate_size": 32, "bos_token_id": 1, "eos_token_id": 2},
    ),
    ModelScale(
        "Granite 3.0 8B (muP)", 128, 0.0078125, "granite-3.0-8b-base config.json: attention_multiplier 0.0078125",
        "Granite", _small(128, attention_multiplier=0.0078125),
    ),
    ModelScale(
        "Gemma 3n (norms q and k)", 256, 1.0, "Gemma3n text attention: scaling 1.0 after RMS norms of q and k",
        "Gemma3nText",
        _small(256, layer_types=["full_attention"], intermediate_size=[32], vocab_size_per_layer_input=32,
               hidden_size_per_layer_input=8, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0], laurel_rank=4),
    ),
)  # fmt: skip
"""Facts of published configurations, with what a small model of the same family needs to show the same attention."""


def survey() -> list[ModelScale]:
    """The scale of each model: measured in its code where transformers is installed, else as published.

    >>> all(item.d_k > 0 for item in PUBLISHED)
    True
    """
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return list(PUBLISHED)
    return [replace(item, scale=measure_scale(item), measured=True) for item in PUBLISHED]


def measure_scale(item: ModelScale) -> float:
    """Build a small model of the family, run it, and regress what enters the softmax on q·k.

    The regression is on what the code computes: the product of the first attention layer and the logits its softmax
    gets, on the visible keys. Position biases are zeroed first, as they are added after the scale.
    """
    if importlib.util.find_spec("transformers") is None:
        raise missing_extra("transformers", "hf")
    import torch
    import transformers

    config = getattr(transformers, f"{item.family}Config")(**item.options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto: Any = transformers.AutoModel
        model = auto.from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                torch.nn.init.zeros_(parameter)
        tokens = torch.randint(3, 32, (2, 24))
    inputs = {"input_ids": tokens}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad(), _observe_first_attention() as seen:
        model(**inputs)
    if seen.products is None or seen.logits is None:
        raise RuntimeError(f"no product and softmax of one attention layer seen in {item.family}")
    products, logits = seen.products.double(), seen.logits.double()
    visible = logits > torch.finfo(seen.logits.dtype).min / 2
    x, y = products[visible], logits[visible]
    return float((x * y).sum() / (x * x).sum())


def _observe_first_attention() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    class FirstAttention(TorchFunctionMode):
        """Keeps the last product before the first softmax over keys, and what that softmax gets."""

        products: torch.Tensor | None = None
        logits: torch.Tensor | None = None

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name == "softmax" and self.logits is None and self.products is not None:
                given = args[0] if args else kwargs["input"]
                if given.shape == self.products.shape:
                    self.logits = given.detach().clone()
            result = func(*args, **(kwargs or {}))
            if name in ("matmul", "__matmul__") and self.logits is None and result.dim() == 4:
                self.products = result.detach().clone()
            return result

    return FirstAttention()
