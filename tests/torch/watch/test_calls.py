"""Calls of attention under a watch, written by hand or fused: each is measured, and its bits stay the same."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sqrtdk
from sqrtdk.torch import watch
from torch_watched import (
    BATCH,
    DIMENSION,
    HEADS,
    ROWS,
    TOKENS,
    WAYS,
    WIDTH,
    ByHand,
    Fused,
    build,
    entropy_per_head,
    make_input,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_attention_by_hand_is_measured_and_left_as_it_is(way, gradients):
    model, x = build(ByHand, way), make_input()
    with torch.set_grad_enabled(gradients):
        expected = model(x)
        with watch(model) as seen:
            output = model(x)
    assert torch.equal(output, expected)
    assert list(seen.layers) == [""]
    assert not seen.unattributed
    summary = seen.layers[""]
    np.testing.assert_allclose(summary["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(summary.rows_seen, ROWS)
    np.testing.assert_array_equal(summary["visible_keys"].mean, (TOKENS + 1) / 2)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_torchs_attention_is_measured(backend, mode):
    model, x = build(Fused), make_input()
    by_hand = build(ByHand)
    by_hand(x)
    with sdpa_kernel(backend), mode():
        expected = model(x)
        with watch(model) as seen:
            output = model(x)
    assert torch.equal(output, expected)
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(by_hand.weights), rtol=1e-4)
    (record,) = seen.scales
    assert record.at_the_call == pytest.approx(DIMENSION**-0.5)
    assert record.before_the_call == pytest.approx(1.0)


def test_by_hand_in_inference_mode():
    model, x = build(ByHand), make_input()
    with torch.inference_mode():
        expected = model(x)
        with watch(model) as seen:
            output = model(x)
    assert torch.equal(output, expected)
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4)


class Own(ByHand):
    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        output = sqrtdk.torch.attention(
            q, k, v, causal=True, window=(2, None), softcap=5.0, sinks=torch.ones(HEADS)
        ).output
        return output.transpose(1, 2).flatten(2)


def test_sqrtdks_own_attention_is_measured_with_all_its_arguments():
    model, x = build(Own), make_input()
    expected = model(x)
    with watch(model) as seen:
        output = model(x)
    assert torch.equal(output, expected)
    q, k = (model.split(f(x)).detach().double().numpy() for f in (model.q_proj, model.k_proj))
    rows = sqrtdk.attention(q, k, k, causal=True, window=(2, None), softcap=5.0, sinks=np.ones(HEADS)).statistics
    summary = sqrtdk.HeadSummary.of(rows)
    for name in ("entropy", "sink_weight", "score_max", "visible_keys"):
        np.testing.assert_allclose(seen.layers[""][name].mean, summary[name].mean, rtol=1e-4)


def test_the_encoders_fast_path_stays_on_and_is_measured():
    layer = build(nn.TransformerEncoderLayer, WIDTH, HEADS, 32, batch_first=True).eval()
    layer.self_attn.in_proj_weight.data[: 2 * WIDTH].mul_(6)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, missing = make_input(), torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    missing[1, 5:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=missing)
        with watch(model) as seen:
            output = model(x, src_key_padding_mask=missing)
    assert torch.equal(output, expected)
    assert list(seen.layers) == ["layers.0.self_attn", "layers.1.self_attn"]
    _, weights = model.layers[0].self_attn(x, x, x, key_padding_mask=missing, average_attn_weights=False)
    expected = entropy_per_head(weights.detach(), ~missing)
    np.testing.assert_allclose(seen.layers["layers.0.self_attn"]["entropy"].mean, expected, rtol=1e-4)
    assert seen.padding == "attention mask"
    assert {record.effective for record in seen.scales} == {DIMENSION**-0.5}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_of_other_tokens(need_weights, gradients):
    model = build(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True).eval()
    model.in_proj_weight.data[: 2 * WIDTH].mul_(6)
    x, y = make_input(), make_input(tokens=5, seed=1)
    with torch.set_grad_enabled(gradients):
        expected, _ = model(x, y, y, need_weights=need_weights)
        with watch(model) as seen:
            output, _ = model(x, y, y, need_weights=need_weights)
    assert torch.equal(output, expected)
    _, weights = model(x, y, y, average_attn_weights=False)
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(weights.detach()), rtol=1e-4)
    assert seen.scales[0].effective == pytest.approx(DIMENSION**-0.5)
    assert seen.layers[""].max_keys.rows.sum() == 0  # queries and keys have no common positions


def test_a_decoder_has_a_summary_for_both_of_its_attentions():
    layer = build(nn.TransformerDecoderLayer, WIDTH, HEADS, 32, batch_first=True)
    model = nn.TransformerDecoder(layer, 1).eval()
    with watch(model) as seen:
        model(make_input(), make_input(tokens=5, seed=1))
    assert list(seen.layers) == ["layers.0.self_attn", "layers.0.multihead_attn"]


def test_training_with_dropout_keeps_bits_random_stream_and_gradients():
    model, x = build(ByHand, dropout=0.3).train(), make_input()

    def step():
        torch.manual_seed(5)
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(3)]

    expected = step()
    with watch(model) as seen:
        output = step()
    assert all(torch.equal(a, b) for a, b in zip(output, expected, strict=True))
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4)


@pytest.mark.parametrize("make", [ByHand, Fused])
def test_autocast(make):
    model, x = build(make), make_input()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        with watch(model) as seen:
            output = model(x)
    assert torch.equal(output, expected)
    assert not seen.unattributed
    assert seen.scales[0].effective == pytest.approx(DIMENSION**-0.5, rel=1e-2)


class Windows(ByHand):
    """Two windows of an image in the batch: their mask is added while both have an axis of their own (Swin)."""

    def forward(self, x):
        windows = x.shape[0]
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-1, -2) * DIMENSION**-0.5
        mask = torch.linspace(-3, 0, 2 * TOKENS * TOKENS).view(2, 1, TOKENS, TOKENS)
        scores = (scores.view(windows // 2, 2, HEADS, TOKENS, TOKENS) + mask).view(-1, HEADS, TOKENS, TOKENS)
        self.weights = scores.softmax(-1)
        return (self.weights @ v).transpose(1, 2).flatten(2)


def test_a_mask_of_windows_that_are_merged_into_the_batch():
    model = build(Windows)
    with torch.no_grad(), watch(model) as seen:
        model(make_input(batch=4))
    assert not seen.unattributed
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4)


class Flexible(ByHand):
    """Attention by flex_attention with a score function and a mask."""

    def __init__(self, score=None, visible=None, attend=None):
        super().__init__()
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.score, self.attend = score, attend or flex_attention
        self.mask = None if visible is None else create_block_mask(visible, None, None, TOKENS, TOKENS, device="cpu")
        self.visible = visible

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        logits = q @ k.mT * DIMENSION**-0.5
        places = torch.meshgrid(*map(torch.arange, logits.shape), indexing="ij")
        logits = logits if self.score is None else self.score(logits, *places)
        if self.visible is not None:
            logits = logits.masked_fill(~self.visible(*places), -math.inf)
        self.weights = logits.detach().softmax(-1)
        output = self.attend(q, k, v, score_mod=self.score, block_mask=self.mask)
        return output.transpose(1, 2).flatten(2)


SLOPES = 2.0 ** -torch.arange(1.0, HEADS + 1)
CAUSAL, WINDOW = (lambda b, h, i, j: i >= j), (lambda b, h, i, j: (i - j).abs() <= 2)
SCORES = {
    "nothing": (None, None, 1.0, None),
    "causal": (None, CAUSAL, 1.0, None),
    "a window": (None, WINDOW, 1.0, None),
    "a soft cap": (lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0), CAUSAL, 1.0, 3.0),
    "ALiBi": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), CAUSAL, 1.0, None),
    "causal by the score": (lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf), None, 1.0, None),
    "a factor": (lambda s, b, h, i, j: 2.0 * s, WINDOW, 2.0, None),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", SCORES)
def test_flex_attention_is_measured(name):
    score, visible, factor, cap = SCORES[name]
    model, x = build(Flexible, score, visible), make_input()
    with torch.no_grad():
        expected = model(x)
        with watch(model) as seen:
            output = model(x)
    assert torch.allclose(output, expected, atol=1e-6)
    assert not seen.unattributed
    # Compilation inside torch is none of the model's.
    assert all("ALiBi bias is added" in note for note in seen.notes)
    assert len(seen.notes) == (name == "ALiBi")
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(model.weights), rtol=1e-3, atol=1e-5)
    (record,) = seen.scales
    assert record.effective == pytest.approx(factor * DIMENSION**-0.5, rel=1e-3)
    assert record.softcap == (None if cap is None else pytest.approx(cap, rel=1e-4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_compiled_flex_attention_is_measured_and_an_unknown_score_is_listed():
    from torch.nn.attention.flex_attention import flex_attention

    score, visible, _, _ = SCORES["a soft cap"]
    compiled = build(Flexible, score, visible, torch.compile(flex_attention, backend="eager"))
    with torch.no_grad(), watch(compiled) as seen:
        compiled(make_input())
    assert seen.notes == ["compiled regions ran eagerly while watched"]
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(compiled.weights), rtol=1e-3)
    odd = build(Flexible, lambda s, b, h, i, j: torch.sin(s))
    with torch.no_grad(), watch(odd) as seen:
        odd(make_input())
    assert [missed.reason for missed in seen.unattributed] == [
        "the score function of flex_attention is more than a factor, a soft cap and a bias"
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("gradients", [True, False])
def test_sequences_of_several_lengths_in_a_nested_tensor(layout, gradients):
    """What NaViT does: no padding, and so none of it in the rows."""

    class Nested(ByHand):
        def forward(self, sequences):
            x = torch.nested.nested_tensor(sequences, layout=layout)
            projected = (f(x) for f in (self.q_proj, self.k_proj, self.v_proj))
            split = [one.view(len(sequences), -1, HEADS, DIMENSION).transpose(1, 2) for one in projected]
            if layout is torch.strided:
                split = [one.contiguous() for one in split]
            return nn.functional.scaled_dot_product_attention(*split)

    model, sequences = build(Nested), [make_input()[0, :4], make_input()[1]]
    with torch.set_grad_enabled(gradients):
        expected = model(sequences)
        with watch(model) as seen:
            output = model(sequences)
    assert all(torch.equal(one, two) for one, two in zip(output.unbind(), expected.unbind(), strict=True))
    assert not seen.unattributed
    entropies = []
    for x in sequences:
        q, k = (model.split(f(x[None])) for f in (model.q_proj, model.k_proj))
        entropies.append(torch.special.entr((q @ k.mT * DIMENSION**-0.5).softmax(-1)).sum(-1)[0])
    expected = torch.cat(entropies, -1).mean(-1).detach()
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, expected, rtol=1e-4)
    assert seen.scales[0].effective == pytest.approx(DIMENSION**-0.5)


def _add_up(q, k):
    return (q[:, :, :, None] * k[:, :, None]).sum(-1) * DIMENSION**-0.5


def _of_neighbours(q, k):
    """Every query with keys of its own, here all of them."""
    return (q[:, :, :, None] * k[:, :, None].repeat(1, 1, TOKENS, 1, 1)).sum(-1) * DIMENSION**-0.5


@pytest.mark.parametrize("score", [_add_up, _of_neighbours])
def test_products_added_up_entry_by_entry(score):
    class AddedUp(ByHand):
        def forward(self, x):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            self.weights = score(q, k).softmax(-1)
            return (self.weights[..., None] * v[:, :, None]).sum(-2)

    model = build(AddedUp)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert not seen.unattributed
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4)
    np.testing.assert_array_equal(seen.layers[""].rows_seen, ROWS)


def test_vectors_of_one_entry():
    """An einsum over an axis of one entry multiplies, and no product is computed."""

    class OneColumn(ByHand):
        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (WIDTH, 1)) for f in (self.q_proj, self.k_proj, self.v_proj))
            self.weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
            return torch.einsum("bhij,bjhd->bihd", self.weights, v)

    model = build(OneColumn)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert seen.layers[""].heads == WIDTH
    assert (seen.scales[0].d_k, seen.scales[0].effective) == (1, 1.0)
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4, atol=1e-6)


def test_one_query_without_an_axis_of_its_own():
    class Decoding(ByHand):
        def forward(self, x):
            q = self.q_proj(x[:, -1]).unflatten(-1, (HEADS, -1))
            k, v = (self.split(f(x)) for f in (self.k_proj, self.v_proj))
            self.weights = torch.einsum("bhd,bhkd->bhk", q, k).softmax(-1)[:, :, None]
            return torch.einsum("bhk,bhkd->bhd", self.weights[:, :, 0], v)

    model = build(Decoding)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert not seen.unattributed
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4)


def test_a_growing_cache_knows_where_its_queries_stand():
    class Cached(ByHand):
        def forward(self, x, past=None):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            scores = q @ k.transpose(-1, -2) / math.sqrt(DIMENSION)
            visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v, (k, v)

    model, x = build(Cached), make_input()
    with torch.no_grad():
        with watch(model) as whole:
            model(x)
        with watch(model) as steps:
            _, past = model(x[:, :4])
            for at in range(4, TOKENS):
                _, past = model(x[:, at : at + 1], past)
    np.testing.assert_allclose(steps.layers[""]["entropy"].mean, whole.layers[""]["entropy"].mean, rtol=1e-4)
    np.testing.assert_array_equal(steps.layers[""].max_keys.offsets, whole.layers[""].max_keys.offsets)


def test_one_query_whose_memory_is_not_contiguous():
    """Decoding from a fused projection: queries of several heads lie apart in memory."""

    class OneQuery(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.num_heads = nn.Linear(WIDTH, 3 * WIDTH), HEADS
            self.qkv.weight.data.mul_(6)

        def forward(self, x, past):
            q, k, _ = self.qkv(x).unflatten(-1, (HEADS, 3, DIMENSION)).unbind(-2)
            q = q.transpose(1, 2).reshape(-1, 1, DIMENSION)
            k = torch.cat([past, k.transpose(1, 2)], 2).flatten(0, 1)
            self.weights = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
            return torch.bmm(self.weights, k)

    model = build(OneQuery)
    with torch.no_grad(), watch(model) as seen:
        model(make_input(tokens=1), torch.randn(BATCH, HEADS, 5, DIMENSION))
    assert not seen.unattributed
    expected = entropy_per_head(model.weights.unflatten(0, (BATCH, HEADS)))
    np.testing.assert_allclose(seen.layers[""]["entropy"].mean, expected, rtol=1e-4)
