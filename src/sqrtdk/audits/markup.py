"""An audit as HTML: heat table of layers and heads, patterns, scale and findings, with its own style and no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING

from sqrtdk.audits.reading import name_scale
from sqrtdk.display import HEAT, name_layer, shade_sharpness
from sqrtdk.findings import Finding

if TYPE_CHECKING:
    from sqrtdk.audits.comparison import Comparison
    from sqrtdk.audits.record import Audit, AuditedHead, AuditedScale

__all__ = ["render_audit", "render_comparison", "render_heads"]

_MOST_CHANGES = 24
# A longer table is folded away.
_MOST_OPEN = 12
# Half transparent, on light pages and on dark ones; words repeat what they say.
_SEVERITY_COLOURS = {"error": "208,52,44", "warning": "176,122,0", "info": "123,131,144"}
_STYLE = """<style>
.sqrtdk-audit{font-variant-numeric:tabular-nums}
.sqrtdk-audit .wide{overflow-x:auto;margin:.6em 0}
.sqrtdk-audit table{border-collapse:separate;border-spacing:2px;width:auto;font-size:.87em;line-height:1.3}
.sqrtdk-audit th{font-weight:600;text-align:right;vertical-align:middle;white-space:nowrap;border:0;padding:.15em .5em}
.sqrtdk-audit th.path{font-weight:400;text-align:left}
.sqrtdk-audit td{border:0;padding:.2em .45em;text-align:right;vertical-align:middle;white-space:nowrap}
.sqrtdk-audit td.words,.sqrtdk-audit th.words{text-align:left}
.sqrtdk-audit .heat td,.sqrtdk-audit .heat .head{min-width:3.6em;text-align:center}
.sqrtdk-audit .heat td{border-radius:3px}
.sqrtdk-audit .heat small{display:block;font-size:.82em;opacity:.8;white-space:normal;max-width:6em;margin:auto}
.sqrtdk-audit .finding{border-left:4px solid;border-radius:3px;padding:.35em .8em;margin:.5em 0}
.sqrtdk-audit .finding p{margin:.15em 0;max-width:none}
.sqrtdk-audit .soft{opacity:.75;font-size:.9em;overflow-wrap:anywhere}
.sqrtdk-audit .name{overflow-wrap:anywhere}
.sqrtdk-audit ul{padding-left:1.2em}
@media (max-width:620px){.sqrtdk-audit th.path,.sqrtdk-audit td.path{min-width:7em;white-space:normal;
overflow-wrap:anywhere;font-size:.85em}}
</style>"""


def render_audit(audit: Audit) -> str:
    """The audit as a fragment for a page or a notebook; every text from outside is escaped."""
    sentences = "".join(f"<li>{escape(line)}</li>" for line in audit.reading)
    parts = [
        f"<p><b>{escape(audit.title)}</b></p><ul>{sentences}</ul>",
        render_findings(audit.findings),
        _render_heat(audit),
        _render_scales(audit.scale),
    ]
    return f'<div class="sqrtdk-audit">{_STYLE}{"".join(parts)}</div>'


def render_findings(findings: Sequence[Finding]) -> str:
    """A box for each finding: rule and place, cause, remedy, evidence and threshold."""
    return "".join(map(_render_finding, findings))


def _render_finding(finding: Finding) -> str:
    colour = _SEVERITY_COLOURS[finding.severity]
    head = "" if finding.head is None else f", head {finding.head}"
    where = f' in <code class="name">{escape(finding.layer or "the model itself")}</code>{head}'
    evidence = ", ".join(f"{name.replace('_', ' ')} {_write(value)}" for name, value in finding.evidence.items())
    threshold = f"threshold {_write(finding.threshold.value)}: {finding.threshold.source}"
    return (
        f'<div class="finding" style="border-color:rgb({colour});background:rgba({colour},.1)">'
        f"<p><b>{escape(finding.severity)}: {escape(finding.rule)}</b>{where}</p>"
        f"<p>{escape(finding.cause)}</p><p>→ {escape(finding.remedy)}</p>"
        f'<p class="soft">{escape(evidence)}; {escape(threshold)}</p></div>'
    )


def _write(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_write, value[:8])) + (", …]" if len(value) > 8 else "]")
    if value is None:
        return "–"
    return f"{value:.4g}".replace("-", "−") if isinstance(value, float) else str(value)


def _render_heat(audit: Audit) -> str:
    if not audit.heads:
        return ""
    layers = audit.layers
    most = max(len(heads) for heads in layers.values())
    head = "".join(f'<th class="head">{number}</th>' for number in range(most))
    rows = "".join(
        f'<tr><th>{heads[0].layer_index}</th><th class="path">{escape(name_layer(path))}</th>'
        + "".join(map(_render_cell, heads))
        + "</tr>"
        for path, heads in layers.items()
    )
    caption = (
        "Mean entropy ratio H/ln n and pattern of each head, with the share of rows that follow it; the stronger the "
        "colour, the sharper its weights."
    )
    return _render_wide(caption, f'<tr><th></th><th class="path">layer / head</th>{head}</tr>{rows}', "heat")


def _render_wide(caption: str, rows: str, kind: str = "") -> str:
    """A table that scrolls by itself where the page is narrow."""
    above = f"<p>{escape(caption)}</p>" if caption else ""
    return f'{above}<div class="wide" tabindex="0"><table class="{kind}">{rows}</table></div>'


def _render_rows(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Texts as a table; a column without a name numbers its rows."""
    head = "".join(f"<th{_class(name)}>{escape(name)}</th>" for name in columns)
    body = (
        "".join(
            f"<td{_class(name)}>{escape(cell)}</td>" if name else f"<th>{escape(cell)}</th>"
            for name, cell in zip(columns, cells, strict=True)
        )
        for cells in rows
    )
    return _render_wide(caption, f"<tr>{head}</tr>{''.join(f'<tr>{cells}</tr>' for cells in body)}")


