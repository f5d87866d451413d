"""The report: all records on one self-contained page, claims first, then exercises, training and how it was made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.records import Record, spec_hash
from sqrtdk.report.files import write_whole
from sqrtdk.report.kinds import CLAIM_COLUMNS, KINDS, figure_for, kind_of, topic_of
from sqrtdk.report.palette import VERDICT_COLOURS, VERDICT_MARKS
from sqrtdk.report.plotly_renderer import render_fragment
from sqrtdk.report.shell import wrap_page
from sqrtdk.report.table import format_cell, render_table, render_text

# Longer tables are folded away, so that the page reads as a text.
_LONGEST_OPEN_TABLE = 12
_MOST_OPEN_SENTENCES = 8


def write_report(
    records: Mapping[str, Record] | Sequence[Record], path: str | Path, *, command: str = "sqrtdk report"
) -> Path:
    """Write all records as one HTML file that needs nothing else: no network, no other file.

    Args:
        records: what to show, by name or in any order; the page has its own order by kind.
        path: the file to write; an existing one is replaced once the new one is complete.
        command: what was called to make the page, shown at its end.

    Returns:
        The path written.

    Raises:
        InvalidValueError: no records, a kind that has no figure, or a directory that does not exist.
        MissingExtraError: plotly is not installed.
    """
    return write_whole(path, render_report(records, command=command).encode())


def render_report(records: Mapping[str, Record] | Sequence[Record], *, command: str = "sqrtdk report") -> str:
    """Render the page that `write_report` writes."""
    named = _name_records(records)
    body = [_render_header(named)]
    body += [_render_section(name, record) for name, record in named.items()]
    body.append(_render_making(named, command))
    return wrap_page("Why √dₖ? A report by sqrtdk", "\n".join(body))


def _name_records(records: Mapping[str, Record] | Sequence[Record]) -> dict[str, Record]:
    if isinstance(records, Mapping):
        pairs = list(records.items())
    else:
        pairs = []
        for record in records:
            topic = topic_of(record) if isinstance(record, Record) else ""
            taken = sum(topic_of(other) == topic for _, other in pairs)
            pairs.append((topic if not taken else f"{topic}-{taken + 1}", record))
    if not pairs:
        raise InvalidValueError("records must hold at least one record, got none")
    for name, record in pairs:
        if not isinstance(record, Record):
            raise InvalidTypeError(f"records must hold Record objects, got {type(record).__name__} for {name!r}")
    order = {topic: place for place, topic in enumerate(KINDS)}
    return dict(sorted(pairs, key=lambda pair: order.get(topic_of(pair[1]), len(order))))


def _heading(name: str, record: Record) -> str:
    topic = topic_of(record)
    section = KINDS[topic].section if topic in KINDS else None
    title = section.title if section is not None else topic
    if name == topic:
        return title
    return f"{title} ({name.removeprefix(topic).strip('_- ').replace('_', ' ') or name})"


def _count_verdicts(records: Mapping[str, Record]) -> Counter[str]:
    return Counter(
        str(row["verdict"]) for record in records.values() if record.kind == "claims" for row in record.tables["claims"]
    )


def _render_header(records: Mapping[str, Record]) -> str:
    verdicts = _count_verdicts(records)
    checked = f"Here {sum(verdicts.values())} claims about why are computed, one by one. " if verdicts else ""
    tiles = "".join(
        f'<div class="tile"><b class="{name}">{VERDICT_MARKS[name]} {verdicts[name]}</b>'
        f"<span>{_VERDICT_WORDS[name]}</span></div>"
        for name in VERDICT_COLOURS
        if verdicts
    )
    links = "".join(
        f'<a href="#{escape(name)}">{escape(_heading(name, record))}</a>' for name, record in records.items()
    )
    return (
        "<header><h1>Why divide by √dₖ?</h1>"
        '<p class="lead">Attention is softmax(QKᵀ/√dₖ)·V: the scores are divided by √dₖ before the softmax sees them. '
        f"{checked}Every number on this page was computed by the program, seeds and intervals are stated, and what "
        "contradicts the texts is shown as it is.</p>"
        f'<div class="tiles">{tiles}</div><nav>{links}<a href="#making">How it was made</a></nav></header>'
    )


_VERDICT_WORDS = {"holds": "hold", "wrong": "are wrong", "depends": "depend"}


def _render_section(name: str, record: Record) -> str:
    figure = render_fragment(figure_for(record), f"figure-{name}")
    section = kind_of(record).section
    assert section is not None, "what has a figure has a section"
    command = f' <code class="command">{escape(section.command)}</code>' if section.command is not None else ""
    intro = f'<h2>{escape(_heading(name, record))}</h2><p class="asks">{escape(section.asks)}{command}</p>'
    # Folded tables come after the open ones.
    order = sorted(record.tables, key=lambda title: _is_folded(record, title))
    tables = "".join(_render_named_table(record, title) for title in order)
    return f'<section id="{escape(name)}">{intro}{figure}{_render_reading(record)}{tables}</section>'


def _render_reading(record: Record) -> str:
    if not record.reading:
        return ""
    items = [f"<li>{render_text(sentence)}</li>" for sentence in record.reading]
    first, more = items[:_MOST_OPEN_SENTENCES], items[_MOST_OPEN_SENTENCES:]
    rest = f"<details><summary>{len(more)} more</summary><ul>{''.join(more)}</ul></details>" if more else ""
    return f'<div class="shows"><h3>What it shows</h3><ul>{"".join(first)}</ul>{rest}</div>'


def _render_named_table(record: Record, name: str) -> str:
    rows = record.tables[name]
    if not rows:
        return ""
    if record.kind == "claims":
        shown = [{name: row.get(name) for name in CLAIM_COLUMNS} for row in rows]
        return _render_filter(record) + render_table(shown, classes="claims")
    table = render_table(rows)
    title = kind_of(record).titles.get(name, "The numbers" if name == record.kind else name.replace("_", " "))
    if _is_folded(record, name):
        return f"<details><summary>{escape(title)} ({len(rows)} rows)</summary>{table}</details>"
    return f"<h3>{escape(title)}</h3>{table}"


def _is_folded(record: Record, name: str) -> bool:
    return name in kind_of(record).folded or len(record.tables[name]) > _LONGEST_OPEN_TABLE


def _render_filter(record: Record) -> str:
    verdicts = Counter(str(row["verdict"]) for row in record.tables["claims"])
    buttons = [f'<button type="button" aria-pressed="true" data-verdict="">all {sum(verdicts.values())}</button>']
    buttons += [
        f'<button type="button" aria-pressed="false" data-verdict="{escape(name)}">{escape(name)} {count}</button>'
        for name, count in verdicts.most_common()
    ]
    return f'<div class="filter" role="group" aria-label="Show claims by verdict">{"".join(buttons)}</div>'


def _render_making(records: Mapping[str, Record], command: str) -> str:
    # Records read from a store may come from other versions and machines than the rest.
    made = _list_once(
        ", ".join(f"{package} {version}" for package, version in record.versions.items()) for record in records.values()
    )
    cpus = _list_once(record.cpu for record in records.values())
    rows = [
        {
            "record": name,
            "seed": _name_seeds(record),
            "spec hash": spec_hash(record.spec),
            "specification": json.dumps(record.spec, ensure_ascii=False),
        }
        for name, record in records.items()
    ]
    return (
        '<section id="making"><h2>How it was made</h2>'
        f"<p>Command: <code>{escape(command)}</code><br>Versions: {escape(made)}<br>Processor: {escape(cpus)}</p>"
        "<p>Equal specifications have equal hashes and, on the same versions and processor, give equal numbers.</p>"
        f"{render_table(rows)}</section>"
    )


def _list_once(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _name_seeds(record: Record) -> str:
    for name in ("seed", "seeds"):
        if name in record.spec:
            return format_cell(record.spec[name])
    return "none needed"
