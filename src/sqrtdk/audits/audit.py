"""The record of an audit: heads, findings, scales and calls that were not understood. It round-trips through JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from sqrtdk.audits.sentences import (
    describe_calls,
    describe_findings,
    describe_patterns,
    describe_scale,
    describe_spread,
    describe_unseen,
)
from sqrtdk.diagnosis.counterfactual import Variation
from sqrtdk.diagnosis.findings import SEVERITIES, Finding, severe_first
from sqrtdk.diagnosis.patterns import ENOUGH_KEYS, FIXED_KEY, NOT_ENOUGH_DATA, OTHER, patterns, rows_that_see
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.records.json import FlatRecord, plain
from sqrtdk.show.table import count
from sqrtdk.summary import BIN_EDGES, FARTHEST, HeadSummary, Moments

__all__ = ["SCHEMA_VERSION", "Audit", "AuditedHead", "AuditedRows", "AuditedScale", "ScaleRecord"]

SCHEMA_VERSION = 1
# Layers and findings that a printed audit shows.
_MOST_LAYERS = 24
_MOST_FINDINGS = 12
_NO_PLACE = ("broad", OTHER, NOT_ENOUGH_DATA)
_KEYS = ("heads", "findings", "scale", "unattributed", "unattributed_where", "padding")


@dataclass(frozen=True)
class AuditedHead(FlatRecord):
    """Measurements of one head. A number is None where no row had it.

    Attributes:
        layer: module path, with the call where a module is called several times in a forward pass: "layer (call 3)".
        layer_index: place of the layer in the order of first calls.
        head: query head, from 0.
        pattern: as `sqrtdk.diagnosis.patterns` names it.
        saturation_index: mean over rows, as `entropy_ratio`, `max_weight` and `effective_keys` are.
        max_logit: the largest logit of all rows; `score_max` is the largest score.
        offset: the most frequent max_key − position; `offset_share` is its share of rows.
        key_share: the share of a sequence's rows on the most attended key, mean over sequences.
        rows: number of rows; `rows_judged` counts those that see at least 32 keys.
        spread: standard deviation of the scores (`std`) and its factors `width`, `length`, `distinct`, `alignment`, as
            `CauseSplit.parts` has them; None where one of them is not known.
        call: number of the call in a forward pass, from 0; None where the module is called once.
        second_offset_share: the share of rows at the second most frequent offset.
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
        """Return the share of rows whose most attended key is where the pattern says, None if it names no place."""
        if self.pattern == FIXED_KEY:
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
        """Return the heads of a layer's summary, with the spreads if known and the call if several."""
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
class ScaleRecord(FlatRecord):
    """The scale of one layer, measured from the running model.

    Attributes:
        layer: module path, with the call where a module is called several times in a forward pass.
        d_k: width of the head vectors, columns that are zero in all queries and keys left out.
        at_the_call: what multiplies q·kᵀ; None if it differs between heads or rows.
        before_the_call: product of the factors on q and k after their projections; None if unknown.
        effective: the product of both; where `normalised`, the factor on the normalised vectors.
        normalised: whether q or k passes a norm after its projection.
        softcap: the soft cap of the scores.
        how: source of `before_the_call`: "exact" (from observed factors) or "lengths" (from vector lengths).
        reason: why a number is None.
        on_the_mask: what a mask with finite entries was multiplied by after it was added; None if none was added.
        difference: the largest difference between the weights that follow from q, k and the scale and the model's own;
            None where attention is one operation, whose weights are not visible.
        dtype: what q and k are rounded to.
        logits_dtype: what the logits are rounded to before softmax. In half precision the logits of a fused kernel stay
            in float32, those of a product that the model computes itself do not.
        call: number of the call in a forward pass, from 0; None for a module that is called once.
        after_the_norm: product of the factors on q and k after their norms; None if neither is normalised.
    """

    layer: str
    d_k: int
    at_the_call: float | None
    before_the_call: float | None
    effective: float | None
    normalised: bool
    softcap: float | None
    how: str
    reason: str | None
    on_the_mask: float | None = None
    difference: float | None = None
    dtype: str = "float32"
    logits_dtype: str = "float32"
    call: int | None = None
    after_the_norm: float | None = None

    @property
    def path(self) -> str:
        """Return the module path without the call."""
        return self.layer if self.call is None else self.layer.removesuffix(f"(call {self.call})").rstrip()


@dataclass(frozen=True)
class AuditedScale(ScaleRecord):
    """The measured and the declared scale of one layer. A number that is not finite is None.

    Attributes:
        layer_index: place of the layer in the order of first calls.
        declared: the scale by the configuration, or else by the model's family; `declared_by` names which.
    """

    layer_index: int = field(kw_only=True)
    declared: float | None = field(kw_only=True)
    declared_by: str | None = field(kw_only=True)

    def __post_init__(self) -> None:
        numbers = ("declared", "effective", "at_the_call", "before_the_call", "softcap", "on_the_mask", "difference")
        for name in (*numbers, "after_the_norm"):
            object.__setattr__(self, name, _finite(getattr(self, name)))

    @property
    def measured(self) -> float | None:
        """Return the effective scale, which multiplies the product of the projections' outputs."""
        return self.effective

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values, with the effective scale as `measured`."""
        content = super().as_json()
        return {"measured": content.pop("effective"), **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the record that `as_json` was called on. A missing field raises a KeyError."""
        return super().from_json({**content, "effective": content["measured"]})


