"""Comparison of two audits: changes per head, and findings that are new or gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqrtdk.audits.audit import Audit, AuditedHead, AuditedScale
from sqrtdk.audits.sentences import name_scale
from sqrtdk.diagnosis.findings import Finding
from sqrtdk.errors import InvalidTypeError
from sqrtdk.records.json import PlainRecord
from sqrtdk.show.table import Table, count, name_layer
from sqrtdk.wording.numbers import write_change, write_number

__all__ = ["Comparison", "HeadChange", "compare"]

VISIBLE_CHANGE = 0.005
"""Least change of a head's mean entropy ratio that counts as a change. A new pattern always counts."""
_COMPARED = ("saturation_index", "entropy_ratio", "max_weight", "max_logit")


@dataclass(frozen=True)
class HeadChange(PlainRecord):
    """One head in both audits: its patterns and the changes of its numbers (now − before), None where unknown."""

    layer: str
    layer_index: int
    head: int
    pattern_before: str
    pattern: str
    entropy_ratio_before: float | None
    entropy_ratio: float | None
    saturation_index_change: float | None
    entropy_ratio_change: float | None
    max_weight_change: float | None
    max_logit_change: float | None

    @property
    def has_new_pattern(self) -> bool:
        """Return whether the head follows another pattern than before."""
        return self.pattern != self.pattern_before


@dataclass(frozen=True)
class ScaleChange(PlainRecord):
    """A layer with another scale than before, in terms of dₖ."""

    layer: str
    before: str
    now: str


@dataclass(frozen=True)
class Comparison(PlainRecord):
    """The differences between two audits.

    Attributes:
        changes: one record per head that is in both audits, new patterns first, then by change of entropy ratio.
        new: findings that only the present audit has.
        gone: findings that only the earlier audit has.
        only_now: layers that only the present audit has.
        only_before: layers that only the earlier audit has.
        scale_changes: layers with another scale than before.
    """

    changes: Sequence[HeadChange]
    new: Sequence[Finding]
    gone: Sequence[Finding]
    only_now: Sequence[str]
    only_before: Sequence[str]
    scale_changes: Sequence[ScaleChange]

    @property
    def changed(self) -> list[HeadChange]:
        """Return the heads with another pattern, or with a mean entropy ratio that differs by at least 0.005."""
        return [
            one for one in self.changes if one.has_new_pattern or abs(one.entropy_ratio_change or 0.0) >= VISIBLE_CHANGE
        ]

    def tabulate(self, most: int) -> Table:
        """Return a table of at most `most` changed heads, new patterns first, then by change of entropy ratio."""
        rows = []
        for one in self.changed[:most]:
            pattern = f"{one.pattern_before} → {one.pattern}" if one.has_new_pattern else one.pattern
            changes = (one.entropy_ratio_change, one.saturation_index_change, one.max_logit_change)
            rows.append((name_layer(one.layer), str(one.head), pattern, *map(write_change, changes)))
        shown = f"The {len(rows)} of {count(len(self.changed), 'head')} that changed most"
        if len(rows) == len(self.changed):
            shown = f"{count(len(rows), 'head')} changed"
        return Table(
            f"{shown}: new patterns first, then by entropy ratio. Numbers are now − before.",
            ("layer", "head", "pattern", "entropy ratio change", "saturation index change", "largest logit change"),
            rows,
            left=frozenset({0, 2}),
        )

    @property
    def reading(self) -> list[str]:
        """Return sentences about the changes, made from the numbers."""
        patterns = sum(change.has_new_pattern for change in self.changes)
        moved = [abs(one.entropy_ratio_change) for one in self.changes if one.entropy_ratio_change is not None]
        lines = [
            f"{count(len(self.changes), 'head')} compared: {len(self.changed)} changed visibly, {patterns} of them to "
            "another pattern."
        ]
        if moved:
            lines.append(f"The mean entropy ratio of a head changed by up to {write_number(max(moved), 3)}.")
        lines += [
            f"The scale of {name_layer(one.layer)} was {one.before} and is {one.now}." for one in self.scale_changes
        ]
        lines.append(f"Findings: {len(self.new)} new, {len(self.gone)} gone.")
        for words, paths in (("Only now", self.only_now), ("Only before", self.only_before)):
            if paths:
                lines.append(f"{words}: {count(len(paths), 'layer')} ({', '.join(map(name_layer, paths[:3]))}).")
        return lines


def compare(now: Audit, before: Audit) -> Comparison:
    """Compare two audits of one architecture, such as two checkpoints. Heads are matched by layer path and number.

    >>> empty = Audit((), (), (), 0, (), "unknown")
    >>> compare(empty, empty).reading
    ['0 heads compared: 0 changed visibly, 0 of them to another pattern.', 'Findings: 0 new, 0 gone.']

    Raises:
        InvalidTypeError: an argument is not an audit.
    """
    for name, audit in (("now", now), ("before", before)):
        if not isinstance(audit, Audit):
            raise InvalidTypeError(name, f"must be an Audit, got {type(audit).__name__}")
    others = {(head.layer, head.head): head for head in before.heads}
    pairs = [(head, others[head.layer, head.head]) for head in now.heads if (head.layer, head.head) in others]
    changes = sorted((_change(head, other) for head, other in pairs), key=_remarkable_first)
    own, theirs = ({_place(one): one for one in audit.findings} for audit in (now, before))
    return Comparison(
        changes=changes,
        new=[one for place, one in own.items() if place not in theirs],
        gone=[one for place, one in theirs.items() if place not in own],
        only_now=[path for path in now.layers if path not in before.layers],
        only_before=[path for path in before.layers if path not in now.layers],
        scale_changes=_compare_scales(now.scale, before.scale),
    )


def _place(finding: Finding) -> tuple[str, str | None, int | None]:
    return finding.rule, finding.layer, finding.head


def _change(head: AuditedHead, other: AuditedHead) -> HeadChange:
    changed = {}
    for name in _COMPARED:
        present, past = getattr(head, name), getattr(other, name)
        changed[f"{name}_change"] = None if present is None or past is None else present - past
    return HeadChange(
        head.layer,
        head.layer_index,
        head.head,
        other.pattern,
        head.pattern,
        other.entropy_ratio,
        head.entropy_ratio,
        **changed,
    )


def _remarkable_first(change: HeadChange) -> tuple[bool, float, int, int]:
    return not change.has_new_pattern, -abs(change.entropy_ratio_change or 0.0), change.layer_index, change.head


def _compare_scales(now: Sequence[AuditedScale], before: Sequence[AuditedScale]) -> list[ScaleChange]:
    names = {scale.layer: name_scale(scale) for scale in before}
    return [
        ScaleChange(scale.layer, names[scale.layer], name_scale(scale))
        for scale in now
        if scale.layer in names and names[scale.layer] != name_scale(scale)
    ]
