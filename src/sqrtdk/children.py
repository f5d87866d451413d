"""One guarded child process: it answers through a pipe, and one that hangs or dies loses itself and no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Child", "ChildError", "answer_questions", "interrupts_asked", "interrupts_held"]

Serve = Callable[[Connection], None]


class ChildError(Exception):
    """A child gave no answer; the message says why."""


class Child:
    """A spawned process that runs `serve` with its end of a pipe, and ends with this process at the latest.

    Args:
        serve: a function of a module; it returns, or raises EOFError or OSError, when the other end is gone.
        name: of the process.
        quiet: discard what the process prints.
    """

    def __init__(self, serve: Serve, name: str, *, quiet: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs, serve, quiet), name=name, daemon=True)
        with interrupts_held():
            self.process.start()
        theirs.close()  # else the child's end would never read as closed here

    def ask(self, question: Any, seconds: float) -> None:
        """Send a question to `answer_questions` over there, to be answered within so many seconds."""
        self._seconds, self.deadline = seconds, time.monotonic() + seconds
        with suppress(OSError):  # the process has ended, as the answer will say
            self.connection.send(question)

    def answer(self) -> Any:
        """Return the answer to the question asked last, or wait for it.

        Raises:
            ChildError: the question raised an exception, the process ended, or it did not answer in time.
        """
        try:
            if not self.connection.poll(max(self.deadline - time.monotonic(), 0.0)):
                raise ChildError(f"not finished within {self._seconds:.0f} s")
            is_answer, content = self.connection.recv()
        except (EOFError, OSError):
            raise ChildError(f"its process ended with code {self.end()}") from None
        if not is_answer:
            raise ChildError(content)
        return content

    def end(self) -> int | None:
        """Wait for the end of the process and return its exit code."""
        self.process.join()
        return self.process.exitcode

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def answer_questions(connection: Connection, answer: Callable[[Any], Any]) -> None:
    """Answer questions until the other end is gone; an exception is an answer too."""
    while True:
        question = connection.recv()
        try:
            reply = (True, answer(question))
        except Exception as error:  # whatever it is, the other end shows it
            reply = (False, f"{type(error).__name__}: {error}")
        connection.send(reply)


def _live(connection: Connection, serve: Serve, quiet: bool) -> None:
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    try:
        serve(connection)
    except (EOFError, OSError):
        return  # the parent was killed or has closed its end


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while a process is started; the caller gets an interrupt that came meanwhile right after.

    Blocking the signal is for the new process, which inherits that: it imports for seconds before its work begins. For
    the caller it is not enough, since any other thread may receive the signal: a start that is broken off between fork
    and the last byte of its data leaves a process that reads half a pickle and complains.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it sets the mask itself when it is first started
    interrupts: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Other threads are never interrupted; a handler that was not set from Python (None) could not be set again.
    is_handled = threading.current_thread() is threading.main_thread() and handler is not None
    if is_handled:
        signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_handled:
            signal.signal(signal.SIGINT, handler)
            if interrupts and callable(handler):
                handler(signal.SIGINT, None)  # not raised again: it would count as a second Ctrl-C
            elif interrupts:
                signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupts_asked() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed, for work that ends in order; a second one interrupts.

    Outside the main thread, and where Ctrl-C is ignored, it is never told.
    """
    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield lambda: False
        return

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
