"""Draws a figure with Plotly: one chart per panel, laid out by HTML so that narrow screens can stack them."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from sqrtdk.errors import missing_extra
from sqrtdk.report.panels import (
    Area,
    Axis,
    Figure,
    Heatmap,
    Line,
    Note,
    Numbers,
    Panel,
    Points,
    ReferenceLine,
    Series,
    list_colours,
)
from sqrtdk.report.svg_renderer import draw_panel
from sqrtdk.report.table import render_text

# Mid-tones that stand on white and on near black; the page's style sheet refines the text per colour scheme.
_INK, _GRID = "#7b8390", "rgba(128,136,148,0.22)"
_FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"
_SYMBOLS = {"circle": "circle", "diamond": "diamond", "cross": "x", "square": "square"}
_NOTE_ANCHORS: dict[str, dict[str, Any]] = {
    "right": {"xanchor": "left", "yanchor": "middle", "xshift": 8},
    "left": {"xanchor": "right", "yanchor": "middle", "xshift": -8},
    "above": {"xanchor": "center", "yanchor": "bottom", "yshift": 7},
    "below": {"xanchor": "center", "yanchor": "top", "yshift": -7},
}


def draw(figure: Figure) -> list[Any]:
    """Draw a figure as Plotly figures, one per panel in reading order.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise missing_extra("plotly", "report") from None
    return [
        go.Figure(data=[_trace(series) for series in panel.series], layout=_layout(panel, figure.panel_height))
        for panel in figure.panels
    ]


def render_fragment(figure: Figure, name: str) -> str:
    """Render a figure as an HTML fragment: title, legend, panels with their data, caption.

    Without a script each panel is a picture.
    The fragment needs `page.css`, `page.js` and Plotly's script on its page; `name` must be unique there.
    """
    columns = min(figure.columns, len(figure.panels))
    width = {1: 700, 2: 340}.get(columns, 300)
    panels = []
    for index, (panel, chart) in enumerate(zip(figure.panels, draw(figure), strict=True)):
        # In JSON "<" occurs inside strings only, so it can be spelled in a way that cannot end the script element.
        # Plotly 7.1 was seen to do so itself, but does not promise it.
        data = chart.to_json().replace("<", "\\u003c")
        target = escape(f"{name}-{index}")
        heading = f"<h4>{render_text(panel.title)}</h4>" if panel.title else ""
        panels.append(
            f'<div class="panel">{heading}'
            f'<div class="plot" id="{target}" style="height:{figure.panel_height}px" role="img" '
            f'aria-label="{escape(panel.title or figure.title)}">{draw_panel(panel, width, figure.panel_height)}</div>'
            f'<script type="application/json" class="plot-data" data-for="{target}">{data}</script></div>'
        )
    legend = "".join(_legend_entry(group, series) for group, series in figure.legend().items())
    caption = f'<p class="caption">{render_text(figure.caption)}</p>' if figure.caption else ""
    return (
        f'<figure class="figure"><figcaption>{render_text(figure.title)}</figcaption>'
        f'<div class="legend">{legend}</div>'
        f'<div class="panels columns-{columns}">{"".join(panels)}</div>{caption}</figure>'
    )


