"""Declared scale of a layer: from the model's configuration, else the known scale of its family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from sqrtdk import checks
from sqrtdk.audits.audit import ScaleRecord
from sqrtdk.records.families import ScaleFormula, formula_of_family
from sqrtdk.torch.watch.modules import name_modules

__all__ = ["Declaration", "declared_scale"]


class Declaration(NamedTuple):
    """Declared multiplier of q·kᵀ and its source; None if nothing declares one."""

    value: float | None
    source: str | None


SILENT = Declaration(None, None)


def declared_scale(
    model: nn.Module, scale: ScaleRecord, formula_of: Callable[[str], ScaleFormula | None] = formula_of_family
) -> Declaration:
    """Return the declared scale of the layer that a scale was measured in.

    The nearest configuration (`config` of the layer or of a module around it) comes first. It may hold the scale itself
    (`attention_multiplier`, `softmax_scale`) or a field that determines it (`query_pre_attn_scalar` n: 1/√n;
    `pos_att_type`; `scale_attn_weights`, with `scale_attn_by_inverse_layer_idx` divided by the layer number). It may
    hold factors on keys (`key_multiplier`) or on rotated vectors (YaRN, LongRoPE; with latent heads, `mscale_all_dim`).
    The family (`model_type`) comes second. Values of the module itself are not used, because they may be the mistake.

    Args:
        model: the model that was watched.
        scale: one record of `Seen.scales`. Its path and dₖ are used, and whether q and k are normalised: factors before
            a norm belong neither to the measured nor to the declared scale.
        formula_of: returns the scale formula of a family. Default: the designed formula, else the measured one.

    >>> from types import SimpleNamespace
    >>> model = nn.Identity()
    >>> model.config = SimpleNamespace(query_pre_attn_scalar=144)
    >>> record = ScaleRecord("", 128, 144**-0.5, 1.0, 144**-0.5, False, None, "exact", None)
    >>> declared_scale(model, record)
    Declaration(value=0.08333333333333333, source='config.query_pre_attn_scalar')
    >>> declared_scale(nn.Identity(), record)
    Declaration(value=None, source=None)
    """
    configs = _configs_around(model, scale.path)
    if not configs:
        return SILENT
    index = _layer_index(scale.path)
    base = _declare_by_fields(configs[0], scale.d_k, index)
    if base is None:
        base = _declare_by_family(configs, scale.d_k, formula_of)
    # A factor before a norm has no effect. After the norm, the watch sees a factor on the vectors.
    is_lost = scale.normalised and (scale.after_the_norm is None or abs(scale.after_the_norm - 1.0) < 1e-3)
    factor = None if is_lost else _factor_before_the_call(configs[0], index)
    if factor is None or factor.value == 1.0:
        return base or SILENT
    if factor.value is None:
        return SILENT
    if base is None:
        return Declaration(factor.value / math.sqrt(scale.d_k), factor.source)
    assert base.value is not None
    return Declaration(base.value * factor.value, f"{base.source}, {factor.source}")


def _configs_around(model: nn.Module, layer: str) -> list[Any]:
    """Return the configurations of the layer's module and of the modules around it, nearest first."""
    around = [
        (len(path), module)
        for module, path in name_modules(model).items()
        if path in ("", layer) or layer.startswith(path + ".")
    ]
    around.sort(key=lambda pair: -pair[0])
    configs = [getattr(module, "config", None) for _, module in around]
    return [config for config in configs if config is not None and not callable(config)]


def _layer_index(layer: str) -> int | None:
    """Return the number of a layer in its stack: the last number of its path."""
    return next((int(part) for part in reversed(layer.split(".")) if part.isdecimal()), None)


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _read_number(config: Any, name: str) -> float | None:
    value = _read(config, name)
    return float(value) if checks.is_number(value) and math.isfinite(value) else None


def _declare_by_fields(config: Any, d_k: int, index: int | None) -> Declaration | None:
    scalar = _read_number(config, "query_pre_attn_scalar")
    if scalar is not None and scalar > 0:
        return Declaration(scalar**-0.5, "config.query_pre_attn_scalar")
    for owner, prefix in ((config, "config"), (_read(config, "attn_config"), "config.attn_config")):
        for name in ("attention_multiplier", "softmax_scale"):
            value = _read_number(owner, name)
            if value is not None:
                return Declaration(value, f"{prefix}.{name}")
    terms = _read(config, "pos_att_type")
    if isinstance(terms, list | tuple) and terms:
        # DeBERTa (He et al. 2021, equation 4): the score is a sum of the terms listed here and of the content term.
        count = 1 + len({"c2p", "p2c"} & {str(term) for term in terms})
        return Declaration((count * d_k) ** -0.5, "config.pos_att_type")
    return _declare_by_switches(config, d_k, index)


