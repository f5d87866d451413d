"""Models in which a module seems to take no part in attention and does, or does in another call."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from sqrtdk.torch.watch.uninvolved import recall_uninvolved

WIDTH, D_K = 16, 16


def project():
    return nn.Linear(WIDTH, WIDTH)


class Scale(nn.Module):
    def forward(self, x):
        return x * 0.25


class Core(nn.Module):
    def forward(self, q, k):
        return torch.softmax(q @ k.mT, dim=-1) @ k


def watch_calls(model, *calls, times=3):
    """Return the scales of several watches of some calls."""
    found = []
    for _ in range(times):
        with watch(model) as seen:
            for call in calls:
                call(model)
        found.append([(record.layer, record.effective, record.normalised) for record in seen.scales])
    return found


class Cached(nn.Module):
    """Keys of earlier calls are joined with keys that a module before the attention computes."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.core = project(), nn.Sequential(project(), Scale()), Core()

    def generate(self, x):
        past = None
        for _ in range(4):
            past, x = self(x, past), x[:, :1]

    def forward(self, x, past):
        k = self.k(x) if past is None else torch.cat([past, self.k(x)], dim=1)
        self.core(self.q(x), k)
        return k


def test_keys_of_a_cache():
    found = watch_calls(Cached(), lambda model: model.generate(torch.randn(2, 5, WIDTH)))
    assert found == [[("core", pytest.approx(0.25), False)]] * 3


class Joint(nn.Module):
    """Keys of two modules, the earlier one last."""

    def __init__(self):
        super().__init__()
        self.text, self.image, self.q, self.core = (
            nn.Sequential(project(), Scale()),
            nn.Sequential(project(), Scale()),
            project(),
            Core(),
        )

    def forward(self, x):
        text = self.text(x)
        return self.core(self.q(x), torch.cat([self.image(x), text], dim=1))


def test_keys_of_two_modules():
    found = watch_calls(Joint(), lambda model: model(torch.randn(2, 5, WIDTH)))
    assert found == [[("core", pytest.approx(0.25), False)]] * 3


class Distant(nn.Module):
    """A softmax of distances, which are computed in a module before, is not understood."""

    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = project(), project()

        def forward(self, x):
            return -torch.cdist(self.q(x), self.k(x))

    class Combine(nn.Module):
        def forward(self, scores, v):
            return scores.softmax(dim=-1) @ v

    def __init__(self):
        super().__init__()
        self.score, self.v, self.combine = Distant.Scorer(), project(), Distant.Combine()

    def forward(self, x):
        return self.combine(self.score(x), self.v(x))


def test_attention_that_is_not_understood_is_listed_every_time():
    model = Distant()
    for _ in range(6):
        with watch(model) as seen:
            model(torch.randn(2, 5, WIDTH))
        assert [missed.layer for missed in seen.unattributed] == ["combine"]


