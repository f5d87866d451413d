"""Figures of what passes back through the softmax, and of what the scale does at one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqrtdk.records import Record
from sqrtdk.report.figure import Axis, Dash, Figure, Heatmap, Line, Note, Panel, Points, ReferenceLine, Series, numbers
from sqrtdk.report.palette import NEUTRAL, policy_colour, policy_label

_POLICIES = ("none", "sqrt", "inverse")
_MEASURES: dict[str, Dash] = {"mean": "solid", "median": "dash", "p5": "dot"}


def show_gradients(record: Record) -> Figure:
    """Jacobians as heat maps, and gradient norms over dₖ for several n."""
    jacobians = record.curves["jacobians"]
    reach = max(abs(value) for jacobian in jacobians for row in jacobian["matrix"] for value in row)
    ticks = tuple((float(index), str(index + 1)) for index in range(len(jacobians[0]["matrix"])))
    panels = [
        Panel(
            f"Jacobian, {jacobian['name']} row",
            Axis("input j", ticks=ticks),
            Axis("weight i", ticks=ticks),
            (
                Heatmap(
                    tuple(numbers(row) for row in jacobian["matrix"]),
                    -reach,
                    reach,
                    colours="diverging",
                    text=tuple(tuple(map(_name_entry, row)) for row in jacobian["matrix"]),
                    colour_bar=False,
                ),
            ),
        )
        for jacobian in jacobians
    ]
    rows = record.tables["vanish"]
    ns = sorted({row["n"] for row in rows})
    shown = ns if len(ns) <= 3 else [ns[0], ns[len(ns) // 2], ns[-1]]
    panels += [_show_gradient_norms(rows, n, "grad_q", f"‖∂loss/∂q‖, n = {n} keys") for n in shown]
    panels.append(_show_gradient_norms(rows, shown[0], "jacobian_trace", f"1 − Σp², n = {shown[0]} keys"))
    return Figure(
        "What passes back through the softmax",
        tuple(panels),
        columns=4,
        panel_height=270,
        caption="Top: ∂pᵢ/∂xⱼ of four rows, one colour range. Bottom: over rows, solid is the mean, dashed the "
        "median, dotted the 5th percentile.",
    )


def _name_entry(value: float) -> str:
    if value == 0 or abs(value) >= 5e-4:
        return f"{value:.3f}".replace("-", "−")
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def _show_gradient_norms(rows: Sequence[Any], n: int, quantity: str, title: str) -> Panel:
    series: list[Series] = []
    for policy in _POLICIES:
        mine = sorted((row for row in rows if row["scale"] == policy and row["n"] == n), key=lambda row: row["d_k"])
        x, colour = numbers(row["d_k"] for row in mine), policy_colour(policy)
        for measure, dash in _MEASURES.items():
            y = numbers(row[f"{quantity}_{measure}"] for row in mine)
            group = policy_label(policy) if measure == "mean" else None
            series.append(Line(x, y, colour, group, dash=dash, width=2.4 if measure == "mean" else 1.6))
            # A single dₖ makes no line, but a dot.
            series.append(Points(x, y, colour, size=3.5))
    sizes = sorted({row["d_k"] for row in rows})
    return Panel(
        title, Axis("dₖ", log=True, ticks=tuple((float(d), str(d)) for d in sizes)), Axis("", log=True), tuple(series)
    )


def show_explanation(record: Record) -> Figure:
    """Ranked weights, entropy and concentration against the theory, and where this size lies."""
    d_k, n = record.spec["d_k"], record.spec["n"]
    return Figure(
        f"What the scale does at dₖ = {d_k}, n = {n}",
        (
            _show_ranked_weights(record),
            _show_law(record, "entropy_ratio", "Entropy ratio H/ln n"),
            _show_law(record, "sum_p2", "Concentration Σp²"),
            _show_condensation_map(record),
        ),
        columns=2,
        caption="Diamonds: measured, with 95% intervals. Solid grey: the exact average at this n. Dashed: the law for "
        "n → ∞, drawn where it is good at finite n (ρ up to ½ and from 2 on). Without scaling ρ = √(dₖ/(2 ln n)).",
    )


def _show_ranked_weights(record: Record) -> Panel:
    n = record.spec["n"]
    series = tuple(
        Line(
            numbers(curve["rank"]),
            numbers(curve["weight"]),
            policy_colour(curve["scale"]),
            policy_label(curve["scale"]),
            width=2.4,
        )
        for curve in record.curves["ranked"]
    )
    return Panel(
        "Weight of the 1st, 2nd, 3rd … key (median over queries)",
        Axis("rank of the key", log=True),
        Axis("weight", log=True, low=min(1e-8, 0.01 / n), high=2.0),
        series,
        (ReferenceLine(1.0 / n, f"uniform 1/{n}"),),
    )


def _show_law(record: Record, quantity: str, title: str) -> Panel:
    law = record.curves["law"]
    found = {(row["scale"], row["quantity"]): row for row in record.tables["explain"]}
    series: list[Series] = [
        Line(numbers(law["rho"]), numbers(law[quantity]), NEUTRAL, "law, n → ∞", dash="dash", width=1.4),
        Line(numbers(law["exact_rho"]), numbers(law[f"exact_{quantity}"]), NEUTRAL, "exact at this n", width=1.8),
    ]
    for policy in _POLICIES:
        at, rho = found[policy, quantity], found[policy, "saturation_index"]
        series.append(
            Points(
                (rho["measured"],),
                (at["measured"],),
                policy_colour(policy),
                symbol="diamond",
                size=9,
                low=(at["low"],),
                high=(at["high"],),
                text=(f"{policy_label(policy)}: {at['measured']:.3g}",),
            )
        )
    return Panel(
        title,
        Axis("saturation index ρ = σ/√(2 ln n)"),
        Axis("", low=-0.03, high=1.05),
        tuple(series),
        (ReferenceLine(1.0, "ρ = 1", "vertical"),),
    )


def _show_condensation_map(record: Record) -> Panel:
    plane = record.curves["map"]
    here = plane["here"]
    x = numbers(plane["n"])
    lowest, highest = 1.0, max(4.0 * here["d_k"], 4.0 * max(plane["nearly_one_hot"]), 1024.0)
    middle = len(x) // 2
    return Panel(
        "Unscaled attention: where it condenses",
        Axis("keys n", log=True),
        Axis("dₖ", log=True, low=lowest, high=highest),
        (
            Line(x, numbers(plane["begins"]), NEUTRAL, dash="dash"),
            Line(x, numbers(plane["nearly_one_hot"]), NEUTRAL),
            Points((float(here["n"]),), (float(here["d_k"]),), policy_colour("none"), symbol="diamond", size=10),
        ),
        notes=(
            Note(x[middle // 2], math.sqrt(plane["nearly_one_hot"][middle // 2] * highest), "nearly one-hot", "right"),
            Note(x[middle], math.sqrt(plane["begins"][middle] * lowest), "spread", "right"),
            Note(x[3], plane["begins"][3] * 0.72, "2 ln n", "below"),
            Note(x[3], plane["nearly_one_hot"][3] * 1.4, "8 ln n", "above"),
            Note(float(here["n"]), float(here["d_k"]), f"dₖ {here['d_k']}, n {here['n']}", "above"),
        ),
    )
