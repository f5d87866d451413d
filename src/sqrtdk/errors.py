"""Errors and warnings of sqrtdk: each names the argument, what was expected, what came and what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Self

__all__ = [
    "FallbackWarning",
    "InvalidTypeError",
    "InvalidValueError",
    "MissingExtraError",
    "SqrtdkError",
    "SqrtdkWarning",
]

# Tests set this to raise faults of sqrtdk itself; a user's program goes on instead, with the text in a note.
faults_are_raised = False


class SqrtdkError(Exception):
    """Base of every error that sqrtdk raises on purpose; `argument` is the name of the argument it is about, or None.

    Args:
        about: the argument's name; without `says` the whole message.
        says: what is wrong with the argument, the rest of the message.
        mentions: other arguments that `says` names.
        each: the message is about each item of the argument.

    >>> issubclass(InvalidValueError, (SqrtdkError, ValueError))
    True
    >>> error = InvalidValueError("d_ks", "must be at least 1, got 0", each=True)
    >>> error.argument, str(error)
    ('d_ks', 'each of d_ks must be at least 1, got 0')
    """

    def __init__(self, about: str = "", says: str | None = None, *mentions: str, each: bool = False) -> None:
        self.argument = None if says is None else about
        self._rest = (says, mentions, each)
        # Set here because torch.compile cannot trace the base class's __init__.
        self.args = (about if says is None else f"{'each of ' if each else ''}{about} {says}",)

    def rename(self, names: Mapping[str, str]) -> Self:
        """Return the error with other names for its arguments, such as command line options.

        >>> str(InvalidValueError("d_k", "must be at most n, got 9", "n").rename({"d_k": "--d-k", "n": "--n"}))
        '--d-k must be at most --n, got 9'
        >>> str(unknown_name("task", "recal", ["recall"]).rename({"task": "--task"}))[:27]
        "--task: unknown task 'recal"
        """
        name = names.get(self.argument or "")
        says, mentions, each = self._rest
        if name is None:
            return self
        if says is None:
            return type(self)(f"{name}: {self}")
        for mention in mentions:
            says = says.replace(mention, names.get(mention, mention), 1)
        return type(self)(name, says, each=each)


class InvalidValueError(SqrtdkError, ValueError):
    """An argument of the right type with a value, shape or name that cannot be used."""


class InvalidTypeError(SqrtdkError, TypeError):
    """An argument of a type or dtype that cannot be used."""


class MissingExtraError(SqrtdkError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class SqrtdkWarning(UserWarning):
    """Something works, but not as expected; the message says how to change or silence it."""


class FallbackWarning(SqrtdkWarning):
    """A call is computed by another engine than the one asked for; the message gives the reason."""


def warn(message: str, category: type[SqrtdkWarning] = SqrtdkWarning) -> None:
    """Warn at the line outside sqrtdk that made the call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "sqrtdk":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def is_own_call(*modules: str) -> bool:
    """Return whether sqrtdk itself, and not the user, called the given modules, in which this is asked."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(modules):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).split(".")[0] == "sqrtdk"


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """Build the error that says which extra brings a package.

    >>> str(missing_extra("plotly", "report"))
    'plotly is not installed; it comes with: pip install "sqrtdk[report]"'
    """
    return MissingExtraError(f'{package} is not installed; it comes with: pip install "sqrtdk[{extra}]"')


def unknown_name(
    kind: str, name: str, known: list[str], argument: str | None = None, listed_by: str | None = None
) -> InvalidValueError:
    """Build the error for a name that is not registered; it lists the known ones and points at the likeliest.

    Its `argument` is the kind, unless another is given. Where there are too many to list, `listed_by` is the command
    that lists them.

    >>> print(unknown_name("task", "recal", ["recall", "text"]))
    unknown task 'recal'; known: recall, text; did you mean 'recall'?
    >>> print(unknown_name("claim", "x", ["op.code"], listed_by="sqrtdk claims --list"))
    unknown claim 'x'; `sqrtdk claims --list` lists them
    """
    from difflib import get_close_matches  # here, so that `import sqrtdk` does not pay for it

    likeliest = get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {likeliest[0]!r}?" if likeliest else ""
    listed = f"; known: {', '.join(sorted(known))}" if listed_by is None else f"; `{listed_by}` lists them"
    error = InvalidValueError(f"unknown {kind} {name!r}{listed}{hint}")
    error.argument = argument or kind
    return error
