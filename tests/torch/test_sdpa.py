"""`scaled_dot_product_attention` beside torch's: the same where torch is right, better where not; accuracy; dropout."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from sqrtdk import SqrtdkError
from sqrtdk.torch import attention, scaled_dot_product_attention
from sqrtdk.torch.engines import tiles
from torch_cases import (
    FIELDS,
    ON_THE_BEST_AND_THE_REFERENCE,
    assert_close,
    attend_in_reference,
    draw,
    draw_like,
    require_grad,
    seeded,
    unit,
    widen,
)

pytestmark = ON_THE_BEST_AND_THE_REFERENCE


def assert_as_torch(q, k, v, *args, **call):
    """Output and gradients of the call are torch's, in float64."""
    ours, theirs = require_grad(q, k, v), require_grad(q, k, v)
    result, expected = scaled_dot_product_attention(*ours, *args, **call), torch_sdpa(*theirs, *args, **call)
    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)
    grad = draw_like(1, expected)
    result.backward(grad)
    expected.backward(grad)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_the_signature_is_torchs():
    ours = list(inspect.signature(scaled_dot_product_attention).parameters.values())
    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    assert [parameter.name for parameter in ours] == [argument.name for argument in theirs]
    for parameter, argument in zip(ours, theirs, strict=True):
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only, parameter.name
        expected = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        assert parameter.default == expected, parameter.name
        assert type(parameter.default) is type(expected), parameter.name


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((5, 3), (7, 3)),
        ((2, 5, 3), (2, 7, 3)),
        ((2, 4, 5, 3), (2, 4, 7, 3)),
        ((2, 3, 4, 5, 3), (2, 3, 4, 7, 3)),
        ((2, 1, 3, 4, 5, 3), (2, 1, 3, 4, 7, 3)),
        ((2, 4, 5, 3), (2, 4, 1, 3)),
        ((2, 4, 1, 3), (2, 4, 7, 3)),
        ((2, 4, 0, 3), (2, 4, 7, 3)),
        ((0, 4, 5, 3), (0, 4, 7, 3)),
    ],
)
def test_ranks_and_lengths(q_shape, k_shape):
    q, k, v = draw(2, q_shape, k_shape, 2)
    assert_as_torch(q, k, v)
    assert_as_torch(q, k, v, is_causal=True)
    assert_as_torch(q, k, v, None, 0.0, True, scale=0.7)


@pytest.mark.parametrize(
    ("q_lead", "k_lead", "v_lead"),
    [
        ((2, 4), (1, 4), (2, 4)),
        ((2, 4), (2, 1), (2, 1)),
        ((2, 4), (1, 1), (1, 1)),
        ((1, 4), (2, 4), (2, 4)),
        ((2, 1), (2, 4), (2, 4)),
        ((2, 4), (2, 1), (1, 4)),
        ((3, 1, 4), (3, 2, 4), (1, 2, 1)),
    ],
)
def test_leading_axes_broadcast(q_lead, k_lead, v_lead):
    q = draw(3, (*q_lead, 5, 3), (1, 1), 1)[0]
    k = draw(4, (1, 1), (*k_lead, 7, 3), 1)[1]
    v = draw(5, (1, 1), (*v_lead, 7, 1), 2)[2]
    assert_as_torch(q, k, v)
    assert_as_torch(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (4, 5, 7), (1, 1, 7), (2, 1, 5, 7), (2, 4, 5, 7), (1, 4, 1, 7)]
)
def test_every_mask_form(shape):
    q, k, v = draw(6, (2, 4, 5, 3), (2, 4, 7, 3), 2)
    rng = np.random.default_rng(6)
    boolean = torch.from_numpy(rng.random(shape) < 0.7)
    # Rows that see nothing are compared with zeros below: torch's gradients may be NaN there.
    boolean[..., 0] = True
    assert_as_torch(q, k, v, boolean)
    additive = torch.from_numpy(np.where(boolean.numpy(), rng.standard_normal(shape), -np.inf))
    assert_as_torch(q, k, v, attn_mask=additive, scale=0.4)
    ours, theirs = require_grad(additive, additive)
    (result,) = torch.autograd.grad(scaled_dot_product_attention(q, k, v, ours).square().sum(), ours)
    (expected,) = torch.autograd.grad(torch_sdpa(q, k, v, theirs).square().sum(), theirs)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 3), (4, 1), (4, 4)])
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_grouped_heads(heads, groups, lead):
    q, k, v = draw(7, (*lead, heads, 5, 3), (*lead, groups, 7, 3), 2)
    assert_as_torch(q, k, v, enable_gqa=True)
    assert_as_torch(q, k, v, is_causal=True, scale=1.3, enable_gqa=True)


