"""Ablations: train a grid of runs and return a record with tables, curves and sentences made from the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqrtdk.lab.intervals import FEWEST_PAIRS
from sqrtdk.lab.laboratory import Lab
from sqrtdk.lab.outcomes import MARGIN, choose_best, compare, quartiles, setting_of, summarise
from sqrtdk.lab.spec import AblationSpec
from sqrtdk.lab.store import RunRecord
from sqrtdk.lab.tasks import Task, get
from sqrtdk.records.record import Record
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_setting
from sqrtdk.wording.numbers import write_loss, write_number, write_percent

_CURVE_COLUMNS = ("scale", "seed", "init", "qk_step", "lr", "d_k")


def ablate(spec: AblationSpec, lab: Lab | None = None) -> Record:
    """Train the whole grid, or what the lab's store lacks of it, and return the record.

    Several learning rates are first tried on the selection seeds; then each setting is trained with the reported seeds
    at the rate that was best there.

    Args:
        spec: the grid.
        lab: where it is trained and kept; None: one for this call alone.

    Returns:
        A record of kind ``"ablation"`` with the tables `runs`, `summary`, `best` and `comparisons` and the curves
        `runs`, one set per run; the first seed's attention maps of the settings without a rescaled init or step are
        under `maps`. With several learning rates `selection` has every setting at every rate on the
        selection seeds, and `selection_runs` the runs behind it. The scalar `chance_loss` is the loss of a guess.

    Example:
        ``ablate(AblationSpec(scales=("none", "sqrt"), seeds=3)).tables["summary"]``
    """
    if lab is None:
        with Lab() as own:
            return ablate(spec, own)
    selection_runs = [dict(record.row) for record in lab.run(spec.selection_runs())]
    selection = summarise(selection_runs)
    chosen = {setting_of(row).choice: row for row in choose_best(selection)}
    records = lab.run(spec.runs({choice: row["lr"] for choice, row in chosen.items()}))
    runs = [dict(record.row) for record in records]
    summary = summarise(runs)
    best = [{**row, **_describe_choice(chosen.get(setting_of(row).choice))} for row in summary]
    curves = curves_of(records)
    task = get(spec.task, spec.task_parameters)
    comparisons = compare(runs, MARGIN * task.chance_loss, "best_lr" if chosen or spec.rates else "same_lr")
    tables = {"runs": runs, "summary": summary, "best": best, "comparisons": comparisons}
    if selection:
        tables |= {"selection": selection, "selection_runs": selection_runs}
    return lab.keep(
        Record(
            kind="ablation",
            spec=spec.as_dict(),
            tables=tables,
            curves={"runs": curves, **_maps_of(records)},
            reading=[*read_ablation(task, best, comparisons, spec), *read_scale(curves)],
            headline=_headline(task, best),
            scalars={"chance_loss": task.chance_loss},
            sentences={"solved": _define_solved(task)},
        )
    )


def _describe_choice(chosen: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how many rates were tried for a setting, and whether the best is the smallest or largest of them."""
    return {"lrs": 1, "at_edge": False} if chosen is None else {name: chosen[name] for name in ("lrs", "at_edge")}


