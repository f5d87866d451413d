"""Bands over seeds: quantities of runs over training steps, such as temperature pressure and learned temperature."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqrtdk.report.panels import Area, Axis, Dash, Line, Panel, ReferenceLine, Series, floats
from sqrtdk.show.table import count

__all__ = ["Seeds", "caption_scale", "draw_band", "show_scale"]

Runs = Sequence[Mapping[str, Any]]


class Seeds(NamedTuple):
    """Curves of runs that differ by seed only, and how they are drawn."""

    runs: Runs
    colour: str
    label: str
    dash: Dash = "solid"


class _Quantity(NamedTuple):
    title: str
    level: float
    level_label: str
    caption: str


_OF_SCALE = {
    "pressure": _Quantity(
        "Temperature pressure",
        0.0,
        "",
        "Temperature pressure below 0: the loss would fall with sharper attention; above 0: with softer attention.",
    ),
    "temperature": _Quantity(
        "Learned temperature τ/√dₖ",
        1.0,
        "√dₖ",
        "Learned temperatures are the mean of a run's heads.",
    ),
}


def draw_band(seeds: Seeds, quantity: str) -> list[Series]:
    """Draw the median and the quartiles of the runs that have a value at each step; nothing if none has any.

    A diverged run ends early. A value of None, or a run without the quantity, is left out, never taken for 0.

    >>> runs = [{"step": [0, 10, 20], "pressure": [0.5, None, value]} for value in (1.0, 3.0)]
    >>> draw_band(Seeds([*runs, {"step": [0]}], "#000000", "sqrt"), "pressure")[1].y
    (0.5, 2.0)
    """
    by_step: dict[float, list[float]] = {}
    for run in seeds.runs:
        for step, value in zip(run["step"], run.get(quantity, ()), strict=False):
            if value is not None and math.isfinite(value):
                by_step.setdefault(step, []).append(value)
    if not by_step:
        return []
    steps = sorted(by_step)
    values = [sorted(by_step[step]) for step in steps]
    low, high = ([ranked[at(len(ranked))] for ranked in values] for at in (_lower, _upper))
    return [
        Area(floats(steps), floats(low), floats(high), seeds.colour, seeds.label),
        Line(floats(steps), floats(map(statistics.median, values)), seeds.colour, seeds.label, seeds.dash),
    ]


def _lower(number: int) -> int:
    return (number - 1) // 4


def _upper(number: int) -> int:
    return number - 1 - _lower(number)


def show_scale(settings: Sequence[Seeds], suffix: str = "") -> list[Panel]:
    """Plan a panel for the temperature pressure and one for learned temperatures; none for what no run has."""
    panels = []
    for name, quantity in _OF_SCALE.items():
        series = [drawn for seeds in settings for drawn in draw_band(seeds, name)]
        if series:
            line = ReferenceLine(quantity.level, quantity.level_label, label_at="start")
            panels.append(Panel(f"{quantity.title}{suffix}", Axis("step"), Axis(""), tuple(series), (line,)))
    return panels


def caption_scale(settings: Sequence[Seeds]) -> str:
    """Explain the panels of `show_scale`, and count the runs that lack the pressure; empty without panels."""
    runs = [run for seeds in settings for run in seeds.runs]
    having = {name: sum(any(value is not None for value in run.get(name, ())) for run in runs) for name in _OF_SCALE}
    parts = [_OF_SCALE[name].caption for name, number in having.items() if number]
    if 0 < having["pressure"] < len(runs):
        lacking = count(len(runs) - having["pressure"], "run")
        parts.append(f"{lacking} of {len(runs)} did not record the temperature pressure.")
    return " ".join(parts)
