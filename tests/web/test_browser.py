"""The pages in a real browser: numbers are Python's, links restore, old answers stay behind, names do not execute."""

import json
import math
import time

import pytest

from browser import open_browser, open_page
from example_records import make_ablation
from first_screen import assert_first_screen_shows_python, assert_terms_are_told
from replayed import assert_replay_is_python
from scripts import run_script
from sqrtdk import theory
from sqrtdk.audits import read_shipped
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import CURVES, RunRecord, Store, identify_run
from sqrtdk.report.replay import choose_runs, say_run
from sqrtdk.report.words import measure_row, read_sentences
from sqrtdk.web.explore_query import BOUNDS, POLICIES, Experiment
from sqrtdk.web.measurement import measure
from sqrtdk.web.presets import PRESETS
from sqrtdk.web.vectors import sample
from web_server import serving

pytestmark = pytest.mark.long

HOSTILE = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg onload=window.hacked=1>",
    '"><script>window.hacked=1</script>',
    "'><img src=x onerror=window.hacked=1>",
    "</title><script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    '<a href="javascript:window.hacked=1">x</a>',
    "javascript:window.hacked=1",
    "<iframe srcdoc='<script>parent.hacked=1</script>'>",
    "<b onmouseover=window.hacked=1>bold</b>",
    "{{constructor.constructor('window.hacked=1')()}}",
    "${window.hacked=1}",
    "`;window.hacked=1;`",
    "';window.hacked=1;'",
    '";window.hacked=1;"',
    "\\u003cscript\\u003ewindow.hacked=1\\u003c/script\\u003e",
    "&lt;script&gt;window.hacked=1&lt;/script&gt;",
    "%3Cscript%3Ewindow.hacked=1%3C/script%3E",
    "<style>body{display:none}</style>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<form action=//evil.example><input name=x>",
    "<object data=//evil.example></object>",
    "<math><mi xlink:href='javascript:window.hacked=1'>x</mi></math>",
    "<sup>1</sup><br>two<br/>lines",
    "%{x}%{customdata}<extra></extra>",
    "__proto__",
    "constructor",
    "toString",
    "\u202eright to left",
    "zero\u200bwidth",
    "null\u0000byte",
    "new\nline\r\nand\ttab",
    "🧪 emoji 👩‍🔬",
    "ﷺ" * 20,
    "Z͑ͫa̴l̷g̸o̵" * 5,
    "a" * 3000,
    "../../etc/passwd",
    "file:///etc/passwd",
    "//evil.example/x.js",
    "' OR 1=1; DROP TABLE runs; --",
    "\\",
    "\\'\\\"",
    "<!-- comment",
    "]]>",
    "<?php echo 1 ?>",
    " ",
    "<",
]


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.fixture
def explore(browser, server):
    """The Explore page after its first answer; no error may have come up when the test is over."""
    with open_page(browser, viewport={"width": 1280, "height": 900}) as (page, errors, _):
        page.goto(server.address)
        wait_for_answer(page)
        yield page
        assert errors == []


def wait_for_answer(page, at_least=1):
    page.wait_for_function(
        "least => Number(document.body.dataset.answered ?? 0) >= least && document.body.ariaBusy === 'false'",
        arg=at_least,
        timeout=30000,
    )


def answered(page):
    return int(page.evaluate("document.body.dataset.answered ?? 0"))


def change(page, act):
    """Do something that asks the server, and wait for its answer."""
    before = answered(page)
    act()
    wait_for_answer(page, before + 1)
    page.wait_for_timeout(60)  # a coalesced second question
    wait_for_answer(page, before + 1)


def shown_numbers(page):
    cells = page.eval_on_selector_all(
        "#numbers td[data-quantity]", "cells => cells.map(c => [c.dataset.scale, c.dataset.quantity, c.dataset.value])"
    )
    return {(scale, quantity): math.nan if value is None else float(value) for scale, quantity, value in cells}


def read_query(page):
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.search))")


