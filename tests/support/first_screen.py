"""Moves the slider and the switch of the first screen to all ends and compares its numbers with Python's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sqrtdk.report.cause import D_KS, START, measure_cause, say_cause


def assert_first_screen_shows_python(page: Any) -> None:
    """Assert that the sentence and its numbers are Python's, at both ends of the slider, divided or not."""
    says, slider = page.locator(".cause-says"), page.locator(".cause input[type=range]")
    assert says.text_content() == say_cause(START, divided=False)
    for divided in (False, True):
        page.set_checked(".cause .divide", divided)
        for key, d_k in (("Home", D_KS[0]), ("End", D_KS[-1])):
            slider.press(key)
            state = replace(START, d_k=d_k)
            assert slider.get_attribute("aria-valuetext") == str(d_k)
            assert says.text_content() == say_cause(state, divided)
            shown = {name: float(value) for name, value in says.evaluate("says => ({...says.dataset})").items()}
            assert shown == pytest.approx(measure_cause(state, divided), rel=1e-9)
            assert page.locator(".cause .walks .thin").count() == page.locator(".cause .bars rect").count() == START.n
    page.click(".cause [data-do=sample]")
    assert says.text_content() == say_cause(replace(state, seed=START.seed + 1), divided=True)


def assert_terms_are_told(page: Any, touch: bool) -> None:
    """Assert that a term shows its meaning within the page when it is pointed at, touched or focused."""
    term = page.locator(".cause .term").nth(2)
    shown = "term => getComputedStyle(term, '::after').content"
    assert term.evaluate(shown) == "none"
    if touch:
        term.tap()
    else:
        term.hover()
    assert term.evaluate(shown) == f'"{term.get_attribute("data-meaning")}"'
    page.mouse.move(0, 0)
    term.focus()
    assert "vectors" in term.evaluate(shown)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
