"""Figures of the report on training: learning curves, learning rates, learned temperatures, a scale taken away."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqrtdk.records.record import Record, Row
from sqrtdk.report.learning_figures import (
    Group,
    group_runs,
    list_tried,
    list_varying,
    median_loss,
    show_by_size,
    show_curves,
    show_finals_by_rate,
    show_stages,
    show_temperatures,
)
from sqrtdk.report.palette import policy_colour
from sqrtdk.report.panels import Axis, Figure, Line, Panel, Points, ReferenceLine, Series, floats, one_panel
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_policy, name_setting
from sqrtdk.wording.numbers import write_change, write_loss, write_number

Setting = tuple[str, str, str]
"""A scaling policy with the start and the step of W_q and W_k."""

NONE, SQRT, INVERSE = (("none", "unit", "unit"), ("sqrt", "unit", "unit"), ("inverse", "unit", "unit"))


def name_seeds(record: Record) -> str:
    """Return the number of seeds of a training record, with its noun.

    >>> name_seeds(Record("swap", {"seeds": [0, 1]}, {}))
    '2 seeds'
    """
    return count(len(record.spec["seeds"]), "seed")


def losses_of(record: Record) -> dict[Setting, float]:
    """Return the median held-out loss of each setting at the largest dₖ; inf if it diverged."""
    return {
        _setting_of(row): math.inf if row["final_loss_median"] is None else row["final_loss_median"]
        for row in sorted(record.tables["best"], key=lambda row: row["d_k"])
    }


def _setting_of(row: Row) -> Setting:
    return row["scale"], row["init"], row.get("qk_step", "unit")


def _name(setting: Setting) -> str:
    return name_setting(*setting[:2], qk_step=setting[2])


def count_solved(record: Record, d_k: int | None = None) -> dict[Setting, list[tuple[int, int]]]:
    """Return for each setting how many runs solved the task and how many there were, dₖ by dₖ.

    Args:
        record: an ablation.
        d_k: this dₖ alone; None: all, the smallest first.
    """
    counts: dict[Setting, list[tuple[int, int]]] = {}
    for row in sorted(record.tables["best"], key=lambda row: row["d_k"]):
        if d_k in (None, row["d_k"]):
            solved = round((row["solved_fraction"] or 0.0) * row["n"])
            counts.setdefault(_setting_of(row), []).append((solved, row["n"]))
    return counts


def write_solved(counts: Sequence[tuple[int, int]]) -> str:
    """Write numbers of solved runs.

    >>> write_solved([(0, 16)]), write_solved([(16, 16), (16, 16), (15, 16)]), write_solved([(3, 3), (2, 4)])
    ('0 of 16', '16, 16, 15 of 16', '3 of 3, 2 of 4')
    """
    if len({total for _, total in counts}) > 1:
        return ", ".join(f"{solved} of {total}" for solved, total in counts)
    return f"{', '.join(str(solved) for solved, _ in counts)} of {counts[0][1]}"


def compares_scaling(record: Record) -> bool:
    """Tell whether an ablation has runs without scaling beside runs with 1/√dₖ, q and k starting with variance 1."""
    return {NONE, SQRT} <= losses_of(record).keys()


def state_rates(record: Record) -> str:
    """State how the learning rates came about, and which of them lie at the edge of the grid; empty if none was chosen.

    >>> state_rates(Record("ablation", {"seeds": [0], "lrs": [0.001]}, {"best": []}))
    ''
    """
    tried = len(record.spec.get("lrs", ()))
    if record.spec.get("selection_seeds"):
        chosen = f"Each setting has the best of {tried} learning rates, chosen on other seeds"
    elif record.spec.get("rates"):
        chosen = "Each setting has its own learning rate, chosen on other seeds"
    else:
        return ""
    edges = dict.fromkeys(_name(_setting_of(row)) for row in record.tables["best"] if row.get("at_edge"))
    return f"{chosen}." + (f" The best rate lies at the edge of those tried: {'; '.join(edges)}." if edges else "")


def show_learning(record: Record) -> Figure:
    """Plan the training loss over the steps, each setting at its learning rate."""
    curves, best = group_runs(record.curves["runs"]), group_runs(record.tables["best"])
    shown = {group: curves[group] for group in best if group in curves}
    d_k = max(group.d_k for group in shown)
    panel = show_curves(shown, list_varying(shown), d_k, "loss", "")
    steps = record.spec.get("steps")
    chance = record.scalars.get("chance_loss")
    lines = () if chance is None else (ReferenceLine(chance, "chance"),)
    return one_panel(
        _state_learning(record, d_k),
        Panel("", Axis("training step"), Axis("training loss, nats", log=panel.y.log), panel.series, lines),
        f"Associative recall by a small transformer, dₖ = {d_k}{f', {steps} steps' if steps else ''}. "
        f"{name_seeds(record)} per setting; thin lines are seeds, bold lines medians. {state_rates(record)}".strip(),
    )


def _state_learning(record: Record, d_k: int) -> str:
    solved, losses = count_solved(record, d_k), losses_of(record)
    chance = record.scalars.get("chance_loss")
    guess = "" if chance is None else f" (a guess has {write_loss(chance)})"
    return (
        f"Without scaling {write_solved(solved[NONE])} runs solve the task, with 1/√dₖ {write_solved(solved[SQRT])}. "
        f"Median loss {write_loss(losses[NONE])} and {write_loss(losses[SQRT])}{guess}"
    )


def read_other_settings(record: Record) -> str:
    """State how many runs of the settings beside no scaling and 1/√dₖ solve the task; empty if there are none."""
    others = [
        f"{_name(setting)} {write_solved(counts)}"
        for setting, counts in count_solved(record).items()
        if setting not in (NONE, SQRT)
    ]
    return f"Runs that solve the task in the other settings: {'; '.join(others)}." if others else ""


def read_difference(record: Record) -> str:
    """State by how much the loss without scaling exceeds that with 1/√dₖ; empty where there are too few seeds.

    Few seeds allow neither an interval nor a p-value below 5%: the record then has none.
    """
    row = next((row for row in record.tables.get("comparisons", ()) if _setting_of(row) == NONE), None)
    low, high = (None, None) if row is None else row.get("difference_interval", (None, None))
    if row is None or low is None or high is None:
        return ""
    p = (
        f", Wilcoxon signed-rank p = {write_number(row['holm_p'], 2)} after Holm's correction"
        if row.get("holm_p") is not None
        else ""
    )
    return (
        f"Without scaling the loss is higher than with 1/√dₖ for {row['higher']} of {count(row['n'], 'seed')}; the "
        f"difference is {write_change(low)} to {write_change(high)} nats (95% interval{p})."
    )


def list_learned(record: Record, scale: str, d_k: int) -> tuple[list[float], int]:
    """Return the learning rates at which at least half of a policy's runs solve the task, and how many were tried."""
    tried = {
        group.lr: runs
        for group, runs in list_tried(record).items()
        if group._replace(lr=0.0) == Group(scale, "unit", 0.0, d_k)
    }
    return sorted(lr for lr, runs in tried.items() if 2 * sum(bool(run["solved"]) for run in runs) >= len(runs)), len(
        tried
    )


