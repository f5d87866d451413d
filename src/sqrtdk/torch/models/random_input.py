"""Random inputs for the arguments of a model's forward, chosen by argument name and configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, FRAMES = 2, 16, 8
_IMAGE_SIZES = ("image_size", "img_size", "crop_size", "pretrain_image_size", "input_size")
_MELS = ("num_mel_bins", "feature_size", "n_mels", "input_dim", "input_feat_per_channel")
Inputs = dict[str, Any]


def make_inputs(model: nn.Module, words: range) -> Iterator[Inputs]:
    """Yield inputs that the model may accept, likeliest first; all are random, and the same every time.

    Tokens are sampled from `words`, up to the size of the vocabulary.
    """
    config = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    names = set(parameters)
    main = getattr(model, "main_input_name", "input_ids")
    offered: list[Inputs] = []
    if main in ("pixel_values", "pixel_values_videos") or ("pixel_values" in names and "input_ids" not in names):
        name = "pixel_values" if "pixel_values" in names else main
        offered += [{name: pixels} for pixels in _pixels(config)]
    if main == "input_features" or "input_features" in names:
        offered += [{"input_features": features} for features in _features(config)]
    if main == "input_values" or "input_values" in names:
        offered += [{"input_values": values} for values in _values(config)]
    if "input_ids" in names:
        text = {"input_ids": _tokens(config, words)}
        both = [text | {"pixel_values": pixels} for pixels in _pixels(config)] if "pixel_values" in names else []
        offered = [text, *offered, *both] if main == "input_ids" else [*offered, *both, text]
    if "spatial_shapes" in names:
        offered.insert(0, _packed_patches(config))
    width = read_field(config, "hidden_size", "d_model", "n_embd")
    if "grid_thw" in names:
        patches = list(_patches(config, "hidden_states" if "hidden_states" in names else "pixel_values"))
        offered = patches + offered
    for name in ("inputs_embeds", "hidden_states", "input_embeds", "x"):
        if name in names and isinstance(width, int):
            offered.append({name: normal(BATCH, TOKENS, width)})
    if "past_values" in names:
        offered += list(_series(config, names))
    for inputs in offered or [{}]:
        yield from _with_sides(inputs, config, parameters, words)


def _with_sides(inputs: Inputs, config: Any, parameters: Any, words: range) -> Iterator[Inputs]:
    """Yield the inputs with the other required arguments, then with all optional ones, then alone."""
    required = {name for name, one in parameters.items() if one.default is inspect.Parameter.empty}
    required |= {"decoder_input_ids", "bbox"} & set(parameters)
    beside = {name: side for name in parameters if (side := _fill(name, config, inputs, words)) is not None} | inputs
    needed = {name: value for name, value in beside.items() if name in required or name in inputs}
    offered = [needed, beside, inputs]
    for at, one in enumerate(offered):
        if one and not any(one.keys() == before.keys() for before in offered[:at]):
            yield one


def _fill(name: str, config: Any, inputs: Inputs, words: range) -> Any:
    """Return a value for an argument beside the main one; None for an unknown name."""
    match name:
        case "input_ids":
            return _tokens(config, words)
        case "decoder_input_ids":
            return _tokens(config, words, 12)
        case "bbox":
            corner = torch.randint(0, 400, (BATCH, TOKENS, 2), generator=generator())
            return torch.cat([corner, corner + 50], dim=-1)
        case "pixel_values":
            return next(_pixels(config))
        case "attention_mask" | "padding_mask" if "input_ids" in inputs:
            return torch.ones(BATCH, TOKENS, dtype=torch.long)
        case "position_ids" | "timesteps":
            return torch.arange(TOKENS).expand(BATCH, -1)
        case "input_features_mask" | "attention_mask" | "feature_attention_mask" if "input_features" in inputs:
            shape = inputs["input_features"].shape
            mel = read_field(config, *_MELS)
            return torch.ones(BATCH, shape[1] if shape[-1] == mel else shape[-1], dtype=torch.long)
        case "states" | "actions" | "rewards" | "returns_to_go":
            width = {"states": "state_dim", "actions": "act_dim"}.get(name)
            return normal(BATCH, TOKENS, 1 if width is None else read_field(config, width) or 1)
        case "encoder_hidden_states" | "query_embeds" | "hidden_states":
            foreign = ("cross_attention_hidden_size", "encoder_hidden_size") if name.startswith("encoder") else ()
            width = read_field(config, *foreign, "hidden_size", "d_model")
            return normal(BATCH, TOKENS, width) if isinstance(width, int) else None
    return None


def generator() -> torch.Generator:
    """Return a generator for one tensor, so that the tensor does not depend on earlier samples."""
    return torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    """Return standard normal numbers, the same for the same shape."""
    return torch.randn(*shape, generator=generator())


def _tokens(config: Any, words: range, count: int = TOKENS) -> Tensor:
    size = read_field(config, "vocab_size", "input_dim")
    last = min(words.stop, size) if isinstance(size, int) and size > 4 else words.stop
    return torch.randint(words.start, last, (BATCH, count), generator=generator())


def read_field(config: Any, *names: str) -> Any:
    """Return the first of some fields that a configuration, or one nested in it, has; None if it has none."""
    if config is None:
        return None
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for inner in _inner(config):
        value = read_field(inner, *names)
        if value is not None:
            return value
    return None


def _inner(config: Any) -> list[Any]:
    return [value for value in vars(config).values() if hasattr(value, "model_type") and hasattr(value, "to_dict")]


def read_image_shape(config: Any, default: int) -> tuple[int, int, int]:
    """Return channels, height and width of a configuration's images; the default size if it names none."""
    size = read_field(config, *_IMAGE_SIZES) or default
    height, width = (size if isinstance(size, list | tuple) else (size, size))[:2]
    channels = read_field(config, "num_channels", "in_channels", "in_chans", "num_image_channels")
    return channels if isinstance(channels, int) else 3, height, width