def curves_of(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the curves of runs, each with the columns that identify the run."""
    return [{**{name: record.row[name] for name in _CURVE_COLUMNS}, **record.curves} for record in records]


def _maps_of(records: Sequence[RunRecord]) -> dict[str, list[dict[str, Any]]]:
    """Return the maps of the first seed; nothing where none was recorded. All settings of all seeds would be many."""
    plain = [
        record for record in records if record.maps and (record.row["init"], record.row["qk_step"]) == ("unit", "unit")
    ]
    maps = [
        {**{name: record.row[name] for name in _CURVE_COLUMNS}, **record.maps}
        for record in plain
        if record.row["seed"] == plain[0].row["seed"]
    ]
    return {"maps": maps} if maps else {}


def read_scale(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sentences about temperature pressure and learned temperatures over time; none for what no run has.

    Args:
        curves: those of `curves_of`. Runs that lack a curve are left out of its sentence, which says how many had it.

    >>> run = {"scale": "sqrt", "init": "unit", "qk_step": "unit", "step": [0, 10], "pressure": [0.5, -0.25]}
    >>> print(*read_scale([run, {**run, "pressure": []}]))
    The loss would fall with sharper attention (temperature pressure below 0, of one training batch) at the first and at
    the last step recorded: 1/√dₖ in 0 and 1 of 1 run.
    """
    pressures, temperatures = [], []
    settings: dict[str, list[Mapping[str, Any]]] = {}
    for run in curves:
        settings.setdefault(name_setting(run["scale"], run["init"], qk_step=run["qk_step"]), []).append(run)
    for name, runs in settings.items():
        known = [values for run in runs if (values := _list_known(run, "pressure"))]
        if known:
            first, last = (sum(values[end][1] < 0.0 for values in known) for end in (0, -1))
            pressures.append(f"{name} in {first} and {last} of {count(len(known), 'run')}")
        by_step: dict[float, list[float]] = {}
        for run in runs:
            for step, value in _list_known(run, "temperature"):
                by_step.setdefault(step, []).append(value)
        if by_step:
            medians = {step: quartiles(values).median for step, values in sorted(by_step.items())}
            furthest = max(medians, key=lambda step: abs(math.log(medians[step])))
            start, end = (medians[edge(medians)] for edge in (min, max))
            temperatures.append(
                f"{name} {start:.3f} at the start, {end:.3f} at the end, furthest from 1 at step {furthest:.0f} "
                f"({medians[furthest]:.3f})"
            )
    sentences = []
    if pressures:
        sentences.append(
            "The loss would fall with sharper attention (temperature pressure below 0, of one training batch) at the "
            f"first and at the last step recorded: {'; '.join(pressures)}."
        )
    if temperatures:
        sentences.append(
            f"Learned τ/√dₖ over time, mean of the heads and median of the runs: {'; '.join(temperatures)}."
        )
    return sentences


def _list_known(run: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    """Return the steps at which a run has recorded a curve, with the values."""
    points = zip(run["step"], run.get(name, ()), strict=False)
    return [(step, value) for step, value in points if value is not None]


def read_ablation(
    task: Task, best: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]], spec: AblationSpec
) -> list[str]:
    """Return the sentences of an ablation, from its tables `best` and `comparisons`."""
    return [
        _define_solved(task),
        *(_read_setting(row) for row in best),
        *(_read_learned(row) for row in best if row.get("temperature_median") is not None),
        *(_read_comparison(row) for row in comparisons),
        *_read_method(task, comparisons),
        *_read_controls(best),
        *_read_rates(best, spec),
    ]


def _define_solved(task: Task) -> str:
    return f"{task.solved_when[0].upper()}{task.solved_when[1:]}."


