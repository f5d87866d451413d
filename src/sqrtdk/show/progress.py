"""Progress of long commands on stderr: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sqrtdk.show.table import count
from sqrtdk.wording.encoding import spell
from sqrtdk.wording.numbers import write_seconds

# Shorter work prints nothing. Longer work prints a line every few seconds.
_FIRST_SECONDS = 2.0
_LINE_SECONDS = 5.0


class Bar(Protocol):
    """Display of the current step, the finished share and the time left."""

    def show(self, description: str, fraction: float | None = None) -> None:
        """Show the current step and the finished share, if it is known."""


class _Lines:
    """A thread that writes a line to a stream after two seconds and then every five, without a call from the work."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._state: tuple[str, float | None] = ("working", None)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, name="sqrtdk-progress", daemon=True)
        self._thread.start()

    def show(self, description: str, fraction: float | None = None) -> None:
        self._state = (description, fraction)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _write_lines(self) -> None:
        began = time.monotonic()
        pause = _FIRST_SECONDS
        while not self._done.wait(pause):
            description, fraction = self._state
            share = "" if fraction is None else f"{fraction:.0%}, "
            line = f"sqrtdk: {description} ({share}{time.monotonic() - began:.0f} s)"
            print(spell(line, self._stream.encoding), file=self._stream, flush=True)
            pause = _LINE_SECONDS


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """Show progress on stderr while a command works. A terminal is clean again afterwards.

    >>> with progress_bar() as bar:
    ...     bar.show("checking", 0.5)
    """
    if not sys.stderr.isatty():
        lines = _Lines(sys.stderr)
        try:
            yield lines
        finally:
            lines.stop()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)

        class ShownBar:
            def show(self, description: str, fraction: float | None = None) -> None:
                words = escape(spell(description, sys.stderr.encoding))
                total = None if fraction is None else 1.0  # without a total the bar only moves
                progress.update(task, description=words, completed=fraction or 0.0, total=total)

        yield ShownBar()


def follow(bar: Bar, doing: str) -> Callable[[Any], None]:
    """Return a callback that shows the lab's progress."""

    def tell(state: Any) -> None:
        reused = f", {state.reused} from the store" if state.reused else ""
        left = "" if state.remaining is None else f", about {write_seconds(state.remaining)} left"
        bar.show(f"{doing}: {state.done} of {count(state.total, 'run')}{reused}{left}", state.fraction)

    return tell
