"""Sentences about an audit: patterns, scale, findings, and calls that were not understood."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sqrtdk.diagnosis.findings import SEVERITIES, Finding
from sqrtdk.diagnosis.patterns import ENOUGH_KEYS, ENOUGH_ROWS, NOT_ENOUGH_DATA
from sqrtdk.diagnosis.scale_rules import scale_tolerance
from sqrtdk.scales import default_factor
from sqrtdk.show.table import count
from sqrtdk.wording.numbers import write_number
from sqrtdk.wording.quantities import SPREAD_FACTORS

if TYPE_CHECKING:
    from sqrtdk.audits.audit import AuditedHead, AuditedScale

# Layers that are named one by one.
_MOST_NAMED = 3


def describe_patterns(heads: Sequence[AuditedHead]) -> list[str]:
    """Return the number of heads with each pattern, most frequent first, and the share of rows that follow it."""
    counts = Counter(head.pattern for head in heads)
    known = [
        f"{times} {name}{_write_shares([head.pattern_share for head in heads if head.pattern == name])}"
        for name, times in counts.most_common()
        if name != NOT_ENOUGH_DATA
    ]
    lines = [f"Patterns: {', '.join(known)}."] if known else []
    unknown = counts[NOT_ENOUGH_DATA]
    if unknown:
        lines.append(
            f"Not enough data for the pattern of {count(unknown, 'head')}: it takes {ENOUGH_ROWS} rows "
            f"with finite logits that see at least {ENOUGH_KEYS} keys."
        )
    return lines


def _write_shares(shares: Sequence[float | None]) -> str:
    """Return the least and the largest share in brackets.

    >>> _write_shares([0.791, 0.62]), _write_shares([0.9]), _write_shares([None])
    (' (62 to 79% of rows)', ' (90% of rows)', '')
    """
    percent = sorted({round(100 * share) for share in shares if share is not None})
    if not percent:
        return ""
    return f" ({percent[0]}{f' to {percent[-1]}' if len(percent) > 1 else ''}% of rows)"


def name_scale(scale: AuditedScale) -> str:
    """Return the measured scale of a layer as "1/√dₖ", "1/dₖ", "1" or the number, and "unknown" for None."""
    if scale.measured is None:
        return "unknown"
    tolerance = scale_tolerance(scale.dtype)
    for name, value in (("1/√dₖ", default_factor(scale.d_k)), ("1", 1.0), ("1/dₖ", 1.0 / scale.d_k)):
        if math.isclose(scale.measured, value, rel_tol=tolerance):
            return name
    return write_number(scale.measured)


def describe_spread(spreads: Sequence[Mapping[str, float] | None]) -> list[str]:
    """Return the factors of the scores' standard deviation, as geometric means over the heads that have them.

    >>> describe_spread([{"std": 3.0, "width": 1.0, "length": 4.0, "distinct": 0.5, "alignment": 1.5}, None])
    ['Scores have a standard deviation of 3 (geometric mean of 1 head): 1 by width (scale·√dₖ) × 4 by the lengths of q
    and k × 0.5 by what differs between keys × 1.5 by alignment.']
    """
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return []
    means = {name: math.exp(sum(math.log(one[name]) for one in known) / len(known)) for name in known[0]}
    factors = " × ".join(f"{write_number(means[name], 3)} by {words}" for name, words in SPREAD_FACTORS.items())
    heads = count(len(known), "head")
    spread = write_number(means["std"], 3)
    return [f"Scores have a standard deviation of {spread} (geometric mean of {heads}): {factors}."]


def describe_calls(scales: Sequence[AuditedScale]) -> list[str]:
    """Return a sentence about modules that are called several times in a forward pass. Each call is a layer."""
    calls = Counter(one.path for one in scales if one.call is not None)
    if not calls:
        return []
    named = [f"{path or 'the model itself'} ({times} times)" for path, times in list(calls.items())[:_MOST_NAMED]]
    more = f" and {len(calls) - _MOST_NAMED} more" if len(calls) > _MOST_NAMED else ""
    return [f"Called several times in a forward pass, each call a layer: {', '.join(named)}{more}."]


def describe_scale(scales: Sequence[AuditedScale]) -> list[str]:
    """Return one line if all layers have the same scale, else one line per scale, with the reason where unknown."""
    groups: dict[tuple[str, int], list[AuditedScale]] = {}
    for scale in scales:
        groups.setdefault((name_scale(scale), scale.d_k), []).append(scale)
    lines = []
    for (name, d_k), members in groups.items():
        where = _name_layers(members, len(scales))
        if name == "unknown":
            reasons = "; ".join(dict.fromkeys(one.reason or "it was not measured" for one in members))
            lines.append(f"The scale of {where} is unknown: {reasons}.")
            continue
        measured = write_number(members[0].measured)
        number = "" if name == measured else f", which is {measured}"
        lines.append(f"The scale is {name} in {where}{number} at dₖ {d_k}, {_declare(members)}{_remark(members)}.")
    return lines


def _name_layers(members: Sequence[AuditedScale], layers: int) -> str:
    if len(members) == layers:
        return {1: "the only layer", 2: "both layers"}.get(layers, f"all {layers} layers")
    named = ", ".join(one.layer or "the model itself" for one in members[:_MOST_NAMED])
    more = f" and {len(members) - _MOST_NAMED} more" if len(members) > _MOST_NAMED else ""
    return f"{len(members)} of {layers} layers ({named}{more})"


def _declare(members: Sequence[AuditedScale]) -> str:
    kinds = Counter(
        "not declared"
        if one.declared is None or one.measured is None
        else f"as declared by {one.declared_by or 'the model'}"
        if math.isclose(one.measured, one.declared, rel_tol=scale_tolerance(one.dtype))
        else f"not as declared ({write_number(one.declared)} by {one.declared_by or 'the model'})"
        for one in members
    )
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{name} in {times}" for name, times in kinds.items())


def _remark(members: Sequence[AuditedScale]) -> str:
    normalised = sum(one.normalised for one in members)
    capped = sum(one.softcap is not None for one in members)
    some = (("q or k normalised", normalised), ("soft cap", capped))
    words = [name if times == len(members) else f"{name} in {times}" for name, times in some if times]
    return f"; {', '.join(words)}" if words else ""


def describe_findings(findings: Sequence[Finding], scales: Sequence[AuditedScale]) -> str:
    """Return the number of findings of each severity, or what was checked if there are none.

    >>> describe_findings([], [])
    'Nothing was measured, so nothing was checked.'
    """
    counts = Counter(one.severity for one in findings)
    told = [
        f"{counts[name]} of severity {name}" if name == "info" else count(counts[name], name)
        for name in SEVERITIES
        if counts[name]
    ]
    if told:
        return f"Findings: {', '.join(told)}."
    if not scales:
        return "Nothing was measured, so nothing was checked."
    known = sum(one.measured is not None for one in scales)
    scale = "Scale, masks" if known == len(scales) else f"The scale of {known} of {len(scales)} layers, masks"
    return f"No problem was found. {scale if known else 'Masks'}, NaN, overflow and rounding of scores were checked."


def describe_unseen(times: int, where: Sequence[str], why: Mapping[str, str]) -> list[str]:
    """Return a sentence about calls that look like attention and were not understood, with place and reason.

    >>> describe_unseen(2, ["h.0"], {"h.0": "flex_attention is not followed"})
    ['Not understood: 2 calls that look like attention, in h.0 (flex_attention is not followed).']
    """
    if not times:
        return []
    named = [f"{path or 'the model itself'}{f' ({why[path]})' if path in why else ''}" for path in where[:_MOST_NAMED]]
    more = f" and {len(where) - _MOST_NAMED} more" if len(where) > _MOST_NAMED else ""
    verb = "looks" if times == 1 else "look"
    return [f"Not understood: {count(times, 'call')} that {verb} like attention, in {', '.join(named)}{more}."]
