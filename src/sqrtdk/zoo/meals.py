"""What a model is fed: random inputs for the arguments of its forward, by their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.zoo.shrink import ORDINARY_TOKENS

BATCH, TOKENS, FRAMES = 2, 16, 8
_IMAGE_SIZES = ("image_size", "img_size", "crop_size", "pretrain_image_size", "input_size")
_MELS = ("num_mel_bins", "feature_size", "n_mels", "input_dim", "input_feat_per_channel")
Meal = dict[str, Any]


def make_meals(model: nn.Module) -> Iterator[Meal]:
    """Inputs that the model may take, the likeliest first; all of them random, and the same every time."""
    config = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    names = set(parameters)
    main = getattr(model, "main_input_name", "input_ids")
    offered: list[Meal] = []
    if main in ("pixel_values", "pixel_values_videos") or ("pixel_values" in names and "input_ids" not in names):
        name = "pixel_values" if "pixel_values" in names else main
        offered += [{name: pixels} for pixels in _pixels(config)]
    if main == "input_features" or "input_features" in names:
        offered += [{"input_features": features} for features in _features(config)]
    if main == "input_values" or "input_values" in names:
        offered += [{"input_values": values} for values in _values(config)]
    if "input_ids" in names:
        text = {"input_ids": _tokens(config)}
        both = [text | {"pixel_values": pixels} for pixels in _pixels(config)] if "pixel_values" in names else []
        offered = [text, *offered, *both] if main == "input_ids" else [*offered, *both, text]
    if "spatial_shapes" in names:
        offered.insert(0, _packed_patches(config))
    width = _read(config, "hidden_size", "d_model", "n_embd")
    if "grid_thw" in names:
        patches = list(_patches(config, "hidden_states" if "hidden_states" in names else "pixel_values"))
        offered = patches + offered
    for name in ("inputs_embeds", "hidden_states", "input_embeds", "x"):
        if name in names and isinstance(width, int):
            offered.append({name: _normal(BATCH, TOKENS, width)})
    if "past_values" in names:
        offered += list(_series(config, names))
    for meal in offered or [{}]:
        yield from _with_sides(meal, config, parameters)


def _with_sides(meal: Meal, config: Any, parameters: Any) -> Iterator[Meal]:
    """The meal with what the model needs beside it; then with all that it may take beside it; then alone."""
    required = {name for name, one in parameters.items() if one.default is inspect.Parameter.empty}
    required |= {"decoder_input_ids", "bbox"} & set(parameters)
    beside = {name: side for name in parameters if (side := _fill(name, config, meal)) is not None} | meal
    needed = {name: value for name, value in beside.items() if name in required or name in meal}
    offered = [needed, beside, meal]
    for at, one in enumerate(offered):
        if one and not any(one.keys() == before.keys() for before in offered[:at]):
            yield one


def _fill(name: str, config: Any, meal: Meal) -> Any:
    """A value for an argument beside the main one; None for a name that says nothing."""
    match name:
        case "input_ids":
            return _tokens(config)
        case "decoder_input_ids":
            return _tokens(config, 12)
        case "bbox":
            corner = torch.randint(0, 400, (BATCH, TOKENS, 2), generator=_generator())
            return torch.cat([corner, corner + 50], dim=-1)
        case "pixel_values":
            return next(_pixels(config))
        case "attention_mask" | "padding_mask" if "input_ids" in meal:
            return torch.ones(BATCH, TOKENS, dtype=torch.long)
        case "position_ids" | "timesteps":
            return torch.arange(TOKENS).expand(BATCH, -1)
        case "input_features_mask" | "attention_mask" | "feature_attention_mask" if "input_features" in meal:
            shape = meal["input_features"].shape
            mel = _read(config, *_MELS)
            return torch.ones(BATCH, shape[1] if shape[-1] == mel else shape[-1], dtype=torch.long)
        case "states" | "actions" | "rewards" | "returns_to_go":
            width = {"states": "state_dim", "actions": "act_dim"}.get(name)
            return _normal(BATCH, TOKENS, 1 if width is None else _read(config, width) or 1)
        case "encoder_hidden_states" | "query_embeds" | "hidden_states":
            foreign = ("cross_attention_hidden_size", "encoder_hidden_size") if name.startswith("encoder") else ()
            width = _read(config, *foreign, "hidden_size", "d_model")
            return _normal(BATCH, TOKENS, width) if isinstance(width, int) else None
    return None


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator())


def _tokens(config: Any, count: int = TOKENS) -> Tensor:
    words = _read(config, "vocab_size", "input_dim")
    last = min(ORDINARY_TOKENS.stop, words) if isinstance(words, int) and words > 4 else ORDINARY_TOKENS.stop
    return torch.randint(ORDINARY_TOKENS.start, last, (BATCH, count), generator=_generator())


def _read(config: Any, *names: str) -> Any:
    """The first of some fields that a configuration has, or one inside it."""
    if config is None:
        return None
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for inner in _inner(config):
        value = _read(inner, *names)
        if value is not None:
            return value
    return None


def _inner(config: Any) -> list[Any]:
    return [value for value in vars(config).values() if hasattr(value, "model_type") and hasattr(value, "to_dict")]


def _pixels(config: Any) -> Iterator[Tensor]:
    """Images `[B, C, S, S]`, then films."""
    vision = getattr(config, "vision_config", None) or config
    size = _read(vision, *_IMAGE_SIZES)
    height, width = (size if isinstance(size, list | tuple) else (size, size))[:2] if size else (64, 64)
    channels = _read(vision, "num_channels", "in_channels", "in_chans", "num_image_channels")
    channels = channels if isinstance(channels, int) else 3
    frames = _read(vision, "num_frames")
    if isinstance(frames, int):
        yield _normal(BATCH, frames, channels, height, width)
    yield _normal(BATCH, channels, height, width)
    if not size:
        yield _normal(BATCH, channels, 224, 224)
    yield _normal(BATCH, FRAMES, channels, height, width)


def _patches(config: Any, name: str) -> Iterator[Meal]:
    """An image as patches in one row, as Qwen-VL takes it."""
    channels = _read(config, "in_channels", "in_chans", "num_channels") or 3
    patch, films = _read(config, "patch_size") or 14, _read(config, "temporal_patch_size")
    grid = torch.tensor([[1, 8, 8]])
    for temporal in dict.fromkeys((films or 1, 1, 2)):
        yield {name: _normal(64, channels * temporal * patch * patch), "grid_thw": grid}


def _packed_patches(config: Any) -> Meal:
    """Images as rows of patches with their heights and widths, as SigLIP 2 takes them."""
    patch = _read(config, "patch_size") or 16
    channels = _read(config, "num_channels") or 3
    return {
        "pixel_values": _normal(BATCH, 16, channels * patch * patch),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.full((BATCH, 2), 4),
    }


def _features(config: Any) -> Iterator[Tensor]:
    """Spectrograms: `[B, mel, T]`, then `[B, T, mel]`."""
    mel = _read(config, *_MELS) or 80
    positions = _read(config, "max_source_positions")
    lengths = [2 * positions] if isinstance(positions, int) and positions <= 2000 else []
    for length in (*lengths, 128, 200):
        yield _normal(BATCH, mel, length)
        yield _normal(BATCH, length, mel)
    yield _normal(BATCH, 1, 256, mel)


def _values(config: Any) -> Iterator[Tensor]:
    """Sound waves `[B, T]`, then `[B, 1, T]`, then spectrograms."""
    mel, length = _read(config, "num_mel_bins"), _read(config, "max_length")
    if isinstance(mel, int) and isinstance(length, int):
        yield _normal(BATCH, length, mel)
    yield _normal(BATCH, 16000)
    yield _normal(BATCH, 1, 16000)
    if isinstance(mel, int):
        yield _normal(BATCH, 128, mel)


def _series(config: Any, names: set[str]) -> Iterator[Meal]:
    """Time series."""
    context = _read(config, "context_length") or 32
    lags = max(_read(config, "lags_sequence") or [0])
    channels = _read(config, "num_input_channels", "input_size") or 1
    length = context + lags
    times = _read(config, "num_time_features") or 0
    ahead = _read(config, "prediction_length") or 8
    shape = (BATCH, length) if channels == 1 and "past_time_features" in names else (BATCH, length, channels)
    meal: Meal = {"past_values": _normal(*shape)}
    if "past_time_features" in names:
        meal |= {
            "past_time_features": _normal(BATCH, length, times),
            "past_observed_mask": torch.ones(shape),
            "future_values": _normal(BATCH, ahead, *shape[2:]),
            "future_time_features": _normal(BATCH, ahead, times),
        }
        cardinality = _read(config, "num_static_categorical_features") or 0
        if cardinality:
            meal["static_categorical_features"] = torch.zeros(BATCH, cardinality, dtype=torch.long)
    yield meal
    yield {"past_values": _normal(BATCH, length)}
