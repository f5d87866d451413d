"""One panel per finding of the trainings: learning curves, learning rates, learned temperatures, a scale taken away."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqrtdk.display import count
from sqrtdk.records import Record, Row
from sqrtdk.report.learning_figures import (
    Group,
    group_runs,
    list_tried,
    list_varying,
    median_loss,
    name_loss,
    show_by_size,
    show_curves,
    show_finals_by_rate,
    show_stages,
    show_temperatures,
)
from sqrtdk.report.palette import policy_colour
from sqrtdk.report.panels import Axis, Figure, Line, Panel, Points, Series, floats, one_panel
from sqrtdk.setting_names import name_policy, name_setting

# A model has learned if its loss is below this share of the one that training begins with.
_LEARNED = 0.5


def name_seeds(record: Record) -> str:
    """How many seeds a record of trainings has.

    >>> name_seeds(Record("swap", {"seeds": [0, 1]}, {}))
    '2 seeds'
    """
    return count(len(record.spec["seeds"]), "seed")


def losses_of(record: Record) -> dict[tuple[str, str], float]:
    """The median held-out loss of each (policy, start of the weights) with the plain step; inf if it diverged."""
    best: dict[tuple[str, str], float] = {}
    for row in record.tables["best"]:
        if row.get("qk_step", "unit") == "unit":
            loss = row["final_loss_median"]
            best[row["scale"], row["init"]] = math.inf if loss is None else loss
    return best


def compares_scaling(record: Record) -> bool:
    """Whether an ablation has runs without scaling beside runs with 1/√dₖ, q and k starting with variance 1."""
    return {("none", "unit"), ("sqrt", "unit")} <= losses_of(record).keys()


def starting_loss(record: Record) -> float:
    """The median training loss of all runs at their first point; infinite if none got that far."""
    first = [run["loss"][0] for run in record.curves["runs"] if run["loss"]]
    return statistics.median(first) if first else math.inf


def fails_to_learn(record: Record, scale: str, init: str = "unit") -> bool:
    """Whether a setting's median loss stays near that of the start, though 1/√dₖ learns the same task."""
    losses, guess = losses_of(record), _LEARNED * starting_loss(record)
    return losses[scale, init] > guess > losses["sqrt", "unit"]


def has_own_rates(record: Record) -> bool:
    """Whether learning rates were chosen, setting by setting, on seeds that are not the record's."""
    return bool(record.spec.get("rates") or record.spec.get("selection_seeds"))


def show_learning(record: Record) -> Figure:
    """Training loss over the steps, each setting at its learning rate."""
    curves, best = group_runs(record.curves["runs"]), group_runs(record.tables["best"])
    shown = {group: curves[group] for group in best if group in curves}
    d_k = max(group.d_k for group in shown)
    panel = show_curves(shown, list_varying(shown), d_k, "loss", "")
    each = ", each at its own learning rate, chosen on other seeds" if has_own_rates(record) else ""
    steps = record.spec.get("steps")
    edges = [group.label(["init"]) for group, rows in best.items() if rows[0].get("at_edge")]
    beyond = f" The best rate of {' and '.join(edges)} is at the edge of those tried." if edges else ""
    return one_panel(
        _state_learning(record),
        Panel("", Axis("training step"), Axis("training loss, nats", log=panel.y.log), panel.series),
        f"Associative recall by a small transformer, dₖ = {d_k}{f', {steps} steps' if steps else ''}{each}; "
        f"{name_seeds(record)} per setting: thin lines are seeds, bold ones their medians.{beyond}",
    )


