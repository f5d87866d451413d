"""ScaledAttention: the output of nn.MultiheadAttention, any scale, and decoding that equals the whole pass."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import sqrtdk
from sqrtdk import SqrtdkError, scales
from sqrtdk.torch.nn import KVCache, LearnedTemperature, QKNorm, QueryTemperature, ScaledAttention
from sqrtdk.torch.pressure import TemperaturePressure

D_MODEL, HEADS = 24, 4


def draw(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharpen(module, seed=0, size=1.0):
    """Weights of the size 1/√fan-in times `size`, biases and scale parameters too: attention far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            width = parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 2.0
            is_scale = name.startswith("scale.")
            parameter.copy_((0.5 if is_scale else size) * torch.randn(parameter.shape, generator=generator) / width)
    return module


def make(*, seed=0, size=2.0, **options):
    return sharpen(ScaledAttention(D_MODEL, HEADS, **options), seed, size).eval()


SELF, CROSS = {}, {"kdim": 10, "vdim": 14}


def multihead_with_inputs(shape, bias, batch_first, dtype=torch.float64):
    multihead = nn.MultiheadAttention(D_MODEL, HEADS, bias=bias, batch_first=batch_first, dtype=dtype, **shape)
    multihead = sharpen(multihead, size=2.5).eval()
    x = draw(3, 7, D_MODEL, seed=1).to(dtype)
    context = None if shape == SELF else (draw(3, 9, 10, seed=2).to(dtype), draw(3, 9, 14, seed=3).to(dtype))
    return multihead, x, context


def run_multihead(multihead, x, context, **options):
    inputs = (x, *(context or (x, x)))
    inputs = inputs if multihead.batch_first else [t.transpose(0, 1) for t in inputs]
    output, _ = multihead(*inputs, **options)
    return output if multihead.batch_first else output.transpose(0, 1)


class TestMultihead:
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("shape", [SELF, CROSS], ids=["packed", "kdim, vdim"])
    def test_equal_and_a_scale_off_by_a_thousandth_is_not(self, shape, bias, batch_first):
        multihead, x, context = multihead_with_inputs(shape, bias, batch_first)
        expected = run_multihead(multihead, x, context)
        result = ScaledAttention.from_multihead(multihead)
        torch.testing.assert_close(result(x, context), expected, rtol=1e-9, atol=1e-9)
        result.scale = 1.001 / (D_MODEL / HEADS) ** 0.5
        assert (result(x, context) - expected).abs().max() > 1e-4

    def test_the_state_loads_by_itself_and_inside_a_model(self):
        multihead, x, _ = multihead_with_inputs(SELF, True, True, torch.float32)
        expected = run_multihead(multihead, x, None)
        alone = make()
        alone.load_state_dict(multihead.state_dict())
        torch.testing.assert_close(alone(x), expected, rtol=1e-5, atol=1e-5)
        state = multihead.state_dict()
        before = dict(state)
        model = nn.Sequential(nn.Identity(), ScaledAttention(D_MODEL, HEADS, scale="learned"))
        model.load_state_dict({f"1.{name}": value for name, value in state.items()})
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        assert state.keys() == before.keys(), "the given state is left as it was"

    def test_parameters_that_multihead_lacks_keep_their_values(self):
        multihead, *_ = multihead_with_inputs(SELF, True, True, torch.float32)
        module = make(scale="query", sinks=True)
        scale, sinks = copy.deepcopy(module.scale.state_dict()), module.sinks.clone()
        module.load_state_dict(multihead.state_dict())
        assert all(torch.equal(value, scale[name]) for name, value in module.scale.state_dict().items())
        assert torch.equal(module.sinks, sinks)
        assert torch.equal(module.out_proj.weight, multihead.out_proj.weight)

    def test_masks_have_the_other_sign(self):
        multihead, x, _ = multihead_with_inputs(SELF, True, True)
        padding = torch.zeros(3, 7, dtype=torch.bool)
        padding[0, 5:] = padding[2, 2:] = True
        later = torch.ones(7, 7, dtype=torch.bool).triu(1)
        expected = run_multihead(multihead, x, None, key_padding_mask=padding, attn_mask=later)
        result = ScaledAttention.from_multihead(multihead)
        bias = torch.zeros(7, 7, dtype=torch.float64).masked_fill(later, -torch.inf)
        for mask in (~later, bias):
            torch.testing.assert_close(result(x, mask=mask, key_mask=~padding), expected, rtol=1e-9, atol=1e-9)
        causal = ScaledAttention.from_multihead(multihead, causal=True)
        torch.testing.assert_close(causal(x, key_mask=~padding), expected, rtol=1e-9, atol=1e-9)

    def test_dropout_mode_dtype_and_options_are_taken_over(self):
        multihead = nn.MultiheadAttention(D_MODEL, HEADS, dropout=0.25, dtype=torch.float64)
        result = ScaledAttention.from_multihead(multihead, scale="qk_norm", sinks=True, softcap=5.0, window=(3, 0))
        assert (result.dropout, result.training, result.softcap, result.window) == (0.25, True, 5.0, (3, 0))
        assert {parameter.dtype for parameter in result.parameters()} == {torch.float64}
        assert isinstance(result.scale, QKNorm)
        assert not ScaledAttention.from_multihead(multihead.eval()).training
        assert result.q_proj.weight.data_ptr() != multihead.in_proj_weight.data_ptr()

    @pytest.mark.parametrize(
        ("make_other", "message"),
        [
            (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), "without add_bias_kv"),
            (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "without add_zero_attn"),
            (lambda: nn.Linear(8, 8), r"must be an nn\.MultiheadAttention, got Linear"),
        ],
    )
    def test_options_that_cannot_be_taken_over_are_named(self, make_other, message):
        with pytest.raises(SqrtdkError, match=message):
            ScaledAttention.from_multihead(make_other())