def test_heads_that_differ_need_enable_gqa():
    q, k, v = draw(7, (2, 4, 5, 3), (2, 2, 7, 3), 2)
    with pytest.raises(SqrtdkError, match="enable_gqa"):
        scaled_dot_product_attention(q, k, v)


def test_values_beyond_the_keys_are_refused_not_ignored():
    q, k, v = draw(8, (2, 4, 5, 3), (2, 4, 7, 3), 2)
    for other in (v[:, :, :6], torch.cat([v, v], 2)):
        with pytest.raises(SqrtdkError, match=r"value must .*7 keys") as raised:
            scaled_dot_product_attention(q, k, other)
        assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_is_refused(scale):
    q, k, v = draw(8, (2, 4, 5, 3), (2, 4, 7, 3), 2)
    with pytest.raises(SqrtdkError, match="scale must be finite, got") as raised:
        scaled_dot_product_attention(q, k, v, scale=scale)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("scale", [np.float32(0.7), np.float64(0.7), torch.tensor(0.7), 1], ids=repr)
def test_a_number_is_what_torch_takes_for_a_number(scale):
    q, k, v = draw(8, (2, 4, 5, 3), (2, 4, 7, 3), 2)
    assert_as_torch(q, k, v, scale=scale)
    assert scaled_dot_product_attention(q, k, v, dropout_p=np.float32(0.5)).shape == (2, 4, 5, 2)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_mask_and_is_causal_intersect(kind):
    q, k, v = draw(9, (2, 4, 5, 3), (2, 4, 7, 3), 2)
    visible = torch.from_numpy(np.random.default_rng(9).random((5, 7)) < 0.6)
    visible[:, 0] = True
    both = visible & torch.ones(5, 7, dtype=torch.bool).tril()
    if kind == "boolean":
        result, expected = scaled_dot_product_attention(q, k, v, visible, is_causal=True), torch_sdpa(q, k, v, both)
    else:
        bias = draw_like(10, q[0, 0, :, :1]) + torch.zeros(5, 7, dtype=torch.float64).masked_fill(~visible, -math.inf)
        result = scaled_dot_product_attention(q, k, v, bias, is_causal=True)
        expected = torch_sdpa(q, k, v, bias.masked_fill(~both, -math.inf))
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("statistics", [False, True])
def test_a_mask_entry_beyond_float32_is_a_number_beside_float32(statistics):
    q, k, v = draw(7, (2, 3, 4), (2, 4, 4), 2, torch.float32)
    mask = torch.tensor([[0.0, -1e100, -1e100, 0.0], [-1e100] * 4, [0.0] * 4], dtype=torch.float64)
    result, expected = attention(q, k, v, mask=mask, statistics=statistics), attend_in_reference(q, k, v, mask=mask)
    assert_close(result.output, expected.output, 1e-5, "output")
    if statistics:
        assert_close(result.statistics.logit_mean, expected.statistics.logit_mean, 1e-5, "logit_mean")
    leaf = q.clone().requires_grad_()
    attention(leaf, k, v, mask=mask).output.sum().backward()
    assert torch.isfinite(leaf.grad).all()


