"""A plain linear layer is seen as one product, with the results of following its operations one by one."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sqrtdk.torch import watch
from torch_watched import HEADS, RIGHT, WIDTH, Fused, build, make_input, modes_now


class Followed(nn.Linear):
    """The same layer, but not torch's own class: its operations are followed."""


class Rotation(nn.Module):
    """A rotation that also doubles its vectors, in a module of its own."""

    def forward(self, x):
        return torch.cat([-x[..., 2:], x[..., :2]], dim=-1) * 1.2 + x * 1.6


class Attention(nn.Module):
    """Attention with linear layers of a given class, written by hand."""

    def __init__(self, kind=nn.Linear, bias=True):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (kind(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.mix = kind(HEADS, HEADS, bias=False)
        self.learnt = nn.Parameter(torch.randn(5, WIDTH))
        self.rotation = Rotation()
        self.change = "none"

    def forward(self, x):
        y = torch.cat([self.learnt.expand(len(x), -1, -1), x], dim=1) if self.change == "learnt tokens" else x
        if self.change == "strided":
            x = y = x.repeat_interleave(2, dim=-1)[..., ::2]
        k, v, q = (f(z).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, z in self.sides(x, y))
        if self.change == "rotated":
            q, k = (torch.cat([-z[..., 2:], z[..., :2]], dim=-1) * 0.6 + z * 0.8 for z in (q, k))
        elif self.change == "rotated by a module":
            q = self.rotation(q)
        weights = (q @ k.transpose(-1, -2) * RIGHT).softmax(-1)
        if self.change == "mixed":
            weights = self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (weights @ v).transpose(1, 2).flatten(2)

    def sides(self, x, y):
        return (self.k_proj, y), (self.v_proj, y), (self.q_proj, x)


def describe(model, x):
    with watch(model) as seen:
        output = model(x)
    columns = seen.heads_of("")
    if not isinstance(columns, str):
        columns = [[(one.start, one.step, one.width) for part in parts for one in part] for parts in columns]
    rows = {name: summary["entropy"].mean.tolist() for name, summary in seen.layers.items()}
    return output, columns, (seen.scales, seen.unattributed, seen.notes, seen.padding, rows)


def compare(change, context=torch.no_grad, bias=True, x=None):
    plain, followed = (build(Attention, kind, bias) for kind in (nn.Linear, Followed))
    followed.load_state_dict(plain.state_dict())
    results = []
    for model in (plain, followed):
        model.change = change
        with context():
            results.append(describe(model, make_input() if x is None else x))
    (output, columns, found), (output_followed, columns_followed, found_followed) = results
    assert torch.equal(output, output_followed)
    assert found == found_followed
    # In inference mode torch adds the bias of strided inputs in a way that hides the columns of single operations.
    assert columns == columns_followed or (change == "strided" and isinstance(columns_followed, str))
    return found


@pytest.mark.parametrize("change", ["none", "rotated", "rotated by a module", "strided", "learnt tokens", "mixed"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_those_of_following_every_operation(change, context, bias):
    (scale,), missed, notes, *_ = compare(change, context, bias)
    assert scale.effective == pytest.approx(2 * RIGHT if change == "rotated by a module" else RIGHT)
    assert not missed
    assert bool(notes) == (change == "mixed")


def test_under_autocast():
    (scale,), *_ = compare("none", lambda: torch.autocast("cpu", torch.bfloat16))
    assert scale.effective == pytest.approx(RIGHT)


def double(module, args, output):
    return output * 2


def patch_instance(model, monkeypatch):
    original = model.q_proj.forward
    model.q_proj.forward = lambda x: original(x) * 2


def patch_function(model, monkeypatch):
    original = functional.linear
    monkeypatch.setattr(
        functional, "linear", lambda x, w, b: original(x, w, b) * (2 if w is model.q_proj.weight else 1)
    )


def patch_class(model, monkeypatch):
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda own, x: original(own, x) * (2 if own is model.q_proj else 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda model, monkeypatch: model.q_proj.register_forward_hook(double),
        patch_instance,
        patch_function,
        patch_class,
    ],
)
def test_more_than_a_product_is_followed(change, monkeypatch):
    model, x = build(Attention), make_input()
    change(model, monkeypatch)
    with torch.no_grad():
        plain = model(x)
        with watch(model) as seen:
            assert torch.equal(model(x), plain)
    assert seen.scales[0].effective == pytest.approx(2 * RIGHT)


def test_a_hook_on_all_modules_is_followed():
    model = build(Attention)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if module is model.q_proj else None
    )
    try:
        with torch.no_grad(), watch(model) as seen:
            model(make_input())
    finally:
        handle.remove()
    assert seen.scales[0].effective == pytest.approx(2 * RIGHT)


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_of_somebody_else_sees_every_product():
    model, x = build(Attention), make_input()
    with torch.no_grad():
        with Counting() as alone:
            model(x)
        with Counting() as outside, watch(model):
            model(x)
        with watch(model), Counting() as inside:
            model(x)
    assert [sum("addmm" in name for name in mode.names) for mode in (alone, outside, inside)] == [3, 3, 3]


def test_an_error_in_a_layer_leaves_the_stack_as_it_was():
    model = build(Attention)
    with watch(model) as seen:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(2, 3, WIDTH + 1))
        assert modes_now() == 0
        with torch.no_grad():
            model(make_input())
    assert modes_now() == 0
    assert len(seen.layers) == 1


def test_gradients_are_those_of_the_plain_model():
    model, x = build(Attention), make_input()
    model(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with watch(model):
        model(x).square().sum().backward()
    watched = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, plain, watched))
    assert len(plain) == len(watched) == 6


