"""Pages share one frame: what differs between them is their own."""

import re

import pytest

from sqrtdk.web.pages import PAGES, render_page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_its_main_part_in_the_frame(page):
    text = render_page(page).decode()
    assert text.count("<main") == text.count("</main>") == text.count("<!doctype html>") == 1
    assert "$" not in re.sub(r"(?s)<main.*</main>", "", text)
    assert f'<script src="/static/{page.name}.js" type="module">' in text
    assert f"<title>{page.title} · sqrtdk</title>" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_links_to_every_page_and_marks_itself(page):
    (navigation,) = re.findall(r"<nav.*</nav>", render_page(page).decode())
    links = re.findall(r'<a href="([^"]+)"( aria-current="page")?>', navigation)
    assert [path for path, _ in links] == [other.path for other in PAGES]
    assert [path for path, current in links if current] == [page.path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_skip_link_leads_to_an_element_of_the_page(page):
    text = render_page(page).decode()
    assert f'<a class="skip" href="#{page.target}">' in text
    assert len(re.findall(rf'\sid="{page.target}"', text)) == 1
