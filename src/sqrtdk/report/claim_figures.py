"""The figure of checked claims."""

from __future__ import annotations

from sqrtdk.display import count
from sqrtdk.records import Record
from sqrtdk.report.palette import NEUTRAL, VERDICT_COLOURS, VERDICT_SYMBOLS
from sqrtdk.report.panels import Axis, Figure, Panel, Points, floats

_VERDICT_WORDS = {"holds": "as the sources say", "depends": "depending on what they leave out"}
_AREAS = {"op": "operation", "var": "variance", "soft": "softmax", "grad": "gradients", "scale": "policies"}


def show_claims(record: Record) -> Figure:
    """Every claim as a mark of its verdict, a line for each area."""
    rows = record.tables["claims"]
    areas = list(dict.fromkeys(row["id"].partition(".")[0] for row in rows))
    places: dict[str, list[tuple[float, float, str]]] = {}
    width = 0
    for row in rows:
        area, _, name = row["id"].partition(".")
        column = sum(1 for other in places.values() for _, y, _ in other if y == areas.index(area))
        width = max(width, column)
        places.setdefault(row["verdict"], []).append((float(column), float(areas.index(area)), name))
    order = [verdict for verdict in VERDICT_COLOURS if verdict in places] + [
        v for v in places if v not in VERDICT_COLOURS
    ]
    series = tuple(
        Points(
            floats(x for x, _, _ in places[verdict]),
            floats(y for _, y, _ in places[verdict]),
            VERDICT_COLOURS.get(verdict, NEUTRAL),
            f"{verdict} ({len(places[verdict])})",
            symbol=VERDICT_SYMBOLS.get(verdict, "square"),
            size=11,
            text=tuple(name for _, _, name in places[verdict]),
            show_text=True,
        )
        for verdict in order
    )
    return Figure(
        f"{count(len(rows), 'claim')} checked: "
        + ", ".join(f"{len(places[verdict])} {_VERDICT_WORDS.get(verdict, verdict)}" for verdict in order),
        (
            Panel(
                "",
                Axis(hidden=True, low=-0.6, high=width + 0.6),
                Axis(
                    ticks=tuple((float(i), _AREAS.get(area, area)) for i, area in enumerate(areas)),
                    low=len(areas) - 0.4,
                    high=-0.5,
                ),
                series,
            ),
        ),
        columns=1,
        panel_height=36 + 52 * len(areas),
    )
