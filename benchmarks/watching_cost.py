"""Time the cost of watching a model of GPT-2 small's size: forward passes, and training steps under `Monitor`.

    python -m benchmarks.watching_cost --output benchmarks/watching-cost.json

Forward passes run in turn, in random order: plain, under `watch`, with attention that sqrtdk computes and measures in
one pass ("fused"), and with `output_attentions=True` and the entropy of the returned weights. An observation every n
steps costs (looked − plain) / (n · plain) on average. Intervals come from a bootstrap over rounds. Weights are random;
nothing is downloaded. `--clip` also clips after each observation. `--generate N` times the generation of N tokens
instead, plain and under `watch`, in CPU time. `--families` times forward passes of BERT, GPT-2, Llama and Qwen3:
the first watch of a model, which follows everything, and later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.model import ModelCase
from sqrtdk.torch import Monitor, watch
from sqrtdk.torch.watch.replace import FusedWatch
from sqrtdk.torch.watch.seen import Seen
from sqrtdk.torch.watch.uninvolved import recall_uninvolved


def time_steps(case: ModelCase, rounds: int, clip: float | None) -> dict[str, list[float]]:
    """Return the seconds of plain and of observed steps, `.step()` included, alternating in random order."""
    rng = np.random.default_rng(0)
    (inputs,) = case.make_inputs(rng)
    model = inputs.model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    seconds: dict[str, list[float]] = {"plain": [], "looked": []}

    def run(is_looked_at: bool) -> float:
        began = time.perf_counter()
        # Step 0 is observed for any `every`; step 3 is not.
        with Monitor(
            model, to=lambda step, entry: json.dumps(entry), every=100, first_step=0 if is_looked_at else 3, clip=clip
        ) as monitor:
            model(inputs.tokens, labels=inputs.tokens, use_cache=False).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            monitor.step()
        return time.perf_counter() - began

    run(True)
    for _ in range(rounds):
        for is_looked_at in rng.permutation([True, False]):
            seconds["looked" if is_looked_at else "plain"].append(run(bool(is_looked_at)))
    return seconds


def time_forwards(case: ModelCase, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of forward passes of each way, in random order within each round."""
    rng = np.random.default_rng(0)
    (inputs,) = case.make_inputs(rng)
    model = inputs.model.eval()

    def run_plain() -> None:
        model(inputs.tokens, use_cache=False)

    def run_watched(start: Callable[[torch.nn.Module], AbstractContextManager[Seen]]) -> None:
        with start(model) as seen:
            run_plain()
        assert len(seen.layers) == case.layers

    def run_with_weights() -> None:
        model.set_attn_implementation("eager")
        try:
            for weights in model(inputs.tokens, use_cache=False, output_attentions=True).attentions:
                torch.special.entr(weights).sum(dim=-1).mean(dim=(0, 2))
        finally:
            model.set_attn_implementation("sdpa")

    ways: dict[str, Callable[[], None]] = {
        "plain": run_plain,
        "passive": lambda: run_watched(watch),
        "fused": lambda: run_watched(FusedWatch),
        "output_attentions": run_with_weights,
    }
    model.set_attn_implementation("sdpa")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with torch.no_grad():
        for at in range(rounds + 1):
            for way in rng.permutation(list(ways)):
                began = time.perf_counter()
                ways[way]()
                if at:  # the first round warms up
                    seconds[way].append(time.perf_counter() - began)
    return seconds


def time_generation(case: ModelCase, rounds: int, count: int) -> dict[str, list[float]]:
    """Return the CPU seconds of `generate` for the last tokens of a case, plain and watched, in random order."""
    rng = np.random.default_rng(0)
    (inputs,) = case.make_inputs(rng)
    model, prompt = inputs.model.eval(), inputs.tokens[:, :-count]  # the model has no more positions than tokens
    seconds: dict[str, list[float]] = {"plain": [], "passive": []}
    for at in range(rounds + 1):
        for way in rng.permutation(list(seconds)):
            began = time.process_time()
            with watch(model) if way == "passive" else nullcontext():
                model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            if at:  # the first round warms up
                seconds[way].append(time.process_time() - began)
    return seconds


class FamilyCase(NamedTuple):
    """Forward passes of a small Hugging Face model from its configuration."""

    family: str
    attention: str
    batch: int
    tokens: int
    layers: int
    width: int
    heads: int
    threads: int

    def make_model(self) -> Any:
        """Return the model in evaluation mode, with random weights."""
        import transformers

        config = transformers.AutoConfig.for_model(
            self.family,
            vocab_size=1000,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            # Families without such a setting ignore it.
            intermediate_size=(4 if self.family == "bert" else 3) * self.width,
            num_key_value_heads=self.heads,
            head_dim=self.width // self.heads,
        )
        config.bos_token_id = config.eos_token_id = None
        model = transformers.AutoModel.from_config(config).eval()
        model.set_attn_implementation(self.attention)
        return model


