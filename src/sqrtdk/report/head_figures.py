"""Figures of a user's measurements: weights, row statistics, heads of a layer, layers × heads of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sqrtdk.audits import Audit
from sqrtdk.errors import InvalidValueError
from sqrtdk.report.palette import ACCENT, NEUTRAL, policy_colour
from sqrtdk.report.panels import (
    Axis,
    Figure,
    Heatmap,
    Line,
    Numbers,
    Panel,
    Points,
    ReferenceLine,
    Series,
    floats,
    name_ticks,
    spread_out,
)
from sqrtdk.show.table import count, name_layer
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.summary import HeadSummary
from sqrtdk.wording.numbers import write_number

Array = npt.NDArray[Any]

# More cells than pixels, or more marks than are distinguishable, only make a figure slow.
_MOST_CELLS, _MOST_MARKS, _MOST_MAPS = 256, 2000, 4
_RATIO, _INDEX = "entropy ratio H/ln n", "saturation index ρ = σ/√(2 ln n)"
_COLOUR = policy_colour("sqrt")


def show_weights(weights: Array) -> Figure:
    """Plan the weights `[..., H, L, S]` (or `[L, S]`) of the first sequence, a map per head, four heads at most."""
    maps = weights.reshape(-1, *weights.shape[-2:]) if weights.ndim < 4 else weights[(0,) * (weights.ndim - 3)]
    if not maps.size:
        raise InvalidValueError("weights", f"must have a head, a query and a key to draw, got shape {weights.shape}")
    shown = maps[:_MOST_MAPS]
    strongest = float(np.nanmax(shown)) if np.isfinite(shown).any() else 1.0
    largest = shown.max(axis=-1)
    panels = tuple(
        Panel(
            f"head {head}" if len(maps) > 1 else "",
            Axis("key"),
            Axis("query"),
            (
                Heatmap(
                    tuple(map(floats, _thin(one))),
                    0.0,
                    strongest or 1.0,
                    colour_bar=head == len(shown) - 1,
                    sharp="high",
                ),
            ),
        )
        for head, one in enumerate(shown)
    )
    which = "" if len(shown) == len(maps) else f" of {len(maps)}"
    return Figure(
        f"Weights of {count(len(shown), 'head')}{which}: the largest of a row is "
        f"{write_number(np.nanmean(largest), 2)} on average",
        panels,
        columns=2,
        caption="The first sequence; every row sums to 1." + _say_thinned(max(maps.shape[-2:])),
    )


def show_rows(statistics: AttentionStatistics) -> Figure:
    """Row statistics `[..., H, L]`: entropy ratio over positions, and over the saturation index."""
    rows = statistics.numpy()
    ratio, index = (np.where(rows.visible_keys > 0, x, np.nan) for x in (rows.entropy_ratio, rows.saturation_index))
    counted = np.isfinite(ratio)
    if not counted.any():
        raise InvalidValueError(
            "statistics", "must have rows that see two keys or more to draw, got none: others have no entropy ratio"
        )
    heads = ratio.shape[-2] if ratio.ndim > 1 else 1
    by_head = _mean_over_batch(ratio.reshape(-1, heads, ratio.shape[-1]))
    positions = rows.positions if rows.positions is not None else np.arange(ratio.shape[-1])
    return Figure(
        f"{count(int(counted.sum()), 'row')}: the mean entropy ratio is "
        f"{write_number(float(rows.mean('entropy_ratio')), 2)}, the least {write_number(np.nanmin(ratio), 2)}",
        (_draw_positions(by_head, positions), _draw_diagram(ratio[counted], index[counted])),
        columns=2,
        caption="1: all keys weigh the same, 0: one key has everything. The line is the many-key limit for independent "
        "Gaussian logits (H/ln n = 1 − ρ²). Above ρ = 1 a few keys dominate." + _say_thinned(ratio.shape[-1]),
    )


def _draw_positions(ratio_HL: Array, positions: Array) -> Panel:
    if len(ratio_HL) > 1:
        z = tuple(map(floats, _thin(ratio_HL)))
        numbers = spread_out(range(len(positions)), len(z[0]))
        ticks = tuple((float(at), f"{positions[numbers[at]]:g}") for at in spread_out(range(len(z[0])), 6))
        return Panel(_RATIO, Axis("position of the query", ticks=ticks), Axis("head"), (Heatmap(z, 0.0, 1.0),))
    line = Line(floats(positions), floats(ratio_HL[0]), _COLOUR)
    return Panel(_RATIO, Axis("position of the query"), Axis("H/ln n", low=0.0, high=1.05), (line,))


def _draw_diagram(ratios: Array, indices: Array) -> Panel:
    known = np.isfinite(indices)
    kept = spread_out(np.flatnonzero(known).tolist(), _MOST_MARKS)
    limit = np.linspace(0.0, 1.0, 50)
    series: tuple[Series, ...] = (
        Points(floats(indices[kept]), floats(ratios[kept]), _COLOUR, "rows", size=4.0),
        Line(floats(limit), floats(1.0 - limit**2), NEUTRAL, "1 − ρ²", dash="dash"),
    )
    lines = (ReferenceLine(1.0, "concentration begins", "vertical"),)
    return Panel("how sharp rows are", Axis(_INDEX), Axis("H/ln n", low=0.0, high=1.05), series, lines)


def show_heads(summary: HeadSummary) -> Figure:
    """Plan the heads of one layer: mean entropy ratio with the middle 90% of rows, and the largest logit."""
    if not summary.heads:
        raise InvalidValueError("summary", "must have a head to draw, got none")
    heads = floats(range(summary.heads))
    ratio = summary["entropy_ratio"]
    mean, low, high = (floats(x) for x in (ratio.mean, ratio.quantile(0.05), ratio.quantile(0.95)))
    axis = Axis("head", ticks=name_ticks(heads))
    largest = floats(np.where(summary["max_logit"].count > 0, summary["max_logit"].largest, np.nan))
    return Figure(
        f"{count(summary.heads, 'head')}: {_name_extremes([(f'head {at}', value) for at, value in enumerate(mean)])}",
        (
            Panel(
                _RATIO, axis, Axis("H/ln n", low=0.0, high=1.05), (Points(heads, mean, _COLOUR, low=low, high=high),)
            ),
            Panel("largest logit", axis, Axis("logit"), (Points(heads, largest, ACCENT),)),
        ),
        columns=2,
        caption=f"{int(summary.rows_seen.max())} of {int(summary.rows_in_all.max())} rows per head; marks are means, "
        "bars hold the middle 90% of rows.",
    )


def show_layers(layers: Mapping[str, HeadSummary]) -> Figure:
    """Layers × heads: mean entropy ratio and largest logit of every head."""
    ratios = [floats(summary["entropy_ratio"].mean) for summary in layers.values()]
    return _draw_model("", list(layers), ratios, [floats(summary["max_logit"].largest) for summary in layers.values()])


def show_audit(audit: Audit) -> Figure:
    """Plan the heads of an audited model, as `show_layers`."""
    layers = audit.layers
    ratios, logits = (
        [floats(getattr(head, name) for head in heads) for heads in layers.values()]
        for name in ("entropy_ratio", "max_logit")
    )
    return _draw_model(f"{audit.about.get('model', 'a model')}, ", list(layers), ratios, logits)


def _draw_model(name: str, paths: Sequence[str], ratios: Sequence[Numbers], logits: Sequence[Numbers]) -> Figure:
    most = max((len(row) for row in ratios), default=0)
    if not most:
        raise InvalidValueError("there", "must be a head to draw, got none")
    numbered = [
        (f"head {head} of layer {layer}", value) for layer, row in enumerate(ratios) for head, value in enumerate(row)
    ]
    layer_axis = Axis("layer", ticks=tuple((float(at), str(at)) for at in spread_out(range(len(paths)), 16)))
    head_axis = Axis("head", ticks=name_ticks(range(most)))
    finite = [value for row in logits for value in row if math.isfinite(value)]
    ends = (min([0.0, *finite]), max([1.0, *finite]))
    panels = (
        Panel(_RATIO, head_axis, layer_axis, (_heat(ratios, most, 0.0, 1.0),)),
        Panel("largest logit", head_axis, layer_axis, (_heat(logits, most, *ends, sharp="high"),)),
    )
    return Figure(
        f"{name}{count(len(paths), 'layer')}, {count(len(numbered), 'head')}: {_name_extremes(numbered)}",
        panels,
        columns=2,
        caption=f"Layer 0 is {name_layer(paths[0])}"
        + (f", layer {len(paths) - 1} is {name_layer(paths[-1])}." if len(paths) > 1 else "."),
        panel_height=max(300, 26 * len(paths) + 80),
    )


def _heat(
    rows: Sequence[Numbers], most: int, low: float, high: float, sharp: Literal["low", "high"] = "low"
) -> Heatmap:
    return Heatmap(tuple((*row, *[math.nan] * (most - len(row))) for row in rows), low, high, sharp=sharp)


def _name_extremes(heads: Sequence[tuple[str, float]]) -> str:
    """Name the sharpest and the broadest of named entropy ratios."""
    known = [(value, name) for name, value in heads if math.isfinite(value)]
    if not known:
        return "none has a row that sees two keys or more"
    (low, sharpest), (high, broadest) = min(known), max(known)
    if len(known) == 1:
        return f"mean entropy ratio {write_number(low, 3)}"
    return (
        f"the sharpest is {sharpest} (entropy ratio {write_number(low, 3)}), the broadest {broadest} "
        f"({write_number(high, 3)})"
    )


def _mean_over_batch(ratio_NHL: Array) -> Array:
    counted = np.isfinite(ratio_NHL)
    total, rows = np.where(counted, ratio_NHL, 0.0).sum(axis=0), counted.sum(axis=0)
    return np.where(rows > 0, total / np.maximum(rows, 1), np.nan)


def _thin(matrix: Array) -> Array:
    """Return at most so many rows and columns of a matrix, evenly spread."""
    rows, columns = (spread_out(range(length), _MOST_CELLS) for length in matrix.shape)
    return matrix[np.ix_(rows, columns)]


def _say_thinned(length: int) -> str:
    return f" {_MOST_CELLS} of {length} positions are drawn." if length > _MOST_CELLS else ""
