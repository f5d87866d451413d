"""Sums for the causes of large scores: the kernel's against their definition in torch, and both against float64."""

import numpy as np
import pytest
import torch

from sqrtdk.torch.watch import score_sums
from sqrtdk.torch.watch.recognise.calls import SeenCall
from sqrtdk.torch.watch.score_sums import read_causes


def define(call, dimension):
    """Return the sums in float64, key by key, over every step-th token."""
    q, k = (x.double()[..., :: -(-x.shape[-2] // 64), :] for x in (call.q, call.k))
    k = k.expand(len(q), -1, -1, -1).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    count = torch.full((q.shape[1],), float(len(q)), dtype=torch.float64)
    norms = q.norm(dim=-1)
    return torch.stack(
        [
            count * q.shape[2],
            norms.sum(dim=(0, 2)),
            (norms * call.scale).square().sum(dim=(0, 2)),
            count,
            k.var(dim=2, correction=0).sum(dim=(0, 2)) / dimension,
            k.square().mean(dim=2).sum(dim=(0, 2)) / dimension,
        ]
    )


def sample(index):
    rng = np.random.default_rng([index, 7])
    batch, groups, shared, width = (
        rng.integers(1, 4),
        rng.integers(1, 4),
        rng.integers(1, 3),
        rng.choice([1, 2, 7, 8, 9, 33]),
    )
    queries, keys = rng.choice([1, 2, 5, 63, 64, 65, 130]), rng.choice([2, 3, 64, 65, 129, 200])
    dtype = [torch.float32, torch.float64][rng.integers(2)]

    def make(heads, length, first):
        numbers = rng.standard_normal((first, length, heads, width)) * 10.0 ** rng.integers(-3, 4) + rng.integers(-2, 3)
        x = torch.from_numpy(numbers).to(dtype).transpose(1, 2)
        return x if rng.integers(2) else x.contiguous()

    k = make(groups, keys, batch if rng.integers(2) else 1)
    return SeenCall(make(groups * shared, queries, batch), k, float(rng.uniform(0.01, 2)))


@pytest.mark.parametrize("index", range(60))
def test_the_kernel_gives_the_sums_of_the_definition(index):
    call = sample(index)
    own = score_sums._add_up(call.q, call.k, call.scale, 8)
    assert own is not None
    rounding = 1e-12 if call.q.dtype is torch.float64 else 1e-6
    assert torch.allclose(own, define(call, 8), rtol=rounding, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k: (q, k),
        lambda q, k: (q.half(), k.half()),
        lambda q, k: (q.bfloat16(), k),
        lambda q, k: (q, k.transpose(-1, -2).contiguous().transpose(-1, -2)),  # as a hand-written product copies keys
    ],
)
def test_both_ways_agree(monkeypatch, change):
    q, k = change(torch.randn(2, 6, 70, 16), torch.randn(2, 3, 90, 16))
    call, compiled = SeenCall(q, k, 0.25), score_sums._add_up(q, k, 0.25, 16)
    assert compiled is not None
    monkeypatch.setattr(score_sums, "_add_up", lambda *given: None)
    assert torch.allclose(compiled, read_causes(call, None, 16).double(), rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k: (q, k[:, :, :1]),  # no spread of one key
        lambda q, k: (q, k.double()),
        lambda q, k: (q * torch.inf, k),
        lambda q, k: (q, k * torch.nan),
        lambda q, k: (torch._efficientzerotensor(tuple(q.shape)), k),
    ],
)
def test_what_the_kernel_cannot_add_up_is_added_up_in_torch(change):
    q, k = change(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4))
    assert score_sums._add_up(q, k, 0.5, 4) is None
    sums = read_causes(SeenCall(q, k, 0.5), None, 4)
    assert sums.shape == (6, 2)
    assert sums.isfinite().all()
