"""Options of the command line: lists read from text, and errors of the layers below in the words of the options."""

from __future__ import annotations

import re
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
}
_KINDS = {"scaling policy": "--scale", "task": "--task", "init": "--init", "suite": "--suite", "backend": "--backend"}


def read_names(option: str, text: str) -> tuple[str, ...]:
    """The names in a list separated by commas.

    >>> read_names("--scale", "none, sqrt")
    ('none', 'sqrt')
    """
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise InvalidValueError(f"{option} must name at least one value, got {text!r}")
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
        raise InvalidValueError(f"{option} must be {expected} separated by commas, got {text!r}") from None


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Let errors about a path speak of the option that gave it."""
    try:
        yield
    except SqrtdkError as error:
        raise type(error)(str(error).replace("path", option, 1)) from None


def name_options(message: str, options: Iterable[str]) -> str:
    """An error of the layers below in the words of the command line.

    >>> name_options("each of d_ks must be at least 1, got 0", [])
    'each of --d-k must be at least 1, got 0'
    >>> name_options("n·d_k must not exceed 8, got 9", ["--n", "--d-k"])
    '--n times --d-k must not exceed 8, got 9'
    >>> name_options("config.json in 'a' must be JSON, got 3", ["--json"])
    "config.json in 'a' must be JSON, got 3"
    >>> name_options("the model cannot read the text: sizes must match", ["--text"])
    'the model cannot read the text: sizes must match'
    >>> name_options("unknown task 'recal'; known: recall, text", [])
    "--task: unknown task 'recal'; known: recall, text"
    """
    subject, must, rest = message.partition(" must ")
    # After a colon it is somebody else's message that is quoted.
    if must and ":" not in subject:
        named = {option.lstrip("-").replace("-", "_"): option for option in options} | _ARGUMENTS
        # Not within a file's name, as the json of config.json.
        subject = re.sub(r"(?<![-\w./])[a-z_]+(?![\w./])", lambda word: named.get(word[0], word[0]), subject)
        return subject.replace("·", " times ") + must + rest.replace("multiple of heads", "multiple of --heads")
    kind = re.match(r"unknown ([a-z ]+) '", message)
    option = _KINDS.get(kind[1]) if kind else None
    return f"{option}: {message}" if option else message
