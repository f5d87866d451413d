"""QK-Clip: after it the largest score is the threshold, in any layout of the projections; or nothing has changed."""

import copy
import math
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk import SqrtdkError
from sqrtdk.diagnosis.trend_rules import spread_of_scores
from sqrtdk.errors import SqrtdkWarning
from sqrtdk.torch import qk_clip_, watch
from torch_watched import DIMENSION, HEADS, WAYS, WIDTH, ByHand, Fused, Stack, make_input

X = make_input(tokens=9)


class Layout(nn.Module):
    """One product for q, k and v; `cut` says which of its columns are whose; rotated before the product if asked."""

    def __init__(self, columns, cut, rotated=False, transposed=False, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, columns) if transposed else torch.randn(columns, WIDTH))
        self.bias = nn.Parameter(torch.randn(columns)) if bias else None
        self.cut, self.rotated, self.transposed = cut, rotated, transposed

    def forward(self, x):
        y = x @ self.weight if self.transposed else functional.linear(x, self.weight)
        y = y if self.bias is None else y + self.bias
        q, k, v = self.cut(y)
        if self.rotated:
            angles = torch.arange(x.shape[1])[:, None] / torch.tensor([1.0, 7.0])
            q, k = (
                torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
                for a, b in (q.chunk(2, -1), k.chunk(2, -1))
            )
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def heads(y):
    return y.unflatten(-1, (-1, DIMENSION)).transpose(1, 2)


def interleaved(y):
    """GPT-NeoX, BLOOM: per head its q, k and v."""
    return heads(y).unflatten(1, (HEADS, 3)).unbind(2)


def grouped(y):
    """Falcon: per group two queries, then their key and value."""
    groups = heads(y).unflatten(1, (2, 4))
    return groups[:, :, :2].flatten(1, 2), groups[:, :, 2], groups[:, :, 3]


def strided(y):
    """Neighbouring columns belong to different heads."""
    q, k, v = y.chunk(3, -1)
    return tuple(one.unflatten(-1, (DIMENSION, HEADS)).movedim(-1, 1) for one in (q, k, v))


LAYOUTS = {
    "fused": (3 * WIDTH, lambda y: map(heads, y.chunk(3, -1)), {}),
    "fused, transposed": (3 * WIDTH, lambda y: map(heads, y.chunk(3, -1)), {"transposed": True}),
    "fused, without bias, rotated": (3 * WIDTH, lambda y: map(heads, y.chunk(3, -1)), {"bias": False, "rotated": True}),
    "interleaved, rotated": (3 * WIDTH, interleaved, {"rotated": True}),
    "grouped, rotated": (2 * WIDTH, grouped, {"rotated": True}),
    "strided": (3 * WIDTH, strided, {}),
}


def largest_of(model, *args):
    with torch.no_grad(), watch(model) as seen:
        model(*(args or (X,)))
    return seen, {path: summary["score_max"].largest for path, summary in seen.layers.items()}


def clip(model, *args):
    """Clip to below the second largest score of the first layer; every head above it must end at the threshold."""
    seen, before = largest_of(model, *args)
    path, scores = next(iter(before.items()))
    assert scores.max() > 1.0
    threshold = float(np.sort(scores)[-2]) * 0.9
    done = qk_clip_(model, seen, threshold=threshold)
    _, after = largest_of(model, *args)
    expected = np.minimum(scores, threshold)
    np.testing.assert_allclose(after[path], expected, rtol=1e-5)
    assert {head.head for head in done if head.layer == path} == set(np.flatnonzero(scores > threshold))
    return done


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_largest_score_becomes_the_threshold_in_every_layout(name):
    torch.manual_seed(1)
    columns, cut, options = LAYOUTS[name]
    done = clip(Layout(columns, cut, **options))
    shared = "grouped" in name
    for head in done:
        assert head.gamma == pytest.approx(done.threshold / head.before)
        assert {one.side for one in head.parameters} == ({"q"} if shared else {"q", "k"})
        assert (head.group_maximum is not None) == shared
        for one in head.parameters:
            assert one.factor == pytest.approx(head.gamma if shared else math.sqrt(head.gamma))
    assert done.as_json()["heads"][0]["parameters"][0]["parameter"] == "weight"
    assert f"clipped {len(done)} of 4 heads to a largest score of {done.threshold:g}" in repr(done)


