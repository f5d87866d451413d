"""Figures of training: learning curves by policy with every seed, final losses, attention statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqrtdk.records.record import Record
from sqrtdk.report.bands import Seeds, caption_scale, show_scale
from sqrtdk.report.palette import ACCENT, NEUTRAL, policy_colour
from sqrtdk.report.panels import Axis, Dash, Figure, Line, Panel, Points, ReferenceLine, Series, floats, name_ticks
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_policy, name_setting
from sqrtdk.wording.numbers import write_loss, write_number

_MOST_POINTS = 150
_QUANTITIES = {
    "accuracy": "Accuracy",
    "entropy_ratio": "Entropy ratio H/ln n",
    "saturation_index": "Saturation index ρ",
    "grad_q": "Gradient norm of W_q",
}
# By the start of W_q and W_k and by their step; whatever else is dotted.
_DASHES: dict[tuple[str, str], Dash] = {
    ("unit", "unit"): "solid",
    ("rescaled", "unit"): "dash",
    ("grown", "unit"): "dash",
    ("rescaled", "rescaled"): "dashdot",
    ("grown", "grown"): "dashdot",
}


class Group(NamedTuple):
    """Runs that differ by seed only."""

    scale: str
    init: str
    lr: float
    d_k: int
    qk_step: str = "unit"

    @property
    def dash(self) -> Dash:
        """Return the dash of its lines."""
        return _DASHES.get((self.init, self.qk_step), "dot")

    def label(self, varying: Sequence[str]) -> str:
        """Return the policy and whatever else distinguishes this group from the others."""
        size = f"dₖ {self.d_k}" if "d_k" in varying else ""
        rate = f"lr {self.lr:g}" if "lr" in varying else ""
        init, qk_step = (self.init, self.qk_step) if "init" in varying else ("unit", "unit")
        return name_setting(self.scale, init, size, rate, qk_step=qk_step)


def list_varying(groups: Collection[Group]) -> list[str]:
    """Return what distinguishes groups beside the policy: ``"init"`` (start or step of W_q and W_k) and ``"d_k"``."""
    starts = {(group.init, group.qk_step) for group in groups}
    return [*(["init"] if len(starts) > 1 else []), *(["d_k"] if len({group.d_k for group in groups}) > 1 else [])]


def show_ablation(record: Record) -> Figure:
    """Learning curves, final losses and attention statistics of an ablation, each setting at its learning rate."""
    curves = group_runs(record.curves["runs"])
    finals = group_runs(record.tables["runs"])
    names = list_varying(finals)
    best = group_runs(record.tables["best"])
    inits, policies = (list(dict.fromkeys(getattr(group, name) for group in finals)) for name in ("init", "scale"))
    shown = {
        group: curves[group]
        for group in sorted(curves, key=lambda group: (inits.index(group.init), policies.index(group.scale)))
        if group in best
    }
    sizes = sorted({group.d_k for group in shown})
    by_size = {d_k: f", dₖ = {d_k}" if len(sizes) > 1 else "" for d_k in sizes}
    panels = [show_curves(shown, names, d_k, "loss", f"Training loss{by_size[d_k]}") for d_k in sizes]
    tried = list_tried(record)
    if tried:
        by_rate = [show_finals_by_rate(tried, names, d_k) for d_k in sizes]
        panels += (
            by_rate
            if len(sizes) == 1
            else [
                replace(panel, title=f"By learning rate{by_size[d_k]}")
                for d_k, panel in zip(sizes, by_rate, strict=True)
            ]
        )
    if len(sizes) > 1:
        panels.append(show_by_size({group: finals[group] for group in shown}, names))
    elif not tried:
        panels.append(_show_finals(finals, names))
    # With several dₖ the remaining panels follow the largest, where the scale matters most.
    last = sizes[-1]
    suffix = by_size[last]
    learned = {
        group: best[group][0] for group in shown if group.d_k == last and best[group][0].get("temperature_by_layer")
    }
    # The accuracy says little that the losses do not: it makes room.
    if learned:
        panels.append(show_temperatures(learned, finals, "Learned temperature τ/√dₖ" + suffix))
    kept = {name for runs in shown.values() for run in runs for name in run}
    panels += [
        show_curves(shown, names, last, quantity, title + suffix, seeds=False)
        for quantity, title in _QUANTITIES.items()
        if quantity in kept and not (learned and quantity == "accuracy")
    ]
    bands = [
        Seeds(runs, policy_colour(group.scale), group.label([name for name in names if name != "d_k"]), group.dash)
        for group, runs in shown.items()
        if group.d_k == last
    ]
    panels += show_scale(bands, " over time" + suffix)
    caption = "Thin lines and dots are single seeds"
    caption += ", for temperatures each of their heads" if learned else ""
    caption += "; bold lines and bars are medians over seeds"
    diverged = sum(run.get("status") == "diverged" for runs in finals.values() for run in runs)
    caption += f", the {count(diverged, 'diverged run')} counting as infinite losses." if diverged else "."
    if tried:
        caption += " Each setting has its own learning rate, chosen on the seeds that the losses by learning rate show."
    if explained := caption_scale(bands):
        caption += f" Bands go from the lower to the upper quartile of the seeds. {explained}"
    return Figure(
        _state_losses(record, names),
        tuple(panels),
        columns=3,
        panel_height=270,
        caption=caption,
    )


def _state_losses(record: Record, varying: Sequence[str]) -> str:
    """Return the medians of the table, lowest first; of several dₖ those of each setting side by side."""
    losses: dict[str, list[float | None]] = {}
    for row in sorted(record.tables["best"], key=lambda row: row["d_k"]):
        losses.setdefault(group_of(row).label([name for name in varying if name != "d_k"]), []).append(
            row["final_loss_median"]
        )
    ranked = sorted(losses.items(), key=lambda item: [math.inf if loss is None else loss for loss in item[1]])
    listed = "; ".join(f"{label} {', '.join(map(write_loss, values))}" for label, values in ranked)
    sizes = sorted({row["d_k"] for row in record.tables["best"]})
    at = f" at dₖ = {', '.join(map(str, sizes))}" if len(sizes) > 1 else ""
    return f"{str(record.spec.get('task', 'training')).capitalize()}, median held-out loss{at}: {listed}"


def show_swap(record: Record) -> Figure:
    """Plan the loss of every seed at each stage of a swap of scales, and the training losses around the swap."""
    start, scale = str(record.spec["start_scale"]), str(record.spec["scale"])
    swap = float(record.spec["start_steps"])
    series: list[Series] = []
    for name, label, colour in (
        ("scratch", f"{name_policy(scale)} from a random start", policy_colour(scale)),
        ("runs", f"{name_policy(start)}, then {name_policy(scale)}", policy_colour(start)),
    ):
        runs = record.curves[name]
        dash: Dash = "dash" if name == "scratch" else "solid"
        series += [
            Line(*_thin_out(run["step"], run["loss"]), colour, dash=dash, width=0.8, opacity=0.35) for run in runs
        ]
        series.append(Line(*_median_curve(runs, "loss"), colour, label, dash=dash, width=2.6))
    curves = Panel(
        "Training loss",
        Axis("step"),
        Axis("", log=True),
        tuple(series),
        (ReferenceLine(swap, "swap", "vertical"),),
    )
    return Figure(
        f"Held-out loss: {name_policy(start)} {_stage_loss(record, 'trained')}, changed to {name_policy(scale)} "
        f"{_stage_loss(record, 'swapped')}, trained on {_stage_loss(record, 'continued')}; from a random start "
        f"{_stage_loss(record, 'scratch')}",
        (show_stages(record.tables["swap"]), curves),
        columns=2,
        caption="Thin lines are single seeds; diamonds and bold lines are medians over seeds.",
    )


def _stage_loss(record: Record, stage: str) -> str:
    return write_loss(median_loss([row[f"{stage}_loss"] for row in record.tables["swap"]]))


def show_stages(rows: Sequence[Mapping[str, Any]], words: Mapping[str, str] | None = None) -> Panel:
    """Plan the loss of every seed at each stage, and the medians; `words` names stages for readers."""
    stages = [name for name in rows[0] if name.endswith("_loss")]
    places = floats(range(len(stages)))
    series: list[Series] = [
        Line(places, floats(row[name] for name in stages), NEUTRAL, "a seed", width=1.0, opacity=0.5) for row in rows
    ]
    medians = [median_loss([row[name] for row in rows]) for name in stages]
    names = [name.removesuffix("_loss") for name in stages]
    labels = [
        (words or {}).get(name, name) + (" (∞)" if math.isnan(value) else "")
        for name, value in zip(names, medians, strict=True)
    ]
    texts = tuple(f"{label}: {write_number(value, 3)}" for label, value in zip(labels, medians, strict=True))
    series.append(Points(places, floats(medians), ACCENT, "median", size=10, symbol="diamond", text=texts))
    return Panel(
        "Held-out loss by stage",
        Axis(ticks=tuple(zip(places, labels, strict=True)), low=-0.4, high=len(stages) - 0.6),
        Axis("held-out loss, nats", log=True),
        tuple(series),
    )


def group_runs(runs: Sequence[Mapping[str, Any]]) -> dict[Group, list[Mapping[str, Any]]]:
    """Runs, or rows about them, by setting."""
    groups: dict[Group, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(group_of(run), []).append(run)
    return groups


def group_of(run: Mapping[str, Any]) -> Group:
    """Return the setting of a run, or of a row about runs; older records know no step of W_q and W_k."""
    return Group(run["scale"], run["init"], float(run["lr"]), int(run["d_k"]), run.get("qk_step", "unit"))


def list_tried(record: Record) -> dict[Group, list[Mapping[str, Any]]]:
    """Return the runs that tried several learning rates; empty where each setting had one."""
    tried = group_runs(record.tables.get("selection_runs") or record.tables["runs"])
    settings = {group._replace(lr=0.0) for group in tried}
    return tried if len(settings) < len(tried) else {}


def median_loss(values: Sequence[float | None]) -> float:
    """Return the median, a diverged run being the worst; NaN, which is not drawn, if the median is infinite."""
    ranked = [math.inf if value is None or math.isnan(value) else value for value in values]
    middle = statistics.median(ranked) if ranked else math.inf
    return middle if math.isfinite(middle) else math.nan


def show_curves(
    groups: Mapping[Group, Sequence[Mapping[str, Any]]],
    names: Sequence[str],
    d_k: int,
    quantity: str,
    title: str,
    *,
    seeds: bool = True,
) -> Panel:
    """Plan a quantity over the steps: a bold line per setting, the median of its seeds, and a thin one per seed."""
    thin: list[Series] = []
    bold: list[Series] = []
    for group, runs in groups.items():
        if group.d_k != d_k:
            continue
        colour, dash = policy_colour(group.scale), group.dash
        if seeds:
            thin += [
                Line(*_thin_out(run["step"], run[quantity]), colour, dash=dash, width=0.8, opacity=0.35) for run in runs
            ]
        label = group.label([name for name in names if name != "d_k"])
        bold.append(Line(*_median_curve(runs, quantity), colour, label, dash=dash, width=2.6))
    drawn = [value for line in [*thin, *bold] if isinstance(line, Line) for value in line.y]
    log = quantity in ("loss", "grad_q") and _spans_decades(drawn)
    lines = (ReferenceLine(1.0, "ρ = 1", label_at="start"),) if quantity == "saturation_index" else ()
    low, high = (0.0, 1.03) if quantity in ("accuracy", "entropy_ratio") else (None, None)
    return Panel(title, Axis("step"), Axis("", log=log, low=low, high=high), (*thin, *bold), lines)


def _thin_out(x: Sequence[float], y: Sequence[float | None]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    stride = max(1, -(-len(x) // _MOST_POINTS))
    return floats(x[::stride]), floats(y[::stride])


def _median_curve(runs: Sequence[Mapping[str, Any]], quantity: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    by_step: dict[float, list[float | None]] = {}
    for run in runs:
        for step, value in zip(run["step"], run[quantity], strict=True):
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    if quantity == "loss":
        # A run that diverged ends early and has the worst loss from there on; what else it did is not known.
        begun = sum(bool(run["step"]) for run in runs)
        for values in by_step.values():
            values.extend([None] * (begun - len(values)))
    return _thin_out(steps, [median_loss(by_step[step]) for step in steps])


def _show_finals(finals: Mapping[Group, Sequence[Mapping[str, Any]]], varying: Sequence[str]) -> Panel:
    series: list[Series] = []
    ticks = []
    drawn = []
    for index, (group, runs) in enumerate(finals.items()):
        losses = [run.get("final_loss") for run in runs if run.get("status") != "failed"]
        missing = sum(loss is None or not math.isfinite(loss) for loss in losses)
        ticks.append((float(index), group.label(varying) + (f" ({missing} diverged)" if missing else "")))
        known = [(run, run["final_loss"]) for run in runs if _is_number(run.get("final_loss"))]
        drawn += [loss for _, loss in known]
        # Seeds side by side across the row, so that equal losses stay visible.
        spread = [index + 0.5 * ((place + 0.5) / max(len(known), 1) - 0.5) for place in range(len(known))]
        series.append(
            Points(
                floats(loss for _, loss in known),
                floats(spread),
                policy_colour(group.scale),
                size=5.5,
                text=tuple(f"seed {run.get('seed')}: {write_number(loss)}" for run, loss in known),
            )
        )
        middle = median_loss(losses)
        series.append(Line((middle, middle), (index - 0.36, index + 0.36), policy_colour(group.scale), width=2.6))
    return Panel(
        "Final held-out loss",
        Axis("loss", log=_spans_decades(drawn)),
        Axis(ticks=tuple(ticks), low=len(finals) - 0.4, high=-0.6),
        tuple(series),
    )


def show_finals_by_rate(finals: Mapping[Group, Sequence[Mapping[str, Any]]], varying: Sequence[str], d_k: int) -> Panel:
    """Plan every final loss over its learning rate, the medians of a setting joined by a line."""
    chosen = {group: runs for group, runs in finals.items() if group.d_k == d_k}
    return _show_finals_over("lr", "learning rate", chosen, [name for name in varying if name != "d_k"])


def show_by_size(finals: Mapping[Group, Sequence[Mapping[str, Any]]], varying: Sequence[str]) -> Panel:
    """Plan every final loss over its dₖ, the medians of a setting joined by a line."""
    return _show_finals_over("d_k", "dₖ", finals, [name for name in varying if name != "d_k"])


def _show_finals_over(
    name: str, title: str, finals: Mapping[Group, Sequence[Mapping[str, Any]]], varying: Sequence[str]
) -> Panel:
    places = sorted({getattr(group, name) for group in finals})
    families: dict[tuple[str, str, str], dict[float, list[float | None]]] = {}
    for group, runs in finals.items():
        losses = [run.get("final_loss") for run in runs if run.get("status") != "failed"]
        families.setdefault((group.scale, group.init, group.qk_step), {})[getattr(group, name)] = losses
    series: list[Series] = []
    for index, ((scale, init, qk_step), by_place) in enumerate(families.items()):
        # A small step aside for each family keeps dots of one place apart.
        shift = 1.0 + 0.05 * (index - (len(families) - 1) / 2)
        group, colour = Group(scale, init, 0.0, 0, qk_step), policy_colour(scale)
        dots = [(x * shift, loss) for x in places for loss in by_place.get(x, ()) if _is_number(loss)]
        series.append(Points(floats(x for x, _ in dots), floats(y for _, y in dots), colour, size=4))
        medians = [(x * shift, median_loss(by_place.get(x, []))) for x in places]
        series.append(
            Line(
                floats(x for x, _ in medians),
                floats(y for _, y in medians),
                colour,
                group.label(varying),
                dash=group.dash,
                width=2.4,
            )
        )
    drawn = [loss for one in families.values() for losses in one.values() for loss in losses if loss is not None]
    return Panel(
        f"Final held-out loss by {title}",
        Axis(title, log=True, ticks=name_ticks(places, most=3)),
        Axis("held-out loss, nats", log=_spans_decades(drawn)),
        tuple(series),
    )


def show_temperatures(
    best: Mapping[Group, Mapping[str, Any]], finals: Mapping[Group, Sequence[Mapping[str, Any]]], title: str
) -> Panel:
    """Plan learned temperatures: a dot per head and seed, the medians of the layers joined by a line."""
    series: list[Series] = []
    layers = 0
    for place, (group, row) in enumerate(best.items()):
        colour, medians = policy_colour(group.scale), row["temperature_by_layer"]
        layers = len(medians)
        # A small step aside for each setting keeps dots of one layer apart.
        places = [layer + 1 + 0.5 * ((place + 0.5) / len(best) - 0.5) for layer in range(layers)]
        dots = [
            (places[index * layers // len(run["temperatures"])], value, f"seed {run['seed']}: {value:.3f}")
            for run in finals[group]
            for index, value in enumerate(run.get("temperatures", ()))
        ]
        x, y, text = zip(*dots, strict=True)
        series.append(Points(floats(x), floats(y), colour, size=5.0, text=text))
        series.append(Line(floats(places), floats(medians), colour, dash=group.dash, width=2.4))
    ticks = tuple((float(layer), f"layer {layer}") for layer in range(1, layers + 1))
    return Panel(
        title,
        Axis(ticks=ticks, low=0.5, high=layers + 0.5),
        Axis(""),
        tuple(series),
        (ReferenceLine(1.0, "√dₖ", label_at="start"),),
    )


def _spans_decades(values: Sequence[float]) -> bool:
    # Within a factor of three a logarithmic axis has no power of ten to write and fills with long fractions.
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) > 3.0 * min(known)


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
