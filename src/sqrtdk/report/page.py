"""Report page: one self-contained HTML file made from records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sqrtdk.audits import Audit
from sqrtdk.audits.shipped import read_shipped
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name, warn
from sqrtdk.records.record import Record, spec_hash
from sqrtdk.report.chapters import Chapter, Exhibit, Material, Section
from sqrtdk.report.files import write_whole
from sqrtdk.report.guess import render_question
from sqrtdk.report.kinds import KINDS, figure_for, topic_of
from sqrtdk.report.plotly_renderer import render_fragment
from sqrtdk.report.shell import wrap_page
from sqrtdk.report.story import SECTIONS, choose_sections
from sqrtdk.report.table import render_table, render_text
from sqrtdk.report.training_figures import compares_scaling
from sqrtdk.wording.glossary import explain_terms
from sqrtdk.wording.quantities import format_cell

__all__ = ["render_report", "write_report"]

# Explained where a section uses them first; the first screen explains the others.
_TERMS = ("variance", "saturation index", "gradient", "Jacobian trace", "temperature", "head")
_TITLE = "Why divide by √dₖ?"


def write_report(
    records: Mapping[str, Record] | Sequence[Record],
    path: str | Path,
    *,
    command: str = "sqrtdk report",
    only: Sequence[str] | None = None,
    full: bool = False,
    audit: Audit | None = None,
    failures: Mapping[str, str] | None = None,
) -> Path:
    """Write the report on the records as one HTML file that needs neither network nor another file.

    Args:
        records: the records in any order; of two on the same topic the last counts.
        path: the file to write; an existing one is replaced once the new one is complete.
        command: the command that made the page, shown at its end.
        only: the sections to write, names of `SECTIONS`; None: all that have a record.
        full: unfold everything.
        audit: an audit measured for this page; None: the audit of MiniLM that ships with sqrtdk, with its date.
        failures: why the record of a topic, or the audit, could not be computed; its sections say so.

    A section that cannot be written says why in its place, and warns.

    Returns:
        The path written.

    Raises:
        InvalidValueError: no records, an unknown kind or section, or a directory that does not exist.
        MissingExtraError: plotly is not installed.
    """
    page = render_report(records, command=command, only=only, full=full, audit=audit, failures=failures)
    return write_whole(path, page.encode())


def render_report(
    records: Mapping[str, Record] | Sequence[Record],
    *,
    command: str = "sqrtdk report",
    only: Sequence[str] | None = None,
    full: bool = False,
    audit: Audit | None = None,
    failures: Mapping[str, str] | None = None,
) -> str:
    """Render the page that `write_report` writes."""
    sections = choose_sections(only)
    named = _name_records(records, may_be_empty=only is not None)
    material = Material(named, audit or read_shipped("minilm"), audit is not None, failures or {}, full)
    bodies = {name: body for name, section in sections.items() if (body := _render_section(name, section, material))}
    shown = {name: section for name, section in sections.items() if name in bodies}
    leading = [bodies.pop(name) for name, section in shown.items() if section.leads]
    titles = {name: section.link for name, section in shown.items() if not section.leads}
    if only is None:
        others = _render_others(named, full)
        bodies |= others
        titles |= {name: _name_kind(named[name]) for name in others}
    links = "".join(f'<a href="#{escape(name)}">{escape(title)}</a>' for name, title in titles.items())
    told_from = {need for section in shown.values() for need in section.needs}
    parts = [
        f'<header><h1>{_TITLE}</h1><p class="formula">Attention is softmax(QKᵀ/√dₖ)·V.</p></header>',
        *leading,
        f'<nav aria-label="Sections">{links}<a href="#making">How it was made</a></nav>',
        *bodies.values(),
        _render_making(named, command),
        _render_data(named, material.audit if "audit" in told_from else None),
    ]
    scripts = [script for section in shown.values() for script in section.scripts]
    return wrap_page(f"{_TITLE} A report by sqrtdk", "\n".join(parts), scripts)


def _name_records(records: Mapping[str, Record] | Sequence[Record], *, may_be_empty: bool) -> dict[str, Record]:
    """Return the records by topic, the last one of each."""
    named: dict[str, Record] = {}
    pairs: Iterable[tuple[Any, Any]] = records.items() if isinstance(records, Mapping) else enumerate(records)
    for place, record in pairs:
        if not isinstance(record, Record):
            raise InvalidTypeError("records", f"must hold Record objects, got {type(record).__name__} for {place!r}")
        if record.kind not in KINDS:
            raise unknown_name("record kind", record.kind, list(KINDS))
        topic = topic_of(record)
        # An ablation of other scales, as a store may hold it too, does not replace the one that the page shows.
        if topic in ("ablation", "widths") and topic in named and not compares_scaling(record):
            continue
        named[topic] = record
    if not named and not may_be_empty:
        raise InvalidValueError("records", "must hold at least one record, got none")
    return named


def _render_section(name: str, section: Section, material: Material) -> str:
    """Render a section, or the reason why it failed; empty where none of its records is there."""
    heading = "" if section.leads else f"<h2>{escape(section.title)}</h2>"
    command = (
        f'<p class="by">Compute it yourself: <code class="command">{escape(section.command)}</code></p>'
        if section.command
        else ""
    )
    failed = [
        f"{need} could not be computed: {why}" for need, why in material.failures.items() if need in section.needs
    ]
    body = ""
    if not section.needs or any(map(material.has, section.needs)):
        try:
            body = _render_chapter(name, section.tell(material), material.full)
        except Exception as error:  # a fault of ours must not cost the reader the rest of the page
            failed.append(f"the section {name} could not be written: {type(error).__name__}: {error}")
            warn(failed[-1])
    if not body and not failed:
        return ""
    alerts = "".join(f'<p class="failed" role="alert">{escape(message)}</p>' for message in failed)
    return f'<section id="{name}">{heading}{alerts}{body}{command}</section>'


def _render_chapter(name: str, chapter: Chapter, full: bool) -> str:
    exhibits = "".join(
        _render_exhibit(f"{name}-{index}", exhibit, full=full) for index, exhibit in enumerate(chapter.exhibits)
    )
    state = " open" if full else ""
    more = "".join(
        f'<details class="more"{state}><summary>{escape(title)}</summary>'
        f"{render_fragment(figure, f'{name}-more-{index}')}</details>"
        for index, (title, figure) in enumerate(chapter.more.items())
    )
    notes = "".join(f'<p class="note">{render_text(note)}</p>' for note in chapter.notes)
    after = "".join(f"<p>{render_text(paragraph)}</p>" for paragraph in chapter.after)
    text = f'<p class="told">{explain_terms(render_text(chapter.text), _TERMS)}</p>' if chapter.text else ""
    return f"{render_question(name, chapter.question, opened=full)}{text}{notes}{chapter.html}{exhibits}{after}{more}"


def _render_exhibit(name: str, exhibit: Exhibit, *, full: bool) -> str:
    rows = exhibit.rows
    if exhibit.columns is not None:
        rows = [{column: row.get(column) for column in exhibit.columns} for row in rows]
    says = f'<p class="says">{render_text(exhibit.says)}</p>' if exhibit.says else ""
    buttons = "".join(
        f'<button type="button" data-save="{kind}" data-source="{escape(exhibit.source)}" '
        f'data-table="{escape(exhibit.table)}">{kind.upper()}</button>'
        for kind in ("csv", "json")
    )
    state = " open" if full else ""
    folded = (
        f'<details class="numbers"{state}><summary>the numbers</summary>{render_table(rows)}'
        f'<p class="save">save as {buttons}</p></details>'
    )
    figure = render_fragment(exhibit.figure, name)
    return f'<div class="exhibit">{figure}{says}{folded if rows else ""}</div>'


def _render_others(records: Mapping[str, Record], full: bool) -> dict[str, str]:
    """Render records that no section needs, as those of benchmarks: figure, sentences and tables."""
    taken = {need for section in SECTIONS.values() for need in section.needs}
    sections = {}
    for name, record in records.items():
        if name in taken or KINDS[name].figure is None:
            continue
        chapter = Chapter(
            "",
            [
                Exhibit(figure_for(record), "", name, table, rows)
                for table, rows in list(record.tables.items())[:1]
                if rows
            ],
        )
        sentences = "".join(f"<li>{render_text(sentence)}</li>" for sentence in record.reading)
        body = f"{_render_chapter(name, chapter, full)}<ul>{sentences}</ul>"
        sections[name] = f'<section id="{escape(name)}"><h2>{escape(_name_kind(record))}</h2>{body}</section>'
    return sections


def _name_kind(record: Record) -> str:
    return KINDS[topic_of(record)].title or record.kind


def _render_making(records: Mapping[str, Record], command: str) -> str:
    # Records read from a store may come from other versions and machines than the rest.
    all_versions = [record.versions.items() for record in records.values()]
    # Versions that are all among those of another record are not listed twice.
    made = _list_once(
        ", ".join(f"{package} {version}" for package, version in mine)
        for mine in all_versions
        if not any(mine < others for others in all_versions)
    )
    cpus = _list_once(record.cpu for record in records.values())
    rows = [
        {
            "record": name,
            "seed": _name_seeds(record),
            "spec hash": spec_hash(record.spec),
            "specification": _shorten(json.dumps(record.spec, ensure_ascii=False)),
        }
        for name, record in records.items()
    ]
    lines = [f"Command: <code>{escape(command)}</code>"]
    lines += [f"Versions: {escape(made)}", f"Processor: {escape(cpus)}"] if records else []
    table = (
        "<details><summary>Specifications</summary><p>Equal specifications have equal hashes and, on the same versions "
        f"and processor, give equal numbers.</p>{render_table(rows)}</details>"
        if rows
        else ""
    )
    return f'<section id="making"><h2>How it was made</h2><p>{"<br>".join(lines)}</p>{table}</section>'


def _shorten(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


def _render_data(records: Mapping[str, Record], audit: Audit | None) -> str:
    """Render the data that the buttons below the figures save, once per record."""
    contents = {name: record.as_json() for name, record in records.items()}
    if audit is not None:
        contents["audit"] = audit.as_json()
    return "\n".join(
        f'<script type="application/json" class="record" data-name="{escape(name)}">'
        f"{json.dumps(content, ensure_ascii=False, separators=(',', ':')).replace('<', chr(92) + 'u003c')}</script>"
        for name, content in contents.items()
    )


def _list_once(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _name_seeds(record: Record) -> str:
    for name in ("seed", "seeds"):
        if name in record.spec:
            return format_cell(record.spec[name])
    return "none needed"
