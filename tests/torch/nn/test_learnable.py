"""Learnable scales begin as the policies they generalise, learn in the right direction, and say what does not fit."""

import copy
import math

import numpy as np
import pytest
import torch

import sqrtdk
import sqrtdk.torch
from sqrtdk import SqrtdkError, scales
from sqrtdk.torch.nn import LearnedTemperature, QKNorm, QueryTemperature, make_learnable
from sqrtdk.torch.scales import LearnableScale, TensorContext

D_K, HEADS = 24, 4  # 1/√24 has no exact float: a second rounding of it would show


def draw(*shape, seed=0, dtype=torch.float32, size=2.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def noise(heads=HEADS, queries=7, keys=7, kv_heads=None, d_k=D_K, **options):
    q = draw(2, heads, queries, d_k, seed=1, **options)
    k = draw(2, kv_heads or heads, keys, d_k, seed=2, **options)
    return q, k, draw(2, kv_heads or heads, keys, 5, seed=3, **options)


def context(query, first=0):
    length = query.shape[-2]
    return TensorContext(query, lambda: torch.arange(length) + first, lambda: torch.arange(1, length + 1))


def run(scale, *arrays, **options):
    return sqrtdk.torch.attention(*(arrays or noise()), scale=scale, **options).output


def randomise(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


AS_SQRT = {
    "learned": lambda heads: LearnedTemperature(D_K, heads),
    "clamped": lambda heads: LearnedTemperature(D_K, heads, max_log_scale=math.log(100)),
    "query": lambda heads: QueryTemperature(D_K, heads),
    "position": lambda heads: QueryTemperature(D_K, heads, source="position"),
}
EVERY = {
    **AS_SQRT,
    "rms": lambda heads: QKNorm(D_K, heads),
    "l2": lambda heads: QKNorm(D_K, heads, norm="l2", max_log_scale=math.log(100)),
}
PER_HEAD = pytest.mark.parametrize("heads", [None, HEADS], ids=["shared", "per head"])


class TestStart:
    """Step 0 is the policy."""

    @PER_HEAD
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("kind", AS_SQRT)
    def test_the_factor_is_one_over_root_d_k_rounded_once(self, kind, heads, dtype):
        query = noise(dtype=dtype)[0]
        factor = AS_SQRT[kind](heads).factor(context(query))
        assert factor.dtype == dtype
        assert torch.equal(factor, torch.full_like(factor, 1 / math.sqrt(D_K)))

    @PER_HEAD
    @pytest.mark.parametrize("kind", AS_SQRT)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_the_output_is_the_defaults_to_the_bit(self, kind, heads, dtype):
        arrays = noise(dtype=dtype)
        assert torch.equal(run(AS_SQRT[kind](heads), *arrays), run(None, *arrays))

    @PER_HEAD
    @pytest.mark.parametrize(
        ("norm", "policy"), [("rms", scales.QKNorm()), ("l2", scales.Cosine(0.5 * math.log(D_K)))], ids=["rms", "l2"]
    )
    def test_qk_norm_is_the_policy_in_torch_and_in_numpy(self, norm, policy, heads):
        arrays = noise(dtype=torch.float64)
        result = run(QKNorm(D_K, heads, norm=norm), *arrays)
        torch.testing.assert_close(result, run(policy, *arrays), rtol=1e-12, atol=1e-12)
        expected = sqrtdk.attention(*(x.numpy() for x in arrays), scale=policy).output
        np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-12, atol=1e-12)

    def test_l2_at_d_k_100_begins_as_swin_v2(self):
        arrays = noise(d_k=100, dtype=torch.float64)
        torch.testing.assert_close(run(QKNorm(100, norm="l2"), *arrays), run("cosine", *arrays), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("norm", ["rms", "l2"])
    @pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
    def test_qk_norm_gives_logits_of_unit_variance_whatever_the_size(self, norm, size):
        q, k, v = (draw(4, HEADS, 64, D_K, seed=seed, size=size, dtype=torch.float64) for seed in range(3))
        statistics = sqrtdk.torch.attention(q, k, v, scale=QKNorm(D_K, HEADS, norm=norm)).statistics
        # 1024 rows of 64 logits each, which share keys: 3% is five times what ten other seeds gave.
        assert statistics.logit_variance.mean().item() == pytest.approx(63 / 64, rel=0.03)

    def test_one_head_without_an_axis_of_heads(self):
        q, k, v = (draw(6, D_K, seed=seed) for seed in range(3))
        for make in AS_SQRT.values():
            for heads in (None, 1):
                assert torch.equal(run(make(heads), q, k, v), run(None, q, k, v))
        assert run(QKNorm(D_K, 1), q, k, v).shape == v.shape


class TestFormula:
    """Away from the start, against the formula written out in float64."""

    @pytest.mark.parametrize("heads", [None, HEADS])
    @pytest.mark.parametrize("kind", sorted(EVERY))
    def test_the_output_is_that_of_the_formula(self, kind, heads):
        module = randomise(EVERY[kind](heads)).double()
        q, k, v = noise(dtype=torch.float64, queries=5)
        p = {name: value.detach().numpy() for name, value in module.named_parameters()}
        if heads:
            p = {name: value[:, None] for name, value in p.items()}
        if kind == "query":
            log_gain = (q.numpy() * p["weight"]).sum(-1) / math.sqrt(D_K) + p["bias"]
        elif kind == "position":
            log_gain = p["slope"] * np.log(1 + np.arange(2, 7)) + p["bias"]
        else:
            log_gain = p["log_gain"]
        factor = np.broadcast_to(np.exp(log_gain) / math.sqrt(D_K), q.shape[:-1])
        given = q.numpy(), k.numpy()
        if kind in ("rms", "l2"):
            given = tuple(x / np.sqrt((x * x).mean(-1, keepdims=True)) for x in given)
        expected = sqrtdk.attention(*given, v.numpy(), scale=factor, causal=True, causal_offset=2).output
        result = run(module, q, k, v, causal=True, causal_offset=2)
        np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("kind", sorted(EVERY))
    def test_heads_are_independent(self, kind):
        module = EVERY[kind](HEADS)
        before = run(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter[2] = 0.3
        changed = (run(module) - before).detach().abs().amax(dim=(0, 2, 3))
        assert changed[2] > 1e-3
        assert changed[[0, 1, 3]].max() == 0.0

    def test_grouped_heads_count_as_query_heads(self):
        module = randomise(LearnedTemperature(D_K, HEADS))
        q, k, v = noise(kv_heads=2)
        wide = [x.repeat_interleave(2, dim=1) for x in (k, v)]
        torch.testing.assert_close(run(module, q, k, v), run(module, q, *wide))

    def test_positions_before_the_first_key_count_as_zero(self):
        module = randomise(QueryTemperature(D_K, HEADS, source="position"))
        factor = module.factor(context(noise()[0], first=-3))
        assert torch.equal(factor[:, 0], factor[:, 3])
        assert not torch.equal(factor[:, 3], factor[:, 4])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("kind", sorted(EVERY))
    def test_in_half_precision_the_factor_is_worked_out_in_float32(self, kind, dtype):
        module = randomise(EVERY[kind](HEADS))
        arrays = noise(dtype=dtype)
        assert module.factor(context(arrays[0])).dtype == torch.float32
        wide = run(module, *(x.float() for x in arrays))
        limit = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype] * wide.abs().max()
        assert (run(module, *arrays).float() - wide).abs().max() < limit

    @pytest.mark.parametrize("norm", ["rms", "l2"])
    def test_zero_vectors_and_masked_nan_do_no_harm(self, norm):
        module = QKNorm(D_K, HEADS, norm=norm)
        q, k, v = noise()
        k[:, :, 3] = math.nan
        q[:, :, 1] = 0.0
        mask = torch.ones(7, dtype=torch.bool)
        mask[3] = False
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        run(module, q, k, v, mask=mask).square().sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v, module.log_gain))
        assert not k.grad[:, :, 3].any()


