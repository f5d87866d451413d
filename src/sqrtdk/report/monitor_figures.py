"""Figure of a monitored training run: heads over steps, with alerts marked."""

from __future__ import annotations

import math

from sqrtdk.records.record import Record
from sqrtdk.report.palette import ACCENT
from sqrtdk.report.panels import Axis, Figure, Heatmap, Panel, Points, floats, spread_out
from sqrtdk.show.table import name_layer

_MOST_TICKS = 12


def show_monitor(record: Record) -> Figure:
    """Return the figure of entropy ratio and score spread, with a row per head and a column per observation."""
    steps, layers = record.curves["steps"], record.curves["layers"]
    rows = [(layer, head) for layer, numbers in layers.items() for head in range(len(numbers["entropy_ratio"][0]))]
    marks = _mark_alerts(record, rows, {step: at for at, step in enumerate(steps)})
    names = tuple((float(at), f"{name_layer(layer)} · {head}") for at, (layer, head) in enumerate(rows))
    columns = tuple((float(at), str(steps[at])) for at in spread_out(range(len(steps)), _MOST_TICKS))
    spreads = [
        floats(None if value is None else math.log10(max(value, 1.0)) for value in _row(layers, row, "score_spread"))
        for row in rows
    ]
    most = max((value for one in spreads for value in one if not math.isnan(value)), default=1.0)
    panels = (
        ("Entropy ratio H/ln n", Heatmap(tuple(floats(_row(layers, row, "entropy_ratio")) for row in rows), 0.0, 1.0)),
        (
            "Largest score above the mean",
            Heatmap(
                tuple(spreads),
                0.0,
                max(most, 2.0),
                ticks=tuple((float(power), f"{10**power}") for power in range(math.floor(max(most, 2.0)) + 1)),
                sharp="high",
            ),
        ),
    )
    return Figure(
        record.headline,
        tuple(
            Panel(title, Axis("step", ticks=columns), Axis("head", ticks=tuple(spread_out(names, 24))), (heat, *marks))
            for title, heat in panels
        ),
        columns=2,
        caption="A row per head, a column per observed step. Crosses mark the heads of an alert where it was raised.",
        panel_height=max(260, 90 + 14 * len(rows)),
    )


def _row(layers: dict[str, dict[str, list[list[float | None]]]], row: tuple[str, int], name: str) -> list[float | None]:
    layer, head = row
    return [of_step[head] for of_step in layers[layer][name]]


def _mark_alerts(record: Record, rows: list[tuple[str, int]], columns: dict[int, int]) -> tuple[Points, ...]:
    """Return a cross for each head of each raised alert; an alert about a whole layer marks all its heads."""
    marks = [
        (float(columns[alert["step"]]), float(at))
        for alert in record.tables["alerts"]
        if alert["state"] == "raised" and alert["step"] in columns
        for at, (layer, head) in enumerate(rows)
        if layer == alert["layer"] and (not alert["heads"] or head in alert["heads"])
    ]
    if not marks:
        return ()
    x, y = zip(*marks, strict=True)
    return (Points(x, y, ACCENT, group="alert", symbol="cross"),)