def _state_learning(record: Record) -> str:
    losses = losses_of(record)
    named = {setting: name_loss(loss) for setting, loss in losses.items()}
    beside = f"loss {named['none', 'unit']}, with 1/√dₖ {named['sqrt', 'unit']}"
    if not fails_to_learn(record, "none"):
        if losses["sqrt", "unit"] > _LEARNED * starting_loss(record):
            return f"In these steps nothing is learned, with the scale or without: {beside}"
        return f"Without scaling the model learns, too: {beside}"
    control = ("none", "absorbed")
    if control not in losses:
        return f"Without scaling the model does not learn: {beside}"
    if fails_to_learn(record, *control):
        return f"Without scaling the model does not learn ({beside}), nor with the start of 1/√dₖ alone"
    return f"Without scaling the model does not learn ({beside}), unless it has the start of 1/√dₖ ({named[control]})"


def show_rates(record: Record) -> Figure | None:
    """The control: final losses over the learning rate, a panel per dₖ; None if there was one rate only."""
    tried = list_tried(record)
    if not tried:
        return None
    rates, sizes = sorted({group.lr for group in tried}), sorted({group.d_k for group in tried})
    panels = [
        replace(show_finals_by_rate(tried, list_varying(tried), d_k), title=f"dₖ = {d_k}" if len(sizes) > 1 else "")
        for d_k in sizes
    ]
    learned = {
        scale: ", ".join(
            str(
                sum(
                    2 * sum(bool(run["solved"]) for run in runs) >= len(runs)
                    for group, runs in tried.items()
                    if group._replace(lr=0.0) == Group(scale, "unit", 0.0, d_k)
                )
            )
            for d_k in sizes
        )
        for scale in ("none", "sqrt")
    }
    of = f"{len(rates)} learning rates" + (f" (dₖ = {', '.join(map(str, sizes))})" if len(sizes) > 1 else "")
    seeds = count(len(record.spec.get("selection_seeds") or record.spec["seeds"]), "seed")
    return Figure(
        f"Unscaled, the task is learned at {learned['none']} of {of}; with 1/√dₖ at {learned['sqrt']}",
        tuple(panels),
        columns=len(panels),
        panel_height=300,
        caption=f"Final held-out loss of every run, {seeds} per setting and rate; lines are medians. Learned: at least "
        f"half of the runs solve the task.{_name_command(record)}",
    )


def show_widths(record: Record) -> Figure:
    """Final losses over dₖ, each setting at its own learning rate."""
    best, finals = group_runs(record.tables["best"]), group_runs(record.tables["runs"])
    shown = {group: finals[group] for group in best}
    panel = show_by_size(shown, list_varying(shown))
    rates = len(record.spec["lrs"])
    chosen = f", each at the best of {rates} learning rates, chosen on other seeds" if rates > 1 else ""
    return one_panel(
        _state_widths(record),
        replace(panel, title=""),
        f"Associative recall by a small transformer, {record.spec.get('steps')} steps{chosen}. A dot per seed "
        f"({name_seeds(record)}), lines join medians.{_name_command(record)}",
        height=360,
    )


def _name_command(record: Record) -> str:
    """Where a record comes from that was not made for this page."""
    if "command" not in record.spec:
        return ""
    return f" From the record of {record.spec['date']} that comes with sqrtdk, made by: {record.spec['command']}"


def _state_widths(record: Record) -> str:
    sizes = sorted({row["d_k"] for row in record.tables["best"]})
    solved: dict[tuple[str, str, str], list[str]] = {}
    for row in record.tables["best"]:
        where = solved.setdefault((row["scale"], row["init"], row.get("qk_step", "unit")), [])
        if row.get("solved_interval", [0.0])[0] > 0.5:
            where.append(str(row["d_k"]))

    def name(where: Sequence[str]) -> str:
        return "at none" if not where else "at each" if len(where) == len(sizes) else f"at {' and '.join(where)}"

    listed = ", ".join(map(str, sizes))
    parts = [
        words.format(name(solved[setting]))
        for setting, words in {
            ("sqrt", "unit", "unit"): "with 1/√dₖ {}",
            ("none", "unit", "unit"): "without scaling {}",
            ("none", "absorbed", "unit"): "without it but with its start alone {}",
            ("none", "absorbed", "absorbed"): "with its start and step {}",
        }.items()
        if setting in solved
    ]
    return f"At dₖ = {listed} most runs learn {', '.join(parts)}"


