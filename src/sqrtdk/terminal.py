"""What the command line shows: tables, sentences and progress. Results go to stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sqrtdk.records import Record, Row
from sqrtdk.report.table import format_cell, title_column

_VERDICT_STYLES = {"holds": "green", "wrong": "red", "depends": "yellow"}


def print_json(record: Record, *, curves: bool = True) -> None:
    """Print a record as JSON, and nothing else, to stdout."""
    content = record.as_json()
    if not curves:
        del content["curves"]
    json.dump(content, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def print_record(record: Record, tables: dict[str, Sequence[str] | None]) -> None:
    """Print the named tables of a record, each with the named columns (None: all), and what they show."""
    console = _stdout()
    for name, columns in tables.items():
        print_table(record.tables[name], columns, console=console)
    for sentence in record.reading:
        console.print(f"• {escape(sentence)}")


def print_table(rows: Sequence[Row], columns: Sequence[str] | None = None, *, console: Console | None = None) -> None:
    """Print rows as a table; numbers stand right, verdicts in colour."""
    console = console or _stdout()
    if not rows:
        return
    names = list(columns or rows[0])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        numeric = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(escape(title_column(name)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in names))
    console.print(table)


def _cell(name: str, value: Any) -> str:
    text = escape(format_cell(value))
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
    console = _stdout()
    for record in records:
        console.print(f"[bold]{escape(record.kind):<12}[/]{escape(record.headline)}", soft_wrap=True)
    console.print(f"[bold]{'page':<12}[/]{escape(str(page))}", soft_wrap=True)


def _stdout() -> Console:
    # Without a terminal there is no width to fit into: rows stay on one line for whoever reads the pipe.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


class Bar:
    """A line on stderr that says what is going on, how far it is and how long it may take."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=1.0)

    def show(self, description: str, fraction: float) -> None:
        """Say what is going on and which share of it is done."""
        self._progress.update(self._task, description=escape(description), completed=fraction)

    def follow(self, what: str) -> Callable[[Any], None]:
        """A callback for the lab's progress."""

        def tell(state: Any) -> None:
            reused = f", {state.reused} from the store" if state.reused else ""
            left = "" if state.remaining is None else f", about {state.remaining:.0f} s left"
            self.show(f"{what}: {state.done} of {state.total} runs{reused}{left}", state.fraction)

        return tell


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """A progress bar while a command works; without a terminal nothing is drawn."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as p:
        yield Bar(p)
