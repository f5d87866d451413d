"""An audit as the Audit page shows it: heads, findings, scales and sentences, from a file or the one that ships."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqrtdk import theory
from sqrtdk.audits import Audit, read_shipped
from sqrtdk.audits.reading import name_scale
from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.records import read_bounded

_MOST_BYTES = 64 * 2**20
_SHIPPED = "minilm"
# The curve of the diagram is for so many keys; it depends on them little.
_CURVE_KEYS = 512


def read_audit(path: Path | None) -> Audit:
    """The audit in a file that `sqrtdk audit --json` wrote; the shipped one of MiniLM without a file.

    Raises:
        InvalidValueError: the file cannot be read, or holds no audit.
    """
    if path is None:
        return read_shipped(_SHIPPED)
    try:
        return Audit.from_json(json.loads(read_bounded(path, _MOST_BYTES).decode()))
    except SqrtdkError as error:
        raise InvalidValueError(f"audit must be what `sqrtdk audit --json` prints, got {path} ({error})") from None
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InvalidValueError(f"audit must be what `sqrtdk audit --json` prints, got {path} ({reason})") from None


def view_audit(audit: Audit) -> dict[str, Any]:
    """All that the page shows, as plain values.

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
