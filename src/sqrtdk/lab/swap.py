"""Swap of the scale: its effect on a trained model, beside training from a random start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqrtdk.lab.ablation import curves_of
from sqrtdk.lab.laboratory import Lab
from sqrtdk.lab.outcomes import Quartiles, finite, or_infinite, quartiles
from sqrtdk.lab.spec import RunSpec, list_seeds
from sqrtdk.lab.store import RunRecord
from sqrtdk.lab.tasks import Task
from sqrtdk.records.record import Record
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import write_loss

_STAGES = ("trained", "swapped", "continued", "scratch")
_STAGE_WORDS = {
    "trained": "trained with {start}",
    "swapped": "the same weights, {scale} in place of {start}",
    "continued": "trained on with {scale}",
    "scratch": "trained with {scale} from a random start, for as many steps as after the swap",
}


def swap_scale(
    run: RunSpec | None = None,
    *,
    seeds: int | Sequence[int] = 8,
    start_scale: str = "sqrt",
    scale: str = "none",
    start_steps: int = 600,
    steps: int = 600,
    lab: Lab | None = None,
) -> Record:
    """Train with one scale, swap to another, go on; and train with the other from a random start.

    Weights and the optimiser's state stay at the swap. The claim it tests: at a random start the scale is
    critical, in a trained model less so.

    Args:
        run: everything else about the runs (task, d_k, learning rate …); None: the defaults of `RunSpec`.
        seeds: how many seeds (0, 1, …), or the seeds themselves.
        start_scale: the policy of the first `start_steps` updates.
        scale: the policy after the swap, and of the runs from a random start.
        start_steps: updates before the swap.
        steps: updates after it, and from the random start.
        lab: as in `ablate`.

    Returns:
        A record of kind ``"swap"``: the table `swap` has one row per seed with the held-out loss and accuracy of the
        stages `trained`, `swapped`, `continued` and `scratch`; `summary` one row per stage.
    """
    if lab is None:
        with Lab() as own:
            return swap_scale(
                run,
                seeds=seeds,
                start_scale=start_scale,
                scale=scale,
                start_steps=start_steps,
                steps=steps,
                lab=own,
            )
    base = RunSpec() if run is None else run
    chosen = list_seeds(seeds)
    swapped = [
        replace(base, scale=scale, seed=seed, steps=steps, start_scale=start_scale, start_steps=start_steps)
        for seed in chosen
    ]
    scratch = [replace(spec, start_scale=None, start_steps=0) for spec in swapped]
    records = lab.run([*swapped, *scratch])
    rows = [_row(*pair) for pair in zip(records[: len(chosen)], records[len(chosen) :], strict=True)]
    task = swapped[0].make_task()
    words = {
        stage: text.format(start=name_policy(start_scale), scale=name_policy(scale))
        for stage, text in _STAGE_WORDS.items()
    }
    summary = [_summarise_stage(stage, words[stage], rows, task) for stage in _STAGES]
    asked = {name: value for name, value in swapped[0].as_dict().items() if name != "seed"}
    return lab.keep(
        Record(
            kind="swap",
            spec={**asked, "seeds": chosen},
            tables={"swap": rows, "summary": summary},
            curves={"runs": curves_of(records[: len(chosen)]), "scratch": curves_of(records[len(chosen) :])},
            reading=_read(task, summary, rows),
            headline=_headline(summary),
        )
    )


def _row(swapped: RunRecord, scratch: RunRecord) -> dict[str, Any]:
    row = swapped.row
    return {
        "seed": row["seed"],
        "start_scale": row["start_scale"],
        "scale": row["scale"],
        "d_k": row["d_k"],
        "init": row["init"],
        "lr": row["lr"],
        "start_steps": row["start_steps"],
        "steps": row["steps"],
        "trained_loss": row.get("start_loss"),
        "trained_accuracy": row.get("start_accuracy"),
        "swapped_loss": row.get("swapped_loss"),
        "swapped_accuracy": row.get("swapped_accuracy"),
        "continued_loss": row["final_loss"],
        "continued_accuracy": row["final_accuracy"],
        "continued_steps_to_threshold": row["steps_to_threshold"],
        "continued_status": row["status"],
        "scratch_loss": scratch.row["final_loss"],
        "scratch_accuracy": scratch.row["final_accuracy"],
        "scratch_steps_to_threshold": scratch.row["steps_to_threshold"],
        "scratch_status": scratch.row["status"],
    }


def _summarise_stage(stage: str, words: str, rows: Sequence[Mapping[str, Any]], task: Task) -> dict[str, Any]:
    run = "scratch" if stage == "scratch" else "continued"  # the other stages belong to the run that goes on
    counted = [row for row in rows if row[f"{run}_status"] != "failed"]
    losses = [or_infinite(row[f"{stage}_loss"]) for row in counted]
    spread = quartiles(losses) if losses else Quartiles(math.inf, math.inf, math.inf)
    accuracies = [row[f"{stage}_accuracy"] for row in counted if row[f"{stage}_accuracy"] is not None]
    return {
        "stage": stage,
        "meaning": words,
        "loss_median": finite(spread.median),
        "loss_iqr": [finite(spread.lower), finite(spread.upper)],
        "accuracy_median": quartiles(accuracies).median if accuracies else None,
        "solved_fraction": sum(loss < task.threshold for loss in losses) / len(losses) if losses else None,
        "n": len(losses),
        "diverged": sum(math.isinf(loss) for loss in losses),
        "failed": len(rows) - len(losses),
    }


def _headline(summary: Sequence[Mapping[str, Any]]) -> str:
    stages = ", ".join(f"{row['stage']} {write_loss(row['loss_median'])}" for row in summary)
    return f"the scale taken away from a trained model, median held-out loss: {stages}."


def _read(task: Task, summary: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    sentences = [f"{task.solved_when[0].upper()}{task.solved_when[1:]}."]
    for row in summary:
        meaning = f"{row['meaning'][0].upper()}{row['meaning'][1:]}"
        if row["n"] == 0:
            sentences.append(f"{meaning}: every run failed.")
            continue
        low, high = row["loss_iqr"]
        solved = round(row["solved_fraction"] * row["n"])
        sentences.append(
            f"{meaning}: median held-out loss {write_loss(row['loss_median'])} "
            f"[{write_loss(low)}, {write_loss(high)}], "
            + (f"accuracy {row['accuracy_median']:.2f}, " if row["accuracy_median"] is not None else "")
            + f"solved by {solved} of {count(row['n'], 'seed')}."
        )
    reached = [value for row in rows if (value := row["continued_steps_to_threshold"]) is not None]
    seeds = count(len(rows), "seed")
    if reached:
        sentences.append(
            f"After the swap the training loss is below the threshold in {len(reached)} of {seeds}, "
            f"first after {quartiles(reached).median:.0f} steps (median)."
        )
    else:
        sentences.append(f"After the swap the training loss reaches the threshold in none of {seeds}.")
    sentences.append("Brackets hold the lower and upper quartile over the seeds, not a confidence interval.")
    return sentences
