"""Record of all reproductions that ships with sqrtdk, so that pages show it without training."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources

from sqrtdk.records.json import round_numbers
from sqrtdk.records.record import Record

__all__ = ["COMMAND", "compact", "load_reproductions"]

COMMAND = "sqrtdk reproduce --all --store runs.sqlite"
"""The command that computes it again."""


@cache
def load_reproductions() -> Record:
    """Return the record of `COMMAND` that comes with the package, with its date and versions.

    >>> "ssmax" in load_reproductions().spec["names"]
    True
    """
    content = (resources.files("sqrtdk.records.data") / "reproductions.json").read_text(encoding="utf-8")
    return Record.from_json(json.loads(content))


def compact(record: Record, date: str) -> Record:
    """Return a record small enough to ship: numbers with four digits, and of the curves only what charts show.

    Args:
        record: what `reproduce` returned.
        date: the day on which it was computed.
    """
    curves = {
        name: {key: round_numbers(of_one[key]) for key in ("chart", "title", "outcome", of_one["chart"]["curve"])}
        for name, of_one in record.curves.items()
    }
    tables = {name: [round_numbers(row) for row in rows] for name, rows in record.tables.items()}
    return replace(record, spec={**record.spec, "command": COMMAND, "date": date}, tables=tables, curves=curves)