def assert_shows_python(page):
    """Every number in the table is the one that Python computes for the query in the address bar."""
    assert page.locator("#error").is_hidden(), page.locator("#error").text_content()
    asked = Experiment.read(read_query(page))
    answer = measure(asked, sample(asked))
    expected = {
        (scale, quantity): value
        for scale, column in answer["columns"].items()
        for quantity, value in column["values"].items()
    }
    shown = shown_numbers(page)
    assert shown.keys() == expected.keys()
    assert shown == pytest.approx(expected, rel=1e-12, nan_ok=True)
    rows = run_script(page.locator("#python").text_content())["result"].statistics
    chosen = answer["chosen"]
    assert shown[chosen, "entropy_ratio"] == pytest.approx(float(rows.mean("entropy_ratio")), rel=1e-12)
    return asked


def test_the_first_screen_shows_the_numbers_of_python(explore):
    assert_first_screen_shows_python(explore)
    assert_terms_are_told(explore, touch=False)


@pytest.mark.parametrize("name", ["d_k", "n", "t", "correlation", "mean_q", "mean_k"])
def test_sliders_go_to_both_ends_by_keyboard(explore, name):
    explore.fill("#n", "64") if name != "n" else None
    for key, end in (("End", BOUNDS[name].largest), ("Home", BOUNDS[name].least)):
        explore.focus(f"#{name}-slider")
        change(explore, lambda key=key: explore.keyboard.press(key))
        assert float(explore.input_value(f"#{name}")) == end
        assert getattr(assert_shows_python(explore), name) == end
    assert explore.get_attribute(f"#{name}-slider", "aria-valuetext") == explore.input_value(f"#{name}")


def test_both_sizes_at_their_largest(explore):
    explore.fill("#d_k", "1024")
    change(explore, lambda: explore.fill("#n", "8192"))
    assert_shows_python(explore)


def test_every_choice_is_computed(explore):
    change(explore, lambda: explore.fill("#n", "40"))
    for control in ("policy", "distribution", "dtype"):
        for value in explore.eval_on_selector_all(f"#{control} option", "all => all.map(one => one.value)"):
            if explore.input_value(f"#{control}") != value:
                change(explore, lambda control=control, value=value: explore.select_option(f"#{control}", value))
            assert getattr(assert_shows_python(explore), control) == value
            if control == "policy" and POLICIES[value] is not None:
                bounds = POLICIES[value]
                for end in (bounds.least, bounds.largest):
                    change(explore, lambda end=end: explore.fill("#parameter", repr(end)))
                    assert assert_shows_python(explore).parameter == end
    change(explore, lambda: explore.click("#again"))
    assert assert_shows_python(explore).seed == 1


def test_presets_and_links_restore_the_state(explore, browser, server):
    for preset in PRESETS[1::2]:
        change(explore, lambda preset=preset: explore.click(f'#presets button[data-title="{preset.title}"]'))
        assert_shows_python(explore)
        assert preset.says in explore.locator("#says").text_content()
        with open_page(browser) as (other, errors, _):
            other.goto(explore.url)
            wait_for_answer(other)
            assert read_query(explore).items() <= {**dict.fromkeys(read_query(explore)), **read_query(other)}.items()
            assert shown_numbers(other) == shown_numbers(explore)
            assert other.locator('#presets button[aria-pressed="true"]').get_attribute("data-title") == preset.title
            assert errors == []


@pytest.mark.parametrize(
    ("control", "value", "told"),
    [
        ("d_k", "5000", "dₖ must be a whole number from 1 to 1024, got 5000"),
        ("n", "2.5", "n must be a whole number from 2 to 8192, got 2.5"),
        ("t", "", "t must be a number from 0.1 to 10, got nothing"),
        ("seed", "-1", "seed must be a whole number from 0 to 4294967295, got -1"),
    ],
)
def test_a_wrong_number_is_told_and_the_page_lives_on(explore, control, value, told):
    change(explore, lambda: explore.fill(f"#{control}", value))
    assert explore.locator("#error").text_content() == told
    change(explore, lambda: explore.click("#reset"))
    assert_shows_python(explore)


def test_results_under_an_error_are_dimmed(explore):
    opacity = "() => Number(getComputedStyle(document.querySelector('#cards')).opacity)"
    assert explore.evaluate(opacity) == 1
    change(explore, lambda: explore.fill("#d_k", "5000"))
    assert explore.evaluate(opacity) < 0.5
    assert explore.evaluate("Number(getComputedStyle(document.querySelector('#error')).opacity)") == 1
    change(explore, lambda: explore.click("#reset"))
    assert explore.evaluate(opacity) == 1


