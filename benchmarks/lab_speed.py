"""Speed of the lab itself: processes against a bare torch loop, Ray against processes, two nodes against one."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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


def sweep_cold(specs: list[RunSpec], make_executor: Callable[[], Executor]) -> None:
    """Train specs in a lab whose executor is started before and ended after, as a command does."""
    with Lab(None, make_executor()) as lab:
        lab.run(specs)


def compare(
    first: Callable[[], object],
    second: Callable[[], object],
    pairs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Return the median and the range of the ratio of two times; each pair is measured together, in random order."""
    ratios = []
    for _ in range(pairs):
        times = {work: seconds_of(work, clock) for work in random.sample((first, second), 2)}
        ratios.append(times[first] / times[second])
    return describe(ratios)


class NodeTimes(NamedTuple):
    """Wall time of a sweep on a cluster, and CPU time of its driver, in seconds."""

    wall: float
    driver: float


def time_on_nodes(specs: list[RunSpec], nodes: int) -> NodeTimes:
    """Train specs on a new cluster of some nodes with one CPU each, beside a head without; the start does not count."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with tempfile.TemporaryDirectory() as folder, Lab(f"{folder}/runs.sqlite", Ray(cluster.address)) as lab:
            load_on_each_node(lab.executor)
            lab.run([RunSpec(steps=5, seed=1000 + number) for number in range(nodes)])
            driver = time.process_time()
            wall = seconds_of(lambda: lab.run(specs), time.perf_counter)
            return NodeTimes(wall, time.process_time() - driver)
    finally:
        cluster.shutdown()


def load_on_each_node(executor: Executor) -> None:
    """Let the worker of each node load what training needs: without this one node might do all short runs alone."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    executor.prepare()
    load = ray.remote(load_training)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    pinned = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    ray.get([load.options(num_cpus=1, scheduling_strategy=strategy).remote() for strategy in pinned])


def load_training() -> None:
    """Train a step."""
    from sqrtdk.lab.train import train

    train(RunSpec(steps=1))


def compare_nodes(steps: int, pairs: int, runs: int = 8) -> list[str]:
    """Measure the same sweep on one node and on two, in random order, and return the lines to print."""
    specs = [RunSpec(steps=steps, seed=seed) for seed in range(runs)]
    order = random.Random(0)
    ratios, drivers = [], []
    for _ in range(pairs):
        times = {nodes: time_on_nodes(specs, nodes) for nodes in order.sample((1, 2), 2)}
        ratios.append(times[1].wall / times[2].wall)
        drivers += [one.driver / runs for one in times.values()]
    made: list[bytes] = []
    train(RunSpec(steps=1), lambda step, curves, make, show: made.append(make()))
    return [
        f"{runs} runs of {steps} steps on one node / on two nodes: {describe(ratios)}",
        f"driver's CPU seconds per run: {describe(drivers, 'sweeps')}",
        f"bytes of a checkpoint: {len(made[0])}",
    ]


def describe(values: list[float], noun: str = "pairs") -> str:
    """Return the median and the range of some values."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}, {len(values)} {noun})"


def compare_ray(specs: list[RunSpec], pairs: int) -> None:
    """Measure Ray against processes, warm and with the start and the end of both, and print."""
    processes, cluster = Processes(2), Ray("ray", workers=2)
    for executor in (cluster, processes):
        sweep([RunSpec(steps=5, seed=seed) for seed in range(2)], executor)()
    runs = f"{len(specs)} runs of {specs[0].steps} steps"
    warm = compare(sweep(specs, cluster), sweep(specs, processes), pairs)
    print(f"{runs} on Ray / in 2 processes, both warm: {warm}", flush=True)
    cluster.close()
    processes.close()
    on_ray, in_processes = partial(Ray, "ray", workers=2), partial(Processes, 2)
    cold = compare(partial(sweep_cold, specs, on_ray), partial(sweep_cold, specs, in_processes), pairs)
    print(f"{runs} on Ray / in 2 processes, start and end included: {cold}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="only measure Ray against processes")
    parser.add_argument("--nodes", action="store_true", help="only measure a cluster of two nodes against one node")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if sys.dont_write_bytecode:  # other processes would compile torch and Ray at each start, which pip does once
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ.setdefault("PYTHONPYCACHEPREFIX", f"{sys.prefix}/bytecode")
    specs = [RunSpec(steps=options.steps, seed=seed) for seed in range(options.runs)]
    if options.nodes:
        print("\n".join(compare_nodes(options.steps, options.pairs)))
        return
    if options.ray:
        compare_ray(specs, options.pairs)
        return
    train_bare(specs[0])  # warm
    # CPU time of this process: other load on the machine counts little.
    bare = compare(lambda: train(specs[0]), lambda: train_bare(specs[0]), options.pairs, time.process_time)
    print(f"one run of {options.steps} steps in the lab / in a bare loop, CPU time: {bare}", flush=True)
    processes = Processes(2)
    sweep(specs[:2], processes)()  # warm
    several = compare(lambda: [train_bare(spec) for spec in specs], sweep(specs, processes), options.pairs)
    print(f"{options.runs} bare runs one after another / the same in 2 processes of the lab: {several}")
    processes.close()


if __name__ == "__main__":
    main()