def show_rates(record: Record) -> Figure | None:
    """Plan the control: final losses over the learning rate, a panel per dₖ; None if there was one rate only."""
    tried = list_tried(record)
    if not tried:
        return None
    rates, sizes = sorted({group.lr for group in tried}), sorted({group.d_k for group in tried})
    panels = [
        replace(show_finals_by_rate(tried, list_varying(tried), d_k), title=f"dₖ = {d_k}" if len(sizes) > 1 else "")
        for d_k in sizes
    ]
    learned = {
        scale: ", ".join(str(len(list_learned(record, scale, d_k)[0])) for d_k in sizes) for scale in ("none", "sqrt")
    }
    at = f" at dₖ = {', '.join(map(str, sizes))}" if len(sizes) > 1 else ""
    seeds = count(len(record.spec.get("selection_seeds") or record.spec["seeds"]), "seed")
    return Figure(
        f"Learning rates, of {len(rates)}, at which the task is learned{at}: {learned['none']} without scaling, "
        f"{learned['sqrt']} with 1/√dₖ",
        tuple(panels),
        columns=len(panels),
        panel_height=300,
        caption=f"Final held-out loss of every run, {seeds} per setting and rate; lines are medians. Learned: at least "
        f"half of the runs solve the task.{_name_origin(record)}",
    )


