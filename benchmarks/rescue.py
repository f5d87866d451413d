"""Train a small GPT without scaling, and with possible remedies: QK-Clip, QK-norm, or the scale 1/√dₖ.

    python -m benchmarks.rescue --output benchmarks/rescue.json

Model and task are those of `benchmarks.monitor_alerts`: predict the previous token, 120 steps, 5 seeds. A `Monitor`
clips after every step. The table shows the final losses of each way; 2.77 = ln 16 means that nothing was learnt.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.monitor_alerts import SEEDS, STEPS, Case, Gpt, fit
from sqrtdk.torch import Monitor

RATES = (1e-2, 3e-2)
LEARNT = 1.0
"""Final loss below which a run has learnt: far from 2.77 and from the losses of runs that learnt."""
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale 1": ({"scale": 1.0}, {}),
    "scale 1, clip=100": ({"scale": 1.0}, {"clip": 100.0}),
    'scale 1, clip=100, clip_by="spread"': ({"scale": 1.0}, {"clip": 100.0, "clip_by": "spread"}),
    'scale 1, clip=30, clip_by="spread"': ({"scale": 1.0}, {"clip": 30.0, "clip_by": "spread"}),
    "scale 1, QK-norm": ({"scale": 1.0, "normalised": True}, {}),
    "scale 1/√dₖ": ({}, {}),
}


def train(way: str, rate: float, seed: int) -> dict[str, Any]:
    """Train one way; return the mean of the last ten losses, and the last observed score spread."""
    model_options, options = WAYS[way]
    torch.manual_seed(seed)
    model = Gpt(**model_options)
    spreads: list[float] = []

    def look(step: int, entry: Any) -> None:
        spreads.append(max(spread for layer in entry["layers"].values() for spread in layer["score_spread"]))

    losses = []
    every = 1 if options else STEPS - 1
    with Monitor(model, to=look, every=every, on_alert=lambda alert: None, **options) as monitor:
        for loss in fit(model, Case(way, rate=rate), seed):
            losses.append(loss)
            monitor.step()
    return {"way": way, "rate": rate, "seed": seed, "loss": sum(losses[-10:]) / 10, "spread": spreads[-1]}


def write_table(record: dict[str, Any]) -> str:
    """Return a record as a Markdown table: a line per way, a pair of columns per learning rate."""
    titles = [f"{what} at {rate:g}" for rate in RATES for what in ("loss: median (least to largest)", "learnt")]
    lines = [f"| way | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for way in WAYS:
        cells = []
        for rate in RATES:
            losses = sorted(run["loss"] for run in record["runs"] if (run["way"], run["rate"]) == (way, rate))
            cells += [f"{median(losses):.2f} ({losses[0]:.2f} to {losses[-1]:.2f})"]
            cells += [f"{sum(loss < LEARNT for loss in losses)} of {len(losses)}"]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train all ways with all seeds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for way in WAYS:
        for rate in RATES:
            for seed in SEEDS:
                runs.append(train(way, rate, seed))
                print(json.dumps(runs[-1], ensure_ascii=False), flush=True)
    record = {"runs": runs, "steps": STEPS, "cpu": platform.processor() or platform.machine()}
    print(write_table(record))
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
