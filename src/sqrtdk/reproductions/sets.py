"""One attention head that looks something up in a set of items: sets of 16 in training, larger ones afterwards.

Shapes: B sets, n items, D = dₖ; the query and the items have widths of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.reproductions.training import one_thread
from sqrtdk.scales import LogN
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch import attention

TRAINED_ITEMS = 16
_D_K = 64
_BATCH = 128
_CHUNK = 1 << 18  # items at a time

# β(H), the inverse temperature of Veličković et al. 2024, highest power first; above 0.5 nats and never below 1.
_POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)


class Sets(NamedTuple):
    """Sets `[B, n, width]`, a query each `[B, width]`, and the right classes `[B]`."""

    items: Tensor
    query: Tensor
    classes: Tensor


class Lookup(NamedTuple):
    """Task of a head: how sets are sampled, and the widths."""

    sample: Callable[[torch.Generator, int, int], Sets]
    item_width: int
    query_width: int
    classes: int
    hidden: bool


def _sample_maxima(generator: torch.Generator, sets: int, items: int) -> Sets:
    """Items have a random priority and one of ten classes; the answer is the class of the highest priority."""
    priority = torch.rand(sets, items, generator=generator)
    classes = torch.randint(10, (sets, items), generator=generator)
    features = torch.cat([priority.unsqueeze(-1), functional.one_hot(classes, 10)], dim=-1)
    answers = classes.gather(1, priority.argmax(dim=1, keepdim=True)).squeeze(1)
    return Sets(features, torch.rand(sets, 1, generator=generator), answers)


def _sample_pairs(generator: torch.Generator, sets: int, items: int) -> Sets:
    """Items are a random vector and one of sixteen values; the query is one of the vectors, the answer its value."""
    keys = torch.randn(sets, items, 32, generator=generator)
    values = torch.randint(16, (sets, items), generator=generator)
    asked = torch.randint(items, (sets,), generator=generator)
    rows = torch.arange(sets)
    return Sets(torch.cat([keys, functional.one_hot(values, 16)], dim=-1), keys[rows, asked], values[rows, asked])


MAXIMUM = Lookup(_sample_maxima, 11, 1, 10, hidden=True)
RECALL = Lookup(_sample_pairs, 48, 32, 16, hidden=False)


class SetHead(nn.Module):
    """Encodes items and query, attends once, and classifies the output."""

    def __init__(self, lookup: Lookup, *, learns_ssmax: bool) -> None:
        super().__init__()
        self.items = _encoder(lookup.item_width, lookup.hidden)
        self.query = _encoder(lookup.query_width, lookup.hidden)
        width = 64 if lookup.hidden else lookup.item_width
        self.w_q = nn.Linear(64 if lookup.hidden else lookup.query_width, _D_K, bias=False)
        self.w_k = nn.Linear(width, _D_K, bias=False)
        self.w_v = nn.Linear(width, 64, bias=False)
        hidden = [nn.Linear(64, 64), nn.GELU()] if lookup.hidden else []
        self.classify = nn.Sequential(*hidden, nn.Linear(64, lookup.classes))
        # SSMax's s, from where the scale is 1/√dₖ at the size of training.
        self.s = nn.Parameter(torch.tensor(1.0 / math.log(TRAINED_ITEMS))) if learns_ssmax else None

    def forward(self, sets: Sets, policy: str) -> tuple[Tensor, AttentionStatistics]:
        """Return the scores of the classes `[B, classes]` and the statistics of the rows `[B, 1, 1]`."""
        encoded = self.items(sets.items)
        q = self.w_q(self.query(sets.query))[:, None, None]
        k, v = self.w_k(encoded).unsqueeze(1), self.w_v(encoded).unsqueeze(1)
        if self.s is not None:
            scale: object = self.s * math.log(k.shape[-2]) / math.sqrt(_D_K)
        elif policy == "log n":
            scale = LogN(s=1.0 / math.log(TRAINED_ITEMS))
        elif policy == "entropy-dependent":
            scale = _sharpen(cast(AttentionStatistics, attention(q, k, v).statistics)) / math.sqrt(_D_K)
        else:
            scale = None
        output, statistics, _ = attention(q, k, v, scale=scale)  # type: ignore[arg-type]
        return self.classify(cast(Tensor, output)[:, 0, 0]), cast(AttentionStatistics, statistics)


def _sharpen(statistics: AttentionStatistics) -> Tensor:
    """Return the inverse temperature β that the entropy of each row asks for."""
    entropy = cast(Tensor, statistics.entropy)
    beta = torch.zeros_like(entropy)
    for coefficient in _POLYNOMIAL:
        beta = beta * entropy + coefficient
    return torch.where(entropy > 0.5, beta.clamp(min=1.0), torch.ones_like(beta)).float()


def _encoder(width: int, hidden: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 64)) if hidden else nn.Identity()


class Tested(NamedTuple):
    """Share of right answers and mean largest weight, per size of the sets."""

    accuracy: list[float]
    max_weight: list[float]


@one_thread()
def train_head(lookup: Lookup, seed: int, steps: int, *, learns_ssmax: bool = False) -> SetHead:
    """Train a head with Adam (0.001) on sets of 16 items."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = SetHead(lookup, learns_ssmax=learns_ssmax)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        sets = lookup.sample(generator, _BATCH, TRAINED_ITEMS)
        loss = functional.cross_entropy(head(sets, "1/√dₖ")[0], sets.classes)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return head


@one_thread()
def ask_head(head: SetHead, lookup: Lookup, policy: str, sizes: Sequence[int], sets: int) -> Tested:
    """Ask a trained head about new sets of each size, the same for every head and policy."""
    accuracy, weights = [], []
    with torch.no_grad():
        for items in sizes:
            generator = torch.Generator().manual_seed(items)
            size = max(1, min(sets, _CHUNK // items))
            right, total, weight = 0, 0, 0.0
            while total < sets:
                asked = lookup.sample(generator, size, items)
                scores, statistics = head(asked, policy)
                right += int((scores.argmax(dim=-1) == asked.classes).sum())
                weight += float(cast(Tensor, statistics.max_weight).sum())
                total += size
            accuracy.append(right / total)
            weights.append(weight / total)
    return Tested(accuracy, weights)
