"""Recording of calls: plain calls the short way, others the long way, both with the same gradients."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from sqrtdk import backends
from sqrtdk.torch import attention, autograd, scaled_dot_product_attention
from sqrtdk.torch.internals import DispatchMode, operator_name
from torch_cases import draw, require_grad

SHAPES = {
    "tiny": ((1, 2, 4, 16), (1, 2, 4, 16)),
    "long": ((2, 3, 37, 24), (2, 3, 37, 24)),
    "one query": ((1, 8, 1, 64), (1, 8, 64, 64)),
    "one head": ((5, 8), (5, 8)),
}


def draw_leaves(name, dtype=torch.float32):
    query, key = SHAPES[name]
    q, k, v = draw(3, query, key, key[-1], dtype)
    return require_grad(q, k, v)


class Watched(DispatchMode):
    """Told of every operator, as `sqrtdk.torch.watch` is: with it a call goes the long way."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(operator_name(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_both_ways_give_the_same_bits(name, dtype):
    leaves = draw_leaves(name, dtype)
    results = []
    for context in (torch.enable_grad(), Watched()):
        with context:
            result = attention(*leaves)
        grad = torch.randn(result.output.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        results.append((result.output, result.statistics.entropy, *torch.autograd.grad(result.output, leaves, grad)))
    for short, long in zip(*results, strict=True):
        assert torch.equal(short, long)
    assert torch.equal(results[0][0], attention(*(x.detach() for x in leaves)).output)


def test_the_plain_call_is_recorded_the_short_way():
    leaves = draw_leaves("tiny")
    short = (scaled_dot_product_attention(*leaves), attention(*leaves, causal=True).output)
    long = (attention(*leaves, softcap=3.0).output, attention(*leaves, weights=True).output)
    assert {type(x.grad_fn).__name__ for x in short} == {f"{autograd._Plain.__name__}Backward"}
    assert {type(x.grad_fn).__name__ for x in long} == {"DifferentiableBackward"}


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradients_of_some(needed):
    leaves = [x.detach().requires_grad_(i in needed) for i, x in enumerate(draw_leaves("long"))]
    scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
    assert [x.grad is not None for x in leaves] == [i in needed for i in range(3)]


def test_a_backward_pass_may_be_watched_where_the_forward_was_not():
    leaves = draw_leaves("long")
    expected = torch.autograd.grad(scaled_dot_product_attention(*leaves).square().sum(), leaves)
    loss = scaled_dot_product_attention(*leaves).square().sum()
    with Watched() as seen:
        gradients = torch.autograd.grad(loss, leaves)
    assert "sqrtdk::backward" in seen.names
    for ours, other in zip(gradients, expected, strict=True):
        assert torch.equal(ours, other)


def test_tensors_may_be_put_away_between_the_passes():
    """Unpacked, they lie at other addresses than they did in the forward pass."""
    leaves = draw_leaves("long")
    expected = torch.autograd.grad(scaled_dot_product_attention(*leaves).square().sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        loss = scaled_dot_product_attention(*leaves).square().sum()
    for ours, other in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert torch.equal(ours, other)


def test_a_backend_without_saved_numbers_may_record_what_another_differentiates():
    leaves = draw_leaves("long")
    expected = torch.autograd.grad(scaled_dot_product_attention(*leaves).square().sum(), leaves)
    with backends.use("reference"), Watched():
        loss = scaled_dot_product_attention(*leaves).square().sum()
    for ours, other in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-5)


def test_tensors_changed_in_place_are_refused():
    q, k, v = draw_leaves("tiny")
    k = k * 1.0
    output = scaled_dot_product_attention(q, k, v)
    k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_graph_is_freed_with_the_output():
    leaves = draw_leaves("tiny")
    gc.disable()
    try:
        output = scaled_dot_product_attention(*leaves)
        there = weakref.ref(output)
        del output
        assert there() is None
    finally:
        gc.enable()


def test_second_derivatives():
    leaves = require_grad(*draw(4, (1, 1, 3, 2), (1, 1, 3, 2), 2, torch.float64))
    assert torch.autograd.gradgradcheck(scaled_dot_product_attention, leaves)


FIRST_CALL = """
import torch, sqrtdk.torch
q = torch.randn(1, 2, 8, 16, requires_grad=%s)
compiled = torch.compile(lambda q: %s, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("recorded", "call"),
    [(True, "sqrtdk.torch.attention(q, q, q).output"), (False, "sqrtdk.torch.scaled_dot_product_attention(q, q, q)")],
)
def test_the_first_call_of_a_process_may_be_compiled(recorded, call):
    command = [sys.executable, "-c", FIRST_CALL % (recorded, call)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
