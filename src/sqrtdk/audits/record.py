"""The record of an audit: heads, findings, scales and what could not be seen; it round-trips through strict JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np

from sqrtdk.audits.reading import (
    describe_calls,
    describe_findings,
    describe_patterns,
    describe_scale,
    describe_spread,
    describe_unseen,
)
from sqrtdk.counterfactual import Variation
from sqrtdk.display import count
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.findings import SEVERITIES, Finding
from sqrtdk.patterns import ENOUGH_KEYS, NOT_ENOUGH_DATA, patterns, rows_that_see
from sqrtdk.records import plain
from sqrtdk.summary import BIN_EDGES, FARTHEST, HeadSummary, Moments

__all__ = ["SCHEMA_VERSION", "Audit", "AuditedHead", "AuditedRows", "AuditedScale"]

SCHEMA_VERSION = 1
_NO_PLACE = ("broad", "content", NOT_ENOUGH_DATA)
_KEYS = ("heads", "findings", "scale", "unattributed", "unattributed_where", "padding")


@dataclass(frozen=True)
class AuditedHead:
    """What one head did; a number is None where no row had it.

    Attributes:
        layer: module path, with the call where a module is called several times in a forward pass: "layer (call 3)".
        layer_index: place of the layer in the order of first calls.
        head: query head, from 0.
        pattern: as `sqrtdk.diagnosis.patterns` names it.
        saturation_index: mean over rows, as `entropy_ratio`, `max_weight` and `effective_keys` are.
        max_logit: the largest logit of all rows, and `score_max` the largest score.
        offset: the commonest max_key − position and its share of rows, `offset_share`.
        key_share: the share of a sequence's rows whose most attended key is its commonest one, mean over sequences.
        rows: how many rows were seen, `rows_judged` those of them that see at least 32 keys.
        spread: standard deviation of the scores (`std`) and its factors `width`, `length`, `distinct`, `alignment`, as
            `CauseSplit.parts` has them; None where one of them is not known.
        call: which call of its module in a forward pass the layer is; None where the module is called once.
        second_offset_share: the share of rows at the next commonest offset.
    """

    layer: str
    layer_index: int
    head: int
    pattern: str
    saturation_index: float | None
    entropy_ratio: float | None
    max_weight: float | None
    max_logit: float | None
    score_max: float | None
    effective_keys: float | None
    offset: int | None
    offset_share: float | None
    key_share: float | None
    rows: int
    rows_judged: int
    spread: Mapping[str, float] | None = None
    call: int | None = None
    second_offset_share: float | None = None

    @property
    def pattern_share(self) -> float | None:
        """The share of rows whose most attended key is where the pattern says; None where it names no place."""
        if self.pattern == "sink":
            return self.key_share
        return None if self.pattern in _NO_PLACE else self.offset_share

    @staticmethod
    def of(
        layer: str,
        layer_index: int,
        summary: HeadSummary,
        spreads: Sequence[Mapping[str, float] | None] = (),
        call: int | None = None,
    ) -> list[AuditedHead]:
        """The heads of a layer's summary, with the spread of each if it is known, and the call if there are several."""
        names, judged = patterns(summary), rows_that_see(summary, ENOUGH_KEYS)
        keys = summary.max_keys
        commonest = keys.offsets[:, 1:-1].argmax(axis=1) - FARTHEST
        second = np.partition(keys.offsets[:, 1:-1], -2, axis=1)[:, -2] / np.maximum(keys.rows, 1)
        heads = []
        for head in range(summary.heads):
            has_offset = bool(keys.offsets[head, 1:-1].any())
            heads.append(
                AuditedHead(
                    layer=layer,
                    layer_index=layer_index,
                    head=head,
                    pattern=names[head],
                    saturation_index=_finite(summary["saturation_index"].mean[head]),
                    entropy_ratio=_finite(summary["entropy_ratio"].mean[head]),
                    max_weight=_finite(summary["max_weight"].mean[head]),
                    max_logit=_finite(summary["max_logit"].largest[head]),
                    score_max=_finite(summary["score_max"].largest[head]),
                    effective_keys=_finite(summary["effective_keys"].mean[head]),
                    offset=int(commonest[head]) if has_offset else None,
                    offset_share=_finite(keys.offset_share(int(commonest[head]))[head]) if has_offset else None,
                    key_share=_finite(keys.commonest_share[head]),
                    rows=int(summary.rows_seen[head]),
                    rows_judged=int(judged[head]),
                    spread=spreads[head] if spreads else None,
                    call=call,
                    second_offset_share=float(second[head]) if has_offset else None,
                )
            )
        return heads