FAMILIES = (
    *(FamilyCase("bert", "sdpa", batch, 256, 6, 384, 12, threads) for batch in (4, 8) for threads in (1, 2)),
    *(
        FamilyCase(family, attention, 4, 32, 4, 128, 4, 1)
        for family in ("bert", "gpt2", "llama", "qwen3")
        for attention in ("sdpa", "eager")
    ),
)


def time_family(case: FamilyCase, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of plain forward passes, of first watches and of later ones, in random order.

    One thread is timed by its CPU time, several by the clock. Reading the summaries belongs to a watch.
    """
    torch.set_num_threads(case.threads)
    clock = time.process_time if case.threads == 1 else time.perf_counter
    rng = np.random.default_rng(0)
    model = case.make_model()
    tokens = torch.from_numpy(rng.integers(1000, size=(case.batch, case.tokens)))
    seconds: dict[str, list[float]] = {"plain": [], "first": [], "later": []}
    with torch.no_grad():
        for at in range(rounds + 2):
            for way in rng.permutation(list(seconds)):
                if way == "first":
                    recall_uninvolved(model).forget()
                began = clock()
                if way == "plain":
                    model(tokens)
                else:
                    with watch(model) as seen:
                        model(tokens)
                    assert len(seen.layers) == case.layers
                if at > 1:  # the first rounds warm up
                    seconds[way].append(clock() - began)
    return seconds


def print_families(rounds: int) -> None:
    """Time all families and print a line for each."""
    for case in FAMILIES:
        seconds = time_family(case, rounds if case.width > 128 else 4 * rounds)
        costs = []
        for way in ("first", "later"):
            cost = compare(seconds, way)
            low, high = cost["interval"]
            costs.append(f"{way} {cost['ratio']:.3f} ({low:.3f} to {high:.3f})")
        size = f"{case.layers} × {case.width}, {case.batch} × {case.tokens} tokens, threads: {case.threads}"
        plain = float(np.median(seconds["plain"])) * 1e3
        print(f"{case.family} {case.attention}, {size}: plain {plain:.1f} ms, {', '.join(costs)}", flush=True)


def compare(seconds: dict[str, list[float]], way: str) -> dict[str, Any]:
    """Return the median of paired ratios to the plain way, with its 95% bootstrap interval."""
    ratios = np.array(seconds[way]) / np.array(seconds["plain"])
    picks = np.random.default_rng(1).integers(len(ratios), size=(4000, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    return {"ratio": float(np.median(ratios)), "interval": [float(low), float(high)]}


def main() -> None:
    """Time forward passes and training steps, print the results and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--generate", type=int, default=None, metavar="N")
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    if given.families:
        print_families(given.rounds)
        return
    tokens = given.tokens + (given.generate or 0)
    case = ModelCase(given.batch, tokens, layers=given.layers, heads=given.width // 64, width=given.width)
    if given.generate is not None:
        cost = compare(time_generation(case, given.rounds, given.generate), "passive")
        low, high = cost["interval"]
        print(f"generate, passive: {cost['ratio']:.3f} of the plain time (95%: {low:.3f} to {high:.3f})")
        return
    forwards = time_forwards(case, given.rounds)
    watched = {way: compare(forwards, way) for way in forwards if way != "plain"}
    steps = time_steps(case, given.rounds, given.clip)
    looked = compare(steps, "looked")
    monitor = {
        "every": given.every,
        "clip": given.clip,
        "average_cost": (looked["ratio"] - 1.0) / given.every,
        "interval": [(bound - 1.0) / given.every for bound in looked["interval"]],
    }
    for way, cost in watched.items():
        low, high = cost["interval"]
        print(f"forward, {way}: {cost['ratio']:.3f} of the plain time (95%: {low:.3f} to {high:.3f})")
    low, high = monitor["interval"]
    print(f"Monitor, every={given.every}: {monitor['average_cost']:.3%} on average (95%: {low:.3%} to {high:.3%})")
    record = {
        "what": f"{case.name}, {case.layers} layers, float32",
        "forward": watched,
        "monitor": monitor,
        "seconds": {"forward": forwards, "training": steps},
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {"torch": torch.__version__, "transformers": version("transformers")},
    }
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
