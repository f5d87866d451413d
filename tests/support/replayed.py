"""Compares a replay in a browser with Python: its cells, its curves and the lines below its maps."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

from sqrtdk.report.replay import Run, draw_map, say_run

_CELLS = """svg => [svg.getAttribute("viewBox"), ...[...svg.children].map((one) =>
  [one.tagName, Object.fromEntries([...one.attributes].map((at) => [at.name, at.value])), one.textContent])]"""


def assert_replay_is_python(page: Any, runs: Sequence[Run], step: int) -> None:
    """Assert that every run shows its map, its loss so far and its line as Python has them at a step."""
    assert page.locator(".replay output").text_content() == str(step)
    figures = page.locator(".replay-runs figure")
    assert figures.count() == len(runs)
    for figure, run in zip(figures.all(), runs, strict=True):
        assert figure.locator("figcaption").text_content() == run["name"]
        assert figure.locator(".replay-says").text_content() == say_run(run, step)
        place = max(at for at, one in enumerate(run["maps"]["steps"]) if one <= step)
        drawn = ElementTree.fromstring(draw_map(run["maps"], place, run["colour"], ""))
        expected = [[child.tag, child.attrib, child.text or ""] for child in drawn]
        assert figure.locator(".replay-map").evaluate(_CELLS) == [drawn.attrib["viewBox"], *expected]
        curve = figure.locator(".replay-loss .curve").last.get_attribute("d")
        assert curve.count("M") + curve.count("L") == sum(at <= step for at in run["step"])
