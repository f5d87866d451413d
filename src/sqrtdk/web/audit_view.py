"""An audit as the Audit page shows it: heads, findings, scales and sentences."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqrtdk import theory
from sqrtdk.audits import Audit
from sqrtdk.audits.reading import name_scale

# The curve of the diagram is for so many keys; it depends on them little.
_CURVE_KEYS = 512


def view_audit(audit: Audit) -> dict[str, Any]:
    """All that the page shows, as plain values.

    >>> from sqrtdk.audits import read_audit
    >>> view_audit(read_audit(None))["layers"][0]
    'encoder.layer.0.attention.self'
    """
    return {
        **audit.as_json(),
        "title": audit.title,
        "reading": audit.reading,
        "layers": list(audit.layers),
        "pattern_counts": dict(audit.pattern_counts.most_common()),
        "scale_names": [name_scale(scale) for scale in audit.scale],
        "law": _draw_law(),
    }


@lru_cache
def _draw_law() -> list[list[float]]:
    """H/ln n over ρ, exact for independent Gaussian logits over so many keys."""
    width = 1.0 / float(theory.saturation_index(1.0, _CURVE_KEYS))
    places = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
    return [[rho, theory.expected_softmax(rho * width, _CURVE_KEYS).entropy_ratio] for rho in places]
