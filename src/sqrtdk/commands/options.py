"""Options of the command line: lists read from text, and errors that name options instead of Python arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqrtdk.errors import InvalidValueError, SqrtdkError

# Arguments of the layers below whose option has another name.
_ARGUMENTS = {
    "d_ks": "--d-k",
    "ns": "--n",
    "relatives": "--relative",
    "scales": "--scale",
    "lrs": "--lr",
    "inits": "--init",
    "tasks": "--task",
    "lengths": "--n",
    "suites": "--suite",
    "ids": "IDS",
    "count": "--threads",
    "n·d_k": "--n times --d-k",
}


def read_names(option: str, text: str) -> tuple[str, ...]:
    """Return the names in a list separated by commas.

    >>> read_names("--scale", "none, sqrt")
    ('none', 'sqrt')
    """
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise InvalidValueError(option, f"must name at least one value, got {text!r}")
    return parts


def read_numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """Return the numbers in a list separated by commas.

    >>> read_numbers("--d-k", "4,64", int)
    (4, 64)
    """
    try:
        return tuple(kind(part) for part in read_names(option, text))
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise InvalidValueError(option, f"must be {expected} separated by commas, got {text!r}") from None


@contextmanager
def naming(option: str, argument: str = "path") -> Iterator[None]:
    """Let errors about an argument name the option that gave it."""
    try:
        yield
    except SqrtdkError as error:
        raise error.rename({argument: option}) from None


def name_options(error: SqrtdkError, options: Iterable[str]) -> str:
    """Return the message of an error with options in place of Python arguments.

    >>> name_options(InvalidValueError("d_ks", "must be at least 1, got 0", each=True), [])
    'each of --d-k must be at least 1, got 0'
    >>> name_options(InvalidValueError("n·d_k", "must not exceed 8, got 9"), ["--n", "--d-k"])
    '--n times --d-k must not exceed 8, got 9'
    >>> name_options(InvalidValueError("config.json in 'a' must be JSON, got 3"), ["--json"])
    "config.json in 'a' must be JSON, got 3"
    """
    own = {option.lstrip("-").replace("-", "_"): option for option in options}
    return str(error.rename(own | _ARGUMENTS))
