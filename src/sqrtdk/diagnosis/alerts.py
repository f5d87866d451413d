"""Alerts of a monitor: a bounded trend, and at most one standing alert per layer and rule."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from sqrtdk.diagnosis.findings import SEVERITIES, Finding, Severity, Threshold
from sqrtdk.diagnosis.score_size import CauseSplit
from sqrtdk.diagnosis.trend_rules import TrendPoint, fell_just_now
from sqrtdk.records.json import FlatRecord, plain
from sqrtdk.show.table import name_layer
from sqrtdk.summary import HeadSummary

__all__ = ["Alert", "Alerts", "Trend"]

MOST_POINTS = 128
"""Number of points that a trend holds before older points are thinned out."""
OBSERVATIONS_TO_CLEAR = 3
"""Number of observations in a row without the finding after which an alert clears; chosen here."""


class Trend:
    """Points of the layers over the steps of a run. Beyond 128 points, every second point of the older half is dropped.

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
        """Add the layers of one step. After a rewind, drop the points of this step and later steps."""
        kept = [at for at, (other, _) in enumerate(self.points) if other < step]
        if len(kept) >= MOST_POINTS:
            # The first two points stay, because the rule for a collapse compares with them.
            kept = [at for at in kept if at < 2 or at >= MOST_POINTS // 2 or at % 2 == 0]
        self.points = [self.points[at] for at in kept]
        self.causes = [self.causes[at] for at in kept]
        self.points.append((step, {path: TrendPoint.of(summary) for path, summary in layers.items()}))
        self.causes.append((step, dict(causes)))

    @property
    def is_suspect(self) -> bool:
        """Return whether a head fell to the entropy of a collapse in the last observation; another must confirm it."""
        if len(self.points) < 2:
            return False
        before, now = self.points[-2][1], self.points[-1][1]
        return any(bool(fell_just_now(before[path], point).any()) for path, point in now.items() if path in before)

    def state_dict(self) -> dict[str, Any]:
        """Return the trend as plain JSON values."""
        return {name: [[step, _plain_fields(layers)] for step, layers in getattr(self, name)] for name in _KINDS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the trend that `state_dict` returned."""
        for name, kind in _KINDS.items():
            setattr(self, name, [(step, _read_fields(kind, layers)) for step, layers in state[name]])


_KINDS: dict[str, type] = {"points": TrendPoint, "causes": CauseSplit}


def _plain_fields(layers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        path: {item.name: plain(getattr(record, item.name)) for item in fields(record)}
        for path, record in layers.items()
    }


def _read_fields(kind: type, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of arrays, with null read as NaN and names as a tuple."""

    def read(name: str, values: list[Any]) -> Any:
        return tuple(values) if name == "patterns" else np.array(values, np.bool_ if name == "enough" else np.float64)

    return {
        path: kind(**{name: read(name, values) for name, values in content.items()}) for path, content in layers.items()
    }


@dataclass(frozen=True, repr=False)
class Alert(FlatRecord):
    """Alert about one layer, raised or cleared. It prints as one line: fact, cause, remedy.

    Attributes:
        step: the observed step at which the alert was raised or cleared.
        state: "raised" or "cleared". An alert that becomes severe is raised once more.
        rule: "logit-growth", "entropy-collapse", "non-finite-rows", "score-overflow", "score-rounding" or
            "scale-undeclared" and the other rules about scales.
        severity: "error" (severe) or "warning".
        layer, layer_index: module path, and its position in the order of layers.
        head: the worst head, which evidence, cause and remedy describe; None if all heads are meant.
        heads: all heads that the alert is about; empty if all heads of the layer are meant.
        evidence, threshold, cause, remedy: as in the `Finding`.
    """

    step: int
    state: Literal["raised", "cleared"]
    rule: str
    severity: Severity
    layer: str | None
    layer_index: int
    head: int | None
    heads: tuple[int, ...]
    evidence: Mapping[str, Any]
    threshold: Threshold
    cause: str
    remedy: str

    @staticmethod
    def of(step: int, findings: Sequence[Finding]) -> Alert:
        """Return the alert for findings of one layer and rule, with the text of the worst finding."""
        worst = min(findings, key=lambda one: (SEVERITIES.index(one.severity), -_size(one)))
        heads = tuple(one.head for one in findings if one.head is not None) or tuple(worst.evidence.get("heads", ()))
        return Alert(
            step=step, state="raised", heads=heads, **{item.name: getattr(worst, item.name) for item in fields(worst)}
        )

    @property
    def is_raised(self) -> bool:
        """Return whether the alert is raised, not cleared."""
        return self.state == "raised"

    @property
    def is_severe(self) -> bool:
        """Return whether the severity is "error"."""
        return self.severity == "error"

    def __repr__(self) -> str:
        heads = f", head{'s' if len(self.heads) > 1 else ''} {_write_ranges(self.heads)}" if self.heads else ""
        where = f"{name_layer(self.layer or '')}{heads}"
        if not self.is_raised:
            return f"{where}: {self.rule} has cleared (step {self.step})"
        return f"{where}: {self.cause} {self.remedy} (step {self.step}, {self.severity}: {self.rule})"

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Alert:
        """Return the alert that `as_json` was called on; a missing field raises a KeyError."""
        threshold = Threshold(content["threshold"]["value"], content["threshold"]["source"])
        return super().from_json({**content, "threshold": threshold, "heads": tuple(content["heads"])})


def _size(finding: Finding) -> float:
    """Return the number that ranks findings of one rule: the score spread, else the score size, else 0."""
    for name in ("score_max_above_mean", "score_max_above_mean_at_last", "largest_score_in_size"):
        if name in finding.evidence:
            return float(finding.evidence[name])
    return 0.0


def _write_ranges(numbers: Sequence[int]) -> str:
    """Return the numbers as text, with runs of neighbours as ranges.

    >>> _write_ranges([0, 2, 3, 4, 9])
    '0, 2–4, 9'
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("–".join(map(str, ends)) for ends in ranges)


class Alerts:
    """Standing alerts, one per layer and rule. An alert is raised once and clears after several clean observations.

    A finding of severity "info" raises no alert, but keeps a standing alert from clearing: its head has not recovered.
    """

    def __init__(self) -> None:
        # By rule and layer: the alert as last observed, and the number of observations since then without a finding.
        self._standing: dict[tuple[str, str | None], tuple[Alert, int]] = {}

    @property
    def standing(self) -> list[Alert]:
        """Return the alerts that were raised and not cleared, with the numbers of their last observation."""
        return [alert for alert, _ in self._standing.values()]

    def update(self, step: int, findings: Iterable[Finding], layers: Container[str | None]) -> list[Alert]:
        """Return the alerts that one observation of these layers raises and clears.

        An alert that becomes severe is raised once more. Alerts of layers that were not observed stay as they are.
        """
        present: dict[tuple[str, str | None], list[Finding]] = {}
        for finding in findings:
            present.setdefault((finding.rule, finding.layer), []).append(finding)
        alerts = []
        for key, group in present.items():
            raised = [finding for finding in group if finding.severity != "info"]
            known = self._standing.get(key)
            if raised:
                alert = Alert.of(step, raised)
                if known is None or (alert.is_severe and not known[0].is_severe):
                    alerts.append(alert)
                else:
                    alert = replace(alert, step=known[0].step)
                self._standing[key] = (alert, 0)
            elif known is not None:
                self._standing[key] = (known[0], 0)
        for key, (alert, absent) in list(self._standing.items()):
            if key in present or alert.layer not in layers:
                continue
            if absent + 1 < OBSERVATIONS_TO_CLEAR:
                self._standing[key] = (alert, absent + 1)
            else:
                del self._standing[key]
                alerts.append(replace(alert, step=step, state="cleared"))
        return alerts

    def rewind(self, step: int) -> None:
        """Drop alerts that were raised at this step or later, because the run repeats these steps."""
        self._standing = {key: held for key, held in self._standing.items() if held[0].step < step}

    def state_dict(self) -> list[Any]:
        """Return the standing alerts as plain JSON values."""
        return [[alert.as_json(), absent] for alert, absent in self._standing.values()]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restore the alerts that `state_dict` returned."""
        read = [(Alert.from_json(content), absent) for content, absent in state]
        self._standing = {(alert.rule, alert.layer): (alert, absent) for alert, absent in read}
