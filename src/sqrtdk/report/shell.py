"""Frame of every page: one HTML file with style, script and Plotly inside, which needs no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib import resources

from sqrtdk.report.palette import VERDICT_COLOURS
from sqrtdk.report.plotly_renderer import plotly_script

# The browser itself then refuses every request a page could make.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_ONLY_BY_SCRIPT = ".controls, .try-charts, .cause figure + figure, .save, #words"
_IMPORT = re.compile(r'^import (?:\{.*\} from )?"\./([\w.]+)";$', re.MULTILINE)


def wrap_page(title: str, body: str, scripts: Sequence[str] = ()) -> str:
    """Put a body into a complete page with the style sheets, Plotly's script (once) and the page's own scripts."""
    style = "".join(read_shared(name) for name in ("page.css", "teaching.css"))
    embedded = "".join(
        f"<script>{content}</script>" for content in _flatten(["page.js", "guess.js", *scripts, "teach.js"]).values()
    )
    verdicts = "".join(f"--{name}:{colour};" for name, colour in VERDICT_COLOURS.items())
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>:root{{{verdicts}}}\n{style}</style>\n"
        f"<noscript><style>{_ONLY_BY_SCRIPT} {{ display: none !important; }}</style></noscript>\n"
        f'<script id="plotly">{plotly_script()}</script></head>\n'
        f"<body><main>\n{body}\n</main>\n{embedded}</body></html>\n"
    )


def read_shared(name: str) -> str:
    """Return a script or style sheet that the report and the local pages share.

    >>> read_shared("numbers.js")[:10]
    '// Numbers'
    """
    package = "sqrtdk.wording" if name == "numbers.js" else "sqrtdk.report"
    return (resources.files(package) / name).read_text(encoding="utf-8")


def _flatten(names: Sequence[str]) -> dict[str, str]:
    """Return scripts and what they import, each once and after its imports.

    The local pages load them as modules. Here each is a plain script whose names the scripts after it see.
    """
    contents: dict[str, str] = {}
    for name in names:
        text = read_shared(name)
        contents |= _flatten(_IMPORT.findall(text))
        contents.setdefault(name, _IMPORT.sub("", text).replace("export ", ""))
    return contents
