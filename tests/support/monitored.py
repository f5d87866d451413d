"""A small model in training, and a destination that keeps what a monitor writes."""

import torch

from torch_watched import ByHand, Fused, Stack, make_input

TOKENS = 96
X = make_input(batch=4, tokens=TOKENS, seed=1)


class Looks(list):
    def __call__(self, step, entry):
        self.append((step, entry))

    @property
    def steps(self):
        return [step for step, _ in self]


def make_model():
    torch.manual_seed(0)
    return Stack(ByHand(), Fused())


def train(model, monitor, steps, parts=1, rate=1e-3, loss=None):
    """Adam on a regression; a step has several micro-batches if asked."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        for part in X.chunk(parts):
            (loss or regression)(model, part).backward()
        optimiser.step()
        optimiser.zero_grad()
        monitor.step()


def regression(model, x):
    return (model(x) - x.roll(1, 1)).square().mean()
