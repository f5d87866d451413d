"""Causes of large scores: the length of q, the spread of k, and the alignment of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sqrtdk.errors import InvalidValueError
from sqrtdk.records.json import plain
from sqrtdk.show.table import Shown, Table, count
from sqrtdk.summary.heads import Array
from sqrtdk.wording.numbers import write_number

__all__ = ["USUAL_ALIGNMENT", "CauseSplit", "explain_growth", "explain_size"]

USUAL_ALIGNMENT = (1.0, 4.0)
"""Alignments in trained models: 71 of the 72 heads of all-MiniLM-L6-v2 on English prose. Fresh models have about 1."""
STANDS_OUT = 2.0
"""A factor stands out if it is this many times the median of the compared heads; chosen here."""
GREW = 1.1
"""A deviation grew if it became at least this many times as large; chosen here."""

_NAMES = {"query": "the length of q", "spread": "the spread of k", "alignment": "the alignment of q and k"}


@dataclass(frozen=True, eq=False, repr=False)
class CauseSplit(Shown):
    """Factors of the variance of a head's scores, with one entry per head `[H]`.

    If the covariance of the keys is the same in all directions, scores scale·q·k of one query have the variance
    scale²·‖q‖²·tr Cov(k)/dₖ. The alignment is the measured variance over this value. Above 1, q points where k varies.

    Attributes:
        query_norm: mean ‖q‖ of the q that enters the product.
        query_square: mean of scale²·‖q‖².
        key_spread: tr Cov(k)/dₖ over the keys of a sequence, mean over sequences.
        alignment: measured variance of scores / (query_square · key_spread); NaN without spread.
        key_square: mean ‖k‖²/dₖ; NaN if not measured. key_spread lacks the part that all keys have in common.
    """

    query_norm: Array
    query_square: Array
    key_spread: Array
    alignment: Array
    key_square: Array

    def __post_init__(self) -> None:
        shapes = {np.shape(getattr(self, item.name)) for item in fields(self)}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise InvalidValueError(f"a CauseSplit must have one number per head in every entry, got {sorted(shapes)}")

    @staticmethod
    def of(
        query_norm: Any, query_square: Any, key_spread: Any, score_variance: Any, key_square: Any = None
    ) -> CauseSplit:
        """Return the split of measured score variances `[H]`.

        >>> CauseSplit.of([2.0], [1.0], [0.5], [1.5])
        CauseSplit of 1 head
        head  ‖q‖  spread of k  alignment
           0    2          0.5          3
        """
        norm, square, spread, variance = (
            np.asarray(one, np.float64) for one in (query_norm, query_square, key_spread, score_variance)
        )
        expected = square * spread
        with np.errstate(divide="ignore", invalid="ignore"):
            alignment = np.where(expected > 0, variance / expected, np.nan)
        whole = np.full_like(spread, np.nan) if key_square is None else np.asarray(key_square, np.float64)
        return CauseSplit(norm, square, spread, alignment, whole)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.query_norm)

    def of_head(self, head: int) -> dict[str, float]:
        """Return the numbers of one head, named as in the evidence of findings."""
        return {
            "query_norm": float(self.query_norm[head]),
            "key_spread": float(self.key_spread[head]),
            "alignment": float(self.alignment[head]),
        }

    def deviations(self, head: int) -> dict[str, float]:
        """Return the three factors whose product is the standard deviation of one head's scores."""
        squares = {"query": self.query_square, "spread": self.key_spread, "alignment": self.alignment}
        return {name: float(np.sqrt(square[head])) for name, square in squares.items()}

    def parts(self, head: int, scale: float, d_k: int) -> dict[str, float] | None:
        """Return the standard deviation of one head's scores, then its factors; None if one of them is unknown.

        σ = |scale|·√dₖ (`width`) · √(E‖q‖²/dₖ · E‖k‖²/dₖ) (`length`) · √(share of ‖k‖² that differs from key to key)
        (`distinct`) · √alignment. For independent standard normal q and k all but `width` are 1.

        >>> split = CauseSplit.of([8.0], [1.0], [0.5], [1.0], [2.0])
        >>> split.parts(0, 0.125, 64)
        {'std': 1.0, 'width': 1.0, 'length': 1.4142135623730951, 'distinct': 0.5, 'alignment': 1.4142135623730951}
        """
        width = abs(scale) * d_k**0.5
        square, spread, whole = (float(one[head]) for one in (self.query_square, self.key_spread, self.key_square))
        aligned = float(self.alignment[head])
        if not all(np.isfinite(x) and x > 0 for x in (width, square, spread, whole, aligned)):
            return None
        return {
            "std": (square * spread * aligned) ** 0.5,
            "width": width,
            "length": (square * whole) ** 0.5 / width,
            "distinct": (spread / whole) ** 0.5,
            "alignment": aligned**0.5,
        }

    def as_json(self) -> dict[str, list[float | None]]:
        """Return the numbers as lists, with NaN as null."""
        return plain({name: getattr(self, name) for name in ("query_norm", "key_spread", "alignment")})  # type: ignore[no-any-return]

    def _table(self) -> Table:
        rows = [
            (str(head), *(write_number(one[head], 3) for one in (self.query_norm, self.key_spread, self.alignment)))
            for head in range(self.heads)
        ]
        return Table(f"CauseSplit of {count(self.heads, 'head')}", ("head", "‖q‖", "spread of k", "alignment"), rows)


