"""The Runs page in a real browser: runs are compared, exported and deleted, also by keyboard and on a phone."""

import re
from pathlib import Path

import pytest

from browser import open_browser, open_page
from sqrtdk.lab import RunRecord, RunSpec, Store
from sqrtdk.lab.run_tables import compare_runs, export_runs
from sqrtdk.lab.store import CURVES, identify_run
from sqrtdk.records.record import tabulate
from web_server import serving

pytestmark = pytest.mark.long

SPECS = [RunSpec(seed=seed, scale=scale) for seed in range(3) for scale in ("none", "sqrt")]
UNFINISHED = "f" * 16
PHONE = {"viewport": {"width": 390, "height": 844}}
DESK = {"viewport": {"width": 1280, "height": 900}}


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        for number, spec in enumerate(SPECS):
            row = {**identify_run(spec), "status": "done", "final_loss": 0.5 + number, "solved": False}
            store.put(spec, RunRecord(row, {name: [0.5, 1.5] for name in CURVES}))
        store.checkpoints.put(UNFINISHED, bytes(2500))
    return path


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def page(request, browser, path):
    """The Runs page after it has read the store; no error may have come up when the test is over."""
    with serving("--store", path) as running, open_page(browser, **request.param) as (page, errors, _):
        page.goto(running.address + "runs")
        page.wait_for_selector("#runs tbody tr", timeout=30000)
        yield page
        assert [error for error in errors if "status of 400" not in error] == []  # a refusal is no fault of the page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def select(page, *keys):
    for key in keys:
        page.check(f'tr[data-key="{key}"] [aria-label^="select"]')


def list_keys(path):
    with Store(path, read_only=True) as store:
        return {row["key"] for row in store.runs(100)}, store.checkpoints.list_keys()


def wait_for_rows(page, number):
    page.wait_for_function(
        "number => document.querySelectorAll('#runs tbody tr').length === number", arg=number, timeout=30000
    )


def test_selected_runs_are_compared_as_by_the_command(page, path):
    keys = [SPECS[0].key, SPECS[3].key]
    assert page.locator("#compare").is_disabled()
    select(page, *keys)
    assert page.locator("#selected").text_content() == "2 runs selected"
    page.click("#compare")
    page.wait_for_selector("#differences tbody tr", timeout=30000)
    shown_keys = page.locator("#differences thead th").all_text_contents()[1:]
    assert set(shown_keys) == set(keys)
    with Store(path, read_only=True) as store:
        differences = compare_runs(store, shown_keys).tables["differences"]
    rows = [tuple(row.locator("th, td").all_text_contents()) for row in page.locator("#differences tbody tr").all()]
    assert rows == list(tabulate(differences).rows)
    assert {"seed", "final_loss"} <= {row["name"] for row in differences}
    assert page.evaluate("document.activeElement.id") == "comparison"
    select(page, UNFINISHED)  # has no results to compare
    assert page.locator("#compare").is_disabled()


@pytest.mark.parametrize("curves", [False, True])
def test_a_download_has_the_bytes_of_the_command(page, path, curves):
    with page.expect_download() as download:
        page.click("#export-curves" if curves else "#export")
    with Store(path, read_only=True) as store:
        assert Path(download.value.path()).read_bytes() == export_runs(store, curves=curves)[0]
    assert download.value.suggested_filename == ("curves.csv" if curves else "runs.csv")


def test_a_deletion_is_confirmed_by_name_and_keys_alone_will_do(page, path):
    everything = list_keys(path)
    doomed = SPECS[1].key
    for key in (doomed, UNFINISHED):
        page.focus(f'tr[data-key="{key}"] [aria-label^="select"]')
        page.keyboard.press("Space")
        assert page.evaluate("document.activeElement.checked")
    page.focus("#delete")
    page.keyboard.press("Enter")
    title = page.locator("#deletion-title").text_content()
    assert title == "Delete 2 runs and the checkpoints of 1 run (3 kB)?"
    named = page.locator("#deletion-runs li").all_text_contents()
    assert [re.search(r"[0-9a-f]{16}", text)[0] for text in named] == [doomed, UNFINISHED]
    assert "with checkpoints" in named[1]
    assert "with checkpoints" not in named[0]
    box = page.locator("#deletion").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]
    for leave in ("Escape", "Enter"):  # the focus is on Keep
        assert page.evaluate("document.activeElement.id") == "keep"
        page.keyboard.press(leave)
        page.wait_for_function("() => !document.querySelector('#deletion').open")
        assert list_keys(path) == everything
        assert page.evaluate("document.activeElement.id") == "delete"
        page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "confirm"
    page.keyboard.press("Enter")
    wait_for_rows(page, len(SPECS) - 1)
    assert list_keys(path) == (everything[0] - {doomed}, [])
    assert page.locator("#selected").text_content() == "2 runs deleted, checkpoints of 1 run too."
    page.wait_for_timeout(2500)  # a poll later nothing has come back
    wait_for_rows(page, len(SPECS) - 1)
    assert page.locator("#selected").text_content() == "2 runs deleted, checkpoints of 1 run too."


def test_while_a_driver_holds_the_store_the_reason_is_shown_and_all_stays(page, path):
    everything = list_keys(path)
    page.click("#select-all")
    with Store(path):
        page.click("#delete")
        page.click("#confirm")
        page.wait_for_selector("#refusal:not([hidden])", timeout=30000)
        assert re.match(r"runs\.sqlite is in use by process \d+ on ", page.locator("#refusal").text_content()[6:])
        assert page.locator("#deletion").is_visible()
    page.click("#keep")
    assert list_keys(path) == everything


def test_focus_stays_on_a_box_while_the_list_changes(page, path):
    page.focus(f'tr[data-key="{SPECS[0].key}"] [aria-label^="plot"]')
    page.keyboard.press("Space")
    assert not page.evaluate("document.activeElement.checked")
    with Store(path) as store:
        store.put(RunSpec(seed=9), RunRecord({"status": "done", "seed": 9}, {}))
    wait_for_rows(page, len(SPECS) + 2)
    assert page.evaluate("document.activeElement.dataset.box") == f"plot {SPECS[0].key}"


def test_a_curve_that_runs_lack_is_missing_and_not_zero(browser, tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        for seed in range(3):
            curves = {"step": [0, 10, 20], "loss": [3.0, 2.0, 1.0]}
            curves |= {"pressure": [0.5, None, -0.25]} if seed else {}  # an earlier version stored the first
            row = {"status": "done", "seed": seed, "scale": "sqrt", "d_k": 64, "final_loss": 1.0}
            store.put(RunSpec(seed=seed), RunRecord(row, curves))
    with serving("--store", path) as running, open_page(browser, **DESK) as (page, errors, _):
        page.goto(running.address + "runs")
        page.wait_for_function("() => document.querySelector('#curves').data?.length === 3", timeout=30000)
        page.select_option("#curve", "pressure")
        assert page.evaluate("document.querySelector('#curves').data.map(one => one.y)") == [[0.5, None, -0.25]] * 2
        caption = page.locator("#curves-caption").text_content()
        assert caption.endswith("Runs that have not recorded this curve, and are left out: 1.")
        assert "Below 0 the loss would fall with sharper attention" in caption
        page.select_option("#curve", "temperature")
        assert page.evaluate("document.querySelector('#curves').data") == []
        assert page.locator("#curves-title").text_content() == "None of the chosen runs has recorded this curve"
        assert errors == []
