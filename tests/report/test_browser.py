"""The report in a real browser: offline, without errors, with the numbers of Python; narrow, dark, on paper."""

import json
import re
from dataclasses import replace
from datetime import datetime

import pytest

from browser import open_page
from example_records import NASTY, every_kind, make_ablation, make_claims, story
from first_screen import assert_first_screen_shows_python, assert_terms_are_told
from replayed import assert_replay_is_python
from sqrtdk.audits.shipped import read_shipped
from sqrtdk.report import render_report
from sqrtdk.report.replay import choose_runs, say_run
from sqrtdk.report.try_it import RANGES, TryIt, measure_try_it
from sqrtdk.report.words import find_row, measure_row, read_sentences

pytestmark = pytest.mark.long

MOVE = """([name, place]) => {
  const slider = document.querySelector(`#try-it input[data-name=${name}]`);
  slider.value = place;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}"""
READ = """() => [...document.querySelectorAll("#try-it output[data-column]")].map(
  (one) => [one.dataset.column, one.dataset.quantity, Number(one.dataset.value), one.textContent])"""


BOXES = "figures => figures.map((figure) => figure.getBoundingClientRect().toJSON())"


def test_it_opens_from_a_file_without_requests_and_errors(browser, address):
    with open_page(browser, offline=True) as (page, errors, requests):
        page.goto(address)
        plots = page.locator("section > .exhibit .plot, .exhibit .plot")
        assert plots.count() >= 11
        assert page.locator(".exhibit .plot .main-svg").count() >= plots.count()
        assert page.locator("details.more .main-svg").count() == 0, "folded figures are drawn when they are unfolded"
        for fold in page.locator("details").all():
            if fold.is_visible():
                fold.locator("summary").first.click()
        page.wait_for_function("document.querySelectorAll('.plot:not(:has(.main-svg))').length === 0")
        assert errors == []
        assert requests == []


def test_the_first_screen_shows_the_numbers_of_python(browser, address):
    with open_page(browser, viewport={"width": 1280, "height": 900}) as (page, errors, requests):
        page.goto(address)
        box = page.locator(".cause").bounding_box()
        assert box["y"] + box["height"] <= 900, "the cause fits on the first screen"
        assert_first_screen_shows_python(page)
        assert errors == []
        assert requests == []


def assert_words_are_python(page):
    """Assert that the sentence below the words has the numbers that Python computes from the record."""
    shown = page.locator(".words-says").evaluate("says => ({...says.dataset})")
    sentence = read_sentences()["sentences"][int(page.input_value(".words select"))]
    row = find_row(sentence, int(shown["layer"]), int(shown["head"]), int(shown["row"]))
    expected = measure_row(row, 1 / sentence["scale"] / float(shown["tau"]))
    assert {name: float(shown[name]) for name in expected} == pytest.approx(expected, rel=1e-9)
    return float(shown["tau"])