def explain_growth(splits: Sequence[tuple[float, CauseSplit]], head: int) -> str | None:
    """Return a sentence that names the factor with the most growth from the first to the last step; None if none grew.

    The result is also None if the product of the factors, the deviation of the scores, did not grow.

    >>> early, late = CauseSplit.of([1], [1], [1], [2]), CauseSplit.of([4], [16], [1.21], [38.72])
    >>> explain_growth([(0, early), (100, late)], 0)
    'From step 0 to 100 the length of q grew most (4 times; the deviation of the scores 4.4 times).'
    """
    usable = [(step, split.deviations(head)) for step, split in splits]
    usable = [(step, factors) for step, factors in usable if all(x > 0 and np.isfinite(x) for x in factors.values())]
    if len(usable) < 2:
        return None
    (first, before), (last, after) = usable[0], usable[-1]
    grown = {name: after[name] / before[name] for name in _NAMES}
    most = max(grown, key=lambda name: grown[name])
    whole = float(np.prod(list(grown.values())))
    if whole < GREW:
        return None
    return (
        f"From step {first:g} to {last:g} {_NAMES[most]} grew most ({write_number(grown[most], 3)} times; the "
        f"deviation of the scores {write_number(whole, 3)} times)."
    )


def explain_size(splits: Sequence[CauseSplit], split: CauseSplit, head: int) -> str | None:
    """Return a sentence that names the factor of a head that stands out among all heads of `splits`, if one does."""
    own = split.deviations(head)
    if not all(np.isfinite(x) for x in own.values()):
        return None
    others = [other.deviations(at) for other in splits for at in range(other.heads)]
    medians = {name: float(np.nanmedian([factors[name] for factors in others])) for name in _NAMES}
    ratios = {name: own[name] / medians[name] if medians[name] > 0 else np.nan for name in _NAMES}
    most = max(ratios, key=lambda name: ratios[name] if np.isfinite(ratios[name]) else 0.0)
    if ratios[most] >= STANDS_OUT:
        named = {"query": "the length of its q", "spread": "the spread of its k", "alignment": "their alignment"}[most]
        said = (
            f"It is {named} that stands out: {write_number(ratios[most], 3)} times the median of "
            f"{count(len(others), 'head')}"
        )
    else:
        said = f"None of length, spread and alignment stands out among {count(len(others), 'head')}"
    return f"{said}. {_judge_alignment(own['alignment'] ** 2)}"


def _judge_alignment(alignment: float) -> str:
    low, high = USUAL_ALIGNMENT
    # Fresh models lie on either side of 1: after rounding they count as within.
    where = "within" if low <= round(alignment, 1) <= high else "above" if alignment > high else "below"
    return f"An alignment of {write_number(alignment, 3)} is {where} the {low:g} to {high:g} of trained models."
