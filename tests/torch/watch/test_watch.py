"""The session of a watch: what it counts, whom it follows, what it shows, and that it leaves no trace."""

import contextlib
import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import sqrtdk
from sqrtdk.torch import watch
from sqrtdk.torch.internals import WeakStorage
from sqrtdk.torch.watch import running
from torch_watched import ROWS, TOKENS, ByHand, Fused, Stack, build, hooks_now, make_input, modes_now

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_calls_merge_and_calls_outside_do_not_count():
    model, other, x = build(Stack, ByHand(), Fused()), build(ByHand, seed=1), make_input()
    outside = model(x)
    with watch(model) as seen:
        model(x)
        other(x)
        functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
        model.layers[0](x)
    assert torch.equal(model(x), outside)
    assert {path: summary.rows_seen[0] for path, summary in seen.layers.items()} == {
        "layers.0": 2 * ROWS,
        "layers.1": ROWS,
    }
    assert seen.calls == 2


def rows_of(seen):
    return {layer: int(summary.rows_seen[0]) for layer, summary in seen.layers.items()}


def test_each_call_of_a_module_in_a_forward_pass_is_a_layer():
    shared, x = ByHand(), make_input()
    model = build(Stack, shared)
    with watch(model) as seen:
        model(x)
        model(x)
    assert rows_of(seen) == {"layers.0 (call 0)": 2 * ROWS, "layers.0 (call 1)": 2 * ROWS}
    assert seen.paths == {"layers.0 (call 0)": "layers.0", "layers.0 (call 1)": "layers.0"}
    assert [(one.layer, one.path, one.call) for one in seen.scales] == [
        (f"layers.0 (call {call})", "layers.0", call) for call in (0, 1)
    ]
    assert list(seen.causes) == list(seen.layers)
    # What each call computed, and not the mean of both.
    with watch(shared) as first:
        y = x + shared(x)
    with watch(shared) as second:
        shared(y)
    for call, alone in enumerate((first, second)):
        assert seen.layers[f"layers.0 (call {call})"].max_keys.offsets.sum() == 2 * alone.layers[""].rows_seen.sum()
        np.testing.assert_allclose(
            seen.layers[f"layers.0 (call {call})"]["entropy"].mean, alone.layers[""]["entropy"].mean, rtol=1e-6
        )
    assert not np.allclose(first.layers[""]["entropy"].mean, second.layers[""]["entropy"].mean, rtol=1e-3)


def test_calls_are_counted_within_a_forward_pass():
    model, x = build(Stack, ByHand(), Fused()), make_input()
    with watch(model) as seen:
        for _ in range(3):  # as generation does
            model(x)
            model.layers[0](x)
    assert rows_of(seen) == {"layers.0": 6 * ROWS, "layers.1": 3 * ROWS}
    assert [one.call for one in seen.scales] == [None, None]


def test_a_module_without_attention_calls_or_with_a_failed_one_is_no_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(ByHand)

        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                self.inner(x[..., 0])  # fails at its first product
            return self.inner(x)

    model = Twice()
    with watch(model) as seen:
        model(make_input())
    assert list(seen.layers) == ["inner"]


@pytest.mark.slow
def test_a_loop_is_as_many_layers_as_fit_and_says_so():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(Fused)

        def forward(self, x):
            for _ in range(70):
                x = self.inner(x)
            return x

    model = Loop()
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    rows = rows_of(seen)
    assert len(rows) == 64
    assert rows.pop("inner (call 63)") == 7 * ROWS
    assert set(rows.values()) == {ROWS}
    assert "inner: from call 63 of a forward pass on all its calls are one layer" in repr(seen)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [ByHand, Fused])
