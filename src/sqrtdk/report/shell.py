"""Frame of every page: one HTML file with style, script and Plotly inside, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from sqrtdk.report.palette import VERDICT_COLOURS
from sqrtdk.report.plotly_renderer import plotly_script

# The browser itself then refuses every request a page could make.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def wrap_page(title: str, body: str, scripts: Sequence[str] = ()) -> str:
    """Put a body into a complete page with the style sheet, Plotly's script (once) and the page's own scripts."""
    files = resources.files("sqrtdk.report")
    style = (files / "page.css").read_text(encoding="utf-8")
    # The shared script is a module to the local pages; here its names are seen by the scripts after it.
    shared = (resources.files("sqrtdk.wording") / "numbers.js").read_text(encoding="utf-8").replace("export ", "")
    contents = (
        shared if name == "numbers.js" else (files / name).read_text(encoding="utf-8") for name in ("page.js", *scripts)
    )
    embedded = "".join(f"<script>{content}</script>" for content in contents)
    verdicts = "".join(f"--{name}:{colour};" for name, colour in VERDICT_COLOURS.items())
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>:root{{{verdicts}}}\n{style}</style>\n"
        f'<script id="plotly">{plotly_script()}</script></head>\n'
        f"<body><main>\n{body}\n</main>\n{embedded}</body></html>\n"
    )