SCALES = [None, 0.3, "none", "log_n", "llama4:3", "cosine", "learned", "query", "position", "qk_norm"]
VARIANTS = {
    "plain": {},
    "grouped": {"kv_heads": 2, "d_k": 5, "d_v": 3},
    "window": {"window": (3, 0)},
    "sinks and cap": {"sinks": True, "softcap": 4.0, "bias": False},
}


class TestDecoding:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("scale", SCALES, ids=str)
    def test_step_by_step_equals_the_whole_pass(self, scale, variant):
        module = make(scale=scale, causal=True, **VARIANTS[variant])
        x = draw(2, 9, D_MODEL, seed=4)
        with torch.no_grad():
            whole = module.attend(x)
            cache = KVCache()
            steps = [module.attend(part, cache=cache) for part in x.split([3, 1, 1, 2, 1, 1], dim=-2)]
        assert cache.length == 9
        torch.testing.assert_close(torch.cat([step.output for step in steps], dim=-2), whole.output)
        for name in ("visible_keys", "max_key"):
            result = torch.cat([getattr(step.statistics, name) for step in steps], dim=-1)
            assert torch.equal(result, getattr(whole.statistics, name))

    def test_a_cache_that_forgot_its_length_would_show(self):
        """Positions matter in this module: without them the test above would pass with any offset."""
        module = make(scale="position", causal=True)
        x = draw(2, 9, D_MODEL, seed=4)
        with torch.no_grad():
            shifted = KVCache()
            shifted.append(*(torch.zeros(2, HEADS, 2, 6) for _ in range(2)))
            hide = torch.arange(11) >= 2
            moved = module(x, cache=shifted, key_mask=hide)
            assert (moved - module(x)).abs().max() > 1e-3

    def test_padded_prompts(self):
        module = make(scale="learned", causal=True)
        x = draw(2, 6, D_MODEL, seed=5)
        present = torch.ones(2, 6, dtype=torch.bool)
        present[1, :2] = False
        with torch.no_grad():
            whole = module(x, key_mask=present)
            cache = KVCache()
            first = module(x[:, :4], cache=cache, key_mask=present[:, :4])
            rest = module(x[:, 4:], cache=cache, key_mask=present)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)
        assert torch.equal(whole[1, 0], module.out_proj.bias), "a query that sees nothing"

    @pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1), (4, 1, 9, 1), (0, 3, 0, 2)])
    def test_the_cache_holds_what_was_appended(self, lengths):
        parts = [(draw(2, 3, n, 4, seed=n), draw(2, 3, n, 5, seed=n + 1)) for n in lengths]
        cache = KVCache()
        for k, v in parts:
            result = cache.append(k, v)
        for one, expected in zip(result, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(expected, dim=-2))

    def test_the_room_doubles(self):
        cache = KVCache()
        rooms = {
            cache.append(torch.zeros(2, 1, 3), torch.zeros(2, 1, 3))[0].untyped_storage().nbytes() for _ in range(64)
        }
        assert sorted(rooms) == [2 * 3 * 4 * 2**power for power in range(7)]

    def test_inference_mode_may_come_and_go(self):
        cache = KVCache()
        with torch.inference_mode():
            cache.append(torch.zeros(2, 4, 3), torch.zeros(2, 4, 3))
            cache.append(torch.ones(2, 1, 3), torch.ones(2, 1, 3))
        keys, _ = cache.append(torch.full((2, 1, 3), 2.0), torch.full((2, 1, 3), 2.0))
        assert keys[0, :, 0].tolist() == [0, 0, 0, 0, 1, 2]

    def test_the_cache_refuses_tokens_that_do_not_fit(self):
        module = make(causal=True)
        x = draw(2, 3, D_MODEL)
        with pytest.raises(SqrtdkError, match=r"cache is for inference: call under torch\.no_grad"):
            module(x, cache=KVCache())
        with torch.no_grad():
            with pytest.raises(SqrtdkError, match="cache needs causal=True"):
                make()(x, cache=KVCache())
            cache = KVCache()
            module(x, cache=cache)
            with pytest.raises(SqrtdkError, match=r"cache holds keys of shape \(2, 4, 6\) .* got \(1, 4, 6\)"):
                module(x[:1], cache=cache)
            with pytest.raises(SqrtdkError, match=r"torch\.float32, got \(2, 4, 6\) and torch\.float64"):
                module.double()(x.double(), cache=cache)
            assert cache.length == 3

    def test_a_call_that_fails_leaves_the_cache_as_it_was(self):
        module = make(causal=True)
        x = draw(2, 4, D_MODEL)
        with torch.no_grad():
            whole = module(x)
            cache = KVCache()
            with pytest.raises(SqrtdkError, match="key_mask must have shape"):
                module(x[:1, :2], cache=cache, key_mask=torch.ones(1, 3, dtype=torch.bool))
            first = module(x[:, :3], cache=cache)
            with pytest.raises(SqrtdkError, match="mask must broadcast"):
                module(x[:, 3:], cache=cache, mask=torch.ones(7, 7, dtype=torch.bool))
            assert cache.length == 3
            rest = module(x[:, 3:], cache=cache)
        torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)

    def test_keys_without_their_values_are_refused_and_not_kept(self):
        cache = KVCache()
        cache.append(torch.zeros(2, 1, 3), torch.zeros(2, 1, 3))
        with pytest.raises(SqrtdkError, match="v must have 2 tokens like k, got 1"):
            cache.append(torch.zeros(2, 2, 3), torch.zeros(2, 1, 3))
        with pytest.raises(SqrtdkError, match="cache holds values of shape"):
            cache.append(torch.ones(2, 1, 3), torch.zeros(2, 1, 4))
        keys, _ = cache.append(torch.full((2, 1, 3), 2.0), torch.zeros(2, 1, 3))
        assert keys[0, :, 0].tolist() == [0, 2]


