"""What long commands say on stderr while they work: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sqrtdk.display import count
from sqrtdk.spelling import spell

# What is over sooner needs no words; then a line now and again shows that it goes on.
_FIRST_SECONDS = 2.0
_LINE_SECONDS = 5.0


class Bar(Protocol):
    """Says what is going on, how far it is and how long it may take."""

    def show(self, description: str, fraction: float | None = None) -> None:
        """Say what is going on and which share of it is done, if that is known."""


class _Lines:
    """A line on a stream after two seconds and every five from then on, written by a thread: work need not call it."""

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
    """Progress on stderr while a command works; nothing of it stays on a terminal.

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
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("", total=1.0)

        class Drawn:
            def show(self, description: str, fraction: float | None = None) -> None:
                words = escape(spell(description, sys.stderr.encoding))
                total = None if fraction is None else 1.0  # without a total the bar only moves
                drawn.update(task, description=words, completed=fraction or 0.0, total=total)

        yield Drawn()


def follow(bar: Bar, doing: str) -> Callable[[Any], None]:
    """A callback that shows the lab's progress."""

    def tell(state: Any) -> None:
        reused = f", {state.reused} from the store" if state.reused else ""
        left = "" if state.remaining is None else f", about {_say_seconds(state.remaining)} left"
        bar.show(f"{doing}: {state.done} of {count(state.total, 'run')}{reused}{left}", state.fraction)

    return tell


def _say_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
