"""Audit page: one self-contained HTML file with its style inside and no script."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

from sqrtdk.audits import Audit, Comparison
from sqrtdk.audits.html import render_audit, render_comparison, render_heads
from sqrtdk.report.files import write_whole
from sqrtdk.show.table import count

__all__ = ["render_audit_page", "write_audit_page"]

# The browser itself then refuses every request and every script.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_audit_page(audit: Audit, path: str | Path, comparison: Comparison | None = None, other: str = "") -> Path:
    """Write an audit as a page; an existing file is replaced once the new one is complete.

    Raises:
        InvalidValueError: the path cannot be written.
    """
    return write_whole(path, render_audit_page(audit, comparison, other).encode())


def render_audit_page(audit: Audit, comparison: Comparison | None = None, other: str = "") -> str:
    """Return the page that `write_audit_page` writes; every text from outside is escaped."""
    style = (resources.files("sqrtdk.report") / "page.css").read_text(encoding="utf-8")
    about = audit.about
    name = str(about.get("source", about.get("model", "a model")))
    made = [
        ("command", about.get("command", "")),
        ("input", about.get("input", about.get("batch", ""))),
        ("date", about.get("date", "")),
        ("versions", ", ".join(f"{package} {version}" for package, version in about.get("versions", {}).items())),
        ("processor", about.get("cpu", "")),
    ]
    lines = "<br>".join(f"{escape(word)}: {escape(str(value))}" for word, value in made if value)
    compared = (
        f"<section><h2>Changes since {escape(other)}</h2>{render_comparison(comparison)}</section>"
        if comparison is not None
        else ""
    )
    numbers = (
        f'<details class="sqrtdk-audit"><summary>All numbers of {count(len(audit.heads), "head")}</summary>'
        f"{render_heads(audit.heads)}</details>"
        if audit.heads
        else ""
    )
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>Audit of {escape(name)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>{style}</style></head>\n"
        f'<body><main class="broad"><h1>Audit of {escape(name)}</h1>\n{render_audit(audit)}\n{numbers}{compared}'
        f'<section id="making"><h2>How it was made</h2><p class="asks">{lines}</p></section></main></body></html>\n'
    )