def show_learned(record: Record) -> Figure | None:
    """Where learned temperatures ended; None if none was learned."""
    best, finals = group_runs(record.tables["best"]), group_runs(record.tables["runs"])
    learned = {group: rows[0] for group, rows in best.items() if rows[0].get("temperature_by_layer")}
    if not learned:
        return None
    panel = show_temperatures(learned, finals, "")
    named = Panel("", panel.x, Axis("learned temperature τ, in units of √dₖ"), _name_lines(panel, learned), panel.lines)
    losses = losses_of(record)
    beside = ", ".join(
        f"{name_policy(scale) if scale == 'sqrt' else _LEARNED_WORDS.get(scale, scale)} {name_loss(loss)}"
        for (scale, _), loss in losses.items()
    )
    values = [value for row in learned.values() for value in row["temperature_by_layer"]]
    return one_panel(
        f"Learned temperatures end between {min(values):.2f} and {max(values):.2f} times √dₖ; held-out loss: {beside}",
        named,
        f"A dot per head and seed, {name_seeds(record)}; lines join the medians of the layers. At the start every "
        "temperature is √dₖ.",
        height=280,
    )


_LEARNED_WORDS = {"learned": "learned per head", "query": "learned from the query", "position": "learned by position"}


def _name_lines(panel: Panel, learned: Mapping[Group, Any]) -> tuple[Series, ...]:
    names = iter([_LEARNED_WORDS.get(group.scale, group.scale) for group in learned])
    return tuple(
        Line(one.x, one.y, one.colour, next(names), one.dash, one.width) if isinstance(one, Line) else one
        for one in panel.series
    )


def show_taken_away(record: Record) -> Figure:
    """The loss of every seed before and after the scale is taken away, and without it from the start."""
    start, scale = (name_policy(str(record.spec[name])) for name in ("start_scale", "scale"))
    words = {"trained": "trained", "swapped": "swapped", "continued": "trained on", "scratch": "never"}
    losses = _stage_losses(record)
    named = {stage: name_loss(loss) for stage, loss in losses.items()}
    panel = show_stages(record.tables["swap"], words)
    verdict = (
        "A trained model outlives the loss of its scale" if _survives(losses) else "A trained model needs its scale"
    )
    return one_panel(
        f"{verdict}: held-out loss {named['trained']}, without it {named['swapped']}; {scale} from the start "
        f"{named['scratch']}",
        replace(panel, x=replace(panel.x, title="stage")),
        f"Trained with {start} for {record.spec['start_steps']} steps; swapped for {scale}, the weights as they were; "
        f"trained on with {scale}; never had {start}. {name_seeds(record)}.",
        height=280,
    )


def _stage_losses(record: Record) -> dict[str, float]:
    stages = ("trained", "swapped", "continued", "scratch")
    return {stage: median_loss([row[f"{stage}_loss"] for row in record.tables["swap"]]) for stage in stages}


def _survives(losses: Mapping[str, float]) -> bool:
    """Whether the trained model without its scale is far better than one that never had it."""
    return losses["swapped"] < 0.5 * losses["scratch"]


def read_taken_away(record: Record) -> str:
    """What follows from the losses around the change of scale."""
    losses = _stage_losses(record)
    better = losses["continued"] < losses["swapped"]
    after = f"training on {'lowers' if better else 'does not lower'} the loss ({name_loss(losses['continued'])})"
    where = "at the start of training more than after it" if _survives(losses) else "after training as well"
    return f"Here the scale matters {where}; without it, {after}."


