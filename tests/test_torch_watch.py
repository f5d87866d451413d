import copy
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import sqrtdk
from sqrtdk.torch import watch
from sqrtdk.torch.internals import WeakStorage, storage_address
from torch_watched import (
    BATCH,
    DIMENSION,
    HEADS,
    TOKENS,
    WAYS,
    WIDTH,
    ByHand,
    Fused,
    Stack,
    entropy_per_head,
    make_input,
)

ROWS = BATCH * TOKENS


def build(make, *args, seed=0, **kwargs):
    torch.manual_seed(seed)
    return make(*args, **kwargs)


def hooks_now():
    from torch.nn.modules import module

    return dict(module._global_forward_hooks), dict(module._global_forward_pre_hooks)


def modes_now():
    return torch._C._len_torch_dispatch_stack()


@pytest.fixture(autouse=True)
def nothing_left():
    before = hooks_now(), modes_now()
    yield
    assert (hooks_now(), modes_now()) == before


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


def test_calls_merge_and_calls_outside_do_not_count():
    model, other, x = build(Stack, ByHand(), Fused()), build(ByHand, seed=1), make_input()
    outside = model(x)
    with watch(model) as seen:
        model(x)
        other(x)
        functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
        model.layers[0](x)
    assert torch.equal(model(x), outside)
    assert {path: summary.rows_seen[0] for path, summary in seen.layers.items()} == {
        "layers.0": 2 * ROWS,
        "layers.1": ROWS,
    }
    assert seen.calls == 2


def test_a_module_that_is_called_twice_is_one_layer():
    model = build(Stack, ByHand())
    with watch(model) as seen:
        model(make_input())
    assert {path: int(summary.rows_seen[0]) for path, summary in seen.layers.items()} == {"layers.0": 2 * ROWS}


def test_every_and_sample_rows():
    model, x = build(Fused), make_input()
    with watch(model, every=3, sample_rows=2) as seen:
        for _ in range(7):
            model(x)
    summary = seen.layers[""]
    assert seen.calls == 3
    np.testing.assert_array_equal(summary.rows_seen, 3 * BATCH * 2)
    np.testing.assert_array_equal(summary.rows_in_all, 3 * ROWS)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [ByHand, Fused])
