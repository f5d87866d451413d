"""`sqrtdk.torch.attention` inside torch: autocast, checkpoint, vmap, meta, threads, modes, memory."""

import concurrent.futures
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from sqrtdk import SqrtdkError, backends, scales
from sqrtdk.torch import attention, scaled_dot_product_attention
from torch_cases import (
    CALLS,
    COUNTS,
    FIELDS,
    ON_THE_BEST_AND_THE_REFERENCE,
    assert_same_bits,
    assert_same_with_gradients,
    draw,
    draw_like,
    require_grad,
    small_tensors,
)

pytestmark = ON_THE_BEST_AND_THE_REFERENCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_explicit_casting(dtype):
    leaves, others = require_grad(*small_tensors(6, torch.float32)), require_grad(*small_tensors(6, torch.float32))
    with torch.autocast("cpu", dtype):
        result = attention(*leaves, causal=True, causal_offset=1)
        dropped_in = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    expected = attention(*(x.to(dtype) for x in others), causal=True, causal_offset=1)
    assert result.output.dtype == dropped_in.dtype == theirs.dtype == dtype
    assert_same_bits(result, expected)
    grad = draw_like(7, result.output)
    for one, other in zip(
        torch.autograd.grad(result.output, leaves, grad),
        torch.autograd.grad(expected.output, others, grad),
        strict=True,
    ):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_autocast_joins_mixed_dtypes_and_leaves_float64_alone():
    q, k, v = small_tensors(8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attention(q.bfloat16(), k, v).output
        wide = attention(*small_tensors(8)).output
        with torch.autocast("cpu", enabled=False):
            off = attention(q, k, v).output
    torch.testing.assert_close(mixed, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).output, rtol=0, atol=0)
    torch.testing.assert_close(wide, attention(*small_tensors(8)).output, rtol=0, atol=0)
    assert off.dtype == torch.float32


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(reentrant, dropout):
    def function(q, k, v, sinks):
        return attention(q * 1.0, k, v, sinks=sinks, softcap=2.0, dropout=dropout).output.tanh()

    sinks = torch.tensor([0.1, -0.4, 1.0, 0.0], dtype=torch.float64)
    gradients = []
    for wrapped in (False, True):
        leaves = require_grad(*small_tensors(9), sinks)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            output = checkpoint(function, *leaves, use_reentrant=reentrant) if wrapped else function(*leaves)
            torch.rand(3)
            output.square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 1), (1, 0, None), (3, -1, 2)], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_vmap_is_a_loop(rank, in_dims):
    lead = ((), (4,), (2, 4))[rank - 2]
    groups = ((), (2,), (2, 2))[rank - 2]
    in_dims = tuple(None if axis is None else max(-rank - 1, min(axis, rank)) for axis in in_dims)
    plain = zip(((*lead, 5, 3), (*groups, 6, 3), (*groups, 6, 2)), in_dims, strict=True)
    shapes = [shape if axis is None else (*shape, 3) for shape, axis in plain]
    rng = np.random.default_rng(10)
    values = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    mapped = [x if axis is None else x.movedim(-1, axis) for x, axis in zip(values, in_dims, strict=True)]

    def function(q, k, v):
        result = attention(q, k, v, weights=True)
        return result.output, result.weights, result.statistics.entropy, result.statistics.visible_keys

    result = torch.func.vmap(function, in_dims=in_dims)(*mapped)
    for at in range(3):
        alone = [x if axis is None else x[..., at] for x, axis in zip(values, in_dims, strict=True)]
        for one, other in zip(result, function(*alone), strict=True):
            torch.testing.assert_close(one[at], other, rtol=1e-12, atol=1e-13)


def test_vmap_over_everything_else():
    q, k, v = small_tensors(11)
    scale, sinks = torch.rand(3, 4, 5).double(), torch.rand(3, 4).double()
    mask = torch.from_numpy(np.random.default_rng(11).random((3, 5, 6)) < 0.7)
    additive = torch.where(mask, 0.5, -torch.inf).double()
    for name, values in (("scale", scale), ("sinks", sinks), ("mask", mask), ("mask", additive)):

        def function(value, name=name):
            return attention(q, k, v, **{name: value}).output

        result = torch.func.vmap(function)(values)
        for at in range(3):
            torch.testing.assert_close(result[at], function(values[at]), rtol=1e-12, atol=1e-13)


def test_vmap_of_policies_works_or_says_that_it_cannot():
    q, k, v = small_tensors(11)
    mask = torch.from_numpy(np.random.default_rng(11).random((2, 5, 6)) < 0.7)
    for policy in ("cosine", "llama4", "log_n"):

        def function(q, k, v, mask, policy=policy):
            return attention(q, k, v, mask=mask, scale=policy).output

        expected = torch.stack([function(q[at], k[at], v[at], mask[at]) for at in range(2)])
        try:
            result = torch.func.vmap(function)(q, k, v, mask)
        except SqrtdkError:
            assert policy == "log_n"
            continue
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


