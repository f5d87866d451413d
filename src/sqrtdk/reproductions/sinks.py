"""One attention layer on a conditional task: softmax needs a place to put its weight, ReLU and gates do not.

At the one trigger of a sequence the output is the mean of the tokens before it, elsewhere it is zero.
Shapes: B sequences of L positions, the first of which carries no content.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from sqrtdk.reproductions.training import one_thread
from sqrtdk.torch import attention

Kind = Literal["softmax", "ReLU", "softmax with gate"]

_CONTENT = 8
_WIDTH = 32
_LENGTH = 17
_BATCH = 128


class Sequences(NamedTuple):
    """Tokens `[B, L, 3 + content]` (first, trigger, other, content), targets `[B, L, content]`, triggers `[B, L]`."""

    tokens: Tensor
    targets: Tensor
    triggers: Tensor


def sample_sequences(generator: torch.Generator, size: int, length: int = _LENGTH) -> Sequences:
    """Sample sequences with a trigger each, at the third position or later."""
    content = torch.randn(size, length, _CONTENT, generator=generator)
    content[:, 0] = 0.0
    triggers = torch.zeros(size, length, dtype=torch.bool)
    triggers[torch.arange(size), torch.randint(2, length, (size,), generator=generator)] = True
    first = torch.zeros(size, length, 1)
    first[:, 0] = 1.0
    flag = triggers.unsqueeze(-1).float()
    tokens = torch.cat([first, flag, 1.0 - first - flag, content], dim=-1)
    before = (content.cumsum(dim=1) - content) / (torch.arange(length) - 1).clamp(min=1).view(1, -1, 1)
    return Sequences(tokens, before * flag, triggers)


class Layer(nn.Module):
    """One causal head; with a gate, its output is multiplied by a sigmoid of the token."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        width = 3 + _CONTENT
        self.w_q, self.w_k, self.w_v = (nn.Linear(width, _WIDTH, bias=False) for _ in range(3))
        self.gate = nn.Linear(width, _WIDTH) if kind == "softmax with gate" else None
        self.w_o = nn.Linear(_WIDTH, _CONTENT, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs `[B, L, content]` and the weights `[B, L, L]`."""
        q, k, v = self.w_q(tokens), self.w_k(tokens), self.w_v(tokens)
        if self.kind == "ReLU":
            visible = torch.arange(1, tokens.shape[1] + 1).view(1, -1, 1)
            weights = (q @ k.mT / math.sqrt(_WIDTH)).relu().tril() / visible
            mixed = weights @ v
        else:
            heads = (x.unsqueeze(1) for x in (q, k, v))
            output, _, found = attention(*heads, causal=True, statistics=False, weights=True)
            mixed, weights = cast(Tensor, output)[:, 0], cast(Tensor, found)[:, 0]
        if self.gate is not None:
            mixed = mixed * self.gate(tokens).sigmoid()
        return self.w_o(mixed), weights


class Sink(NamedTuple):
    """Mean weight of queries on the first position without and with a trigger; loss relative to an output of zero."""

    on_first: float
    at_trigger: float
    relative_loss: float


@one_thread()
def train_layer(kind: Kind, seed: int, steps: int) -> Sink:
    """Train a layer with Adam (0.003), and measure it on new sequences."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = Layer(kind)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(layer.parameters(), lr=3e-3, fused=True)
    for _ in range(steps):
        sequences = sample_sequences(generator, _BATCH)
        output, _ = layer(sequences.tokens)
        optimiser.zero_grad(set_to_none=True)
        _loss(output, sequences).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    with torch.no_grad():
        sequences = sample_sequences(torch.Generator().manual_seed(10**6), 2048)
        output, weights = layer(sequences.tokens)
        # The first position sees only itself.
        first, triggers = weights[:, 1:, 0], sequences.triggers[:, 1:]
        loss = _loss(output, sequences) / _loss(torch.zeros_like(output), sequences)
        return Sink(float(first[~triggers].mean()), float(first[triggers].mean()), float(loss))


def _loss(output: Tensor, sequences: Sequences) -> Tensor:
    """Mean squared error at the triggers plus that elsewhere: both halves of the task weigh the same."""
    squares = (output - sequences.targets).square().mean(dim=-1)
    return squares[sequences.triggers].mean() + squares[~sequences.triggers].mean()
