"""Sentences that compare a reader's guess with what was computed."""

from __future__ import annotations

from sqrtdk.wording.numbers import write_number

__all__ = ["CLOSE", "compare_choice", "compare_number", "is_close"]

CLOSE = 1.25
"""A guess is close if neither number is more than this factor times the other."""


def is_close(guess: float, computed: float) -> bool:
    """Tell whether a guess is the computed number, or within the factor `CLOSE` of it.

    >>> is_close(2, 2.13), is_close(3, 2.13), is_close(0, 0)
    (True, False, True)
    """
    least, most = min(guess, computed), max(guess, computed)
    return least == most or 0 < most <= CLOSE * least


def compare_number(guess: float, computed: float) -> str:
    """Compare a guessed number with the computed one.

    >>> compare_number(512, 2.13)
    'Your guess, 512, is 240 times the computed 2.13.'
    >>> compare_number(2, 2.13), compare_number(1, 22.6)
    ('Your guess, 2, is close: 2.13 is computed.', 'The computed 22.6 is 22.6 times your guess, 1.')
    >>> compare_number(3, 0)
    'Your guess is 3, and 0 is computed.'
    """
    told, known = write_number(guess, 3), write_number(computed, 3)
    if is_close(guess, computed):
        return f"Your guess, {told}, is close: {known} is computed."
    smaller, larger = sorted((guess, computed))
    if smaller <= 0:
        return f"Your guess is {told}, and {known} is computed."
    times = write_number(larger / smaller, 3 if larger >= 10 * smaller else 2)
    if guess > computed:
        return f"Your guess, {told}, is {times} times the computed {known}."
    return f"The computed {known} is {times} times your guess, {told}."


def compare_choice(guess: str, right: str) -> str:
    """Compare a chosen answer with the one that the numbers give.

    >>> compare_choice("larger", "larger"), compare_choice("smaller", "larger")
    ('Right: larger.', 'Not “smaller”: the numbers say “larger”.')
    """
    return f"Right: {right}." if guess == right else f"Not “{guess}”: the numbers say “{right}”."
