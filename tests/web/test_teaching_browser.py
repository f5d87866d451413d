"""Teach mode, questions and links of the local pages in a real browser."""

import sys
from dataclasses import replace

import pytest

from browser import open_browser, open_page
from sqrtdk.report.cause import D_KS, START, say_cause
from sqrtdk.report.questions import ask_about_cause
from sqrtdk.report.words import find_row, measure_row, read_sentences
from sqrtdk.web.explore_query import Experiment
from web_server import serving

pytestmark = pytest.mark.long

DESK = {"viewport": {"width": 1280, "height": 800}}


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def wait_until_answered(page):
    page.wait_for_selector("body[data-answered][aria-busy=false]", state="attached", timeout=30000)


def wait_until_ready(page):
    page.wait_for_selector("body[data-ready]", state="attached", timeout=30000)


def wait_for_query(page, part):
    page.wait_for_function("part => location.search.includes(part)", arg=part)


def test_serve_teach_announces_the_first_screen_and_arrow_keys_go_on(browser):
    with serving("--teach") as running, open_page(browser, **DESK) as (page, errors, requests):
        assert running.address.endswith("/#teach")
        page.goto(running.address)
        wait_until_answered(page)
        output = page.locator(".teach-bar output")
        assert output.text_content() == "1 / 6"
        assert page.locator("#guess-cause").is_visible()
        page.keyboard.press("ArrowRight")
        assert page.locator("#guess-cause details p").is_visible()
        for place, shown in enumerate((".cause", "#cards", "#concentration", "#ranked", "#gradients"), 2):
            page.keyboard.press("ArrowRight")
            page.wait_for_selector(f".teach-bar output:text-is('{place} / 6')")
            assert page.locator(shown).is_visible()
            assert page.locator(".charts figure, #cards, .cause, .guess").filter(visible=True).count() == 1
        page.wait_for_timeout(300)
        width = page.evaluate("document.querySelector('#gradients').clientWidth")
        assert page.evaluate("document.querySelector('#gradients')._fullLayout.width") == pytest.approx(width, abs=2)
        page.click(".top nav a:text-is('Words')")
        wait_until_ready(page)
        assert output.text_content() == "1 / 1"
        page.click(".top nav a:text-is('Audit')")
        page.wait_for_selector(".teach-bar output:text-is('1 / 4')")
        page.keyboard.press("Escape")
        assert page.locator("h1").is_visible()
        assert page.locator(".teach-start").is_visible()
        assert all(url.startswith(running.address.split("#")[0]) for url in requests)
        assert errors == []


@pytest.mark.parametrize(("path", "screens"), [("", 6), ("words", 1), ("audit", 4)])
def test_a_button_starts_teach_mode(browser, server, path, screens):
    with open_page(browser, viewport={"width": 390, "height": 844}, color_scheme="dark") as (page, errors, _):
        page.goto(server.address + path)
        page.wait_for_selector("body[data-answered], body[data-ready]", state="attached", timeout=30000)
        page.click(".teach-start")
        page.locator(".teach-bar output", has_text=f"1 / {screens}").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.click(".teach-leave")
        assert page.locator(".teach-start").is_visible()
        assert errors == []


def test_the_slider_of_the_question_is_answered_by_python(browser, server):
    with open_page(browser, **DESK) as (page, errors, _):
        page.goto(server.address)
        slider, replies = page.locator("#guess-cause input"), list(ask_about_cause().replies.values())
        for key, reply in (("Home", replies[0]), ("End", replies[-1])):
            slider.press(key)
            page.click("#guess-cause button")
            assert page.locator("#guess-cause .guess-says").text_content() == reply
        assert errors == []


def test_settings_move_in_teach_mode_and_their_link_names_the_screen(browser, server):
    with open_page(browser, **DESK) as (page, errors, requests):
        page.goto(server.address + "#teach-results-2")
        wait_until_answered(page)
        page.locator("#d_k-slider").press("End")
        wait_for_query(page, "d_k=1024")
        assert page.evaluate("location.hash") == "#teach-results-2"
        address = page.url
        page.goto("about:blank")
        page.goto(address)
        wait_until_answered(page)
        assert page.input_value("#d_k") == "1024"
        assert page.locator("#concentration").is_visible()
        assert not page.locator("#ranked").is_visible()
        page.wait_for_selector("body[data-expected]", state="attached", timeout=30000)
        asked = len(requests)
        page.click(".teach-next")
        page.wait_for_selector("#ranked", state="visible")
        page.go_back()
        page.wait_for_selector("#concentration", state="visible")
        page.wait_for_timeout(300)
        assert [url for url in requests[asked:] if "/api/" in url] == [], "another screen asks the server nothing"
        assert page.input_value("#d_k") == "1024"
        assert errors == []


