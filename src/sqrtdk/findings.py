"""The record of a finding: what rule, how severe, where, on what evidence, against what threshold, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

__all__ = ["SEVERITIES", "Finding", "Severity", "Threshold"]

Severity = Literal["info", "warning", "error"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""From the severest."""


class Threshold(NamedTuple):
    """The number a rule compares with, and where that number comes from."""

    value: float
    source: str


@dataclass(frozen=True, repr=False)
class Finding:
    """One thing about one layer or head, with its evidence; printed it is one line.

    `layer` is the module path (None where one summary without a path was diagnosed), `layer_index` its place in the
    order of layers, `head` None where all heads of the layer are meant. `evidence` has the measured numbers by name.

    >>> Finding("dead-gradient", "info", "blocks.0", 0, 3, {"pattern": "previous", "share": 0.0125},
    ...         Threshold(0.05, "chosen here"), "The rows are nearly one-hot.", "Nothing.")
    info: dead-gradient in blocks.0, head 3: pattern previous, share 0.0125. The rows are nearly one-hot.
    """

    rule: str
    severity: Severity
    layer: str | None
    layer_index: int
    head: int | None
    evidence: Mapping[str, Any]
    threshold: Threshold
    cause: str
    remedy: str

    def __repr__(self) -> str:
        where = "" if self.layer is None else f" in {' '.join(self.layer.split())}"
        head = "" if self.head is None else f", head {self.head}"
        numbers = ", ".join(f"{name.replace('_', ' ')} {_write(value)}" for name, value in self.evidence.items())
        return f"{self.severity}: {self.rule}{where}{head}: {numbers}. {self.cause}"

    def as_json(self) -> dict[str, Any]:
        """The finding as plain JSON values; NaN and infinities become null."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "layer": self.layer,
            "layer_index": self.layer_index,
            "head": self.head,
            "evidence": {name: _plain(value) for name, value in self.evidence.items()},
            "threshold": {"value": _plain(self.threshold.value), "source": self.threshold.source},
            "cause": self.cause,
            "remedy": self.remedy,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Finding:
        """The finding that `as_json` was called on; what is missing raises a KeyError."""
        threshold = Threshold(content["threshold"]["value"], content["threshold"]["source"])
        return cls(**{**{item.name: content[item.name] for item in fields(cls)}, "threshold": threshold})


def _write(value: Any) -> str:
    if isinstance(value, list):
        shown = [_write(item) for item in value[:8]]
        return f"[{', '.join(shown)}{', …' if len(value) > 8 else ''}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