def test_a_checkpoint_is_counted_once(make, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(make)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Checkpointed()
    x = make_input().requires_grad_()
    with watch(model) as seen:
        model(x).sum().backward()
    assert {path: int(summary.rows_seen[0]) for path, summary in seen.layers.items()} == {"inner": ROWS}


def test_an_exception_inside_leaves_everything_as_it_was():
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(ByHand)

        def forward(self, x):
            self.inner(x)
            raise KeyboardInterrupt if x.shape[0] == 1 else ValueError("broken")

    model = Breaking()
    before = hooks_now(), modes_now()
    for batch, error in ((2, ValueError), (1, KeyboardInterrupt)):
        with pytest.raises(error), watch(model) as seen:
            model(make_input(batch))
        assert (hooks_now(), modes_now()) == before
    with watch(model) as seen:
        with pytest.raises(ValueError, match="broken"):
            model(make_input())
        model.inner(make_input())
    assert seen.layers["inner"].rows_seen[0] in (ROWS, 2 * ROWS)


def test_nested_watches_see_the_same():
    model, x = build(Stack, ByHand(), Fused()), make_input()
    with watch(model) as outer:
        with watch(model.layers[0]) as inner:
            model(x)
        model(x)
    assert list(inner.layers) == [""]
    assert inner.layers[""].rows_seen[0] == ROWS
    assert {path: int(summary.rows_seen[0]) for path, summary in outer.layers.items()} == {
        "layers.0": 2 * ROWS,
        "layers.1": 2 * ROWS,
    }


def test_threads_count_together():
    model, x = build(Stack, ByHand(), Fused()), make_input()
    with watch(model) as seen:
        threads = [threading.Thread(target=model, args=(x,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {int(summary.rows_seen[0]) for summary in seen.layers.values()} == {4 * ROWS}


def test_wrappers_do_not_show_in_paths():
    model, x = build(Stack, ByHand(), Fused()), make_input()
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    for one in (nn.DataParallel(model), wrapped):
        with watch(one) as seen:
            one(x)
        assert list(seen.layers) == ["layers.0", "layers.1"]


def test_distributed_data_parallel_does_not_show_in_paths():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(build(Stack, ByHand(), Fused()))
        with watch(model) as seen:
            model(make_input()).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert {path: int(summary.rows_seen[0]) for path, summary in seen.layers.items()} == {
        "layers.0": ROWS,
        "layers.1": ROWS,
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_compiled_models_run_eagerly_and_it_says_so(how):
    model, x = build(Stack, Fused(), Fused()), make_input()
    compiled = model
    if how == "wrapper":
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    else:
        model.compile(fullgraph=True, backend="eager")
    expected = compiled(x)
    with watch(compiled) as seen:
        output = compiled(x)
    assert torch.allclose(output, expected, atol=1e-6)
    assert list(seen.layers) == ["layers.0", "layers.1"]
    assert "eagerly" in repr(seen)
    assert torch.equal(compiled(x), expected)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_functions_run_eagerly_and_it_says_so():
    rotate = torch.compile(lambda x: x.roll(1, -1), backend="eager")

    class Rotating(Fused):
        def split(self, x):
            return rotate(super().split(x))

    model, x = build(Rotating), make_input()
    expected, asked = model(x), torch._dynamo.eval_frame._callback_from_stance
    with watch(build(Fused)) as other, watch(model) as seen:
        rotate(x)
        assert seen.notes == []  # nothing of the model
        assert torch.equal(model(x), expected)
        model(x)
    assert (seen.notes, other.notes) == (["compiled regions ran eagerly while watched"], [])
    assert torch._dynamo.eval_frame._callback_from_stance is asked
    with watch(plain := build(Fused)) as seen:
        plain(x)
    assert seen.notes == []


@pytest.mark.parametrize("gradients", [True, False])
def test_scores_and_weights_are_not_kept_longer_than_the_model_keeps_them(gradients):
    class Looking(ByHand):
        def forward(self, x, attention_mask=None):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            scores = q @ k.transpose(-1, -2)
            masked = scores + torch.zeros(TOKENS, TOKENS)
            weights = masked.softmax(-1)
            self.held = [WeakStorage(one) for one in (scores, masked, weights)]
            output = weights @ v
            del scores, masked, weights
            self.gone = [one.is_gone() for one in self.held]
            return output

    model, x = build(Looking), make_input()
    with torch.set_grad_enabled(gradients):
        model(x)
        expected = model.gone
        with watch(model) as seen:
            model(x)
    assert list(seen.layers) == [""]
    assert model.gone == expected
    assert expected == ([True, True, False] if gradients else [True] * 3)


def test_a_copy_made_while_watched_is_like_any_other():
    model = build(ByHand)
    with watch(model):
        twin = copy.deepcopy(model)
    assert torch.equal(twin(make_input()), model(make_input()))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "gpt2"}, "model must be a torch.nn.Module, got str"),
        ({"keep_rows": 0}, "keep_rows must be at least 1, got 0"),
        ({"keep_rows": True}, "keep_rows must be an integer, got True"),
        ({"keep_rows": 1.5}, "keep_rows must be an integer, got 1.5"),
    ],
)
def test_bad_arguments_are_named(arguments, error):
    with pytest.raises(sqrtdk.SqrtdkError, match=error):
        watch(**{"model": nn.Identity(), **arguments})


def test_the_table_is_short():
    model = build(Stack, ByHand(), Fused())
    with watch(model) as seen:
        model(make_input())
    lines = repr(seen).splitlines()
    assert lines[0] == "2 layers, 8 heads, 1 call of the model; padding: unknown"
    assert len(lines) == 2 + 8 + 1
    assert lines[-1] == "effective scale: 0.5"


def test_names_of_layers_are_escaped_in_html():
    model = nn.ModuleDict({"<b>": build(ByHand)})
    with watch(model) as seen:
        model["<b>"](make_input())
    assert "&lt;b&gt;" in seen._repr_html_()
    assert "<b>" not in seen._repr_html_()


def test_a_watch_that_cannot_be_opened_leaves_nothing_behind(nothing_left, monkeypatch):
    model = nn.Linear(2, 2)

    def fail(tell):
        raise RuntimeError("another release of torch")

    monkeypatch.setattr(running, "is_compiler_loaded", lambda: True)
    monkeypatch.setattr(running, "running_eagerly", fail)
    with pytest.raises(RuntimeError, match="another release"), watch(model):
        pass
    assert not running._open


def test_sparse_copies_of_parameters_are_no_attention(nothing_left):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x):
            return torch.sparse.mm(self.weight.to_sparse(), x)

    model = Sparse()
    with watch(model) as seen, torch.no_grad():
        model(torch.ones(3, 2))
    assert not seen.unattributed


def test_rows_to_keep_may_be_counted_by_numpy():
    with watch(nn.Linear(2, 2), keep_rows=np.int64(4)) as seen:
        pass
    assert seen.keep_rows == 4
