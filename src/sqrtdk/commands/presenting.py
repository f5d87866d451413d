"""What commands share while they run: progress, the figure, the record as tables or JSON, the way to fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sqrtdk.options import naming
from sqrtdk.progress import Bar, follow, progress_bar
from sqrtdk.records import Record

if TYPE_CHECKING:
    from sqrtdk.claims import Evidence


@contextmanager
def gathering(
    seed: int, seeds: int, steps: int, store: Path | None, workers: int | None
) -> Iterator[tuple[Evidence, Bar]]:
    """Evidence from a lab with a progress bar; without a store, one that lasts as long as the command."""
    from sqrtdk.claims import Evidence
    from sqrtdk.lab import Lab, Processes

    with progress_bar() as bar, Lab(store, Processes(workers), follow(bar, "training")) as lab:
        yield Evidence(seed, seeds, steps, lab), bar


@contextmanager
def working(doing: str) -> Iterator[Bar]:
    """Progress for what has no steps to count, or tells them itself."""
    with progress_bar() as bar:
        bar.show(doing)
        yield bar


def present(record: Record, json: bool, plot: Path | None, *, curves: bool = False) -> None:
    """Draw the record's figure if a file was given, and print its tables, or JSON."""
    from sqrtdk import terminal
    from sqrtdk.report.kinds import kind_of, shown_tables

    draw_figure(record, plot)
    if json:
        terminal.print_json(record, curves=curves or kind_of(record).prints_curves)
    else:
        terminal.print_record(record, shown_tables(record))


def draw_figure(record: Record, plot: Path | None) -> None:
    """Draw the record's figure into the file, if there is one, and say so on stderr."""
    if plot is not None:
        from sqrtdk.report import save_figure

        written = save_figure(record, plot)
        print(f"figure written to {written}", file=sys.stderr)


def require_drawable(plot: Path | None, option: str = "--plot") -> None:
    """Refuse a file that cannot be drawn before hours of work, not after."""
    if plot is not None:
        from sqrtdk.report import require_drawable

        with naming(option):
            require_drawable(plot)


def fail(message: str, code: int) -> NoReturn:
    """End with one line on stderr and this exit code."""
    if message:  # without arguments the help has said everything
        print(f"sqrtdk: {message}", file=sys.stderr)
    sys.exit(code)
