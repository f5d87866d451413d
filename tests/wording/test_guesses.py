"""Sentences about guesses: the comparison is that of the two numbers, and a close guess is said to be close."""

import re

import pytest

from sqrtdk.wording.guesses import CLOSE, compare_choice, compare_number


@pytest.mark.parametrize("computed", [0.0442, 0.69, 1.0, 2.13, 22.6, 389.4, 1008.0])
@pytest.mark.parametrize("factor", [0.001, 0.5, 0.79, 0.81, 1.0, 1.24, 1.26, 3.0, 480.0])
def test_the_factor_between_guess_and_computed_is_told(computed, factor):
    sentence = compare_number(factor * computed, computed)
    if 1 / CLOSE <= factor <= CLOSE:
        assert "is close" in sentence
        return
    (times,) = re.findall(r"is ([\d.]+) times", sentence)
    assert float(times) == pytest.approx(max(factor, 1 / factor), rel=0.05)
    assert sentence.startswith("Your guess" if factor > 1 else "The computed")


def test_zero_has_no_factor():
    assert compare_number(0, 0) == "Your guess, 0, is close: 0 is computed."
    assert "times" not in compare_number(0, 5) + compare_number(5, 0)


def test_choices_are_right_or_corrected():
    assert compare_choice("a", "a") == "Right: a."
    assert compare_choice("b", "a") == "Not “b”: the numbers say “a”."
