"""Heads and rows of a call are what the projections say: not windows, not sequences, not slices, not blocks of keys."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from sqrtdk.torch import watch
from torch_watched import BATCH, DIMENSION, HEADS, TOKENS, ByHand, build, entropy_per_head, make_input

pytestmark = pytest.mark.usefixtures("nothing_left")
RIGHT = DIMENSION**-0.5


class Own(ByHand):
    """Attention by a function of the module and its input, which returns output and weights `[B, H, L, S]`."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.mix = torch.nn.Parameter(torch.randn(HEADS, HEADS))
        del self.num_heads  # the projections alone say how many

    def project(self, x, *shape):
        return (f(x).view(*shape) for f in (self.q_proj, self.k_proj, self.v_proj))

    def forward(self, x):
        output, self.weights = self.attend(self, x)
        return output


def _windows(model, x):
    """Windows before heads, as torchvision's MaxViT has them."""
    q, k, v = (one.transpose(2, 3) for one in model.project(x, -1, 2, TOKENS, HEADS, DIMENSION))
    weights = (torch.einsum("bwhid,bwhjd->bwhij", q, k) * RIGHT).softmax(-1)
    return torch.einsum("bwhij,bwhjd->bwhid", weights, v), weights.flatten(0, 1)


def _fused_windows(model, x):
    """Heads merged into the batch, windows where heads are elsewhere."""
    q, k, v = (one.permute(0, 3, 1, 2, 4) for one in model.project(x, -1, 2, TOKENS, HEADS, DIMENSION))
    weights = (q @ k.mT * RIGHT).softmax(-1).transpose(1, 2).flatten(0, 1)
    return functional.scaled_dot_product_attention(*(one.flatten(0, 1) for one in (q, k, v))), weights


def _columns(model, x):
    """Each column of an alignment by itself, heads first (MSA Transformer)."""
    q, k, v = model.project(x, 2, TOKENS, -1, HEADS, DIMENSION)
    weights = (torch.einsum("rcnhd,scnhd->hcnrs", q, k) * RIGHT).softmax(-1)
    return torch.einsum("hcnrs,scnhd->rcnhd", weights, v), weights.flatten(1, 2).transpose(0, 1)


def _merged(model, x):
    """Batch and heads in one axis, and nothing else tells which is which."""
    q, k, v = (
        one.transpose(1, 2).reshape(-1, TOKENS, DIMENSION) for one in model.project(x, -1, TOKENS, HEADS, DIMENSION)
    )
    weights = (q @ k.mT * RIGHT).softmax(-1)
    return weights @ v, weights.unflatten(0, (-1, HEADS))


def _heads_among_queries(model, x):
    """Heads lie beside each other among the queries, one key for all (GPTBigCode)."""
    q, k, v = model.project(x, -1, TOKENS * HEADS, DIMENSION)
    k, v = k[:, :TOKENS], v[:, :TOKENS]
    weights = (q @ k.mT * RIGHT).view(-1, TOKENS, HEADS, TOKENS).softmax(-1)
    return weights.view(-1, TOKENS * HEADS, TOKENS) @ v, weights.transpose(1, 2)


def _split(model, x):
    return (one.transpose(1, 2) for one in model.project(x, -1, TOKENS, HEADS, DIMENSION))


def _one_by_one(model, x):
    q, k, v = _split(model, x)
    weights = [(q[:, h] @ k[:, h].mT * RIGHT).softmax(-1) for h in range(HEADS)]
    return torch.stack([one @ v[:, h] for h, one in enumerate(weights)]), torch.stack(weights, 1)


def _in_slices(model, x):
    """Two of all batches and heads at a time, the scale in the product (diffusers)."""
    q, k, v = (one.reshape(-1, TOKENS, DIMENSION) for one in _split(model, x))
    output, weights = torch.zeros_like(q), []
    for at in range(0, len(q), 2):
        empty = torch.empty(2, TOKENS, TOKENS)
        scores = torch.baddbmm(empty, q[at : at + 2], k[at : at + 2].mT, beta=0, alpha=RIGHT)
        weights.append(scores.softmax(-1))
        output[at : at + 2] = torch.bmm(weights[-1], v[at : at + 2])
    return output, torch.cat(weights).unflatten(0, (-1, HEADS))


def _query_chunks(model, x):
    q, k, v = _split(model, x)
    weights = [(q[:, :, at : at + 3] @ k.mT * RIGHT).softmax(-1) for at in range(0, TOKENS, 3)]
    return torch.cat([one @ v for one in weights], 2), torch.cat(weights, 2)