def test_back_goes_back_and_one_move_of_a_slider_is_one_step(explore):
    explore.focus("#d_k-slider")
    change(explore, lambda: [explore.keyboard.press("ArrowRight") for _ in range(5)])
    moved = shown_numbers(explore)
    explore.wait_for_timeout(900)
    change(explore, lambda: explore.select_option("#policy", "inverse"))
    change(explore, explore.go_back)
    assert shown_numbers(explore) == moved
    assert explore.input_value("#policy") == "sqrt"
    assert_shows_python(explore)
    change(explore, explore.go_back)
    assert explore.input_value("#d_k") == "64"
    change(explore, explore.go_forward)
    assert shown_numbers(explore) == moved


def test_histograms_share_one_axis_and_every_scale_has_its_colour(explore):
    change(explore, lambda: explore.fill("#t", "0.5"))
    names = ("chosen", "none", "sqrt", "inverse")
    ranges = [explore.evaluate(f"document.getElementById('histogram-{name}').layout.xaxis.range") for name in names]
    assert len({tuple(ends) for ends in ranges}) == 1
    for name in names:
        bars = explore.evaluate(f"document.getElementById('histogram-{name}').data[0].x")
        assert ranges[0][0] <= min(bars) <= max(bars) <= ranges[0][1]
    colours = [explore.evaluate(f"document.getElementById('histogram-{name}').data[0].marker.color") for name in names]
    assert len(set(colours)) == 4


def test_a_slide_is_checked_and_its_link_carries_the_claim(explore, browser):
    change(explore, lambda: explore.check("input[value=scores]"))
    change(explore, lambda: explore.fill("#scores", "8.5, -2.1, 7.9"))
    change(explore, lambda: explore.fill("#claimed", "0.99, 0.00, 0.01"))
    verdict = "[0.99, 0.00, 0.01] Wrong: key 1 claimed 0.99, softmax gives 0.646 with no scaling."
    assert explore.locator("#verdicts li").text_content().startswith(verdict)
    assert explore.locator("#numbers th:has-text('gradient of a query, mean *')").count() == 1
    assert "invented" in explore.locator("#gradients-caption").text_content()
    with open_page(browser) as (other, errors, _):
        other.goto(explore.url)
        wait_for_answer(other)
        assert other.locator("#verdicts li").text_content().startswith(verdict)
        assert other.input_value("#claimed") == "0.99, 0.00, 0.01"
        assert errors == []
    change(explore, lambda: explore.fill("#claimed", "0.65, 0.00, 0.35"))
    assert "Right: softmax gives these weights with no scaling." in explore.locator("#verdicts li").text_content()


def test_hints_follow_the_state(explore):
    hint = explore.locator("#numbers tr:has(td[data-quantity=grad_q]) th small").last
    shown = shown_numbers(explore)
    than = "larger" if shown["none", "grad_q"] > shown["sqrt", "grad_q"] else "smaller"
    assert f"With no scaling it is {than} than with 1/√dₖ" in hint.text_content()
    change(explore, lambda: explore.fill("#n", "16"))
    change(explore, lambda: explore.fill("#d_k", "512"))
    shown = shown_numbers(explore)
    assert ("larger" if shown["none", "grad_q"] > shown["sqrt", "grad_q"] else "smaller") in hint.text_content()


def test_slider_and_result_are_seen_together_on_a_phone(browser, server):
    with open_page(browser, viewport={"width": 390, "height": 844}) as (page, _, _):
        page.goto(server.address)
        wait_for_answer(page)
        page.locator("#d_k-slider").scroll_into_view_if_needed()
        before = page.locator("#strip").text_content()
        page.focus("#d_k-slider")
        change(page, lambda: page.keyboard.press("End"))
        for part in ("#d_k-slider", "#strip"):
            box = page.locator(part).bounding_box()
            assert 0 <= box["y"] <= box["y"] + box["height"] <= 844 + 1
        assert page.locator("#strip").text_content() != before


