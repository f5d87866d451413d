"""Gradients of `sqrtdk.torch.attention`: slopes, slopes of slopes, the reference's numbers, and nothing from a mask."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from sqrtdk import backends, scales
from sqrtdk.torch import attention
from sqrtdk.torch.engines import blocks, choose, tiles
from sqrtdk.torch.scales import LearnableScale
from torch_cases import (
    ON_THE_BEST_AND_THE_REFERENCE,
    differentiate_in_reference,
    draw,
    draw_like,
    everything,
    require_grad,
    unit,
    widen,
)

pytestmark = ON_THE_BEST_AND_THE_REFERENCE

ROWS = (2, 4, 3)
HOLES = torch.from_numpy(np.random.default_rng(0).random((2, 4, 3, 4)) < 0.7)
HOLES[0, 1, 2] = False
SINKS = torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64)
PER_ROW = torch.linspace(-1.0, 2.0, 24, dtype=torch.float64).reshape(ROWS)


def small(seed=1, dtype=torch.float64):
    return draw(seed, (2, 4, 3, 3), (2, 2, 4, 3), 2, dtype, sharpness=1.5)


CALLS = {
    "plain": {},
    "number": {"scale": 0.8},
    "no axes": {"scale": torch.tensor(0.8, dtype=torch.float64)},
    "per head": {"scale": torch.tensor([0.1, 0.5, 2.0, -1.0], dtype=torch.float64)[:, None]},
    "per row": {"scale": PER_ROW},
    "per row of all heads": {"scale": PER_ROW[0, 0, None]},
    "scale 0": {"scale": torch.zeros(ROWS, dtype=torch.float64)},
    "softcap": {"softcap": 1.2, "scale": PER_ROW},
    "softcap at scale 0": {"softcap": 1.2, "scale": torch.zeros(4, 1, dtype=torch.float64)},
    "sinks": {"sinks": SINKS, "scale": PER_ROW},
    "holes": {"mask": HOLES, "scale": PER_ROW, "sinks": SINKS},
    "additive": {"mask": torch.where(HOLES, 0.3, -torch.inf).double()},
    "causal": {"causal": True, "causal_offset": 0, "scale": PER_ROW},
    "window": {"window": (1, 0), "causal_offset": 1},
    "everything": everything(1, queries=3, keys=4),
}


def differentiable(call):
    """The tensors of a call that may have a gradient, by name, and the rest."""
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return tensors, {name: x for name, x in call.items() if name not in tensors}


def as_function(call, part="output"):
    """A function of q, k, v and the call's own tensors, as gradcheck wants it, and its inputs."""
    tensors, rest = differentiable(call)

    def function(q, k, v, *values):
        gradients = attention(q, k, v, weights=part != "output", **dict(zip(tensors, values, strict=True)), **rest)
        return (gradients.output, gradients.weights) if part == "both" else getattr(gradients, part)

    return function, require_grad(*small(), *tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_numerical_derivatives(name):
    function, inputs = as_function(CALLS[name])
    assert gradcheck(function, inputs, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 17])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_do_not_depend_on_the_blocks(name, block, monkeypatch):
    for candidates in ("_WITH_KERNEL", "_WITH_REFERENCE"):
        monkeypatch.setattr(choose, candidates, (blocks.BLOCKS,))
    function, inputs = as_function(CALLS[name], "both")
    gradients = []
    for size in (tiles.BLOCK_ELEMENTS, block):
        monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", size)
        output, weights = function(*inputs)
        gradients.append(torch.autograd.grad(output.square().sum() + weights.pow(3).sum(), inputs))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("part", ["weights", "both"])
@pytest.mark.parametrize("name", ["plain", "sinks", "holes", "everything"])
def test_gradients_through_the_weights_are_slopes(name, part):
    function, inputs = as_function(CALLS[name], part)
    assert gradcheck(function, inputs, atol=1e-6, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "per head", "scale 0", "softcap", "sinks", "holes", "everything"])
def test_gradients_of_gradients_are_slopes(name):
    function, inputs = as_function(CALLS[name])
    assert gradgradcheck(function, inputs, atol=1e-6, fast_mode=True)


def test_gradients_of_gradients_through_the_weights():
    function, inputs = as_function(CALLS["everything"], "both")
    assert gradgradcheck(function, inputs, atol=1e-6, fast_mode=True)


@pytest.mark.slow
# torch's own formulas for forward mode are scripts.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_forward_mode_derivatives_are_slopes(name):
    function, inputs = as_function(CALLS[name])
    assert gradcheck(function, inputs, atol=1e-6, check_forward_ad=True, check_backward_ad=False)


