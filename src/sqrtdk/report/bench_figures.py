"""Figures of a benchmark: ratios per case with their intervals, time and memory over N."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqrtdk.display import count
from sqrtdk.errors import InvalidValueError
from sqrtdk.records import Record, Row
from sqrtdk.report.palette import NEUTRAL
from sqrtdk.report.panels import Axis, Dash, Figure, Line, Panel, Points, ReferenceLine, Series, Symbol, floats

_TITLES = {
    "square": "B×H×N×D",
    "statistics": "With all statistics, against by hand",
    "real": "Shapes and masks of models",
    "overhead": "A call on next to nothing",
    "tensors": "Tensors, forward",
    "gradients": "Tensors, forward and backward",
    "model": "A whole model, its attention exchanged",
}
_COLOURS = {
    "sqrtdk": "#1f83c9",
    "sqrtdk with statistics": "#4c6ef5",
    "torch SDPA": "#d55e00",
    "torch SDPA forward and backward": "#8a63d2",
    "model with sdpa": "#d55e00",
    "model with eager": "#c0609a",
    "onnxruntime": "#009e73",
    "OpenVINO": "#8a63d2",
    "jax": "#b08900",
    "torch SDPA + second pass": "#a0522d",
    "n×n in torch": "#c0609a",
    "n×n in NumPy": "#5f7fa6",
}
_SYMBOLS: dict[str, Symbol] = {
    "sqrtdk with statistics": "diamond",
    "sqrtdk.torch": "square",
    "sqrtdk.torch with statistics": "cross",
    "sqrtdk.torch forward and backward": "square",
    "model with sqrtdk": "square",
}
_TICKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
_CLOSE_TICKS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)


def show_bench(record: Record) -> Figure:
    """One panel per suite with time of the peer over time of sqrtdk, then time and memory over N."""
    ratios = [row for row in record.tables["ratios"] if row["ratio"] is not None]
    suites = {suite: [row for row in ratios if _place_of(row) == suite] for suite in _TITLES}
    panels = [_show_ratios(_TITLES[suite], rows) for suite, rows in suites.items() if rows]
    growth = [curve for curve in record.curves.get("growth", ()) if any(curve["milliseconds"])]
    if growth:
        panels.append(_show_growth(growth))
    if any(row["mebibytes"] is not None for row in record.tables["memory"]):
        panels.append(_show_memory(record.tables["memory"]))
    if not panels:
        raise InvalidValueError("record", "must hold a number to draw, got a benchmark in which no round counted")
    most = max((len({row["case"] for row in rows}) for rows in suites.values()), default=0)
    spec = record.spec
    return Figure(
        record.headline or f"{spec['cpu']}, {spec['backend']}, {count(spec['threads'], 'thread')}, {spec['dtype']}",
        tuple(panels),
        columns=2,
        panel_height=max(280, 70 + 25 * most),
        caption="Ratios: time of the peer over time of sqrtdk, median of paired rounds with its 95% interval; right of "
        "1 sqrtdk is faster, left of it slower. Circles: arrays, squares: tensors, diamonds and crosses: sqrtdk "
        "computes all statistics as well. Over N: one head, dₖ = 64.",
    )


def _place_of(row: Row) -> str:
    """The panel a ratio stands in: that of its suite, but gradients have their own."""
    return "gradients" if row["subject"] == "sqrtdk.torch forward and backward" else str(row["suite"])


def _show_ratios(title: str, rows: Sequence[Row]) -> Panel:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    pairs = list(dict.fromkeys((row["subject"], row["peer"]) for row in rows))
    series: list[Series] = []
    for place, (subject, peer) in enumerate(pairs):
        mine = [row for row in rows if (row["subject"], row["peer"]) == (subject, peer) and row["ratio"] is not None]
        # Side by side within the row of their case.
        shift = 0.22 * (place - (len(pairs) - 1) / 2)
        heights = [cases.index(row["case"]) + shift for row in mine]
        colour, symbol = _COLOURS.get(peer, NEUTRAL), _symbol_of(subject)
        series += [
            Line(floats((row["low"], row["high"])), floats((height, height)), colour, width=1.6)
            for row, height in zip(mine, heights, strict=True)
        ]
        series.append(
            Points(
                floats(row["ratio"] for row in mine),
                floats(heights),
                colour,
                peer,
                symbol=symbol,
                size=6.0,
                text=tuple(f"{row['case']}: {row['ratio']:.2f}" for row in mine),
            )
        )
    return Panel(
        title,
        _ratio_axis(rows),
        Axis(
            ticks=tuple((float(index), case) for index, case in enumerate(cases)), low=len(cases) - 0.4, high=-0.6
        ),
        tuple(series),
        (ReferenceLine(1.0, "equal", "vertical", "start"),),
    )  # fmt: skip


def _symbol_of(subject: str) -> Symbol:
    return _SYMBOLS.get(subject, "circle")


def _ratio_axis(rows: Sequence[Row]) -> Axis:
    ends = [row[end] for row in rows for end in ("low", "high") if row[end] is not None]
    low, high = min([*ends, 0.9]) / 1.1, max([*ends, 1.1]) * 1.1
    ticks = tuple((tick, f"{tick:g}") for tick in (_CLOSE_TICKS if high < 6 * low else _TICKS) if low <= tick <= high)
    return Axis("times as fast as the peer", log=True, low=low, high=high, ticks=ticks)


def _show_growth(curves: Sequence[Mapping[str, Any]]) -> Panel:
    series: list[Series] = []
    for curve in curves:
        windowed = curve["window"] is not None
        dash: Dash = "dot" if windowed else "dash" if curve["contender"] == "sqrtdk with statistics" else "solid"
        group = f"{curve['contender']}, window {curve['window']}" if windowed else curve["contender"]
        colour = _COLOURS.get(curve["contender"], NEUTRAL)
        series.append(Line(floats(curve["n"]), floats(curve["milliseconds"]), colour, group, dash=dash))
    return Panel(
        "Time of one head over N",
        Axis("N", log=True, ticks=_length_ticks(n for curve in curves for n in curve["n"])),
        Axis("milliseconds", log=True),
        tuple(series),
    )


def _show_memory(rows: Sequence[Row]) -> Panel:
    series: list[Series] = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        # Nothing measurable is no point on a logarithmic axis: it stands at a page of memory.
        heights = floats(None if row["mebibytes"] is None else max(row["mebibytes"], 4096 / 2**20) for row in mine)
        colour, symbol = _COLOURS.get(name, NEUTRAL), _symbol_of(name)
        series.append(Line(floats(row["n"] for row in mine), heights, colour, width=1.4))
        series.append(Points(floats(row["n"] for row in mine), heights, colour, name, symbol=symbol))
    return Panel(
        "Peak memory beyond inputs and results",
        Axis("N", log=True, ticks=_length_ticks(row["n"] for row in rows)),
        Axis("MiB", log=True),
        tuple(series),
    )


def _length_ticks(lengths: Any) -> tuple[tuple[float, str], ...]:
    return tuple((float(n), str(n)) for n in sorted(set(lengths)))
