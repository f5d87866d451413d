"""Numbers as text, in Python and in the pages' script, and what readers see above a column and in a cell."""

import json
import random
import re
from importlib import resources

import pytest

from browser import open_browser, open_page
from sqrtdk.wording import numbers
from sqrtdk.wording.numbers import write_number, write_percent
from sqrtdk.wording.quantities import format_cell, title_column

SCRIPT = (resources.files("sqrtdk.wording") / "numbers.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-3.2, "−3.2"),
        (1234.5678, "1235"),
        (12345.678, "12346"),
        (123456.0, "1.2·10⁵"),
        (-4.5e-5, "−4.5·10⁻⁵"),
        (float("inf"), "∞"),
        (float("nan"), "–"),
        (False, "no"),
        ([0.1, None], "0.1 to –"),
        ([1, 2, 3], "1, 2, 3"),
        ({"a": 1}, "a 1"),
    ],
)
def test_cells(value, text):
    assert format_cell(value) == text


def test_a_pair_of_layers_is_not_written_as_an_interval():
    assert format_cell([1.2, 0.9], "temperature_by_layer") == "1.2, 0.9"
    assert format_cell([0.9, 1.2], "temperature_range") == "0.9 to 1.2"


def test_columns_have_readable_titles():
    assert title_column("jacobian_trace_p5") == "1 − Σp² 5th percentile"
    assert title_column("entropy_ratio_low") == "H/ln n 95% from"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0078125, 4, "0.007812"),
        (9.96, 2, "10"),
        (389.4, 2, "389"),
        (99999.5, 3, "100000"),
        (-0.00042, 3, "−4.2·10⁻⁴"),
    ],
)
def test_digits(value, digits, text):
    assert write_number(value, digits) == text


def test_the_pages_have_the_same_constants():
    (line,) = re.findall(r"export const DIGITS = (\S+), LEAST = (\S+), MOST = (\S+);", SCRIPT)
    assert [float(number) for number in line] == [numbers.DIGITS, numbers.LEAST, numbers.MOST]


@pytest.mark.long
def test_the_pages_write_numbers_as_python_does():
    rng = random.Random(0)
    values = [
        0.0,
        1e-3,
        1e5,
        999.95,
        9.995,
        99999.5,
        *(step / 2**power for step in range(1, 500, 7) for power in range(12)),
    ]
    values += [rng.choice((-1, 1)) * 10 ** rng.uniform(-8, 8) for _ in range(2000)]
    shares = [rng.random() ** 8 for _ in range(200)]
    script = SCRIPT.replace("export ", "")
    ask = f"""() => {{ {script}
        return [{json.dumps(values)}.flatMap((value) => [2, 3, 4].map((digits) => writeNumber(value, digits))),
                {json.dumps(shares)}.map(writePercent)]; }}"""
    with open_browser() as browser, open_page(browser) as (page, _, _):
        texts, percents = page.evaluate(ask)
    assert texts == [write_number(value, digits) for value in values for digits in (2, 3, 4)]
    assert percents == [write_percent(share) for share in shares]
