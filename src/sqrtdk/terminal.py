"""What the command line shows on stdout: tables, sentences, JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sqrtdk.cells import format_cell, is_number, title_column
from sqrtdk.records import Record, Row
from sqrtdk.spelling import spell, takes_everything

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
    # Whole before it is written, and in escapes where the encoding lacks a letter: never a part, never another text.
    json_text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=not takes_everything(sys.stdout))
    sys.stdout.write(json_text + "\n")


def print_record(record: Record, tables: dict[str, Sequence[str] | None]) -> None:
    """Print the named tables of a record, each with the named columns (None: all), and what they show."""
    console = stdout_console()
    for name, columns in tables.items():
        print_table(record.tables[name], columns, console=console)
    for sentence in record.reading:
        console.print(escape(spell(f"• {sentence}")))


def print_table(rows: Sequence[Row], columns: Sequence[str] | None = None, *, console: Console | None = None) -> None:
    """Print rows as a table; numbers stand right, verdicts in colour.

    A table too wide for the terminal is printed in parts, each with the columns that name a row.
    """
    console = console or stdout_console()
    if not rows:
        return
    rows, names = _join_intervals(rows, list(columns or rows[0]))
    widths = {name: _least_width(name, rows) for name in names}
    for part in _split_columns(rows, names, widths, console.width):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        whole = {name: max(len(_title(name)), *(len(_text(name, row[name])) for row in rows)) for name in part}
        tight = _table_width(whole.values()) > console.width
        for name in part:
            numeric = _is_numeric(name, rows)
            # A fixed width keeps numbers whole: only texts give way when the terminal is narrow.
            width = widths[name] if numeric and tight else None
            table.add_column(escape(_title(name)), justify="right" if numeric else "left", overflow="fold", width=width)
        for row in rows:
            table.add_row(*(_cell(name, row[name]) for name in part))
        console.print(table)


def _join_intervals(rows: Sequence[Row], names: list[str]) -> tuple[Sequence[Row], list[str]]:
    """The two ends of an interval as one column, `x_low` and `x_high` as `x_interval`."""
    joined = {name: name.removesuffix("low") + "interval" for name in names if name.split("_")[-1] == "low"}
    ends = {low: low.removesuffix("low") + "high" for low in joined}
    if not all(high in names for high in ends.values()):
        return rows, names
    rows = [{**row, **{joined[low]: [row[low], row[high]] for low, high in ends.items()}} for row in rows]
    return rows, [joined.get(name, name) for name in names if name not in ends.values()]


def _is_numeric(name: str, rows: Sequence[Row]) -> bool:
    return all(is_number(row[name]) for row in rows)


def _least_width(name: str, rows: Sequence[Row]) -> int:
    heading = max(map(len, _title(name).split()))
    longest = max(len(_text(name, row[name])) for row in rows)
    return max(heading, longest if _is_numeric(name, rows) else min(longest, _NARROWEST_TEXT))


def _split_columns(
    rows: Sequence[Row], names: Sequence[str], widths: dict[str, int], available: int
) -> Iterator[list[str]]:
    """Columns for one table after another, as many as fit beside the first ones, which together name a row."""
    keys = next(
        (
            count
            for count in range(1, len(names))
            if len({str([row[n] for n in names[:count]]) for row in rows}) == len(rows)
        ),
        len(names),
    )
    part = list(names[:keys])
    for name in names[keys:]:
        if len(part) > keys and _table_width(widths[n] for n in [*part, name]) > available:
            yield part
            part = list(names[:keys])
        part.append(name)
    yield part


def _table_width(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - 1  # a gap less than columns, and an edge on either side


def _title(name: str) -> str:
    return spell(title_column(name))


def _text(name: str, value: Any) -> str:
    return spell(title_column(str(value)) if name == "quantity" else format_cell(value, name))


def _cell(name: str, value: Any) -> str:
    text = escape(_text(name, value))
    style = _VERDICT_STYLES.get(value) if name == "verdict" else None
    return f"[{style}]{text}[/]" if style else text


def markdown_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as a Markdown table.

    >>> print(markdown_table([{"a": 1, "b": "x|y"}], ["a", "b"]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(format_cell(row[name]).replace("|", "\\|") for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def print_summary(records: Sequence[Record], page: Path) -> None:
    """Print the few lines that stand above a report: the verdicts, one sentence per record, where the page is."""
    console = stdout_console()
    for record in records:
        console.print(f"[bold]{escape(record.kind):<13}[/]{escape(spell(record.headline))}", soft_wrap=True)
    console.print(f"[bold]{'page':<13}[/]{escape(str(page))}", soft_wrap=True)


def stdout_console() -> Console:
    """A console on stdout as wide as the terminal, or as COLUMNS says."""
    # A pipe has no width of its own: COLUMNS decides, else what fits beside a text.
    piped = None if sys.stdout.isatty() else shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
    return Console(highlight=False, width=piped)
