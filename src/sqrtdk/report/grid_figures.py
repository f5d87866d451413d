"""Figures of grids: training curves with bands over seeds, and maps of the solved share over dₖ and learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqrtdk.records.record import Record, Row
from sqrtdk.report.bands import Seeds, caption_scale, draw_band, show_scale
from sqrtdk.report.palette import policy_colour
from sqrtdk.report.panels import Axis, Dash, Figure, Heatmap, Panel, floats
from sqrtdk.wording.names import name_setting
from sqrtdk.wording.numbers import write_percent

_PLACE = ("task", "length", "heads")
_MOST_MAPS = 9
_COLUMNS = 3


def show_grid(record: Record) -> Figure:
    """Return curves of each setting at its best cell, and one map per task, length, heads, policy and init."""
    summary = record.tables["summary"]
    places = list(dict.fromkeys(_place(row) for row in summary))
    settings = list(dict.fromkeys((row["scale"], row["init"]) for row in summary))
    panels: list[Panel] = []
    shown: list[Seeds] = []
    for place in places:
        curves = _choose_curves(place, settings, record)
        losses = tuple(series for seeds in curves for series in draw_band(seeds, "loss"))
        named = _name_place(place)
        panels.append(Panel(f"Training loss: {named}", Axis("step"), Axis("loss, nats", log=True), losses))
        panels += show_scale(curves, f": {named}")
        shown += curves
    maps = [
        _show_map(place, setting, cells)
        for place in places
        for setting in settings
        if (cells := [row for row in summary if _place(row) == place and (row["scale"], row["init"]) == setting])
    ]
    left_out = len(maps) - _MOST_MAPS
    caption = (
        "Curves: each setting at the dₖ and learning rate of its lowest median loss; the line is the median over seeds "
        "and the band goes from the lower to the upper quartile. Maps: share of seeds that solve the task."
    )
    caption = f"{caption} {caption_scale(shown)}".rstrip()
    if left_out > 0:
        caption += f" {left_out} more maps are left out; the table has their numbers."
    return Figure(record.headline, (*panels, *maps[:_MOST_MAPS]), columns=_COLUMNS, caption=caption)


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _PLACE)


def _name_place(place: tuple[Any, ...]) -> str:
    task, length, heads = place
    return f"{task}, n = {length}" + (f", {heads} heads" if heads > 1 else "")


def _choose_curves(place: tuple[Any, ...], settings: Sequence[tuple[str, str]], record: Record) -> list[Seeds]:
    """Return the curves of each setting at the dₖ and learning rate of its lowest median loss."""
    chosen = []
    for scale, init in settings:
        cells = [
            row
            for row in record.tables["summary"]
            if _place(row) == place and (row["scale"], row["init"]) == (scale, init)
        ]
        best = min(cells, key=lambda row: (_or_infinite(row["final_loss_median"]), row["lr"]))
        runs = [
            run
            for run in record.curves["runs"]
            if _place(run) == place and all(run[name] == best[name] for name in ("scale", "init", "d_k", "lr"))
        ]
        dash: Dash = "solid" if init == "unit" else "dash"
        chosen.append(Seeds(runs, policy_colour(scale), name_setting(scale, init), dash))
    return chosen


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _show_map(place: tuple[Any, ...], setting: tuple[str, str], cells: Sequence[Row]) -> Panel:
    d_ks = sorted({row["d_k"] for row in cells})
    lrs = sorted({row["lr"] for row in cells})
    solved = {(row["d_k"], row["lr"]): row["solved_fraction"] for row in cells}
    # The first row of a map is on top, so that dₖ grows upwards.
    z = tuple(floats(solved.get((d_k, lr)) for lr in lrs) for d_k in reversed(d_ks))
    text = tuple(tuple("–" if math.isnan(value) else write_percent(value) for value in row) for row in z)
    return Panel(
        f"Solved: {name_setting(*setting)}, {_name_place(place)}",
        Axis("learning rate", ticks=tuple((float(at), f"{lr:g}") for at, lr in enumerate(lrs))),
        Axis("dₖ", ticks=tuple((float(at), str(d_k)) for at, d_k in enumerate(reversed(d_ks)))),
        (Heatmap(z, 0.0, 1.0, text=text, colour_bar=False),),
    )
