"""Output of commands on stdout: tables, sentences, JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from sqrtdk.records.record import Record, Row, tabulate
from sqrtdk.show.table import Table
from sqrtdk.wording.encoding import spell, takes_everything

_VERDICT_STYLES = {"holds": "green", "wrong": "red", "depends": "yellow", "undecided": "dim"}
_GAP = 3
# Texts may be broken into lines this short; numbers and single words are never broken.
_NARROWEST_TEXT = 11
_PIPE_WIDTH = 120


def print_json(record: Record, *, curves: bool = True) -> None:
    """Print a record as JSON, and nothing else, to stdout."""
    content = record.as_json()
    if not curves:
        del content["curves"]
    write_json(content)


def write_json(content: Any) -> None:
    """Write plain values as strict JSON to stdout."""
    # Complete before the first letter is written, with escapes for letters that the encoding lacks.
    json_text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=not takes_everything(sys.stdout))
    sys.stdout.write(json_text + "\n")


def print_record(record: Record, tables: dict[str, Sequence[str] | None]) -> None:
    """Print the named tables of a record, each with the named columns (None: all), and its sentences."""
    console = stdout_console()
    for name, columns in tables.items():
        print_table(record.tables[name], columns, console=console)
    print_sentences(record.reading, console)


def print_sentences(sentences: Iterable[str], console: Console | None = None) -> None:
    """Print sentences as a list."""
    for sentence in sentences:
        (console or stdout_console()).print(escape(spell(f"• {sentence}")))


def print_table(rows: Sequence[Row], columns: Sequence[str] | None = None, *, console: Console | None = None) -> None:
    """Print rows as a table, numbers right-aligned and verdicts in colour. Without rows nothing is printed."""
    if rows:
        lay_out(tabulate(*_join_intervals(rows, list(columns or rows[0]))), console or stdout_console())


def lay_out(table: Table, console: Console) -> None:
    """Print a table without its title.

    A table too wide for the terminal is printed in parts. Each part repeats the columns that identify a row.
    """
    table = table._replace(
        columns=tuple(map(spell, table.columns)), rows=[tuple(map(spell, cells)) for cells in table.rows]
    )
    whole = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    least = [_least_width(table, at) for at in range(len(table.columns))]
    for part in _split_columns(table, least, console.width):
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        tight = _table_width(whole[at] for at in part) > console.width
        for at in part:
            # A fixed width keeps numbers whole: in a narrow terminal only texts wrap.
            justify: Literal["left", "right"] = "left" if table.stands_left(at) else "right"
            width = least[at] if tight and justify == "right" else None
            shown.add_column(escape(table.columns[at]), justify=justify, overflow="fold", width=width)
        for cells in table.rows:
            shown.add_row(*(_colour(table.columns[at], escape(cells[at])) for at in part))
        console.print(shown)


def _join_intervals(rows: Sequence[Row], names: list[str]) -> tuple[Sequence[Row], list[str]]:
    """Return rows and names with the two ends of an interval, `x_low` and `x_high`, as one column `x_interval`."""
    joined = {name: name.removesuffix("low") + "interval" for name in names if name.split("_")[-1] == "low"}
    ends = {low: low.removesuffix("low") + "high" for low in joined}
    if not all(high in names for high in ends.values()):
        return rows, names
    rows = [{**row, **{joined[low]: [row[low], row[high]] for low, high in ends.items()}} for row in rows]
    return rows, [joined.get(name, name) for name in names if name not in ends.values()]


def _least_width(table: Table, at: int) -> int:
    heading = max(map(len, table.columns[at].split()))
    longest = max(len(cells[at]) for cells in table.rows)
    return max(heading, min(longest, _NARROWEST_TEXT) if table.stands_left(at) else longest)


def _split_columns(table: Table, widths: Sequence[int], available: int) -> Iterator[list[int]]:
    """Yield the columns of each part: the first columns, which identify a row, and as many others as fit."""
    number = len(table.columns)
    named = (count for count in range(1, number) if len({row[:count] for row in table.rows}) == len(table.rows))
    keys = next(named, number)
    part = list(range(keys))
    for at in range(keys, number):
        if len(part) > keys and _table_width(widths[n] for n in [*part, at]) > available:
            yield part
            part = list(range(keys))
        part.append(at)
    yield part


def _table_width(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - 1  # one gap fewer than columns, and an edge on either side


def _colour(name: str, text: str) -> str:
    style = _VERDICT_STYLES.get(text) if name == "verdict" else None
    return f"[{style}]{text}[/]" if style else text


def markdown_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return rows as a Markdown table.

    >>> print(markdown_table([{"a": 1, "b": "x|y"}], ["a", "b"]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    return tabulate(rows, columns)._replace(columns=tuple(columns)).as_markdown()


def print_summary(records: Sequence[Record], page: Path) -> None:
    """Print the summary of a report: the verdicts, one sentence per record, and the path of the page."""
    console = stdout_console()
    for record in records:
        console.print(f"[bold]{escape(record.kind):<14}[/]{escape(spell(record.headline))}", soft_wrap=True)
    console.print(f"[bold]{'page':<14}[/]{escape(str(page))}", soft_wrap=True)


def stdout_console() -> Console:
    """Return a console on stdout, as wide as the terminal or as COLUMNS says."""
    # A pipe has no width: COLUMNS decides, else the default width of a pipe.
    piped = None if sys.stdout.isatty() else shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
    return Console(highlight=False, width=piped)
