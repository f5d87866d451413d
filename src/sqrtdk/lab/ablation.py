"""The ablation: a grid of runs becomes a record with tables, curves and sentences made from the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqrtdk.display import count
from sqrtdk.lab.laboratory import Lab
from sqrtdk.lab.outcomes import choose_best, compare, summarise
from sqrtdk.lab.spec import AblationSpec
from sqrtdk.lab.store import RunRecord
from sqrtdk.lab.tasks import Task, get
from sqrtdk.records import Record
from sqrtdk.setting_names import name_setting

_CURVE_COLUMNS = ("scale", "seed", "init", "lr", "d_k")


def ablate(spec: AblationSpec, lab: Lab | None = None) -> Record:
    """Train the whole grid, or what the lab's store lacks of it, and say what it shows.

    Args:
        spec: the grid.
        lab: where it is trained and kept; None: one for this call alone.

    Returns:
        A record of kind ``"ablation"`` with the tables `runs`, `summary`, `best` and `comparisons` and the curves
        `runs`, one set per run.

    Example:
        ``ablate(AblationSpec(scales=("none", "sqrt"), seeds=3)).tables["summary"]``
    """
    if lab is None:
        with Lab() as own:
            return ablate(spec, own)
    records = lab.run(spec.runs())
    runs = [dict(record.row) for record in records]
    summary = summarise(runs)
    best = choose_best(summary)
    comparisons = compare(runs, best)
    task = get(spec.task, spec.task_parameters)
    return lab.keep(
        Record(
            kind="ablation",
            spec=spec.as_dict(),
            tables={"runs": runs, "summary": summary, "best": best, "comparisons": comparisons},
            curves={"runs": curves_of(records)},
            reading=_read(task, best, comparisons),
            headline=_headline(task, best),
        )
    )


def curves_of(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The runs' curves, each with the columns that say whose they are."""
    return [{**{name: record.row[name] for name in _CURVE_COLUMNS}, **record.curves} for record in records]


def _read(task: Task, best: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    several_rates = any(row["lrs"] > 1 for row in best)
    basis = "best_lr" if several_rates else "same_lr"
    sentences = [
        f"{task.solved_when[0].upper()}{task.solved_when[1:]}.",
        *(_read_setting(row) for row in best),
        *(_read_learned(row) for row in best if row.get("temperature_median") is not None),
        *(_read_comparison(row) for row in comparisons if row["basis"] == basis),
        "Brackets hold the lower and upper quartile over the seeds, not a confidence interval; p-values are exact, "
        "two-sided, paired by seed and not corrected for the number of comparisons.",
    ]
    if any(row["init"] == "absorbed" for row in best):
        sentences.append(
            "Smaller start: W_q and W_k begin dₖ^¼ times smaller each, so that without a scale the model begins as the "
            "very function that 1/√dₖ is."
        )
    if several_rates:
        sentences.append(
            "Each policy is shown at the learning rate with its lowest median loss, chosen on the same seeds."
        )
        sentences += [_read_edge(row) for row in best if row["at_edge"]]
    return sentences


def _headline(task: Task, best: Sequence[Mapping[str, Any]]) -> str:
    rates = ", each at its best learning rate" if any(row["lrs"] > 1 for row in best) else ""
    parts = [f"{name_setting(row['scale'], row['init'])} {show_loss(row['final_loss_median'])}" for row in best]
    return (
        f"median held-out loss of {count(best[0]['n'], 'seed')}{rates}: {'; '.join(parts)}; "
        f"chance {show_loss(task.chance_loss)}."
    )


def _name(row: Mapping[str, Any]) -> str:
    return f"{name_setting(row['scale'], row['init'])} (dₖ = {row['d_k']}, lr {row['lr']:g})"


def show_loss(loss: float | None) -> str:
    """A loss as text; None, which stands for a diverged run, as ∞.

    >>> show_loss(0.00612), show_loss(2.6134), show_loss(None)
    ('0.0061', '2.61', '∞')
    """
    if loss is None:
        return "∞"
    return f"{loss:.2f}" if abs(loss) >= 0.1 else f"{loss:.2g}"


def _read_setting(row: Mapping[str, Any]) -> str:
    if row["n"] == 0:
        return f"{_name(row)}: every run failed."
    low, high = row["final_loss_iqr"]
    solved = round(row["solved_fraction"] * row["n"])
    pace = ""
    if row["reached_threshold"]:
        pace = (
            f"; the training loss got below the threshold in {row['reached_threshold']} of {row['n']}, "
            f"after {row['steps_to_threshold_median']:.0f} steps (median)"
        )
    lost = "".join(f"; {row[word]} {word}" for word in ("diverged", "failed") if row[word])
    return (
        f"{_name(row)}: median held-out loss {show_loss(row['final_loss_median'])} "
        f"[{show_loss(low)}, {show_loss(high)}], solved by {solved} of {count(row['n'], 'seed')}{pace}{lost}."
    )


def _read_learned(row: Mapping[str, Any]) -> str:
    least, largest = row["temperature_range"]
    spread = row["temperature_spread_median"]
    layers = ", ".join(f"{t:.3f} in layer {layer}" for layer, t in enumerate(row["temperature_by_layer"], start=1))
    return (
        f"{_name(row)}: τ/√dₖ went from 1 to {layers} (medians of the seeds), single heads from {least:.3f} to "
        f"{largest:.3f}"
        + (
            f"; over the queries of a head ln τ has a standard deviation of {spread:.2g} (0 at the start)"
            if spread
            else ""
        )
        + "."
    )


def _read_comparison(row: Mapping[str, Any]) -> str:
    other = f"{name_setting(row['against'], row['against_init'])} (lr {row['against_lr']:g})"
    if row["median_difference"] is None:
        difference = "the median difference is infinite"
    else:
        word = "above" if row["median_difference"] > 0 else "below"
        difference = f"the loss is {show_loss(abs(row['median_difference']))} {word} (median of the pairs)"
    if row["higher"] == row["lower"] == 0:
        difference = "the losses are equal"
    return (
        f"{_name(row)} against {other}: {difference}, higher in {row['higher']} and lower in {row['lower']} "
        f"of {count(row['n'], 'seed')}, p = {row['wilcoxon_p']:.2g}."
    )


def _read_edge(row: Mapping[str, Any]) -> str:
    return f"The best learning rate of {_name(row)} is at the edge of those tried: a better one may lie outside."
