"""Opens a real browser for tests: a fresh page for each test, with its requests and console errors recorded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str:
    """Return Debian's chromium. If it is missing, skip the test unless SQRTDK_REQUIRE_BROWSER is set (CI)."""
    path = shutil.which("chromium")
    if path is None and os.environ.get("SQRTDK_REQUIRE_BROWSER") != "1":
        pytest.skip("no chromium here; `make test-long` says why")
    assert path is not None, "SQRTDK_REQUIRE_BROWSER is set and there is no chromium"
    return path


@contextmanager
def open_browser() -> Iterator[Any]:
    """Open Debian's chromium, driven by Playwright."""
    executable = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Any, **options: Any) -> Iterator[tuple[Any, list[str], list[str]]]:
    """Yield a new page with its errors and requests; `options` are those of Playwright's new_context (viewport …).

    Errors are uncaught exceptions and errors that scripts log. Requests are all except the page's own address.
    """
    context = browser.new_context(**options)
    try:
        page = context.new_page()
        errors: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: None if request.is_navigation_request() else requests.append(request.url))
        yield page, errors, requests
    finally:
        context.close()
