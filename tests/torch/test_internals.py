"""Every private name of torch that sqrtdk relies on does on this torch what it is relied on for."""

import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from sqrtdk.torch import internals


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_calls_are_unobserved_by_default():
    assert internals.is_unobserved()
    assert not internals.is_forward_mode()
    assert not internals.is_transformed()


def test_every_observer_is_noticed():
    watchers = {
        "mode": Passing(),
        "autocast": torch.autocast("cpu"),
        "profiler": torch.profiler.profile(),
        "tangents": forward_ad.dual_level(),
    }
    for name, watcher in watchers.items():
        with watcher:
            assert not internals.is_unobserved(), name
        assert internals.is_unobserved(), name
    seen = []
    torch.func.vmap(lambda x: seen.append((internals.is_unobserved(), internals.is_transformed())) or x)(torch.ones(2))
    assert seen == [(False, True)]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_tracers_are_noticed():
    seen = []
    torch.jit.trace(lambda x: seen.append(internals.is_unobserved()) or x + 1, torch.ones(2), check_trace=False)
    assert seen == [False]
    compiled = torch.compile(lambda x: x + (1 if internals.is_unobserved() else 2), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 2


def test_tangents_are_noticed_and_left_out():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert internals.is_forward_mode()
        assert forward_ad.unpack_dual(2 * x).tangent is not None
        with internals.without_derivatives():
            assert forward_ad.unpack_dual(2 * x).tangent is None


def test_levels_that_follow_a_tensor():
    leaf = torch.ones(2, requires_grad=True)
    assert internals.levels_that_follow((None, torch.ones(2))) == (set(), False)
    assert internals.levels_that_follow((leaf,)) == (set(), True)
    seen = []
    torch.func.grad(lambda x: seen.append(internals.levels_that_follow((x,))) or x.sum())(torch.ones(2))
    torch.func.grad(torch.func.grad(lambda x: seen.append(internals.levels_that_follow((x,))) or x))(torch.tensor(1.0))
    assert [(len(transforms), outer) for transforms, outer in seen] == [(1, False), (2, False)]


def test_the_plain_apply_records_as_apply_does():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = 2

        @staticmethod
        def backward(ctx, grad):
            return ctx.factor * grad

    x = torch.ones(3, requires_grad=True)
    internals.plain_apply(Double)(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_mode_leaves_the_stack_from_below_others():
    one, two, three = Passing(), Passing(), Passing()
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    with one, two, three:
        internals.leave_mode(two)
        assert stack() == [one, three]
        internals.leave_mode(two)
        assert stack() == [one, three]
        torch.utils._python_dispatch._push_mode(two)
    assert stack() == []


def test_modes_of_threads_that_overlap_leave_no_flag():
    class Own(internals.DispatchMode):
        pass

    def enter_second():
        second.__enter__()
        entered.set()
        assert left.wait(20)
        second.__exit__(None, None, None)

    second, entered, left = Own(), threading.Event(), threading.Event()
    thread = threading.Thread(target=enter_second)
    with Own():
        thread.start()
        assert entered.wait(20)
    left.set()
    thread.join()
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_calls_of_modules_are_seen_once_whichever_way_they_come():
    seen = []

    def around(module, call, args, kwargs):
        seen.append(type(module).__name__)
        return call(module, *args, **kwargs)

    calls = internals.ModuleCalls(around)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    held = model.__call__  # as the wrapper of a compiled model does
    torchs = torch.nn.Module.__call__, torch.nn.Module._call_impl
    calls.install(True)
    calls.install(True)
    model(torch.ones(2))
    held(torch.ones(2))
    calls.remove()
    model(torch.ones(2))
    assert seen == 2 * ["Sequential", "Linear", "ReLU"]
    assert (torch.nn.Module.__call__, torch.nn.Module._call_impl) == torchs
    assert [tuple(tensor.shape) for tensor in internals.own_tensors(torch.nn.BatchNorm1d(3))] == [(3,)] * 4 + [()]


def test_tensors_without_numbers_are_recognised():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert internals.has_numbers(torch.ones(2))
    assert not internals.has_numbers(torch.ones(2, device="meta"))
    with FakeTensorMode():
        assert not internals.has_numbers(torch.ones(2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_memory_of_nested_tensors_is_that_of_their_values():
    sequences = [torch.ones(2, 4), torch.ones(3, 4)]
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor(sequences, layout=layout)
        address = internals.storage_address(nested)
        assert (
            address == internals.storage_address(nested.transpose(1, 2)) == internals.storage_address(nested.values())
        )
        weak = internals.WeakStorage(nested)
        assert weak.address == address
        assert not weak.is_gone()
        del nested
        assert weak.is_gone()


def test_a_weak_reference_keeps_the_address_and_not_the_memory():
    x = torch.ones(3)
    one, two = internals.WeakStorage(x), internals.WeakStorage(x[1:])
    assert one == two
    assert hash(one) == one.address == internals.storage_address(x)
    del two
    assert not one.is_gone()
    del x
    assert one.is_gone()
    others = [torch.ones(3) for _ in range(100)]
    assert one.address not in map(internals.storage_address, others)


def test_a_mode_is_taken_off_only_if_nothing_else_observes():
    mode, other = internals.DispatchMode(), internals.DispatchMode()
    assert not internals.take_off(mode)
    with mode:
        assert internals.take_off(mode)
        assert not internals._count_dispatch_modes()
        internals.put_back(mode)
        with other:
            assert not internals.take_off(mode)
            assert not internals.take_off(other)
        with torch.autocast("cpu", torch.bfloat16):
            assert not internals.take_off(mode)
        assert internals._count_dispatch_modes() == 1


@pytest.mark.slow
def test_functions_of_flex_attention_are_asked_at_every_place():
    slopes, scores = torch.tensor([1.0, 2.0]), torch.zeros(1, 2, 3, 3)
    given = internals.map_places(lambda s, b, h, i, j: s + slopes[h] * j, (1, 2, 3, 3), scores.device, scores, ())
    assert torch.equal(given, (slopes[:, None, None] * torch.arange(3.0)).expand(2, 3, 3)[None])
    visible = internals.map_places(lambda b, h, i, j: i >= j, (1, 1, 3, 3), scores.device, None, ())
    assert torch.equal(visible[0, 0], torch.ones(3, 3, dtype=torch.bool).tril())


def test_the_gradient_of_a_softmax():
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = logits.softmax(-1)
    slope = torch.arange(15.0, dtype=torch.float64).view(3, 5)
    (expected,) = torch.autograd.grad(weights, logits, slope)
    torch.testing.assert_close(internals.softmax_gradient(slope, weights.detach()), expected)


def test_arguments_of_an_operator_have_names():
    assert internals.name_arguments(torch.ops.aten.bmm.default) == ("self", "mat2")


def test_compiled_modules_are_known_and_reported_when_they_run_eagerly():
    linear, told = torch.nn.Linear(2, 2), []
    compiled = torch.compile(linear, backend="eager")
    assert internals.is_compiler_loaded()
    assert (internals.is_compiled(linear), internals.is_compiled(compiled)) == (False, True)
    assert (internals.compiled_from(linear), internals.compiled_from(compiled)) == (None, linear)
    assert compiled._orig_mod is linear
    assert "_orig_mod" in internals.WRAPPERS
    with internals.running_eagerly(lambda: told.append(1)), torch.no_grad():
        linear(torch.ones(2))
        assert told == []
        compiled(torch.ones(2))
    assert told
    linear.compile(backend="eager")
    assert internals.is_compiled(linear)


def test_the_local_part_of_a_tensor_of_a_mesh(tmp_path):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    plain = torch.arange(6.0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    try:
        spread = distribute_tensor(plain, init_device_mesh("cpu", (1,)), [Replicate()])
        parts = internals.local_part((spread, [torch.nn.Parameter(spread), plain], 3))
    finally:
        torch.distributed.destroy_process_group()
    assert type(parts[0]) is type(parts[1][0]) is torch.Tensor
    assert parts[0].tolist() == parts[1][0].tolist() == plain.tolist()
    assert parts[1][1] is plain
    assert parts[2] == 3
    assert internals.local_part(AsyncCollectiveTensor(plain)) is plain


def test_changes_in_place_are_counted():
    parameter = torch.nn.Parameter(torch.ones(2))
    before = internals.count_changes(parameter)
    with torch.no_grad():
        parameter.mul_(2.0)
    assert internals.count_changes(parameter) == before + 1