_HISTOGRAMS = ("entropy_ratio", "saturation_index")
_MOST_BINS = 16


@dataclass(frozen=True)
class AuditedRows(FlatRecord):
    """Distribution of the rows of one head, and their statistics at other temperatures.

    Attributes:
        layer: module path.
        head: query head, from 0.
        histograms: `edges` and `counts` by row statistic, at most 16 bins between the least and the largest row.
        temperatures: factors on the model's own temperature; empty if no scores were kept.
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
        """Return the heads of a layer's summary, with this layer's counterfactual over temperatures."""
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
    """Return the bins of a head from the first to the last with rows, with neighbours merged to at most 16."""
    counts = moments.histogram[head]
    first, last = np.flatnonzero(counts)[[0, -1]]
    borders = np.unique(np.linspace(first, last + 1, min(last + 1 - first, _MOST_BINS) + 1).round().astype(int))
    lower = np.insert(BIN_EDGES, 0, -np.inf)
    edges = np.clip(np.append(lower, np.inf)[borders], moments.least[head], moments.largest[head])
    return {"edges": [_brief(edge) or 0.0 for edge in edges], "counts": np.add.reduceat(counts, borders[:-1]).tolist()}


def _brief(value: Any) -> float | None:
    # A picture shows fewer than six digits.
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


@dataclass(frozen=True, repr=False)
class Audit:
    """Result of `sqrtdk.torch.audit` for a model on one batch.

    Attributes:
        heads: one record per head, layers in the order of first calls.
        findings: problems, most severe first.
        scale: one record per layer.
        unattributed: number of calls that look like attention and were not understood; `unattributed_where` has their
            module paths.
        padding: source of the information which rows are padding.
        about: the model, the batch, notes, versions: plain values by name.
        rows: distribution of the rows of each head; empty in records made without it.

    >>> audit = Audit((), (), (), 0, (), "unknown", {"model": "GPT2Model"})
    >>> audit
    Audit of GPT2Model: 0 layers, 0 heads; padding: unknown
    Nothing was measured, so nothing was checked.
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
        """Return the heads by layer path, in the order of first calls."""
        return {path: tuple(head for head in self.heads if head.layer == path) for path in self._paths()}

    def _paths(self) -> list[str]:
        return list(dict.fromkeys(head.layer for head in self.heads))

    @property
    def worst(self) -> str | None:
        """Return the highest severity among the findings, None without findings."""
        return next((name for name in SEVERITIES if any(one.severity == name for one in self.findings)), None)

    @property
    def pattern_counts(self) -> Counter[str]:
        """Return the number of heads with each pattern."""
        return Counter(head.pattern for head in self.heads)

    @property
    def title(self) -> str:
        """Return the model, the numbers of layers and heads, and the source of padding."""
        size = f"{count(len(self._paths()), 'layer')}, {count(len(self.heads), 'head')}"
        return f"Audit of {self.about.get('model', 'a model')}: {size}; padding: {self.padding}"

    @property
    def reading(self) -> list[str]:
        """Return sentences about patterns, scale, findings and calls that were not understood."""
        return [
            *describe_patterns(self.heads),
            *describe_calls(self.scale),
            *describe_scale(self.scale),
            *describe_spread([head.spread for head in self.heads]),
            describe_findings(self.findings, self.scale),
            *describe_unseen(self.unattributed, self.unattributed_where, self.about.get("unattributed_why", {})),
            *self.about.get("notes", []),
        ]

    def __repr__(self) -> str:
        from sqrtdk.audits.heat_map import tabulate_heads

        lines = [self.title, *([tabulate_heads(self).as_text(_MOST_LAYERS)] if self.heads else []), *self.reading]
        for finding in severe_first(self.findings)[:_MOST_FINDINGS]:
            lines += [repr(finding), f"→ {finding.remedy}"]
        if len(self.findings) > _MOST_FINDINGS:
            lines.append(f"{count(len(self.findings) - _MOST_FINDINGS, 'more finding')}: `findings` has them all.")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from sqrtdk.audits.html import render_audit

        return render_audit(self)

    def as_json(self) -> dict[str, Any]:
        """Return the audit as plain JSON values, without NaN and infinities."""
        return {
            **{name: plain(getattr(self, name)) for name in _KEYS},
            "about": {"kind": "audit", "schema_version": SCHEMA_VERSION, **plain(self.about)},
            **({"rows": plain(self.rows)} if self.rows else {}),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Audit:
        """Return the audit that `as_json` was called on.

        Raises:
            InvalidTypeError: the content is not a mapping.
            InvalidValueError: the content is not an audit, or is an audit of another schema version.
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
                heads=[AuditedHead.from_json(one) for one in content["heads"]],
                findings=[Finding.from_json(one) for one in content["findings"]],
                scale=[AuditedScale.from_json(one) for one in content["scale"]],
                **{name: content[name] for name in ("unattributed", "unattributed_where", "padding")},
                about=about,
                rows=[AuditedRows.from_json(one) for one in content.get("rows", ())],
            )
        except (KeyError, TypeError) as error:
            raise InvalidValueError(
                "content", f"must be an audit with all fields of its records, got {error}"
            ) from None


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