@dataclass(frozen=True)
class AuditedScale:
    """The scale of one layer: declared, measured, and how it was measured; None where it is not known.

    Attributes:
        layer: module path, with the call where a module is called several times in a forward pass.
        layer_index: place of the layer in the order of first calls.
        declared: what the configuration, else the model's family, says; `declared_by` names which.
        measured: what multiplies the product of the projections' outputs.
        at_the_call: what multiplies q·kᵀ, and `before_the_call` what q and k were multiplied by before.
        d_k: width of the head vectors.
        normalised: whether q or k passes a norm after its projection.
        softcap: the soft cap of the scores.
        how: how `before_the_call` was obtained, and `reason` why a number is None.
        dtype: what q and k are rounded to, and `logits_dtype` what the logits are.
        on_the_mask: what a mask with finite entries was multiplied by after it was added.
        difference: the largest difference between the recovered weights and the model's own, where those are seen.
        call: which call of its module in a forward pass the layer is; None where the module is called once.
    """

    layer: str
    layer_index: int
    declared: float | None
    declared_by: str | None
    measured: float | None
    at_the_call: float | None
    before_the_call: float | None
    d_k: int
    normalised: bool
    softcap: float | None
    how: str
    reason: str | None
    dtype: str
    logits_dtype: str
    on_the_mask: float | None = None
    difference: float | None = None
    call: int | None = None

    def __post_init__(self) -> None:
        numbers = ("declared", "measured", "at_the_call", "before_the_call", "softcap", "on_the_mask", "difference")
        for name in numbers:
            object.__setattr__(self, name, _finite(getattr(self, name)))


_HISTOGRAMS = ("entropy_ratio", "saturation_index")
_MOST_BINS = 16


@dataclass(frozen=True)
class AuditedRows:
    """How the rows of one head are distributed, and what they would do at other temperatures.

    Attributes:
        layer: module path.
        head: query head, from 0.
        histograms: by row statistic `edges` and `counts`, at most 16 bins between the least and the largest row.
        temperatures: by what the model's own is multiplied; empty if no scores were kept.
        entropy_ratio: mean over the kept rows at each temperature, as `jacobian_trace` 1 − Σp² is; None if unknown.
    """

    layer: str
    head: int
    histograms: Mapping[str, Mapping[str, Sequence[float]]]
    temperatures: Sequence[float] = ()
    entropy_ratio: Sequence[float | None] = ()
    jacobian_trace: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        for item in fields(self)[2:]:
            object.__setattr__(self, item.name, plain(getattr(self, item.name)))

    @staticmethod
    def of(layer: str, summary: HeadSummary, variations: Sequence[Variation] = ()) -> list[AuditedRows]:
        """The heads of a layer's summary, with what a counterfactual over temperatures gave for this layer."""
        rows = []
        for head in range(summary.heads):
            own = [one for one in variations if (one.head, one.change) == (head, "temperature")]
            rows.append(
                AuditedRows(
                    layer=layer,
                    head=head,
                    histograms={
                        name: _shorten(summary[name], head) for name in _HISTOGRAMS if summary[name].count[head]
                    },
                    temperatures=[one.value for one in own if one.value is not None],
                    entropy_ratio=[_brief(one.entropy_ratio) for one in own],
                    jacobian_trace=[_brief(one.jacobian_trace) for one in own],
                )
            )
        return rows


def _shorten(moments: Moments, head: int) -> dict[str, list[float]]:
    """The bins of a head that hold rows, and those between, neighbours put together until they are few."""
    counts = moments.histogram[head]
    first, last = np.flatnonzero(counts)[[0, -1]]
    borders = np.unique(np.linspace(first, last + 1, min(last + 1 - first, _MOST_BINS) + 1).round().astype(int))
    lower = np.insert(BIN_EDGES, 0, -np.inf)
    edges = np.clip(np.append(lower, np.inf)[borders], moments.least[head], moments.largest[head])
    return {"edges": [_brief(edge) or 0.0 for edge in edges], "counts": np.add.reduceat(counts, borders[:-1]).tolist()}


def _brief(value: Any) -> float | None:
    # Six digits are more than a picture shows.
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


