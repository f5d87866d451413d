"""Tables for readers: what a column is called, how a number is written, and the HTML of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from sqrtdk.records import Row
from sqrtdk.report.palette import policy_colour
from sqrtdk.setting_names import POLICY_NAMES, name_policy

_TITLES = {
    "d_k": "dₖ",
    "scale": "scaling",
    "predicted": "predicted",
    "low": "95% from",
    "high": "95% to",
    "interval": "95% interval",
    "inside": "prediction inside",
    "law": "law (n → ∞)",
    **POLICY_NAMES,
    "first_weight": "weight of x",
    "other_weight": "weight of each 0",
    "slope": "p(1 − p)",
    "jacobian_trace": "1 − Σp²",
    "jacobian_norm": "‖J‖",
    "entropy_ratio": "H/ln n",
    "saturation_index": "ρ",
    "logit_std": "σ",
    "sum_p2": "Σp²",
    "effective_keys": "effective keys",
    "max_weight": "largest weight",
    "relative": "τ/√dₖ",
    "tau": "τ",
    "factor": "factor 1/τ",
    "grad_q": "‖∂loss/∂q‖",
    "grad_k": "‖∂loss/∂K‖/√L",
    "top_share": "share of the top twentieth",
    "lr": "learning rate",
    "final_loss_iqr": "final loss, middle half of the seeds",
    "final_loss_median": "final loss, median",
    "solved_fraction": "fraction solved",
    "steps_to_threshold_median": "steps to solve, median",
    "temperature_by_layer": "τ/√dₖ by layer, medians",
    "temperature_median": "τ/√dₖ, median",
    "temperature_range": "τ/√dₖ, least to largest head",
    "temperature_spread_median": "spread of ln τ over queries, median",
    "temperatures": "τ/√dₖ of the heads, layer by layer",
}
_ENDINGS = {
    "_predicted": "predicted",
    "_low": "95% from",
    "_high": "95% to",
    "_interval": "95% interval",
    "_mean": "mean",
    "_median": "median",
    "_p5": "5th percentile",
}
_BY_LAYER = ("temperature_by_layer", "temperatures")
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def title_column(name: str) -> str:
    """What readers see above a column.

    >>> title_column("grad_q_median"), title_column("final_loss")
    ('‖∂loss/∂q‖ median', 'final loss')
    """
    if name in _TITLES:
        return _TITLES[name]
    for ending, words in _ENDINGS.items():
        if name.endswith(ending):
            return f"{title_column(name.removesuffix(ending))} {words}"
    return name.replace("_", " ")


def format_cell(value: Any, column: str = "") -> str:
    """Write a value for a reader: four significant digits, powers of ten spelled out, – for nothing.

    Two numbers are an interval, except in the columns that list one per layer.

    >>> [format_cell(x) for x in (22.6274, 9.81e-11, 4096, None, True, [1.0, 2.5])]
    ['22.63', '9.8·10⁻¹¹', '4096', '–', 'yes', '1 to 2.5']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _format_float(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_cell(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [format_cell(item) for item in value]
        return " to ".join(parts) if len(parts) == 2 and column not in _BY_LAYER else ", ".join(parts)
    return str(value)


def _format_float(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}".replace("-", "−")
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}·10{str(int(exponent)).translate(_SUPERSCRIPTS)}".replace("-", "−")


def render_table(rows: Sequence[Row], *, classes: str = "") -> str:
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
    return (
        f'<div class="scroll"><table class="{classes}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def render_text(text: str) -> str:
    """Escape a text for HTML; what stands between backticks is set as code, 1/√dₖ is not broken into lines.

    Powers of ten are spelled out, and the indices of weights are set low.

    >>> render_text("`a<b`"), render_text("1e-05 of W_q")
    ('<code>a&lt;b</code>', '1·10⁻⁵ of W<sub>q</sub>')
    """
    parts = re.split(r"`([^`]+)`", escape(text))
    return "".join(f"<code>{part}</code>" if index % 2 else _set_words(part) for index, part in enumerate(parts))


def _set_words(text: str) -> str:
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]\d+)\b", _spell_power, text)
    text = re.sub(r"\bW_([a-z])\b", r"W<sub>\1</sub>", text)
    return re.sub(r"\S*1/√dₖ", r'<span class="whole">\g<0></span>', text)


def _spell_power(found: re.Match[str]) -> str:
    return f"{found[1]}·10{str(int(found[2])).translate(_SUPERSCRIPTS)}"


def is_number(value: Any) -> bool:
    """Whether a cell holds a number, a range of two, or nothing where a number would be.

    >>> [is_number(value) for value in (1.5, [1.0, 2.0], None, True, "a")]
    [True, True, True, False, False]
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value) == 2 and all(map(is_number, value))
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


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
