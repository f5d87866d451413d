"""Local pages: Explore (sliders over the real operation), Words, Audit and Runs, and their small server."""

from __future__ import annotations

import importlib.util
from typing import Any

from sqrtdk.errors import missing_extra

__all__ = ["make_app", "serve"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("starlette", "uvicorn", "plotly"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "web")
    from sqrtdk.web import app, server  # here, so that what needs neither loads without them

    return {"make_app": app.make_app, "serve": server.serve}[name]
