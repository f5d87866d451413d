"""Heat map of an audit: one row per layer and one cell per head, for terminal, notebook and page."""

from __future__ import annotations

from typing import NamedTuple

from sqrtdk.audits.audit import Audit, AuditedHead
from sqrtdk.diagnosis.patterns import FIXED_KEY, NOT_ENOUGH_DATA, OTHER
from sqrtdk.show.table import Table, name_layer
from sqrtdk.wording.numbers import write_percent

__all__ = ["HeatCell", "HeatRow", "map_heads", "mark_pattern", "tabulate_heads", "write_legend"]

_MARKS = {
    "broad": "b",
    "previous": "p",
    "self": "s",
    "next": "n",
    FIXED_KEY: "k",
    OTHER: "·",
    NOT_ENOUGH_DATA: "?",
}
_OFFSET = "o"


class HeatCell(NamedTuple):
    """A head with its mean entropy ratio as text, and its pattern with the share of rows that follow it, if known."""

    head: AuditedHead
    text: str
    pattern: str


class HeatRow(NamedTuple):
    """A layer with its place, its name and one cell per head, None beyond its last head."""

    number: int
    name: str
    cells: tuple[HeatCell | None, ...]


def map_heads(audit: Audit) -> list[HeatRow]:
    """Return the layers in the order of first calls, as rows of equal length."""
    layers = audit.layers
    widest = max(map(len, layers.values()), default=0)
    return [
        HeatRow(heads[0].layer_index, name_layer(path), (*map(_describe, heads), *[None] * (widest - len(heads))))
        for path, heads in layers.items()
    ]


def mark_pattern(pattern: str) -> str:
    """Return the letter of a pattern."""
    return _MARKS.get(pattern, _OFFSET)


def write_legend(audit: Audit) -> str:
    """Return the meaning of the numbers and letters in the cells."""
    names = sorted({head.pattern for head in audit.heads})
    return f"mean entropy ratio H/ln n; pattern: {', '.join(f'{mark_pattern(name)} {name}' for name in names)}"


def tabulate_heads(audit: Audit) -> Table:
    """Return layers × heads as a table of texts, with the legend as its title."""
    heat = map_heads(audit)
    heads = range(len(heat[0].cells)) if heat else ()
    rows = [
        (row.name, *("" if cell is None else f"{cell.text}{mark_pattern(cell.head.pattern)}" for cell in row.cells))
        for row in heat
    ]
    return Table(write_legend(audit), ("head", *map(str, heads)), rows, left=1)


def _describe(head: AuditedHead) -> HeatCell:
    text = "–" if head.entropy_ratio is None else f"{head.entropy_ratio:.2f}"
    share = "" if head.pattern_share is None else f" {write_percent(head.pattern_share)}"
    return HeatCell(head, text, f"{head.pattern}{share}")
