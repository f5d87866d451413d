"""The HTML of tables and of texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from sqrtdk.cells import format_cell, is_number, spell_power, title_column
from sqrtdk.records import Row
from sqrtdk.report.palette import policy_colour
from sqrtdk.setting_names import name_policy


def render_table(rows: Sequence[Row]) -> str:
    """Render rows as an HTML table; the columns are the keys of all rows in order of appearance, all text escaped.

    >>> "<td>a&amp;b</td>" in render_table([{"name": "a&b"}])
    True
    """
    # The main row is set in bold; a column that says so again would be noise.
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "main"]
    numeric = {name: all(is_number(row.get(name)) for row in rows) for name in columns}
    head = "".join(f"<th{_class(numeric[name])}>{escape(title_column(name))}</th>" for name in columns)
    body = "".join(
        f"<tr{_row_attributes(row)}>"
        + "".join(f"<td{_class(numeric[name])}>{_render_cell(name, row.get(name))}</td>" for name in columns)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def render_text(text: str) -> str:
    """Escape a text for HTML; what stands between backticks is set as code, 1/√dₖ is not broken into lines.

    Powers of ten are spelled out, and the indices of weights are set low.

    >>> render_text("`a<b`"), render_text("1e-05 of W_q")
    ('<code>a&lt;b</code>', '1·10⁻⁵ of W<sub>q</sub>')
    """
    parts = re.split(r"`([^`]+)`", escape(text))
    return "".join(f"<code>{part}</code>" if index % 2 else _set_words(part) for index, part in enumerate(parts))


def _set_words(text: str) -> str:
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]\d+)\b", lambda power: spell_power(*power.groups()), text)
    text = re.sub(r"\bW_([a-z])\b", r"W<sub>\1</sub>", text)
    return re.sub(r"\S*1/√dₖ", r'<span class="whole">\g<0></span>', text)


def _class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _row_attributes(row: Row) -> str:
    return ' class="main"' if row.get("main") is True else ""


def _render_cell(name: str, value: Any) -> str:
    drawing = _DRAWINGS.get(name)
    return drawing(str(value)) if drawing is not None and value is not None else render_text(format_cell(value, name))


def _render_policy(policy: str) -> str:
    dot = f'<i class="dot" style="background:{policy_colour(policy)}"></i>'
    return f'<span class="policy">{dot}{escape(name_policy(policy))}</span>'


def _render_quantity(name: str) -> str:
    return escape(title_column(name))


_DRAWINGS: dict[str, Callable[[str], str]] = {
    "scale": _render_policy,
    "quantity": _render_quantity,
}
