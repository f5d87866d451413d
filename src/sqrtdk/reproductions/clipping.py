"""Training of the lab's transformer with QK-clip after every step, and the largest logits of every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.transformer import Transformer
from sqrtdk.torch.training.qk_clip import qk_clip_
from sqrtdk.torch.watch import watch


class ClippedRun(NamedTuple):
    """Held-out loss, and the largest logit of every step's batch."""

    loss: float
    largest: list[float]


def train_clipped(spec: RunSpec, threshold: float | None) -> ClippedRun:
    """Train one model on one thread with Adam; with a threshold, `qk_clip_` follows every step that passed it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(spec, threshold)
    finally:
        torch.set_num_threads(threads)


def _train(spec: RunSpec, threshold: float | None) -> ClippedRun:
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
        passed = threshold is not None and largest[-1] > threshold
        if passed:
            # The clip needs the parameters that made the scores: this pass comes before the step, like the one above.
            with watch(model) as watched, torch.no_grad():
                model(tokens)
        optimiser.step()
        if passed:
            assert threshold is not None
            qk_clip_(model, watched, threshold=threshold)
    held_out = task.held_out()
    with torch.no_grad():
        scores, _ = model(torch.from_numpy(held_out.tokens))
        loss = functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(held_out.targets).flatten())
    return ClippedRun(float(loss), largest)
