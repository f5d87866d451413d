"""Derivatives of `sqrtdk.torch.attention` by torch.func and autograd, one inside the other: none is lost."""

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap

from nested_derivatives import NESTED, K, Q, V, eager, ours
from sqrtdk.operation.call import Call, flatten
from sqrtdk.torch import attention
from torch_cases import ON_THE_BEST_AND_THE_REFERENCE

pytestmark = [
    *ON_THE_BEST_AND_THE_REFERENCE,
    # Forward-mode rules of torch itself are scripted.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]


@pytest.mark.parametrize("name", NESTED)
def test_nested_derivatives_are_those_of_eager(name):
    result, expected = NESTED[name](ours), NESTED[name](eager)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


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
