"""Tensors whose elements lie nowhere: zeros that torch does not keep, wrappers, gradients that stand for several."""

import pytest
import torch
from torch._vmap_internals import _vmap
from torch.autograd.functional import hessian, jacobian

from sqrtdk.torch import attention
from sqrtdk.torch.internals import has_memory
from torch_cases import ON_THE_BEST_AND_THE_REFERENCE

pytestmark = ON_THE_BEST_AND_THE_REFERENCE

SHAPE = (2, 5, 4)
Q, K, V = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(at), dtype=torch.float64) for at in range(3))
CALLS = {
    "plain": {},
    "mask": {"mask": torch.linspace(-2, 2, 25, dtype=torch.float64).reshape(5, 5)},
    "sinks and scale": {"sinks": torch.tensor([0.3, -1.0]), "scale": torch.tensor([[0.2], [0.7]])},
    "grouped": {"k": K[:1], "v": V[:1]},
    "one head": {"k": K[0], "v": V[0]},
    "soft cap, causal": {"softcap": 2.0, "causal": True},
    "weights": {"weights": True},
}


def attend(q, name):
    call = {"k": K, "v": V} | CALLS[name]
    result = attention(q if call["k"].dim() == 3 else q[0], **call)
    return result.output if result.weights is None else result.weights


def zeros_nowhere(*shape, dtype=torch.float64):
    nowhere = torch._efficientzerotensor(shape, dtype=dtype)
    assert not has_memory(nowhere)
    return nowhere


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("leaves", [False, True])
def test_zeros_that_lie_nowhere_are_zeros(which, leaves):
    given = {"q": Q, "k": K, "v": V, "softcap": 2.0}
    other = Q.clone().requires_grad_(leaves)
    given["k" if which == "q" else "q"] = other
    output = attention(**given | {which: zeros_nowhere(*SHAPE)}).output
    expected = attention(**given | {which: torch.zeros_like(Q)}).output
    torch.testing.assert_close(output, expected)
    if leaves:
        one, two = (torch.autograd.grad(x.square().sum(), other)[0] for x in (output, expected))
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_that_are_zeros_nowhere_give_zeros(name, dtype):
    q = Q.clone().to(dtype).requires_grad_()
    call = {"k": K, "v": V} | CALLS[name]
    call = call | {side: call[side].to(dtype) for side in "kv"}
    result = attention(q if call["k"].dim() == 3 else q[0], **call)
    output = result.output if result.weights is None else result.weights
    (gradient,) = torch.autograd.grad(output, q, zeros_nowhere(*output.shape, dtype=dtype))
    assert gradient.shape == q.shape
    assert not gradient.any()


def test_wrappers_and_their_gradients_are_what_they_wrap():
    wrap, unwrap = torch._to_functional_tensor, torch._from_functional_tensor
    q = wrap(Q).requires_grad_()
    assert not has_memory(q)
    output = attention(q, wrap(K), V).output
    (gradient,) = torch.autograd.grad(output, q, wrap(V))
    leaf = Q.clone().requires_grad_()
    expected = attention(leaf, K, V).output
    torch.testing.assert_close(unwrap(output.detach()), expected.detach())
    torch.testing.assert_close(unwrap(gradient), torch.autograd.grad(expected, leaf, V)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_vectorized_jacobians_and_hessians_are_those_of_a_loop(name):
    def function(q):
        return attend(q, name)

    torch.testing.assert_close(jacobian(function, Q, vectorize=True), jacobian(function, Q))
    by_loop = hessian(lambda q: function(q).square().sum(), Q)
    torch.testing.assert_close(hessian(lambda q: function(q).square().sum(), Q, vectorize=True), by_loop)
    assert by_loop.abs().max() > 1e-3


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("twice", [False, True])
def test_batched_gradients_are_those_of_a_loop(name, twice):
    def differentiate(batched):
        q = Q.clone().requires_grad_()
        output = attend(q, name)
        slopes = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(4), dtype=output.dtype)
        keep = {"create_graph": twice, "retain_graph": True}
        if batched:
            (first,) = torch.autograd.grad(output, q, slopes, is_grads_batched=True, **keep)
        else:
            first = torch.stack([torch.autograd.grad(output, q, slope, **keep)[0] for slope in slopes])
        return torch.autograd.grad(first.square().sum(), q)[0] if twice else first

    result = differentiate(True)
    torch.testing.assert_close(result, differentiate(False))
    assert result.abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:Please use `torch.vmap`")
def test_a_call_of_tensors_that_stand_for_several_is_made_for_each():
    result = _vmap(lambda q: attention(q, K[0], V[0]).output)(Q)
    torch.testing.assert_close(result, torch.stack([attention(q, K[0], V[0]).output for q in Q]))