def show_widths(record: Record) -> Figure:
    """Plan the final losses over dₖ, each setting at its own learning rate."""
    best, finals = group_runs(record.tables["best"]), group_runs(record.tables["runs"])
    shown = {group: finals[group] for group in best}
    panel = show_by_size(shown, list_varying(shown))
    solved = count_solved(record)
    sizes = ", ".join(str(d_k) for d_k in sorted({row["d_k"] for row in record.tables["best"]}))
    return one_panel(
        f"Runs that solve the task at dₖ = {sizes}: {write_solved(solved[NONE])} without scaling, "
        f"{write_solved(solved[SQRT])} with 1/√dₖ",
        replace(panel, title=""),
        f"Associative recall by a small transformer, {record.spec.get('steps')} steps. A dot per seed "
        f"({name_seeds(record)}), lines join medians. {state_rates(record)}{_name_command(record)}",
        height=360,
    )


def _name_command(record: Record) -> str:
    """Name the date and the command of a record that ships with sqrtdk; empty for a record made for this page."""
    return f"{_name_origin(record)[:-1]}, made by: {record.spec['command']}" if "command" in record.spec else ""


def _name_origin(record: Record) -> str:
    return f" From the record of {record.spec['date']} that ships with sqrtdk." if "command" in record.spec else ""


def show_learned(record: Record) -> Figure | None:
    """Plan the learned temperatures at the end of training; None if none was learned."""
    best, finals = group_runs(record.tables["best"]), group_runs(record.tables["runs"])
    learned = {group: rows[0] for group, rows in best.items() if rows[0].get("temperature_by_layer")}
    if not learned:
        return None
    panel = show_temperatures(learned, finals, "")
    named = Panel("", panel.x, Axis("learned temperature τ, in units of √dₖ"), _name_lines(panel, learned), panel.lines)
    beside = ", ".join(
        f"{name_policy(scale) if scale == 'sqrt' else _LEARNED_WORDS.get(scale, scale)} {write_loss(loss)}"
        for (scale, _, _), loss in losses_of(record).items()
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
    """Plan the loss of every seed before and after the scale is taken away, and without it from the start."""
    start, scale = (name_policy(str(record.spec[name])) for name in ("start_scale", "scale"))
    words = {"trained": "trained", "swapped": "swapped", "continued": "trained on", "scratch": "never"}
    losses = _stage_losses(record)
    named = {stage: write_loss(loss) for stage, loss in losses.items()}
    panel = show_stages(record.tables["swap"], words)
    verdict = "A trained model works without its scale" if _survives(losses) else "A trained model needs its scale"
    return one_panel(
        f"{verdict}: held-out loss {named['trained']} with it, {named['swapped']} without, {named['scratch']} with "
        f"{scale} from the start",
        replace(panel, x=replace(panel.x, title="stage")),
        f"Trained with {start} for {record.spec['start_steps']} steps; swapped for {scale}, the weights as they were; "
        f"trained on with {scale}; never had {start}. {name_seeds(record)}.",
        height=280,
    )


def _stage_losses(record: Record) -> dict[str, float]:
    stages = ("trained", "swapped", "continued", "scratch")
    return {stage: median_loss([row[f"{stage}_loss"] for row in record.tables["swap"]]) for stage in stages}


def _survives(losses: Mapping[str, float]) -> bool:
    """Tell whether the trained model without its scale has less than half the loss of one that never had it."""
    return losses["swapped"] < 0.5 * losses["scratch"]


def read_taken_away(record: Record) -> str:
    """State what the losses around the change of scale show."""
    losses = _stage_losses(record)
    better = losses["continued"] < losses["swapped"]
    after = f"training on {'lowers' if better else 'does not lower'} the loss ({write_loss(losses['continued'])})"
    where = "at the start of training more than after it" if _survives(losses) else "after training as well"
    return f"Here the scale matters {where}. Without the scale, {after}."


def show_trained_heads(record: Record) -> Figure | None:
    """Plan the entropy ratios of trained heads beside those at the start; None if no run has them."""
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
    """Return the rows of ``best``, ``summary`` or ``selection`` for readers: setting, losses, how many seeds."""
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
    """Return the stages of a change of scale for readers."""
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
