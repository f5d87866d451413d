"""Dropout of tensors: the kernel drops what blocks of torch drop, and every way to a gradient drops it again."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from sqrtdk import backends
from sqrtdk.operation.call import Call, GradientRequest, Wanted
from sqrtdk.operation.dropout import draw_kept
from sqrtdk.operation.visibility import Band
from sqrtdk.torch import attention, scaled_dot_product_attention
from sqrtdk.torch.engines import tiles
from sqrtdk.torch.engines.blocks import BLOCKS
from sqrtdk.torch.engines.kernel import TENSOR_KERNEL
from torch_cases import DTYPES, draw, draw_like, require_grad, seeded

SEED = torch.tensor(2**60 + 99)


def make(q_shape, k_shape, d_v, dtype=torch.float32, **call):
    q, k, v = draw(0, q_shape, k_shape, d_v, dtype)
    return Call(q, k, v, **{"factor": q_shape[-1] ** -0.5, "dropout": 0.3, "seed": SEED} | call)


def run(engine, call):
    """Output, statistics and weights of a call, and its gradients."""
    plan = backends.plan()
    done = engine.forward(call, Wanted(statistics=True, weights=True, saved=True), plan)
    return done, engine.backward(call, GradientRequest(draw_like(1, done.output)), done, plan)


def assert_alike(ours, theirs, close):
    """Every tensor that both have is the same to a tolerance, relative to the largest number."""
    for name, one, other in zip(ours._fields, ours, theirs, strict=True):
        if one is None or other is None:
            continue
        one, other = one.double(), other.double()
        size = max(1.0, float(other[other.isfinite()].abs().max()))
        torch.testing.assert_close(one, other, rtol=close, atol=close * size, equal_nan=True, msg=f"{name} differs")


RNG = np.random.default_rng(0)
CALLS = {
    "plain": {},
    "causal": {"band": Band(last=5)},
    "window": {"band": Band(-20, 10)},
    "mask": {"mask": torch.from_numpy(RNG.random((3, 1, 70, 150)) < 0.6)},
    "bias": {"mask": torch.from_numpy(RNG.standard_normal((4, 70, 150)))},
    "everything": {
        "band": Band(last=100),
        "mask": torch.from_numpy(RNG.random((70, 150)) < 0.6),
        "softcap": 2.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 3.0]),
        "scale": torch.from_numpy(RNG.random((4, 70)) + 0.1),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("block", [100_000, tiles.BLOCK_ELEMENTS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_drops_what_blocks_drop(native, name, dtype, block, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", block)
    call = make((3, 4, 70, 16), (3, 2, 150, 16), 12, DTYPES[dtype], **CALLS[name])
    close = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-11}[dtype]
    (ours, gradients), (theirs, others) = run(TENSOR_KERNEL, call), run(BLOCKS, call)
    # Which of several logits at the soft cap is the largest is a matter of rounding.
    assert_alike(ours._replace(counts=None), theirs, close)
    assert_alike(gradients, others, close)


@pytest.mark.parametrize("shape", [(2, 4, 1, 16), (5, 16), (2, 3, 2, 9, 16), (0, 4, 3, 16), (2, 4, 0, 16)], ids=str)
def test_any_rank_counts_its_rows_alike(native, shape):
    call = make(shape, (*shape[:-2], 40, 16), 6)
    (ours, gradients), (theirs, others) = run(TENSOR_KERNEL, call), run(BLOCKS, call)
    torch.testing.assert_close(ours.output, theirs.output, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients[:4], others[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_the_seed_is_torchs_and_decides(native):
    q, k, _ = draw(2, (2, 3, 20, 8), (2, 3, 30, 8), 8, torch.float32)
    v = torch.eye(30).expand(2, 3, 30, 30)
    result = seeded(lambda: attention(q, k, v, dropout=0.4, weights=True), 7)()
    assert result.engine == "kernel"
    seed = int(seeded(lambda: torch.randint(2**62, (), dtype=torch.int64), 7)())
    kept = draw_kept(0.4, seed, torch.arange(120).view(2, 3, 20, 1), torch.arange(30))
    assert torch.equal(result.output != 0, kept)
    torch.testing.assert_close(result.output, kept * result.weights / 0.6)


@pytest.mark.parametrize("queries", [3, 9])
def test_gradients_are_those_of_what_was_kept(native, queries):
    """By differences in float64, with a seed that does not change."""
    q, k, v = draw(3, (1, 4, queries, 3), (1, 2, 6, 3), 2, sharpness=1.0)
    scale = torch.full((4, 1), 0.7, dtype=torch.float64)
    sinks = torch.tensor([0.5, -0.5, 0.1, 1.0], dtype=torch.float64)

    def function(q, k, v, scale, sinks):
        result = attention(q, k, v, scale=scale, sinks=sinks, softcap=3.0, causal=True, causal_offset=2, dropout=0.4)
        assert result.engine == "kernel"
        return result.output

    assert gradcheck(seeded(function), require_grad(q, k, v, scale, sinks), atol=1e-6, fast_mode=True)


@pytest.mark.filterwarnings("ignore::sqrtdk.errors.FallbackWarning")
def test_a_gradient_of_the_mask_drops_what_the_kernel_dropped(native):
    """The output is the kernel's; the backward pass, which the kernel does not take, is that of blocks."""
    q, k, v = draw(4, (2, 4, 20, 8), (2, 4, 20, 8), 8)
    mask = torch.zeros(20, 20, dtype=torch.float64)
    results = []
    for wanted in (False, True):
        leaves = [*require_grad(q, k, v), mask.clone().requires_grad_(wanted)]
        result = seeded(lambda leaves=leaves: attention(*leaves[:3], mask=leaves[3], dropout=0.5))()
        results.append((result.output, *torch.autograd.grad(result.output.square().sum(), leaves[:3])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_drops_the_same_again(native, reentrant, dtype):
    gradients = []
    for wrapped in (False, True):
        leaves = require_grad(*draw(5, (2, 4, 20, 16), (2, 4, 20, 16), 16, dtype))

        def function(q, k, v):
            return scaled_dot_product_attention(q * 1.0, k, v, dropout_p=0.3, is_causal=True)

        with torch.random.fork_rng():
            torch.manual_seed(0)
            output = checkpoint(function, *leaves, use_reentrant=reentrant) if wrapped else function(*leaves)
            output.float().square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_threads_change_no_bit(native):
    leaves = require_grad(*draw(6, (2, 4, 100, 16), (2, 4, 150, 16), 16, torch.float32))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            output = seeded(lambda: scaled_dot_product_attention(*leaves, dropout_p=0.1))()
            results.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_the_eager_one(native):
    def step(q, k, v):
        return scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True).square().sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = require_grad(*draw(7, (2, 4, 20, 16), (2, 4, 20, 16), 16, torch.float32))
        loss = seeded(function)(*leaves)
        loss.backward()
        results.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