@pytest.mark.parametrize(("key", "d_k"), [("Home", D_KS[0]), ("End", D_KS[-1])])
def test_the_link_of_explore_carries_the_first_screen(browser, server, key, d_k):
    with open_page(browser, **DESK) as (page, errors, _):
        page.goto(server.address)
        wait_until_answered(page)
        page.locator(".cause input[type=range]").press(key)
        page.check(".cause .divide")
        page.click(".cause [data-do=sample]")
        wait_for_query(page, "sample=30")
        address = page.url
        page.goto("about:blank")
        page.goto(address)
        wait_until_answered(page)
        expected = say_cause(replace(START, d_k=d_k, seed=START.seed + 1), divided=True)
        assert page.locator(".cause-says").text_content() == expected
        assert page.locator("#error").is_hidden()
        query = page.evaluate("Object.fromEntries(new URLSearchParams(location.search))")
        assert {name: query.pop(name) for name in ("walk", "divided", "sample")} == {
            "walk": str(d_k),
            "divided": "1",
            "sample": "30",
        }
        assert Experiment.read(query) == Experiment()
        page.locator(".cause input[type=range]").press("ArrowRight" if key == "Home" else "ArrowLeft")
        page.go_back()
        page.wait_for_function("said => document.querySelector('.cause-says').textContent === said", arg=expected)
        page.goto(server.address + "?walk=7777&sample=x&divided=no")
        wait_until_answered(page)
        assert page.locator(".cause-says").text_content() == say_cause(START, divided=False)
        assert errors == []


@pytest.fixture(scope="module")
def without_a_model(tmp_path_factory):
    """A server that finds no transformers: recorded sentences are all it has."""
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "from sqrtdk.commands.cli import main\n"
        "sys.argv = ['sqrtdk', *sys.argv[1:]]\n"
        "main()\n"
    )
    path = tmp_path_factory.mktemp("server") / "serve.py"
    path.write_text(program)
    with serving(program=[sys.executable, str(path)]) as running:
        yield running


def assert_words_are_python(page, sentence):
    shown = page.locator(".words-says").evaluate("says => ({...says.dataset})")
    row = find_row(sentence, int(shown["layer"]), int(shown["head"]), int(shown["row"]))
    expected = measure_row(row, 1 / sentence["scale"] / float(shown["tau"]))
    assert {name: float(shown[name]) for name in expected} == pytest.approx(expected, rel=1e-9)
    return shown


def test_words_without_a_model_shows_recorded_sentences_and_says_how_to_get_one(browser, without_a_model):
    with open_page(browser, **DESK) as (page, errors, requests):
        page.goto(without_a_model.address + "words")
        wait_until_ready(page)
        sentences = read_sentences()["sentences"]
        assert "pip install" in page.locator("#about").text_content()
        assert page.locator("#text").is_disabled()
        assert page.locator("#run").is_disabled()
        for at, sentence in enumerate(sentences):
            page.select_option("#recorded", str(at))
            page.wait_for_function("text => document.querySelector('#text').value === text", arg=sentence["text"])
            assert page.locator(".words-tokens button").count() == len(sentence["tokens"])
            for key in ("Home", "End"):
                page.locator(".words-temperature").press(key)
                assert_words_are_python(page, sentence)
        assert errors == []
        assert all(url.startswith(without_a_model.address) for url in requests)


def test_the_link_of_words_carries_sentence_head_word_and_temperature(browser, without_a_model):
    sentence = read_sentences()["sentences"][2]
    with open_page(browser, **DESK) as (page, errors, _):
        page.goto(without_a_model.address + "words")
        wait_until_ready(page)
        page.select_option("#recorded", "2")
        page.click(".words-map button[data-at='3/5']")
        page.click(".words-tokens button >> nth=3")
        page.locator(".words-temperature").press("End")
        wait_for_query(page, "row=3&tau=6")
        state = assert_words_are_python(page, sentence)
        said, address = page.locator(".words-says").text_content(), page.url
        page.goto("about:blank")
        page.goto(address)
        wait_until_ready(page)
        assert (state["layer"], state["head"], state["row"]) == ("3", "5", "3")
        assert page.locator(".words-says").text_content() == said
        assert page.input_value("#recorded") == "2"
        page.goto(without_a_model.address + "words?text=Not+recorded.&layer=0")
        wait_until_ready(page)
        assert "needs a model" in page.locator("#error").text_content()
        page.goto(without_a_model.address + "words?layer=99&head=x&row=length&tau=-1")
        wait_until_ready(page)
        assert page.locator("#error").is_hidden()
        assert_words_are_python(page, read_sentences()["sentences"][0])
        assert errors == []


def test_the_link_of_a_typed_sentence_is_read_again(browser, server):
    with open_page(browser, **DESK) as (page, errors, _):
        page.goto(server.address + "words?text=A+cat+sat.&layer=2&head=1&row=2&tau=32")
        page.wait_for_selector("body[data-ready]", state="attached", timeout=240000)
        shown = page.locator(".words-says").evaluate("says => ({...says.dataset})")
        assert (shown["layer"], shown["head"], shown["row"], shown["tau"]) == ("2", "1", "2", "32")
        assert page.locator(".words-tokens button").all_text_contents()[1:4] == ["a", "cat", "sat"]
        assert errors == []
