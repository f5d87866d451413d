"""Two audits side by side: what each head did before and does now, which findings are new and which are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqrtdk.audits.reading import name_scale
from sqrtdk.audits.record import Audit, AuditedHead, AuditedScale
from sqrtdk.display import count
from sqrtdk.errors import InvalidTypeError
from sqrtdk.findings import Finding

__all__ = ["Change", "Comparison", "compare"]

VISIBLE_CHANGE = 0.005
"""A head whose mean entropy ratio changed by less, and whose pattern is the same, is not shown as changed."""
_COMPARED = ("saturation_index", "entropy_ratio", "max_weight", "max_logit")


@dataclass(frozen=True)
class Change:
    """One head in both audits: its patterns, and by how much its numbers differ (now − before); None where unknown."""

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
        """Whether the head follows another pattern than before."""
        return self.pattern != self.pattern_before


@dataclass(frozen=True)
class Comparison:
    """What differs between two audits.

    Attributes:
        changes: one record per head that is in both, those with another pattern first, then by change of entropy ratio.
        new: findings that only the present audit has; `gone` those that only the other one had.
        only_now: layers that only the present audit has; `only_before` those that only the other one had.
        scale_changes: layers whose scale is another one: path, before, now.
    """

    changes: Sequence[Change]
    new: Sequence[Finding]
    gone: Sequence[Finding]
    only_now: Sequence[str]
    only_before: Sequence[str]
    scale_changes: Sequence[tuple[str, str, str]]

    @property
    def changed(self) -> list[Change]:
        """The heads with another pattern, or a mean entropy ratio that differs by at least 0.005."""
        return [
            one for one in self.changes if one.has_new_pattern or abs(one.entropy_ratio_change or 0.0) >= VISIBLE_CHANGE
        ]

    @property
    def reading(self) -> list[str]:
        """What changed, in sentences made from the numbers."""
        patterns = sum(change.has_new_pattern for change in self.changes)
        moved = [abs(one.entropy_ratio_change) for one in self.changes if one.entropy_ratio_change is not None]
        lines = [
            f"Compared: {count(len(self.changes), 'head')}, of which {len(self.changed)} changed visibly, "
            f"{patterns} to another pattern."
        ]
        if moved:
            lines.append(f"The mean entropy ratio of a head changed by up to {max(moved):.3g}.")
        lines += [f"The scale of {path} was {before} and is {now}." for path, before, now in self.scale_changes]
        lines.append(f"Findings: {len(self.new)} new, {len(self.gone)} gone.")
        for words, paths in (("Only here", self.only_now), ("Only in the other", self.only_before)):
            if paths:
                lines.append(f"{words}: {count(len(paths), 'layer')} ({', '.join(paths[:3])}).")
        return lines

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        return {
            "changes": [asdict(change) for change in self.changes],
            "new": [finding.as_json() for finding in self.new],
            "gone": [finding.as_json() for finding in self.gone],
            "only_now": list(self.only_now),
            "only_before": list(self.only_before),
            "scale_changes": [
                {"layer": path, "before": before, "now": now} for path, before, now in self.scale_changes
            ],
        }


def compare(now: Audit, before: Audit) -> Comparison:
    """Compare two audits of one architecture, as of two checkpoints; heads are matched by layer path and number.

    >>> empty = Audit((), (), (), 0, (), "unknown")
    >>> compare(empty, empty).reading
    ['Compared: 0 heads, of which 0 changed visibly, 0 to another pattern.', 'Findings: 0 new, 0 gone.']

    Raises:
        InvalidTypeError: for anything but audits.
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


def _change(head: AuditedHead, other: AuditedHead) -> Change:
    changed = {}
    for name in _COMPARED:
        present, past = getattr(head, name), getattr(other, name)
        changed[f"{name}_change"] = None if present is None or past is None else present - past
    return Change(
        head.layer,
        head.layer_index,
        head.head,
        other.pattern,
        head.pattern,
        other.entropy_ratio,
        head.entropy_ratio,
        **changed,
    )


def _remarkable_first(change: Change) -> tuple[bool, float, int, int]:
    return not change.has_new_pattern, -abs(change.entropy_ratio_change or 0.0), change.layer_index, change.head


def _compare_scales(now: Sequence[AuditedScale], before: Sequence[AuditedScale]) -> list[tuple[str, str, str]]:
    names = {scale.layer: name_scale(scale) for scale in before}
    return [
        (scale.layer, names[scale.layer], name_scale(scale))
        for scale in now
        if scale.layer in names and names[scale.layer] != name_scale(scale)
    ]