MASK_SHAPES = [(), (1,), (4,), (3, 1), (1, 4), (3, 4), (4, 1, 1), (1, 3, 4), (2, 1, 1, 4), (2, 4, 3, 4), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_an_additive_mask_has_a_gradient_of_its_own_shape(shape):
    bias = torch.from_numpy(np.asarray(np.random.default_rng(2).standard_normal(shape)))
    call = {"mask": bias, "sinks": SINKS, "softcap": 2.0, "causal": True, "causal_offset": 1}
    function, inputs = as_function(call)
    assert gradcheck(function, inputs, atol=1e-6, fast_mode=True)
    (gradients,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[3])
    assert gradients.shape == shape
    assert gradients.abs().max() > 1e-4


@pytest.mark.parametrize("name", [name for name in CALLS if name != "additive"])
def test_gradients_are_the_references(name):
    call = CALLS[name]
    tensors, rest = differentiable(call)
    leaves = require_grad(*small(3), *tensors.values())
    own = dict(zip(tensors, leaves[3:], strict=True))
    output = attention(*leaves[:3], **own, **rest).output
    grad = draw_like(4, output)
    gradients = torch.autograd.grad(output, leaves, grad)
    expected = differentiate_in_reference(*leaves[:3], grad, **call)
    for x, meant in zip(gradients, expected[:3], strict=False):
        np.testing.assert_allclose(x.numpy(), meant, rtol=1e-10, atol=1e-12)
    if "scale" in own:
        meant = torch.from_numpy(expected.scale).sum_to_size(own["scale"].shape)
        torch.testing.assert_close(gradients[3 + list(own).index("scale")], meant, rtol=1e-10, atol=1e-12)
    if "sinks" in own:
        meant = torch.from_numpy(expected.sinks)
        torch.testing.assert_close(gradients[3 + list(own).index("sinks")], meant, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", ["cosine", scales.QKNorm(2.0), "log_n", "mup", scales.Llama4(floor=2.0)], ids=str)
def test_gradients_through_policies_are_the_references(policy):
    leaves = require_grad(*small(5))
    output = attention(*leaves, scale=policy, mask=HOLES, softcap=2.0).output
    grad = draw_like(6, output)
    expected = differentiate_in_reference(*leaves, grad, scale=policy, mask=HOLES, softcap=2.0)
    for gradients, meant in zip(torch.autograd.grad(output, leaves, grad), expected[:3], strict=True):
        np.testing.assert_allclose(gradients.numpy(), meant, rtol=1e-9, atol=1e-11)


class ByQuery(LearnableScale):
    """A factor from the query vector, the position and the count of keys, and vectors shortened before the product."""

    def __init__(self):
        super().__init__()
        self.direction = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))
        self.shrink = torch.nn.Parameter(torch.tensor(0.9, dtype=torch.float64))

    def factor(self, context):
        steps = 1 + 0.1 * context.positions.double()
        return torch.exp(context.query @ self.direction) * steps * torch.log1p(context.visible_keys.double())

    def prepare(self, q, k):
        return q * self.shrink.to(q.dtype), k * self.shrink.to(k.dtype) ** 2


