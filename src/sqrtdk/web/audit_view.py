"""Content of the Audit page: heads, their map, findings, scales and sentences."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqrtdk import theory
from sqrtdk.audits import Audit
from sqrtdk.audits.heat_map import map_heads
from sqrtdk.audits.sentences import name_scale

# Keys for the curve of the diagram, which hardly depends on their number.
_CURVE_KEYS = 512


def view_audit(audit: Audit) -> dict[str, Any]:
    """Return all that the page shows, as plain values; cells of the map name a head by its place in `heads`.

    >>> from sqrtdk.audits import read_audit
    >>> view_audit(read_audit(None))["map"][0]["name"]
    'encoder.layer.0.attention.self'
    """
    places = {id(head): place for place, head in enumerate(audit.heads)}
    rows = [
        {
            "name": row.name,
            "cells": [cell and {"head": places[id(cell.head)], "pattern": cell.pattern} for cell in row.cells],
        }
        for row in map_heads(audit)
    ]
    return {
        **audit.as_json(),
        "title": audit.title,
        "reading": audit.reading,
        "map": rows,
        "pattern_counts": dict(audit.pattern_counts.most_common()),
        "scale_names": [name_scale(scale) for scale in audit.scale],
        "expected": _expect_ratios(),
    }


@lru_cache
def _expect_ratios() -> list[list[float]]:
    """Return H/ln n over ρ, the exact average for independent Gaussian logits."""
    width = 1.0 / float(theory.saturation_index(1.0, _CURVE_KEYS))
    places = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
    return [[rho, theory.expected_softmax(rho * width, _CURVE_KEYS).entropy_ratio] for rho in places]
