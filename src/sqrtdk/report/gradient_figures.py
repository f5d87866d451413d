"""Figures of gradients through the softmax, and of the scale at one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqrtdk.records.record import Record
from sqrtdk.report.palette import NEUTRAL, policy_colour
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
    Symbol,
    floats,
    name_ticks,
)
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import write_number, write_percent

_POLICIES = ("none", "sqrt", "inverse")
_SYMBOLS: dict[str, Symbol] = {"mean": "circle", "median": "diamond", "p5": "cross"}
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
                    tuple(floats(row) for row in jacobian["matrix"]),
                    -reach,
                    reach,
                    colours="diverging",
                    text=tuple(tuple(write_number(entry, 3) for entry in row) for row in jacobian["matrix"]),
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
    some = "" if shown == ns else f" at {len(shown)} of the {len(ns)} numbers of keys"
    return Figure(
        _state_gradients(rows),
        tuple(panels),
        columns=4,
        panel_height=270,
        caption=f"Maps: ∂pᵢ/∂xⱼ of {len(jacobians)} rows, one colour range. Over dₖ{some}: circles and solid lines are "
        "means over rows, diamonds and dashed ones medians, crosses and dotted ones 5th percentiles.",
    )


def _state_gradients(rows: Sequence[Any]) -> str:
    cells = {(row["d_k"], row["n"], row["scale"]): row for row in rows}
    places = list(dict.fromkeys((row["d_k"], row["n"]) for row in rows))
    larger = sum(cells[*at, "none"]["grad_q_mean"] > cells[*at, "sqrt"]["grad_q_mean"] for at in places)
    most = max(places, key=lambda at: cells[*at, "none"]["top_share"])
    shares = [write_percent(cells[*most, policy]["top_share"]) for policy in ("none", "sqrt")]
    return (
        f"Without scaling the mean gradient of q is larger than with 1/√dₖ in {larger} of "
        f"{count(len(places), 'size')}; at dₖ = {most[0]}, n = {most[1]} a twentieth of the rows holds {shares[0]} of "
        f"its square, with 1/√dₖ {shares[1]}"
    )


def _show_gradient_norms(rows: Sequence[Any], n: int, quantity: str, title: str) -> Panel:
    series: list[Series] = []
    for policy in _POLICIES:
        mine = sorted((row for row in rows if row["scale"] == policy and row["n"] == n), key=lambda row: row["d_k"])
        x, colour = floats(row["d_k"] for row in mine), policy_colour(policy)
        for measure, dash in _MEASURES.items():
            y = floats(row[f"{quantity}_{measure}"] for row in mine)
            group = name_policy(policy) if measure == "mean" else None
            series.append(Line(x, y, colour, group, dash=dash, width=2.4 if measure == "mean" else 1.6))
            # A single dₖ makes no line, but a mark of its own.
            series.append(Points(x, y, colour, symbol=_SYMBOLS[measure], size=4.0))
    ticks = name_ticks((row["d_k"] for row in rows), most=6)
    return Panel(title, Axis("dₖ", log=True, ticks=ticks), Axis("", log=True), tuple(series))


def show_explanation(record: Record) -> Figure:
    """Ranked weights, entropy and concentration against the theory, and where this size lies."""
    d_k, n = record.spec["d_k"], record.spec["n"]
    keys = {row["scale"]: row["measured"] for row in record.tables["explain"] if row["quantity"] == "effective_keys"}
    limit = record.curves["limit"]
    drawn = any(value is not None for name in ("entropy_ratio", "sum_p2") for value in limit[name])
    return Figure(
        f"dₖ = {d_k}: a query attends to {write_number(keys['none'], 2)} of {n} keys without scaling, to "
        f"{write_number(keys['sqrt'], 2)} with 1/√dₖ and to {write_number(keys['inverse'], 2)} with 1/dₖ",
        (
            _show_ranked_weights(record),
            _show_limit(record, "entropy_ratio", "Entropy ratio H/ln n"),
            _show_limit(record, "sum_p2", "Concentration Σp²"),
            _show_concentration_map(record),
        ),
        columns=2,
        caption="Keys are counted as effective ones, 1/Σp². Diamonds: measured, with 95% intervals. Solid grey: the "
        "exact average over rows of one σ at this n; rows of Gaussian q differ in σ, the more the smaller dₖ. "
        + ("Dashed: the limit n → ∞ where its error is known, H up to ρ = ½ and Σp² from 2 on. " if drawn else "")
        + "Without scaling ρ = √(dₖ/(2 ln n)). Map: past the solid line Σp² ≥ ½ on average, exact at each n.",
    )


def _show_ranked_weights(record: Record) -> Panel:
    n = record.spec["n"]
    series = tuple(
        Line(
            floats(curve["rank"]),
            floats(curve["weight"]),
            policy_colour(curve["scale"]),
            name_policy(curve["scale"]),
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


def _show_limit(record: Record, quantity: str, title: str) -> Panel:
    curve = record.curves["limit"]
    rows = {(row["scale"], row["quantity"]): row for row in record.tables["explain"]}
    series: list[Series] = []
    if any(value is not None for value in curve[quantity]):
        series.append(
            Line(floats(curve["rho"]), floats(curve[quantity]), NEUTRAL, "limit, n → ∞", dash="dash", width=1.4)
        )
    series.append(
        Line(floats(curve["exact_rho"]), floats(curve[f"exact_{quantity}"]), NEUTRAL, "exact at this n", width=1.8)
    )
    for policy in _POLICIES:
        at, rho = rows[policy, quantity], rows[policy, "saturation_index"]
        series.append(
            Points(
                (rho["measured"],),
                (at["measured"],),
                policy_colour(policy),
                symbol="diamond",
                size=9,
                low=(at["low"],),
                high=(at["high"],),
                text=(f"{name_policy(policy)}: {write_number(at['measured'], 3)}",),
            )
        )
    return Panel(
        title,
        Axis("saturation index ρ = σ/√(2 ln n)"),
        Axis("", low=-0.03, high=1.05),
        tuple(series),
        (ReferenceLine(1.0, "ρ = 1", "vertical"),),
    )


def _show_concentration_map(record: Record) -> Panel:
    plane = record.curves["map"]
    here = plane["here"]
    x = floats(plane["n"])
    lowest, highest = 0.6, max(4.0 * here["d_k"], 4.0 * max(plane["concentrated"]), 1024.0)
    middle = len(x) // 2
    return Panel(
        "Concentration without scaling",
        Axis("keys n", log=True),
        Axis("dₖ", log=True, low=lowest, high=highest),
        (
            Line(x, floats(plane["begins"]), NEUTRAL, dash="dash"),
            Line(x, floats(plane["concentrated"]), NEUTRAL, dash="dash"),
            Line(floats(plane["exact_n"]), floats(plane["concentrated_from"]), NEUTRAL),
            Points((float(here["n"]),), (float(here["d_k"]),), policy_colour("none"), symbol="diamond", size=10),
        ),
        notes=(
            Note(x[1], math.sqrt(plane["concentrated"][middle // 2] * highest), "one or two keys", "right"),
            Note(x[middle], math.sqrt(plane["begins"][middle] * lowest), "spread", "right"),
            Note(x[9], plane["begins"][9] * 0.72, "2 ln n (n → ∞)", "below"),
            Note(x[3], plane["concentrated"][3] * 1.4, "8 ln n (n → ∞)", "above"),
            Note(float(here["n"]), float(here["d_k"]), f"dₖ {here['d_k']}, n {here['n']}", "above"),
        ),
    )