def test_a_link_with_wrong_values_is_told(browser, server):
    with open_page(browser) as (page, errors, _):
        page.goto(server.address + "?source=scores&scores=1&what=ever&d_k=7")
        wait_for_answer(page)
        assert "scores must be 2 to 64 numbers" in page.locator("#error").text_content()
        assert [error for error in errors if "status of 400" not in error] == []


def test_an_old_answer_never_replaces_a_newer_one(explore):
    held = []

    def hold_first(route):
        if "n=77" in route.request.url:
            held.append(route)  # answered below, after the newer one
        else:
            route.continue_()

    explore.route("**/api/explore*", hold_first)
    explore.fill("#n", "77")
    deadline = time.monotonic() + 10
    while not held and time.monotonic() < deadline:
        explore.wait_for_timeout(20)
    change(explore, lambda: explore.fill("#n", "33"))
    newer = shown_numbers(explore)
    for route in held:
        route.continue_()
    explore.wait_for_timeout(500)
    assert held
    assert shown_numbers(explore) == newer
    assert assert_shows_python(explore).n == 33


def test_old_answers_stay_behind_even_where_they_cannot_be_called_back(browser, server):
    """The same where the browser does not abort: the number of the question decides."""
    with open_page(browser) as (page, errors, _):
        page.add_init_script(
            "const ask = window.fetch; window.fetch = (url, options = {}) => { delete options.signal; "
            "const wait = String(url).includes('n=77') ? 800 : 0; "
            "return new Promise(done => setTimeout(() => done(ask(url, options)), wait)); };"
        )
        page.goto(server.address)
        wait_for_answer(page)
        page.fill("#n", "77")
        page.wait_for_timeout(100)
        page.fill("#n", "33")
        page.wait_for_timeout(1500)
        assert assert_shows_python(page).n == 33
        assert errors == []


def test_predictions_are_those_of_theory(explore):
    change(explore, lambda: (explore.fill("#d_k", "4"), explore.fill("#n", "16")))
    explore.wait_for_selector('#numbers td[data-quantity="sum_p2"][data-predicted]', timeout=30000)
    shown = explore.get_attribute('td[data-scale="none"][data-quantity="sum_p2"]', "data-predicted")
    assert float(shown) == pytest.approx(theory.expected_rows(1.0, 4, 16).sum_p2, rel=1e-12)
    sigma = explore.get_attribute('td[data-scale="none"][data-quantity="logit_std"]', "data-predicted")
    assert float(sigma) == pytest.approx(2.0, rel=1e-12)


def test_figures_have_a_text_and_numbers_a_place_that_is_read_out(explore):
    for figure in explore.query_selector_all(".plot"):
        assert figure.get_attribute("role") == "img"
        assert len(figure.get_attribute("aria-label")) > 40
    assert explore.get_attribute("#reading", "aria-live") == "polite"
    assert "effective keys" in explore.locator("#reading").text_content()
    unlabelled = explore.evaluate(
        "[...document.querySelectorAll('input, select')].filter(e => !e.labels.length && !e.ariaLabel).map(e => e.id)"
    )
    assert unlabelled == []


def test_the_keyboard_reaches_every_control(explore):
    explore.keyboard.press("Tab")
    assert explore.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(60):
        explore.keyboard.press("Tab")
        reached.add(explore.evaluate("document.activeElement.id"))
        outline = explore.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or explore.evaluate("document.activeElement === document.body")
    assert {"d_k", "d_k-slider", "n-slider", "policy", "t-slider", "dtype", "seed", "again", "reset"} <= reached


@pytest.mark.parametrize("path", ["", "words", "audit", "runs"])
@pytest.mark.parametrize(
    "options", [{"viewport": {"width": 390, "height": 844}}, {"color_scheme": "dark"}], ids=["390", "dark"]
)
def test_pages_fit_a_phone_and_the_dark(browser, server, path, options):
    with open_page(browser, **options) as (page, errors, requests):
        page.goto(server.address + path)
        page.wait_for_selector(
            "body[data-answered], body[data-ready], body[data-polls]", state="attached", timeout=30000
        )
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
        assert contrast(ink, paper) > 7
        assert all(url.startswith(server.address) for url in requests)
        assert errors == []


