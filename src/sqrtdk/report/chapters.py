"""Parts of the report: exhibits, the chapters that show them, the material of all chapters, and sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sqrtdk.audits import Audit
from sqrtdk.records.record import Record, Row
from sqrtdk.report.guess import Question
from sqrtdk.report.panels import Figure


@dataclass(frozen=True)
class Exhibit:
    """Picture with its meaning: a figure, sentences below it, its numbers folded, its data to save.

    Args:
        figure: one panel; its title states the finding.
        says: the sentences below.
        source: the name of the record or audit that has the data.
        table: its table that is folded below the figure.
        rows: the rows of the table; none: no table.
        columns: the columns that readers see; None: all.
    """

    figure: Figure
    says: str
    source: str
    table: str
    rows: Sequence[Row]
    columns: Sequence[str] | None = None


@dataclass(frozen=True)
class Chapter:
    """Content of a section: a question, a paragraph, notes, HTML, exhibits, paragraphs after, and folded figures."""

    text: str
    exhibits: Sequence[Exhibit] = ()
    more: Mapping[str, Figure] = field(default_factory=dict)
    notes: Sequence[str] = ()
    html: str = ""
    after: Sequence[str] = ()
    question: Question | None = None


class Material(NamedTuple):
    """Records by topic and the audit of a real model, with the reasons why others are missing."""

    records: Mapping[str, Record]
    audit: Audit | None = None
    measured_here: bool = False
    failures: Mapping[str, str] = {}
    full: bool = False

    def has(self, topic: str) -> bool:
        """Tell whether there is a record (or the audit) for a topic."""
        return topic in self.records or (topic == "audit" and self.audit is not None)


class Section(NamedTuple):
    """Section of the report.

    Args:
        title: its heading.
        link: its name in the list of sections.
        needs: the topics that it is told from; a missing topic leaves out what it would show.
        tell: makes its chapter.
        command: the command that computes its numbers, shown at its end.
        leads: it stands above the list of sections, without a heading.
        trains: it cannot be told without training.
        scripts: files of the package that its HTML needs.
    """

    title: str
    link: str
    needs: tuple[str, ...]
    tell: Callable[[Material], Chapter]
    command: str | None = None
    leads: bool = False
    trains: bool = False
    scripts: tuple[str, ...] = ()