def _differential(model, x):
    """The difference of two maps (Ye et al. 2024): the heads of both."""
    q, k, v = _split(model, x)
    one, two = ((q[:, at::2] @ k[:, at::2].mT * RIGHT).softmax(-1) for at in (0, 1))
    return (one - 0.3 * two) @ v[:, ::2], torch.stack([one, two], 2).flatten(1, 2)


def _key_blocks(model, x, queries=TOKENS, causal=False):
    """Rows block by block of keys, with a running maximum (FlashAttention, written by hand)."""
    q, k, v = _split(model, x)
    outputs, visible = [], torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    for first in range(0, TOKENS, queries):
        own = q[:, :, first : first + queries]
        output, total = torch.zeros_like(own), torch.zeros(*own.shape[:3], 1)
        largest = torch.full_like(total, -math.inf)
        for at in range(0, TOKENS, 3):
            if causal and at > first + queries - 1:
                break
            scores = own @ k[:, :, at : at + 3].mT * RIGHT
            if causal and at + 2 > first:  # of earlier keys none is hidden
                hidden = ~visible[first : first + queries, at : at + 3]
                scores = scores.masked_fill(hidden, -1e9)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            exponentials, before = torch.exp(scores - new), torch.exp(largest - new)
            total = total * before + exponentials.sum(-1, keepdim=True)
            output = output * before + exponentials @ v[:, :, at : at + 3]
            largest = new
        outputs.append(output / total)
    logits = q @ k.mT * RIGHT
    logits = logits.masked_fill(~visible, -math.inf) if causal else logits
    return torch.cat(outputs, 2), logits.detach().softmax(-1)


def _ring(model, x):
    """Blocks that are normalised, and put together by their log-sum-exp (ring attention)."""
    q, k, v = _split(model, x)
    parts = [(q @ k[:, :, at : at + 4].mT * RIGHT, v[:, :, at : at + 4]) for at in (0, 4)]
    sums = torch.stack([scores.logsumexp(-1) for scores, _ in parts]).softmax(0)[..., None]
    output = sum(share * (scores.softmax(-1) @ part) for share, (scores, part) in zip(sums, parts, strict=True))
    return output, (q @ k.mT * RIGHT).detach().softmax(-1)


WAYS = {
    "windows": (_windows, 2 * TOKENS),
    "fused windows": (_fused_windows, 2 * TOKENS),
    "columns": (_columns, 2 * TOKENS),
    "merged": (_merged, TOKENS),
    "heads among queries": (_heads_among_queries, TOKENS),
    "one by one": (_one_by_one, TOKENS),
    "in slices": (_in_slices, TOKENS),
    "chunks of queries": (_query_chunks, TOKENS),
    "differential": (_differential, TOKENS),
    "blocks of keys": (_key_blocks, TOKENS),
    "blocks of both": (lambda model, x: _key_blocks(model, x, queries=4), TOKENS),
    "blocks of both, causal": (lambda model, x: _key_blocks(model, x, queries=3, causal=True), TOKENS),
    "normalised blocks": (_ring, TOKENS),
}


