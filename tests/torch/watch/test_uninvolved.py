"""Modules without part in attention are not followed in later calls, with the results of full following."""

import copy
import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from sqrtdk.torch.internals import DispatchMode
from sqrtdk.torch.watch.uninvolved import WHOLE_CALLS, recall_uninvolved
from torch_watched import count_followed

HEADS, D_K, WIDTH = 2, 8, 16


def by_hand(q, k, v, scale):
    return torch.softmax(q @ k.mT * scale, dim=-1) @ v


class Mlp(nn.Module):
    """Feed-forward layer that may begin to attend."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.attend = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), None

    def forward(self, x):
        if self.attend is not None:
            x = x + self.attend(x[:, None], x[:, None], x[:, None])[:, 0]
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Attention with norms of q and k in modules, and a scale that can be changed."""

    def __init__(self, is_fused):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.after = nn.Sequential(nn.Identity(), nn.Dropout(0.0))
        self.out, self.scale, self.is_fused = Mlp(), D_K**-0.5, is_fused

    def forward(self, x, y):
        q = self.after(self.q(x)) * self.scale
        q, k, v = (one.unflatten(-1, (HEADS, D_K)).transpose(1, 2) for one in (q, self.k(y), self.v(y)))
        if self.is_fused:
            output = functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:
            output = by_hand(q, k, v, 1.0)
        return self.out(output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Queries and keys come from two norms of one sequence, so only the sources show that it is one."""

    def __init__(self, is_fused):
        super().__init__()
        self.first, self.second, self.third = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention, self.mlp = Attention(is_fused), Mlp()

    def forward(self, x):
        x = x + self.attention(self.first(x), self.second(x))
        return x + self.mlp(self.third(x))


def make_model(is_fused, layers=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(is_fused) for _ in range(layers)), nn.LayerNorm(WIDTH))


def list_uninvolved(model):
    names = {module: name for name, module in model.named_modules()}
    return sorted(names[module] for module in recall_uninvolved(model).modules)


def tell(seen):
    """Return everything that a watch says, with the numbers of its summaries."""
    numbers = {
        name: [(getattr(summary[one], part).tolist()) for one in ("entropy", "max_logit") for part in ("mean", "m2")]
        for name, summary in seen.layers.items()
    }
    heads = {path: seen.heads_of(path) for path in seen.paths.values()}
    columns = {
        path: found if isinstance(found, str) else [[[one.key for one in part] for part in head] for head in found]
        for path, found in heads.items()
    }
    causes = {name: repr(split) for name, split in seen.causes.items()}
    offsets = {name: repr(summary.max_keys) for name, summary in seen.layers.items()}
    return numbers, columns, causes, offsets, seen.scales, seen.unattributed, seen.notes, seen.padding


def run_watched(model, x):
    with watch(model) as seen:
        output = model(x)
    return seen, output


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_later_calls_give_the_results_of_full_following(is_fused, has_gradients, monkeypatch):
    model, x = make_model(is_fused), torch.randn(2, 7, WIDTH)
    operations = count_followed(monkeypatch)
    with torch.set_grad_enabled(has_gradients):
        expected = model(x)
        full, _ = run_watched(model, x)
        before = len(operations)
        spared, output = run_watched(model, x)
    assert torch.equal(output, expected)
    assert tell(spared) == tell(full)
    assert [round(record.effective, 6) for record in full.scales] == [round(D_K**-0.5, 6)] * 2
    assert np.isfinite(full.layers["1.attention"].max_keys.share_sum).all()
    # Three norms and two activations of each block, and the last norm. Linear layers are no operations in either.
    assert before - (len(operations) - before) == 2 * 5 + 1


def test_modules_before_the_projections_and_after_the_attention_are_found():
    model = make_model(False)
    run_watched(model, torch.randn(2, 7, WIDTH))
    inside = ["attention.out", "first", "mlp", "second", "third"]
    assert list_uninvolved(model) == [*(f"{block}.{name}" for block in (1, 2) for name in inside), "3"]


def test_a_changed_scale_is_measured_in_the_next_watch():
    model, x = make_model(False), torch.randn(2, 7, WIDTH)
    run_watched(model, x)
    model[1].attention.scale = 1.0
    seen, _ = run_watched(model, x)
    assert [record.effective for record in seen.scales] == pytest.approx([1.0, D_K**-0.5])


class Parts(nn.Module):
    """Attention whose projection, norm and core are separate modules, one of which runs at some calls only."""

    class Core(nn.Module):
        def forward(self, q, k, v):
            return by_hand(q, k, v, D_K**-0.5)

    class Project(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, D_K)

        def forward(self, x):
            return self.inner(x)[:, None]

    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes, self.has_more = nn.LayerNorm(WIDTH), Mlp(), False

        def forward(self, x):
            return self.sometimes(self.always(x)) if self.has_more else self.always(x)

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.core = Parts.Project(), Parts.Project(), Parts.Project(), Parts.Core()
        self.norm, self.optional, self.end = nn.LayerNorm(D_K), Parts.Optional(), nn.LayerNorm(D_K)

    def forward(self, x):
        x = self.optional(x)
        return self.end(self.core(self.norm(self.q(x)), self.k(x), self.v(x))[:, 0])


def test_modules_between_projection_and_attention_and_modules_that_ran_in_part_are_followed():
    model, x = Parts(), torch.randn(2, 7, WIDTH)
    run_watched(model, x)
    assert list_uninvolved(model) == ["end", "optional.always"]
    model.optional.has_more = True
    full, _ = run_watched(copy.deepcopy(model), x)
    spared, _ = run_watched(model, x)
    assert spared.scales == full.scales
    assert full.scales[0].normalised


def test_torchs_function_in_an_unfollowed_module_is_listed_and_measured_from_the_next_call_on():
    model, x = make_model(False), torch.randn(2, 7, WIDTH)
    run_watched(model, x)
    model[1].mlp.attend = lambda q, k, v: functional.scaled_dot_product_attention(q, k, v)
    seen, _ = run_watched(model, x)
    (missed,) = seen.unattributed
    assert (missed.layer, missed.times) == ("1.mlp", 1)
    assert "another place or way" in missed.reason
    assert "1.mlp" not in seen.layers
    seen, _ = run_watched(model, x)
    assert "1.mlp" in seen.layers
    assert "1.mlp" not in list_uninvolved(model)


def test_attention_by_hand_in_an_unfollowed_module_is_found_by_the_next_whole_call():
    model, x = make_model(False), torch.randn(2, 7, WIDTH)
    run_watched(model, x)
    model[1].mlp.attend = lambda q, k, v: by_hand(q, k, v, 1.0)
    found = [call for call in range(2, 8) if "1.mlp" in run_watched(model, x)[0].layers]
    assert found == [4, 5, 6, 7]
    assert min(WHOLE_CALLS) == 4


def test_training_and_evaluation_are_learnt_apart():
    model, x = make_model(False), torch.randn(2, 7, WIDTH)
    run_watched(model, x)
    model.eval()
    model[1].mlp.attend = lambda q, k, v: by_hand(q, k, v, 1.0)
    assert "1.mlp" in run_watched(model, x)[0].layers


def test_an_exception_in_an_unfollowed_module_leaves_no_mode():
    model, x = make_model(False), torch.randn(2, 7, WIDTH)
    run_watched(model, x)

    def fail(q, k, v):
        raise RuntimeError("here")

    model[1].mlp.attend = fail
    with pytest.raises(RuntimeError, match="here"), watch(model):
        model(x)
    assert torch._C._len_torch_dispatch_stack() == 0
    model[1].mlp.attend = None
    full, _ = run_watched(copy.deepcopy(model), x)
    spared, _ = run_watched(model, x)
    assert spared.scales == full.scales


class Count(DispatchMode):
    """Counts the operations that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_another_mode_sees_every_operation():
    model, x = make_model(False), torch.randn(2, 7, WIDTH)
    run_watched(model, x)
    with torch.no_grad():
        with Count() as alone:
            model(x)
        with watch(model), Count() as inside:
            model(x)
    assert inside.seen >= alone.seen


def test_gradients_are_those_of_the_plain_model():
    model, x = make_model(True), torch.randn(2, 7, WIDTH)
    run_watched(model, x)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with watch(model):
        model(x).square().sum().backward()
    assert all(torch.equal(one.grad, two) for one, two in zip(model.parameters(), expected, strict=True))


def test_a_watched_model_is_freed_even_if_its_modules_refer_to_it():
    model = make_model(True)
    object.__setattr__(model[1].mlp, "whole", model)
    run_watched(model, torch.randn(2, 7, WIDTH))
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_a_model_of_many_layers_is_learnt_in_time_that_grows_with_them():
    """Comparing each module with each attention would take a minute."""
    model = make_model(True, layers=400)
    run_watched(model, torch.randn(1, 3, WIDTH))
    assert len(list_uninvolved(model)) == 400 * 5 + 1


MEMORY = """
import ctypes, torch
from sqrtdk.torch import watch

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p

def is_mapped(size):
    before = libc.mallinfo2().hblks
    libc.malloc(ctypes.c_size_t(size))  # never freed, which would change the limit
    return libc.mallinfo2().hblks > before

print(is_mapped(20 << 20))
with watch(torch.nn.Linear(2, 2)):
    pass
print(is_mapped(20 << 20))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_memory_of_activations_stays_with_the_process():
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False"]