class TestLearning:
    """Gradients reach the parameters, with the right sign."""

    @PER_HEAD
    @pytest.mark.parametrize("kind", sorted(EVERY))
    def test_gradients_are_those_of_finite_differences(self, kind, heads):
        # From float32 values, as a parameter has them; away from the clamp, where the gradient is not the function's.
        module = randomise(EVERY[kind](heads)).double()
        q, k, v = noise(dtype=torch.float64, size=1.0)

        def output(*parameters):
            names = [name for name, _ in module.named_parameters()]
            return torch.func.functional_call(
                Wrapped(module), {f"scale.{n}": p for n, p in zip(names, parameters, strict=True)}, (q, k, v)
            )

        assert torch.autograd.gradcheck(output, tuple(module.parameters()), fast_mode=True)

    @pytest.mark.parametrize("kind", ["learned", "clamped", "rms", "l2"])
    def test_a_loss_that_wants_sharper_heads_raises_the_scale_of_those_alone(self, kind):
        module = EVERY[kind](HEADS)
        wanted = torch.tensor([1.0, -1.0, 1.0, 0.0]).view(HEADS, 1)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            weights = sqrtdk.torch.attention(*noise(), scale=module, weights=True).weights
            optimiser.zero_grad()
            (-wanted * weights.square().sum(dim=-1)).sum().backward()
            optimiser.step()
        assert (module.temperature[[0, 2]] < 1.0).all()
        assert module.temperature[1] > 1.0
        assert module.temperature[3] == 1.0

    def test_a_query_of_nan_spoils_its_own_row_alone_and_nothing_where_it_sees_no_key(self):
        q, k, v = noise()
        module = randomise(QueryTemperature(D_K, HEADS))
        expected = run(module, q, k, v).detach()
        q[:, :, 2] = math.nan
        rows = [row for row in range(q.shape[-2]) if row != 2]
        output = run(module, q, k, v)
        assert output[:, :, 2].isnan().all()
        torch.testing.assert_close(output[:, :, rows], expected[:, :, rows])
        blind = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        blind[2] = False
        output = run(module, q, k, v, mask=blind)
        assert not output[:, :, 2].any()
        output.sum().backward()
        assert module.weight.grad.isfinite().all()

    @pytest.mark.slow
    def test_queries_that_want_to_be_sharper_get_sharper(self):
        module = QueryTemperature(D_K, HEADS)
        q, k, v = noise(queries=16)
        optimiser = torch.optim.Adam(module.parameters(), lr=0.05)
        wanted = torch.where(q[..., :1] > 0, 1.0, -1.0).squeeze(-1)  # told by the first entry of the query
        for _ in range(60):
            weights = sqrtdk.torch.attention(q, k, v, scale=module, weights=True).weights
            optimiser.zero_grad()
            (-wanted * weights.square().sum(dim=-1)).mean().backward()
            optimiser.step()
        factor = module.factor(context(q)).detach() * math.sqrt(D_K)
        assert factor[wanted > 0].log().mean() > 0.3
        assert factor[wanted < 0].log().mean() < -0.3

    def test_weight_decay_pulls_towards_the_default(self):
        module = randomise(LearnedTemperature(D_K, HEADS))
        before = module.temperature.log().abs()
        optimiser = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=1.0)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimiser.step()
        torch.testing.assert_close(module.temperature.log().abs(), 0.9 * before)

    @pytest.mark.parametrize(("kind", "start"), [("learned", -0.5), ("rms", 0.5), ("l2", 0.5)])
    def test_the_clamp_bounds_the_scale_and_lets_it_come_back(self, kind, start):
        most = math.log(100)
        norm = {} if kind == "learned" else {"norm": kind}
        module = (LearnedTemperature if kind == "learned" else QKNorm)(D_K, 2, max_log_scale=most, **norm)
        limit = most - start * math.log(D_K)
        with torch.no_grad():
            module.log_gain.copy_(torch.tensor([limit + 3.0, limit - 1.0]))
        reached = module.factor(context(noise(heads=2)[0])).flatten() * (D_K if kind == "rms" else 1.0)
        torch.testing.assert_close(reached, torch.tensor([100.0, 100.0 / math.e]), rtol=1e-5, atol=0.0)
        for sign, passes in ((-1.0, [False, True]), (1.0, [True, True])):
            module.log_gain.grad = None
            (sign * module.factor(context(noise(heads=2)[0])).sum()).backward()
            assert (module.log_gain.grad != 0.0).tolist() == passes, "beyond the limit only a step down may follow"

    def test_the_clamp_holds_under_training_and_is_left_again(self):
        module = LearnedTemperature(D_K, max_log_scale=0.0)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
        seen = []
        for step in range(40):
            factor = module.factor(context(noise()[0]))
            seen.append(factor.item())
            optimiser.zero_grad()
            (-factor if step < 20 else factor).backward()
            optimiser.step()
        assert max(seen) == seen[20] == pytest.approx(1.0)
        assert module.log_gain.item() < 0.5 * math.log(D_K), "it came back below the limit"