def test_vmap_of_dropout_draws_as_vmap_is_told():
    q = torch.zeros(3, 4, 5, 3, dtype=torch.float64)
    k, v = torch.zeros(4, 6, 3, dtype=torch.float64), torch.rand(4, 6, 2, dtype=torch.float64)

    def function(q):
        return attention(q, k, v, dropout=0.5).output

    with torch.random.fork_rng():
        torch.manual_seed(0)
        same = torch.func.vmap(function, randomness="same")(q)
        different = torch.func.vmap(function, randomness="different")(q)
    assert same.shape == different.shape == (3, 4, 5, 2)
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(function)(q)


def test_per_sample_gradients_and_jacobians():
    q, k, v = small_tensors(12)
    sinks = torch.tensor([0.1, -0.4, 1.0, 0.0], dtype=torch.float64)

    def loss(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, softcap=2.0).output.square().sum()

    result = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=(0, 0, 0, None))(q, k, v, sinks)
    for at in range(2):
        leaves = require_grad(q[at], k[at], v[at], sinks)
        for one, other in zip(result, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(one[at], other, rtol=1e-10, atol=1e-12)

    def output(q):
        return attention(q, k[0], v[0]).output

    jacobian = torch.func.jacrev(output)(q[0])
    expected = torch.autograd.functional.jacobian(output, q[0])
    torch.testing.assert_close(jacobian, expected, rtol=1e-10, atol=1e-12)
    assert jacobian.abs().max() > 1e-2


def test_functional_call_of_a_module_that_attends():
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, q, k, v):
            return attention(q, k, v, sinks=self.sinks).output

    q, k, v = small_tensors(13)
    other = torch.ones(4, dtype=torch.float64)
    result = torch.func.functional_call(Head(), {"sinks": other}, (q, k, v))
    torch.testing.assert_close(result, attention(q, k, v, sinks=other).output, rtol=0, atol=0)


def shapes_of(result):
    shapes = [(tuple(x.shape), x.dtype) for x in (result.output, result.weights) if x is not None]
    return shapes + [(tuple(getattr(result.statistics, name).shape), name in COUNTS) for name in FIELDS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_meta_and_fake_tensors_have_the_shapes_of_real_ones(name, dtype):
    real = small_tensors(14, dtype)
    expected = attention(*real, weights=True, **CALLS[name])
    on_meta = {key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in CALLS[name].items()}
    leaves = tuple(x.to("meta").requires_grad_() for x in real)
    result = attention(*leaves, weights=True, **on_meta)
    assert result.output.is_meta
    assert result.statistics.entropy.is_meta
    assert shapes_of(result) == shapes_of(expected)
    result.output.sum().backward()
    assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in real]
        assert shapes_of(attention(*fakes, weights=True, **CALLS[name])) == shapes_of(expected)


def test_threads_are_torchs_and_do_not_change_a_bit(monkeypatch):
    given = []
    plan = backends.plan()
    if plan.forward is not None:

        def spy(level, threads, *rest):
            given.append(threads)
            return plan.forward(level, threads, *rest)

        monkeypatch.setattr(backends._choice, "plan", plan._replace(forward=spy))
    before = torch.get_num_threads()
    q, k, v = draw(15, (2, 4, 70, 16), (2, 2, 130, 16), 16, torch.float32)
    result = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            result.append(attention(q, k, v))
    finally:
        torch.set_num_threads(before)
    if plan.forward is not None:
        assert given == [1, 2, 3]
        assert_same_bits(result[0], result[1])
        assert_same_bits(result[0], result[2])
    else:
        torch.testing.assert_close(result[0].output, result[1].output)