def contrast(one, two):
    """The ratio of two colours as WCAG 2 defines it."""

    def luminance(colour):
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_the_audit_page_shows_the_record(browser, server):
    with open_page(browser, viewport={"width": 1280, "height": 900}) as (page, errors, _):
        page.goto(server.address + "audit")
        page.wait_for_selector("body[data-ready]", state="attached", timeout=30000)
        audit = read_shipped("minilm")
        for statistic in page.eval_on_selector_all("#statistic option", "all => all.map(one => one.value)"):
            page.select_option("#statistic", statistic)
            cells = page.eval_on_selector_all("#map button", "all => all.map(one => one.dataset.value)")
            assert [float(cell) for cell in cells] == [getattr(head, statistic) for head in audit.heads]
        page.click('#map button[data-row="3"][data-column="7"]')
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        head = next(one for one in audit.heads if (one.layer_index, one.head) == (4, 8))
        assert page.locator("#head-title").text_content() == f"{head.layer}, head 8"
        for quantity, value in page.eval_on_selector_all(
            "#head-numbers td", "all => all.map(one => [one.dataset.quantity, one.dataset.value])"
        ):
            assert float(value) == getattr(head, quantity)
        (rows,) = (one for one in audit.rows if (one.layer, one.head) == (head.layer, head.head))
        page.select_option("#statistic", "saturation_index")
        drawn = page.evaluate("document.querySelector('#rows').data[0].y")
        assert drawn == rows.histograms["saturation_index"]["counts"]
        curves = page.evaluate("document.querySelector('#counterfactual').data.map(one => [one.x, one.y])")
        assert curves == [[rows.temperatures, rows.entropy_ratio], [rows.temperatures, rows.jacobian_trace]]
        page.click("#patterns button:has-text('fixed key')")
        assert page.locator("#map button:not(.dim)").count() == audit.pattern_counts["fixed key"]
        assert errors == []


def hostile_audit():
    content = read_shipped("minilm").as_json()
    for head, scale, name in zip(content["heads"], content["scale"] * 20, HOSTILE, strict=False):
        head["layer"], head["pattern"] = name, name
        scale["layer"] = scale["how"] = scale["declared_by"] = name
    content["about"] |= {"source": HOSTILE[0], "model": HOSTILE[1], "notes": HOSTILE, "command": HOSTILE[2]}
    content["findings"] = [
        dict.fromkeys(("rule", "layer", "cause", "remedy"), name)
        | {"severity": "warning", "layer_index": 0, "head": 0, "evidence": {name: name}}
        | {"threshold": {"value": 1.0, "source": name}}
        for name in HOSTILE
    ]
    return content


def fill_with_hostile_names(path):
    with Store(path) as store:
        for seed, name in enumerate(HOSTILE):
            row = {
                "status": "failed",
                "scale": name,
                "init": name,
                "lr": name,
                "seed": name,
                "d_k": name,
                "message": name,
            }
            curves = {curve: [1.0, 2.0, name] for curve in CURVES}
            maps = {"tokens": [name, name], "first": 1, "right": [0], "chance_loss": 1.0, "steps": [0]}
            store.put(RunSpec(seed=seed), RunRecord(row, curves, {**maps, "weights": ["/wA="]}))


def test_fifty_hostile_names_do_not_execute(browser, tmp_path):
    assert len(set(HOSTILE)) == 50
    (tmp_path / "audit.json").write_text(json.dumps(hostile_audit()))
    fill_with_hostile_names(tmp_path / "runs.sqlite")
    with serving("--audit", tmp_path / "audit.json", "--store", tmp_path / "runs.sqlite") as running:
        for path, ready in (("audit", "body[data-ready]"), ("runs", "body[data-polls]")):
            with open_page(browser, viewport={"width": 1280, "height": 900}) as (page, errors, requests):
                page.goto(running.address + path)
                page.wait_for_selector(ready, state="attached", timeout=30000)
                if path == "audit":
                    for at in range(0, len(HOSTILE), 7):
                        page.locator("#map button").nth(at).click(force=True)
                else:
                    page.click("#all")
                    page.wait_for_timeout(500)
                for box in page.query_selector_all(".plot"):
                    if box.is_visible():
                        box.hover(force=True)
                page.mouse.move(640, 400)
                page.wait_for_timeout(300)
                assert page.evaluate("window.hacked") is None
                assert (
                    page.evaluate(
                        "document.querySelectorAll('iframe, object, base, form, main b, img, script:not([src])').length"
                    )
                    == 0
                )
                text = page.evaluate("document.body.textContent")
                for name in HOSTILE[:8]:
                    assert name in text
                assert all(url.startswith(running.address) for url in requests)
                assert errors == []


