"""Figure of the zoo: the measured scale of each family as a multiple of 1/√dₖ."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqrtdk.errors import InvalidValueError
from sqrtdk.records.families import is_usual
from sqrtdk.records.record import Record, Row
from sqrtdk.report.palette import policy_colour
from sqrtdk.report.panels import Axis, Figure, Panel, Points, ReferenceLine, Symbol, floats, name_ticks

_SORTS: dict[str, tuple[str, Symbol]] = {
    "1/√dₖ": (policy_colour("sqrt"), "circle"),
    "another scale, q or k normalised": (policy_colour("qk_norm"), "diamond"),
    "another scale, declared": (policy_colour("mup"), "square"),
    "another scale, not declared": (policy_colour("none"), "cross"),
}


def show_zoo(record: Record) -> Figure:
    """Plan every family at its dₖ, on the line at 1 if it uses 1/√dₖ."""
    rows = [row for row in record.tables["families"] if row["measured"]]
    if not rows:
        raise InvalidValueError("record", "must hold a measured scale to draw, got a zoo in which none was measured")
    sorts = {name: [row for row in rows if _sort(row) == name] for name in _SORTS}
    multiples = [_multiple(row) for row in rows]
    series = tuple(
        Points(
            floats(row["d_k"] for row in members),
            floats(map(_multiple, members)),
            *_SORTS[name][:1],
            f"{name} ({len(members)})",
            symbol=_SORTS[name][1],
            text=tuple(row["family"] for row in members),
        )
        for name, members in sorts.items()
        if members
    )
    low, high = min([*multiples, 1.0]), max([*multiples, 1.0])
    return Figure(
        record.headline,
        (
            Panel(
                "",
                Axis("dₖ", log=True, ticks=name_ticks(_powers(rows))),
                Axis("measured scale × √dₖ", log=True, low=low / 1.5, high=high * 1.5),
                series,
                (ReferenceLine(1.0, "1/√dₖ"),),
            ),
        ),
        columns=1,
        panel_height=420,
        caption="A mark per family of the transformers library, not per model in use, in a small model built from its "
        "configuration, at the dₖ of its default; marks of families with the same dₖ and scale lie on each other.",
    )


def _powers(rows: Sequence[Row]) -> list[float]:
    widths = [row["d_k"] for row in rows]
    return [2.0**power for power in range(int(math.log2(min(widths))), math.ceil(math.log2(max(widths))) + 1)]


def _multiple(row: Row) -> float:
    return float(row["measured"] * math.sqrt(row["d_k"]))


def _sort(row: Row) -> str:
    if is_usual(row):
        return "1/√dₖ"
    if row["normalised"]:
        return "another scale, q or k normalised"
    is_declared = row["declared"] is not None
    return "another scale, declared" if is_declared else "another scale, not declared"