class Rotated(nn.Module):
    """A module before the attention returns hidden states, and tables of a rotation beside them."""

    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = project()

        def forward(self, x):
            angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1] * (WIDTH // 2))
            return self.inner(x), angles.cos(), angles.sin()

    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = project(), project()

        def forward(self, x, cos, sin):
            q, k = (self.turn(one[:, None], cos, sin) for one in (self.q(x), self.k(x)))
            return torch.softmax(q @ k.mT / 4, dim=-1) @ k

        @staticmethod
        def turn(x, cos, sin):
            half = WIDTH // 2
            return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

    def __init__(self):
        super().__init__()
        self.embed, self.attend = Rotated.Embed(), Rotated.Attend()

    def forward(self, x):
        return self.attend(*self.embed(x))


def test_tables_beside_hidden_states():
    found = watch_calls(Rotated(), lambda model: model(torch.randn(2, 5, WIDTH)))
    assert found == [[("attend", pytest.approx(0.25), False)]] * 3


class Remembering(nn.Module):
    """A module after the attention computes keys for the next call."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.own, self.old = project(), project(), Core(), Core()
        self.memory = nn.Sequential(project(), Scale())

    def forward(self, x, memory=None):
        y = self.own(self.q(x), self.k(x))
        if memory is not None:
            y = y + self.old(self.q(x), memory)
        return y, self.memory(y)


def test_keys_for_the_next_call_are_unknown_once_and_then_measured():
    x = torch.randn(2, 5, WIDTH)
    found = watch_calls(Remembering(), lambda model: model(x, model(x)[1]))
    assert [watched[0] for watched in found] == [("own", pytest.approx(1.0), False)] * 3
    olds = [watched[1][1] for watched in found]
    assert olds == [pytest.approx(0.25), None, pytest.approx(0.25)]


class Parts(nn.Module):
    """Two parts that are called alone share a norm: one before its projection, the other behind it."""

    class Part(nn.Module):
        def __init__(self, norm, is_inside):
            super().__init__()
            self.first, self.q, self.k, self.core = project(), project(), project(), Core()
            self.norm, self.is_inside = norm, is_inside

        def forward(self, x):
            x = self.first(x)
            if self.is_inside:
                return self.core(self.norm(self.q(x)), self.norm(self.k(x)))
            return self.core(self.q(self.norm(x)), self.k(x))

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.encode, self.decode = Parts.Part(self.norm, False), Parts.Part(self.norm, True)


def test_parts_that_are_called_alone_do_not_teach_one_another():
    found = watch_calls(Parts(), lambda model: model.decode(model.encode(torch.randn(2, 5, WIDTH))))
    assert [[normalised for _, _, normalised in watched] for watched in found] == [[False, True]] * 3


class Storing(nn.Module):
    """A module computes a weight from parameters, and returns nothing."""

    class Make(nn.Module):
        def __init__(self):
            super().__init__()
            self.raw = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x, store):
            store.weight = self.raw * 0.5

    def __init__(self):
        super().__init__()
        self.make, self.k, self.core, self.end = Storing.Make(), project(), Core(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        self.make(x, self)
        return self.end(self.core(x @ self.weight * 0.5, self.k(x)))


def test_a_weight_that_a_module_stores():
    found = watch_calls(Storing(), lambda model: model(torch.randn(2, 5, WIDTH)))
    assert found == [[("core", pytest.approx(0.5), False)]] * 3


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.core = project(), project(), Core()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU())

    def forward(self, x):
        x = self.before(x)
        return self.after(self.core(self.q(x), self.k(x)))


@pytest.mark.parametrize("name", ["before", "after"])
def test_a_watch_that_is_closed_inside_an_unfollowed_module_leaves_no_mode(name):
    model, x = Plain(), torch.randn(2, 5, WIDTH)
    watch_calls(model, lambda model: model(x), times=1)
    watching = watch(model)
    watching.__enter__()
    getattr(model, name).register_forward_hook(lambda *given: watching.__exit__(None, None, None))
    model(x)
    assert torch._C._len_torch_dispatch_stack() == 0


class SelfAttention(nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT, dim=-1) @ x


def test_a_module_that_was_put_into_an_unfollowed_one_is_followed():
    model, x = Plain(), torch.randn(2, 5, WIDTH)
    watch_calls(model, lambda model: model(x), times=1)
    assert model.after in recall_uninvolved(model).modules
    model.after[1] = nn.Sequential(project(), SelfAttention())
    with watch(model) as seen:
        model(x)
    assert "after.1.1" in seen.layers


class FusedCore(nn.Module):
    def forward(self, q, k):
        return functional.scaled_dot_product_attention(q, k, k)


def test_fused_attention_that_begins_in_an_unfollowed_module_is_measured_in_the_next_call():
    model, x = Plain(), torch.randn(2, 5, WIDTH)
    model.core = FusedCore()
    watch_calls(model, lambda model: model(x), times=1)
    model.after[1].forward = lambda x: functional.scaled_dot_product_attention(x, x, x)
    with torch.no_grad(), watch(model) as seen:
        model(x)
        assert [missed.layer for missed in seen.unattributed] == ["after"]
        model(x)
    assert "after.1" in seen.layers


class Bare(torch.Tensor):
    """A tensor that gives its storage to nobody."""

    def untyped_storage(self):
        raise TypeError("no storage here")


def test_outputs_without_a_storage_end_no_call():
    model, x = Plain(), torch.randn(2, 5, WIDTH)
    model.before.register_forward_hook(lambda module, given, output: output.as_subclass(Bare))
    model.after.register_forward_hook(lambda module, given, output: output.as_subclass(Bare))
    for _ in range(3):
        with watch(model):
            assert type(model(x)) is Bare
