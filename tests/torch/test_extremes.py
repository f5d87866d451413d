"""Tensors at the edges of their range: sinks that dominate, rows that see nothing, vectors whose squares overflow."""

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk import backends
from sqrtdk.operation.call import Call, Wanted
from sqrtdk.operation.visibility import Band
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch import attention
from sqrtdk.torch.engines.blocks import BLOCKS
from sqrtdk.torch.nn import QKNorm


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_float64(q, k, v, grad, **call):
    """The reference's output, weights and gradients of the same call."""
    call = {name: x.numpy().astype(np.float64) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    arrays = [np.float64(x.detach()) for x in (q, k, v, grad)]
    with backends.use("reference"):
        result = sqrtdk.attention(*arrays[:3], weights=True, **call)
        return result, sqrtdk.attention_gradients(*arrays, **call)


class TestDominatingSinks:
    @pytest.mark.parametrize("sink", [12.0, 20.0, 60.0, 86.0])
    def test_weights_and_gradients_keep_their_digits(self, sink):
        q, k, v, grad = (draw(2, 9, 8, seed=seed) for seed in range(4))
        sinks = torch.tensor([sink, sink - 1.0])
        leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
        result = attention(q, k, v, sinks=sinks, weights=True)
        gradients = torch.autograd.grad(result.output, leaves, grad)
        expected, slopes = in_float64(q, k, v, grad, sinks=sinks.detach())
        np.testing.assert_allclose(result.weights.detach(), expected.weights, rtol=3e-5)
        for name, ours in zip(("query", "key", "value", "sinks"), gradients, strict=True):
            theirs = getattr(slopes, name)
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max(), err_msg=name)
            assert np.abs(theirs).max() > 0

    def test_a_sink_beyond_the_exponents_of_float32(self):
        q, k, grad = (draw(9, 8, seed=seed) for seed in (0, 1, 3))
        v = draw(9, 8, seed=2) * 1e30
        sinks = torch.tensor([100.0])
        leaves = [x.requires_grad_() for x in (q, k, v)]
        output = attention(q, k, v, sinks=sinks).output
        gradients = torch.autograd.grad(output, leaves, grad)
        expected, slopes = in_float64(q, k, v, grad, sinks=sinks)
        np.testing.assert_allclose(output.detach(), expected.output, rtol=1e-4)
        np.testing.assert_allclose(gradients[0], slopes.query, rtol=1e-3, atol=1e-4 * np.abs(slopes.query).max())


def test_a_soft_cap_does_not_hide_in_blocks_that_a_score_passed_float32_on_the_way():
    q, k, v = 1e19 * draw(64, 65), 1e25 * draw(17, 65, seed=1), draw(17, 4, seed=2)
    expected, _ = in_float64(q, k, v, draw(64, 4), softcap=2.0, scale=1.0)
    call = Call(q[None], k[None], v[None], factor=1.0, softcap=2.0)
    output = BLOCKS.forward(call, Wanted(), backends.plan()).output
    np.testing.assert_allclose(output[0], expected.output, rtol=1e-6)


class TestRowsThatSeeNothing:
    @pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -2.0])], ids=["plain", "sinks"])
    def test_forward_mode_derivatives_are_zero(self, sinks):
        q, k, v, tangent = (draw(2, 6, 4, seed=seed, dtype=torch.float64) for seed in range(4))
        mask = torch.ones(6, 6, dtype=torch.bool)
        mask[2] = False
        _, slope = torch.func.jvp(lambda q: attention(q, k, v, mask=mask, sinks=sinks).output, (q,), (tangent,))
        assert torch.isfinite(slope).all()
        assert (slope[:, 2] == 0).all()
        assert (slope[:, 3] != 0).any()

    def test_second_derivatives_are_zero(self):
        q, k, v = (draw(2, 6, 4, seed=seed, dtype=torch.float64).requires_grad_() for seed in range(3))
        mask = torch.ones(6, 6, dtype=torch.bool)
        mask[2] = False
        sinks = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
        output = attention(q, k, v, mask=mask, sinks=sinks).output
        (first,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (q, k, v, sinks))
        assert all(torch.isfinite(x).all() for x in second)
        assert (second[0][:, 2] == 0).all()


