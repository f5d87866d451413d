"""What counts as attention under a watch: nothing else is taken, and what is not understood is counted and named."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from torch_watched import WIDTH, ByHand, Stack, build, make_input

pytestmark = pytest.mark.usefixtures("nothing_left")


class Router(nn.Module):
    """A mixture's router, a softmax of a vocabulary, CLIP's similarities, a pooling: none is attention."""

    def __init__(self):
        super().__init__()
        self.gate, self.pool, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 50)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        mixed = torch.einsum("bte,eij,btj->bti", self.gate(x).softmax(-1), self.experts, x)
        pooled = (self.pool(mixed).softmax(1).transpose(1, 2) @ mixed)[:, 0]
        similarities = (pooled @ pooled.t() * 10).softmax(-1)
        return self.head(mixed).softmax(-1), similarities


def test_what_is_not_attention_is_not_taken():
    model = build(Router)
    with watch(model) as seen:
        model(make_input())
    assert seen.layers == {}
    assert seen.unattributed == []


class Mixing(nn.Module):
    """A small matrix for each token, projected and softened, mixes streams (hyper-connections): no attention."""

    def __init__(self):
        super().__init__()
        self.mix, self.bias = nn.Linear(WIDTH, 16), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        mixing = (self.mix(x).unflatten(-1, (4, 4)) * 0.5 + self.bias).softmax(-1)
        return mixing @ x.unflatten(-1, (4, -1))


def test_a_projected_matrix_is_not_attention():
    model = build(Mixing)
    with watch(model) as seen:
        model(make_input())
    assert (seen.layers, seen.unattributed) == ({}, [])


class Odd(ByHand):
    """Scores that are more than a scale, a cap and a mask: every third is halved."""

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-1, -2)
        scores = torch.sin(scores)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Widened(Odd):
    """Weights that are not understood, and given two more columns before they meet the values (Longformer's chunks)."""

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        weights = functional.pad(torch.sin(q @ k.transpose(-1, -2)).softmax(-1), (0, 2))
        return (weights @ functional.pad(v, (0, 0, 0, 2))).transpose(1, 2).flatten(2)


def test_what_is_not_understood_counts_whatever_becomes_of_its_weights():
    model = build(Widened)
    with watch(model) as seen:
        model(make_input())
    ((_, reason, times),) = seen.unattributed
    assert (times, seen.layers) == (1, {})
    assert reason.startswith("the scores of its softmax could not be followed")


class Wrong(ByHand):
    """A softmax that is changed behind the back of who looks: the weights are not those of its scores."""

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = (q @ k.transpose(-1, -2)).clamp(-1.0, 1.0)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_what_is_not_understood_is_counted_and_named():
    model = Stack(build(Odd), build(Wrong))
    with watch(model) as seen:
        model(make_input())
        model(make_input())
    assert seen.layers == {}
    where = {missed.layer: (missed.times, missed.reason) for missed in seen.unattributed}
    assert where["layers.0"] == (
        2,
        "the scores of its softmax could not be followed back to a product of queries and keys",
    )
    count, reason = where["layers.1"]
    assert count >= 1
    assert reason.startswith("recovered weights differ from the model's own by ")
    assert "not understood: layers.1" in repr(seen)
