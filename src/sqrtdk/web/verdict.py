"""Verdict on claimed weights: which of the shown scales gives them, to the digits of the claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqrtdk.wording.numbers import write_number

__all__ = ["Verdict", "judge", "judge_all"]

# Sums of rounded weights may be off by half a unit of the last digit per weight; slides also cut off digits.
_ROUNDING = 1.0


class Verdict(NamedTuple):
    """Verdict on one claim: whether some scale gives the claimed weights, its name (else None), and the reasons."""

    holds: bool
    scale: str | None
    text: str


def judge(claimed: Sequence[str], weights: Mapping[str, Sequence[float]], labels: Mapping[str, str]) -> Verdict:
    """Compare claimed weights with those that softmax gives under each scale.

    A claim holds if each weight is within one unit of its last digit. So 0.86 holds for 0.867, rounded or cut off.

    Args:
        claimed: the weights as written, of the first keys at least.
        weights: by the name of each scale, one per key.
        labels: the scales in words.

    >>> judge(["0.99", "0.00"], {"none": [0.646, 0.0, 0.354]}, {"none": "no scaling"}).text
    'Wrong: key 1 claimed 0.99, softmax gives 0.646 with no scaling.'
    >>> judge(["0.65", "0.00"], {"none": [0.646, 0.0, 0.354]}, {"none": "no scaling"}).text
    'Right: softmax gives these weights with no scaling.'
    """
    units = [10.0 ** -_count_decimals(text) for text in claimed]
    misses = {
        name: [abs(float(text) - weight) for text, weight in zip(claimed, row, strict=False)]
        for name, row in weights.items()
    }
    summed = _tell_sum(claimed, units, len(next(iter(weights.values()))))
    for name, errors in misses.items():
        if all(error <= _ROUNDING * unit * (1 + 1e-9) for error, unit in zip(errors, units, strict=True)):
            return Verdict(True, name, f"Right: softmax gives these weights with {labels[name]}.{summed}")
    nearest = min(misses, key=lambda name: max(misses[name]))
    errors = misses[nearest]
    at = errors.index(max(errors))
    digits = max(3, _count_decimals(claimed[at]))
    others = " No other scale shown here is nearer." if len(weights) > 1 else ""
    return Verdict(
        False,
        None,
        f"Wrong: key {at + 1} claimed {claimed[at]}, softmax gives {weights[nearest][at]:.{digits}f} with "
        f"{labels[nearest]}.{others}{summed}",
    )


def _tell_sum(claimed: Sequence[str], units: Sequence[float], keys: int) -> str:
    total = sum(map(float, claimed))
    if len(claimed) < keys or abs(total - 1.0) <= _ROUNDING * sum(units):
        return ""
    return f" The claimed weights sum to {write_number(total)}, not to 1."


def _count_decimals(text: str) -> int:
    mantissa, _, exponent = text.lower().partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def judge_all(claims: Sequence[Sequence[str]], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Judge each list of claimed weights against the columns of an answer of the page."""
    weights = {name: [float(weight) for weight in column["weights"]["by_key"]] for name, column in columns.items()}
    labels = {name: column["label"] for name, column in columns.items()}
    return [{"claimed": ", ".join(claim), **judge(claim, weights, labels)._asdict()} for claim in claims]
