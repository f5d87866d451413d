"""Predicts heads at other temperatures, lengths and soft caps from the scores of a few of their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.records.json import PlainRecord
from sqrtdk.show.table import Shown, Table, count, name_layer
from sqrtdk.theory import condensation, expected_softmax, saturation_index
from sqrtdk.wording.numbers import write_number

__all__ = ["Counterfactual", "ScoreRow", "Variation", "counterfactual"]

Array = npt.NDArray[Any]
Change = Literal["none", "temperature", "length", "softcap"]
# Largest deviation for the exact average over Gaussian rows; beyond it the many-key limit is close.
_LARGEST_DEVIATION = 40.0


@dataclass(frozen=True, eq=False)
class ScoreRow:
    """Scores of one query with the n keys that at least one head sees.

    Attributes:
        scores: scale·q·k before soft cap and mask `[H, n]`.
        added: the additive mask `[H, n]`; None if there is none.
        visible: whether each head sees each key `[H, n]`; None if all keys are visible.
        softcap: soft cap of the scores; None if there is none.
        place: position of the query among these keys; None if the query is not one of them.
    """

    scores: Array
    added: Array | None = None
    visible: Array | None = None
    softcap: float | None = None
    place: int | None = None


@dataclass(frozen=True)
class Variation(PlainRecord):
    """One head under one change, as means over `rows` rows.

    `change` is "none" (the model as it is), "temperature" (value: the factor on the model's temperature), "length"
    (value: the keys that a row sees) or "softcap" (value: the cap, None for none). `is_predicted` marks numbers
    computed for independent Gaussian logits with the deviation of the head's rows, not measured. Unknown numbers are
    None.
    """

    layer: str
    head: int
    change: Change
    value: float | None
    rows: int
    entropy: float | None
    entropy_ratio: float | None
    saturation_index: float | None
    jacobian_trace: float | None
    jacobian_norm: float | None
    is_predicted: bool = False


@dataclass(frozen=True, repr=False)
class Counterfactual(Shown):
    """Result of `counterfactual`: every head under every change. It prints as a table."""

    variations: tuple[Variation, ...]

    def of(self, layer: str, head: int, change: Change = "none", value: float | None = None) -> Variation:
        """Return one head under one change.

        Raises:
            InvalidValueError: if this change was not computed.
        """
        for one in self.variations:
            if (one.layer, one.head, one.change, one.value) == (layer, head, change, value):
                return one
        raise InvalidValueError(f"no change {change!r} to {value} of head {head} of {layer!r} was asked for")

    def as_json(self) -> list[dict[str, Any]]:
        """Return the records as numbers, strings and null."""
        return [one.as_json() for one in self.variations]

    def _table(self) -> Table:
        rows = [
            (
                name_layer(one.layer),
                str(one.head),
                _name_change(one),
                *(write_number(x, 3) for x in (one.entropy_ratio, one.saturation_index, one.jacobian_trace)),
            )
            for one in self.variations
        ]
        heads = len({(one.layer, one.head) for one in self.variations})
        predicted = sum(one.is_predicted for one in self.variations)
        note = f", {predicted} of them predicted" if predicted else ""
        title = f"Counterfactual of {count(heads, 'head')}: {count(len(rows), 'line')}{note}"
        return Table(title, ("layer", "head", "change", "entropy ratio", "saturation", "1−Σp²"), rows, left=1)


def _name_change(one: Variation) -> str:
    if one.change == "none":
        return "as it is"
    value = "none" if one.value is None else f"{one.value:g}"
    name = {"temperature": "temperature ×", "length": "keys", "softcap": "soft cap"}[one.change]
    return f"{name} {value}{' (predicted)' if one.is_predicted else ''}"


def counterfactual(
    seen: Any,
    *,
    temperatures: Sequence[float] = (),
    lengths: Sequence[int] = (),
    softcaps: Sequence[float | None] = (),
) -> Counterfactual:
    """Predict each head at other temperatures, lengths and soft caps, without running the model.

    The prediction uses the scores of the rows that `watch(model, keep_rows=N)` kept, in float64. It returns means over
    these rows: entropy H, H/ln n, saturation index ρ = σ/√(2 ln n), and trace 1 − Σp² and norm √(Σp² − 2Σp³ + (Σp²)²)
    of the softmax Jacobian. Each variation changes one thing, and every layer keeps its present inputs.

    Args:
        seen: the result of a watch, an object with such a result as `.seen`, or rows by layer: {path: [ScoreRow, …]}.
        temperatures: factors on the model's own temperature, above 0. The factor 2 halves the scores.
        lengths: numbers of keys that a row sees, from 2. Rows that see enough keys keep those nearest to the query, or
            the last ones if the query's position is unknown. If no row sees enough keys, the result is the exact
            average for independent Gaussian logits with the deviation of the head's rows. It is marked `is_predicted`,
            and its Jacobian norm is unknown.
        softcaps: caps of the scores, above 0, or None for no cap.

    Raises:
        InvalidTypeError, InvalidValueError: naming the argument, also if no rows were kept.

    >>> row = ScoreRow(np.array([[0.0, 2.0, 0.0, 0.0]]))
    >>> counterfactual({"a": [row]}, temperatures=[0.5, 2.0], lengths=[2], softcaps=[1.0])
    Counterfactual of 1 head: 5 lines
    layer  head             change  entropy ratio  saturation  1−Σp²
    a         0           as it is          0.662        0.52  0.466
    a         0  temperature × 0.5          0.189        1.04  0.101
    a         0    temperature × 2          0.915        0.26  0.682
    a         0             keys 2              1           0    0.5
    a         0         soft cap 1          0.921       0.251  0.688
    """
    layers = _read_rows(seen)
    changes: list[tuple[Change, float | None]] = [("none", None)]
    changes += [("temperature", checks.number("temperatures", value, above=0.0, each=True)) for value in temperatures]
    changes += [("length", float(checks.integer("lengths", value, 2, each=True))) for value in lengths]
    changes += [
        ("softcap", None if value is None else checks.number("softcaps", value, above=0.0, each=True))
        for value in softcaps
    ]
    variations = []
    for path, rows in layers.items():
        by_change = {change: _vary(path, rows, *change) for change in changes}
        for head in range(rows[0].scores.shape[0]):
            variations += [of_heads[head] for of_heads in by_change.values()]
    return Counterfactual(tuple(variations))


def _read_rows(seen: Any) -> Mapping[str, Sequence[ScoreRow]]:
    source = getattr(seen, "seen", seen)
    layers = source if isinstance(source, Mapping) else getattr(source, "rows", None)
    if not isinstance(layers, Mapping):
        raise InvalidTypeError("seen", f"must be what watch(model, keep_rows=N) gives, got {type(seen).__name__}")
    layers = {path: rows for path, rows in layers.items() if len(rows)}
    if not layers:
        raise InvalidValueError("seen has no rows; watch with keep_rows=64, or another number of rows per layer")
    return layers


def _vary(path: str, rows: Sequence[ScoreRow], change: Change, value: float | None) -> list[Variation]:
    """Return one layer's heads under one change."""
    measured = [_measure(row, change, value) for row in rows]
    heads = rows[0].scores.shape[0]
    variations = []
    for head in range(heads):
        numbers = np.array([row[:, head] for row in measured])  # [rows, 5]; NaN if a row does not count
        used = int(np.isfinite(numbers[:, 0]).sum())
        if change == "length" and not used and value is not None:
            variations.append(_predict(path, head, rows, int(value)))
            continue
        entropy, ratio, index, trace, norm = (_mean(column) for column in numbers.T)
        variations.append(Variation(path, head, change, value, used, entropy, ratio, index, trace, norm))
    return variations


def _mean(values: Array) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _measure(row: ScoreRow, change: Change, value: float | None) -> Array:
    """Return entropy, ratio, index, trace and norm of one row `[5, H]` under a change; NaN for too few keys."""
    scores = row.scores.astype(np.float64)
    softcap = value if change == "softcap" else row.softcap
    if change == "temperature" and value is not None:
        scores = scores / value
    logits = scores if softcap is None else softcap * np.tanh(scores / softcap)
    if row.added is not None:
        logits = logits + row.added
    results = np.full((5, len(logits)), np.nan)
    for head, own in enumerate(logits):
        keys = np.arange(len(own)) if row.visible is None else np.flatnonzero(row.visible[head])
        if change == "length" and value is not None:
            if len(keys) < value:
                continue
            keys = _nearest(keys, row.place, int(value))
        if len(keys):
            results[:, head] = _statistics(own[keys])
    return results


def _nearest(keys: Array, place: int | None, number: int) -> Array:
    """Return `number` keys nearest to a place, or the last keys if the place is None."""
    if place is None:
        return keys[-number:]
    order = np.argsort(np.abs(keys - place), kind="stable")
    return np.sort(keys[order[:number]])


def _statistics(logits: Array) -> list[float]:
    """Return the statistics of one row. The largest weight is kept apart to keep 1 − Σp² of a sharp row precise."""
    keys = len(logits)
    shifted = logits - logits.max()
    exponentials = np.exp(shifted)
    weights = exponentials / exponentials.sum()
    top = int(logits.argmax())
    others = np.delete(weights, top)
    tail, p2, p3 = others.sum(), (others**2).sum(), (others**3).sum()
    a2 = (1.0 - tail) ** 2
    entropy = math.log(exponentials.sum()) - float(weights @ np.where(weights > 0, shifted, 0.0))
    trace = min(tail * (2.0 - tail) - p2, 1.0 - 1.0 / keys)
    norm = math.sqrt(max(a2 * tail**2 + p2 * (1.0 + 2.0 * a2) - 2.0 * p3 + p2**2, 0.0))
    ratio = entropy / math.log(keys) if keys > 1 else math.nan
    return [entropy, ratio, float(saturation_index(logits.std(), keys)), trace, norm]


def _predict(path: str, head: int, rows: Sequence[ScoreRow], keys: int) -> Variation:
    """Return the prediction for independent Gaussian logits with the head's deviation over `keys` keys."""
    deviations = []
    for row in rows:
        seen = row.scores[head] if row.visible is None else row.scores[head][row.visible[head]]
        if len(seen) > 1:
            capped = seen if row.softcap is None else row.softcap * np.tanh(seen / row.softcap)
            deviations.append(float(np.std(capped.astype(np.float64))))
    if not deviations:
        return Variation(path, head, "length", float(keys), 0, None, None, None, None, None, True)
    sigma = float(np.sqrt(np.mean(np.square(deviations))))
    law = expected_softmax(sigma, keys) if sigma <= _LARGEST_DEVIATION else condensation(sigma, keys)
    index = float(saturation_index(sigma, keys))
    trace = 1.0 - law.sum_p2
    return Variation(
        path, head, "length", float(keys), len(deviations), law.entropy, law.entropy_ratio, index, trace, None, True
    )