def read_sentence(page, server, text):
    """Open the page Words and let the server's model read a text, which loads the model at first."""
    page.goto(server.address + "words")
    page.wait_for_selector("body[data-ready]", state="attached", timeout=30000)
    assert page.locator(".words-tokens button").count() == len(read_sentences()["sentences"][0]["tokens"])
    page.fill("#text", text)
    page.click("#run")
    page.wait_for_selector("body[data-ready='2']", state="attached", timeout=240000)


def test_words_shows_recorded_sentences_and_reads_new_ones(browser, server):
    with open_page(browser, viewport={"width": 1280, "height": 900}) as (page, errors, requests):
        read_sentence(page, server, "A cat sat on the mat.")
        assert page.locator(".words-tokens button").all_text_contents()[1:4] == ["a", "cat", "sat"]
        page.locator(".words-temperature").press("End")
        shown = page.locator(".words-says").evaluate("says => ({...says.dataset})")
        query = f"?text=A+cat+sat+on+the+mat.&layer={shown['layer']}&head={shown['head']}"
        nats = page.evaluate(f"fetch('/api/head{query}').then(reply => reply.json())")["nats"]
        expected = measure_row(nats[int(shown["row"])], 32**0.5 / float(shown["tau"]))
        assert {name: float(shown[name]) for name in expected} == pytest.approx(expected, rel=1e-9)
        assert page.locator("#error").is_hidden()
        assert all(url.startswith(server.address) for url in requests)
        assert errors == []


def test_words_of_512_tokens_follow_the_slider_without_stutter(browser, server):
    with open_page(browser, viewport={"width": 1280, "height": 900}) as (page, errors, _):
        read_sentence(page, server, "one two three four " * 150)
        assert page.locator(".words-tokens button").count() == 512
        milliseconds = page.evaluate(
            """() => { const slider = document.querySelector(".words-temperature"), began = performance.now();
            for (let i = 0; i < 10; i++) { slider.value = String(20 * i); slider.dispatchEvent(new Event("input")); }
            return (performance.now() - began) / 10; }"""
        )
        assert milliseconds < 50
        assert errors == []


def test_runs_appear_while_the_store_is_written(browser, tmp_path):
    path = tmp_path / "runs.sqlite"
    with serving("--store", path) as running, open_page(browser) as (page, errors, _):
        page.goto(running.address + "runs")
        page.wait_for_selector("text=is not there yet", timeout=30000)
        with Store(path) as store:
            for seed in range(3):
                spec = RunSpec(seed=seed, scale="none")
                row = {"status": "done", "final_loss": 1.25 + seed, "seed": seed, "scale": "none", "d_k": 64}
                store.put(spec, RunRecord(row, {name: [0.5, 1.5] for name in CURVES}))
                page.wait_for_selector(f'tr[data-key="{spec.key}"]', timeout=30000)
                cell = page.locator(f'tr[data-key="{spec.key}"] td[data-quantity="final_loss"]')
                assert float(cell.get_attribute("data-value")) == 1.25 + seed
        page.wait_for_function("() => document.querySelector('#curves').data?.length === 3", timeout=30000)
        assert page.evaluate("document.querySelector('#curves').data[0].y") == [0.5, 1.5]
        with Store(path) as store:
            store.put_running(RunSpec(seed=9), 70, {"step": [0, 60], "loss": [3.0, 2.0]})
            page.wait_for_function("() => document.querySelector('#curves').data?.length === 4", timeout=30000)
            assert page.evaluate("document.querySelector('#curves').data[3].y") == [3.0, 2.0]
            assert "seed 9, step 70 of" in page.locator("#state").text_content()
        assert errors == []