def plotly_script() -> str:
    """Return Plotly's own JavaScript, from the installed package, so that pages need no network."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise missing_extra("plotly", "report") from None
    return str(get_plotlyjs())


def _trace(series: Series) -> dict[str, Any]:
    shared: dict[str, Any] = {"showlegend": False}
    if not isinstance(series, Heatmap):
        # Plotly reads a little HTML in names and texts, so these are escaped; the group is compared, never shown.
        shared |= {"name": escape(series.group or ""), "legendgroup": series.group or ""}
    match series:
        case Line():
            return shared | {
                "type": "scatter",
                "mode": "lines",
                "x": series.x,
                "y": series.y,
                "opacity": series.opacity,
                "line": {"color": series.colour, "width": series.width, "dash": series.dash},
                "hoverinfo": "x+y+name" if series.group else "skip",
            }
        case Points():
            return shared | _points_trace(series)
        case Area():
            return shared | {
                "type": "scatter",
                "mode": "lines",
                "x": (*series.x, *reversed(series.x)),
                "y": (*series.high, *reversed(series.low)),
                "fill": "toself",
                "fillcolor": series.colour,
                "opacity": series.opacity,
                "line": {"width": 0},
                "hoverinfo": "skip",
            }
        case Heatmap():
            return shared | _heatmap_trace(series)


def _points_trace(series: Points) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "x": series.x,
        "y": series.y,
        "marker": {
            "color": series.colour,
            "size": series.size * 1.15,
            "symbol": _SYMBOLS[series.symbol],
            "opacity": 0.9,
        },
    }
    if series.text is not None:
        trace |= {"text": [escape(text) for text in series.text], "hoverinfo": "text", "cliponaxis": False}
    if series.low is not None and series.high is not None:
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": _differences(series.high, series.y),
            "arrayminus": _differences(series.y, series.low),
            "thickness": 1.4,
            "width": 0,
        }
    return trace


def _heatmap_trace(series: Heatmap) -> dict[str, Any]:
    colours = list_colours(series)
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": series.z,
        "zmin": series.low,
        "zmax": series.high,
        "colorscale": [[index / (len(colours) - 1), colour] for index, colour in enumerate(colours)],
        "showscale": series.colour_bar,
        "colorbar": {"thickness": 9, "outlinewidth": 0, "xpad": 4, "tickfont": {"size": 10}},
        "hovertemplate": "row %{y}, column %{x}: %{z:.4g}<extra></extra>",
    }
    if series.ticks is not None:
        values, names = zip(*series.ticks, strict=True)
        trace["colorbar"] |= {"tickmode": "array", "tickvals": values, "ticktext": [escape(name) for name in names]}
        trace["hovertemplate"] = "row %{y}, column %{x}: 10^%{z:.2f}<extra></extra>"
    if series.text is not None:
        trace |= {
            "text": [[escape(text) for text in row] for row in series.text],
            "texttemplate": "%{text}",
            "textfont": {"size": 11 if max(len(text) for row in series.text for text in row) <= 6 else 9},
        }
    return trace


def _differences(above: Numbers, below: Numbers) -> Numbers:
    return tuple(high - low for high, low in zip(above, below, strict=True))


def _layout(panel: Panel, height: int) -> dict[str, Any]:
    heatmap = any(isinstance(series, Heatmap) for series in panel.series)
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 48, "r": 10, "t": 8, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": _INK, "size": 11, "family": _FONT},
        "hoverlabel": {"font": {"size": 12}},
        "showlegend": False,
        "bargap": 0.2,
        "xaxis": _axis(panel.x, heatmap, upside_down=False),
        "yaxis": _axis(panel.y, heatmap, upside_down=heatmap),
        "shapes": [_reference_shape(line) for line in panel.lines],
        "annotations": [_reference_label(line, panel) for line in panel.lines if line.label]
        + [_note(note, panel) for note in panel.notes],
    }


def _axis(axis: Axis, heatmap: bool, *, upside_down: bool) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "title": {"text": escape(axis.title), "standoff": 6, "font": {"size": 12}},
        "type": "log" if axis.log else "linear",
        "automargin": True,
        "gridcolor": _GRID,
        "showgrid": not heatmap,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        # Invisible: they only keep the labels of the two axes apart in the corner.
        "tickcolor": "rgba(0,0,0,0)",
        "exponentformat": "power",
    }
    if axis.log and axis.ticks is None:
        # Powers of ten only: in between Plotly writes lone digits 2 and 5 that nobody can read as 20 or 500.
        layout |= {"dtick": 1} if axis.low is None or axis.high is None or axis.high / axis.low < 1e6 else {}
        layout["tickfont"] = {"size": 9}  # Plotly enlarges powers by a quarter
    if axis.low is not None and axis.high is not None:
        ends = [_coordinate(axis.low, axis), _coordinate(axis.high, axis)]
        layout["range"] = ends
    elif upside_down:
        layout["autorange"] = "reversed"
    if axis.ticks is not None:
        layout |= {
            "tickmode": "array",
            "tickvals": [value for value, _ in axis.ticks],
            "ticktext": [escape(label) for _, label in axis.ticks],
        }
    return layout


def _coordinate(value: float, axis: Axis) -> float:
    # Plotly places ranges and annotations on a logarithmic axis by their exponent, shapes by their value.
    return math.log10(value) if axis.log else value


def _reference_shape(line: ReferenceLine) -> dict[str, Any]:
    style = {"type": "line", "layer": "below", "line": {"color": _INK, "width": 1, "dash": "dash"}}
    if line.direction == "horizontal":
        return style | {"xref": "paper", "x0": 0, "x1": 1, "y0": line.value, "y1": line.value}
    return style | {"yref": "paper", "y0": 0, "y1": 1, "x0": line.value, "x1": line.value}


def _reference_label(line: ReferenceLine, panel: Panel) -> dict[str, Any]:
    label: dict[str, Any] = {"text": escape(line.label), "showarrow": False, "font": {"size": 10.5}}
    start = line.label_at == "start"
    if line.direction == "horizontal":
        side = {"x": 0 if start else 1, "xanchor": "left" if start else "right", "yanchor": "bottom"}
        return label | side | {"xref": "paper", "y": _coordinate(line.value, panel.y)}
    side = {"y": 0 if start else 1, "yanchor": "bottom" if start else "top", "xanchor": "left"}
    return label | side | {"yref": "paper", "x": _coordinate(line.value, panel.x)}


def _note(note: Note, panel: Panel) -> dict[str, Any]:
    return {
        "text": escape(note.text),
        "showarrow": False,
        "font": {"size": 10.5},
        "x": _coordinate(note.x, panel.x),
        "y": _coordinate(note.y, panel.y),
    } | _NOTE_ANCHORS[note.side]


def _legend_entry(group: str, series: Line | Points) -> str:
    colour = series.colour
    match series:
        case Line():
            dashes = {"dash": "5 3", "dot": "1.5 2.5", "dashdot": "5 2 1.5 2"}
            style = f' stroke-dasharray="{dashes[series.dash]}"' if series.dash in dashes else ""
            drawing = f'<line x1="0" y1="6" x2="22" y2="6" stroke="{colour}" stroke-width="3"{style}/>'
        case Points():
            shapes = {
                "circle": f'<circle cx="11" cy="6" r="5" fill="{colour}"/>',
                "square": f'<rect x="6" y="1" width="10" height="10" fill="{colour}"/>',
                "diamond": f'<path d="M11 0 17 6 11 12 5 6z" fill="{colour}"/>',
                "cross": f'<path d="M6 1 16 11 M16 1 6 11" stroke="{colour}" stroke-width="3.5"/>',
            }
            drawing = shapes[series.symbol]
    return (
        f'<button type="button" data-group="{escape(group)}" aria-pressed="true">'
        f'<svg width="22" height="12" aria-hidden="true">{drawing}</svg>{escape(group)}</button>'
    )