class TestVectorsWhoseSquaresOverflow:
    @pytest.mark.parametrize("size", [1e-3, 1.0, 1e15, 1e19, 1e30, 1e37])
    @pytest.mark.parametrize("policy", ["qk_norm", "cosine", "module rms", "module l2"])
    def test_normalised_vectors_do_not_feel_their_size(self, policy, size):
        q, k, v, grad = (draw(2, 9, 8, seed=seed) for seed in range(4))
        scale = QKNorm(8, norm=policy.split()[1]) if policy.startswith("module") else policy
        plain = attention(q, k, v, scale=scale).output.detach()
        large = (q * size).requires_grad_()
        output = attention(large, k * size, v, scale=scale).output
        np.testing.assert_allclose(output.detach(), plain, rtol=1e-4, atol=1e-5)
        (slope,) = torch.autograd.grad(output, large, grad)
        unit = q.clone().requires_grad_()
        (expected,) = torch.autograd.grad(attention(unit, k, v, scale=scale).output, unit, grad)
        tolerance = 1e-4 * expected.abs().max()
        np.testing.assert_allclose(slope.double() * size, expected, rtol=1e-3, atol=tolerance)

    @pytest.mark.parametrize("policy", ["qk_norm", "cosine"])
    def test_in_numpy_too(self, policy):
        q, k, v, grad = np.random.default_rng(0).standard_normal((4, 9, 8))
        plain = sqrtdk.attention(q, k, v, scale=policy).output
        np.testing.assert_allclose(sqrtdk.attention(q * 1e200, k * 1e250, v, scale=policy).output, plain, rtol=1e-9)
        expected = sqrtdk.attention_gradients(q, k, v, grad, scale=policy)
        ours = sqrtdk.attention_gradients(q * 1e200, k * 1e250, v, grad, scale=policy)
        np.testing.assert_allclose(ours.query * 1e200, expected.query, rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(ours.key * 1e250, expected.key, rtol=1e-9, atol=1e-13)


class TestTiesAndNaN:
    def test_the_first_of_equal_logits_is_the_largest_key(self):
        q, v = torch.zeros(9, 4), draw(300, 4)
        for engine in (None, "reference"):
            with backends.use(engine):
                assert (attention(q, torch.zeros(300, 4), v).statistics.max_key == 0).all()

    def test_blocks_agree_with_the_reference_on_nan(self):
        q, k, v = (draw(9, 4, seed=seed) for seed in range(3))
        k[3, 0] = torch.nan
        call = Call(q, k, v, factor=0.5, band=Band(last=0))
        done = BLOCKS.forward(call, Wanted(statistics=True), backends.plan())
        statistics = AttentionStatistics.from_blocks(done.counts, done.measures)
        with backends.use("reference"):
            expected = sqrtdk.attention(*(np.asarray(x.detach()) for x in (q, k, v)), causal=True).statistics
        np.testing.assert_array_equal(statistics.max_key, expected.max_key)
        for name in ("score_max", "max_logit"):
            np.testing.assert_allclose(getattr(statistics, name), getattr(expected, name), rtol=1e-5, err_msg=name)


def test_gradients_at_scale_zero_stay_finite_where_sums_overflow_float32():
    q, k, v, grad = (draw(9, 8, seed=seed) for seed in range(4))
    k = k * 1e37
    leaves = [x.requires_grad_() for x in (q, v)]
    slopes = torch.autograd.grad(attention(q, k, v * 1e6, scale=0.0).output, leaves, grad)
    assert all(torch.isfinite(x).all() for x in slopes)
    assert (slopes[0] == 0).all()