def read_vision(config: Any) -> Any:
    """Return the vision part of a configuration, or the whole configuration without one."""
    return getattr(config, "vision_config", None) or config


def _pixels(config: Any) -> Iterator[Tensor]:
    """Yield images `[B, C, S, S]`, then videos."""
    vision = read_vision(config)
    channels, height, width = read_image_shape(vision, 64)
    frames = read_field(vision, "num_frames")
    if isinstance(frames, int):
        yield normal(BATCH, frames, channels, height, width)
    yield normal(BATCH, channels, height, width)
    if not read_field(vision, *_IMAGE_SIZES):
        yield normal(BATCH, channels, 224, 224)
    yield normal(BATCH, FRAMES, channels, height, width)


def _patches(config: Any, name: str) -> Iterator[Inputs]:
    """Yield an image as a row of patches, the format of Qwen-VL."""
    channels = read_field(config, "in_channels", "in_chans", "num_channels") or 3
    patch, films = read_field(config, "patch_size") or 14, read_field(config, "temporal_patch_size")
    grid = torch.tensor([[1, 8, 8]])
    for temporal in dict.fromkeys((films or 1, 1, 2)):
        yield {name: normal(64, channels * temporal * patch * patch), "grid_thw": grid}


def _packed_patches(config: Any) -> Inputs:
    """Return images as rows of patches with heights and widths, the format of SigLIP 2."""
    patch = read_field(config, "patch_size") or 16
    channels = read_field(config, "num_channels") or 3
    return {
        "pixel_values": normal(BATCH, 16, channels * patch * patch),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.full((BATCH, 2), 4),
    }


def read_mel_bins(config: Any) -> int:
    """Return the number of frequencies in a configuration's spectrograms; 80 if it has none."""
    return read_field(config, *_MELS) or 80


def _features(config: Any) -> Iterator[Tensor]:
    """Yield spectrograms `[B, mel, T]`, then `[B, T, mel]`."""
    mel = read_mel_bins(config)
    positions = read_field(config, "max_source_positions")
    lengths = [2 * positions] if isinstance(positions, int) and positions <= 2000 else []
    for length in (*lengths, 128, 200):
        yield normal(BATCH, mel, length)
        yield normal(BATCH, length, mel)
    yield normal(BATCH, 1, 256, mel)


def _values(config: Any) -> Iterator[Tensor]:
    """Yield sound waves `[B, T]`, then `[B, 1, T]`, then spectrograms."""
    mel, length = read_field(config, "num_mel_bins"), read_field(config, "max_length")
    if isinstance(mel, int) and isinstance(length, int):
        yield normal(BATCH, length, mel)
    yield normal(BATCH, 16000)
    yield normal(BATCH, 1, 16000)
    if isinstance(mel, int):
        yield normal(BATCH, 128, mel)


def _series(config: Any, names: set[str]) -> Iterator[Inputs]:
    """Yield time series."""
    context = read_field(config, "context_length") or 32
    lags = max(read_field(config, "lags_sequence") or [0])
    channels = read_field(config, "num_input_channels", "input_size") or 1
    length = context + lags
    times = read_field(config, "num_time_features") or 0
    ahead = read_field(config, "prediction_length") or 8
    shape = (BATCH, length) if channels == 1 and "past_time_features" in names else (BATCH, length, channels)
    inputs: Inputs = {"past_values": normal(*shape)}
    if "past_time_features" in names:
        inputs |= {
            "past_time_features": normal(BATCH, length, times),
            "past_observed_mask": torch.ones(shape),
            "future_values": normal(BATCH, ahead, *shape[2:]),
            "future_time_features": normal(BATCH, ahead, times),
        }
        cardinality = read_field(config, "num_static_categorical_features") or 0
        if cardinality:
            inputs["static_categorical_features"] = torch.zeros(BATCH, cardinality, dtype=torch.long)
    yield inputs
    yield {"past_values": normal(BATCH, length)}
