"""HTML of an audit: heat table of layers and heads, patterns, scale and findings, with its own style and no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING

from sqrtdk.audits.heat_map import HeatCell, map_heads, mark_pattern, write_legend
from sqrtdk.audits.sentences import name_scale
from sqrtdk.diagnosis.findings import Finding, name_evidence, write_evidence
from sqrtdk.show.table import HEAT, Table, name_layer, shade_sharpness
from sqrtdk.wording.numbers import write_number

if TYPE_CHECKING:
    from sqrtdk.audits.audit import Audit, AuditedHead, AuditedScale
    from sqrtdk.audits.comparison import Comparison

__all__ = ["render_audit", "render_comparison", "render_heads"]

_MOST_CHANGES = 24
# A longer table is folded.
_MOST_OPEN = 12
# With more heads than this in a layer, a letter stands for the pattern: so 32 heads fit into 1280 pixels.
_MOST_NAMED = 12
# Half transparent for light and dark pages. The severity is also written in words.
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
.sqrtdk-audit .many{font-size:.72em;border-spacing:1px}
.sqrtdk-audit .many td,.sqrtdk-audit .many .head{min-width:2.3em;padding:.2em .1em}
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
    """Return the audit as a fragment for a page or a notebook. Every text from outside is escaped."""
    sentences = "".join(f"<li>{escape(line)}</li>" for line in audit.reading)
    parts = [
        f"<p><b>{escape(audit.title)}</b></p><ul>{sentences}</ul>",
        render_findings(audit.findings),
        _render_heat(audit),
        _render_scales(audit.scale),
    ]
    return f'<div class="sqrtdk-audit">{_STYLE}{"".join(parts)}</div>'


def render_findings(findings: Sequence[Finding]) -> str:
    """Return a box for each finding: rule and place, cause, remedy, evidence and threshold."""
    return "".join(map(_render_finding, findings))


def _render_finding(finding: Finding) -> str:
    colour = _SEVERITY_COLOURS[finding.severity]
    head = "" if finding.head is None else f", head {finding.head}"
    where = f' in <code class="name">{escape(finding.layer or "the model itself")}</code>{head}'
    evidence = ", ".join(f"{name_evidence(name)} {write_evidence(value)}" for name, value in finding.evidence.items())
    threshold = f"threshold {write_number(finding.threshold.value)}: {finding.threshold.source}"
    return (
        f'<div class="finding" style="border-color:rgb({colour});background:rgba({colour},.1)">'
        f"<p><b>{escape(finding.severity)}: {escape(finding.rule)}</b>{where}</p>"
        f"<p>{escape(finding.cause)}</p><p>→ {escape(finding.remedy)}</p>"
        f'<p class="soft">{escape(evidence)}; {escape(threshold)}</p></div>'
    )


def _render_heat(audit: Audit) -> str:
    if not audit.heads:
        return ""
    heat = map_heads(audit)
    many = len(heat[0].cells) > _MOST_NAMED
    head = "".join(f'<th class="head">{number}</th>' for number in range(len(heat[0].cells)))
    rows = "".join(
        f'<tr><th>{row.number}</th><th class="path">{escape(row.name)}</th>'
        f"{''.join(_render_cell(cell, many) for cell in row.cells)}</tr>"
        for row in heat
    )
    caption = (
        "Mean entropy ratio H/ln n and pattern of each head, with the share of rows that follow it; the stronger the "
        "colour, the sharper its weights."
    )
    if many:
        caption = f"Each cell: {write_legend(audit)}; the stronger the colour, the sharper the head."
    kind = "heat many" if many else "heat"
    return _render_wide(caption, f'<tr><th></th><th class="path">layer / head</th>{head}</tr>{rows}', kind)


def _render_wide(caption: str, rows: str, kind: str = "") -> str:
    """Return a table that scrolls by itself on a narrow page."""
    above = f"<p>{escape(caption)}</p>" if caption else ""
    return f'{above}<div class="wide" tabindex="0"><table class="{kind}">{rows}</table></div>'


def _render_rows(table: Table) -> str:
    """Return a table as HTML. A column without a name numbers its rows."""
    kinds = [
        ' class="words path"' if name == "layer" else ' class="words"' if table.stands_left(at) else ""
        for at, name in enumerate(table.columns)
    ]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, table.columns, strict=True))
    body = (
        "".join(
            f"<td{kind}>{escape(cell)}</td>" if name else f"<th>{escape(cell)}</th>"
            for kind, name, cell in zip(kinds, table.columns, cells, strict=True)
        )
        for cells in table.rows
    )
    return _render_wide(table.title, f"<tr>{head}</tr>{''.join(f'<tr>{cells}</tr>' for cells in body)}")


def _render_cell(cell: HeatCell | None, short: bool) -> str:
    if cell is None:
        return "<td></td>"
    head = cell.head
    numbers = [
        f"{name.replace('_', ' ')} {write_evidence(getattr(head, name))}"
        for name in ("saturation_index", "max_weight", "effective_keys", "max_logit", "score_max", "rows")
    ]
    shade = shade_sharpness(head.entropy_ratio)
    return (
        f'<td style="background:rgba({HEAT},{shade:.2f})" title="{escape(", ".join(numbers))}">'
        f"{cell.text}<small>{escape(mark_pattern(head.pattern) if short else cell.pattern)}</small></td>"
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
            *([f"mask times {write_number(one.on_the_mask)}"] if one.on_the_mask not in (None, 1.0) else []),
            *([f"declared by {one.declared_by}"] if one.declared_by is not None else []),
            *([one.reason] if one.reason is not None else []),
        ]
        numbers = [one.measured, one.declared, one.at_the_call, one.before_the_call]
        measured, declared, at, before = map(write_number, numbers)
        place = (str(one.layer_index), name_layer(one.layer), str(one.d_k))
        rows.append((*place, measured, name_scale(one), declared, at, before, "; ".join(remarks)))
    table = _render_rows(Table("", columns, rows, left=frozenset({1, 4, 8})))
    state = " open" if len(rows) <= _MOST_OPEN else ""
    return f"<details{state}><summary>The scale of each layer</summary>{table}</details>"


def render_heads(heads: Sequence[AuditedHead]) -> str:
    """Return every number of every head in one table."""
    names = [item.name for item in fields(heads[0])] if heads else []
    columns = [name for name in names if name not in ("layer_index", "call")]  # the layer's name has the call
    table = Table(
        "Largest weight, entropy ratio, saturation index and effective keys are means over rows.",
        tuple(name.replace("_", " ") for name in columns),
        [tuple(write_evidence(getattr(one, name)) for name in columns) for one in heads],
        left=frozenset(at for at, name in enumerate(columns) if name in ("layer", "pattern")),
    )
    return _render_rows(table)


def render_comparison(comparison: Comparison) -> str:
    """Return the changes since another audit: sentences, the heads that changed most, findings new and gone."""
    sentences = "".join(f"<li>{escape(line)}</li>" for line in comparison.reading)
    table = _render_rows(comparison.tabulate(_MOST_CHANGES)) if comparison.changed else ""
    boxes = "".join(
        f"<p><b>{words}</b></p>{render_findings(findings)}"
        for words, findings in (("New findings", comparison.new), ("Findings that are gone", comparison.gone))
        if findings
    )
    return f'<div class="sqrtdk-audit">{_STYLE}<ul>{sentences}</ul>{table}{boxes}</div>'
