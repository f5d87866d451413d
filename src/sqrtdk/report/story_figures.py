"""Figures of the report on the exercises: one panel per finding, its title made from the numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqrtdk.records.record import Record, Row
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
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import name_power, write_number
from sqrtdk.wording.quantities import format_cell

EXAMPLE = (64, 1024)
"""dₖ and n of the report's running example."""

_POLICIES = ("none", "sqrt", "inverse")
_HEIGHT = 330
# Effective keys with 1/√dₖ over those without: below this, scaling hardly matters.
_MUCH = 2.0
# Ticks that a narrow page has room for.
_MOST_DECADES = 6
_OTHER_COLOURS = (ACCENT, "#b08900", "#0f9fb0")


def cells_of(record: Record) -> dict[tuple[int, int, str], Row]:
    """Return the rows of a table over sizes by (dₖ, n, policy).

    The table has the name of the record's kind, that of gradients is ``vanish``.
    """
    name = "vanish" if record.kind == "gradients" else record.kind
    return {(row["d_k"], row["n"], row["scale"]): row for row in record.tables[name]}


def choose_size(record: Record) -> tuple[int, int]:
    """Return dₖ and n of the running example; where one of them was not measured, its largest value in the record."""
    sizes = (record.spec["d_ks"], record.spec["ns"])
    d_k, n = (wanted if wanted in measured else max(measured) for wanted, measured in zip(EXAMPLE, sizes, strict=True))
    return d_k, n


def show_effective_keys(record: Record) -> Figure:
    """Plan the picture of the answer: how many keys a query attends to as dₖ grows, under each policy."""
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
                text=tuple(f"dₖ {row['d_k']}: {write_number(row['effective_keys'], 2)} keys" for row in mine),
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
        f"bars are 95% intervals.{_caption_crossing(crossing)}",
        height=_HEIGHT,
    )


def _caption_crossing(row: Row) -> str:
    if row["n"] == 2:
        return ""
    return (
        f" From dₖ = {row['concentrated_from']} on one or two keys hold most of the weight without scaling (mean "
        "Σp² ≥ ½, exact at this n). In the many-key limit (n → ∞) weights begin to concentrate at 2 ln n and have Σp² "
        f"= ½ at 8 ln n = {row['concentrated']:.1f}."
    )


def _state_keys(cells: Mapping[tuple[int, int, str], Row], d_k: int, n: int) -> str:
    none, sqrt = (cells[d_k, n, policy]["effective_keys"] for policy in ("none", "sqrt"))
    size, without, beside = f"dₖ = {d_k} and n = {n}", write_number(none, 2), write_number(sqrt, 2)
    if sqrt < _MUCH * none:
        return f"At {size} scaling changes little: a query attends to {without} keys without it, to {beside} with 1/√dₖ"
    return f"At {size} a query attends to {without} keys without scaling and to {beside} with 1/√dₖ"


def name_rows(record: Record) -> str:
    """Return how many rows each size of a record was measured on."""
    counts = [row["rows"] for row in cells_of(record).values()]
    return f"{min(counts)} rows" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} rows"


def show_concentration(record: Record) -> Figure:
    """Plan Σp² without scaling over dₖ in units of ln n: curves of few and of many keys nearly coincide."""
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
        f"No scaling. Means over {name_rows(record)} per dot, seed {record.spec['seed']}, with 95% intervals. "
        "The title has the exact dₖ from which the mean Σp² is at least ½. Dashed lines are the many-key limit (n → "
        f"∞): concentration begins at 2 ln n, and Σp² = ½ at 8 ln n, which is {_list_limits(record)}.",
        height=_HEIGHT,
    )


def read_concentration(record: Record) -> str:
    """State the mean Σp² of the running example without scaling and with 1/√dₖ."""
    d_k, n = choose_size(record)
    none, sqrt = (write_number(cells_of(record)[d_k, n, policy]["sum_p2"], 2) for policy in ("none", "sqrt"))
    return f"At dₖ = {d_k} and n = {n} the mean Σp² is {none} without scaling and {sqrt} with 1/√dₖ."


def _list_limits(record: Record) -> str:
    return " and ".join(f"{row['concentrated']:.1f} for n = {row['n']}" for row in record.tables["crossover"])


