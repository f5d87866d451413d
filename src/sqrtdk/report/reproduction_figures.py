"""Figures of reproductions: a panel per published result, drawn as its chart says, with the verdict in the title."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqrtdk.errors import unknown_name
from sqrtdk.records.record import Record, Row
from sqrtdk.report.palette import NEUTRAL, policy_colour
from sqrtdk.report.panels import Axis, Dash, Figure, Line, Panel, Points, ReferenceLine, Series, floats, name_ticks
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_policy

# Lines that are scaling policies have the policy's colour, other lines take the next of these.
_COLOURS = ("#1f83c9", "#d55e00", "#009e73", "#8a63d2", "#b08900", "#c0609a")
_POLICIES = {name_policy(name): policy_colour(name) for name in ("none", "sqrt", "qk_norm")}
_MOST_MARKED = 16


def show_reproductions(record: Record) -> Figure:
    """Return the panels of all results of a record; a single result has its claim and outcome as the title."""
    names = list(record.curves)
    verdicts = Counter(row["verdict"] for row in record.tables["reproductions"])
    panels = [
        _show_one(name, record.curves[name], _verdicts(record, name), prefix=f"{name}: " if len(names) > 1 else "")
        for name in names
    ]
    if len(panels) == 1:
        passed = f"{verdicts['pass']} of {count(verdicts.total(), 'expectation')}"
        title = f"{record.curves[names[0]]['title']}: {record.curves[names[0]]['outcome']} ({passed})"
    else:
        title = f"{len(names)} published results: {_list_verdicts(verdicts)}"
    scaled_down = dict.fromkeys(row["scaled_down"] for row in record.tables["reproductions"] if row["scaled_down"])
    caption = []
    if len(panels) == 1:
        caption = [f"Source: {record.tables['reproductions'][0]['source']}."]
        caption += [f"Scaled down: {one}." for one in scaled_down]
    if any("low" in row for name in names for row in _rows(record.curves[name])):
        caption.append("Bars span the seeds or a 95% interval.")
    return Figure(title, tuple(panels), columns=min(3, len(panels)), caption=" ".join(caption), panel_height=300)


def select_result(record: Record, name: str) -> Record:
    """Return the part of a record that has one result."""
    if name not in record.curves:
        raise unknown_name("reproduction", name, list(record.curves))
    rows = [row for row in record.tables["reproductions"] if row["name"] == name]
    return replace(record, tables={"reproductions": rows}, curves={name: record.curves[name]})


def count_verdicts(rows: Sequence[Row]) -> str:
    """Return a sentence about how many expectations passed, failed or stay unclear.

    >>> count_verdicts([{"name": "ssmax", "verdict": "pass"}, {"name": "ssmax", "verdict": "fail"}])
    'Of 2 expectations about 1 result: 1 pass, 1 fail.'
    """
    names = {row["name"] for row in rows}
    verdicts = _list_verdicts(Counter(row["verdict"] for row in rows))
    return f"Of {count(len(rows), 'expectation')} about {count(len(names), 'result')}: {verdicts}."


def _verdicts(record: Record, name: str) -> str:
    return _list_verdicts(Counter(row["verdict"] for row in record.tables["reproductions"] if row["name"] == name))


def _list_verdicts(verdicts: Mapping[str, int]) -> str:
    """Return how many expectations passed, failed or stay unclear.

    >>> _list_verdicts({"pass": 3, "fail": 1})
    '3 pass, 1 fail'
    """
    return ", ".join(f"{verdicts[name]} {name}" for name in ("pass", "fail", "unclear") if verdicts.get(name))


def _rows(curves: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = curves[curves["chart"]["curve"]]
    return rows


def _show_one(name: str, curves: Mapping[str, Any], verdicts: str, *, prefix: str) -> Panel:
    chart, rows = curves["chart"], _rows(curves)
    by = chart["by"]
    lines: dict[str | None, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(None if by is None else str(row[by]), []).append(row)
    predicted = set(chart["predicted"])
    shown: list[Series] = []
    for place, (label, of_line) in enumerate(lines.items()):
        is_predicted = label in predicted
        colour = NEUTRAL if is_predicted else _POLICIES.get(label or "", _COLOURS[place % len(_COLOURS)])
        group = None if label is None else prefix + label
        # Long lines have no marks: every second is dashed, so that a line behind it shows.
        is_dashed = is_predicted or (len(of_line) > _MOST_MARKED and place % 2 == 1)
        dash: Dash = "solid" if not is_dashed else "dot" if is_predicted and place % 2 else "dash"
        shown += _draw_line(of_line, chart, colour, group, dash, marks=not is_predicted)
    shown.sort(key=lambda one: isinstance(one, Line) and one.dash != "solid")
    categories = {float(row[chart["x"]]): str(row["name"]) for row in rows if "name" in row}
    values = [row[chart["x"]] for row in rows]
    if categories:
        x = Axis(chart["x_title"], low=min(values) - 0.5, high=max(values) + 0.5, ticks=tuple(categories.items()))
    else:
        x = Axis(chart["x_title"], log=chart["log_x"], ticks=name_ticks(values) if len(set(values)) <= 8 else None)
    bound = chart["bound"]
    return Panel(
        f"{name}: {verdicts}",
        x,
        Axis(chart["y_title"], log=chart["log_y"]),
        tuple(shown),
        () if bound is None else (ReferenceLine(bound[0], bound[1]),),
        name=name,
    )


def _draw_line(
    rows: Sequence[Mapping[str, Any]],
    chart: Mapping[str, Any],
    colour: str,
    label: str | None,
    dash: Dash,
    *,
    marks: bool,
) -> list[Series]:
    x, y = floats(row[chart["x"]] for row in rows), floats(row[chart["y"]] for row in rows)
    is_apart = any("name" in row for row in rows) or (marks and not chart["joined"])
    drawn: list[Series] = [] if is_apart else [Line(x, y, colour, label, dash)]
    if marks and len(rows) <= _MOST_MARKED:
        low, high = (
            (floats(row[name] for row in rows) for name in ("low", "high"))
            if all("low" in row for row in rows)
            else (None, None)
        )
        # The line has the entry in the legend.
        drawn.append(Points(x, y, colour, label if is_apart else None, low=low, high=high))
    return drawn
