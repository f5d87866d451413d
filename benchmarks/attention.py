"""Side-by-side timings of attention on the CPU: random order, paired ratios, bootstrap intervals, raw JSON kept.

python benchmarks/attention.py --output build/benchmark.json
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import sqrtdk
from sqrtdk.records import cpu_name, versions

SHAPES = ((8, 8, 128, 64), (1, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 4096, 128))


def contenders(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> dict[str, Callable[[], np.ndarray]]:
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    visible = np.tri(q.shape[-2], dtype=bool) if causal else None
    return {
        "sqrtdk": lambda: sqrtdk.attention(q, k, v, causal=causal, statistics=False).output,
        "sqrtdk with statistics": lambda: sqrtdk.attention(q, k, v, causal=causal).output,
        "textbook n×n in NumPy": lambda: sqrtdk.scaled_dot_product_attention(q, k, v, mask=visible)[0],
        "torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal).numpy(),
    }


def measure(shape: tuple[int, ...], causal: bool, rounds: int, rng: np.random.Generator) -> dict[str, object]:
    q, k, v = rng.standard_normal((3, *shape), dtype=np.float32)
    runs = contenders(q, k, v, causal)
    exact = sqrtdk.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=causal, statistics=False).output
    error = {name: float(np.abs(run() - exact).max()) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in rng.permutation(list(runs)):
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
    ratios = {name: ratio(times, seconds["torch SDPA"], rng) for name, times in seconds.items()}
    return {"shape": shape, "causal": causal, "time_over_torch": ratios, "error": error, "seconds": seconds}


def ratio(mine: list[float], peer: list[float], rng: np.random.Generator) -> dict[str, float]:
    """Median of the paired ratios with a 95% bootstrap interval over rounds."""
    pairs = np.asarray(mine) / np.asarray(peer)
    medians = np.median(rng.choice(pairs, (2000, len(pairs))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return {"median": float(np.median(pairs)), "low": float(low), "high": float(high)}


def peak_memory(rng: np.random.Generator) -> dict[str, float]:
    """MiB that NumPy allocates beyond the inputs at N = 8192, one head of 64."""
    q, k, v = rng.standard_normal((3, 8192, 64), dtype=np.float32)
    found = {}
    runs = {
        "sqrtdk with statistics": lambda: sqrtdk.attention(q, k, v),
        "textbook n×n in NumPy": lambda: sqrtdk.scaled_dot_product_attention(q, k, v),
    }
    for name, run in runs.items():
        tracemalloc.start()
        run()
        found[name] = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    results = []
    for shape in SHAPES:
        for causal in (False, True):
            results.append(measure(shape, causal, arguments.rounds, rng))
            ratios = results[-1]["time_over_torch"]
            line = ", ".join(
                f"{name} {r['median']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for name, r in ratios.items()
            )
            print(f"{shape} {'causal' if causal else 'full'}: time over torch SDPA: {line}", flush=True)
    memory = peak_memory(rng)
    print("peak MiB at N = 8192: " + ", ".join(f"{name} {value:.0f}" for name, value in memory.items()))
    record = {
        "cpu": cpu_name(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "rounds": arguments.rounds,
        "results": results,
        "peak_mebibytes": memory,
    }
    arguments.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
