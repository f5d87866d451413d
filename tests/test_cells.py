"""What readers see above a column and in a cell."""

import pytest

from sqrtdk.cells import format_cell, title_column


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-3.2, "−3.2"),
        (1234.5678, "1235"),
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


def test_two_layers_are_no_interval():
    assert format_cell([1.2, 0.9], "temperature_by_layer") == "1.2, 0.9"
    assert format_cell([0.9, 1.2], "temperature_range") == "0.9 to 1.2"


def test_columns_have_readable_titles():
    assert title_column("jacobian_trace_p5") == "1 − Σp² 5th percentile"
    assert title_column("entropy_ratio_low") == "H/ln n 95% from"
