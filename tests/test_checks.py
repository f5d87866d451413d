"""One integer, number or flag: what counts, what is refused, and in which words."""

import math

import numpy as np
import pytest

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError


def test_scalars_of_numpy_become_pythons():
    for value in (3, np.int8(3), np.uint64(3)):
        assert type(checks.integer("n", value, 1, 3)) is int
    for value in (3, 3.0, np.float16(3), np.int32(3)):
        assert type(checks.number("x", value, above=0.0)) is float
    assert checks.flag("causal", np.False_) is False


@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float64(1), "1", None, [1]])
def test_values_that_are_no_integer(value):
    with pytest.raises(InvalidTypeError, match="n must be an integer, got "):
        checks.integer("n", value)


@pytest.mark.parametrize("value", [True, np.True_, 1j, np.complex64(1), "1", None, np.ones(1)])
def test_values_that_are_no_number(value):
    with pytest.raises(InvalidTypeError, match="x must be a number, got "):
        checks.number("x", value)


@pytest.mark.parametrize("value", [0, 1, 0.0, "yes", None, np.ones(1, bool)])
def test_values_that_are_no_flag(value):
    with pytest.raises(InvalidTypeError, match="causal must be True or False, got "):
        checks.flag("causal", value)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda: checks.integer("n", 1, 2), "n must be at least 2, got 1"),
        (lambda: checks.integer("n", 9, 2, 8), "n must be from 2 to 8, got 9"),
        (lambda: checks.integer("ns", 1, 2, each=True), "each of ns must be at least 2, got 1"),
        (lambda: checks.number("x", math.nan), "x must be finite, got nan"),
        (lambda: checks.number("x", -math.inf), "x must be finite, got -inf"),
        (lambda: checks.number("x", 10**400), "x must be finite, got 1000"),
        (lambda: checks.number("x", np.float32(0), above=0.0), "x must be positive and finite, got 0.0"),
        (lambda: checks.number("x", 2, above=2.0), "x must be above 2 and finite, got 2"),
        (lambda: checks.number("x", math.nan, above=0.0, finite=False), "x must be positive, got nan"),
    ],
)
def test_values_out_of_bounds(check, text):
    with pytest.raises(InvalidValueError, match=f"^{text}"):
        check()
    assert checks.number("x", math.inf, finite=False) == math.inf
