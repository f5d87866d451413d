"""Draws a panel as a plain SVG in the colours of the page: the picture that stands where no script draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from sqrtdk.report.panels import Area, Axis, Heatmap, Line, Numbers, Panel, Points, shade
from sqrtdk.wording.numbers import write_number

__all__ = ["draw_panel"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 8, 38
_DASHES = {"solid": "none", "dash": "6 3", "dot": "2 3", "dashdot": "6 3 2 3"}
_MOST_TICKS = 12


class _Scale(NamedTuple):
    """Place of a value along one side of the drawing."""

    low: float
    high: float
    log: bool
    first: float
    last: float

    def __call__(self, value: float) -> float:
        share = (self._map(value) - self._map(self.low)) / ((self._map(self.high) - self._map(self.low)) or 1.0)
        return self.first + (self.last - self.first) * share

    def _map(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def draw_panel(panel: Panel, width: int, height: int, kind: str = "picture", label: str = "") -> str:
    """Return the panel as an SVG element of a class, with its axes, reference lines and series.

    >>> line = Line((0.0, 1.0), (2.0, 3.0), "#000000")
    >>> draw_panel(Panel("", Axis("x"), Axis("y"), (line,)), 300, 200).count("<path")
    1
    """
    heat = next((series for series in panel.series if isinstance(series, Heatmap)), None)
    columns, rows = (len(heat.z[0]), len(heat.z)) if heat is not None and heat.z else (0, 0)
    x = _fit(panel.x, _values(panel, "x"), (_LEFT, width - _RIGHT), columns)
    # The first row of a map is on top.
    ends = (_TOP, height - _BOTTOM) if heat is not None else (height - _BOTTOM, _TOP)
    y = _fit(panel.y, _values(panel, "y"), ends, rows)
    parts = [*_draw_axes(panel, x, y, width, height)]
    for series in panel.series:
        if isinstance(series, Heatmap):
            parts += _draw_heat(series, x, y)
        elif isinstance(series, Line):
            parts.append(_draw_line(series, x, y))
        elif isinstance(series, Area):
            parts.append(_draw_area(series, x, y))
        else:
            parts += _draw_points(series, x, y)
    for line in panel.lines:
        at = f'x1="{x(line.value):.1f}" x2="{x(line.value):.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"'
        if line.direction == "horizontal":
            at = f'x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y(line.value):.1f}" y2="{y(line.value):.1f}"'
        parts.append(f'<line {at} class="reference"/>')
        across, down = (x(line.value) + 4, _TOP + 10.0)
        if line.direction == "horizontal":
            across, down = (_LEFT + 4.0, y(line.value) - 4)
        parts.append(_write(across, down, line.label, "start"))
    read = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return f'<svg class="small-chart {kind}" viewBox="0 0 {width} {height}" {read}>{"".join(parts)}</svg>'


def _values(panel: Panel, name: str) -> list[float]:
    values: list[float] = []
    for series in panel.series:
        if isinstance(series, Heatmap):
            continue
        if name == "x" or not isinstance(series, Area):
            values += getattr(series, name)
        if name == "y" and not isinstance(series, Line) and series.low is not None and series.high is not None:
            values += [*series.low, *series.high]
    return [value for value in values if math.isfinite(value)]


def _fit(axis: Axis, values: list[float], ends: tuple[float, float], cells: int) -> _Scale:
    if cells:
        return _Scale(-0.5, cells - 0.5, False, *ends)
    if axis.low is not None and axis.high is not None:
        return _Scale(axis.low, axis.high, axis.log, *ends)
    known = [value for value in values if value > 0 or not axis.log] or [1.0]
    low, high = min(known), max(known)
    if axis.log:
        return _Scale(low / 1.15, high * 1.15, True, *ends)
    room = 0.04 * (high - low) or 0.5
    return _Scale(low - room, high + room, False, *ends)


def _ticks(axis: Axis, scale: _Scale) -> Iterator[tuple[float, str]]:
    low, high = sorted((scale.low, scale.high))
    if axis.ticks is not None:
        yield from ((value, name) for value, name in axis.ticks if low <= value <= high)
    elif scale.log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        step = -(-max(len(powers), 1) // 6)
        yield from ((10.0**power, write_number(10.0**power)) for power in powers[::step])
    else:
        unit = 10.0 ** math.floor(math.log10((high - low) / 3))
        unit *= next(times for times in (1, 2, 5, 10) if (high - low) / (unit * times) <= 6)
        for at in range(math.ceil(low / unit), math.floor(high / unit) + 1):
            yield at * unit, write_number(at * unit)


def _draw_axes(panel: Panel, x: _Scale, y: _Scale, width: int, height: int) -> Iterator[str]:
    ticks = list(_ticks(panel.y, y))
    for value, name in ticks[:: -(-len(ticks) // _MOST_TICKS) or 1]:
        yield f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="grid"/>'
        yield _write(_LEFT - 5, y(value) + 4, name, "end")
    for value, name in _ticks(panel.x, x):
        yield _write(x(value), height - _BOTTOM + 14, name, "middle")
    yield _write((_LEFT + width - _RIGHT) / 2, height - 5, panel.x.title, "middle")
    if panel.y.title:
        middle = (_TOP + height - _BOTTOM) / 2
        turned = f'transform="rotate(-90 12 {middle:.0f})"'
        yield f'<text x="12" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(panel.y.title)}</text>'


def _draw_line(series: Line, x: _Scale, y: _Scale) -> str:
    steps, move = [], "M"
    for a, b in zip(series.x, series.y, strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            move = "M"
            continue
        steps.append(f"{move}{x(a):.1f} {y(b):.1f}")
        move = "L"
    return (
        f'<path d="{"".join(steps)}" class="curve" stroke="{series.colour}" stroke-dasharray="{_DASHES[series.dash]}" '
        f'opacity="{series.opacity:g}"/>'
    )


def _draw_area(series: Area, x: _Scale, y: _Scale) -> str:
    upper = [f"{x(a):.1f} {y(b):.1f}" for a, b in _known(series.x, series.high)]
    lower = [f"{x(a):.1f} {y(b):.1f}" for a, b in _known(series.x, series.low)]
    edge = "L".join([*upper, *reversed(lower)])
    return f'<path d="M{edge}Z" fill="{series.colour}" opacity="{series.opacity:g}"/>' if edge else ""


def _draw_points(series: Points, x: _Scale, y: _Scale) -> Iterator[str]:
    ends: Iterable[tuple[float, float]] = zip(series.low or (), series.high or (), strict=True)
    for a, (low, high) in zip(series.x, ends, strict=False):
        if all(map(math.isfinite, (a, low, high))):
            place = f'x1="{x(a):.1f}" x2="{x(a):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}"'
            yield f'<line {place} stroke="{series.colour}"/>'
    half = series.size / 2
    for a, b in _known(series.x, series.y):
        at = f'cx="{x(a):.1f}" cy="{y(b):.1f}"'
        if series.symbol == "circle":
            yield f'<circle {at} r="{half:g}" fill="{series.colour}"/>'
        else:
            turn = {"square": 0, "diamond": 45, "cross": 45}[series.symbol]
            thick = half if series.symbol != "cross" else half / 2.5
            yield (
                f'<rect x="{x(a) - half:.1f}" y="{y(b) - thick:.1f}" width="{2 * half:g}" height="{2 * thick:g}" '
                f'fill="{series.colour}" transform="rotate({turn} {x(a):.1f} {y(b):.1f})"/>'
            )


def _draw_heat(series: Heatmap, x: _Scale, y: _Scale) -> Iterator[str]:
    wide, tall = x(1) - x(0), y(1) - y(0)
    for row, values in enumerate(series.z):
        for column, value in enumerate(values):
            if not math.isfinite(value):
                continue
            left, top = x(column) - wide / 2, y(row) - tall / 2
            colour = shade(series, value)
            yield f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{colour}"/>'
            if series.text is not None and wide > 7 * len(series.text[row][column]):
                ink = "#ffffff" if _is_dark(colour) else "#10151c"
                place = f'x="{x(column):.1f}" y="{y(row) + 4:.1f}" text-anchor="middle"'
                yield f'<text {place} fill="{ink}" class="own">{escape(series.text[row][column])}</text>'


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 130


def _known(x: Numbers, y: Numbers) -> Iterator[tuple[float, float]]:
    return ((a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b))


def _write(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>' if text else ""