def test_a_checkpoint_is_counted_once(make, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(make)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Checkpointed()
    x = make_input().requires_grad_()
    with watch(model) as seen:
        model(x).sum().backward()
    assert {path: int(summary.rows_seen[0]) for path, summary in seen.layers.items()} == {"inner": ROWS}


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


def test_padding_rows_are_left_out():
    model, x = build(Stack, Fused(), Fused()), make_input()
    present = torch.ones(BATCH, TOKENS, dtype=torch.long)
    present[0, :2] = 0
    present[2, 5:] = 0
    with watch(model) as seen:
        model(x, attention_mask=present)
    assert seen.padding == "attention mask"
    for summary in seen.layers.values():
        np.testing.assert_array_equal(summary.rows_seen, int(present.sum()))


def test_padding_from_the_keys_where_nobody_was_told():
    class Hiding(Fused):
        def forward(self, x, lengths):
            return super().forward(x, torch.arange(TOKENS) < lengths[:, None])

    model = build(Hiding)
    with watch(model) as seen:
        model(make_input(), torch.tensor([7, 3, 5]))
    assert seen.padding == "key padding"
    np.testing.assert_array_equal(seen.layers[""].rows_seen, 15)
    with watch(model) as seen:
        model(make_input(), torch.tensor([7, 7, 7]))
    assert seen.padding == "unknown"


class OfAnother(nn.Module):
    """Attention to other tokens; what the queries are made of lies where that of the keys lay, if it can."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other, mask):
        gone = other * 1.0
        address = storage_address(gone)
        k = self.k(gone)
        del gone
        copies = []
        while len(copies) < 100 and not (copies and storage_address(copies[-1]) == address):
            copies.append(x * 1.0)
        q = self.q(copies[-1])
        return functional.scaled_dot_product_attention(q[:, None], k[:, None], q[:, None], attn_mask=mask)


def test_tokens_of_another_sequence_are_not_taken_for_its_own():
    model, x = build(OfAnother), make_input()
    mask = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    mask[0, ..., -3:] = False
    for _ in range(3):
        with torch.no_grad(), watch(model) as seen:
            model(x, make_input(seed=1), mask)
        assert seen.layers[""].rows_seen[0] == ROWS  # hidden keys say nothing about queries of another sequence
        assert seen.padding == "unknown"


class Router(nn.Module):
    """A mixture's router, a softmax of a vocabulary, CLIP's similarities, a pooling: none is attention."""

    def __init__(self):
        super().__init__()
        self.gate, self.pool, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 50)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        mixed = torch.einsum("bte,eij,btj->bti", self.gate(x).softmax(-1), self.experts, x)
        pooled = (self.pool(mixed).softmax(1).transpose(1, 2) @ mixed)[:, 0]
        similarities = (pooled @ pooled.t() * 10).softmax(-1)
        return self.head(mixed).softmax(-1), similarities


def test_what_is_not_attention_is_not_taken():
    model = build(Router)
    with watch(model) as seen:
        model(make_input())
    assert seen.layers == {}
    assert seen.unattributed == []


class Mixing(nn.Module):
    """A small matrix for each token, projected and softened, mixes streams (hyper-connections): no attention."""

    def __init__(self):
        super().__init__()
        self.mix, self.bias = nn.Linear(WIDTH, 16), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        mixing = (self.mix(x).unflatten(-1, (4, 4)) * 0.5 + self.bias).softmax(-1)
        return mixing @ x.unflatten(-1, (4, -1))


def test_a_projected_matrix_is_not_attention():
    model = build(Mixing)
    with watch(model) as seen:
        model(make_input())
    assert (seen.layers, seen.unattributed) == ({}, [])


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


class Odd(ByHand):
    """Scores that are more than a scale, a cap and a mask: every third is halved."""

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-1, -2)
        scores = torch.sin(scores)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Widened(Odd):
    """Weights that are not understood, and given two more columns before they meet the values (Longformer's chunks)."""

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        weights = functional.pad(torch.sin(q @ k.transpose(-1, -2)).softmax(-1), (0, 2))
        return (weights @ functional.pad(v, (0, 0, 0, 2))).transpose(1, 2).flatten(2)


def test_what_is_not_understood_counts_whatever_becomes_of_its_weights():
    model = build(Widened)
    with watch(model) as seen:
        model(make_input())
    ((_, reason, times),) = seen.unattributed
    assert (times, seen.layers) == (1, {})
    assert reason.startswith("the scores of its softmax could not be followed")


class Wrong(ByHand):
    """A softmax that is changed behind the back of who looks: the weights are not those of its scores."""

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = (q @ k.transpose(-1, -2)).clamp(-1.0, 1.0)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_what_is_not_understood_is_counted_and_named():
    model = Stack(build(Odd), build(Wrong))
    with watch(model) as seen:
        model(make_input())
        model(make_input())
    assert seen.layers == {}
    where = {missed.layer: (missed.times, missed.reason) for missed in seen.unattributed}
    assert where["layers.0"] == (
        2,
        "the scores of its softmax could not be followed back to a product of queries and keys",
    )
    count, reason = where["layers.1"]
    assert count >= 1
    assert reason.startswith("recovered weights differ from the model's own by ")
    assert "not understood: layers.1" in repr(seen)


def test_an_exception_inside_leaves_everything_as_it_was():
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(ByHand)

        def forward(self, x):
            self.inner(x)
            raise KeyboardInterrupt if x.shape[0] == 1 else ValueError("broken")

    model = Breaking()
    before = hooks_now(), modes_now()
    for batch, error in ((2, ValueError), (1, KeyboardInterrupt)):
        with pytest.raises(error), watch(model) as seen:
            model(make_input(batch))
        assert (hooks_now(), modes_now()) == before
    with watch(model) as seen:
        with pytest.raises(ValueError, match="broken"):
            model(make_input())
        model.inner(make_input())
    assert seen.layers["inner"].rows_seen[0] in (ROWS, 2 * ROWS)


def test_nested_watches_see_the_same():
    model, x = build(Stack, ByHand(), Fused()), make_input()
    with watch(model) as outer:
        with watch(model.layers[0]) as inner:
            model(x)
        model(x)
    assert list(inner.layers) == [""]
    assert inner.layers[""].rows_seen[0] == ROWS
    assert {path: int(summary.rows_seen[0]) for path, summary in outer.layers.items()} == {
        "layers.0": 2 * ROWS,
        "layers.1": 2 * ROWS,
    }


def test_threads_count_together():
    model, x = build(Stack, ByHand(), Fused()), make_input()
    with watch(model) as seen:
        threads = [threading.Thread(target=model, args=(x,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {int(summary.rows_seen[0]) for summary in seen.layers.values()} == {4 * ROWS}


def test_wrappers_do_not_show_in_paths():
    model, x = build(Stack, ByHand(), Fused()), make_input()
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    for one in (nn.DataParallel(model), wrapped):
        with watch(one) as seen:
            one(x)
        assert list(seen.layers) == ["layers.0", "layers.1"]


def test_distributed_data_parallel_does_not_show_in_paths():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(build(Stack, ByHand(), Fused()))
        with watch(model) as seen:
            model(make_input()).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert {path: int(summary.rows_seen[0]) for path, summary in seen.layers.items()} == {
        "layers.0": ROWS,
        "layers.1": ROWS,
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_compiled_models_run_eagerly_and_it_says_so(how):
    model, x = build(Stack, Fused(), Fused()), make_input()
    compiled = model
    if how == "wrapper":
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    else:
        model.compile(fullgraph=True, backend="eager")
    expected = compiled(x)
    with watch(compiled) as seen:
        output = compiled(x)
    assert torch.allclose(output, expected, atol=1e-6)
    assert list(seen.layers) == ["layers.0", "layers.1"]
    assert "eagerly" in repr(seen)
    assert torch.equal(compiled(x), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_runs_as_before():
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(ByHand):
        def forward(self, x, attention_mask=None):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            return flex_attention(q, k, v).transpose(1, 2).flatten(2)

    model, x = build(Flexible), make_input()
    with torch.no_grad():
        expected = model(x)
        with watch(model) as seen:
            output = model(x)
    assert torch.allclose(output, expected, atol=1e-6)
    assert [missed.layer for missed in seen.unattributed] == [""] or list(seen.layers) == [""]


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


@pytest.mark.parametrize("gradients", [True, False])
def test_scores_and_weights_are_not_kept_longer_than_the_model_keeps_them(gradients):
    class Looking(ByHand):
        def forward(self, x, attention_mask=None):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            scores = q @ k.transpose(-1, -2)
            masked = scores + torch.zeros(TOKENS, TOKENS)
            weights = masked.softmax(-1)
            self.held = [WeakStorage(one) for one in (scores, masked, weights)]
            output = weights @ v
            del scores, masked, weights
            self.gone = [one.is_gone() for one in self.held]
            return output

    model, x = build(Looking), make_input()
    with torch.set_grad_enabled(gradients):
        model(x)
        expected = model.gone
        with watch(model) as seen:
            model(x)
    assert list(seen.layers) == [""]
    assert model.gone == expected
    assert expected == ([True, True, False] if gradients else [True] * 3)


def test_a_copy_made_while_watched_is_like_any_other():
    model = build(ByHand)
    with watch(model):
        twin = copy.deepcopy(model)
    assert torch.equal(twin(make_input()), model(make_input()))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "gpt2"}, "model must be a torch.nn.Module, got str"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"every": True}, "every must be an integer, got True"),
        ({"sample_rows": 1.5}, "sample_rows must be an integer, got 1.5"),
        ({"scale": 0.1}, "scale is for fuse=True alone"),
    ],
)
def test_bad_arguments_are_named(arguments, error):
    with pytest.raises(sqrtdk.SqrtdkError, match=error):
        watch(**{"model": nn.Identity(), **arguments})


def test_the_table_is_short():
    model = build(Stack, ByHand(), Fused())
    with watch(model) as seen:
        model(make_input())
    lines = repr(seen).splitlines()
    assert lines[0] == "2 layers, 8 heads, 1 call of the model; padding: unknown"
    assert len(lines) == 2 + 8 + 1
    assert lines[-1] == "effective scale: 0.5"


def test_names_of_layers_are_escaped_in_html():
    model = nn.ModuleDict({"<b>": build(ByHand)})
    with watch(model) as seen:
        model["<b>"](make_input())
    assert "&lt;b&gt;" in seen._repr_html_()
    assert "<b>" not in seen._repr_html_()


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