@pytest.mark.parametrize(
    "options", [{}, {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}], ids=["desktop", "dark phone"]
)
def test_the_replay_grows_while_a_run_trains(browser, tmp_path, options):
    path, (none, sqrt) = tmp_path / "runs.sqlite", choose_runs(make_ablation())[:2]
    finished, training = (RunSpec(scale=scale, steps=60, lr=0.001) for scale in ("none", "sqrt"))
    none = {**none, "name": f"{none['name']}, seed 0"}

    def cut(run, step):
        """Return a run as it is after so many updates."""
        points, maps = sum(at <= step for at in run["step"]), sum(at <= step for at in run["maps"]["steps"])
        own = {name: run["maps"][name][:maps] for name in ("steps", "weights")}
        return {
            **{name: run[name][:points] for name in ("step", "loss")},
            "name": f"{run['name']}, seed 0, in training",
            "colour": run["colour"],
            "maps": {**run["maps"], **own},
        }

    with serving("--store", path) as running, open_page(browser, **options) as (page, errors, requests):
        with Store(path) as store:
            row = {"status": "done", "final_loss": 2.5, **identify_run(finished)}
            curves = {name: none[name] for name in ("step", "loss")}
            store.put(finished, RunRecord(row, curves, none["maps"]))
            page.goto(running.address + "runs")
            page.wait_for_selector(".replay-runs figure", timeout=30000)
            assert_replay_is_python(page, [none], 60)
            page.locator(".replay input").press("Home")
            page.wait_for_timeout(2500)
            assert_replay_is_python(page, [none], 0)
            page.locator(".replay input").press("End")
            for step in (20, 40):
                shown = cut(sqrt, step)
                curves = {name: shown[name] for name in ("step", "loss")}
                store.put_running(training, step, curves, shown["maps"])
                said = f"() => document.querySelectorAll('.replay-says')[1]?.textContent === '{say_run(shown, 60)}'"
                page.wait_for_function(said, timeout=30000)
                assert_replay_is_python(page, [none, shown], 60)
            row = {"status": "done", "final_loss": 0.1, **identify_run(training)}
            store.put(training, RunRecord(row, {name: sqrt[name] for name in ("step", "loss")}, sqrt["maps"]))
            page.wait_for_function("() => !document.querySelector('.replay-runs').textContent.includes('in training')")
            assert_replay_is_python(page, [none, {**sqrt, "name": f"{sqrt['name']}, seed 0"}], 60)
            for key, step in (("Home", 0), ("End", 60)):
                page.locator(".replay input").press(key)
                assert_replay_is_python(page, [none, {**sqrt, "name": f"{sqrt['name']}, seed 0"}], step)
        page.click("#none")
        page.wait_for_selector("#replay", state="hidden")
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        assert errors == []
        assert all(one.startswith(running.address) for one in requests)


def test_a_monitored_run_is_drawn_while_it_is_written(browser, tmp_path):
    path = tmp_path / "heads.jsonl"
    numbers = {name: [0.5, 0.25] for name in ("entropy_ratio", "score_spread", "max_logit")}
    alert = {"step": 10, "state": "raised", "severity": "error", "rule": "logit-growth", "layer": "<b>h.0</b>"}
    alert |= {"heads": [1], "cause": HOSTILE[0]}
    with serving("--store", path) as running, open_page(browser) as (page, errors, _):
        page.goto(running.address + "runs")
        page.wait_for_selector("text=is not there yet", timeout=30000)
        for step, alerts in ((0, []), (10, [alert])):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "layers": {"<b>h.0</b>": numbers}, "alerts": alerts}) + "\n")
            drawn = f"() => document.querySelector('#heads-1').data?.[0].z[0].length === {1 + step // 10}"
            page.wait_for_function(drawn, timeout=30000)
        assert page.evaluate("document.querySelector('#heads-0').data[0].z") == [[0.5, 0.5], [0.25, 0.25]]
        assert page.evaluate("document.querySelector('#heads-0').data[1].x") == [1]
        assert page.locator("#content").is_hidden()
        assert HOSTILE[0] in page.locator("#alerts").text_content()
        assert page.evaluate("window.hacked") is None
        assert page.locator("#heads-0").bounding_box()["height"] >= 260
        assert errors == []
