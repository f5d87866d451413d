"""Derivatives inside derivatives, by torch.func and autograd, of any function of q, k, v."""

import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from sqrtdk.torch import attention
from torch_cases import draw

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
