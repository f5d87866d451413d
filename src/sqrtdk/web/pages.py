"""Local pages: one frame (head and links) around the main part of each page."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import resources
from string import Template
from typing import NamedTuple

from sqrtdk.report.cause import render_cause
from sqrtdk.report.guess import render_question
from sqrtdk.report.questions import ask_about_cause
from sqrtdk.report.replay import render_replay_view
from sqrtdk.report.words import render_view

__all__ = ["PAGES", "Page", "read_plotly", "render_page"]


class Page(NamedTuple):
    """Page of the site.

    Args:
        path: its address.
        name: of its main part `<name>.html` and its script `<name>.js`.
        link: what the other pages call it.
        title: the browser's title for it.
        target, content: the element to which a keyboard's user can skip, and what is there.
    """

    path: str
    name: str
    link: str
    title: str
    target: str
    content: str


PAGES = (
    Page("/", "explore", "Explore", "Explore the scale of attention", "results", "the results"),
    Page("/words", "words_page", "Words", "Words", "view", "the words"),
    Page("/audit", "audit", "Audit", "Audit", "map", "the map of heads"),
    Page("/runs", "runs", "Runs", "Runs", "runs", "the runs"),
)

# Views that the report has too, by the marks at which they stand in a main part.
_CURRENT = ' aria-current="page"'


def render_page(page: Page) -> bytes:
    """Render the whole page.

    >>> "<title>Audit · sqrtdk</title>" in render_page(PAGES[2]).decode()
    True
    """
    links = "".join(f'<a href="{other.path}"{_CURRENT if other == page else ""}>{other.link}</a>' for other in PAGES)
    frame = Template(_read("frame.html"))
    main = _read(f"{page.name}.html").rstrip()
    for mark, render in _VIEWS.items():
        main = main.replace(mark, render())
    return frame.substitute(page._asdict(), links=links, main=main, plotly=_stand_in_for_styles()).encode()


def _render_first_screen() -> str:
    return f"{render_cause()}{render_question('cause', ask_about_cause())}"


_VIEWS: dict[str, Callable[[], str]] = {
    "$cause": _render_first_screen,
    "$words": partial(render_view, ""),
    "$replay": render_replay_view,
}


def _read(name: str) -> str:
    return (resources.files("sqrtdk.web") / "static" / name).read_text(encoding="utf-8")


def _stand_in_for_styles() -> str:
    """Return empty style elements by the names that Plotly's script would otherwise add for maps.

    The page's policy would refuse those, with an error in the console.
    """
    names = re.findall(rb'document\.getElementById\("([0-9a-f]{64})"\)', read_plotly())
    return "\n".join(f'<meta id="{name.decode()}" name="plotly">' for name in dict.fromkeys(names))


@lru_cache
def read_plotly() -> bytes:
    """Return Plotly's script from its package."""
    return (resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
