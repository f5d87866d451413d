"""One panel per finding of the exercises: what the number says is the title, and another number gives another title."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqrtdk.cells import format_cell, name_power
from sqrtdk.display import count
from sqrtdk.records import Record, Row
from sqrtdk.report import exercise_figures
from sqrtdk.report.palette import ACCENT, policy_colour
from sqrtdk.report.panels import (
    Axis,
    Figure,
    Line,
    Panel,
    Points,
    ReferenceLine,
    Series,
    Symbol,
    floats,
    name_ticks,
    one_panel,
)
from sqrtdk.setting_names import name_policy

_POLICIES = ("none", "sqrt", "inverse")
_HEIGHT = 330
# Effective keys with 1/√dₖ over those without: below this, scaling hardly matters.
_MUCH = 2.0
# Ticks that a narrow page has room for.
_MOST_DECADES = 6
_OTHER_COLOURS = (ACCENT, "#b08900", "#0f9fb0")


def cells_of(record: Record) -> dict[tuple[int, int, str], Row]:
    """The rows of a table over sizes by (dₖ, n, policy).

    The table has the name of the record's kind, that of gradients is ``vanish``.
    """
    name = "vanish" if record.kind == "gradients" else record.kind
    return {(row["d_k"], row["n"], row["scale"]): row for row in record.tables[name]}


def choose_size(record: Record) -> tuple[int, int]:
    """The size that stands for the rest: the largest n, and dₖ = 64 or, where that was not measured, the largest."""
    sizes = record.spec["d_ks"]
    return (64 if 64 in sizes else max(sizes)), max(record.spec["ns"])


def name_keys(keys: float) -> str:
    """How many keys, in as many digits as matter.

    >>> name_keys(2.118), name_keys(389.4)
    ('2.1', '389')
    """
    return f"{keys:.2g}" if keys < 10 else f"{keys:.0f}"


def show_effective_keys(record: Record) -> Figure:
    """The answer in one picture: how many keys a query attends to as dₖ grows, under each policy."""
    cells = cells_of(record)
    d_k, n = choose_size(record)
    sizes = record.spec["d_ks"]
    crossing = next(row for row in record.tables["crossover"] if row["n"] == n)
    series: list[Series] = []
    for policy in _POLICIES:
        mine = [cells[size, n, policy] for size in sizes]
        x, y = floats(sizes), floats(row["effective_keys"] for row in mine)
        series.append(Line(x, y, policy_colour(policy), name_policy(policy), width=2.4))
        series.append(
            Points(
                x,
                y,
                policy_colour(policy),
                size=5,
                low=floats(row["effective_keys_low"] for row in mine),
                high=floats(row["effective_keys_high"] for row in mine),
                text=tuple(f"dₖ {row['d_k']}: {name_keys(row['effective_keys'])} keys" for row in mine),
            )
        )
    marks = tuple(
        ReferenceLine(value, label, "vertical", "start")
        for value, label in (
            (crossing["begins"], "2 ln n"),
            (crossing["concentrated_from"], "Σp² ≥ ½"),
        )
        if min(sizes) <= value <= max(sizes)
    )
    return one_panel(
        _state_keys(cells, d_k, n),
        Panel(
            "",
            Axis("dₖ, length of queries and keys", log=True, ticks=name_ticks(sizes)),
            Axis(f"keys attended to, of {n}", log=True, low=0.85, high=1.6 * n),
            tuple(series),
            marks,
        ),
        f"Effective keys 1/Σp², means over {name_rows(record)} of random q and k per dot, seed {record.spec['seed']}; "
        f"bars are 95% intervals over draws.{_caption_crossing(crossing)}",
        height=_HEIGHT,
    )


def _caption_crossing(row: Row) -> str:
    if row["n"] == 2:
        return ""
    return (
        f" From dₖ = {row['concentrated_from']} on one or two keys hold most of the unscaled weight (mean Σp² ≥ ½, "
        "exact at this n). In the many-key limit (n → ∞) weights begin to concentrate at 2 ln n and have Σp² = ½ at "
        f"8 ln n = {row['nearly_one_hot']:.1f}."
    )


def _state_keys(cells: Mapping[tuple[int, int, str], Row], d_k: int, n: int) -> str:
    none, sqrt = (cells[d_k, n, policy]["effective_keys"] for policy in ("none", "sqrt"))
    size = f"dₖ = {d_k} and n = {n}"
    if sqrt < _MUCH * none:
        return (
            f"At {size} scaling changes little: a query attends to {name_keys(none)} keys without it, to "
            f"{name_keys(sqrt)} with 1/√dₖ"
        )
    return f"At {size} a query attends to {name_keys(none)} keys without scaling and to {name_keys(sqrt)} with 1/√dₖ"


def name_rows(record: Record) -> str:
    """How many rows each size of a record was measured on."""
    counts = [row["rows"] for row in cells_of(record).values()]
    return f"{min(counts)} rows" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} rows"


def show_condensation(record: Record) -> Figure:
    """Σp² of unscaled rows over dₖ in units of ln n: numbers of keys that differ much fall on nearly one curve."""
    cells = cells_of(record)
    sizes = record.spec["d_ks"]
    series: list[Series] = []
    for index, n in enumerate(record.spec["ns"]):
        mine = [cells[size, n, "none"] for size in sizes]
        colour = _OTHER_COLOURS[index % len(_OTHER_COLOURS)]
        x, y = floats(size / math.log(n) for size in sizes), floats(row["sum_p2"] for row in mine)
        series.append(Line(x, y, colour, f"n = {n} keys", dash="solid" if index == 0 else "dash"))
        series.append(
            Points(
                x,
                y,
                colour,
                size=5,
                low=floats(row["sum_p2_low"] for row in mine),
                high=floats(row["sum_p2_high"] for row in mine),
                text=tuple(f"dₖ {row['d_k']}, n {n}: Σp² = {row['sum_p2']:.3f}" for row in mine),
            )
        )
    ticks = tuple((float(value), f"{value:g}") for value in (0.125, 0.5, 2, 8, 32, 128))
    return one_panel(
        _state_crossover(record.tables["crossover"]),
        Panel(
            "",
            Axis("dₖ/ln n", log=True, ticks=ticks),
            Axis("Σp², 1 is one-hot", low=0.0, high=1.05),
            tuple(series),
            (
                ReferenceLine(2.0, "begins", "vertical", "end"),
                ReferenceLine(8.0, "½ for n → ∞", "vertical", "start"),
                ReferenceLine(0.5, "", "horizontal"),
            ),
        ),
        f"No scaling. Means over {name_rows(record)} per dot, seed {record.spec['seed']}, with 95% intervals over "
        "draws. The title has the exact dₖ at which the mean Σp² is ½. Dashed lines: 2 ln n and 8 ln n, where the "
        f"many-key limit (n → ∞) puts the beginning and Σp² = ½; 8 ln n is {_list_limits(record)}.",
        height=_HEIGHT,
    )


def _list_limits(record: Record) -> str:
    return " and ".join(f"{row['nearly_one_hot']:.1f} for n = {row['n']}" for row in record.tables["crossover"])


def _state_crossover(rows: Sequence[Row]) -> str:
    parts = [
        "at every dₖ with 2 keys" if row["n"] == 2 else f"from dₖ = {row['concentrated_from']} on with {row['n']} keys"
        for row in rows
    ]
    return f"One or two keys hold most of the unscaled weight {' and '.join(parts)}"


def show_spread(record: Record) -> Figure:
    """The measured standard deviation of the scores beside the law √dₖ."""
    whole = exercise_figures.show_variance(record)
    return one_panel(
        whole.title,
        whole.panel("spread"),
        f"Dots: {record.spec['samples']} random pairs (q, k) per size, seed {record.spec['seed']}, with 95% intervals, "
        "which are smaller than the dots; lines: the law.",
        height=_HEIGHT,
    )


def show_softmax(record: Record) -> Figure:
    """softmax([x, 0, …]) over x: the weight of x, and what is left of the slope."""
    whole = exercise_figures.show_saturation(record)
    weights, lines = whole.panel("weights"), exercise_figures.draw_saturation(record)
    return one_panel(
        whole.title,
        Panel(
            "",
            Axis("lead of the largest score, x", low=weights.x.low, high=weights.x.high),
            Axis("weight, slope", low=0.0, high=1.14),
            (lines["first_weight"], lines["jacobian_trace"]),
            weights.lines,
        ),
        f"Computed exactly, nothing is drawn at random. {whole.caption}",
        height=_HEIGHT,
    )


def show_gradient_spread(record: Record) -> Figure:
    """5th percentile, median and mean of the gradient of q at two sizes, each policy a row."""
    cells = cells_of(record)
    places = list(dict.fromkeys((d_k, n) for d_k, n, _ in cells))
    uneven = find_most_uneven(record)
    shown = list(dict.fromkeys([uneven, choose_size(record)]))
    series: list[Series] = []
    ticks = []
    values = [cells[*at, policy][f"grad_q_{name}"] for at in shown for policy in _POLICIES for name in ("p5", "mean")]
    for place, at in enumerate(shown):
        for row, policy in enumerate(_POLICIES):
            cell, y = cells[*at, policy], float(4 * place + row)
            low, middle, mean = (cell[f"grad_q_{name}"] for name in ("p5", "median", "mean"))
            colour = policy_colour(policy)
            series.append(Line(floats([low, middle, mean]), (y, y, y), colour, width=2.0, opacity=0.6))
            series += [
                _mark(low, y, colour, "5th percentile", "cross"),
                _mark(middle, y, colour, "median", "diamond"),
                _mark(mean, y, colour, "mean", "circle"),
            ]
            ticks.append((y, f"{name_policy(policy)}, dₖ {at[0]}, n {at[1]}"))
    return one_panel(
        _state_gradients(cells, uneven),
        Panel(
            "",
            Axis("gradient of a query, ‖∂loss/∂q‖", log=True, ticks=_name_decades(values)),
            Axis(ticks=tuple(ticks), low=4 * len(shown) - 1.4, high=-0.6),
            (*_legend_of_marks(), *series),
        ),
        f"Over {name_rows(record)} with random q, k, v and loss per size, seed {record.spec['seed']}; "
        f"{count(len(shown), 'size')} of the {len(places)} measured, the most uneven first.",
        height=90 + 34 * len(ticks),
    )


def _name_decades(values: Sequence[float]) -> tuple[tuple[float, str], ...]:
    """Powers of ten over a range."""
    known = [math.log10(value) for value in values if value > 0]
    powers = range(math.floor(min(known)), math.ceil(max(known)) + 1)
    step = -(-len(powers) // _MOST_DECADES)
    return tuple((10.0**power, name_power(power) if power else "1") for power in reversed(powers[::-1][::step]))


def _mark(value: float, y: float, colour: str, name: str, symbol: Symbol) -> Points:
    return Points((value,), (y,), colour, size=8, symbol=symbol, text=(f"{name}: {format_cell(value)}",))


def _legend_of_marks() -> list[Series]:
    # Nothing of these is drawn: they explain the marks, whose colours are those of the policies.
    nan = (math.nan,)
    return [
        Points(nan, nan, "#7b8390", "one row in twenty gets less (5th percentile)", symbol="cross"),
        Points(nan, nan, "#7b8390", "median row", symbol="diamond"),
        Points(nan, nan, "#7b8390", "mean", symbol="circle"),
    ]


def find_most_uneven(record: Record) -> tuple[int, int]:
    """The size (dₖ, n) where a twentieth of the unscaled rows holds the largest share of the squared gradient."""
    cells = cells_of(record)
    d_k, n, _ = max((at for at in cells if at[2] == "none"), key=lambda at: cells[at]["top_share"])
    return d_k, n


def _state_gradients(cells: Mapping[tuple[int, int, str], Mapping[str, Any]], at: tuple[int, int]) -> str:
    none, sqrt = cells[*at, "none"], cells[*at, "sqrt"]
    size = f"dₖ = {at[0]}, n = {at[1]}"
    means = f"mean {none['grad_q_mean']:.2g} against {sqrt['grad_q_mean']:.2g} with 1/√dₖ"
    lowest = f"one row in twenty gets less than {format_cell(none['grad_q_p5'])}"
    if none["top_share"] <= sqrt["top_share"]:
        return f"Unscaled gradients are no more uneven than with 1/√dₖ ({size}: {means})"
    if none["grad_q_mean"] >= sqrt["grad_q_mean"]:
        return f"Unscaled gradients are uneven, not small: {means}, but {lowest} ({size})"
    return f"Unscaled gradients are uneven and smaller: {means}, and {lowest} ({size})"


def show_temperatures(record: Record) -> Figure:
    """The entropy ratio at each temperature around √dₖ."""
    whole = exercise_figures.show_temperature(record)
    panel = whole.panel("entropy_ratio")
    spec = record.spec
    return one_panel(
        whole.title,
        replace(
            panel,
            x=replace(panel.x, title="temperature τ, in units of √dₖ"),
            y=replace(panel.y, title="entropy ratio H/ln n"),
        ),
        f"Means over {spec['draws'] * spec['queries']} rows of random q and k, seed {spec['seed']}; bars are 95% "
        "intervals over draws.",
        height=260,
    )