@dataclass(frozen=True, repr=False)
class Audit:
    """What `sqrtdk.torch.audit` found out about a model on one batch; printed it is a few lines.

    Attributes:
        heads: one record per head, layers in the order of first calls.
        findings: what is wrong, the severe first.
        scale: one record per layer.
        unattributed: how many calls look like attention and were not understood; `unattributed_where` the module paths.
        padding: how it was told which rows are padding.
        about: the model, the batch, notes, versions: plain values by name.
        rows: per head how its rows are distributed; empty in records that were made without.

    >>> audit = Audit((), (), (), 0, (), "unknown", {"model": "GPT2Model"})
    >>> audit
    Audit of GPT2Model: 0 layers, 0 heads; padding: unknown
    Nothing was found wrong.
    >>> Audit.from_json(audit.as_json()) == audit
    True
    """

    heads: Sequence[AuditedHead]
    findings: Sequence[Finding]
    scale: Sequence[AuditedScale]
    unattributed: int
    unattributed_where: Sequence[str]
    padding: str
    about: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[AuditedRows] = ()

    def __post_init__(self) -> None:
        for name in ("heads", "scale", "unattributed_where", "rows"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "findings", tuple(Finding.from_json(one.as_json()) for one in self.findings))
        object.__setattr__(self, "about", plain(self.about))

    @property
    def layers(self) -> dict[str, tuple[AuditedHead, ...]]:
        """The heads by layer path, in the order of first calls."""
        return {path: tuple(head for head in self.heads if head.layer == path) for path in self._paths()}

    def _paths(self) -> list[str]:
        return list(dict.fromkeys(head.layer for head in self.heads))

    @property
    def worst(self) -> str | None:
        """The highest severity among the findings; None without findings."""
        return next((name for name in SEVERITIES if any(one.severity == name for one in self.findings)), None)

    @property
    def pattern_counts(self) -> Counter[str]:
        """How many heads follow each pattern."""
        return Counter(head.pattern for head in self.heads)

    @property
    def title(self) -> str:
        """The model, how much of it was seen and how padding was told."""
        size = f"{count(len(self._paths()), 'layer')}, {count(len(self.heads), 'head')}"
        return f"Audit of {self.about.get('model', 'a model')}: {size}; padding: {self.padding}"

    @property
    def reading(self) -> list[str]:
        """Sentences about the patterns, the scale, the findings and what could not be seen, made from the numbers."""
        return [
            *describe_patterns(self.heads),
            *describe_calls(self.scale),
            *describe_scale(self.scale),
            *describe_spread([head.spread for head in self.heads]),
            describe_findings(self.findings),
            *describe_unseen(self.unattributed, self.unattributed_where, self.about.get("unattributed_why", {})),
            *self.about.get("notes", []),
        ]

    def __repr__(self) -> str:
        return "\n".join([self.title, *self.reading])

    def _repr_html_(self) -> str:
        from sqrtdk.audits.markup import render_audit

        return render_audit(self)

    def as_json(self) -> dict[str, Any]:
        """The audit as plain JSON values, without NaN and infinities."""
        return {
            "heads": [asdict(head) for head in self.heads],
            "findings": [finding.as_json() for finding in self.findings],
            "scale": [asdict(one) for one in self.scale],
            "unattributed": self.unattributed,
            "unattributed_where": list(self.unattributed_where),
            "padding": self.padding,
            "about": {"kind": "audit", "schema_version": SCHEMA_VERSION, **plain(self.about)},
            **({"rows": [asdict(one) for one in self.rows]} if self.rows else {}),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Audit:
        """The audit that `as_json` was called on.

        Raises:
            InvalidTypeError: the content is no mapping.
            InvalidValueError: it is no audit, or one of another schema version.
        """
        if not isinstance(content, Mapping):
            raise InvalidTypeError("content", f"must be an audit as JSON, got {type(content).__name__}")
        missing = [name for name in (*_KEYS, "about") if name not in content]
        if missing:
            raise InvalidValueError("content", f"must be an audit, got one without {', '.join(missing)}")
        about = dict(content["about"])
        version = about.pop("schema_version", None)
        if about.pop("kind", None) != "audit" or version != SCHEMA_VERSION:
            raise InvalidValueError("content", f"must be an audit of schema version {SCHEMA_VERSION}, got {version!r}")
        try:
            return cls(
                heads=[AuditedHead(**_pick(AuditedHead, one)) for one in content["heads"]],
                findings=[Finding.from_json(one) for one in content["findings"]],
                scale=[AuditedScale(**_pick(AuditedScale, one)) for one in content["scale"]],
                **{name: content[name] for name in ("unattributed", "unattributed_where", "padding")},
                about=about,
                rows=[AuditedRows(**_pick(AuditedRows, one)) for one in content.get("rows", ())],
            )
        except (KeyError, TypeError) as error:
            raise InvalidValueError(
                "content", f"must be an audit with all fields of its records, got {error}"
            ) from None


def _pick(kind: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    optional = {
        item.name for item in fields(kind) if item.default is not MISSING or item.default_factory is not MISSING
    }
    return {item.name: content[item.name] for item in fields(kind) if item.name in content or item.name not in optional}


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