def test_words_at_every_temperature_are_those_of_python(browser, address):
    with open_page(browser, viewport={"width": 390, "height": 844}, color_scheme="dark") as (page, errors, requests):
        page.goto(address)
        slider = page.locator(".words-temperature")
        assert assert_words_are_python(page) == pytest.approx(32**0.5)
        for key, tau in (("Home", 0.5), ("End", 64.0)):
            slider.press(key)
            assert assert_words_are_python(page) == pytest.approx(tau)
        for name, tau in (("no scaling", 1.0), ("1/√dₖ", 32**0.5), ("1/dₖ", 32.0)):
            page.click(f".words-marks button:text-is('{name}')")
            assert assert_words_are_python(page) == pytest.approx(tau)
            assert f"({name})" in page.locator(".words-says").text_content()
        page.select_option(".words select", "2")
        assert_words_are_python(page)
        page.click(".words-map button[data-at='3/5']")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowUp")
        assert "Layer 2, head 6" in page.locator(".words-says").text_content()
        page.click(".words-tokens button >> nth=1")
        page.keyboard.press("End")
        assert_words_are_python(page)
        assert (
            int(page.locator(".words-says").get_attribute("data-row"))
            == page.locator(".words-tokens button").count() - 1
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert errors == []
        assert requests == []


@pytest.mark.parametrize(
    "options", [{}, {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}], ids=["desktop", "dark phone"]
)
def test_the_replay_is_that_of_python_from_end_to_end(browser, address, options):
    runs = choose_runs(story()["ablation"])
    with open_page(browser, **options) as (page, errors, requests):
        page.goto(address)
        slider = page.get_by_label("training step", exact=True)
        assert_replay_is_python(page, runs, 60)
        for key, step in (("Home", 0), ("ArrowRight", 10), ("End", 60), ("ArrowLeft", 50)):
            slider.press(key)
            assert_replay_is_python(page, runs, step)
            assert slider.get_attribute("aria-valuetext").startswith(f"step {step}. ")
        boxes = page.eval_on_selector_all(".replay-runs figure", BOXES)
        assert len({box["y"] for box in boxes}) == (3 if options else 1), "columns, stacked on a phone"
        assert all(0 <= box["x"] < box["x"] + box["width"] <= page.viewport_size["width"] for box in boxes)
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        assert errors == []
        assert requests == []


def test_the_replay_plays_pauses_and_ends(browser, address):
    runs = choose_runs(story()["ablation"])
    with open_page(browser) as (page, errors, _):
        page.clock.install(time=datetime(2026, 1, 1))
        page.goto(address)
        page.clock.pause_at(datetime(2026, 1, 2))
        button, slider = page.locator(".replay button"), page.locator(".replay input")
        button.focus()
        page.keyboard.press("Space")
        assert (button.text_content(), button.get_attribute("aria-pressed")) == ("Pause", "true")
        assert_replay_is_python(page, runs, 0)
        page.clock.run_for(350)
        assert_replay_is_python(page, runs, 20)
        button.click()
        page.clock.run_for(1000)
        assert button.text_content() == "Play"
        assert_replay_is_python(page, runs, 20)
        button.click()
        page.clock.run_for(2000)
        assert button.text_content() == "Play", "it ends by itself"
        assert_replay_is_python(page, runs, 60)
        button.click()
        slider.press("ArrowRight")
        assert button.text_content() == "Play", "whoever moves the slider stops the replay"
        page.clock.run_for(1000)
        assert_replay_is_python(page, runs, 10)
        assert errors == []


def test_the_replay_is_its_last_step_on_paper_and_without_a_script(browser, address):
    runs = choose_runs(story()["ablation"])
    with open_page(browser) as (page, _, _):
        page.goto(address)
        page.locator(".replay input").press("Home")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert_replay_is_python(page, runs, 60)
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert_replay_is_python(page, runs, 0)
        page.emulate_media(media="print")
        assert not page.locator(".replay-controls").is_visible()
        assert len({box["y"] for box in page.eval_on_selector_all(".replay-runs figure", BOXES)}) == 1
    with open_page(browser, java_script_enabled=False) as (page, _, requests):
        page.goto(address)
        assert not page.locator(".replay-controls").is_visible()
        for run, figure in zip(runs, page.locator(".replay-runs figure").all(), strict=True):
            assert figure.locator(".replay-says").inner_text() == say_run(run, 60)
            assert figure.locator(".replay-map .mark").count() == 4
            assert figure.locator(".replay-map").bounding_box()["height"] > 40
            assert figure.locator(".replay-loss path").count() == 1
        assert requests == []


@pytest.mark.parametrize("touch", [False, True], ids=["pointer", "touch"])
def test_terms_are_told(browser, address, touch):
    with open_page(browser, viewport={"width": 390, "height": 844}, has_touch=touch) as (page, _, _):
        page.goto(address)
        assert_terms_are_told(page, touch)


def assert_same_numbers(page, state):
    expected = measure_try_it(state)
    shown = page.evaluate(READ)
    assert len(shown) == sum(map(len, expected.values()))
    for column, name, value, text in shown:
        truth = expected[column][name]
        assert abs(value - truth) <= 1e-9 * max(1.0, abs(truth)), (state, column, name)
        assert text, "what a test reads in an attribute, a reader reads in words"
        number = re.fullmatch(r"−?(\d+\.?\d*)", text)
        if number:
            assert float(text.replace("−", "-")) == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("policy", ["none", "sqrt", "inverse"])
def test_every_slider_at_both_ends_shows_the_numbers_of_python(browser, address, policy):
    with open_page(browser) as (page, errors, _):
        page.goto(address)
        page.check(f"#try-it input[value={policy}]")
        assert_same_numbers(page, TryIt(policy=policy))
        for name, values in RANGES.items():
            before = page.locator(f"#try-it input[data-name={name}]").input_value()
            for place in (0, len(values) - 1):
                page.evaluate(MOVE, [name, place])
                assert_same_numbers(page, replace(TryIt(policy=policy), **{name: values[place]}))
            page.evaluate(MOVE, [name, before])
        assert errors == []


def test_sliders_at_their_ends_together_and_other_samples(browser, address):
    with open_page(browser) as (page, errors, _):
        page.goto(address)
        for ends in ((0, 0, 0, 0), (-1, -1, -1, -1), (-1, 0, 0, -1), (0, -1, -1, 0), (-1, -1, 0, 0)):
            chosen = {name: values[end] for (name, values), end in zip(RANGES.items(), ends, strict=True)}
            for name, value in chosen.items():
                page.evaluate(MOVE, [name, RANGES[name].index(value)])
            assert_same_numbers(page, TryIt(**chosen))
        page.click("#try-it >> text=another sample")
        assert_same_numbers(page, replace(TryIt(**chosen), seed=TryIt().seed + 1))
        page.click("text=reset")
        assert_same_numbers(page, TryIt())
        assert errors == []


def test_sliders_obey_the_keyboard_and_say_their_value(browser, address):
    with open_page(browser) as (page, _, _):
        page.goto(address)
        slider = page.get_by_label("dₖ, length of q and k")
        slider.focus()
        page.keyboard.press("Home")
        assert slider.get_attribute("aria-valuetext") == "1"
        page.keyboard.press("End")
        assert slider.get_attribute("aria-valuetext") == "512"
        assert "dₖ = 512" in page.locator(".try-says").inner_text()
        assert page.locator(".try-says").get_attribute("aria-live") == "polite"


def test_a_move_answers_within_a_few_frames(browser, address):
    with open_page(browser) as (page, _, _):
        page.goto(address)
        page.evaluate(MOVE, ["d_k", len(RANGES["d_k"]) - 1])
        milliseconds = page.evaluate(
            f"() => {{ const began = performance.now(); ({MOVE})(['d_k', 5]); return performance.now() - began; }}"
        )
        assert milliseconds < 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_in_one_direction_only(browser, address, scheme):
    with open_page(browser, viewport={"width": 390, "height": 844}, color_scheme=scheme) as (page, errors, _):
        page.goto(address)
        page.wait_for_selector(".main-svg")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for fold in page.locator("details").all():
            if fold.is_visible():
                fold.locator("summary").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        cards = page.locator(".card")
        assert all(card.bounding_box()["width"] <= 390 for card in cards.all() if card.is_visible())
        assert errors == []


def luminance(colour):
    red, green, blue = (int(value) / 255 for value in re.findall(r"\d+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_dark_pages_are_dark_and_their_figures_readable(browser, address):
    with open_page(browser, color_scheme="dark") as (page, _, _):
        page.goto(address)
        page.wait_for_selector(".xtick text")
        style = "(query, name) => getComputedStyle(document.querySelector(query))[name]"
        assert luminance(page.evaluate(f"() => ({style})('body', 'backgroundColor')")) < 0.1
        for query, name in (
            ("body", "color"),
            (".xtick text", "fill"),
            (".try-charts text", "fill"),
            (".cause .walks text", "fill"),
            (".card", "color"),
        ):
            assert luminance(page.evaluate(f"() => ({style})('{query}', '{name}')")) > 0.4, query


def test_figures_are_pictures_without_a_script(browser, address):
    with open_page(browser, java_script_enabled=False) as (page, _, requests):
        page.goto(address)
        pictures = page.locator(".exhibit .plot svg.picture")
        assert pictures.count() == page.locator(".exhibit .plot").count() >= 11
        for picture in pictures.all():
            box = picture.bounding_box()
            assert box["width"] > 200
            assert box["height"] > 100
            assert picture.locator("path, circle, rect").count() > 0
            assert picture.locator("text").count() > 2
        assert requests == []


def test_no_scaling_is_not_compared_with_itself(browser, address):
    with open_page(browser) as (page, _, _):
        page.goto(address)
        chosen = page.locator("#try-it .try-chosen")
        assert chosen.is_visible()
        page.check("#try-it input[value=none]")
        assert not chosen.is_visible()
        assert page.locator("#try-it .try-says").inner_text().count("effective keys") == 1
        assert page.locator("#try-it .try-logits .curve").count() == 1
        page.check("#try-it input[value=inverse]")
        assert chosen.is_visible()


def test_the_map_of_heads_fits_a_phone_with_its_key(browser, address):
    with open_page(browser, viewport={"width": 390, "height": 844}) as (page, _, _):
        page.goto(address)
        page.wait_for_selector("#models .main-svg")
        for part in ("#models-0-0 .heatmaplayer", "#models-0-0 .colorbar"):
            box = page.locator(part).first.bounding_box()
            assert 0 <= box["x"] < box["x"] + box["width"] <= 390


def test_twelve_pages_of_paper_are_enough(browser, tmp_path):
    path = tmp_path / "report.html"
    # As many claims of each verdict as `sqrtdk claims` has, about as long as they are.
    claim = make_claims(why=f"{'because ' * 12}. {'More ' * 24}").tables["claims"][0] | {"computed": "0.123, " * 40}
    rows = [
        {**claim, "id": f"soft.{index}", "verdict": verdict}
        for index, verdict in enumerate(["wrong"] * 8 + ["depends"] * 18 + ["undecided"] + ["holds"] * 25)
    ]
    claims = replace(make_claims(), tables={**make_claims().tables, "claims": rows})
    ablation = make_ablation(lrs=(3e-4, 1e-3), inits=("unit", "rescaled"))
    learned = [{**row, "temperature_by_layer": [1.2, 0.9]} for row in make_ablation().tables["best"]]
    runs = [{**row, "temperatures": [1.2, 0.9]} for row in make_ablation().tables["runs"]]
    temperatures = replace(make_ablation(), tables={**make_ablation().tables, "best": learned, "runs": runs})
    path.write_text(render_report([*story().values(), claims, ablation, temperatures]), encoding="utf-8")
    with open_page(browser, viewport={"width": 1280, "height": 900}) as (page, _, _):
        page.goto(path.as_uri())
        page.wait_for_selector(".main-svg")
        paper = page.pdf(format="A4")
        assert 5 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 12
        page.emulate_media(media="print")
        assert not page.locator("#try-it input").first.is_visible()


def test_the_data_of_a_figure_can_be_saved(browser, address, tmp_path):
    with open_page(browser, accept_downloads=True) as (page, errors, requests):
        page.goto(address)
        exhibit = page.locator("#variance .exhibit")
        exhibit.locator("summary").click()
        for kind in ("csv", "json"):
            with page.expect_download() as waiting:
                exhibit.locator(f"button[data-save={kind}]").click()
            waiting.value.save_as(tmp_path / waiting.value.suggested_filename)
        rows = every_kind()["variance"].tables["variance"]
        lines = (tmp_path / "variance-variance.csv").read_text().splitlines()
        assert lines[0].split(",") == list(rows[0])
        assert float(lines[1].split(",")[3]) == rows[0]["measured"]
        assert json.loads((tmp_path / "variance.json").read_text()) == every_kind()["variance"].as_json()
        assert errors == []
        assert [one for one in requests if not one.startswith("blob:")] == []


def test_a_legend_hides_and_shows_its_lines(browser, address):
    with open_page(browser) as (page, _, _):
        page.goto(address)
        button = page.locator("#answer .legend button").first
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert page.evaluate("document.querySelector('#answer .plot').data[0].visible") is False
        button.click()
        assert page.evaluate("document.querySelector('#answer .plot').data[0].visible") is True


MARKUP = (
    NASTY,
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "'-alert(1)-'",
    "javascript:alert(1)",
    "</title><script>alert(1)</script>",
    "<a href='javascript:alert(1)'>x</a>",
    "<!--<script>alert(1)</script>",
    "</details></section><iframe srcdoc='<script>alert(1)</script>'>",
)
WRAPPINGS = ("{}", '">{}', "'>{}", "</script>{}", "`{}` W_q 1/√dₖ 1e-05")
HOSTILE = [wrapping.format(markup) for markup in MARKUP for wrapping in WRAPPINGS]


def hostile_records():
    """Records and an audit in which every name that could come from outside is an attack."""
    names = iter(HOSTILE * 200)
    claims = [
        {
            **make_claims(next(names)).tables["claims"][index % 6],
            "id": name,
            "claimed": name,
            "computed": name,
            "source": name,
        }
        for index, name in enumerate(HOSTILE)
    ]
    texts = [{"source": name, "title": name} for name in HOSTILE]
    zoo, ablation = every_kind()["zoo"], make_ablation()
    families = [{**row, "family": next(names)} for row in zoo.tables["families"]]

    def rename(rows):
        return [{**row, "scale": NASTY, "init": NASTY} if row["scale"] == "inverse" else row for row in rows]

    records = [
        replace(make_claims(), tables={"claims": claims, "texts": texts}),
        replace(zoo, tables={**zoo.tables, "families": families}, reading=HOSTILE[:3], headline=NASTY),
        replace(
            ablation,
            spec={**ablation.spec, "task": NASTY},
            tables={name: rename(rows) for name, rows in ablation.tables.items()},
            curves={"runs": rename(ablation.curves["runs"])},
        ),
        replace(every_kind()["bench"], cpu=NASTY, versions={NASTY: NASTY}, reading=HOSTILE),
    ]
    audit = read_shipped("minilm")
    heads = [replace(head, layer=next(names), pattern=next(names)) for head in audit.heads]
    about = dict.fromkeys(("command", "input", "date", "name", "model"), NASTY)
    return records, replace(audit, heads=heads, about=about)


def test_fifty_hostile_names_do_not_execute(browser, tmp_path):
    assert len(set(HOSTILE)) == 50
    records, audit = hostile_records()
    path = tmp_path / "report.html"
    path.write_text(render_report(records, command=NASTY, audit=audit, full=True), encoding="utf-8")
    with open_page(browser) as (page, errors, requests):
        alerts = []
        page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        page.wait_for_selector(".main-svg")
        for plot in page.locator(".exhibit .plot").all():
            plot.hover()
        assert page.locator(".card").count() == 50
        assert alerts == []
        assert errors == []
        assert requests == []
        assert page.locator("iframe, img, a[href^=javascript]").count() == 0
