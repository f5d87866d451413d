"""Declared scales: fields of configurations, factors before the call, families; never what a module itself holds."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sqrtdk.torch.models.declared import Declaration, declared_scale
from sqrtdk.torch.watch import ScaleRecord

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
MSCALE = 0.1 * math.log(16.0) + 1.0


def measured(layer="h.3.attn", d_k=64, normalised=False):
    return ScaleRecord(layer, d_k, 0.125, 1.0, 0.125, normalised, None, "exact", None)


def stack(config, inner=None):
    """A model with four layers `h.*.attn`; `inner` is the configuration of the layers' own."""
    model = nn.Module()
    model.h = nn.ModuleList(nn.Module() for _ in range(4))
    for block in model.h:
        block.attn = nn.Linear(2, 2)
        block.attn.scaling = 0.77
        if inner is not None:
            block.attn.config = SimpleNamespace(**inner)
    model.config = SimpleNamespace(**config)
    return model


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"query_pre_attn_scalar": 144}, 144**-0.5),
        ({"attention_multiplier": 0.0078125}, 0.0078125),
        ({"attn_config": SimpleNamespace(softmax_scale=0.3)}, 0.3),
        ({"softmax_scale": None, "model_type": "t5"}, 1.0),
        ({"scale_attn_weights": True}, 0.125),
        ({"scale_attn_weights": False}, 1.0),
        ({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": True}, 0.125 / 4),
        ({"pos_att_type": ["c2p", "p2c"]}, 192**-0.5),
        ({"pos_att_type": []}, None),
        ({"key_multiplier": 0.5}, 0.125 / 2),
        ({"rope_parameters": YARN}, 0.125 * MSCALE**2),
        ({"rope_scaling": {"type": "yarn", "factor": 16.0}}, 0.125 * MSCALE**2),
        ({"rope_parameters": YARN | {"attention_factor": 1.0}, "key_multiplier": 3.0}, 0.375),
        ({"rope_parameters": YARN, "query_pre_attn_scalar": 16}, 0.25 * MSCALE**2),
        ({"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "qk_rope_head_dim": 8}, 0.125 * MSCALE**2),
        ({"rope_parameters": YARN, "qk_rope_head_dim": 8}, None),
        ({"rope_parameters": YARN, "partial_rotary_factor": 0.5}, None),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64},
          "max_position_embeddings": 256}, 0.125 * (1 + math.log(4) / math.log(64))),
        ({"rope_parameters": {"full": YARN, "sliding": {"rope_type": "default"}},
          "layer_types": ["sliding"] * 3 + ["full"]}, 0.125 * MSCALE**2),
        ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"model_type": "zamba2"}, 0.125 * math.sqrt(2)),
        ({"model_type": "nobody's"}, None),
        ({"query_pre_attn_scalar": True, "attention_multiplier": "0.3", "scale_attn_weights": None}, None),
    ],
)  # fmt: skip
def test_scales_that_configurations_declare(config, expected):
    declaration = declared_scale(stack(config), measured())
    if expected is None:
        assert declaration == Declaration(None, None)
    else:
        assert declaration.value == pytest.approx(expected, rel=1e-12)
        assert declaration.source


def test_the_nearest_configuration_counts_and_the_family_may_be_told_further_out():
    outer = {"attention_multiplier": 0.5, "model_type": "gpt_neo"}
    assert declared_scale(stack(outer, {"attention_multiplier": 0.25}), measured()).value == 0.25
    assert declared_scale(stack(outer, {"model_type": "unheard of"}), measured()) == (1.0, "family gpt_neo")
    assert declared_scale(stack(outer), measured("elsewhere")).value == 0.5


@pytest.mark.slow
def test_wrappers_do_not_hide_the_configuration():
    wrapped = torch.compile(nn.DataParallel(stack({"attention_multiplier": 0.5})), backend="eager")
    assert declared_scale(wrapped, measured()).value == 0.5


def test_a_dictionary_is_a_configuration_and_a_module_without_one_declares_nothing():
    model = stack({})
    model.config = {"attention_multiplier": 0.5}
    assert declared_scale(model, measured()) == (0.5, "config.attention_multiplier")
    del model.config
    assert declared_scale(model, measured()) == (None, None)


def test_factors_on_normalised_vectors_are_not_part_of_the_scale():
    config = {"rope_parameters": YARN, "key_multiplier": 3.0, "attention_multiplier": 0.5}
    assert declared_scale(stack(config), measured(normalised=True)).value == 0.5
    # Seen to be multiplied after the norm, they are.
    record = replace(measured(normalised=True), after_the_norm=3.0 * MSCALE**2)
    assert declared_scale(stack(config), record).value == pytest.approx(0.5 * 3.0 * MSCALE**2)