def _state_crossover(rows: Sequence[Row]) -> str:
    parts = [
        "at every dₖ with 2 keys" if row["n"] == 2 else f"from dₖ = {row['concentrated_from']} on with {row['n']} keys"
        for row in sorted(rows, key=lambda row: row["n"] != EXAMPLE[1])
    ]
    return f"Without scaling one or two keys hold most of the weight {' and '.join(parts)}"


def show_spread(record: Record) -> Figure:
    """Plan the measured standard deviation of the scores beside √dₖ, which the variance formula gives."""
    sizes = [row["d_k"] for row in record.tables["variance"]]
    d_k = EXAMPLE[0] if EXAMPLE[0] in sizes else max(sizes)
    none, sqrt = (
        next(row["measured"] for row in record.tables["variance"] if (row["d_k"], row["scale"]) == (d_k, policy))
        for policy in ("none", "sqrt")
    )
    return one_panel(
        f"At dₖ = {d_k} scores have a standard deviation of {write_number(none, 3)}, divided by √dₖ of {sqrt:.2f}",
        exercise_figures.show_variance(record).panel("spread"),
        f"Dots: {record.spec['samples']} random pairs (q, k) per size, seed {record.spec['seed']}, with 95% intervals, "
        "which are smaller than the dots. Lines: the variance formula.",
        height=_HEIGHT,
    )


def show_largest_weight(record: Record) -> Figure:
    """Plan the largest weight over dₖ in units of the uniform weight 1/n, with 1/√dₖ and with 1/dₖ."""
    cells = cells_of(record)
    d_k, n = choose_size(record)
    sizes = record.spec["d_ks"]
    series: list[Series] = []
    for policy in ("sqrt", "inverse"):
        mine = [cells[size, n, policy] for size in sizes]
        x, y = floats(sizes), floats(n * row["max_weight"] for row in mine)
        low, high = (floats(n * row[f"max_weight_{end}"] for row in mine) for end in ("low", "high"))
        series.append(Line(x, y, policy_colour(policy), name_policy(policy), width=2.4))
        series.append(Points(x, y, policy_colour(policy), size=5, low=low, high=high))
    sqrt, inverse = (write_number(n * cells[d_k, n, policy]["max_weight"], 2) for policy in ("sqrt", "inverse"))
    return one_panel(
        f"At dₖ = {d_k} the most attended of {n} keys has {sqrt} times the uniform weight with 1/√dₖ, {inverse} times "
        "with 1/dₖ",
        Panel(
            "",
            Axis("dₖ, length of queries and keys", log=True, ticks=name_ticks(sizes)),
            Axis("largest weight × n", log=True, ticks=name_ticks([1, 2, 5, 10, 20, 50, 100])),
            tuple(series),
            (ReferenceLine(1.0, "uniform", "horizontal", "start"),),
        ),
        f"Means over {name_rows(record)} of random q and k per dot, seed {record.spec['seed']}, with 95% intervals.",
        height=280,
    )


def show_softmax(record: Record) -> Figure:
    """Plan softmax([x, 0, …]) over x: the weight of x, and the Jacobian trace."""
    whole = exercise_figures.show_saturation(record)
    weights, lines = whole.panel("weights"), exercise_figures.draw_saturation(record)
    return one_panel(
        whole.title,
        Panel(
            "",
            Axis("lead of the largest score, x", low=weights.x.low, high=weights.x.high),
            Axis("weight, trace", low=0.0, high=1.14),
            (lines["first_weight"], lines["jacobian_trace"]),
            weights.lines,
        ),
        f"Computed exactly, without random samples. {whole.caption}",
        height=_HEIGHT,
    )


def show_gradient_spread(record: Record) -> Figure:
    """Plan 5th percentile, median and mean of the gradient of q for each policy: the example, then the extreme size."""
    cells = cells_of(record)
    places = list(dict.fromkeys((d_k, n) for d_k, n, _ in cells))
    example = choose_size(record)
    shown = list(dict.fromkeys([example, find_most_uneven(record)]))
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
        _state_gradients(cells, example),
        Panel(
            "",
            Axis("gradient of a query, ‖∂loss/∂q‖", log=True, ticks=_name_decades(values)),
            Axis(ticks=tuple(ticks), low=4 * len(shown) - 1.4, high=-0.6),
            (*_legend_of_marks(), *series),
        ),
        f"Over {name_rows(record)} with random q, k, v and loss per size, seed {record.spec['seed']}; "
        f"{count(len(shown), 'size')} of the {len(places)} measured"
        + (", the most uneven last." if len(shown) > 1 else "."),
        height=90 + 34 * len(ticks),
    )


