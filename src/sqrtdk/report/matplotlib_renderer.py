"""Draws a figure with matplotlib into PNG or SVG, without a display and without touching matplotlib's global state."""

from __future__ import annotations

import io
import textwrap
from typing import Any, Literal

from sqrtdk.errors import missing_extra
from sqrtdk.report.panels import (
    Area,
    Axis,
    Figure,
    Heatmap,
    Line,
    Note,
    Panel,
    Points,
    ReferenceLine,
    Series,
    list_colours,
)

_INK, _GRID = "#2b2f36", "#dfe3e8"
_DASHES: dict[str, Any] = {"solid": "-", "dash": (0, (5, 2.5)), "dot": (0, (1.2, 2)), "dashdot": (0, (5, 2, 1.2, 2))}
_MARKERS = {"circle": "o", "diamond": "D", "cross": "X", "square": "s"}
_NOTE_OFFSETS = {"right": (8, 0), "left": (-8, 0), "above": (0, 8), "below": (0, -8)}
_NOTE_ALIGNMENTS = {
    "right": ("left", "center"),
    "left": ("right", "center"),
    "above": ("center", "bottom"),
    "below": ("center", "top"),
}


def draw(figure: Figure) -> Any:
    """Draw a figure as a `matplotlib.figure.Figure`, one axes per panel in reading order.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Canvas
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise missing_extra("matplotlib", "report") from None
    columns = min(figure.columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    panel_width = 10.4 / columns if columns > 1 else 8.0
    canvas = Canvas(
        figsize=(panel_width * columns, rows * figure.panel_height / 88 + 0.9),
        layout=ConstrainedLayoutEngine(w_pad=0.10, h_pad=0.10),
        facecolor="white",
    )
    # matplotlib does not wrap by itself where its layout must leave room.
    title = textwrap.fill(figure.title, width=round(8.5 * canvas.get_figwidth()))
    canvas.suptitle(title, fontsize=13, fontweight="bold", color=_INK, x=0.01, ha="left")
    grid = canvas.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, figure.panels, strict=False):
        _draw_panel(canvas, axes, panel, title_width=round(11.5 * panel_width))
    for axes in grid[len(figure.panels) :]:
        axes.remove()
    _draw_legend(canvas, figure)
    return canvas


def render(figure: Figure, file_format: Literal["png", "svg"]) -> bytes:
    """Render a figure as the bytes of a PNG (150 dots per inch) or SVG file."""
    canvas = draw(figure)
    out = io.BytesIO()
    # Without a date the same record gives the same file.
    metadata = {"Date": None} if file_format == "svg" else {"Software": None}
    canvas.savefig(out, format=file_format, dpi=150, metadata=metadata)
    return out.getvalue()


def _draw_panel(canvas: Any, axes: Any, panel: Panel, title_width: int) -> None:
    axes.set_title(textwrap.fill(panel.title, width=title_width), fontsize=10, color=_INK, loc="left")
    heatmap = any(isinstance(series, Heatmap) for series in panel.series)
    if not heatmap:
        axes.grid(visible=True, color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom") and not heatmap)
        spine.set_color(_GRID)
    axes.tick_params(colors=_INK, labelsize=8, length=2.5, which="both")
    for series in panel.series:
        _draw_series(canvas, axes, series)
    # Last, as heat maps turn the y axis round and set their own ranges.
    _set_axis(axes.xaxis, axes.set_xscale, axes.set_xlim, panel.x)
    _set_axis(axes.yaxis, axes.set_yscale, axes.set_ylim, panel.y)
    for line in panel.lines:
        _draw_reference_line(axes, line)
    for note in panel.notes:
        _draw_note(axes, note)


def _set_axis(axis: Any, set_scale: Any, set_limits: Any, wanted: Axis) -> None:
    axis.set_label_text(wanted.title, fontsize=9, color=_INK)
    if wanted.log:
        set_scale("log")
    if wanted.low is not None:
        set_limits(wanted.low, wanted.high)
    if wanted.ticks is not None:
        axis.set_ticks([value for value, _ in wanted.ticks], labels=[label for _, label in wanted.ticks])
        axis.set_minor_locator(_no_ticks())


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _draw_series(canvas: Any, axes: Any, series: Series) -> None:
    match series:
        case Line():
            axes.plot(
                series.x,
                series.y,
                color=series.colour,
                linestyle=_DASHES[series.dash],
                linewidth=series.width,
                alpha=series.opacity,
            )
        case Points():
            _draw_points(axes, series)
        case Area():
            axes.fill_between(
                series.x, series.low, series.high, color=series.colour, alpha=series.opacity, linewidth=0.0
            )
        case Heatmap():
            _draw_heatmap(canvas, axes, series)


def _draw_points(axes: Any, series: Points) -> None:
    if series.low is not None and series.high is not None:
        axes.vlines(series.x, series.low, series.high, color=series.colour, linewidth=1.4)
    axes.plot(
        series.x,
        series.y,
        linestyle="none",
        marker=_MARKERS[series.symbol],
        color=series.colour,
        markersize=series.size,
        markeredgewidth=0,
        alpha=0.9,
    )


def _draw_heatmap(canvas: Any, axes: Any, series: Heatmap) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list(series.colours, list_colours(series))
    image = axes.imshow(
        series.z, cmap=colours, vmin=series.low, vmax=series.high, aspect="auto", interpolation="nearest"
    )
    if series.colour_bar:
        bar = canvas.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, colors=_INK, length=0)
        if series.ticks is not None:
            bar.set_ticks([value for value, _ in series.ticks], labels=[label for _, label in series.ticks])
    longest = max((len(text) for texts in series.text or () for text in texts), default=0)
    for i, texts in enumerate(series.text or ()):
        for j, text in enumerate(texts):
            red, green, blue, _ = colours((series.z[i][j] - series.low) / (series.high - series.low))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            ink = "white" if dark else "#1b1e23"
            axes.text(j, i, text, ha="center", va="center", fontsize=8 if longest <= 6 else 6.2, color=ink)


def _draw_reference_line(axes: Any, line: ReferenceLine) -> None:
    style = {"color": "#7b8390", "linewidth": 1.0, "linestyle": (0, (3, 3)), "zorder": 1.5}
    start = line.label_at == "start"
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": "#5b626d"}
    if line.direction == "horizontal":
        axes.axhline(line.value, **style)
        place, words["xycoords"] = (0.01 if start else 0.99, line.value), axes.get_yaxis_transform()
        words |= {"xytext": (0, 2), "ha": "left" if start else "right", "va": "bottom"}
    else:
        axes.axvline(line.value, **style)
        place, words["xycoords"] = (line.value, 0.02 if start else 0.98), axes.get_xaxis_transform()
        words |= {"xytext": (3, 0), "ha": "left", "va": "bottom" if start else "top"}
    if line.label:
        axes.annotate(line.label, place, **words)


def _draw_note(axes: Any, note: Note) -> None:
    horizontal, vertical = _NOTE_ALIGNMENTS[note.side]
    axes.annotate(
        note.text,
        (note.x, note.y),
        xytext=_NOTE_OFFSETS[note.side],
        textcoords="offset points",
        ha=horizontal,
        va=vertical,
        fontsize=8,
        color=_INK,
    )


def _draw_legend(canvas: Any, figure: Figure) -> None:
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    for label, series in figure.legend().items():
        match series:
            case Line():
                handles.append(
                    Line2D(
                        [],
                        [],
                        color=series.colour,
                        linestyle=_DASHES[series.dash],
                        linewidth=max(series.width, 2),
                        label=label,
                    )
                )
            case Points():
                handles.append(
                    Line2D(
                        [],
                        [],
                        color=series.colour,
                        linestyle="none",
                        marker=_MARKERS[series.symbol],
                        markersize=min(series.size, 9),
                        label=label,
                    )
                )
    letters = round(14 * canvas.get_figwidth())
    caption = "\n".join(textwrap.wrap(figure.caption, width=letters))
    if not handles:
        canvas.supxlabel(caption, fontsize=9, color=_INK, x=0.01, ha="left")
    else:
        canvas.legend(
            handles=handles,
            title=caption,
            title_fontproperties={"size": 9},
            alignment="left",
            loc="outside lower left",
            # A line's sample takes the room of eight letters.
            ncols=max(1, min(len(handles), 6, letters // (8 + max(len(handle.get_label()) for handle in handles)))),
            handlelength=3.0,
            frameon=False,
            fontsize=9,
            labelcolor=_INK,
        )
