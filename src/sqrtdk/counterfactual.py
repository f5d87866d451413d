"""What heads would do at other temperatures, lengths and soft caps, from the scores of a few of their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sqrtdk.display import Shown, Table, count, name_layer
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory import condensation, expected_softmax, saturation_index

__all__ = ["Counterfactual", "ScoreRow", "Variation", "counterfactual"]

Array = npt.NDArray[Any]
Change = Literal["none", "temperature", "length", "softcap"]
# Where the exact average over Gaussian rows is computed; beyond it the law of large n is close.
_LARGEST_DEVIATION = 40.0


@dataclass(frozen=True, eq=False)
class ScoreRow:
    """The scores of one query with the keys that any head lets it see, n of them.

    Attributes:
        scores: scale·q·k before soft cap and mask `[H, n]`.
        added: what the mask adds `[H, n]`; None if nothing.
        visible: which keys each head sees `[H, n]`; None if all.
        softcap: of the scores; None if there is none.
        place: where among these keys the query itself stands; None if it is not one of them.
    """

    scores: Array
    added: Array | None = None
    visible: Array | None = None
    softcap: float | None = None
    place: int | None = None


@dataclass(frozen=True)
class Variation:
    """One head under one change: means over `rows` rows.

    `change` is "none" (as the model is), "temperature" (value: by what the model's own is multiplied), "length" (value:
    keys that a row sees) or "softcap" (value: the cap, None for none). `is_predicted`: not measured but computed for
    independent Gaussian logits with the deviation of the head's rows. Numbers that are not known are None.
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

    def as_json(self) -> dict[str, Any]:
        """The record as numbers, texts and null."""
        return asdict(self)


@dataclass(frozen=True, repr=False)
class Counterfactual(Shown):
    """What every head would do under every change; prints as a table."""

    variations: tuple[Variation, ...]

    def of(self, layer: str, head: int, change: Change = "none", value: float | None = None) -> Variation:
        """One head under one change.

        Raises:
            InvalidValueError: if there is none.
        """
        for one in self.variations:
            if (one.layer, one.head, one.change, one.value) == (layer, head, change, value):
                return one
        raise InvalidValueError(f"no change {change!r} to {value} of head {head} of {layer!r} was asked for")

    def as_json(self) -> list[dict[str, Any]]:
        """The records as numbers, texts and null."""
        return [one.as_json() for one in self.variations]

    def _table(self) -> Table:
        def write(value: float | None, digits: str = ".3f") -> str:
            return "-" if value is None else f"{value:{digits}}"

        rows = [
            (
                name_layer(one.layer),
                str(one.head),
                _name_change(one),
                write(one.entropy_ratio),
                write(one.saturation_index, ".3g"),
                write(one.jacobian_trace, ".3g"),
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
    """What each head would do at other temperatures, lengths and soft caps; the model does not run.

    From the scores of the rows that `watch(model, keep_rows=N)` kept, in float64: entropy H, H/ln n, saturation index
    ρ = σ/√(2 ln n), trace 1 − Σp² and norm √(Σp² − 2Σp³ + (Σp²)²) of the softmax Jacobian, means over these rows. One
    thing is changed at a time; of a layer behind another it is what the head would do with the inputs that it has now.

    Args:
        seen: what a watch gave, or anything that has it as `.seen`; or rows by layer: {path: [ScoreRow, …]}.
        temperatures: by what the model's own temperature is multiplied, above 0: 2 halves the scores.
        lengths: keys that a row sees, from 2: the nearest to its place (the last ones where that is not known), of rows
            that see as many. Where no row does, the exact average for independent Gaussian logits with the deviation of
            the head's rows, marked `is_predicted`; the Jacobian's norm is then not known.
        softcaps: caps of the scores, above 0, None for none.

    Raises:
        InvalidTypeError, InvalidValueError: naming the argument; also if no rows were kept.

    >>> row = ScoreRow(np.array([[0.0, 2.0, 0.0, 0.0]]))
    >>> counterfactual({"a": [row]}, temperatures=[0.5, 2.0], lengths=[2], softcaps=[1.0])
    Counterfactual of 1 head: 5 lines
    layer  head             change  entropy ratio  saturation  1−Σp²
    a         0           as it is          0.662        0.52  0.466
    a         0  temperature × 0.5          0.189        1.04  0.101
    a         0    temperature × 2          0.915        0.26  0.682
    a         0             keys 2          1.000           0    0.5
    a         0         soft cap 1          0.921       0.251  0.688
    """
    layers = _read_rows(seen)
    changes: list[tuple[Change, float | None]] = [("none", None)]
    changes += [("temperature", _require("temperatures", value, 0.0)) for value in temperatures]
    changes += [("length", _require_length(value)) for value in lengths]
    changes += [("softcap", None if value is None else _require("softcaps", value, 0.0)) for value in softcaps]
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


def _require(name: str, value: Any, above: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidTypeError(name, f"must be numbers, got {value!r}")
    if not above < value < math.inf:
        raise InvalidValueError(name, f"must be above {above:g} and finite, got {value}")
    return float(value)


def _require_length(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidTypeError("lengths", f"must be integers, got {value!r}")
    if value < 2:
        raise InvalidValueError("lengths", f"must be at least 2, got {value}")
    return float(value)


def _vary(path: str, rows: Sequence[ScoreRow], change: Change, value: float | None) -> list[Variation]:
    """One layer's heads under one change."""
    measured = [_measure(row, change, value) for row in rows]
    heads = rows[0].scores.shape[0]
    variations = []
    for head in range(heads):
        numbers = np.array([row[:, head] for row in measured])  # [rows, 5]; NaN where a row does not count
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
    """Entropy, ratio, index, trace and norm of one row `[5, H]` under a change; NaN for heads that see too little."""
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
    """So many keys around a place, or the last ones."""
    if place is None:
        return keys[-number:]
    order = np.argsort(np.abs(keys - place), kind="stable")
    return np.sort(keys[order[:number]])


def _statistics(logits: Array) -> list[float]:
    """Of one row, the largest weight kept apart, so that 1 − Σp² of a sharp row keeps its digits."""
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
    """What independent Gaussian logits of the head's deviation would do over so many keys."""
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