@pytest.mark.parametrize("way", ["textbook", "merged batch", "keys first"])
def test_attention_by_hand_with_gradients(way):
    torch.manual_seed(0)
    assert set(WAYS) >= {way}
    clip(ByHand(way))
    model = ByHand(way)
    with watch(model) as seen:  # with gradients, in a training step
        model(X).sum().backward()
    before = model.q_proj.weight.detach().clone()
    assert len(qk_clip_(model, seen, threshold=1.0))
    assert not torch.equal(before, model.q_proj.weight)


@pytest.mark.parametrize("case", ["packed", "cross", "weights", "separate", "fast path"])
def test_multihead_attention(case):
    torch.manual_seed(2)
    options = {"kdim": 10, "vdim": 10} if case == "separate" else {}
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=case != "packed", **options).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_() if "out" not in name else None
    y = torch.randn(3, 6, 10 if case == "separate" else WIDTH)
    keys = (y, y) if case in ("cross", "separate") else (X, X)
    run = _Call(model, need_weights=case == "weights")
    clip(run, X, *keys)


class _Call(nn.Module):
    def __init__(self, attention, **options):
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, *args):
        return self.attention(*args, **self.options)


def test_autocast_and_float16_weights_are_found():
    torch.manual_seed(0)
    model = Fused()
    with torch.autocast("cpu", torch.bfloat16):
        seen, before = largest_of(model)
        done = qk_clip_(model, seen, threshold=2.0)
        _, after = largest_of(model)
    assert len(done)
    assert before[""].max() > 4.0
    np.testing.assert_allclose(after[""][[head.head for head in done]], 2.0, rtol=0.02)


def test_a_module_called_twice_and_tied_weights_are_clipped_once():
    torch.manual_seed(0)
    twice = Stack(Fused())
    seen, before = largest_of(twice)
    assert list(before) == ["layers.0 (call 0)", "layers.0 (call 1)"]
    largest = np.maximum(*before.values())  # of both calls: there is one clip for all
    gamma = 1.0 / largest.max()
    weight = twice.layers[0].q_proj.weight
    head = int(largest.argmax())
    rows = slice(head * DIMENSION, (head + 1) * DIMENSION)
    expected = weight.detach()[rows] * math.sqrt(gamma)
    done = qk_clip_(twice, seen, threshold=1.0)
    torch.testing.assert_close(weight.detach()[rows], expected)
    assert done.of_heads == HEADS
    assert [one.head for one in done] == [at for at in range(HEADS) if largest[at] > 1.0]
    (clipped,) = (one for one in done if one.head == head)
    assert (clipped.layer, clipped.before, clipped.group_maximum) == ("layers.0", largest.max(), None)

    tied = Stack(Fused(), Fused())
    tied.layers[1].q_proj = tied.layers[0].q_proj
    seen, before = largest_of(tied)
    first, second = before.values()
    head = int(first.argmax())
    gamma = 1.0 / max(first[head], second[head])
    weight = tied.layers[0].q_proj.weight
    rows = slice(head * DIMENSION, (head + 1) * DIMENSION)
    expected = weight.detach()[rows] * math.sqrt(gamma)
    qk_clip_(tied, seen, threshold=1.0)
    torch.testing.assert_close(weight.detach()[rows], expected)


def test_nothing_above_the_threshold_changes_nothing():
    torch.manual_seed(0)
    model = Fused()
    state = copy.deepcopy(model.state_dict())
    seen, before = largest_of(model)
    done = qk_clip_(model, seen, threshold=float(before[""].max()) + 1e-3)
    assert list(done) == []
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def make_negative(spread):
    """All scores far below zero, the same or different."""
    torch.manual_seed(0)
    model = Fused()
    with torch.no_grad():
        for projection, value in ((model.q_proj, 50.0), (model.k_proj, -50.0)):
            projection.weight.mul_(spread)
            projection.bias.fill_(value)
    return model


def test_largest_scores_below_zero_clip_nothing():
    model = make_negative(0.0)
    seen, before = largest_of(model)
    assert (before[""] < -10).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(qk_clip_(model, seen, threshold=1e-3)) == 0


