"""Notifies open watches of calls of modules and of torch's attention function; holds watches weakly."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from torch import nn

from sqrtdk.torch.internals import FunctionCalls, ModuleCalls, is_compiler_loaded, running_eagerly


class Listener(Protocol):
    """Protocol for objects that are notified of module calls."""

    has_compiled: bool
    """Whether any followed module is compiled."""

    spares_work: bool
    """Whether the listener is notified of calls of `F.scaled_dot_product_attention`."""

    def follows(self, module: nn.Module) -> bool:
        """Return whether the listener follows this module."""
        ...

    def count_running(self) -> int:
        """Return the number of followed modules that run in this thread."""
        ...

    def begin_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of a module call."""
        ...

    def run_whole(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the output of a call that only this listener follows and sees as a whole, otherwise NotImplemented."""
        ...

    def note_eager(self) -> None:
        """Handle compiled code that runs eagerly while a followed module runs."""
        ...

    def end_module(self, running: int, output: Any, *, has_failed: bool) -> None:
        """Handle the end of a module call; `running` is the value of `count_running` before the call."""
        ...

    def begin_function(self) -> bool:
        """Handle the start of a call of torch's attention function, and return whether its end matters."""
        ...

    def end_function(self) -> None:
        """Handle the end of that call."""
        ...


_open: list[weakref.ref[Any]] = []
# All watches share one stance, because they end in any order.
_stance = ExitStack()
_is_eager = False


def listen(listener: Listener) -> Callable[[], None]:
    """Notify a listener of every module call from now on, and return a function that ends this.

    Only a weak reference to the listener is kept. Compiled modules run eagerly until the last listener ends.
    """
    global _is_eager
    reference = weakref.ref(listener)
    # Steps that may fail come first, so that a watch that cannot be opened changes nothing.
    if not _is_eager and is_compiler_loaded():
        _stance.enter_context(running_eagerly(_tell_eager))
        _is_eager = True
    _open.append(reference)
    _calls.install(listener.has_compiled)
    if listener.spares_work:
        _functions.install()

    def end() -> None:
        global _is_eager
        if reference in _open:
            _open.remove(reference)
        if not _open:
            _calls.remove()
            _functions.remove()
            _stance.close()
            _is_eager = False

    return end


def _tell_eager() -> None:
    for reference in tuple(_open):
        listener = reference()
        if listener is not None and listener.count_running():
            listener.note_eager()


def _run(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    told = []
    for reference in tuple(_open):
        listener = reference()
        if listener is not None and listener.follows(module):
            told.append((listener, listener.count_running()))
    if not told:
        return call(module, *args, **kwargs)
    if len(told) == 1:
        output = told[0][0].run_whole(module, call, args, kwargs)
        if output is not NotImplemented:
            return output
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
    """Notify every listener of the end of a call, in reverse order of the start."""
    if told:
        listener, running = told.pop()
        try:
            listener.end_module(running, output, has_failed=has_failed)
        finally:
            _end(told, output, has_failed)


def _run_function(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    told = []
    try:
        for reference in tuple(_open):
            listener = reference()
            if listener is not None and listener.spares_work and listener.begin_function():
                told.append(listener)
        return call(*args, **kwargs)
    finally:
        for listener in reversed(told):
            listener.end_function()


_calls = ModuleCalls(_run)
_functions = FunctionCalls(_run_function)
