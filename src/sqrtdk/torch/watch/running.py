"""Tells the watches that are open which modules run; a watch that nobody holds any more closes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from sqrtdk.torch.internals import ModuleCalls


class Listener(Protocol):
    """What is told about calls of modules."""

    has_compiled: bool
    """Whether modules that it follows are compiled."""

    def follows(self, module: nn.Module) -> bool:
        """Whether it wants to know of this module."""
        ...

    def count_running(self) -> int:
        """How many of the modules that it follows run in this thread."""
        ...

    def begin_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is about to run."""
        ...

    def end_module(self, running: int, output: Any, *, has_failed: bool) -> None:
        """A module has ended; `running` is what `count_running` gave before it began."""
        ...


_open: list[weakref.ref[Any]] = []
# One for all of them: they end in any order.
_stance = ExitStack()
_is_eager = False


def listen(listener: Listener) -> Callable[[], None]:
    """Tell a listener of every call of a module from now on; returns what ends that. It keeps no one alive.

    Compiled modules run eagerly meanwhile.
    """
    global _is_eager
    reference = weakref.ref(listener)
    _open.append(reference)
    _calls.install(listener.has_compiled)
    if not _is_eager and is_compiler_loaded():
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _is_eager = True

    def end() -> None:
        global _is_eager
        if reference in _open:
            _open.remove(reference)
        if not _open:
            _calls.remove()
            _stance.close()
            _is_eager = False

    return end


def is_compiler_loaded() -> bool:
    """Whether something may be compiled; importing the compiler to ask it would take a second."""
    return "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules


def _run(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    told = []
    for reference in tuple(_open):
        listener = reference()
        if listener is not None and listener.follows(module):
            told.append((listener, listener.count_running()))
    if not told:
        return call(module, *args, **kwargs)
    output, has_failed = None, True
    try:
        for listener, _ in told:
            listener.begin_module(module, args, kwargs)
        output = call(module, *args, **kwargs)
        has_failed = False
    finally:
        _end(told, output, has_failed)
    return output


def _end(told: list[tuple[Any, int]], output: Any, has_failed: bool) -> None:
    """The last that was told of the beginning is the first to be told of the end, and all are."""
    if told:
        listener, running = told.pop()
        try:
            listener.end_module(running, output, has_failed=has_failed)
        finally:
            _end(told, output, has_failed)


_calls = ModuleCalls(_run)