def show_trained_heads(record: Record) -> Figure | None:
    """How sharp the heads of the trained models are, beside how they began; None if no run says so."""
    best, finals = group_runs(record.tables["best"]), group_runs(record.tables["runs"])
    curves = group_runs(record.curves["runs"])
    heads = {
        group: [head["entropy_ratio"] for run in finals[group] for head in run.get("measured_heads", ())]
        for group in best
    }
    shown = {group: ratios for group, ratios in heads.items() if ratios}
    if not shown:
        return None
    begins = {
        group: statistics.median([run["entropy_ratio"][0] for run in curves[group] if run["entropy_ratio"]])
        for group in shown
    }
    series: list[Series] = []
    for place, (group, ratios) in enumerate(shown.items()):
        y, colour = float(place), policy_colour(group.scale)
        middle = statistics.median(ratios)
        series.append(Line((begins[group], middle), (y, y), colour, width=1.6, opacity=0.6))
        series.append(
            Points((begins[group],), (y,), colour, symbol="cross", size=9, text=(f"at the start {begins[group]:.2f}",))
        )
        series.append(
            Points(
                floats(ratios),
                floats([y] * len(ratios)),
                colour,
                size=6,
                text=tuple(f"{ratio:.2f}" for ratio in ratios),
            )
        )
    nan = (math.nan,)
    legend: list[Series] = [
        Points(nan, nan, "#7b8390", "all heads at the start, mean", symbol="cross"),
        Points(nan, nan, "#7b8390", "a head after training"),
    ]
    varying = list_varying(shown)
    return one_panel(
        _state_heads(shown, begins),
        Panel(
            "",
            Axis("entropy ratio H/ln n: 1 is uniform, 0 is one-hot", low=-0.03, high=1.03),
            Axis(
                ticks=tuple((float(place), group.label(varying)) for place, group in enumerate(shown)),
                low=len(shown) - 0.4,
                high=-0.6,
            ),
            (*legend, *series),
        ),
        f"Every head of every run, {name_seeds(record)} per setting at its learning rate, on held-out data.",
        height=80 + 44 * len(shown),
    )


def _state_heads(shown: Mapping[Group, Sequence[float]], begins: Mapping[Group, float]) -> str:
    parts = []
    for scale in ("none", "sqrt"):
        group = next((group for group in shown if (group.scale, group.init) == (scale, "unit")), None)
        if group is not None:
            parts.append(f"with {name_policy(scale)} from {begins[group]:.2f} to {statistics.median(shown[group]):.2f}")
    return f"In training the entropy ratio H/ln n of heads goes {', '.join(parts)}"


def tabulate_settings(record: Record, table: str) -> list[Row]:
    """The rows of ``best``, ``summary`` or ``selection`` for readers: setting, losses, how many seeds."""
    rows = record.tables[table]
    several = len({row["d_k"] for row in rows}) > 1
    return [
        {
            "setting": name_setting(row["scale"], row["init"], qk_step=row.get("qk_step", "unit")),
            **({"d_k": row["d_k"]} if several else {}),
            "lr": row["lr"],
            **{name: row.get(name) for name in _SHOWN},
            "seeds": row["n"],
        }
        for row in rows
    ]


_SHOWN = ("final_loss_median", "final_loss_iqr", "solved_fraction", "solved_interval")


def tabulate_stages(record: Record) -> list[Row]:
    """The stages of a change of scale for readers."""
    start, scale = (name_policy(str(record.spec[name])) for name in ("start_scale", "scale"))
    words = {
        "trained": f"trained with {start}",
        "swapped": f"the same weights, {scale}",
        "continued": f"trained on, {scale}",
        "scratch": f"{scale} from a random start",
    }
    return [
        {
            "stage": words.get(row["stage"], row["stage"]),
            "held-out loss, median": row["loss_median"],
            **{name: row.get(column) for name, column in (("middle half of the seeds", "loss_iqr"), ("seeds", "n"))},
            "solved_fraction": row.get("solved_fraction"),
        }
        for row in record.tables["summary"]
    ]