class TestAttention:
    @pytest.mark.parametrize("scale", [None, "inverse", scales.LogN(0.7), 0.9], ids=str)
    def test_it_is_attention_between_projections(self, scale):
        module = make(scale=scale, causal=True, kv_heads=2, d_k=5, d_v=3).double()
        x = draw(2, 6, D_MODEL, seed=6).double()

        def split(projection, heads):
            return projection(x).detach().numpy().reshape(2, 6, heads, -1).swapaxes(1, 2)

        q, k, v = split(module.q_proj, 4), split(module.k_proj, 2), split(module.v_proj, 2)
        expected = sqrtdk.attention(q, k, v, scale=scale, causal=True, weights=True)
        result = module.attend(x, weights=True)
        joined = torch.from_numpy(expected.output.swapaxes(1, 2).reshape(2, 6, -1))
        torch.testing.assert_close(result.output, module.out_proj(joined))
        np.testing.assert_allclose(result.weights.detach(), expected.weights, atol=1e-12)
        np.testing.assert_allclose(result.statistics.entropy, expected.statistics.entropy, rtol=1e-9, atol=1e-12)
        assert torch.equal(module(x), result.output)

    @pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
    def test_leading_axes_are_free(self, shape):
        module = make(scale="query")
        x = draw(*shape, D_MODEL, seed=7)
        assert module(x).shape == x.shape
        rows = x.reshape(-1, 5, D_MODEL)
        torch.testing.assert_close(module(x).reshape(rows.shape), torch.stack([module(row) for row in rows]))

    def test_cross_attention(self):
        module = make(d_context=(10, 14), scale="qk_norm")
        x, for_keys, for_values = draw(2, 5, D_MODEL), draw(2, 8, 10, seed=1), draw(2, 8, 14, seed=2)
        assert module(x, (for_keys, for_values)).shape == (2, 5, D_MODEL)
        hidden = torch.arange(8).expand(2, 8) < 6
        torch.testing.assert_close(
            module(x, (for_keys, for_values), key_mask=hidden), module(x, (for_keys[:, :6], for_values[:, :6]))
        )
        same = make(d_context=10)
        assert torch.equal(same(x, for_keys), same(x, (for_keys, for_keys)))

    @pytest.mark.slow
    @pytest.mark.parametrize("scale", ["learned", "query", "position", "qk_norm"])
    def test_training_reaches_every_parameter_and_lowers_the_loss(self, scale):
        torch.manual_seed(0)
        module = ScaledAttention(D_MODEL, HEADS, 2, scale=scale, causal=True, sinks=True)
        x, target = draw(4, 8, D_MODEL, seed=8), draw(4, 8, D_MODEL, seed=9)
        optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses = []
        for _ in range(15):
            loss = (module(x) - target).square().mean()
            losses.append(loss.item())
            optimiser.zero_grad()
            loss.backward()
            assert all(
                parameter.grad.abs().max() > 0 for name, parameter in module.named_parameters() if name != "k_proj.bias"
            )
            optimiser.step()
        assert losses[-1] < 0.9 * losses[0]
        assert all(parameter.abs().max() > 0 for parameter in module.scale.parameters())

    def test_dropout_is_of_training_alone(self):
        module = make(dropout=0.5)
        x = draw(2, 6, D_MODEL)
        assert torch.equal(module(x), module(x))
        module.train()
        assert not torch.equal(module(x), module(x))
        torch.manual_seed(3)
        first = module(x)
        torch.manual_seed(3)
        assert torch.equal(module(x), first)

    def test_pressure_is_the_gradient_of_a_learned_temperature(self):
        module = make(scale="learned", causal=True)
        module.pressure = TemperaturePressure()
        module(draw(2, 6, D_MODEL)).square().sum().backward()
        torch.testing.assert_close(module.pressure.per_head.float(), module.scale.log_gain.grad, rtol=1e-4, atol=1e-4)

    def test_statistics_of_sampled_rows(self):
        result = make().attend(draw(2, 32, D_MODEL), sample_rows=8)
        assert result.statistics.entropy.shape == (2, HEADS, 8)
        assert result.output.shape == (2, 32, D_MODEL)

    def test_scales_by_name_by_policy_and_by_module(self):
        x = draw(2, 6, D_MODEL)
        assert torch.equal(make(scale="sqrt")(x), make()(x))
        assert torch.equal(make(scale=scales.Fixed(2.0))(x), make(scale=0.5)(x))
        assert (make(scale="none")(x) - make()(x)).abs().max() > 1e-2
        own = LearnedTemperature(D_MODEL // HEADS)
        assert ScaledAttention(D_MODEL, HEADS, scale=own).scale is own
        module = ScaledAttention(D_MODEL, HEADS, scale="position", dtype=torch.float64)
        assert isinstance(module.scale, QueryTemperature)
        assert (module.scale.heads, module.scale.bias.dtype) == (HEADS, torch.float64)

    def test_state_is_saved_and_loaded(self, tmp_path):
        options = {"scale": "query", "sinks": True, "kv_heads": 2}
        module, other = make(**options), make(**options, seed=1)
        x = draw(2, 6, D_MODEL)
        torch.save(module.state_dict(), tmp_path / "attention.pt")
        assert not torch.equal(other(x), module(x))
        other.load_state_dict(torch.load(tmp_path / "attention.pt"))
        assert torch.equal(other(x), module(x))
        assert torch.equal(copy.deepcopy(module)(x), module(x))

    def test_the_module_prints_its_sizes_and_options(self):
        module = ScaledAttention(64, 8, 2, scale="log_n", causal=True, window=(4, 0))
        assert "d_model=64, heads=8, kv_heads=2, d_k=8, d_v=8, scale=log_n:1.0, causal=True, window=(4, 0)" in repr(
            module
        )

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_compiled_whole_it_gives_the_same(self):
        torch._dynamo.reset()
        module = make(scale="query", causal=True, kv_heads=2, sinks=True)
        x = draw(2, 6, D_MODEL)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), module(x))


