"""Figures of the exercises on variance, saturation and temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqrtdk.records.record import Record, Row
from sqrtdk.report.palette import ACCENT, NEUTRAL, policy_colour
from sqrtdk.report.panels import (
    Axis,
    Dash,
    Figure,
    Heatmap,
    Line,
    Note,
    Panel,
    Points,
    ReferenceLine,
    Series,
    floats,
    name_ticks,
    spread_out,
)
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import write_number

_POLICIES = ("none", "sqrt", "inverse")
# Colours for sizes and quantities; the colours of the three policies mean the policies alone.
_OTHER_COLOURS = (ACCENT, "#b08900", "#0f9fb0", NEUTRAL)
_DASHES: tuple[Dash, ...] = ("solid", "dash", "dot")
# More curves or maps than this would be unreadable.
_MOST_DENSITIES, _MOST_PATTERNS = 4, 9


def show_variance(record: Record) -> Figure:
    """Plan the measured standard deviation of q·k beside √dₖ, and its distributions."""
    rows = record.tables["variance"]
    sizes = sorted({row["d_k"] for row in rows})
    grid = [min(sizes) * (max(sizes) / min(sizes)) ** (i / 40) for i in range(41)]
    exponents = {"none": 0.5, "sqrt": 0.0, "inverse": -0.5}
    series: list[Series] = []
    for policy in _POLICIES:
        mine = [row for row in rows if row["scale"] == policy]
        colour, label = policy_colour(policy), name_policy(policy)
        series.append(Line(floats(grid), floats(d ** exponents[policy] for d in grid), colour, label, width=1.5))
        series.append(
            Points(
                floats(row["d_k"] for row in mine),
                floats(row["measured"] for row in mine),
                colour,
                low=floats(row["low"] for row in mine),
                high=floats(row["high"] for row in mine),
                text=tuple(
                    f"dₖ {row['d_k']}: {write_number(row['measured'])}, predicted {write_number(row['predicted'])}"
                    for row in mine
                ),
            )
        )
    spread = Panel(
        "Standard deviation",
        Axis("dₖ, length of queries and keys", log=True, ticks=name_ticks(sizes)),
        Axis("standard deviation of the scores", log=True),
        tuple(series),
        name="spread",
    )
    shown = spread_out(sizes, _MOST_DENSITIES)
    where = "each size" if shown == sizes else f"{len(shown)} of the {len(sizes)} sizes"
    densities = f"the distribution of the scores at {where}."
    return Figure(
        _state_spread(rows),
        (
            spread,
            *(
                replace(_show_densities(record, shown, policy, title), caption=f"Lines: {densities}")
                for policy, title in (("none", "Scores without scaling"), ("sqrt", "Scores divided by √dₖ"))
            ),
        ),
        caption="Left: lines are the variance formula, dots the measurement with its 95% interval. Middle and right: "
        f"{densities}",
    )


def _state_spread(rows: Sequence[Row]) -> str:
    by_policy = {
        policy: sorted((row["d_k"], row["measured"]) for row in rows if row["scale"] == policy) for policy in _POLICIES
    }
    (low_size, low), (high_size, high) = by_policy["none"][0], by_policy["none"][-1]
    root = [measured for _, measured in by_policy["sqrt"]]
    if low_size == high_size:
        return f"Scores at dₖ = {low_size} have standard deviation {write_number(low, 3)}, divided by √dₖ {root[0]:.2f}"
    ends = list(dict.fromkeys(f"{value:.2f}" for value in (min(root), max(root))))
    return (
        f"The standard deviation of q·k goes from {write_number(low, 3)} at dₖ = {low_size} to {write_number(high, 3)} "
        f"at dₖ = {high_size}; divided by √dₖ it "
        f"{'is ' + ends[0] if len(ends) == 1 else 'stays between ' + ' and '.join(ends)}"
    )


def _show_densities(record: Record, sizes: Sequence[int], policy: str, title: str) -> Panel:
    mine = [curve for curve in record.curves["densities"] if curve["scale"] == policy and curve["d_k"] in sizes]
    series = tuple(
        Line(
            floats(curve["x"]),
            floats(curve["density"]),
            _OTHER_COLOURS[index % len(_OTHER_COLOURS)],
            f"dₖ = {curve['d_k']}",
            dash=_DASHES[index % len(_DASHES)],
        )
        for index, curve in enumerate(mine)
    )
    return Panel(title, Axis("score"), Axis("density"), series, name=policy)


def show_saturation(record: Record) -> Figure:
    """Plan the weights and the Jacobian of softmax([x, 0, …]) over x, and the points of saturation."""
    lines = draw_saturation(record)
    main = next(row for row in record.tables["points"] if row["main"])
    end = float(record.spec["largest"])
    within = main["x"] <= end
    marks = (ReferenceLine(main["x"], f"saturated, x = {main['x']:.2f}", "vertical", "end"),) if within else ()
    axis = Axis("x", low=0.0, high=1.02 * end)
    weights = Panel(
        "Weights",
        axis,
        Axis("weight", low=0.0, high=1.14),
        (lines["first_weight"], lines["other_weight"]),
        marks,
        name="weights",
    )
    sensitivity = Panel(
        "Response to the scores",
        axis,
        Axis("size", low=0.0, high=1.14),
        (lines["jacobian_trace"], lines["slope"], lines["entropy_ratio"]),
        marks,
        name="sensitivity",
        caption=f"Left: the dashed line marks the main definition: {main['definition']}." if within else "",
    )
    solutions = record.tables["points"]
    points = Panel(
        "Saturation point by definition",
        Axis("x", low=0.0, high=1.1 * max(row["x"] for row in solutions)),
        Axis(
            ticks=tuple((float(index), _short_definition(index)) for index in range(len(solutions))),
            low=len(solutions) - 0.5,
            high=-0.5,
        ),
        (
            Points(
                floats(row["x"] for row in solutions),
                floats(range(len(solutions))),
                NEUTRAL,
                size=8,
                text=tuple(f"{row['definition']}: x = {row['x']:.3f}" for row in solutions),
            ),
            Points(
                (main["x"],),
                (0.0,),
                lines["jacobian_trace"].colour,
                size=10,
                symbol="diamond",
                text=(f"{main['definition']}: x = {main['x']:.3f}",),
            ),
        ),
        notes=tuple(
            Note(row["x"], float(index), f"{row['x']:.2f}", "right" if row["x"] < 0.8 * solutions[-1]["x"] else "left")
            for index, row in enumerate(solutions)
        ),
        name="definitions",
        caption="Right: the diamond is the main definition, dots are others.",
    )
    return Figure(
        f"softmax of x and {count(int(record.spec['zeros']), 'zero')} saturates at x = {main['x']:.2f}"
        + ("" if within else f", beyond the sweep to {end:g}"),
        (weights, sensitivity, points),
        caption=f"{'The dashed line marks the' if within else 'The'} main definition: {main['definition']}.",
    )


def draw_saturation(record: Record) -> dict[str, Line]:
    """Return the curves of softmax([x, 0, …]) over x by their names in the record."""
    violet, amber, teal, grey = _OTHER_COLOURS
    x = floats(record.curves["x"])
    looks: dict[str, tuple[str, str, Dash]] = {
        "first_weight": (violet, "weight of x", "solid"),
        "other_weight": (violet, f"weight of each of the {int(record.spec['zeros'])} zeros", "dash"),
        "jacobian_trace": (amber, "Jacobian trace 1 − Σp²", "solid"),
        "slope": (teal, "slope p(1 − p) of x's weight", "solid"),
        "entropy_ratio": (grey, "entropy ratio H/ln n", "dash"),
    }
    return {
        name: Line(x, floats(record.curves[name]), colour, label, dash=dash)
        for name, (colour, label, dash) in looks.items()
    }


def _short_definition(index: int) -> str:
    return ("trace (main)", "weight", "entropy", "slope", "float32")[index]


def show_temperature(record: Record) -> Figure:
    """Plan attention patterns by temperature, and entropy and gradients over the temperature."""
    rows = record.tables["temperature"]
    patterns = record.curves["patterns"]
    # Logarithmic: on a linear scale that holds a one-hot row, every softer one would be black.
    lowest = math.floor(math.log10(0.1 / record.spec["n"]))
    decades = tuple((float(power), f"{10.0**power:g}") for power in range(lowest, 1))
    shown = spread_out(patterns, _MOST_PATTERNS)
    panels = [
        Panel(
            f"τ = {_name_temperature(pattern['relative'])}",
            Axis("key"),
            Axis("query"),
            (
                Heatmap(
                    tuple(
                        floats(max(math.log10(max(w, 1e-300)), float(lowest)) for w in row)
                        for row in pattern["weights"]
                    ),
                    float(lowest),
                    0.0,
                    colour_bar=pattern is shown[-1],
                    ticks=decades,
                    sharp="high",
                ),
            ),
            name="pattern",
        )
        for pattern in shown
    ]
    ticks = tuple((float(index), f"{row['relative']:g}") for index, row in enumerate(rows))
    axis = Axis("τ/√dₖ", ticks=tuple(spread_out(ticks, 8)), low=-0.5, high=len(rows) - 0.5)
    for title, names, label in (
        (
            "Entropy ratio H/ln n",
            ("entropy_ratio", "entropy_ratio_low", "entropy_ratio_high"),
            "1 = uniform, 0 = one-hot",
        ),
        ("ρ (dots) and 1 − Σp² (diamonds)", ("saturation_index", "jacobian_trace"), ""),
        ("Mean gradient ‖∂loss/∂q‖", ("grad_q", "grad_q_low", "grad_q_high"), "norm"),
    ):
        panels.append(_show_by_temperature(rows, title, names, label, axis))
    of = f"{len(shown)} of the {len(rows)} temperatures" if len(shown) < len(rows) else "each temperature"
    return Figure(
        _state_temperatures(rows, record.spec["d_k"], record.spec["n"]),
        tuple(panels),
        columns=3,
        panel_height=250,
        caption=f"Maps: weights of the same queries and keys at {of}, one logarithmic colour range. Dots: means over "
        "all samples; the bars of H/ln n and of the gradient are 95% intervals.",
    )


def _state_temperatures(rows: Sequence[Row], d_k: int, n: int) -> str:
    sharp, soft = rows[0], rows[-1]
    if len(rows) == 1:
        ends = f"at τ = {_name_temperature(sharp['relative'])} the entropy ratio is {sharp['entropy_ratio']:.2f}"
    else:
        ends = (
            f"from τ = {_name_temperature(sharp['relative'])} to {_name_temperature(soft['relative'])} the entropy "
            f"ratio goes from {sharp['entropy_ratio']:.2f} to {soft['entropy_ratio']:.2f}"
        )
    return f"dₖ = {d_k}, n = {n}: {ends}"


def _name_temperature(relative: float) -> str:
    return "√dₖ" if relative == 1 else f"{relative:g}·√dₖ"


def _show_by_temperature(rows: Sequence[Any], title: str, names: tuple[str, ...], label: str, axis: Axis) -> Panel:
    series: list[Series] = []
    with_interval = len(names) == 3
    for index, row in enumerate(rows):
        colour = policy_colour(f"temperature:{row['relative']}")
        interval = (row[names[1]], row[names[2]]) if with_interval else (row[names[0]], row[names[0]])
        series.append(
            Points((float(index),), (row[names[0]],), colour, size=9, low=(interval[0],), high=(interval[1],))
        )
        if not with_interval:
            series.append(Points((float(index),), (row[names[1]],), colour, size=9, symbol="diamond"))
    highest = max(row[name] for row in rows for name in names)
    return Panel(title, axis, Axis(label, low=0.0, high=1.12 * highest), tuple(series), name=names[0])