def test_a_learnable_scale_is_the_same_as_its_numbers_and_has_gradients():
    module = ByQuery()
    q, k, v = require_grad(*small(7))
    call = {"mask": HOLES, "causal": True, "causal_offset": 2}
    gradients = attention(q, k, v, scale=module, **call)
    visible = torch.ones(3, 4, dtype=torch.bool).tril(2) & HOLES
    steps = 1 + 0.1 * torch.arange(2, 5).double()
    by_hand = torch.exp(q @ module.direction) * steps * torch.log1p(visible.sum(-1).double())
    meant = attention(q * module.shrink, k * module.shrink**2, v, scale=by_hand, **call)
    torch.testing.assert_close(gradients.output, meant.output, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradients.statistics.entropy, meant.statistics.entropy, rtol=1e-9, atol=1e-12)
    inputs = (q, k, v, *module.parameters())
    grad = draw_like(8, gradients.output)
    one, other = torch.autograd.grad(gradients.output, inputs, grad), torch.autograd.grad(meant.output, inputs, grad)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)
        assert left.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["per head", "sinks", "everything"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_gradient_has_the_dtype_of_its_input(dtype, name):
    tensors, rest = differentiable(CALLS[name])
    leaves = require_grad(*small(9, dtype), *(x.float() for x in tensors.values()))
    output = attention(*leaves[:3], **dict(zip(tensors, leaves[3:], strict=True)), **rest).output
    output.float().square().sum().backward()
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.shape == leaf.shape
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_over_many_blocks_are_rounded_once(dtype, monkeypatch):
    for candidates in ("_WITH_KERNEL", "_WITH_REFERENCE"):
        monkeypatch.setattr(choose, candidates, (blocks.BLOCKS,))
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", 1)
    tensors = draw(9, (1, 4, 40, 8), (1, 2, 6, 8), 5, dtype, sharpness=1.0)
    leaves, exact = require_grad(*tensors), require_grad(*(x.double() for x in tensors))
    bias, wide_bias = (torch.zeros(6, dtype=kind, requires_grad=True) for kind in (dtype, torch.float64))
    output, wide = attention(*leaves, mask=bias).output, attention(*exact, mask=wide_bias).output
    grad = draw_like(10, output).abs()
    gradients = torch.autograd.grad(output, (*leaves, bias), grad)
    expected = torch.autograd.grad(wide, (*exact, wide_bias), grad.double())
    for one, other in zip(gradients, expected, strict=True):
        assert float((one.double() - other).abs().max() / other.abs().max()) < 0.6 * unit(dtype)


POISONS = [torch.nan, torch.inf, -torch.inf]
EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "qk_norm": {"scale": "qk_norm"},
    "cosine": {"scale": "cosine"},
    "per row": {"scale": torch.linspace(0.1, 2, 20, dtype=torch.float64).reshape(4, 5)},
}


def all_gradients(tensors, grad, mask, extra):
    """Gradients of q, k, v, of the tensors in `extra` and of the mask if it is a float one."""
    own, rest = differentiable(extra | {"mask": mask})
    leaves = require_grad(*tensors, *own.values())
    gradients = attention(*leaves[:3], **dict(zip(own, leaves[3:], strict=True)), **rest)
    return torch.autograd.grad(gradients.output, leaves, grad)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("poison", POISONS)
def test_masked_keys_have_no_influence_on_gradients_to_the_bit(poison, extra):
    q, k, v = draw(10, (2, 4, 5, 3), (2, 2, 6, 3), 2)
    grad = draw_like(11, q[..., :2])
    visible = torch.ones(5, 6, dtype=torch.bool)
    visible[:, 4] = visible[2] = False
    dirty = [x.clone() for x in (q, k, v, grad)]
    dirty[0][..., 2, :] = dirty[3][..., 2, 1] = poison
    dirty[1][..., 4, 0] = dirty[2][..., 4, :] = poison
    for form in (visible, torch.where(visible, 0.25, -torch.inf).double()):
        clean = all_gradients((q, k, v), grad, form, EXTRAS[extra])
        assert not clean[0][..., 2, :].any()
        assert not clean[1][..., 4, :].any()
        assert not clean[2][..., 4, :].any()
        gradients = all_gradients(dirty[:3], dirty[3], form, EXTRAS[extra])
        for one, other in zip(clean, gradients, strict=True):
            assert torch.isfinite(one).all()
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("keys", [0, 4])
def test_a_row_that_sees_nothing_has_and_gives_zero_gradients(keys):
    q, k, v = draw(12, (2, 4, 3, 3), (2, 2, keys, 3), 2)
    leaves = require_grad(q, k, v, SINKS, torch.full((4, 1), 0.7), torch.full((1, keys), -torch.inf))
    gradients = attention(*leaves[:3], sinks=leaves[3], scale=leaves[4], mask=leaves[5], softcap=3.0, weights=True)
    assert not gradients.output.any()
    loss = gradients.output.sum() + gradients.weights.sum() + gradients.output.square().sum()
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("poison", POISONS)
def test_double_backward_keeps_masked_keys_out(poison):
    q, k, v = small(13)
    visible = torch.ones(3, 4, dtype=torch.bool)
    visible[:, 1] = visible[2] = False
    k[..., 1, :] = v[..., 1, :] = q[..., 2, :] = poison
    leaves = require_grad(q, k, v)
    first = torch.autograd.grad(attention(*leaves, mask=visible).output.square().sum(), leaves, create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in first)
    for gradient in torch.autograd.grad(penalty, leaves):
        assert torch.isfinite(gradient).all()
        assert gradient.any()


