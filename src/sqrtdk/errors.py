"""The errors sqrtdk raises: every one names the argument, what was expected, what came and what to do."""

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


class SqrtdkError(Exception):
    """Base of every error that sqrtdk raises on purpose; `argument` is the name of the argument it is about, or None.

    Args:
        about: the argument's name; without `says` the whole message.
        says: what is wrong with the argument: the message goes on with it.
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
        # Not by the base class, whose own start torch.compile cannot trace.
        self.args = (about if says is None else f"{'each of ' if each else ''}{about} {says}",)

    def rename(self, names: Mapping[str, str]) -> Self:
        """The same error with other names for its arguments, as those of options.

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
    """Something works, but not as one would expect it to; the message says how to change that or to silence it."""


class FallbackWarning(SqrtdkWarning):
    """Another engine computes a call than the one that was asked for; the message gives the reason."""


def warn(message: str, category: type[SqrtdkWarning] = SqrtdkWarning) -> None:
    """Warn at the line that called sqrtdk, whatever lies between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "sqrtdk":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """Build the error that says which extra brings a package.

    >>> str(missing_extra("plotly", "report"))
    'plotly is not installed; it comes with: pip install "sqrtdk[report]"'
    """
    return MissingExtraError(f'{package} is not installed; it comes with: pip install "sqrtdk[{extra}]"')


def unknown_name(kind: str, name: str, known: list[str], argument: str | None = None) -> InvalidValueError:
    """Build the error for a name that is not registered; it lists the known ones and points at the likeliest.

    Its `argument` is the kind, unless another is given.

    >>> print(unknown_name("task", "recal", ["recall", "text"]))
    unknown task 'recal'; known: recall, text; did you mean 'recall'?
    """
    from difflib import get_close_matches  # here, so that `import sqrtdk` does not pay for it

    likeliest = get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {likeliest[0]!r}?" if likeliest else ""
    error = InvalidValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}{hint}")
    error.argument = argument or kind
    return error
