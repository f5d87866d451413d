"""Engines of tensors: which one computes, the reference to its last digit, and words where another one steps in."""

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk import backends
from sqrtdk.errors import FallbackWarning
from sqrtdk.torch import attention, scaled_dot_product_attention
from sqrtdk.torch.nn import ScaledAttention
from torch_cases import draw, require_grad, to_array

HAS_KERNEL = backends.current() != "reference"
BEST = "kernel" if HAS_KERNEL else "blocks"


def test_each_call_goes_to_its_engine():
    q, k, v = draw(0, (2, 4, 9, 8), (2, 2, 9, 8), 8, torch.float32)
    assert attention(q, k, v).engine == BEST
    assert attention(q, k, v, weights=True, causal=True).engine == BEST
    assert attention(q, k, v, dropout=0.5).engine == BEST
    assert attention(*require_grad(q, k, v)).engine == BEST
    assert ScaledAttention(8, heads=2, d_k=4).attend(q[0, 0]).engine == BEST
    with torch.autograd.forward_ad.dual_level():
        assert attention(torch.autograd.forward_ad.make_dual(q, q), k, v).engine == "whole"
    assert torch.func.vmap(lambda q: attention(q, k[0], v[0]).output)(q).shape == (2, 4, 9, 8)


@pytest.mark.slow
def test_a_traced_graph_does_not_say():
    q, k, v = draw(1, (2, 4, 9, 8), (2, 4, 9, 8), 8, torch.float32)
    said = []

    def run(q, k, v):
        result = attention(q, k, v)
        said.append(result.engine)
        return result.output

    torch.compile(run, backend="eager")(q, k, v)
    assert said == [None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_reference_computes_tensors_in_float64(dtype):
    q, k, v = draw(2, (2, 4, 30, 8), (2, 2, 40, 8), 8, dtype)
    leaves = require_grad(q, k, v)
    call = {"causal": True, "causal_offset": 3, "softcap": 2.0}
    with backends.use("reference"):
        ours = attention(*leaves, weights=True, **call)
        gradients = torch.autograd.grad(ours.output, leaves, torch.ones_like(ours.output))
        arrays = [to_array(x) for x in (q, k, v)]
        theirs = sqrtdk.attention(*arrays, weights=True, **call)
        slopes = sqrtdk.attention_gradients(*arrays, np.ones_like(theirs.output), **call)
    assert ours.engine == "reference"
    for one, other in (
        (ours.output, theirs.output),
        (ours.weights, theirs.weights),
        *zip(gradients, slopes, strict=False),
    ):
        assert np.array_equal(to_array(one), other)
    assert np.array_equal(ours.statistics.entropy, theirs.statistics.entropy)


def test_output_and_weights_come_from_one_pass():
    q, k, v = draw(3, (2, 4, 70, 16), (2, 4, 130, 16), 8, torch.float32)
    result = attention(q, k, v, weights=True)
    assert torch.equal(result.output, attention(q, k, v).output)
    torch.testing.assert_close(result.weights @ v, result.output, rtol=0, atol=2e-6)


REFUSED = {
    "a mask's gradient": (
        lambda q, k, v: attention(q, k, v, mask=torch.zeros(9, requires_grad=True)).output.sum().backward(),
        r"no gradient of masks",
    ),
    "second derivatives": (
        lambda q, k, v: torch.autograd.functional.hessian(lambda x: attention(x, k, v).output.square().sum(), q),
        r"operations are not torch's",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_engine_that_was_asked_for_and_cannot_says_why(name):
    run, reason = REFUSED[name]
    q, k, v = draw(4, (2, 9, 4), (2, 9, 4), 4, torch.float64)
    run(q, k, v)  # nobody asked: nothing is said, and the test configuration turns warnings into errors
    level = backends.current()
    if name != "a mask's gradient" or HAS_KERNEL:
        with backends.use(level), pytest.warns(FallbackWarning, match=rf"backend '{level}' was asked for .*{reason}"):
            run(q, k, v)


def test_the_drop_in_and_the_layer_pass_through_the_same_choice():
    q, k, v = draw(5, (2, 4, 9, 8), (2, 4, 9, 8), 8, torch.float32)
    with backends.use("reference"):
        exact = scaled_dot_product_attention(q, k, v)
        assert torch.equal(exact, attention(q, k, v).output)
    assert not torch.equal(exact, scaled_dot_product_attention(q, k, v)) or not HAS_KERNEL
