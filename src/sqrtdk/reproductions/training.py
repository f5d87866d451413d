"""Training of the lab's transformer that keeps the model, with the largest logit of every step and QK-clip if asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.transformer import Transformer
from sqrtdk.torch.training.qk_clip import qk_clip_
from sqrtdk.torch.watch import watch


class Trained(NamedTuple):
    """Trained model, and the largest logit of every step's batch."""

    model: Transformer
    largest: list[float]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that sums do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train_model(spec: RunSpec, threshold: float | None = None) -> Trained:
    """Train a model as the lab does; with a threshold, `qk_clip_` follows every step whose logits passed it."""
    task = spec.make_task()
    model = Transformer(spec, task)
    optimiser = torch.optim.Adam(model.parameters(), lr=spec.lr, fused=True)
    rng = np.random.default_rng([0, spec.seed])
    largest = []
    for _ in range(spec.steps):
        batch = task.sample(rng, spec.batch)
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets).flatten()
        scores, seen = model(tokens, statistics=True)
        loss = functional.cross_entropy(scores.flatten(0, 1), targets)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        largest.append(max(float(layer.statistics.max_logit.max()) for layer in seen))
        if threshold is None or largest[-1] <= threshold:
            optimiser.step()
            continue
        # The watch finds the parameters by the scores they make, so its pass comes before the step.
        with watch(model) as watched, torch.no_grad():
            model(tokens)
        optimiser.step()
        qk_clip_(model, watched, threshold=threshold)
    return Trained(model, largest)


@one_thread()
def evaluate(model: Transformer, spec: RunSpec) -> float:
    """Return the loss on the held-out data of the spec's task."""
    held_out = spec.make_task().held_out()
    with torch.no_grad():
        scores, _ = model(torch.from_numpy(held_out.tokens))
        return float(functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(held_out.targets).flatten()))
