"""Recognition of attention under a watch: nothing else is taken, and what is not understood is counted and named."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk import SqrtdkError
from sqrtdk.torch import audit, qk_clip_, watch
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


def test_other_computations_are_not_taken_for_attention():
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


def test_unattributed_attention_counts_whatever_becomes_of_its_weights():
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


def test_unattributed_attention_is_counted_and_named():
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


class Without(ByHand):
    """Scores that meet values by something else than a softmax."""

    def __init__(self, weigh):
        super().__init__()
        self.weigh = weigh

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.weigh(q, k, v).transpose(1, 2).flatten(2)


def _over_edges(q, k, v):
    """A softmax over the edges of a graph, added up where they end (torch_geometric's TransformerConv)."""
    q, k, v = (one[0].transpose(0, 1) for one in (q, k, v))
    source, target = torch.arange(7).repeat(7), torch.arange(7).repeat_interleave(7)
    exponentials = ((q[target] * k[source]).sum(-1) * 0.5).exp()
    total = torch.zeros(7, exponentials.shape[1]).scatter_add_(0, target[:, None].expand_as(exponentials), exponentials)
    messages = v[source] * (exponentials / total[target])[..., None]
    return torch.zeros_like(v).index_add_(0, target, messages).transpose(0, 1)[None]


def _by_features(q, k, v):
    """Random features of queries and keys (Performer)."""
    matrix = torch.randn(q.shape[-1], 5, generator=torch.Generator().manual_seed(0))
    q, k = (torch.exp(one @ matrix) + 1e-4 for one in (q, k))
    return q @ (k.mT @ v)


def _nested(q, k, v):
    """A softmax by hand of sequences of several lengths."""
    q, k, v = (torch.nested.as_nested_tensor([one[0, :, :5], one[0, :, 3:]]) for one in (q, k, v))
    return (torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1), v)).to_padded_tensor(0.0)


OTHERS = {
    "sigmoid": (lambda q, k, v: (q @ k.mT * 0.5 - 2).sigmoid() @ v, "its scores pass sigmoid instead of a softmax"),
    "relu": (lambda q, k, v: (q @ k.mT).relu() / 7 @ v, "its scores pass relu instead of a softmax"),
    "nothing": (lambda q, k, v: q @ k.mT * 0.5 @ v, "a product of queries and keys meets values without a softmax"),
    "linear": (
        lambda q, k, v: q.relu() @ (k.relu().mT @ v),
        "queries meet a product of keys and values: linear attention, without a softmax of scores",
    ),
    "linear, of joined tokens": (
        lambda q, k, v: q @ (torch.cat([k, q], 2).relu().mT @ torch.cat([v, v], 2)),
        "three projections are multiplied without a softmax, as in linear attention",
    ),
    "features": (_by_features, "exponentials of its scores pass add and are not divided by their sum"),
    "nested": (_nested, "its scores are nested tensors, and the model computes their softmax in code of its own"),
    "edges": (_over_edges, "its softmax is taken over pairs of queries and keys, one by one"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", OTHERS)
def test_attention_without_a_softmax_of_rows_is_listed(name):
    weigh, reason = OTHERS[name]
    model, x = Stack(build(Without, weigh), build(ByHand)), make_input(batch=1)
    with torch.no_grad():
        expected = model.layers[0](x)
        with watch(model) as seen:
            output = model.layers[0](x)
            assert torch.equal(output, expected)
    assert seen.layers == {}
    assert [(missed.layer, missed.reason) for missed in seen.unattributed] == [("layers.0", reason)]


def test_an_audit_says_what_it_could_not_follow():
    text = repr(audit(build(Without, OTHERS["sigmoid"][0]), make_input()))
    assert "Not understood: 1 call that looks like attention, in the model itself (its scores pass sigmoid" in text


class Features(nn.Module):
    """Products of activations that are no attention: mixed streams, features of features, gates, whole numbers."""

    def __init__(self):
        super().__init__()
        self.mix, self.one, self.two = (nn.Linear(WIDTH, width) for width in (4, WIDTH, WIDTH))
        self.norm, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        streams = torch.stack([self.one(x), self.two(x)], -2)
        mixed = self.mix(x).tanh().unflatten(-1, (2, 2)) @ streams  # hyper-connections
        gated = self.one(x).sigmoid() * self.two(x)
        shares = self.one(x).relu().softmax(-1)
        lengths = self.mix(x).long().masked_fill(x[..., :4] < 0, 0).sum(-1, keepdim=True)
        return self.read(self.norm(mixed[..., 0, :])) + gated * shares.mean(-1, keepdim=True) * lengths


def test_products_of_activations_are_not_attention():
    model = build(Features)
    with watch(model) as seen:
        model(make_input())
    assert (seen.layers, seen.unattributed) == ({}, [])


def test_scores_that_are_added_up_over_heads_meet_no_values():
    """An index of keys (DeepSeek's sparse attention) weighs heads of scores, and picks keys by their sum."""

    class Index(ByHand):
        def forward(self, x):
            q, k = (self.split(f(x)) for f in (self.q_proj, self.k_proj))
            heads = self.v_proj(x)[..., : self.num_heads]
            return torch.einsum("bhls,blh->bls", (q @ k.mT).relu(), heads).topk(2).indices

    model = build(Index)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert (seen.layers, seen.unattributed) == ({}, [])


def test_an_operation_that_is_called_attention_is_listed():
    library = torch.library.Library("sqrtdk_test", "DEF")
    library.define("flash_attn_forward(Tensor q, Tensor k, Tensor v) -> Tensor")
    library.impl("flash_attn_forward", lambda q, k, v: v.clone(), "CPU")
    model = build(Without, torch.ops.sqrtdk_test.flash_attn_forward)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert [missed.reason for missed in seen.unattributed] == ["sqrtdk_test::flash_attn_forward is not followed"]


def test_a_clip_says_what_was_not_seen():
    model = build(Without, OTHERS["sigmoid"][0])
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    with pytest.raises(SqrtdkError, match="its scores pass sigmoid instead of a softmax"):
        qk_clip_(model, seen)
