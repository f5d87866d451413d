"""Derivatives of `sqrtdk.torch.attention` by torch.func and autograd, one inside the other: none is lost."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from sqrtdk.operation.call import Call, flatten
from sqrtdk.torch import attention
from torch_cases import ON_THE_BEST_AND_THE_REFERENCE, draw

pytestmark = [
    *ON_THE_BEST_AND_THE_REFERENCE,
    # Forward-mode rules of torch itself are scripted.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

Q, K, V = draw(0, (2, 3, 4), (2, 3, 4), 4)


def ours(q, k, v):
    return attention(q, k, v).output


def eager(q, k, v):
    return torch.softmax(q @ k.mT / 2.0, dim=-1) @ v


def square(function):
    return lambda q, k, v: function(q, k, v).square().sum()


def _differentiate_vjp(function):
    pull = vjp(lambda q: function(q, K, V), Q)[1]
    return grad(lambda cotangent: pull(cotangent)[0].square().sum())(V)


def _push_vjp(function):
    pull = vjp(lambda q: function(q, K, V), Q)[1]
    return jvp(lambda cotangent: pull(cotangent)[0], (V,), (K,))[1]


def _leave_key_to_autograd(inner):
    key = K.clone().requires_grad_()
    return torch.autograd.grad(inner(key).square().sum(), key)[0]


def _differentiate_twice_through_vmap(function):
    key = K.clone().requires_grad_()
    loss = vmap(function)(Q, key, V).square().sum()
    (first,) = torch.autograd.grad(loss, key, create_graph=True)
    return torch.autograd.grad(first.square().sum(), key)[0]


def _pull_back_tangent(function):
    key = K.clone().requires_grad_()
    output = function(Q, key, V)
    with forward_ad.dual_level():
        (result,) = torch.autograd.grad(output, key, forward_ad.make_dual(V, Q))
        return forward_ad.unpack_dual(result).tangent


NESTED = {
    "grad of vmap": lambda f: grad(lambda q: vmap(f)(q, K, V).square().sum())(Q),
    "grad of vmap of vmap": lambda f: grad(lambda q: vmap(vmap(f))(*(x[None] for x in (q, K, V))).square().sum())(Q),
    "autograd of vmap": lambda f: _leave_key_to_autograd(lambda k: vmap(f)(Q, k, V)),
    "autograd of vmap, its key the same for all": lambda f: _leave_key_to_autograd(
        lambda k: vmap(f, in_dims=(0, None, 0))(Q, k[0], V)
    ),
    "autograd twice through vmap": _differentiate_twice_through_vmap,
    "hessian": lambda f: hessian(lambda q: square(f)(q, K, V))(Q),
    "hessian of vmap": lambda f: hessian(lambda q: vmap(f)(q, K, V).square().sum())(Q),
    "jacfwd of vmap": lambda f: jacfwd(lambda q: vmap(f)(q, K, V))(Q),
    "jacrev of jacrev": lambda f: jacrev(jacrev(lambda q: square(f)(q, K, V)))(Q),
    "grad of grad by another": lambda f: grad(lambda k: grad(square(f))(Q, k, V).square().sum())(K),
    "grad of vmap of grad": lambda f: grad(lambda k: vmap(grad(square(f)))(Q, k, V).square().sum())(K),
    "vmap of grad of grad": lambda f: vmap(grad(lambda q, k, v: grad(square(f))(q, k, v).square().sum()))(Q, K, V),
    "autograd of grad": lambda f: _leave_key_to_autograd(lambda k: grad(square(f))(Q, k, V)),
    "autograd of vmap of grad": lambda f: _leave_key_to_autograd(lambda k: vmap(grad(square(f)))(Q, k, V)),
    "grad of vjp": _differentiate_vjp,
    "jvp of vjp": _push_vjp,
    "tangent of the gradient of the output": _pull_back_tangent,
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_derivatives_are_those_of_eager(name):
    result, expected = NESTED[name](ours), NESTED[name](eager)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["grad", "grad of vmap", "hessian", "jacrev of jacrev", "grad of grad by another", "grad of vmap of grad"]
)
def test_nested_derivatives_may_be_compiled(name):
    find = NESTED | {"grad": lambda f: grad(lambda q: square(f)(q, K, V))(Q)}
    torch._dynamo.reset()
    result = torch.compile(lambda: find[name](ours), backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(result, find[name](eager), rtol=1e-9, atol=1e-11)


def test_tensors_that_are_not_recorded_have_no_gradient_in_any_transform():
    def inner(q, key):
        with torch.no_grad():
            held = torch.ops.sqrtdk.forward.default(*flatten(Call(q, key, V, factor=0.5)), False, False, False)[0]
        return (held * q).sum()

    expected = ours(Q, K, V)
    torch.testing.assert_close(grad(inner)(Q, K), expected)
    assert not grad(lambda key: grad(inner)(Q, key).sum())(K).any()


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "grad of vmap", "jacrev"])
def test_transforms_drop_what_the_output_dropped(transform):

    def drop(q, k, v):
        return attention(q, k, v, dropout=0.5).output

    def drop_vmapped(v):
        return vmap(drop, randomness="same")(Q, K, v)

    def pull_ones(q, k, v):
        return vjp(lambda v: drop(q, k, v), v)[1](torch.ones_like(v))[0]

    find = {
        "grad": grad(lambda v: drop(Q, K, v).sum()),
        "vmap of grad": lambda v: vmap(pull_ones, randomness="same")(Q, K, v),
        "grad of vmap": grad(lambda v: drop_vmapped(v).sum()),
        "jacrev": jacrev(lambda v: drop(Q, K, v).sum()),
    }[transform]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        gradient = find(V)
        torch.manual_seed(1)
        output = drop_vmapped(V) if "vmap" in transform else drop(Q, K, V)
    # The output is linear in v: its sum is ⟨v, gradient⟩ only if both dropped the same.
    torch.testing.assert_close((gradient * V).sum(), output.sum(), rtol=1e-10, atol=1e-12)