@pytest.mark.parametrize("batch", [BATCH, HEADS])
@pytest.mark.parametrize("way", WAYS)
def test_heads_and_whole_rows(way, batch):
    """Also with as many sequences as heads, where sizes tell nothing."""
    attend, tokens = WAYS[way]
    model, x = build(Own, attend), make_input(batch=batch, tokens=tokens)
    with torch.no_grad():
        expected = model(x)
        with watch(model) as seen:
            output = model(x)
    assert torch.equal(output, expected)
    assert not seen.unattributed
    assert list(seen.layers) == [""]
    summary = seen.layers[""]
    assert summary.heads == HEADS
    np.testing.assert_array_equal(summary.rows_seen, batch * tokens)
    np.testing.assert_allclose(summary["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4, atol=1e-6)
    (record,) = seen.scales
    assert record.effective == pytest.approx(RIGHT)
    assert record.d_k == DIMENSION


@pytest.mark.parametrize("of_scores", [False, True])
def test_chunks_know_where_their_queries_stand(of_scores):
    """Every query looks at the key after it: one position further in whichever chunk it is."""
    after = torch.eye(TOKENS).roll(1, 1) * 1e3

    def in_chunks(model, x):
        q, k, v = _split(model, x)
        whole = q @ k.mT * RIGHT + after
        rows = [
            (whole[:, :, at : at + 3] if of_scores else q[:, :, at : at + 3] @ k.mT * RIGHT + after[at : at + 3])
            for at in (0, 3, 6)
        ]
        return torch.cat([row.softmax(-1) @ v for row in rows], 2), None

    model = build(Own, in_chunks)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert not seen.unattributed
    keys = seen.layers[""].max_keys
    share = {offset: float(keys.offset_share(offset)[0]) for offset in (1, 1 - TOKENS)}
    assert share == pytest.approx({1: (TOKENS - 1) / TOKENS, 1 - TOKENS: 1 / TOKENS})


def test_blocks_that_cannot_be_put_together_are_listed():
    """Queries and keys that come from nowhere have no tokens: no block is taken for a row."""

    class Blocks(torch.nn.Module):
        def forward(self, q, k, v):
            total = output = 0.0
            for at in (0, 4):
                exponentials = torch.exp(q @ k[:, :, at : at + 4].mT)
                total = total + exponentials.sum(-1, keepdim=True)
                output = output + exponentials @ v[:, :, at : at + 4]
            return output / total

    model = Blocks()
    with watch(model) as seen:
        model(*torch.randn(3, 1, 2, 8, 4))
    assert seen.layers == {}
    (missed,) = seen.unattributed
    assert missed.reason == "its keys are taken in blocks, which could not be put together"


def test_attention_of_other_heads_in_one_module_is_another_layer():
    def twice(model, x):
        q, k, v = _split(model, x)
        wide = [one.transpose(1, 2) for one in model.project(x, -1, TOKENS, 2, 2 * DIMENSION)]
        narrow = (q @ k.mT).softmax(-1) @ v
        return narrow.sum() + functional.scaled_dot_product_attention(*wide).sum(), None

    model = build(Own, twice)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert sorted(summary.heads for summary in seen.layers.values()) == [2, HEADS]


@pytest.mark.parametrize("convolve", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_mixed_heads_are_measured_as_the_softmax_sees_them(before, convolve):
    """Talking heads (Shazeer et al. 2020; CaiT) and re-attention (DeepViT): said beside the numbers."""

    def talk(model, x):
        q, k, v = _split(model, x)
        if convolve:
            mix = lambda x: functional.conv2d(x, model.mix.T[..., None, None])  # noqa: E731
        else:
            mix = lambda x: torch.einsum("bhij,hg->bgij", x, model.mix)  # noqa: E731
        scores = (q @ k.mT * RIGHT).masked_fill(~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), -1e4)
        weights = (mix(scores * 0.1) if before else scores).softmax(-1)
        return (weights if before else mix(weights)) @ v, weights

    model, x = build(Own, talk), make_input()
    with torch.no_grad():
        expected = model(x)
        with watch(model, keep_rows=4) as seen:
            output = model(x)
    assert torch.equal(output, expected)
    assert not seen.unattributed
    summary = seen.layers[""]
    np.testing.assert_allclose(summary["entropy"].mean, entropy_per_head(model.weights), rtol=1e-4, atol=1e-6)
    place = "before" if before else "after"
    assert [note for note in seen.notes if f"heads are mixed {place} the softmax" in note]
    (record,) = seen.scales
    assert record.effective == pytest.approx(0.1 * RIGHT if before else RIGHT)
    if before:
        assert seen.heads_of("") == "its heads are mixed before the softmax"
        assert not seen.causes
        np.testing.assert_array_equal(summary["score_max"].mean, summary["max_logit"].mean)
    assert len(seen.rows[""]) == 4


def test_heads_that_share_a_projection_are_what_the_module_says():
    """A head is projected by itself, with the same weights for all: the projection has the columns of one."""

    class Shared(ByHand):
        def __init__(self):
            super().__init__()
            self.queries, self.keys = (torch.nn.Linear(DIMENSION, DIMENSION) for _ in range(2))

        def forward(self, x):
            heads = x.unflatten(-1, (HEADS, DIMENSION))
            q, k = self.queries(heads), self.keys(heads)
            weights = (torch.einsum("nqhd,nkhd->nhqk", q, k) * RIGHT).softmax(-1)
            return torch.einsum("nhqk,nkhd->nqhd", weights, heads)

    model = build(Shared)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert seen.layers[""].heads == HEADS
    assert seen.scales[0].effective == pytest.approx(RIGHT)


def test_heads_that_are_pooled_one_by_one_are_what_the_module_says():
    """A convolution of each column comes after the heads are split, and sees them as sequences (MViT)."""

    class Pooled(ByHand):
        def __init__(self):
            super().__init__()
            self.pool = torch.nn.Conv1d(DIMENSION, DIMENSION, 3, stride=2, groups=DIMENSION)

        def forward(self, x):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            q = self.pool(q.flatten(0, 1).mT).mT.unflatten(0, (-1, HEADS))
            return (q @ k.mT * RIGHT).softmax(-1) @ v

    model = build(Pooled)
    with torch.no_grad(), watch(model) as seen:
        model(make_input())
    assert seen.layers[""].heads == HEADS
    assert seen.scales[0].d_k == DIMENSION
