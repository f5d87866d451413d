"""Output that commands share: progress, the figure, a record as tables or JSON, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sqrtdk.commands.interrupts import leaving_at_second_interrupt
from sqrtdk.commands.options import naming
from sqrtdk.records.record import Record
from sqrtdk.show.progress import Bar, follow, progress_bar

if TYPE_CHECKING:
    from sqrtdk.audits import Audit
    from sqrtdk.claims import Evidence


@contextmanager
def gathering(
    seed: int, seeds: int, steps: int, store: Path | None, workers: int | None
) -> Iterator[tuple[Evidence, Bar]]:
    """Yield evidence from a lab, and a progress bar. Without a store the lab forgets its runs when the command ends."""
    from sqrtdk.claims import Evidence
    from sqrtdk.lab import Lab, Processes

    with (
        leaving_at_second_interrupt(),
        progress_bar() as bar,
        Lab(store, Processes(workers), follow(bar, "training")) as lab,
    ):
        yield Evidence(seed, seeds, steps, lab), bar


@contextmanager
def working(doing: str) -> Iterator[Bar]:
    """Show progress for work without countable steps, or for work that reports its own steps."""
    with progress_bar() as bar:
        bar.show(doing)
        yield bar


def present(record: Record, json: bool, plot: Path | None, *, curves: bool = False) -> None:
    """Write the record's figure if a file was given, and print its tables, or JSON."""
    from sqrtdk.commands import terminal
    from sqrtdk.report.kinds import kind_of, shown_tables

    draw_figure(record, plot)
    if json:
        terminal.print_json(record, curves=curves or kind_of(record).prints_curves)
    else:
        terminal.print_record(record, shown_tables(record))


def draw_figure(data: Record | Audit, plot: Path | None) -> None:
    """Write the figure of a result to the file, if one is given, and print its path on stderr."""
    if plot is not None:
        from sqrtdk.report import save_figure

        written = save_figure(data, plot)
        print(f"figure written to {written}", file=sys.stderr)


def require_drawable(plot: Path | None, option: str = "--plot") -> None:
    """Refuse a file that no figure can be written to, before any work is done."""
    if plot is not None:
        from sqrtdk.report import require_drawable

        with naming(option):
            require_drawable(plot)


def fail(message: str, code: int) -> NoReturn:
    """End with one line on stderr and this exit code."""
    if message:  # empty where the help has been printed
        print(f"sqrtdk: {message}", file=sys.stderr)
    sys.exit(code)