def _render_cell(head: AuditedHead) -> str:
    ratio = head.entropy_ratio
    numbers = [
        f"{name.replace('_', ' ')} {_write(getattr(head, name))}"
        for name in ("saturation_index", "max_weight", "effective_keys", "max_logit", "score_max", "rows")
    ]
    shown = "–" if ratio is None else f"{ratio:.2f}"
    share = "" if head.pattern_share is None else f" {head.pattern_share:.0%}"
    return (
        f'<td style="background:rgba({HEAT},{shade_sharpness(ratio):.2f})" title="{escape(", ".join(numbers))}">'
        f"{shown}<small>{escape(head.pattern)}{share}</small></td>"
    )


def _render_scales(scales: Sequence[AuditedScale]) -> str:
    if not scales:
        return ""
    columns = ("", "layer", "dₖ", "measured", "is", "declared", "at the call", "before the call", "remarks")
    rows = []
    for one in scales:
        remarks = [
            *(["q or k normalised"] if one.normalised else []),
            *([f"soft cap {one.softcap:g}"] if one.softcap is not None else []),
            *([f"mask times {one.on_the_mask:.4g}"] if one.on_the_mask not in (None, 1.0) else []),
            *([f"declared by {one.declared_by}"] if one.declared_by is not None else []),
            *([one.reason] if one.reason is not None else []),
        ]
        numbers = [one.measured, one.declared, one.at_the_call, one.before_the_call]
        measured, declared, at, before = ("–" if number is None else f"{number:.4g}" for number in numbers)
        place = (str(one.layer_index), name_layer(one.layer), str(one.d_k))
        rows.append((*place, measured, name_scale(one), declared, at, before, "; ".join(remarks)))
    table = _render_rows("", columns, rows)
    state = " open" if len(rows) <= _MOST_OPEN else ""
    return f"<details{state}><summary>The scale of each layer</summary>{table}</details>"


def _class(column: str) -> str:
    kind = "words path" if column == "layer" else "words" if column in ("is", "pattern", "remarks") else ""
    return f' class="{kind}"' if kind else ""


def render_heads(heads: Sequence[AuditedHead]) -> str:
    """Every number of every head in one table."""
    names = [item.name for item in fields(heads[0])] if heads else []
    columns = [name for name in names if name not in ("layer_index", "call")]  # the layer's name has the call
    return _render_rows(
        "Largest weight, entropy ratio, saturation index and effective keys are means over rows.",
        [name.replace("_", " ") for name in columns],
        [[_write(getattr(one, name)) for name in columns] for one in heads],
    )


def render_comparison(comparison: Comparison) -> str:
    """What changed against another audit: sentences, the heads that changed most, findings new and gone."""
    sentences = "".join(f"<li>{escape(line)}</li>" for line in comparison.reading)
    rows = []
    for change in comparison.changed[:_MOST_CHANGES]:
        pattern = f"{change.pattern_before} → {change.pattern}" if change.has_new_pattern else change.pattern
        numbers = [
            "–" if number is None else f"{number:+.3f}".replace("-", "−")
            for number in (change.entropy_ratio_change, change.saturation_index_change, change.max_logit_change)
        ]
        rows.append((name_layer(change.layer), str(change.head), pattern, *numbers))
    columns = ("layer", "head", "pattern", "entropy ratio", "saturation index", "largest logit")
    left_out = f" ({_MOST_CHANGES} of {len(comparison.changed)})" if len(comparison.changed) > _MOST_CHANGES else ""
    caption = f"The heads that changed most{left_out}: how much more or less than before."
    table = _render_rows(caption, columns, rows) if rows else ""
    boxes = "".join(
        f"<p><b>{words}</b></p>{render_findings(findings)}"
        for words, findings in (("New findings", comparison.new), ("Findings that are gone", comparison.gone))
        if findings
    )
    return f'<div class="sqrtdk-audit">{_STYLE}<ul>{sentences}</ul>{table}{boxes}</div>'
