"""Plotly figures for notebooks: any result of sqrtdk, its panels side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from sqrtdk.audits import Audit
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.operation.attention import Attention
from sqrtdk.records.record import Record
from sqrtdk.report.head_figures import show_audit, show_heads, show_layers, show_rows, show_weights
from sqrtdk.report.kinds import figure_for
from sqrtdk.report.panels import Figure, Heatmap
from sqrtdk.report.plotly_renderer import draw
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.summary import HeadSummary

# Pixels above the panels for title and legend, between rows of them, and below for the caption. Plotly wraps neither
# title nor caption: their lines have so many letters at most.
_TOP, _GAP, _FOOT = 100, 90, 100
_TITLE_LETTERS, _CAPTION_LETTERS = 90, 130


def figure(data: Any) -> Any:
    """Draw a result as a `plotly.graph_objects.Figure`.

    Args:
        data: an `Attention` (its weights, if it has them, else its statistics), `AttentionStatistics`, a `HeadSummary`,
            a dict of them by layer, an `Audit`, what `sqrtdk.torch.watch` saw, or a `Record` with a figure. Tensors go
            to the host.

    Returns:
        A figure to show, change or write (`.show()`, `.update_layout(…)`, `.write_html(…)`); it stands on light pages
        and on dark ones.

    Raises:
        InvalidTypeError: for anything else.
        InvalidValueError: there is nothing to draw: no head, no row that sees two keys, neither weights nor statistics.
        MissingExtraError: plotly is not installed.

    >>> import numpy as np, sqrtdk
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 32, 16))
    >>> shown = figure(sqrtdk.attention(q, k, v, causal=True))
    >>> [trace.type for trace in shown.data]
    ['heatmap', 'scatter', 'scatter']
    >>> shown.layout.title.text
    '124 rows: the mean entropy ratio is 0.84, the least 0.26'
    """
    return draw_together(plan_figure(data))


def plan_figure(data: Any) -> Figure:
    """Return the figure that `figure` draws, as data."""
    match data:
        case Attention():
            return _plan_result(data)
        case AttentionStatistics():
            return show_rows(data)
        case HeadSummary():
            return show_heads(data)
        case Audit():
            return show_audit(data)
        case Record():
            return figure_for(data)
    # The result of a watch lives in the torch layer, which this module does not import: its layers identify it.
    layers = data if isinstance(data, Mapping) else getattr(data, "layers", None)
    if isinstance(layers, Mapping) and all(isinstance(one, HeadSummary) for one in layers.values()):
        return show_layers(layers)
    raise InvalidTypeError(
        "data",
        "must be an Attention, AttentionStatistics, HeadSummary, dict of HeadSummary, Audit, Record or what watch "
        f"saw, got {type(data).__name__}",
    )


def _plan_result(result: Attention) -> Figure:
    if result.weights is not None:
        return show_weights(_on_the_host(result.weights))
    if result.statistics is not None:
        return show_rows(result.statistics)
    raise InvalidValueError(
        "the result must have statistics or weights to draw, got neither; call attention with statistics=True or "
        "weights=True"
    )


def _on_the_host(weights: Any) -> Any:
    detach = getattr(weights, "detach", None)
    return np.asarray(weights) if detach is None else detach().cpu().double().numpy()


def draw_together(plan: Figure) -> Any:
    """Draw the panels of a figure as the subplots of one Plotly figure, with its title, legend and caption."""
    charts = draw(plan)
    from plotly.subplots import make_subplots  # there, since drawing was possible

    columns = min(plan.columns, len(charts))
    rows = -(-len(charts) // columns)
    drawn = rows * plan.panel_height + (rows - 1) * _GAP
    titles = [escape(panel.title) for panel in plan.panels]
    canvas = make_subplots(
        rows, columns, subplot_titles=titles, vertical_spacing=_GAP / drawn, horizontal_spacing=0.22 / columns
    )
    shown: set[str] = set()
    for index, (panel, chart) in enumerate(zip(plan.panels, charts, strict=True)):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        axes = canvas.get_subplot(**place)
        x, y = (axis.plotly_name.replace("axis", "") for axis in axes)
        for series, trace in zip(panel.series, chart.data, strict=True):
            if isinstance(series, Heatmap):
                low, high = axes.yaxis.domain
                trace.colorbar.update(x=axes.xaxis.domain[1], y=(low + high) / 2, len=high - low)
            elif series.group is not None and series.group not in shown:
                shown.add(series.group)
                trace.showlegend = True
            canvas.add_trace(trace, **place)
        canvas.update_xaxes(chart.layout.xaxis, **place)
        canvas.update_yaxes(chart.layout.yaxis, **place)
        for add, items in ((canvas.add_shape, chart.layout.shapes), (canvas.add_annotation, chart.layout.annotations)):
            for item in items:
                add(item, xref=_refer(item.xref, x), yref=_refer(item.yref, y))
    ground = charts[0].layout
    canvas.update_layout(
        template=ground.template,
        height=_TOP + drawn + _FOOT,
        title={"text": _wrap(plan.title, _TITLE_LETTERS), "x": 0, "xref": "paper", "font": {"size": 15}},
        margin={"l": 60, "r": 30, "t": _TOP, "b": _FOOT},
        paper_bgcolor=ground.paper_bgcolor,
        plot_bgcolor=ground.plot_bgcolor,
        font=ground.font,
        showlegend=bool(shown),
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1 + 22 / drawn, "yanchor": "bottom"},
    )
    canvas.add_annotation(
        text=_wrap(plan.caption, _CAPTION_LETTERS),
        xref="paper",
        yref="paper",
        x=0,
        y=0,
        xanchor="left",
        yanchor="top",
        yshift=-46,
        showarrow=False,
        align="left",
        font={"size": 11},
    )
    return canvas


def _wrap(text: str, letters: int) -> str:
    return "<br>".join(map(escape, textwrap.wrap(text, letters)))


def _refer(reference: str | None, axis: str) -> str:
    """Return an axis of the subplot in place of that of a chart by itself."""
    return f"{axis} domain" if reference == "paper" else axis
