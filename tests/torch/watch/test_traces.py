"""Traces of a watch: none on torch's stack of modes, none on modules, and memory that does not grow with calls."""

import copy
import gc
import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sqrtdk import SqrtdkError, errors
from sqrtdk.errors import SqrtdkWarning
from sqrtdk.torch import Monitor, watch
from sqrtdk.torch.watch.recognise import parts, recogniser
from torch_watched import ROWS, ByHand, Fused, Stack, build, hooks_now, make_input, modes_now

pytestmark = pytest.mark.usefixtures("nothing_left")
X = make_input()


def rows_of(seen):
    return {layer: int(summary.rows_seen[0]) for layer, summary in seen.layers.items()}


def assert_nothing_looks(before):
    """Neither modes nor hooks are left, and an operation of anybody else is seen by nobody."""
    assert (modes_now(), hooks_now()) == (0, before)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    seen = []

    class Last(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(modes_now())
            return function(*args, **(kwargs or {}))

    with Last():
        build(Fused, seed=3)(X)
    assert set(seen) == {0}  # inside its own call a mode is off the stack


def test_a_watch_inside_a_watch_of_the_same_model():
    before = hooks_now()
    model = build(Stack, ByHand(), Fused())
    with watch(model) as outer:
        with watch(model) as inner:
            model(X)
        model(X)
    assert rows_of(inner) == {"layers.0": ROWS, "layers.1": ROWS}
    assert rows_of(outer) == {"layers.0": 2 * ROWS, "layers.1": 2 * ROWS}
    assert_nothing_looks(before)


def test_watches_end_in_any_order():
    before = hooks_now()
    model = build(Stack, ByHand(), Fused())
    first, second = watch(model), watch(model)
    one, other = first.__enter__(), second.__enter__()
    model(X)
    first.__exit__(None, None, None)
    model(X)
    second.__exit__(None, None, None)
    assert (rows_of(one)["layers.0"], rows_of(other)["layers.0"]) == (ROWS, 2 * ROWS)
    assert_nothing_looks(before)


def test_a_watch_that_ends_while_its_model_runs_leaves_the_modes_above_it():
    before = hooks_now()
    seen = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Ending(nn.Module):
        def forward(self, x):
            with Counting():
                watching.__exit__(None, None, None)
                seen.clear()
                x = x + 1
            assert modes_now() == 0
            return x

    model = Ending()
    watching = watch(model)
    watching.__enter__()
    model(X)
    assert len(seen) == 1
    assert_nothing_looks(before)


def test_a_watch_that_ends_in_another_thread_leaves_that_thread_when_its_call_ends():
    inside, ended, modes = threading.Event(), threading.Event(), []

    class Waiting(nn.Module):
        def forward(self, x):
            inside.set()
            assert ended.wait(20)
            return x + 1

    model = Waiting()

    def run():
        model(X)
        modes.append(modes_now())

    with watch(model):
        thread = threading.Thread(target=run)
        thread.start()
        assert inside.wait(20)
    ended.set()
    thread.join()
    assert modes == [0]


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner = build(ByHand)
        self.error = error

    def forward(self, x):
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), SystemExit()])
def test_a_step_that_fails_leaves_nothing_behind_though_nobody_closes_the_monitor(error):
    before, looks = hooks_now(), []
    model = Failing(error)
    monitor = Monitor(model, to=lambda step, entry: looks.append(entry["layers"]), every=1)
    with pytest.raises(type(error)):
        model(X)
    assert_nothing_looks(before)
    model.error = None
    monitor.step()  # the look that failed, with what was seen of it
    model(X)
    monitor.step()
    assert list(looks[1]) == ["inner"]
    monitor.close()


def test_a_second_monitor_closes_the_first_and_says_so(tmp_path):
    before = hooks_now()
    model, file = build(Stack, ByHand(), Fused()).train(), tmp_path / "heads.jsonl"
    first = Monitor(model, every=1, to=file)
    model(X)
    with pytest.warns(SqrtdkWarning, match="another Monitor of this Stack was open: it is closed"):
        second = Monitor(nn.DataParallel(model), every=1, to=file)
    model(X)
    second.step()
    with pytest.raises(SqrtdkError, match="after close"):
        first.step()
    second.close()
    first.close()
    assert len(file.read_text().splitlines()) == 1
    assert_nothing_looks(before)
    Monitor(model, every=1, to=file).close()  # after close() there is nothing to replace


@pytest.mark.slow
def test_a_watch_that_is_dropped_closes():
    before, model = hooks_now(), build(Stack, ByHand(), Fused())
    watching = watch(model)
    seen = watching.__enter__()
    model(X)
    assert hooks_now() != before
    del watching
    gc.collect()
    assert_nothing_looks(before)
    model(X)
    assert rows_of(seen) == {"layers.0": ROWS, "layers.1": ROWS}