class Wrapped(torch.nn.Module):
    """The scale as a submodule, as a model has it."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, q, k, v):
        return sqrtdk.torch.attention(q, k, v, scale=self.scale).output


class TestAsModules:
    @PER_HEAD
    @pytest.mark.parametrize("kind", sorted(EVERY))
    def test_state_is_saved_loaded_and_copied(self, kind, heads, tmp_path):
        module = randomise(EVERY[kind](heads))
        torch.save(module.state_dict(), tmp_path / "scale.pt")
        loaded = EVERY[kind](heads)
        assert not torch.equal(run(loaded), run(module))
        loaded.load_state_dict(torch.load(tmp_path / "scale.pt"))
        assert torch.equal(run(loaded), run(module))
        assert torch.equal(run(copy.deepcopy(module)), run(module))

    @pytest.mark.parametrize("kind", sorted(EVERY))
    def test_autocast_keeps_the_factor_in_float32(self, kind):
        module = randomise(EVERY[kind](HEADS))
        plain = run(module)
        with torch.autocast("cpu", torch.bfloat16):
            assert module.factor(context(noise()[0])).dtype == torch.float32
            cast = run(module)
        assert cast.dtype == torch.bfloat16
        assert (cast.float() - plain).abs().max() < 0.03 * plain.abs().max()

    @pytest.mark.parametrize("name", sorted(scales.LEARNABLE))
    def test_names_make_the_modules_they_list(self, name):
        module = make_learnable(name, D_K, HEADS)
        assert isinstance(module, LearnableScale)
        assert type(module).__name__ == scales.LEARNABLE[name].module
        assert (module.d_k, module.heads) == (D_K, HEADS)

    def test_scales_print_their_sizes(self):
        assert repr(LearnedTemperature(64, 8)) == "LearnedTemperature(d_k=64, heads=8)"
        assert repr(QKNorm(64, norm="l2", max_log_scale=math.log(100))) == (
            "QKNorm(d_k=64, heads=None, max_log_scale=4.605, norm='l2')"
        )

    @pytest.mark.slow
    # torch's compiler makes an instance of autograd functions itself and warns of it.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.parametrize("kind", ["clamped", "query", "position", "l2"])
    def test_compiled_whole_it_gives_the_same(self, kind):
        module = randomise(EVERY[kind](HEADS))
        torch._dynamo.reset()
        compiled = torch.compile(Wrapped(module), fullgraph=True, backend="aot_eager")
        arrays = [x.requires_grad_() for x in noise()]
        result = compiled(*arrays)
        result.square().sum().backward()
        grads = [parameter.grad.clone() for parameter in module.parameters()]
        module.zero_grad()
        expected = run(module, *arrays)
        expected.square().sum().backward()
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(grads, [parameter.grad for parameter in module.parameters()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: run(LearnedTemperature(D_K, 3)), "scale was made for 3 heads, got 4 query heads"),
        (lambda: run(QueryTemperature(D_K, 8)), "scale was made for 8 heads, got 4 query heads"),
        (lambda: run(QKNorm(16)), "scale was made for d_k = 16, got queries of length 24"),
        (lambda: run(QueryTemperature(16)), "scale was made for d_k = 16, got queries of length 24"),
        (lambda: run(LearnedTemperature(D_K, 4), *(x[0, 0] for x in noise())), "made for 4 heads, got 1 query heads"),
        (lambda: LearnedTemperature(0), "d_k must be at least 1, got 0"),
        (lambda: LearnedTemperature(8, 2.0), "heads must be an integer, got 2.0"),
        (
            lambda: LearnedTemperature(64, max_log_scale=-3.0),
            "must not be below the start, -2.079, got -3.0",
        ),
        (lambda: QKNorm(64, max_log_scale=math.nan), "max_log_scale must be finite, got nan"),
        (lambda: QKNorm(64, max_log_scale="big"), "max_log_scale must be a number or None, got 'big'"),
        (lambda: QKNorm(64, norm="layer"), "unknown norm 'layer'; known: l2, rms"),
        (lambda: QueryTemperature(64, source="token"), "unknown source 'token'; known: position, query"),
        (
            lambda: make_learnable("sqrt", 64),
            "unknown learnable scale 'sqrt'; known: learned, position, qk_norm, query",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(make, message):
    with pytest.raises(SqrtdkError, match=message):
        make()