def _read_method(task: Task, comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    brackets = "Brackets after a loss hold the lower and upper quartile over the seeds, not a confidence interval."
    if not comparisons:
        return [brackets]
    total = count(len(comparisons), "comparison")
    corrected = any(row["holm_p"] is not None for row in comparisons)
    return [
        f"{brackets} Intervals are at 95%: Wilson's for shares of seeds; for differences, paired by seed, those of the "
        "exact signed-rank test.",
        "“As well” means that the whole interval of the difference lies within "
        f"±{write_loss(MARGIN * task.chance_loss)}, {write_percent(MARGIN)} of the chance loss.",
        f"p-values are exact, two-sided and corrected by Holm for {total}."
        if corrected
        else f"No p-value is given: so few seeds cannot reject after correction for {total}.",
    ]


def _read_controls(best: Sequence[Mapping[str, Any]]) -> list[str]:
    inits, steps = ({row.get(name, "unit") for row in best} & {"rescaled", "grown"} for name in ("init", "qk_step"))
    factor = "dₖ^−¼ without scaling, dₖ^¼ with 1/dₖ"
    sentences = []
    if inits:
        sentences.append(
            f"Rescaled init: W_q and W_k begin with a factor ({factor}), so that the model begins as the very function "
            "that 1/√dₖ is."
        )
    if steps:
        sentences.append(f"Rescaled step: the learning rate of W_q and W_k has that factor ({factor}).")
    if inits & steps:
        sentences.append(
            "With both, Adam makes the same function as with 1/√dₖ at every step; only rounding tells them apart."
        )
    return sentences


def _read_rates(best: Sequence[Mapping[str, Any]], spec: AblationSpec) -> list[str]:
    sentences = []
    if seeds := spec.selection_seeds:
        sentences.append(
            f"Each setting has that of {count(len(spec.lrs), 'learning rate')} with the lowest median loss on other "
            f"seeds ({', '.join(map(str, seeds))}); the reported seeds had no part in the choice."
        )
    if spec.rates:
        sentences.append("Each setting has a learning rate that was chosen before, on other seeds.")
    edges = [_name(row) for row in best if row["at_edge"]]
    if edges:
        sentences.append(
            f"The best learning rate is at the edge of those tried, so that a better one may lie outside: "
            f"{'; '.join(edges)}."
        )
    return sentences


def _headline(task: Task, best: Sequence[Mapping[str, Any]]) -> str:
    rates = ", each at its own learning rate" if len({row["lr"] for row in best}) > 1 else ""
    size, shown = "", best
    if len({row["d_k"] for row in best}) > 1:
        # With several sizes only the settings that begin and move like the first: the table has the controls.
        size = "dₖ {}"
        shown = [row for row in best if all(row[name] == best[0][name] for name in ("init", "qk_step"))]
    parts = [f"{_name_briefly(row, size.format(row['d_k']))} {write_loss(row['final_loss_median'])}" for row in shown]
    return (
        f"median held-out loss of {count(best[0]['n'], 'seed')}{rates}: {'; '.join(parts)}; "
        f"chance {write_loss(task.chance_loss)}."
    )


def _name_briefly(row: Mapping[str, Any], *more: str) -> str:
    return name_setting(row["scale"], row["init"], *more, qk_step=row["qk_step"])


def _name(row: Mapping[str, Any]) -> str:
    return f"{_name_briefly(row)} (dₖ = {row['d_k']}, lr {row['lr']:g})"


def _read_setting(row: Mapping[str, Any]) -> str:
    if row["n"] == 0:
        return f"{_name(row)}: every run failed."
    low, high = row["final_loss_iqr"]
    solved = round(row["solved_fraction"] * row["n"])
    least, most = row["solved_interval"]
    pace = ""
    if row["reached_threshold"]:
        pace = (
            f"; the training loss got below the threshold in {row['reached_threshold']} of {row['n']}, "
            f"after {row['steps_to_threshold_median']:.0f} steps (median)"
        )
    lost = "".join(f"; {row[word]} {word}" for word in ("diverged", "failed") if row[word])
    return (
        f"{_name(row)}: median held-out loss {write_loss(row['final_loss_median'])} "
        f"[{write_loss(low)}, {write_loss(high)}], solved by {solved} of {count(row['n'], 'seed')} "
        f"({write_percent(least)} to {write_percent(most)}){pace}{lost}."
    )


def _read_learned(row: Mapping[str, Any]) -> str:
    least, largest = row["temperature_range"]
    spread = row["temperature_spread_median"]
    layers = ", ".join(f"{t:.3f} in layer {layer}" for layer, t in enumerate(row["temperature_by_layer"], start=1))
    return (
        f"{_name(row)}: τ/√dₖ went from 1 to {layers} (medians of the seeds), single heads from {least:.3f} to "
        f"{largest:.3f}"
        + (
            f"; over the queries of a head ln τ has a standard deviation of {write_number(spread, 2)} (0 at the start)"
            if spread
            else ""
        )
        + "."
    )


OUTCOMES = {
    "as well": "it does as well",
    "worse": "it does worse",
    "better": "it does better",
    "not distinguishable": "they are not distinguishable",
}
"""The outcomes of a comparison as clauses."""


def _read_comparison(row: Mapping[str, Any]) -> str:
    other = f"{name_setting(row['against'], row['against_init'])} (lr {row['against_lr']:g})"
    counts = f"higher in {row['higher']} and lower in {row['lower']} of {count(row['n'], 'seed')}"
    p = "" if row["holm_p"] is None else f", p = {write_number(row['holm_p'], 2)}"
    return f"{_name(row)} against {other}: {show_difference(row)}, {counts}{p}; {OUTCOMES[row['outcome']]}."


def show_difference(row: Mapping[str, Any]) -> str:
    """Return the difference of a comparison in words, with its interval where there are seeds enough for one.

    >>> row = {"difference": 2.5, "difference_interval": [2.4, None], "outcome": "worse", "n": 6}
    >>> show_difference({**row, "higher": 6, "lower": 0})
    'the loss differs by +2.50 [+2.40, +∞]'
    """
    if row["higher"] == row["lower"] == 0:
        return "the losses are equal"
    words = f"the loss differs by {_show_signed(row['difference'], positive=row['higher'] > row['lower'])}"
    if row["n"] < FEWEST_PAIRS:
        return f"{words} (too few seeds for an interval)"
    low, high = row["difference_interval"]
    ends = (
        _show_signed(low, positive=row["outcome"] == "worse"),
        _show_signed(high, positive=row["outcome"] != "better"),
    )
    return f"{words} [{', '.join(ends)}]"


def _show_signed(value: float | None, *, positive: bool) -> str:
    """Return a signed number; where it is infinite, `positive` has its sign."""
    sign = "+" if (positive if value is None else value >= 0.0) else "−"
    return f"{sign}{write_loss(None if value is None else abs(value))}"