def _name_decades(values: Sequence[float]) -> tuple[tuple[float, str], ...]:
    """Return powers of ten over a range."""
    known = [math.log10(value) for value in values if value > 0]
    powers = range(math.floor(min(known)), math.ceil(max(known)) + 1)
    step = -(-len(powers) // _MOST_DECADES)
    return tuple((10.0**power, name_power(power) if power else "1") for power in reversed(powers[::-1][::step]))


def _mark(value: float, y: float, colour: str, name: str, symbol: Symbol) -> Points:
    return Points((value,), (y,), colour, size=8, symbol=symbol, text=(f"{name}: {format_cell(value)}",))


def _legend_of_marks() -> list[Series]:
    # Legend entries alone: the marks in the panel have the colours of the policies.
    nan = (math.nan,)
    return [
        Points(nan, nan, "#7b8390", "one row in twenty gets less (5th percentile)", symbol="cross"),
        Points(nan, nan, "#7b8390", "median row", symbol="diamond"),
        Points(nan, nan, "#7b8390", "mean", symbol="circle"),
    ]


def find_most_uneven(record: Record) -> tuple[int, int]:
    """Return the (dₖ, n) where a twentieth of the rows without scaling holds most of the squared gradient."""
    cells = cells_of(record)
    d_k, n, _ = max((at for at in cells if at[2] == "none"), key=lambda at: cells[at]["top_share"])
    return d_k, n


def _state_gradients(cells: Mapping[tuple[int, int, str], Mapping[str, Any]], at: tuple[int, int]) -> str:
    none, sqrt = cells[*at, "none"], cells[*at, "sqrt"]
    size = f"At dₖ = {at[0]} and n = {at[1]}"
    mean = "larger" if none["grad_q_mean"] > sqrt["grad_q_mean"] else "no larger"
    uneven = "more uneven" if none["top_share"] > sqrt["top_share"] else "no more uneven"
    return (
        f"{size} gradients without scaling are {mean} on average than with 1/√dₖ "
        f"({write_number(none['grad_q_mean'], 2)} and {write_number(sqrt['grad_q_mean'], 2)}) and {uneven}"
    )


def show_temperatures(record: Record) -> Figure:
    """Plan the entropy ratio at each temperature around √dₖ."""
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
        f"Means over {spec['samples'] * spec['queries']} rows of random q and k, seed {spec['seed']}; bars are 95% "
        "intervals.",
        height=260,
    )


def show_ranked_weights(record: Record) -> Figure:
    """Plan the weights of a temperature record by rank, the median over its queries, a line per temperature."""
    n = record.spec["n"]
    ranks = sorted({min(n, round(1.25**step)) for step in range(math.ceil(math.log(n, 1.25)) + 1)})
    lines = []
    for pattern in record.curves["patterns"]:
        rows = [sorted(row, reverse=True) for row in pattern["weights"]]
        medians = floats(statistics.median(row[rank - 1] for row in rows) for rank in ranks)
        name = "τ = √dₖ" if pattern["relative"] == 1 else f"τ = {pattern['relative']:g}·√dₖ"
        lines.append(Line(floats(ranks), medians, policy_colour(f"temperature:{pattern['relative']}"), name))
    largest = [(line.group, write_number(line.y[0], 2)) for line in lines]
    return one_panel(
        f"Largest weight: {'; '.join(f'{weight} at {name}' for name, weight in largest)}",
        Panel(
            "",
            Axis("rank of the key", log=True),
            Axis("weight", log=True),
            tuple(lines),
            (ReferenceLine(1.0 / n, f"uniform 1/{n}", label_at="start"),),
        ),
        f"Weights of {count(len(record.curves['patterns'][0]['weights']), 'query')}, medians by rank.",
        height=280,
    )
