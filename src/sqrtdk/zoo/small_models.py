"""Small model of one family: its class, its configuration made small, and weights that make attention sharp."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import nn

from sqrtdk.torch.transformers_internals import build_model, list_classes
from sqrtdk.zoo.shrink import Size, shrink

_MOST_PARAMETERS = 600_000_000
_GAIN = 1.3


NOT_BUILT = "cannot be built"


class NotBuiltError(Exception):
    """The reason why no model of a family could be built."""


def build(family: str, size: Size) -> nn.Module:
    """Return a model of the family in this size, in float32, with eager attention, whose weights are visible.

    Raises:
        NotBuiltError: with the reason.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(family)
        usual = config.to_dict()
        small = {name: value for name, value in shrink(usual, size).items() if value != usual[name]}
        config = type(config)(**copy.deepcopy(small))
        made_by = _find_class(family, config)
        _require_small(made_by, config)
        torch.manual_seed(0)
        model = build_model(made_by, config, attn_implementation="eager", dtype=torch.float32).eval()
    except NotBuiltError:
        raise
    except Exception as error:  # other people's code: whatever it raises is the reason
        raise NotBuiltError(f"{NOT_BUILT}: {describe(error)}") from None
    sharpen(model)
    return model


def describe(error: Exception) -> str:
    """Return the kind of an error and the longer of its first two lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = max(lines[:2], key=len, default="")
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _find_class(family: str, config: Any) -> Any:
    """Return the base model class of a family, or else another class that takes its configuration."""
    from transformers import PreTrainedModel

    package, _, own = type(config).__module__.rpartition(".")
    modeling = importlib.import_module(f"{package}.{own.replace('configuration_', 'modeling_')}")
    for name in list_classes(family):
        if hasattr(modeling, name):
            return getattr(modeling, name)
    fitting = [
        value
        for value in vars(modeling).values()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == modeling.__name__
        and getattr(value, "config_class", None) is type(config)
        and "forward" in vars(value)
    ]
    if not fitting:
        raise NotBuiltError("no model class takes its configuration alone")
    return min(fitting, key=lambda one: (not one.__name__.endswith("Model"), len(one.__name__)))


def _require_small(made_by: Any, config: Any) -> None:
    """Refuse a model with too many parameters, counted without their memory where the class allows it."""
    try:
        with torch.device("meta"):
            model = build_model(made_by, copy.deepcopy(config), attn_implementation="eager")
    except Exception:  # code that computes with its weights while it builds them
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise NotBuiltError(f"too large to be built here: {count / 1e6:.0f} million parameters with few layers")


def sharpen(model: nn.Module) -> None:
    """Rescale matrices to keep the variance of their inputs, because nearly uniform attention would hide a wrong scale.

    The attention of a freshly initialised model is nearly uniform. A scale that is wrong by half then changes no weight
    by more than rounding does.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or weight.ndim != 2:
                continue
            if isinstance(module, nn.Embedding) and type(module) is not nn.Embedding:
                continue  # position embeddings, some of which are cosines, not weights
            inputs = weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
            inputs = 1 if isinstance(module, nn.Embedding) else inputs
            weight.normal_(generator=generator).mul_(_GAIN * inputs**-0.5)
