"""`sqrtdk.torch.attention` as torch's tracers see it: the operators under opcheck, torch.compile without a break."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sqrtdk.torch import attention, scaled_dot_product_attention
from sqrtdk.torch.scales import LearnableScale
from torch_cases import (
    CALLS,
    ON_THE_BEST_AND_THE_REFERENCE,
    assert_same_with_gradients,
    everything,
    require_grad,
    small_tensors,
)

pytestmark = [
    pytest.mark.slow,
    *ON_THE_BEST_AND_THE_REFERENCE,
    # torch.compile itself makes the object that it warns of.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _forget_compilations():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recorder(TorchDispatchMode):
    """Remembers every operator of ours and the arguments it got."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "sqrtdk":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def recorded(name, *, gradients, **extra):
    """The operators that a call of attention, and its backward pass, really run."""
    leaves = require_grad(*small_tensors()) if gradients else small_tensors()
    with Recorder() as recorder:
        result = attention(*leaves, **CALLS[name], **extra)
        if gradients:
            weighed = 0.0 if result.weights is None else result.weights.square().sum()
            (result.output.sum() + weighed).backward()
    return recorder.calls


@pytest.mark.parametrize(
    ("name", "extra"),
    [(name, {}) for name in CALLS]
    + [("everything", extra) for extra in ({"weights": True}, {"statistics": False}, {"dropout": 0.5})],
    ids=str,
)
def test_every_operator_passes_opcheck(name, extra):
    calls = recorded(name, gradients=True, **extra)
    assert {function.name().split("::")[0] for function, _, _ in calls} == {"sqrtdk"}
    assert len({function for function, _, _ in calls}) >= 2
    for function, args, kwargs in calls:
        # The gradient is registered outside the operator: it is given what needs none.
        plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
        torch.library.opcheck(function, plain, kwargs)


def test_a_dispatch_mode_sees_one_operator_and_no_l_by_s_product():
    seen = recorded("plain", gradients=False)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("plain", False), ("everything", True), ("sampled", False)]
    + [pytest.param(name, True, marks=pytest.mark.long) for name in CALLS if name != "everything"],
)
def test_compiled_without_a_break_forward_and_backward(name, dynamic):
    def function(q, k, v):
        return attention(q, k, v, **CALLS[name])

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    leaves, others = require_grad(*small_tensors(1)), require_grad(*small_tensors(1))
    assert_same_with_gradients(compiled(*leaves), function(*others), leaves, others)
    with torch.no_grad():
        result, meant = compiled(*leaves), function(*leaves)
    torch.testing.assert_close(result.output, meant.output, rtol=1e-12, atol=1e-13)


def test_compiled_scale_sinks_and_bias_have_gradients():
    names = ("scale", "sinks", "mask")
    rest = {name: value for name, value in everything().items() if name not in names}

    def function(q, k, v, scale, sinks, mask):
        return attention(q, k, v, scale=scale.exp(), sinks=sinks, mask=mask, weights=True, **rest)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = require_grad(*small_tensors(2), *(everything()[name] for name in names))
    others = require_grad(*leaves)
    assert_same_with_gradients(compiled(*leaves), function(*others), leaves, others)


class ByQuery(LearnableScale):
    def __init__(self):
        super().__init__()
        self.direction = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))

    def factor(self, context):
        return torch.exp(context.query @ self.direction) * torch.log1p(context.visible_keys.double())


def test_compiled_learnable_scales_and_the_drop_in():
    module = ByQuery()
    leaves = (*require_grad(*small_tensors(3)), module.direction)

    def learned(q, k, v):
        return attention(q, k, v, scale=module, causal=True, causal_offset=1)

    assert_same_with_gradients(
        torch.compile(learned, fullgraph=True, backend="aot_eager")(*leaves[:3]), learned(*leaves[:3]), leaves
    )

    def drop_in(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    result = torch.compile(drop_in, fullgraph=True, backend="aot_eager")(*leaves[:3])
    torch.testing.assert_close(result, drop_in(*leaves[:3]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dynamic", "more"), [(True, 0), (None, 1)])
def test_other_lengths_do_not_compile_again_and_again(dynamic, more):
    from torch._dynamo.testing import CompileCounterWithBackend  # here: it takes seconds

    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k, v):
        return attention(q, k, v, causal=True, causal_offset=k.shape[-2] - q.shape[-2])

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    compiled(*small_tensors(4))
    at_first = counter.frame_count
    assert at_first > 0
    for queries, keys in ((7, 9), (11, 13), (3, 17)):
        q, k, v = small_tensors(4, queries=queries, keys=keys)
        torch.testing.assert_close(compiled(q, k, v).output, function(q, k, v).output, rtol=1e-12, atol=1e-13)
    # With dynamic=None the second shape is the one that shows which sizes vary; a backend may be called twice for it.
    assert counter.frame_count <= at_first * (1 + more)


def test_compiled_dropout_draws_anew_and_its_gradient_drops_the_same():
    q, k, _ = small_tensors(4)
    v = torch.eye(6, dtype=torch.float64).expand(2, 2, 6, 6).clone().requires_grad_()

    def function(q, k, v):
        return attention(q, k, v, dropout=0.5, weights=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = compiled(q, k, v), compiled(q, k, v)
    ratio = first.output.detach() / first.weights.detach()
    assert bool(((ratio.abs() < 1e-9) | ((ratio - 2.0).abs() < 1e-9)).all())
    assert 0.3 < float((ratio > 1).double().mean()) < 0.7
    assert not torch.equal(first.output, second.output)
    (result,) = torch.autograd.grad(first.output.sum(), v)
    dropped = first.output.detach().unflatten(1, (2, 2)).sum((2, 3))
    torch.testing.assert_close(result, dropped[..., None].expand_as(result), rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_by_inductor():
    def function(q, k, v):
        return attention(torch.sin(q), k, v, causal=True, causal_offset=1)

    leaves, others = require_grad(*small_tensors(5)), require_grad(*small_tensors(5))
    assert_same_with_gradients(torch.compile(function, fullgraph=True)(*leaves), function(*others), leaves, others)


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.eye(3, dtype=torch.float64))
        self.log_scale = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.float64))

    def forward(self, q, k, v):
        result = attention(q @ self.mix, k, v, scale=self.log_scale.exp())
        return result.output, result.statistics.entropy


def test_exported_programs_keep_their_gradients():
    module, tensors = Attending(), small_tensors(6)
    exported = torch.export.export(module, tensors).module()
    others = small_tensors(7)
    for one, other in zip(exported(*others), module(*others), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    for program in (exported, module):
        program(*others)[0].square().sum().backward()
    for name, own in module.named_parameters():
        torch.testing.assert_close(exported.get_parameter(name).grad, own.grad, rtol=1e-10, atol=1e-12)
