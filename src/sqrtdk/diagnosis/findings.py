"""Record of a finding: its rule, severity, layer and head, evidence, threshold, cause and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from sqrtdk.records.json import FlatRecord, plain
from sqrtdk.wording.numbers import write_number

__all__ = ["SEVERITIES", "Finding", "Severity", "Threshold"]

Severity = Literal["info", "warning", "error"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""All severities, most severe first."""


class Threshold(NamedTuple):
    """Number that a rule compares with, and the source of that number."""

    value: float
    source: str

    def as_json(self) -> dict[str, Any]:
        """Return value and source by name."""
        return plain(self._asdict())  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class Finding(FlatRecord):
    """Finding about one layer or head, with its evidence. It prints as one line.

    `layer` is the module path (None if a summary without a path was diagnosed) and `layer_index` its position in the
    order of layers. `head` is None if all heads of the layer are meant. `evidence` has the measured numbers by name.

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
        where = "" if self.layer is None else f" in {' '.join(self.layer.split()) or 'the model itself'}"
        head = "" if self.head is None else f", head {self.head}"
        numbers = ", ".join(f"{name_evidence(name)} {write_evidence(value)}" for name, value in self.evidence.items())
        return f"{self.severity}: {self.rule}{where}{head}: {numbers}. {self.cause}"

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the finding that `as_json` was called on; a missing field raises a KeyError."""
        threshold = Threshold(content["threshold"]["value"], content["threshold"]["source"])
        return super().from_json({**content, "threshold": threshold})


def write_evidence(value: Any) -> str:
    """Return a value of the evidence as text; of a list, only the first eight entries are shown.

    >>> write_evidence([0.125, None]), write_evidence(list(range(9)))
    ('[0.125, –]', '[0, 1, 2, 3, 4, 5, 6, 7, …]')
    """
    if isinstance(value, list):
        return f"[{', '.join(map(write_evidence, value[:8]))}{', …' if len(value) > 8 else ''}]"
    return write_number(value) if value is None or isinstance(value, float) else str(value)


def severe_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, most severe first; those of equal severity are in the order of their layers."""
    return sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), one.layer_index))


def name_evidence(name: str) -> str:
    """Return the readable name of an evidence entry."""
    return "dₖ" if name == "d_k" else name.replace("_", " ")
