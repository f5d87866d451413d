"""Takes a test's rights away: root may write everything, nobody may not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run as the user nobody where the test runs as root. nobody may not look into pytest's `tmp_path`."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
