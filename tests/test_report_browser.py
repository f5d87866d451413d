"""The report in a real browser: figures are drawn, the filter filters, no script fails."""

import re
import subprocess

import pytest

from example_records import every_kind
from sqrtdk.report import figure_for, render_report

pytestmark = pytest.mark.long

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=15000",
    "--window-size=1100,3000",
    "--dump-dom",
]
CATCH = "<script>window.addEventListener('error', e => { document.title += ' ERROR ' + e.message; });</script>"
CLICK = "<script>document.querySelector('.filter button[data-verdict=wrong]').click();</script>"


@pytest.fixture(scope="module")
def dom(tmp_path_factory):
    """The page's elements after its scripts ran and the filter for wrong claims was clicked."""
    folder = tmp_path_factory.mktemp("browser")
    page = render_report(every_kind())
    page = page.replace("<head>", f"<head>{CATCH}", 1).replace("</body>", f"{CLICK}</body>", 1)
    (folder / "report.html").write_text(page, encoding="utf-8")
    done = subprocess.run(
        ["chromium", *FLAGS, f"--user-data-dir={folder / 'profile'}", (folder / "report.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    return done.stdout


def test_no_script_failed(dom):
    assert "<title>Why √dₖ? A report by sqrtdk</title>" in dom


def test_every_panel_is_drawn(dom):
    panels = sum(len(figure_for(record).panels) for record in every_kind().values())
    assert panels > 10
    assert len(re.findall(r'<svg class="main-svg"[^>]*>\s*<defs', dom)) >= panels


def test_the_filter_hides_what_is_not_asked_for(dom):
    rows = re.findall(r'<tr data-verdict="(\w+)"[^>]*?( hidden="")?>', dom)
    assert {verdict for verdict, hidden in rows if not hidden} == {"wrong"}
    assert {verdict for verdict, hidden in rows if hidden} >= {"holds"}
