"""Cards for claims: each is headed by the fact, the important ones first, with source and command below."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from sqrtdk.records.record import Record, Row
from sqrtdk.report.palette import VERDICT_MARKS
from sqrtdk.report.table import render_text
from sqrtdk.show.table import count

__all__ = ["FIRST", "LAST", "render_claims"]

FIRST = (
    *("grad.vanish", "grad.learning", "grad.inverse", "soft.onehot", "soft.uniform", "soft.small", "soft.trained"),
    *("scale.models", "var.init", "var.inputs", "op.instability", "soft.unstable", "grad.most", "grad.explode"),
)
"""Claims about the question of the page, the most important first."""

LAST = (
    *("scale.quoted", "scale.reason", "soft.peak", "soft.five8", "var.five", "soft.exp", "soft.sum", "op.code"),
    "scale.mentioned",
)
"""Claims about quotes, worked numbers and misprints."""

_WORDS = {"wrong": "Wrong", "depends": "It depends", "undecided": "Undecided", "holds": "Holds"}
_SUBJECTS = {
    "op": "on the operation",
    "var": "on variance",
    "soft": "on softmax",
    "grad": "on gradients and training",
    "scale": "on scaling policies",
}


def render_claims(record: Record, *, opened: bool = False) -> str:
    """Render cards of all claims by importance; those that hold are folded unless `opened`."""
    titles = {str(row["source"]): str(row["title"]) for row in record.tables.get("texts", ())}
    rows = sorted(record.tables["claims"], key=_rank)
    holding = [row for row in rows if row["verdict"] == "holds"]
    others = [row for row in rows if row["verdict"] != "holds"]
    parts = [f'<p class="lead">{escape(_count(rows))}</p>', _render_sources(titles)]
    if others:
        parts.append(_render_cards(others, titles, opened))
    if holding:
        state = " open" if opened else ""
        summary = f"<summary>{count(len(holding), 'claim')} that hold</summary>"
        parts.append(f"<details{state}>{summary}{_render_cards(holding, titles, opened)}</details>")
    return "".join(parts)


def _rank(row: Row) -> int:
    name = str(row["id"])
    return FIRST.index(name) - len(FIRST) if name in FIRST else LAST.index(name) + 1 if name in LAST else 0


def _render_cards(rows: Sequence[Row], titles: Mapping[str, str], opened: bool) -> str:
    return f'<div class="cards">{"".join(_render_card(row, titles, opened) for row in rows)}</div>'


def _count(rows: Sequence[Row]) -> str:
    verdicts = Counter(str(row["verdict"]) for row in rows)
    words = {
        "holds": "hold",
        "depends": "depend on conditions that the sources leave out",
        "wrong": "are wrong",
        "undecided": "cannot be decided here",
    }
    listed = ", ".join(f"{verdicts[name]} {words[name]}" for name in words if verdicts[name])
    return f"{count(len(rows), 'claim')} of the four sources were checked by computation: {listed}."


def _render_sources(titles: Mapping[str, str]) -> str:
    if not titles:
        return ""
    items = "".join(f"<li><b>{escape(name)}</b> {escape(title)}</li>" for name, title in titles.items())
    return f'<ul class="sources">{items}</ul>'


def _name_place(row: Row, titles: Mapping[str, str]) -> str:
    """Name the source and the subject."""
    source = str(row["source"])
    names = [f"{name}, {titles[name]}" if name in titles else name for name in source.split(", ")]
    where = "all four sources" if source == "all" else "; ".join(names)
    subject = _SUBJECTS.get(str(row["id"]).partition(".")[0], "")
    return f"{where}{', ' if subject else ''}{subject}"


def _render_card(row: Row, titles: Mapping[str, str], opened: bool) -> str:
    verdict, claimed, why = (str(row[name]) for name in ("verdict", "claimed", "why"))
    # A claim that holds is the fact; otherwise the first sentence of the reason states it.
    fact, rest = (claimed, why) if verdict == "holds" else _split_sentence(why)
    lines = {
        "claim": "" if verdict == "holds" else render_text(claimed),
        "more": render_text(rest),
        "source": escape(_name_place(row, titles)),
        "check it": f'<code class="command">sqrtdk claims {escape(str(row["id"]))}</code>',
    }
    listed = "".join(f"<dt>{word}</dt><dd>{text}</dd>" for word, text in lines.items() if text)
    mark = f"{VERDICT_MARKS.get(verdict, '?')} {_WORDS.get(verdict, verdict)}"
    return (
        f'<article class="card" id="claim-{escape(str(row["id"]))}" data-verdict="{escape(verdict)}">'
        f'<h3><span class="verdict {escape(verdict)}">{escape(mark)}</span> {render_text(fact)}</h3>'
        f"<dl>{listed}</dl>"
        f"<details{' open' if opened else ''}><summary>computed numbers</summary>"
        f"<p>{render_text(str(row['computed']))}</p></details></article>"
    )


def _split_sentence(text: str) -> tuple[str, str]:
    first, _, rest = re.sub(r"(?<=[.!?]) (?=[A-Z0-9])", "\n", text, count=1).partition("\n")
    return first, rest