def _declare_by_switches(config: Any, d_k: int, index: int | None) -> Declaration | None:
    """Return GPT-2's declaration: 1/√dₖ if scaling is on, divided by the layer number if that switch is on."""
    scaled = _read(config, "scale_attn_weights")
    if not isinstance(scaled, bool):
        return None
    value, source = (d_k**-0.5 if scaled else 1.0), "config.scale_attn_weights"
    if _read(config, "scale_attn_by_inverse_layer_idx") is not True:
        return Declaration(value, source)
    if index is None:
        return None
    return Declaration(value / (index + 1), f"{source}, config.scale_attn_by_inverse_layer_idx")


def _declare_by_family(
    configs: list[Any], d_k: int, formula_of: Callable[[str], ScaleFormula | None]
) -> Declaration | None:
    for config in configs:
        family = _read(config, "model_type")
        formula = formula_of(family) if isinstance(family, str) else None
        if formula is not None:
            return Declaration(formula.at(d_k), f"family {family}")
    return None


def _factor_before_the_call(config: Any, index: int | None) -> Declaration | None:
    """Return the common factor of q and k after their projections; its value is None if there is no single number."""
    on_keys = _read_number(config, "key_multiplier")
    rotation = _read_rotation(config, index)
    rotated = None if rotation is None else _factor_of_rotation(config, *rotation)
    if on_keys is None or (rotated is not None and rotated.value is None):
        return rotated
    if rotated is None or rotated.value == 1.0:
        return Declaration(on_keys, "config.key_multiplier")
    assert rotated.value is not None
    return Declaration(on_keys * rotated.value, f"config.key_multiplier, {rotated.source}")


def _read_rotation(config: Any, index: int | None) -> tuple[Mapping[str, Any], str] | None:
    """Return the parameters of the layer's rotation and their field."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = _read(config, name)
        if not isinstance(parameters, Mapping) or not parameters:
            continue
        if not all(isinstance(value, Mapping) for value in parameters.values()):
            return parameters, f"config.{name}"
        kinds = _read(config, "layer_types")
        kind = kinds[index] if isinstance(kinds, list | tuple) and index is not None and index < len(kinds) else None
        return (parameters[kind], f"config.{name}.{kind}") if kind in parameters else None
    return None


def _factor_of_rotation(config: Any, parameters: Mapping[str, Any], source: str) -> Declaration:
    """Return the declared factor of a rotation.

    YaRN (Peng et al. 2023) multiplies rotated q and k each by 0.1·ln s + 1, LongRoPE by √(1 + ln s/ln n).
    """
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind not in ("yarn", "longrope"):
        return Declaration(1.0, source)
    original = _read_number(parameters, "original_max_position_embeddings")
    original = original or _read_number(config, "original_max_position_embeddings")
    longest, stretch = _read_number(config, "max_position_embeddings"), _read_number(parameters, "factor")
    if stretch is None:
        if not longest or not original:
            return Declaration(None, source)
        stretch = longest / original
    rotated = _read_number(parameters, "attention_factor")
    over_all = _read_number(parameters, "mscale_all_dim") or 0.0
    if rotated is None and kind == "yarn":
        own = _read_number(parameters, "mscale") or 0.0
        rotated = _mscale(stretch, own) / _mscale(stretch, over_all) if own and over_all else _mscale(stretch, 1.0)
    elif rotated is None:
        if not original or original <= 1:
            return Declaration(None, source)
        rotated = math.sqrt(1.0 + math.log(max(stretch, 1.0)) / math.log(original))
    latent = _read_number(config, "qk_rope_head_dim") is not None
    share = _read_number(parameters, "partial_rotary_factor") or _read_number(config, "partial_rotary_factor") or 1.0
    if rotated != 1.0 and (latent or share < 1.0):
        return Declaration(None, source)  # the rotated part of a head has another factor than the rest
    return Declaration(rotated**2 * (_mscale(stretch, over_all) ** 2 if latent and over_all else 1.0), source)


def _mscale(stretch: float, weight: float) -> float:
    return 1.0 if stretch <= 1.0 else 0.1 * weight * math.log(stretch) + 1.0