def test_a_visible_nan_reaches_the_gradients_of_its_rows_only():
    q, k, v = draw(14, (2, 4, 5, 3), (2, 4, 5, 3), 2)
    grad = draw_like(15, v)
    q[1, 2, 3, 0] = torch.nan
    leaves = require_grad(q, k, v)
    gradients = torch.autograd.grad(attention(*leaves, causal=True).output, leaves, grad)
    assert torch.isnan(gradients[0][1, 2, 3]).all()
    assert torch.isnan(gradients[1][1, 2, :4]).all()
    assert torch.isfinite(gradients[1][1, 2, 4]).all()
    assert torch.isfinite(gradients[1][0]).all()
    assert torch.isfinite(gradients[0][1, 2, :3]).all()


@pytest.mark.parametrize(
    "sizes", [((0, 2, 3, 4), (0, 2, 5, 4), 2), ((2, 2, 0, 4), (2, 2, 5, 4), 2), ((3, 4), (5, 4), 0)]
)
def test_empty_calls_have_gradients_of_the_right_shape(sizes):
    leaves = require_grad(*draw(16, *sizes))
    attention(*leaves).output.sum().backward()
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_that_are_wanted(wanted):
    tensors = small(17)
    leaves = require_grad(*tensors)
    mixed = [leaf if at in wanted else leaf.detach() for at, leaf in enumerate(leaves)]
    attention(*mixed).output.square().sum().backward()
    every = require_grad(*tensors)
    attention(*every).output.square().sum().backward()
    for at, (leaf, other) in enumerate(zip(leaves, every, strict=True)):
        assert (leaf.grad is not None) == (at in wanted)
        if at in wanted:
            torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_the_layout_of_inputs_and_of_the_output_gradient_does_not_matter():
    tensors = draw(18, (2, 4, 7, 8), (2, 2, 9, 8), 5)
    plain, turned = require_grad(*tensors), [x.transpose(1, 2).contiguous().requires_grad_() for x in tensors]
    attention(*plain).output.sum().backward()
    attention(*(x.transpose(1, 2) for x in turned)).output.transpose(1, 2).mT.sum().backward()
    for one, other in zip(plain, turned, strict=True):
        torch.testing.assert_close(one.grad, other.grad.transpose(1, 2), rtol=1e-12, atol=1e-13)
    key = tensors[1][:1, :1].clone().requires_grad_()
    attention(tensors[0], key.expand(2, 2, 9, 8), tensors[2]).output.sum().backward()
    whole = tensors[1][:1, :1].expand(2, 2, 9, 8).clone().requires_grad_()
    attention(tensors[0], whole, tensors[2]).output.sum().backward()
    torch.testing.assert_close(key.grad[0, 0], whole.grad.sum((0, 1)), rtol=1e-12, atol=1e-13)


def test_a_second_backward_gives_the_same_and_a_changed_input_is_noticed():
    leaves = require_grad(*small(19))
    q = leaves[0] * 1.0
    output = attention(q, *leaves[1:]).output
    grad = draw_like(20, output)
    first = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    with backends.use("reference"):
        second = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        q += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output, leaves, grad)


@pytest.mark.parametrize("policy", [None, 0.7, "cosine", "qk_norm", "log_n"])
def test_eulers_identity_ties_the_scale_to_the_query(policy):
    """Σ of scale·∂loss/∂scale over a head is ⟨q, ∂loss/∂q⟩ with the q that enters the product: the pressure."""
    from sqrtdk.torch.pressure import TemperaturePressure

    leaves = require_grad(*small(21))
    pressure = TemperaturePressure()
    output = attention(*leaves, scale=policy, pressure=pressure).output
    grad = draw_like(22, output)
    output.backward(grad)
    factor = {None: 3**-0.5, 0.7: 0.7, "cosine": 10.0, "qk_norm": 3**-0.5, "log_n": math.log(4) / math.sqrt(3)}
    expected = differentiate_in_reference(*leaves, grad, scale=policy).scale.sum(axis=(0, 2)) * factor[policy]
    np.testing.assert_allclose(widen(pressure.per_head), expected, rtol=1e-9)
    assert np.abs(expected).min() > 1e-3


def test_statistics_are_the_same_with_gradients_and_never_carry_one():
    leaves = require_grad(*small(23))
    with_graph, without = attention(*leaves), attention(*(x.detach() for x in leaves))
    assert with_graph.output.requires_grad
    assert not with_graph.statistics.entropy.requires_grad
    torch.testing.assert_close(with_graph.statistics.entropy, without.statistics.entropy, rtol=0, atol=0)
    torch.testing.assert_close(with_graph.output.detach(), without.output, rtol=0, atol=0)
