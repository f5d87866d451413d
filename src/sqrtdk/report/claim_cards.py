"""Cards for claims: those that are wrong or depend first, each with its source and the command that checks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from sqrtdk.display import count
from sqrtdk.records import Record, Row
from sqrtdk.report.palette import VERDICT_MARKS
from sqrtdk.report.table import render_text

__all__ = ["render_claims"]

_ORDER = ("wrong", "depends", "undecided", "holds")
_WORDS = {"wrong": "Wrong", "depends": "It depends", "undecided": "Undecided", "holds": "Holds"}
_SUBJECTS = {
    "op": "on the operation",
    "var": "on the variance law",
    "soft": "on softmax saturation",
    "grad": "on gradients",
    "scale": "on scaling policies",
}


def render_claims(record: Record, *, opened: bool = False) -> str:
    """Cards of all claims; those that hold are folded away unless `opened`."""
    rows = record.tables["claims"]
    titles = {str(row["source"]): str(row["title"]) for row in record.tables.get("texts", ())}
    by_verdict = {
        verdict: [row for row in rows if row["verdict"] == verdict]
        for verdict in (*_ORDER, *dict.fromkeys(str(row["verdict"]) for row in rows))
    }
    parts = [f'<p class="lead">{escape(_count(rows))}</p>', _render_texts(titles)]
    for verdict, members in by_verdict.items():
        cards = f'<div class="cards">{"".join(_render_card(row, titles) for row in members)}</div>'
        if not members:
            continue
        if verdict == "holds":
            state = " open" if opened else ""
            parts.append(
                f"<details{state}><summary>{count(len(members), 'claim')} that hold</summary>{cards}</details>"
            )
        else:
            parts.append(cards)
    return "".join(parts)


def _count(rows: Sequence[Row]) -> str:
    verdicts = Counter(str(row["verdict"]) for row in rows)
    words = {
        "wrong": "wrong",
        "depends": "depending on what the sources leave out",
        "undecided": "undecided",
        "holds": "as the sources say",
    }
    listed = ", ".join(f"{verdicts[name]} {words[name]}" for name in _ORDER if verdicts[name])
    return f"{count(len(rows), 'sentence')} of the four sources, computed one by one: {listed}."


def _render_texts(titles: Mapping[str, str]) -> str:
    if not titles:
        return ""
    items = "".join(f"<li><b>{escape(name)}</b> {escape(title)}</li>" for name, title in titles.items())
    return f'<ul class="texts">{items}</ul>'


def _name_place(row: Row, titles: Mapping[str, str]) -> str:
    """Name the source and the subject."""
    source = str(row["source"])
    names = [f"{name}, {titles[name]}" if name in titles else name for name in source.split(", ")]
    where = "all four sources" if source == "all" else "; ".join(names)
    subject = _SUBJECTS.get(str(row["id"]).partition(".")[0], "")
    return f"{where}{', ' if subject else ''}{subject}"


def _render_card(row: Row, titles: Mapping[str, str]) -> str:
    verdict = str(row["verdict"])
    mark = f"{VERDICT_MARKS.get(verdict, '?')} {_WORDS.get(verdict, verdict)}"
    name = escape(str(row["id"]))
    return (
        f'<article class="card" id="claim-{name}" data-verdict="{escape(verdict)}">'
        f'<h3><span class="verdict {escape(verdict)}">{escape(mark)}</span> {render_text(str(row["claimed"]))}</h3>'
        f"<dl><dt>computed</dt><dd>{render_text(str(row['computed']))}</dd>"
        f"<dt>why</dt><dd>{render_text(str(row['why']))}</dd>"
        f"<dt>said by</dt><dd>{escape(_name_place(row, titles))}</dd>"
        f'<dt>check it</dt><dd><code class="command">sqrtdk claims {name}</code></dd></dl></article>'
    )
