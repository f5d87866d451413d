"""Questions and teach mode of the report in a real browser: every guess, every key, dark, narrow, on paper."""

import json
import re

import pytest

from browser import open_page

pytestmark = pytest.mark.long

DESK = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "dark"}
SWIPE = """([x0, x1]) => {
  const target = document.querySelector("main"), y = 300;
  const at = (x) => new Touch({ identifier: 1, target, clientX: x, clientY: y });
  const send = (kind, x, touches) => {
    target.dispatchEvent(new TouchEvent(kind, { bubbles: true, touches, changedTouches: [at(x)] }));
  };
  send("touchstart", x0, [at(x0)]);
  send("touchend", x1, []);
}"""


def counter(page):
    page.wait_for_selector(".teach-bar output:text-matches('^[0-9]+ / ')")  # the address changes first
    return tuple(map(int, page.locator(".teach-bar output").text_content().split(" / ")))


def wait_for_place(page, place):
    page.wait_for_selector(f".teach-bar output:text-matches('^{place} / ')")


def shown_figures(page):
    """The figures and questions that can be seen."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".guess, .cause, .try, .words, .exhibit, .answer, .replay")]
        .filter((one) => one.checkVisibility() && !one.closest("details")).length"""
    )


@pytest.mark.parametrize("options", [DESK, PHONE], ids=["desk", "phone"])
def test_every_guess_gets_its_reply_and_the_answer(browser, address, options):
    with open_page(browser, **options) as (page, errors, requests):
        page.goto(address)
        for guess in page.locator(".guess").all():
            replies = json.loads(guess.get_attribute("data-replies"))
            assert not guess.locator("details p").is_visible()
            says, slider = guess.locator(".guess-says"), guess.locator("input[type=range]")
            if slider.count():
                values = slider.get_attribute("data-values").split(",")
                for key, place in (("Home", 0), ("End", len(values) - 1)):
                    slider.press(key)
                    assert slider.get_attribute("aria-valuetext") == f"{float(values[place]):g}"
                    guess.locator("button").click()
                    assert says.text_content() == replies[place]
                slider.press("ArrowLeft")
                slider.press("Enter")
                assert says.text_content() == replies[-2]
            else:
                right = int(guess.get_attribute("data-right"))
                buttons = guess.locator("button")
                assert buttons.count() == len(replies) >= 2
                for place, reply in enumerate(replies):
                    (buttons.nth(place).tap if options is PHONE else buttons.nth(place).click)()
                    assert says.text_content() == reply
                    assert reply.startswith("Right: ") is (place == right)
                    assert buttons.nth(place).get_attribute("aria-pressed") == "true"
                assert guess.locator(".guess-right").count() == 1
                assert "guess-right" in buttons.nth(right).get_attribute("class")
            assert guess.locator("details p").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert errors == []
        assert requests == []


def test_figures_are_there_for_readers_who_do_not_guess(browser, address):
    with open_page(browser, **DESK) as (page, _, _):
        page.goto(address)
        assert all(plot.is_visible() for plot in page.locator(".exhibit .plot").all())
    with open_page(browser, java_script_enabled=False, **DESK) as (page, _, _):
        page.goto(address)
        guess = page.locator("#guess-variance")
        assert not guess.locator("button").first.is_visible()
        assert guess.locator(".guess-asks").is_visible()
        guess.locator("summary").click()
        assert guess.locator("details p").is_visible()
        assert page.locator(".teach-start").count() == 0


def test_arrow_keys_go_through_all_screens_one_figure_at_a_time(browser, address):
    with open_page(browser, **DESK) as (page, errors, requests):
        page.goto(address)
        page.click(".teach-start")
        first, total = counter(page)
        assert first == 1
        assert total >= 14
        names = [page.evaluate("location.hash")]
        keys = ("ArrowRight", "PageDown", " ")
        for step in range(2, total + 1):
            key = keys[step % 3]
            if page.locator(".guess:not(.teach-off) details").filter(visible=True).count():
                assert not page.locator(".guess details p").filter(visible=True).count()
                page.keyboard.press(key)  # reveals
                assert counter(page) == (step - 1, total)
                assert page.locator(".guess details p").filter(visible=True).count() == 1
            page.keyboard.press(key)
            wait_for_place(page, step)
            assert shown_figures(page) == 1
            names.append(page.evaluate("location.hash"))
            page.evaluate("document.activeElement.blur()")
        assert len(set(names)) == total
        assert page.locator(".teach-next").is_disabled()
        for key, place in (("ArrowRight", total), ("ArrowLeft", total - 1), ("PageUp", total - 2)):
            page.keyboard.press(key)
            page.wait_for_timeout(50)
            assert counter(page) == (place, total)
        page.keyboard.press("Shift+Space")
        wait_for_place(page, total - 3)
        page.keyboard.press("Escape")
        assert "#" not in page.url
        assert shown_figures(page) > 14
        assert errors == []
        assert requests == []


