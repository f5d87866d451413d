"""Loads the compiled kernel, if the installation has one."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def load_kernel() -> tuple[ModuleType | None, str | None]:
    """Return the compiled module and None, or None and the reason why it is missing."""
    try:
        return import_module("sqrtdk._kernel"), None
    except ImportError as error:
        # Some installations have no kernel; a kernel that cannot be loaded is a fault, which its error names.
        if isinstance(error, ModuleNotFoundError) and error.name == "sqrtdk._kernel":
            return None, "it was not compiled at installation"
        return None, f"it cannot be loaded: {error}"
