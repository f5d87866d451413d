"""Writes figures to files: the suffix chooses the renderer, and a file is either complete or not there."""

from __future__ import annotations

import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError, missing_extra
from sqrtdk.report import matplotlib_renderer, plotly_renderer
from sqrtdk.report.notebook import plan_figure
from sqrtdk.report.panels import Figure
from sqrtdk.report.shell import wrap_page

FORMATS = (".png", ".svg", ".html")


def save_figure(data: Any, path: str | Path) -> Path:
    """Write the figure of a result to a file: PNG, SVG or a self-contained HTML page, chosen by the suffix.

    Args:
        data: a `Record` whose kind has a figure, an `Audit`, or whatever else `figure` takes.
        path: the file to write; an existing one is replaced once the new one is complete.

    Returns:
        The path written.

    Raises:
        InvalidValueError: another suffix, a directory that does not exist, or a kind without a figure.
        MissingExtraError: matplotlib (PNG, SVG) or plotly (HTML) is not installed.
    """
    suffix = require_drawable(path)
    return write_whole(path, _render(plan_figure(data), suffix))


def require_drawable(path: str | Path) -> str:
    """Refuse a path that `save_figure` could not write, before the work that leads to the figure; give its suffix."""
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in FORMATS:
        raise InvalidValueError("path", f"must end in {', '.join(FORMATS)}, got {str(path)!r}")
    package = "plotly" if suffix == ".html" else "matplotlib"
    if importlib.util.find_spec(package) is None:
        raise missing_extra(package, "report")
    require_directory(target)
    return suffix


def _render(figure: Figure, suffix: str) -> bytes:
    if suffix == ".html":
        return wrap_page(figure.title, plotly_renderer.render_fragment(figure, "figure")).encode()
    return matplotlib_renderer.render(figure, "png" if suffix == ".png" else "svg")


def require_page(path: str | Path) -> None:
    """Refuse a path that `write_report` could not write, before the work that leads to the page."""
    if Path(path).suffix.lower() != ".html":
        raise InvalidValueError("path", f"must end in .html, got {str(path)!r}")
    require_drawable(path)


def require_directory(path: Path) -> None:
    """Refuse a path whose directory does not exist or cannot be written, or that is a directory itself."""
    if not path.parent.is_dir():
        raise InvalidValueError(
            "path", f"must lie in an existing directory, got {str(path)!r}; make {str(path.parent)!r} first"
        )
    if path.is_dir():
        raise InvalidValueError("path", f"must be a file, got the directory {str(path)!r}")
    if not os.access(path.parent, os.W_OK):
        raise InvalidValueError("path", f"must lie in a directory that can be written, got {str(path)!r}")


def write_whole(path: str | Path, content: bytes) -> Path:
    """Write a file so that readers see the old content or the new, never a part: temporary file, then rename."""
    target = Path(path)
    require_directory(target)
    # Beside the target, as a rename is atomic within one file system only.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(content)
        os.replace(draft, target)
    except OSError as error:
        raise InvalidValueError("path", f"must be a file that can be written, got {str(path)!r} ({error})") from None
    finally:
        draft.unlink(missing_ok=True)
    return target