def test_a_question_comes_before_its_figure(browser, address):
    with open_page(browser, **DESK) as (page, _, _):
        page.goto(address + "#teach-variance-1")
        assert page.locator("#guess-variance").is_visible()
        assert not page.locator("#variance .exhibit").is_visible()
        assert page.locator("#variance h2").is_visible()
        assert page.locator(".teach-next").text_content() == "Reveal"
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".teach-next:text-is('Next ›')")
        page.click(".teach-next")
        page.wait_for_selector("#variance .exhibit .main-svg", state="visible")
        assert page.evaluate("location.hash") == "#teach-variance-2"


def test_links_lead_to_a_screen_and_back_goes_back(browser, address):
    with open_page(browser, **DESK) as (page, errors, _):
        page.goto(address)
        page.goto(address + "#teach-gradients-2")
        assert page.locator("#gradients .exhibit").is_visible()
        assert shown_figures(page) == 1
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#guess-gradients", state="visible")
        page.go_back()
        page.wait_for_selector("#gradients .exhibit", state="visible")
        page.go_back()
        page.wait_for_selector("h1", state="visible")
        assert not page.locator(".teach-bar").is_visible()
        page.goto(address + "#teach-gradients-99")
        assert page.locator("#guess-gradients").is_visible(), "the first of its section stands for a missing screen"
        page.keyboard.press("Escape")
        page.go_back()
        page.wait_for_selector(".teach-bar", state="visible")
        page.goto(address + "#teach-nothing-1")
        assert counter(page)[0] == 1
        assert errors == []


def test_sliders_keep_their_keys(browser, address):
    with open_page(browser, **DESK) as (page, _, _):
        page.goto(address + "#teach-answer-1")
        slider = page.locator("#guess-answer input")
        before = int(slider.input_value())
        slider.press("ArrowRight")
        assert int(slider.input_value()) == before + 1
        assert counter(page)[0] == 1


def test_type_is_large_and_a_screen_fits(browser, address):
    with open_page(browser, **DESK) as (page, _, _):
        page.goto(address)
        size = """query => {
            const box = document.querySelector(query).getBoundingClientRect();
            return [box.width, box.height, box.bottom];
        }"""
        small = page.evaluate(size, "#variance figcaption")
        page.goto(address + "#teach-variance-2")
        page.wait_for_timeout(500)
        large = page.evaluate(size, "#variance figcaption")
        assert large[0] > 1.2 * small[0]
        bottom = page.evaluate(size, "#variance .exhibit")[2]
        assert bottom <= 800 - page.evaluate(size, ".teach-bar")[1]
        width = page.evaluate("document.querySelector('#variance .plot').clientWidth")
        assert page.evaluate("document.querySelector('#variance .plot')._fullLayout.width") == pytest.approx(
            width, abs=2
        )
        page.goto(address + "#teach-variance-1")
        scale = "new DOMMatrix(getComputedStyle(document.querySelector('main')).transform).a"
        assert page.evaluate(scale) * 17 >= 26


def test_a_phone_swipes_in_the_dark(browser, address):
    with open_page(browser, **PHONE) as (page, errors, _):
        page.goto(address + "#teach-variance-2")
        place, _ = counter(page)
        page.evaluate(SWIPE, [300, 100])
        wait_for_place(page, place + 1)
        page.evaluate(SWIPE, [100, 300])
        page.evaluate(SWIPE, [100, 130])
        wait_for_place(page, place)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for button in page.locator(".teach-bar button").all():
            box = button.bounding_box()
            assert box["height"] >= 40
            assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
        page.tap(".teach-leave")
        assert not page.locator(".teach-bar").is_visible()
        assert errors == []


@pytest.mark.parametrize("where", ["", "#teach-variance-2"], ids=["page", "teach"])
def test_paper_has_questions_with_answers_and_everything_else(browser, address, where):
    with open_page(browser, **DESK) as (page, _, _):
        page.goto(address + where)
        page.wait_for_selector("#variance .main-svg")
        paper = page.pdf(format="A4")
        assert len(re.findall(rb"/Type\s*/Page\b", paper)) <= 12
        page.emulate_media(media="print")
        for guess in page.locator(".guess").all():
            assert guess.locator(".guess-asks").is_visible()
            assert guess.locator("details p").bounding_box()["height"] > 10
            assert guess.bounding_box()["height"] < 170
        assert not page.locator(".guess button").first.is_visible()
        assert page.locator("#gradients .exhibit").is_visible()
        assert not page.locator(".teach-bar, .teach-start").filter(visible=True).count()