@pytest.mark.parametrize("bias", [None, torch.ones(WIDTH)])
def test_a_bias_that_is_no_parameter(bias):
    model, x = build(Attention), make_input()
    del model.q_proj.bias
    model.q_proj.bias = bias
    with torch.no_grad():
        plain = model(x)
        with watch(model) as seen:
            assert torch.equal(model(x), plain)
    assert seen.scales[0].effective == pytest.approx(RIGHT)


class Halving(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function is functional.linear else result


def test_a_function_mode_that_changes_the_layer_is_followed():
    model = build(Attention)
    with torch.no_grad(), watch(model) as seen, Halving():
        model(make_input())
    assert seen.scales[0].effective == pytest.approx(RIGHT / 4)


def test_a_weight_of_another_model_is_no_parameter():
    model, other = build(Attention, nn.Linear, False), build(Attention, nn.Linear, False, seed=2)
    followed = build(Attention, Followed, False)
    results = []
    for one in (model, followed):
        own = one.q_proj
        one.register_forward_pre_hook(lambda module, args, own=own: own._parameters.update(weight=other.q_proj.weight))
        with torch.no_grad():
            results.append(describe(one, make_input())[2][1:3])
    assert results[0] == results[1]


def test_outputs_of_a_chain_are_freed():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

        def forward(self, x):
            alive = []
            for layer in self.layers:
                x = layer(x)
                alive.append(weakref.ref(x))
            self.alive = sum(one() is not None for one in alive)
            return x

    model = Chain()
    with torch.no_grad(), watch(model):
        model(torch.randn(2, 8))
    assert model.alive <= 2


def test_a_product_that_a_strided_input_makes_is_not_missed_later():
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.attend = nn.Linear(WIDTH, WIDTH), Fused()

        def forward(self, x):
            return self.attend(self.project(x.transpose(1, 2).contiguous().transpose(1, 2)))

    model = build(Strided).requires_grad_(False)
    with torch.no_grad(), watch(model) as seen:
        for _ in range(6):
            model(make_input())
    assert not seen.unattributed