def test_scores_below_zero_that_spread_are_warned_of_and_clipped_by_their_spread():
    model = make_negative(1.0)
    seen, before = largest_of(model)
    spreads = spread_of_scores(seen.layers[""])
    assert (before[""] < 0).all()
    assert (spreads > 5).all()
    with pytest.warns(
        SqrtdkWarning, match=r'4 heads of 4 have scores more than 5 above .* by="spread" clips such heads'
    ):
        done = qk_clip_(model, seen, threshold=5.0)
    assert (len(done), done.passed_over) == (0, 4)
    done = qk_clip_(model, seen, threshold=5.0, by="spread")
    assert (len(done), done.passed_over, done.by) == (4, 0, "spread")
    np.testing.assert_allclose([head.before for head in done], spreads)
    assert str(done).startswith("clipped 4 of 4 heads to a largest score of 5 above the mean")
    np.testing.assert_allclose(spread_of_scores(largest_of(model)[0].layers[""]), 5.0, rtol=1e-4)
    with pytest.raises(SqrtdkError, match="unknown rule of clipping 'mean'; known: maximum, spread"):
        qk_clip_(model, seen, by="mean")


class Normed(Fused):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIMENSION)

    def split(self, x):
        return self.norm(super().split(x)) * 20


class Limited(Fused):
    """Its q and k are limited after their projections: only their lengths tell."""

    def split(self, x):
        return super().split(x).clamp(-1, 1) * 20


class Adapted(nn.Module):
    """A projection of two products, as LoRA has it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


class Twofold(Fused):
    """Two attentions of different projections in one module: its summary is of both."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, attention_mask=None):
        q, k = self.split(self.other(x)), self.split(self.k_proj(x))
        return super().forward(x) + functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def _adapted():
    model = Fused()
    model.q_proj = Adapted(model.q_proj)
    return model


class Lora(nn.Module):
    """A projection as peft has it."""

    def __init__(self, inner):
        super().__init__()
        self.base_layer = inner
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def _with_lora():
    model = Fused()
    model.k_proj = Lora(model.k_proj)
    return model


REFUSED = {
    "LoRA": (lambda: Stack(_with_lora()), "layers.0: LoRA on k_proj; clip a model into which it is merged"),
    "two products": (lambda: Stack(_adapted()), "layers.0: q is not the output of one product with a parameter"),
    "normalised": (lambda: Stack(Fused(), Normed()), "layers.1: k is normalised after its projection"),
    "limited": (lambda: Stack(Fused(), Limited()), "layers.1: k: the lengths of its vectors are not those"),
    "two attentions in one": (lambda: Stack(Twofold()), "queries and keys of different projections"),
    "not finite": (lambda: Stack(_infinite()), "scores that are NaN or infinite"),
}


def _infinite():
    model = Fused()
    model.q_proj.bias.data[0] = math.inf
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_clipped_is_refused_and_nothing_is_changed(name):
    torch.manual_seed(0)
    make, reason = REFUSED[name]
    model = make()
    state = copy.deepcopy(model.state_dict())
    seen, _ = largest_of(model)
    with pytest.raises(SqrtdkError, match=reason):
        qk_clip_(model, seen, threshold=0.5)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key])


def test_other_models_are_refused():
    model = Stack(Fused())
    seen, _ = largest_of(model)
    with pytest.raises(SqrtdkError, match="not among those of model any more"):
        qk_clip_(copy.deepcopy(model), seen, threshold=0.5)
    with pytest.raises(SqrtdkError, match="threshold must be positive"):
        qk_clip_(model, seen, threshold=0.0)
    with pytest.raises(SqrtdkError, match="seen must be what watch"):
        qk_clip_(model, model)


def test_a_copy_of_what_was_seen_serves_all_but_clipping():
    model = Stack(Fused())
    seen, _ = largest_of(model, X)
    for other in (copy.deepcopy(seen), pickle.loads(pickle.dumps(seen))):
        assert other.layers == seen.layers
        with pytest.raises(SqrtdkError, match="what was seen is a copy"):
            qk_clip_(model, other, threshold=0.5)
    assert len(qk_clip_(model, seen, threshold=0.5))


