"""HTML of tables and of sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from sqrtdk.records.record import Row, tabulate
from sqrtdk.report.palette import policy_colour
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import spell_power


def render_table(rows: Sequence[Row]) -> str:
    """Render rows as an HTML table; the columns are the keys of all rows in order of appearance, all text escaped.

    >>> "<td>a&amp;b</td>" in render_table([{"name": "a&b"}])
    True
    """
    # The main row is set in bold; a column that says so again would be noise.
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "main"]
    table = tabulate(rows, columns)
    classes = ["" if table.stands_left(at) else ' class="number"' for at in range(len(columns))]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(classes, table.columns, strict=True))
    body = "".join(
        f"<tr{_row_attributes(row)}>"
        + "".join(
            f"<td{kind}>{_render_cell(name, row.get(name), text)}</td>"
            for kind, name, text in zip(classes, columns, cells, strict=True)
        )
        + "</tr>"
        for row, cells in zip(rows, table.rows, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def render_text(text: str) -> str:
    """Escape a text for HTML; what stands between backticks is set as code, 1/√dₖ is not broken into lines.

    Powers of ten are spelled out; exponents are set high and the indices of weights low.

    >>> render_text("`a<b`"), render_text("1e-05 of W_q")
    ('<code>a&lt;b</code>', '1·10⁻⁵ of W<sub>q</sub>')
    """
    parts = re.split(r"`([^`]+)`", escape(text))
    return "".join(f"<code>{part}</code>" if index % 2 else _set_words(part) for index, part in enumerate(parts))


def _set_words(text: str) -> str:
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]\d+)\b", lambda power: spell_power(*power.groups()), text)
    text = re.sub(r"\bW_([a-z])\b", r"W<sub>\1</sub>", text)
    text = re.sub(r"\^(−?[\d.]*[\d¼½])", r"<sup>\1</sup>", text)
    # A short equation stays on one line.
    text = re.sub(r" = (?=[√\d])", "\u00a0=\u00a0", text)
    return re.sub(r"\S*1/√dₖ", r'<span class="whole">\g<0></span>', text)


def _row_attributes(row: Row) -> str:
    return ' class="main"' if row.get("main") is True else ""


def _render_cell(name: str, value: Any, text: str) -> str:
    return _render_policy(str(value)) if name == "scale" and value is not None else render_text(text)


def _render_policy(policy: str) -> str:
    dot = f'<i class="dot" style="background:{policy_colour(policy)}"></i>'
    return f'<span class="policy">{dot}{escape(name_policy(policy))}</span>'