def test_calls_from_many_threads_at_once():
    leaves = [require_grad(*small_tensors(seed)) for seed in range(8)]

    def work(inputs):
        result = attention(*inputs, softcap=2.0)
        return result.output.detach(), torch.autograd.grad(result.output.square().sum(), inputs)

    alone = [work(inputs) for inputs in leaves]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, leaves * 4))
    for at, (output, gradients) in enumerate(together):
        torch.testing.assert_close(output, alone[at % 8][0], rtol=0, atol=0)
        for one, other in zip(gradients, alone[at % 8][1], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_modes_without_gradients():
    leaves = require_grad(*small_tensors(16))
    plain = attention(*leaves, weights=True)
    with torch.no_grad():
        quiet = attention(*leaves, weights=True)
    with torch.inference_mode():
        inferred = attention(*leaves, weights=True)
        assert inferred.output.is_inference()
        made_inside = attention(*small_tensors(16), weights=True)
    for result in (quiet, inferred, made_inside):
        assert not result.output.requires_grad
        assert not result.weights.requires_grad
        torch.testing.assert_close(result.output.clone(), plain.output.detach(), rtol=0, atol=0)


def test_defaults_of_the_process_do_not_leak_in():
    q, k, v = small_tensors(17, torch.float32)
    call = {"scale": scales.LogN(), "sinks": torch.zeros(4), "sample_rows": 3, "mask": torch.ones(5, 6)}
    expected = attention(q, k, v, **call)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        assert_same_bits(attention(q, k, v, **call), expected)
        with torch.device("meta"):
            assert_same_bits(attention(q, k, v, **call), expected)
            leaves = require_grad(q, k, v)
            attention(*leaves, dropout=0.5, **call).output.sum().backward()
            assert leaves[0].grad.device.type == "cpu"
    finally:
        torch.set_default_dtype(before)


def test_another_default_dtype_changes_no_derivative():
    leaves = require_grad(*small_tensors(17, torch.float32))
    result = []
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = attention(*leaves, dropout=0.5).output
    try:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            first = torch.autograd.grad(attention(*leaves).output.square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
            tangent = torch.func.jvp(lambda q: attention(q, *leaves[1:]).output, leaves[:1], leaves[:1])[1]
            result.append((*second, tangent, *torch.autograd.grad(dropped.sum(), leaves, retain_graph=True)))
    finally:
        torch.set_default_dtype(before)
    for other in result[1:]:
        for one, two in zip(result[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own: it holds another, and operators are given that."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, strides=held.stride())

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(x.held if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))


def test_every_tensor_may_be_one_without_memory():
    q, k, v = small_tensors(18)
    others = {"scale": torch.rand(4, 5).double(), "sinks": torch.rand(4).double(), "mask": torch.rand(5, 6).double()}
    expected = attention(q, k, v, **others).output
    for name, tensor in others.items():
        result = attention(q, k, v, **(others | {name: Wrapper(tensor)})).output
        torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=name)


class Marked(torch.Tensor):
    """A tensor of another class, as libraries that watch or wrap tensors make them."""


def test_subclasses_saved_tensor_hooks_and_profilers_are_served():
    leaves = require_grad(*small_tensors(18))
    plain = attention(*leaves, softcap=2.0)
    marked = attention(*(x.as_subclass(Marked) for x in leaves), softcap=2.0)
    torch.testing.assert_close(marked.output.as_subclass(torch.Tensor), plain.output, rtol=1e-14, atol=1e-15)
    with torch.autograd.graph.save_on_cpu():
        assert_same_with_gradients(attention(*leaves, softcap=2.0), plain, leaves)
    with torch.autograd.profiler.profile() as profile:
        attention(*leaves)
    assert any("sqrtdk::forward" in event.key for event in profile.key_averages())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_deterministic_algorithms_and_anomaly_detection_are_content():
    q, k, v = small_tensors(18)
    k[:, :, 4] = v[:, :, 4] = torch.nan
    mask = torch.ones(6, dtype=torch.bool)
    mask[4] = False
    leaves = require_grad(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly():
            attention(*leaves, mask=mask).output.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)


MEASURE = """
import resource, sys, torch
from sqrtdk import backends
from sqrtdk.torch import attention
backends.use(sys.argv[1])
torch.set_num_threads(1)
kind = sys.argv[2]

def run(length):
    generator = torch.Generator().manual_seed(0)
    if kind == "expanded":
        q = torch.randn(length // 32, 1, 1, 64, generator=generator)
        k, v = (torch.randn(1, 1, 4096, 64, generator=generator).expand(length // 32, 1, 4096, 64) for _ in "kv")
        return attention(q, k, v)
    q, k, v = (torch.randn(1, length, 16, generator=generator).requires_grad_() for _ in "qkv")
    attention(q, k, v, causal=kind == "causal").output.sum().backward()
    assert torch.isfinite(q.grad).all()

run(128)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8192)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "causal", "expanded"])
def test_memory_grows_by_blocks_not_by_all_logits_and_not_by_copies(kind, backend):
    """All logits of 8192² would be 256 MiB in float32, all the keys that `expanded` repeats too."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, backend, kind], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 64


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # shapes are checked once, while tracing
def test_a_trace_records_the_operation_and_not_its_memory():
    class Head(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, statistics=False).output

    q, k, v = (torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(at)) for at in range(3))
    with torch.no_grad():
        traced = torch.jit.trace(Head(), (q, k, v), check_trace=False)
        torch.testing.assert_close(traced(k, v, q), Head()(k, v, q))
        torch.testing.assert_close(traced(q, q, q), Head()(q, q, q))