X = draw(2, 5, D_MODEL)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: ScaledAttention(25, 4), r"d_model must be a multiple of heads \(4\), got 25; or give d_k"),
        (lambda: ScaledAttention(24, 4, 3), r"heads must be a multiple of kv_heads \(3\), got 4"),
        (lambda: ScaledAttention(24, 0), "heads must be at least 1, got 0"),
        (lambda: ScaledAttention(24, 4, d_context=(3, 0)), "d_context must be at least 1, got 0"),
        (lambda: ScaledAttention(24, 4, dropout=1.5), r"dropout must lie in \[0, 1\], got 1.5"),
        (lambda: ScaledAttention(24, 4, dropout="some"), "dropout must be a probability, got 'some'"),
        (lambda: ScaledAttention(24, 4, scale="squirt"), "unknown scaling policy 'squirt'; .* learned, .* query"),
        (lambda: ScaledAttention(24, 4, scale=float("nan")), "scale must be finite, got nan"),
        (lambda: ScaledAttention(24, 4, scale=torch.ones(4)), "scale must be a number, a policy, .* got Tensor"),
        (lambda: ScaledAttention(24, 4, scale=LearnedTemperature(6, 3)), "made for 3 heads, got 4 query heads"),
        (lambda: ScaledAttention(24, 4, scale=QKNorm(24)), "made for d_k = 24, got queries of length 6"),
        (lambda: make()(X[..., :20]), r"x must have shape \[\.\.\., tokens, 24\], got \(2, 5, 20\)"),
        (lambda: make()(X.numpy()), "x must be a tensor, got ndarray"),
        (lambda: make(d_context=8)(X, X), r"context must have shape \[\.\.\., tokens, 8\], got \(2, 5, 24\)"),
        (lambda: make(d_context=8)(X), r"context must be given: d_context \(8, 8\) is not d_model \(24\)"),
        (lambda: make(causal=True)(X, X), "context must be None with causal=True"),
        (lambda: make()(X, key_mask=torch.ones(2, 5)), r"key_mask must be a boolean tensor .* got torch\.float32"),
        (lambda: make()(X, key_mask=[[True] * 5] * 2), "key_mask must be a boolean tensor .* got list"),
        (
            lambda: make()(X, key_mask=torch.ones(2, 4).bool()),
            r"key_mask must have shape \[\.\.\., 5\], .* got \(2, 4\)",
        ),
        (lambda: make()(X, mask=torch.ones(2, 5, 5).bool()), r"mask must broadcast to \[\.\.\., H, L, S\]"),
    ],
)
def test_sizes_that_do_not_fit_are_named(wrong, message):
    with pytest.raises(SqrtdkError, match=message):
        wrong()


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (torch.ones(3, 6, 16), r"context must have the leading axes \(2,\) of x, got shape \(3, 6, 16\)"),
        ((torch.ones(2, 6, 16), torch.ones(3, 6, 16)), r"context must have the leading axes \(2,\) of x, got shape"),
        ((torch.ones(2, 6, 16), torch.ones(2, 5, 16)), r"context must have as many tokens for .*, got 6 and 5"),
    ],
)
def test_a_context_that_does_not_fit_is_named(context, message):
    with pytest.raises(SqrtdkError, match=message):
        ScaledAttention(16, 2)(torch.ones(2, 5, 16), context)
