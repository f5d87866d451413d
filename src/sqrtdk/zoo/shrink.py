"""Small configurations of any family: fewer layers, heads and words in the proportions that its code expects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

# Widths that are heads × head width. Divided together with the heads, they leave the head width as it is.
_WIDTHS = re.compile(
    r"(^|_)(hidden_size|intermediate_size|d_model|n_embd|embed_dim|emb_dim|d_ff|ffn_dim|ffn_hidden_size|embedding_size"
    r"|hidden_dim|mlp_dim|n_inner|word_embed_proj_dim|dim|projection_dim|output_dim|hidden_size_global"
    r"|feed_forward_hidden_size|lru_width|attention_hidden_size|hidden_channels|lora_rank)$"
)
_KEPT_WIDTHS = re.compile(
    r"head_dim|kernel_dim|rotary_dim|num_|codebook|mel_dim|kv_dim|codevector|qk_|v_head|scaling_dim"
)
_HEADS = re.compile(r"(^|_)(attention_heads|key_value_heads|num_heads|n_heads?|kv_heads|heads|mamba_n_heads)$")
_KEY_HEADS = re.compile(r"key_value_heads|kv_heads|kv_n_heads|num_key_heads")
_LAYERS = re.compile(
    r"^(num_hidden_layers|num_layers|n_layers?|(num_)?(encoder|decoder)_layers|depth|(encoder|decoder)_num_hidden_layers"
    r"|num_(encoder|decoder)_blocks|.*_num_layers|resampler_depth|layers|num_blocks?)$"
)
_VOCABULARY = re.compile(r"(^|_)vocab_size(_per_layer_input)?$")
_TOKEN = re.compile(r"_token_(id|index|idx)$|_token$|^(pad|bos|eos|mask|sep|cls)_index$")
_CHOSEN_EXPERTS = re.compile(r"^(num_experts_per_tok|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts)$")
_EXPERTS = re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$")
_IMAGE = re.compile(
    r"^(image_size|image_embedding_size|backbone_feature_sizes|img_size|memory_attention_rope_feat_sizes)$"
)

# Layers whose outputs a backbone returns. The default is the last layer.
_STAGES = ("out_features", "out_indices", "stage_names")
# Fields without a default, for which any small number will do; then fields whose missing value may mean "none".
_UNTOLD = {"vocab_size": 64, "prediction_length": 8}
_OPEN = {
    "num_key_value_heads": 1,
    "sliding_window": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_num_experts": 4,
    "num_local_experts": 4,
    "topk_group": 1,
    "n_group": 1,
}

_FEWEST_LAYERS = 2
_MOST_WORDS = 256
_FIRST_SPECIAL = 200
"""Tokens from here on are special in a small vocabulary. Inputs consist of the others."""
ORDINARY_TOKENS = range(3, _FIRST_SPECIAL)
_LARGEST_IMAGE = 256


class Size(NamedTuple):
    """Size of a small configuration: the divisor of widths, and whether vocabulary and images become smaller.

    With `fills`, numbers that a configuration leaves open are set. `layers` is the least number of layers.
    """

    divisor: int
    words: bool = True
    images: bool = True
    fills: bool = False
    layers: int = _FEWEST_LAYERS

    def __str__(self) -> str:
        kept = [name for name, is_small in (("vocabulary", self.words), ("image", self.images)) if not is_small]
        widths = f"widths / {self.divisor}" if self.divisor > 1 else "full widths"
        return ", ".join([widths, *(f"full {name}" for name in kept), *(["gaps filled"] if self.fills else [])])


SIZES = (Size(8), Size(8, fills=True), Size(2), Size(1, words=False, images=False))
"""Sizes to try, the smallest first: parts that do not fit together in one size may fit in the next."""
DEEP = Size(8, layers=8)
"""Size for models without attention in their first layers."""


def shrink(content: dict[str, Any], size: Size) -> dict[str, Any]:
    """Return the fields of a configuration made smaller, including inner configurations.

    >>> shrink({"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30000}, Size(4))
    {'hidden_size': 192, 'num_attention_heads': 3, 'num_hidden_layers': 2, 'vocab_size': 256}
    """
    tokens: dict[int, int] = {}
    reduction = _image_reduction(content) if size.images else 1
    return _shrink(content, size, tokens, reduction, _divisor(content, size.divisor))


def _fields(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        yield name, value
        if isinstance(value, dict):
            yield from _fields(value)


def _divisor(content: dict[str, Any], most: int) -> int:
    """Return the largest common divisor, up to `most`, of all numbers of heads."""
    heads = [
        value
        for name, value in content.items()
        if _HEADS.search(name) and not _KEY_HEADS.search(name) and isinstance(value, int) and value > 1
    ]
    if any(_HEADS.search(name) and isinstance(value, list) for name, value in content.items()):
        return 1  # stages of different widths
    return math.gcd(most, *heads) if heads else most


def _image_reduction(content: dict[str, Any]) -> int:
    given = [value for name, value in _fields(content) if name == "image_size"]
    sizes = [side for size in given for side in (size if isinstance(size, list | tuple) else [size])]
    sizes = [side for side in sizes if isinstance(side, int)]
    reduction = 1
    while sizes and max(sizes) // reduction > _LARGEST_IMAGE and all(size % (2 * reduction) == 0 for size in sizes):
        reduction *= 2
    return reduction


def _shrink(
    content: dict[str, Any], size: Size, tokens: dict[int, int], reduction: int, divisor: int
) -> dict[str, Any]:
    layers, kept = _choose_layers(content, size.layers)
    small: dict[str, Any] = {}
    for name, value in content.items():
        if name in _STAGES:
            continue
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            small[name] = value  # labels by number
        elif isinstance(value, dict) and value and all(key.isdecimal() for key in value):
            chosen = kept if kept is not None else list(range(size.layers))
            small[name] = {str(chosen.index(int(key))): one for key, one in value.items() if int(key) in chosen}
        elif isinstance(value, dict):
            is_config = "model_type" in value
            inner = _divisor(value, size.divisor) if is_config else divisor
            small[name] = _shrink(value, size, tokens, reduction, inner) if value else value
        elif value is None:
            small[name] = _UNTOLD.get(name, _OPEN.get(name) if size.fills else None)
        elif isinstance(value, bool):
            small[name] = value
        elif isinstance(value, list):
            if _TOKEN.search(name) and size.words:
                small[name] = [_rename(token, tokens) for token in value]
            elif kept is not None and len(value) == layers:
                small[name] = [value[at] for at in kept]
            elif _IMAGE.search(name):
                small[name] = _divide(value, reduction)
            elif name in ("depths", "num_block_repeats", "blocks_per_stage"):
                small[name] = [min(depth, 2) if isinstance(depth, int) else depth for depth in value]
            else:
                small[name] = value
        elif isinstance(value, int):
            small[name] = _shrink_number(name, value, size, tokens, reduction, divisor, kept)
        else:
            small[name] = value
    return small


def _shrink_number(
    name: str, value: int, size: Size, tokens: dict[int, int], reduction: int, divisor: int, kept: list[int] | None
) -> int:
    if _LAYERS.search(name):
        return min(value, len(kept)) if kept is not None else min(value, size.layers)
    if name.endswith("_layer_period"):
        return min(value, _FEWEST_LAYERS)
    if name.endswith("_layer_offset"):
        return min(value, 1)
    if name == "first_k_dense_replace":
        return min(value, 1)
    if name == "num_kv_shared_layers":
        return 0
    if _EXPERTS.search(name):
        return min(value, 8)
    if _CHOSEN_EXPERTS.search(name):
        return min(value, 4)
    if name in ("n_group", "topk_group"):
        return 1
    if _VOCABULARY.search(name) and size.words:
        return min(value, _MOST_WORDS)
    if _TOKEN.search(name) and size.words:
        return int(_rename(value, tokens))
    if _IMAGE.search(name):
        return value // reduction
    if _KEY_HEADS.search(name):
        return value // divisor if value % divisor == 0 else 1
    if _HEADS.search(name):
        return value // divisor if value % divisor == 0 else value
    if _WIDTHS.search(name) and not _KEPT_WIDTHS.search(name) and value % divisor == 0 and value // divisor >= 4:
        return value // divisor
    return value


def _rename(token: Any, tokens: dict[int, int]) -> Any:
    """Return a number in the small vocabulary for a special token, the same number for the same token."""
    if not isinstance(token, int) or isinstance(token, bool) or token < _FIRST_SPECIAL:
        return token
    last = _MOST_WORDS - _FIRST_SPECIAL - 1
    return _FIRST_SPECIAL + tokens.setdefault(token, min(len(tokens), last))


def _divide(value: Any, by: int) -> Any:
    if isinstance(value, list):
        return [_divide(one, by) for one in value]
    return value // by if isinstance(value, int) else value


def _choose_layers(content: dict[str, Any], fewest: int) -> tuple[int, list[int] | None]:
    """Return the number of layers, and which to keep where lists describe each layer: one of each sort, or `fewest`."""
    counts = [value for name, value in content.items() if _LAYERS.search(name) and isinstance(value, int) and value > 1]
    layers = max(counts, default=0)
    lists = [value for value in content.values() if isinstance(value, list) and len(value) == layers and layers > 1]
    if not lists:
        return layers, None
    sorts = [tuple(str(one[at]) for one in lists) for at in range(layers)]
    first = sorted({sort: at for at, sort in reversed(list(enumerate(sorts)))}.values())
    if len(first) > 4:  # a list of numbers, each layer its own
        words = [one for one in lists if all(isinstance(entry, str) for entry in one)]
        sorts = [tuple(str(one[at]) for one in words) for at in range(layers)]
        first = sorted({sort: at for at, sort in reversed(list(enumerate(sorts)))}.values())
    while len(first) < min(fewest, layers):
        first.append(next(at for at in range(layers) if at not in first))
    return layers, sorted(first)
