"""Options of the command line: lists read from text, and errors of the layers below in the words of the options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqrtdk.errors import InvalidValueError, SqrtdkError

# What the layers below call an argument, where that is not the option's own name.
_ARGUMENTS = {
    "d_ks": "--d-k",
    "ns": "--n",
    "relatives": "--relative",
    "scales": "--scale",
    "lrs": "--lr",
    "inits": "--init",
    "suites": "--suite",
    "ids": "the claims",
    "count": "--threads",
    "n·d_k": "--n times --d-k",
}


def read_names(option: str, text: str) -> tuple[str, ...]:
    """The names in a list separated by commas.

    >>> read_names("--scale", "none, sqrt")
    ('none', 'sqrt')
    """
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise InvalidValueError(option, f"must name at least one value, got {text!r}")
    return parts


def read_numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """The numbers in a list separated by commas.

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
    """Let errors about an argument speak of the option that gave it."""
    try:
        yield
    except SqrtdkError as error:
        raise error.rename({argument: option}) from None


def name_options(error: SqrtdkError, options: Iterable[str]) -> str:
    """An error of the layers below in the words of the command line.

    >>> name_options(InvalidValueError("d_ks", "must be at least 1, got 0", each=True), [])
    'each of --d-k must be at least 1, got 0'
    >>> name_options(InvalidValueError("n·d_k", "must not exceed 8, got 9"), ["--n", "--d-k"])
    '--n times --d-k must not exceed 8, got 9'
    >>> name_options(InvalidValueError("config.json in 'a' must be JSON, got 3"), ["--json"])
    "config.json in 'a' must be JSON, got 3"
    """
    own = {option.lstrip("-").replace("-", "_"): option for option in options}
    return str(error.rename(own | _ARGUMENTS))
