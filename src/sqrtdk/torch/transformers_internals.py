"""Wrappers around the names of the transformers library that are private or differ between its releases."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from sqrtdk.errors import MissingExtraError, missing_extra

_layers: dict[type, str] = {}


def import_interfaces() -> tuple[Any, Any]:
    """Return the transformers registries of attention functions and of mask functions.

    Raises:
        MissingExtraError: transformers is missing or too old.
    """
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


def import_mask_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that write boolean masks (True: may attend) and additive masks."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    return sdpa_mask, eager_mask


def find_registry() -> Any:
    """Return the class that looks up attention functions, or None unless a transformers with such a class is loaded."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    return interface if hasattr(interface, "get_interface") else None


def read_layers(config_class: type) -> str:
    """Return "dispatched", "mixed" or "own": all, some or none of the attention layers use the transformers registry.

    A layer that does not use the registry would add our boolean mask to its scores. The answer comes from the source
    code, as in transformers itself. A model without source or without attention layers counts as dispatched.
    """
    if config_class not in _layers:
        module = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
        try:
            source = "" if module is None else inspect.getsource(module)
        except (OSError, TypeError):
            source = ""
        parts = re.split(r"^(?=class |def |@)", source, flags=re.MULTILINE)
        layers = [part for part in parts if re.match(r"class \w*Attention\w*\(nn\.Module\)", part)]
        asking = "ALL_ATTENTION_FUNCTIONS"
        own = [part for part in layers if asking not in part and "oftmax(" in part and "mask" in part]
        _layers[config_class] = "own" if layers and asking not in source else "mixed" if own else "dispatched"
    return _layers[config_class]


def are_weights_recorded() -> bool:
    """Return whether an output recorder collects attention weights. GPT-2 does not pass `output_attentions` on."""
    recorder = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return recorder is not None and any("attentions" in key for key in recorder.get() or ())


def has_base_model(config: Any) -> bool:
    """Return whether AutoModel has a model class for a configuration."""
    from transformers import AutoModel

    return type(config) in AutoModel._model_mapping


def build_model(kind: Any, config: Any, **options: Any) -> nn.Module:
    """Return a model with random weights, built by an automatic class or by a model class."""
    make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    model: nn.Module = make(config, **options)
    return model


def list_families() -> list[str]:
    """Return the sorted names of all model families (`model_type`) in the installed transformers."""
    from transformers.models.auto import configuration_auto

    return sorted(vars(configuration_auto)["CONFIG_MAPPING_NAMES"])


def list_classes(family: str) -> list[str]:
    """Return the names of a family's model classes, the base model first, the others by task name."""
    from transformers.models.auto import modeling_auto

    mappings = sorted(name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_NAMES"))
    mappings.sort(key=lambda name: name != "MODEL_MAPPING_NAMES")
    found = (getattr(modeling_auto, mapping).get(family, ()) for mapping in mappings)
    return [name for names in found for name in ((names,) if isinstance(names, str) else names)]


def is_loaded_per_call(module: nn.Module) -> bool:
    """Return whether accelerate loads a module's weights for each call and removes them after it."""
    return hasattr(module, "_hf_hook")
