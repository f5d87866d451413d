"""The errors sqrtdk raises: every one names the argument, what was expected, what came and what to do."""

import sys
import warnings

__all__ = [
    "FallbackWarning",
    "InvalidTypeError",
    "InvalidValueError",
    "MissingExtraError",
    "SqrtdkError",
    "SqrtdkWarning",
]


class SqrtdkError(Exception):
    """Base of every error that sqrtdk raises on purpose.

    >>> issubclass(InvalidValueError, (SqrtdkError, ValueError))
    True
    """


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


def unknown_name(kind: str, name: str, known: list[str]) -> InvalidValueError:
    """Build the error for a name that is not registered; it lists the known ones and points at the likeliest.

    >>> print(unknown_name("task", "recal", ["recall", "text"]))
    unknown task 'recal'; known: recall, text; did you mean 'recall'?
    """
    from difflib import get_close_matches  # here, so that `import sqrtdk` does not pay for it

    likeliest = get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {likeliest[0]!r}?" if likeliest else ""
    return InvalidValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}{hint}")