def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients():
    q, k, v = require_grad(*draw(11, (2, 4, 5, 3), (2, 4, 7, 3), 2))
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    for form in (mask, torch.zeros(5, 7, dtype=torch.float64).masked_fill(~mask, -math.inf)):
        output = scaled_dot_product_attention(q, k, v, form)
        assert not output[:, :, 2].any()
        gradients = torch.autograd.grad(output.sum(), (q, k, v))
        assert not gradients[0][:, :, 2].any()
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_masked_nan_has_no_influence():
    q, k, v = draw(12, (2, 4, 5, 3), (2, 4, 7, 3), 2)
    clean = scaled_dot_product_attention(q, k, v, is_causal=True)
    k[:, :, 5:] = v[:, :, 5:] = torch.nan
    leaves = require_grad(q, k, v)
    result = scaled_dot_product_attention(*leaves, is_causal=True)
    torch.testing.assert_close(result, clean, rtol=0, atol=0)
    for gradient in torch.autograd.grad(result.sum(), leaves):
        assert torch.isfinite(gradient).all()


def eager(q, k, v, mask, scale):
    """What a model written out does: every step in the dtype, each product and softmax with float32 inside."""
    logits = q @ k.mT * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1) @ v


ACCURACY = {
    "square": ((2, 4, 64, 64), (2, 4, 64, 64), 64, None),
    "cross, odd features": ((1, 2, 33, 17), (1, 2, 129, 17), 40, None),
    "decode": ((2, 2, 1, 65), (2, 2, 300, 65), 65, None),
    "boolean mask": ((1, 2, 37, 40), (1, 2, 70, 40), 24, torch.bool),
    "additive mask": ((1, 2, 37, 40), (1, 2, 70, 40), 24, torch.float64),
}


def accuracy_case(name, seed, dtype, sharpness):
    q_shape, k_shape, d_v, form = ACCURACY[name]
    tensors = draw(seed, q_shape, k_shape, d_v, dtype, sharpness=sharpness)
    if form is None:
        return tensors, None
    mask = torch.from_numpy(np.random.default_rng(seed).random((q_shape[2], k_shape[2])) < 0.7)
    return tensors, mask if form == torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)


def largest_errors(result, eager_found, exact):
    """The largest errors of both against float64, and a few units in the last place of the largest number."""
    floor = 2 * unit(result.dtype) * float(exact.abs().max())
    return float((result.double() - exact).abs().max()), float((eager_found.double() - exact).abs().max()), floor


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ACCURACY)
def test_errors_are_at_most_twice_those_of_eager_and_of_gradients_thrice(name, dtype, sharpness):
    for seed in range(4):
        tensors, mask = accuracy_case(name, seed, dtype, sharpness)
        scale = tensors[0].shape[-1] ** -0.5
        wide = [x.double() for x in tensors]
        wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
        grad = draw_like(seed, eager(*tensors, mask, scale))
        every = []
        for inputs, function in (
            (tensors, lambda *x: attention(*x, mask=mask, statistics=False).output),  # noqa: B023
            (tensors, lambda *x: eager(*x, mask, scale)),  # noqa: B023
            (wide, lambda *x: eager(*x, wide_mask, scale)),  # noqa: B023
        ):
            leaves = require_grad(*inputs)
            output = function(*leaves)
            every.append((output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))))
        for what, times, *numbers in zip(("output", "q", "k", "v"), (2, 3, 3, 3), *every, strict=True):
            ours, theirs, floor = largest_errors(*numbers)
            assert ours <= times * theirs + floor, (what, seed, ours, theirs, floor)


def kept(p, queries=25, keys=60, seed=0):
    """Which weights of a call dropout leaves, read off its output with values of unit vectors."""
    q, k, _ = draw(13, (2, 2, 4, queries, 8), (2, 2, 4, keys, 8), 1, sharpness=1.0)
    v = torch.eye(keys, dtype=torch.float64).expand(2, 2, 4, keys, keys)
    result = seeded(lambda: attention(q, k, v, dropout=p, weights=True), seed)()
    ratio = result.output / result.weights
    assert bool(((ratio.abs() < 1e-9) | ((ratio - 1 / (1 - p)).abs() < 1e-9)).all())
    return ratio > 0.5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_weights_one_by_one_and_lifts_the_rest(p):
    left = kept(p)
    count = left.numel()
    deviation = math.sqrt(p * (1 - p) * count)
    assert abs(int(left.sum()) - (1 - p) * count) < 5 * deviation
    if p == 0.5:  # where two of the rows of 60 are alike once in 10¹³ draws
        rows = left.flatten(0, 3)
        assert len(rows.unique(dim=0)) == len(rows)
    columns = left.double().mean((0, 1, 2, 3))
    assert float((columns - (1 - p)).abs().max()) < 6 * math.sqrt(p * (1 - p) * 60 / count)
    assert not torch.equal(left, kept(p, seed=1))


