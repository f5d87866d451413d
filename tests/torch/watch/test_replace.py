"""Watching with sqrtdk's own attention in place of the model's."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from sqrtdk.torch.watch.replace import FusedWatch
from torch_watched import BATCH, HEADS, TOKENS, WIDTH, ByHand, Fused, Stack, build, make_input

pytestmark = pytest.mark.usefixtures("nothing_left")


def same_statistics(one, two):
    assert list(one.layers) == list(two.layers)
    for path, summary in one.layers.items():
        for name in ("entropy", "score_max", "visible_keys"):
            np.testing.assert_allclose(summary[name].mean, two.layers[path][name].mean, rtol=1e-5)


@pytest.mark.parametrize("gradients", [True, False])
def test_torchs_attention_is_computed_by_sqrtdk(gradients, monkeypatch):
    model, x = build(Stack, Fused(), Fused()), make_input()
    present = torch.ones(BATCH, TOKENS, dtype=torch.long)
    present[1, 4:] = 0
    with torch.set_grad_enabled(gradients):
        expected = model(x, attention_mask=present)
        with watch(model) as passive:
            model(x, attention_mask=present)
        calls = []
        monkeypatch.setattr(
            sys.modules["sqrtdk.torch.watch.recognise.recogniser"], "measure", lambda *given: calls.append(given)
        )
        with FusedWatch(model) as seen:
            output = model(x, attention_mask=present)
    assert calls == []  # statistics come from the pass that computes
    assert torch.allclose(output, expected, atol=1e-5)
    same_statistics(seen, passive)
    assert seen.notes == []


def test_gradients_flow_through_the_fused_attention():
    model, x = build(Stack, Fused(), Fused()), make_input()
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with FusedWatch(model):
        model(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_multihead_attention(need_weights, average):
    model = build(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True).eval()
    x = make_input()
    hidden = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    hidden[0, 5:] = True
    given = {"need_weights": need_weights, "average_attn_weights": average, "key_padding_mask": hidden}
    with torch.no_grad():
        expected, expected_weights = model(x, x, x, **given)
        with FusedWatch(model) as seen:
            output, weights = model(x, x, x, **given)
    assert torch.allclose(output, expected, atol=1e-6)
    assert weights is expected_weights is None or torch.allclose(weights, expected_weights, atol=1e-6)
    assert seen.notes == []
    np.testing.assert_array_equal(seen.layers[""].rows_seen, int((~hidden).sum()))


def test_an_encoder_whose_fast_path_is_switched_off_meanwhile():
    layer = build(nn.TransformerEncoderLayer, WIDTH, HEADS, 32, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        expected = model(make_input())
        with FusedWatch(model) as seen:
            output = model(make_input())
    assert torch.allclose(output, expected, atol=1e-5)
    assert list(seen.layers) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert seen.notes == []


def test_attention_by_hand_stays_and_is_listed():
    model, x = build(Stack, ByHand(), Fused()), make_input()
    expected = model(x)
    with FusedWatch(model) as seen:
        output = model(x)
    assert torch.allclose(output, expected, atol=1e-5)
    assert list(seen.layers) == ["layers.0", "layers.1"]
    assert seen.notes == ["not fused: layers.0 stays as the model computes it, and is measured beside it"]
    assert torch.equal(model(x), expected)


def test_calls_outside_the_model_are_torchs_own():
    model, q = build(Fused), torch.randn(1, 2, 6, 8)
    expected = functional.scaled_dot_product_attention(q, q, q)
    with FusedWatch(model) as seen:
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q), expected)
    assert seen.layers == {}
