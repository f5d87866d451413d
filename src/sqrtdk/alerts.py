"""What a monitor keeps while a model trains: a bounded trend, and alerts that are raised once and cleared late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqrtdk.causes import CauseSplit
from sqrtdk.findings import Finding
from sqrtdk.summary import HeadSummary
from sqrtdk.trends import TrendPoint

__all__ = ["Alert", "Alerts", "Trend"]

MOST_POINTS = 128
"""Points of a trend before older ones are thinned out."""
LOOKS_TO_CLEAR = 3
"""An alert is cleared after so many looks in a row without its finding: chosen here."""


class Trend:
    """Points of the layers over the steps of a run; at most 128, the older half at every second place beyond that.

    >>> trend = Trend()
    >>> for step in range(1000):
    ...     trend.add(step, {}, {})
    >>> len(trend.points) <= 128, trend.points[0][0], trend.points[-1][0]
    (True, 0, 999)
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, dict[str, TrendPoint]]] = []
        self.causes: list[tuple[float, Mapping[str, CauseSplit]]] = []

    def add(self, step: int, layers: Mapping[str, HeadSummary], causes: Mapping[str, CauseSplit]) -> None:
        """Add the layers of one step; a step that is not after the last one (a run that began anew) starts over."""
        if self.points and step <= self.points[-1][0]:
            self.points, self.causes = [], []
        self.points.append((step, {path: TrendPoint.of(summary) for path, summary in layers.items()}))
        self.causes.append((step, dict(causes)))
        if len(self.points) > MOST_POINTS:
            # The first two stay: a collapse is told from them.
            keep = [at for at in range(len(self.points)) if at < 2 or at >= MOST_POINTS // 2 or at % 2 == 0]
            self.points = [self.points[at] for at in keep]
            self.causes = [self.causes[at] for at in keep]


@dataclass(frozen=True)
class Alert:
    """A finding that appeared (`is_raised`) or has been absent long enough at a step."""

    step: int
    is_raised: bool
    finding: Finding

    def as_json(self) -> dict[str, Any]:
        """The alert as plain JSON values: step, state, and the finding."""
        return {"step": self.step, "state": "raised" if self.is_raised else "cleared", **self.finding.as_json()}

    def __repr__(self) -> str:
        return f"step {self.step}, {'raised' if self.is_raised else 'cleared'}: {self.finding!r}"


class Alerts:
    """Which findings stand: each is raised once, and cleared after several looks in a row without it."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str | None, int | None], tuple[Finding, int]] = {}

    @property
    def standing(self) -> list[Finding]:
        """The findings that were raised and not cleared, as they were last seen."""
        return [finding for finding, _ in self._standing.values()]

    def update(self, step: int, findings: Sequence[Finding]) -> list[Alert]:
        """What the findings of one look raise and clear; information raises nothing."""
        severe = [finding for finding in findings if finding.severity != "info"]
        present = {(finding.rule, finding.layer, finding.head): finding for finding in severe}
        alerts = []
        for key, finding in present.items():
            if key not in self._standing:
                alerts.append(Alert(step, True, finding))
            self._standing[key] = (finding, 0)
        for key, (finding, absent) in list(self._standing.items()):
            if key in present:
                continue
            if absent + 1 < LOOKS_TO_CLEAR:
                self._standing[key] = (finding, absent + 1)
            else:
                del self._standing[key]
                alerts.append(Alert(step, False, finding))
        return alerts