def test_the_mean_over_dropouts_is_the_output_without():
    q, k, v = draw(14, (4, 3, 8), (4, 5, 8), 6)
    many = [x.expand(3000, *x.shape) for x in (q, k, v)]
    result = seeded(lambda: scaled_dot_product_attention(*many, dropout_p=0.3))()
    plain = scaled_dot_product_attention(q, k, v)
    error = result.std(0) / math.sqrt(3000)
    assert float(((result.mean(0) - plain).abs() / error).max()) < 5.0


def test_dropout_of_everything_gives_zeros_and_of_nothing_gives_the_output():
    q, k, v = require_grad(*draw(15, (2, 4, 5, 3), (2, 4, 7, 3), 2))
    nothing = scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    assert not nothing.any()
    assert all(not gradient.any() for gradient in torch.autograd.grad(nothing.sum(), (q, k, v)))
    whole = scaled_dot_product_attention(q, k, v, dropout_p=0.0)
    torch.testing.assert_close(whole, scaled_dot_product_attention(q, k, v), rtol=0, atol=0)


def test_dropout_draws_from_torchs_generator_and_only_if_asked():
    q, k, v = draw(16, (2, 4, 5, 3), (2, 4, 7, 3), 2)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before = torch.get_rng_state()
        scaled_dot_product_attention(q, k, v)
        attention(q, k, v, sample_rows=2)
        assert torch.equal(torch.get_rng_state(), before)
        first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        assert not torch.equal(torch.get_rng_state(), before)
        second = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        torch.set_rng_state(before)
        again = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, second)


def test_statistics_and_weights_are_those_before_dropout():
    q, k, v = draw(17, (2, 4, 5, 3), (2, 2, 7, 3), 2)
    plain = attention(q, k, v, weights=True)
    dropped = seeded(lambda: attention(q, k, v, dropout=0.5, weights=True))()
    torch.testing.assert_close(dropped.weights, plain.weights, rtol=1e-12, atol=1e-15)
    for name in FIELDS:
        np.testing.assert_allclose(
            widen(getattr(dropped.statistics, name)), widen(getattr(plain.statistics, name)), rtol=1e-9, atol=1e-12
        )
    assert not torch.equal(dropped.output, plain.output)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 10, 2**20])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0, "causal": True, "causal_offset": 2}])
def test_the_gradient_drops_what_the_output_dropped(extra, block, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", block)
    sinks = torch.tensor([0.5, -0.5, 0.1, 1.0], dtype=torch.float64)
    leaves = require_grad(*draw(18, (1, 4, 3, 3), (1, 2, 4, 3), 2, sharpness=1.0), sinks)

    def function(q, k, v, sinks):
        result = attention(q, k, v, sinks=sinks, dropout=0.4, weights=True, **extra)
        return result.output, result.weights

    assert gradcheck(seeded(function), leaves, atol=1e-6, fast_mode=True)
    output, _ = seeded(function)(*leaves)
    expected = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    torch.rand(100)
    for one, other in zip(expected, torch.autograd.grad(output.sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_derivatives_of_every_kind_drop_what_the_output_dropped():
    leaves = require_grad(*draw(19, (2, 1, 4, 3, 3), (2, 1, 2, 4, 3), 2, sharpness=1.0))

    def function(q, k, v):
        return attention(q, k, v, dropout=0.4).output

    assert gradgradcheck(seeded(function), leaves, atol=1e-6, fast_mode=True)
    assert gradcheck(seeded(function), leaves, atol=1e-6, fast_mode=True, check_forward_ad=True)
    tangents = tuple(torch.ones_like(leaf) for leaf in leaves)
    output, _ = seeded(lambda: torch.func.jvp(function, leaves, tangents))()
    torch.testing.assert_close(output, seeded(function)(*leaves), rtol=1e-12, atol=1e-14)
