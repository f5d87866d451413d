"""Figures of the exercises on variance, saturation and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqrtdk.records import Record
from sqrtdk.report.figure import Axis, Dash, Figure, Heatmap, Line, Note, Panel, Points, ReferenceLine, Series, numbers
from sqrtdk.report.palette import ACCENT, NEUTRAL, policy_colour, policy_label

_POLICIES = ("none", "sqrt", "inverse")
# For sizes and quantities: the colours of the three policies stand for the policies alone.
_OTHER_COLOURS = (ACCENT, "#b08900", "#0f9fb0", NEUTRAL)
_DASHES: tuple[Dash, ...] = ("solid", "dash", "dot")


def show_variance(record: Record) -> Figure:
    """The measured spread of q·k beside the law √dₖ, and its distributions."""
    rows = record.tables["variance"]
    sizes = sorted({row["d_k"] for row in rows})
    grid = [min(sizes) * (max(sizes) / min(sizes)) ** (i / 40) for i in range(41)]
    exponents = {"none": 0.5, "sqrt": 0.0, "inverse": -0.5}
    series: list[Series] = []
    for policy in _POLICIES:
        mine = [row for row in rows if row["scale"] == policy]
        colour, label = policy_colour(policy), policy_label(policy)
        series.append(Line(numbers(grid), numbers(d ** exponents[policy] for d in grid), colour, label, width=1.5))
        series.append(
            Points(
                numbers(row["d_k"] for row in mine),
                numbers(row["measured"] for row in mine),
                colour,
                low=numbers(row["low"] for row in mine),
                high=numbers(row["high"] for row in mine),
                text=tuple(f"dₖ {row['d_k']}: {row['measured']:.4g}, predicted {row['predicted']:.4g}" for row in mine),
            )
        )
    spread = Panel(
        "Standard deviation",
        Axis("dₖ", log=True, ticks=tuple((float(d), str(d)) for d in sizes)),
        Axis("standard deviation of the logits", log=True),
        tuple(series),
    )
    return Figure(
        "Spread of q·k for independent unit-variance q and k",
        (
            spread,
            _show_densities(record, "none", "Scores, unscaled"),
            _show_densities(record, "sqrt", "Scores divided by √dₖ"),
        ),
        caption="Left: lines are the law, dots the measurement; its 95% intervals are smaller than the dots. "
        "Middle and right: the distribution of the scores at each size.",
    )


def _show_densities(record: Record, policy: str, title: str) -> Panel:
    mine = [curve for curve in record.curves["densities"] if curve["scale"] == policy]
    series = tuple(
        Line(
            numbers(curve["x"]),
            numbers(curve["density"]),
            _OTHER_COLOURS[index % len(_OTHER_COLOURS)],
            f"dₖ = {curve['d_k']}",
            dash=_DASHES[index % len(_DASHES)],
        )
        for index, curve in enumerate(mine)
    )
    return Panel(title, Axis("score"), Axis("density"), series)


def show_saturation(record: Record) -> Figure:
    """The weights and the Jacobian of softmax([x, 0, …]) over x, and the points of saturation."""
    curves = record.curves
    x = numbers(curves["x"])
    main = next(row for row in record.tables["points"] if row["main"])
    marks = (ReferenceLine(main["x"], f"saturated, x = {main['x']:.2f}", "vertical"),)
    axis = Axis("x")
    violet, amber, teal, grey = _OTHER_COLOURS
    others = int(record.spec["zeros"])
    weights = Panel(
        "Weights",
        axis,
        Axis("weight", low=0.0, high=1.14),
        (
            Line(x, numbers(curves["first_weight"]), violet, "weight of x"),
            Line(x, numbers(curves["other_weight"]), violet, f"weight of each of the {others} zeros", dash="dash"),
        ),
        marks,
    )
    sensitivity = Panel(
        "What training can still feel",
        axis,
        Axis("size", low=0.0, high=1.14),
        (
            Line(x, numbers(curves["jacobian_trace"]), amber, "Jacobian trace 1 − Σp²"),
            Line(x, numbers(curves["slope"]), teal, "slope p(1 − p) of x's weight"),
            Line(x, numbers(curves["entropy_ratio"]), grey, "entropy ratio H/ln n", dash="dash"),
        ),
        marks,
    )
    found = record.tables["points"]
    points = Panel(
        "Where it saturates, by definition",
        Axis("x", low=0.0, high=1.1 * max(row["x"] for row in found)),
        Axis(
            ticks=tuple((float(index), _short_definition(index)) for index in range(len(found))),
            low=len(found) - 0.5,
            high=-0.5,
        ),
        (
            Points(
                numbers(row["x"] for row in found),
                numbers(range(len(found))),
                NEUTRAL,
                size=8,
                text=tuple(f"{row['definition']}: x = {row['x']:.3f}" for row in found),
            ),
            Points(
                (main["x"],),
                (0.0,),
                amber,
                size=10,
                symbol="diamond",
                text=(f"{main['definition']}: x = {main['x']:.3f}",),
            ),
        ),
        notes=tuple(
            Note(row["x"], float(index), f"{row['x']:.2f}", "right" if row["x"] < 0.8 * found[-1]["x"] else "left")
            for index, row in enumerate(found)
        ),
    )
    return Figure(
        f"softmax of x and {others} zeros",
        (weights, sensitivity, points),
        caption=f"The dashed line marks the main definition: {main['definition']}.",
    )


def _short_definition(index: int) -> str:
    return ("trace (main)", "weight", "entropy", "slope", "float32")[index]


def show_temperature(record: Record) -> Figure:
    """Attention patterns by temperature, and what the temperature does to entropy and gradients."""
    rows = record.tables["temperature"]
    patterns = record.curves["patterns"]
    top = max(max(map(max, pattern["weights"])) for pattern in patterns)
    panels = [
        Panel(
            f"τ = {_name_temperature(pattern['relative'])}",
            Axis("key"),
            Axis("query"),
            (Heatmap(tuple(numbers(row) for row in pattern["weights"]), 0.0, top, colour_bar=pattern is patterns[-1]),),
        )
        for pattern in patterns
    ]
    ticks = tuple((float(index), _name_temperature(row["relative"])) for index, row in enumerate(rows))
    axis = Axis("temperature τ", ticks=ticks, low=-0.5, high=len(rows) - 0.5)
    for title, names, label in (
        (
            "Entropy ratio H/ln n",
            ("entropy_ratio", "entropy_ratio_low", "entropy_ratio_high"),
            "1 = uniform, 0 = one-hot",
        ),
        ("Saturation index and Jacobian trace", ("saturation_index", "jacobian_trace"), "ρ (dots), 1 − Σp² (diamonds)"),
        ("Mean gradient ‖∂loss/∂q‖", ("grad_q", "grad_q_low", "grad_q_high"), "norm"),
    ):
        panels.append(_show_by_temperature(rows, title, names, label, axis))
    return Figure(
        f"Attention at three temperatures, dₖ = {record.spec['d_k']}, n = {record.spec['n']}"
        if len(rows) == 3
        else f"Attention by temperature, dₖ = {record.spec['d_k']}, n = {record.spec['n']}",
        tuple(panels),
        columns=3 if len(rows) == 3 else min(len(rows), 4),
        panel_height=250,
        caption="Top: weights of the same queries and keys, one colour range for all. Bottom: means over all draws; "
        "the bars are 95% "
        "intervals, mostly smaller than the dots.",
    )


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
    return Panel(title, axis, Axis(label, low=0.0, high=1.12 * highest), tuple(series))