def test_results_can_be_copied_before_they_are_read():
    model = build(Stack, ByHand())
    with watch(model, keep_rows=2) as seen:
        model(X)
    copies = copy.deepcopy(seen), pickle.loads(pickle.dumps(seen))
    for one in copies:
        assert one.layers == seen.layers
        assert repr(one) == repr(seen)
        assert [row.scores.tolist() for row in one.rows["layers.0 (call 1)"]] == [
            row.scores.tolist() for row in seen.rows["layers.0 (call 1)"]
        ]


@pytest.mark.parametrize(
    "compute",
    [
        lambda q, k, v: (q @ k.transpose(-1, -2) / 0.0).softmax(-1) @ v,
        lambda q, k, v: (q @ k.transpose(-1, -2) / torch.zeros(())).softmax(-1) @ v,
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=torch.inf),
    ],
    ids=["a number", "a tensor", "fused"],
)
def test_a_division_of_the_scores_by_zero_is_the_models_own_affair(compute):
    class Own(ByHand):
        def forward(self, x, attention_mask=None):
            return compute(*(self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj)))

    model = build(Own)
    expected = model(X)
    with watch(model) as seen:
        output = model(X)
    assert torch.equal(output.isnan(), expected.isnan())
    assert seen.unattributed == [("", "its scale must be finite, got inf", 1)]


@pytest.mark.parametrize(
    ("error", "words"), [(ValueError(), "ValueError"), (UserWarning("so\nfar"), "UserWarning: so")], ids=repr
)
def test_a_fault_of_ours_does_not_end_the_model(monkeypatch, error, words):
    def fail(*args):
        raise error

    monkeypatch.setitem(recogniser.HANDLERS, "aten::bmm", (fail, "bmm"))
    model = build(ByHand)
    expected = f"aten::bmm could not be followed: {words}"
    with monkeypatch.context() as patch:
        patch.setattr(errors, "faults_are_raised", False)
        with watch(model) as seen:
            model(X)
    assert expected in {one.reason for one in seen.unattributed}
    with pytest.raises(type(error)), watch(model):  # as in all other tests
        model(X)


def test_a_fault_of_ours_in_the_end_of_a_module_does_not_end_the_model(monkeypatch):
    monkeypatch.setattr(errors, "faults_are_raised", False)
    monkeypatch.setattr(parts.OpenCalls, "close", lambda *given: {}["call"])
    model = build(ByHand)
    with watch(model) as seen:
        model(X)
    assert {one.reason for one in seen.unattributed} == {
        "attention in parts could not be put together: KeyError: 'call'"
    }


def test_a_model_without_numbers_is_refused():
    with torch.device("meta"):
        meta = ByHand()
    with pytest.raises(SqrtdkError, match=r"model must have parameters with numbers, got tensors that are on the devi"):
        watch(meta)
    with FakeTensorMode():
        fake = ByHand()
    with pytest.raises(SqrtdkError, match=r"got tensors that are fake \(q_proj.weight and all others\)"):
        watch(fake)
    with watch(nn.Identity()):
        pass


def resident_megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc")
def test_memory_does_not_grow_with_calls():
    layer = nn.TransformerEncoderLayer(32, 16, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.randn(4, 64, 32)
    with torch.no_grad(), watch(model) as seen:
        for _ in range(200):  # what is worked on together takes its space once
            model(x)
        before = resident_megabytes()
        for _ in range(800):
            model(x)
        grown = resident_megabytes() - before
    # 16 heads of 256 rows of 104 bytes: held, they were 340 MB.
    assert grown < 120
    assert rows_of(seen) == {"layers.0.self_attn": 256_000}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc")
def test_memory_does_not_grow_with_the_rows_of_many_layers():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            one = build(Fused)
            self.layers = nn.ModuleList(copy.copy(one) for _ in range(1000))

        def forward(self, x, attention_mask):
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Deep(), make_input(batch=4, tokens=160)
    with torch.no_grad():
        with watch(model.layers[0]):
            model(x, attention_mask=torch.ones(4, 160))
        before = resident_megabytes()
        with watch(model) as seen:
            model(x, attention_mask=torch.ones(4, 160))
        layers = seen.layers
        grown = resident_megabytes() - before
    # 4 heads of 640 rows of 104 bytes in each of 1000 layers: held, they were 266 MB.
    assert grown < 180
    assert len(layers) == 1000
    assert {int(summary.rows_seen[0]) for summary in layers.values()} == {640}
    assert seen.padding == "attention mask"