def test_wrappers_do_not_show_in_the_names_of_parameters():
    model = nn.DataParallel(Stack(Fused()))  # without devices it calls the module
    seen, _ = largest_of(model)
    (head, *_) = qk_clip_(model, seen, threshold=0.5)
    assert {one.parameter for one in head.parameters} == {
        f"layers.0.{side}_proj.{name}" for side in "qk" for name in ("weight", "bias")
    }


def test_tokens_that_are_all_alike_tell_no_columns():
    model = Fused()
    seen, _ = largest_of(model, X[:1, :1].expand(2, 6, WIDTH))
    assert isinstance(seen.heads_of(""), str)
    with pytest.raises(SqrtdkError, match="nothing was clipped"):
        qk_clip_(model, seen, threshold=1e-3)


@pytest.mark.slow
def test_logits_grow_without_it_and_stay_with_it():
    """A loss that wants a sharp head, a large learning rate: what QK-Clip is for."""

    def train(threshold):
        torch.manual_seed(0)
        model, largest = Fused(), []
        optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(60):
            with watch(model) as seen:
                loss = (model(X) - 3 * X.roll(1, 1)).square().mean() - model.q_proj(X).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if threshold is not None:
                qk_clip_(model, seen, threshold=threshold)
            largest.append(float(seen.layers[""]["score_max"].largest.max()))
        return largest

    free, clipped = train(None), train(100.0)
    assert max(free[-10:]) > 300 > 4 * free[0]
    # The maximum that a step finds is that of the weights that the last clip left and one step has moved.
    assert max(clipped[-10:]) < 150


@pytest.mark.long
def test_half_precision_with_rotation():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 50, "head_dim": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
    tokens = torch.randint(0, 50, (2, 40))
    seen, before = largest_of(model, tokens)
    (path,) = before
    threshold = 0.5 * float(before[path].min())
    assert len(qk_clip_(model, seen, threshold=threshold)) == 4
    _, after = largest_of(model, tokens)
    np.testing.assert_allclose(after[path], threshold, rtol=0.02)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "t5", "whisper", "bloom", "falcon", "neox", "albert", "mla"])
def test_models_of_transformers(name):
    pytest.importorskip("transformers")
    from own_models import EVERY
    from small_models import SIZES, TEXT, VOCABULARY, SmallModel, feed

    sharp = {"initializer_range": 0.5}
    mla = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    own = {
        "neox": SmallModel("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, **SIZES, **sharp}),
        "albert": SmallModel(
            "AlbertModel", "AlbertConfig", {**SIZES, **sharp, "vocab_size": VOCABULARY, "embedding_size": 16}, "encoder"
        ),
        "mla": SmallModel(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            {**TEXT, **SIZES, **sharp, **mla, "first_k_dense_replace": 2, "num_key_value_heads": 4},
        ),
    }
    small_model = own.get(name) or EVERY[name]
    small_model = (
        replace(small_model, options={**small_model.options, **sharp}) if name in ("bloom", "falcon") else small_model
    )
    model = small_model.build()
    fed = feed(small_model, "left", torch.float32)
    with torch.no_grad(), watch(model) as seen:
        model(**fed)
    before = {path: summary["score_max"].largest for path, summary in seen.layers.items()}
    layer, scores = next(iter(before.items()))
    threshold = 0.7 * float(scores.max())
    done = qk_clip_(model, seen, threshold=threshold)
    of_path = [head for head in done if head.layer == seen.paths[layer]]
    with torch.no_grad(), watch(model) as seen:
        model(**fed)
    after = seen.layers[layer]["score_max"].largest
    if name == "albert":  # both passes through the layer are clipped once, by the larger score
        assert len(before) == 2
        largest = np.maximum(*before.values())
        assert [head.before for head in of_path] == [score for score in largest if score > threshold]
        np.testing.assert_allclose(after, scores * np.minimum(1.0, threshold / largest), rtol=1e-5)
    else:
        np.testing.assert_allclose(after, np.minimum(scores, threshold), rtol=1e-5)
    assert of_path
    factors = {(one.side, round(math.log(one.factor, head.gamma), 6)) for head in of_path for one in head.parameters}
    shared = {("q", 1.0)}
    own_key = {("q", 0.5), ("k", 0.5)}
    expected = {"llama": shared, "falcon": shared, "mla": shared | own_key}
    assert factors == expected.get(name, own_key)
