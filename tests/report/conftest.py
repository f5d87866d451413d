"""Fixtures of the report's browser tests: the browser, and a report of every kind of record as a file."""

import pytest

from browser import open_browser
from example_records import story
from sqrtdk.report import render_report


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_report(story()), encoding="utf-8")
    return path.as_uri()
