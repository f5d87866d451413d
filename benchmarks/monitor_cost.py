"""What `Monitor` costs a training run: steps with and without a look, in turn, on a model of GPT-2's small size.

    python benchmarks/monitor_cost.py --output benchmarks/monitor-cost.json

A look every n steps costs (looked − plain) / (n · plain) on average. The interval is that of a bootstrap over pairs of
neighbouring steps. Weights are random; nothing is downloaded. `--clip` clips after each look as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from sqrtdk.bench.model import ModelCase
from sqrtdk.torch import Monitor


def time_steps(case: ModelCase, pairs: int, clip: float | None) -> dict[str, list[float]]:
    """Seconds of plain steps and of steps that are looked at, `.step()` included, alternating in random order."""
    rng = np.random.default_rng(0)
    (inputs,) = case.make_inputs(rng)
    model = inputs.model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    seconds: dict[str, list[float]] = {"plain": [], "looked": []}

    def run(is_looked_at: bool) -> float:
        began = time.perf_counter()
        # Step 0 is looked at with any `every`; step 1 is not.
        with Monitor(
            model, to=lambda step, entry: json.dumps(entry), every=100, first_step=int(not is_looked_at), clip=clip
        ) as monitor:
            model(inputs.tokens, labels=inputs.tokens, use_cache=False).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            monitor.step()
        return time.perf_counter() - began

    run(True)
    for _ in range(pairs):
        for is_looked_at in rng.permutation([True, False]):
            seconds["looked" if is_looked_at else "plain"].append(run(bool(is_looked_at)))
    return seconds


def summarise(seconds: dict[str, list[float]], every: int) -> dict[str, Any]:
    """The share that looks add to a run, with a 95% bootstrap interval over pairs of steps."""
    plain, looked = (np.array(seconds[name]) for name in ("plain", "looked"))
    rng = np.random.default_rng(1)
    picks = rng.integers(len(plain), size=(4000, len(plain)))
    shares = (np.median(looked[picks] / plain[picks], axis=1) - 1.0) / every
    share = float(np.median(looked / plain) - 1.0) / every
    low, high = np.quantile(shares, [0.025, 0.975])
    return {
        "every": every,
        "seconds_plain": float(np.median(plain)),
        "seconds_looked": float(np.median(looked)),
        "average_cost": share,
        "interval": [float(low), float(high)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    case = ModelCase(given.batch, given.tokens, layers=given.layers)
    seconds = time_steps(case, given.pairs, given.clip)
    record = {
        "what": f"training steps of {case.name}, {case.layers} layers, float32",
        "clip": given.clip,
        **summarise(seconds, given.every),
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    low, high = record["interval"]
    print(
        f"{record['what']}: {record['seconds_plain']:.3f} s plain, {record['seconds_looked']:.3f} s looked at; with "
        f"every={given.every} {record['average_cost']:.3%} on average (95%: {low:.3%} to {high:.3%})"
    )
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
