"""Speed of the lab itself: processes against a bare torch loop, the harness in a step, Ray against processes."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from sqrtdk.lab import Lab, Processes, Ray, RunSpec
from sqrtdk.lab.laboratory import Executor
from sqrtdk.lab.train import _DATA_STREAM, _EPS, train
from sqrtdk.lab.transformer import Transformer


def train_bare(spec: RunSpec) -> float:
    """Train the same model on the same data in the loop that anybody would write; return the last loss."""
    import numpy as np

    task, rng = spec.make_task(), np.random.default_rng([_DATA_STREAM, spec.seed])
    model = Transformer(spec, task)
    optimiser = torch.optim.Adam(model.parameters(), lr=spec.lr, eps=_EPS, fused=True)
    loss = torch.zeros(())
    for _ in range(spec.steps):
        batch = task.sample(rng, spec.batch)
        scores, _ = model(torch.from_numpy(batch.tokens))
        loss = functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return float(loss.detach())


def seconds_of(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the time that something takes."""
    began = clock()
    work()
    return clock() - began


def sweep(specs: list[RunSpec], executor: Executor) -> Callable[[], object]:
    """Return what trains specs in a lab whose executor is warm."""
    return lambda: Lab(None, executor).run(specs)


def compare(
    first: Callable[[], object],
    second: Callable[[], object],
    pairs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Return the median and the range of the ratio of two times, each pair measured one right after the other."""
    ratios = sorted(seconds_of(first, clock) / seconds_of(second, clock) for _ in range(pairs))
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {pairs} pairs)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="also measure Ray, with runs of four times the steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    specs = [RunSpec(steps=options.steps, seed=seed) for seed in range(12)]
    train_bare(specs[0])  # warm
    # CPU time of this process: other load on the machine counts little.
    bare = compare(lambda: train(specs[0]), lambda: train_bare(specs[0]), options.pairs, time.process_time)
    print(f"one run in the lab / in a bare loop, CPU time: {bare}", flush=True)
    processes = Processes(2)
    sweep(specs[:2], processes)()  # warm
    several = compare(lambda: [train_bare(spec) for spec in specs], sweep(specs, processes), max(options.pairs // 2, 1))
    print(f"12 bare runs one after another / 12 runs of 2 processes: {several}", flush=True)
    if options.ray:
        longer = [RunSpec(steps=4 * options.steps, seed=seed) for seed in range(4)]
        cluster = Ray("ray", workers=2)
        sweep(specs[:2], cluster)()
        print(f"Ray / processes: {compare(sweep(longer, cluster), sweep(longer, processes), options.pairs)}")
        cluster.close()
    processes.close()


if __name__ == "__main__":
    main()
