"""Train a small GPT with forced failures, and healthy ones for comparison, and list the alerts of a `Monitor`.

    python -m benchmarks.monitor_alerts --output benchmarks/monitor-alerts.json

Every run takes a few seconds in one process: 2 layers of 2 heads, dₖ = 32, 8 sequences of up to 96 tokens, AdamW. The
first observation with one of these marks shows a failure: scores more than 100 above their mean, an entropy ratio below
0.1 that the head did not begin with, non-finite rows, or a scale that is not 1/√dₖ. These marks are recorded before any
rule judges them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.torch import Alert, Monitor

VOCABULARY, LENGTH, WIDTH, HEADS, STEPS, EVERY = 16, 96, 64, 2, 120, 20
SEEDS = range(5)


class Attention(nn.Module):
    """Causal attention with its own scale; optionally with float16 products of q and k, or with normalised q and k."""

    def __init__(self, scale: float, in_float16: bool, normalised: bool) -> None:
        super().__init__()
        self.scale, self.in_float16, self.normalised = scale, in_float16, normalised
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output `[B, L, width]`."""
        q, k, v = (project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        if self.normalised:
            q, k = (functional.rms_norm(one, one.shape[-1:]) for one in (q, k))
        if self.in_float16:
            scores = (q.half() @ k.half().transpose(-1, -2)).float() * self.scale
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.o(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward part, each applied to the normalised stream and added to it."""

    def __init__(self, scale: float, in_float16: bool, normalised: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(scale, in_float16, normalised)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output `[B, L, width]`."""
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Two blocks between embeddings and a linear layer."""

    def __init__(
        self, scale: float = (WIDTH / HEADS) ** -0.5, in_float16: bool = False, normalised: bool = False
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(scale, in_float16, normalised) for _ in range(2))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits `[B, L, vocabulary]`."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.out(x)  # type: ignore[no-any-return]


def make_batch(task: str, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random tokens and answers: the previous token ("previous"), the first ("first") or the next ("repeat")."""
    tokens = torch.randint(0, VOCABULARY, (8, length), generator=generator)
    if task == "previous":
        return tokens, tokens.roll(1, 1)
    if task == "first":
        return tokens, tokens[:, :1].expand_as(tokens)
    tokens = torch.cat([tokens[:, : length // 2]] * 2, dim=1)
    return tokens, tokens.roll(-1, 1)


@dataclass(frozen=True)
class Case:
    """Kind of run: the options of its model, and what changes before a step and in its loss."""

    name: str
    causes: tuple[str, ...] = ()
    rate: float = 3e-3
    optimiser: str = "AdamW"
    model: dict[str, Any] = field(default_factory=dict)
    task: str = "previous"
    warm_up: int = 0
    length: Callable[[int], int] = lambda step: LENGTH
    before: Callable[[int, Gpt], None] = lambda step, model: None
    weight: Callable[[int], float] = lambda step: 1.0
    trained_on: str | None = None


def grow_head(step: int, model: Gpt) -> None:
    """Lengthen the queries and keys of head 1 in the last layer, from step 30 on."""
    if step >= 30:
        with torch.no_grad():
            for projection in (model.blocks[1].attention.q, model.blocks[1].attention.k):  # type: ignore[union-attr]
                projection.weight[WIDTH // HEADS :] *= 1.08  # type: ignore[union-attr, index, operator]


def grow_queries_and_keys(step: int, model: Gpt) -> None:
    """Lengthen all queries and keys from step 30 on, until their products exceed float16."""
    if step >= 30:
        with torch.no_grad():
            for block in model.blocks:
                block.attention.q.weight.mul_(1.2)  # type: ignore[union-attr, operator]
                block.attention.k.weight.mul_(1.2)  # type: ignore[union-attr, operator]


FAILURES = (
    Case("scale 1 at learning rate 3e-2", ("No scale is applied",), rate=3e-2, model={"scale": 1.0}),
    Case("scale applied twice", ("1/√dₖ applied twice",), model={"scale": HEADS / WIDTH}),
    Case("learning rate × 30", ("grew most",), rate=9e-2),
    Case("float16 overflow", ("grew most", "NaN or"), model={"in_float16": True}, before=grow_queries_and_keys),
    Case("one bad batch", ("it went from",), 0.3, "SGD", weight=lambda step: 3e3 if step == 30 else 1.0),
    Case("one head collapses", ("grew most",), before=grow_head),
)
HEALTHY = (
    Case("previous token"),
    Case("warm-up", warm_up=60, task="first"),
    Case("growing lengths", length=lambda step: 48 if step < 50 else 72 if step < 90 else LENGTH),
    Case("fine-tuning", rate=1e-3, task="repeat", trained_on="previous"),
)


def train(case: Case, seed: int) -> dict[str, Any]:
    """Train one case and return losses, the first observed step that shows the failure, and the alerts."""
    torch.manual_seed(seed)
    model = Gpt(**case.model)
    if case.trained_on is not None:
        for _ in fit(model, Case(case.trained_on, task=case.trained_on), seed + 1000):
            pass
    shown: list[int] = []
    first: dict[str, list[float | None]] = {}
    usual = (WIDTH / HEADS) ** -0.5

    def look(step: int, entry: Any) -> None:
        for path, layer in entry["layers"].items():
            first.setdefault(path, layer["entropy_ratio"])
            fell = zip(first[path], layer["entropy_ratio"], strict=True)
            if (
                any(spread is None or spread > 100 for spread in layer["score_spread"])
                or any(now is None or (now < 0.1 <= (start or 0.0)) for start, now in fell)
                or not math.isclose(model.blocks[0].attention.scale, usual, rel_tol=1e-3)  # type: ignore[union-attr, arg-type]
            ):
                shown.append(step)
            spreads.extend(spread for spread in layer["score_spread"] if spread is not None)

    spreads: list[float] = []
    alerts: list[Alert] = []
    with Monitor(model, to=look, every=EVERY, on_alert=alerts.append) as monitor:
        losses = []
        for loss in fit(model, case, seed):
            losses.append(loss)
            monitor.step()
    raised = [alert for alert in alerts if alert.is_raised]
    right = [alert for alert in raised if any(cause in alert.cause for cause in case.causes)]
    return {
        "case": case.name,
        "seed": seed,
        "loss": [loss if math.isfinite(loss) else None for loss in (losses[0], sum(losses[-10:]) / 10)],
        "shown_at": shown[0] if shown else None,
        "alert_at": right[0].step if right else None,
        "alerts": [repr(alert) for alert in alerts],
        "largest_spread": max(spreads, default=None),
    }


def fit(model: Gpt, case: Case, seed: int) -> Any:
    """Train a model and yield the loss after each step."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = getattr(torch.optim, case.optimiser)(model.parameters(), lr=case.rate)
    for step in range(STEPS):
        case.before(step, model)
        for group in optimiser.param_groups:
            group["lr"] = case.rate * min(1.0, (step + 1) / max(case.warm_up, 1))
        tokens, answers = make_batch(case.task, case.length(step), generator)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())
        (case.weight(step) * loss).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
        yield loss.item()


def write_table(record: dict[str, Any]) -> str:
    """Return a record as two Markdown tables: forced failures, and healthy runs."""

    def span(values: list[int]) -> str:
        return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"

    lines = ["| forced failure | runs | first shown at step | alerted with its cause | steps until then |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for name in record["failures"]:
        runs = [run for run in record["runs"] if run["case"] == name and run["shown_at"] is not None]
        right = [run for run in runs if run["alert_at"] is not None]
        waited = span([run["alert_at"] - run["shown_at"] for run in right]) if right else "–"
        lines.append(f"| {name} | {len(runs)} | {span([run['shown_at'] for run in runs])} | {len(right)} | {waited} |")
    lines += ["", "| healthy runs | runs | largest score above the mean | alerts |", "|---|---:|---:|---:|"]
    for name in record["healthy"]:
        runs = [run for run in record["runs"] if run["case"] == name]
        spread, alerts = max(run["largest_spread"] for run in runs), sum(len(run["alerts"]) for run in runs)
        lines.append(f"| {name} | {len(runs)} | {spread:.0f} | {alerts} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train all cases with all seeds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for case in (*FAILURES, *HEALTHY):
        for seed in range(given.seeds if given.only in case.name else 0):
            runs.append(train(case, seed))
            print(json.dumps(runs[-1], ensure_ascii=False), flush=True)
    record = {
        "failures": [case.name for case in FAILURES],
        "healthy": [case.name for case in HEALTHY],
        "steps": STEPS,
        "every": EVERY,
        "runs": runs,
        "cpu": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__},
    }
    print(write_table(record))
    if given.output is not None:
        given.output.write_text(
            json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
