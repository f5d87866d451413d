"""Exercise 2: softmax([x, 0, 0, 0]) for growing x, and the point at which it saturates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sqrtdk import checks
from sqrtdk.errors import InvalidValueError
from sqrtdk.records.record import Record
from sqrtdk.wording.numbers import write_number

_WHY = (
    "training moves the scores through the softmax Jacobian, and its trace 1 − Σp² adds up how strongly every weight "
    "still responds to its own score"
)

_MOST_ZEROS = 10**6  # float32 adds them one by one, as a softmax would


def saturation(largest: float = 10.0, points: int = 101, zeros: int = 3, share: float = 0.05) -> Record:
    """Follow softmax([x, 0, …, 0]) for x from 0 to `largest` and find where it saturates.

    Saturated means that the Jacobian trace 1 − Σp² has fallen to `share` of its value at x = 0, its largest. Other
    definitions in use are solved as well. Each point comes from bisection on the definition itself.

    Args:
        largest: the end of the sweep.
        points: number of x from 0 to `largest`, ends included.
        zeros: number of zeros beside x.
        share: share of the trace that is left at saturation, between 0 and 1.

    Returns:
        A record with the tables ``points`` (definition, x, the weights there) and ``sweep``.

    >>> record = saturation()
    >>> [round(row["x"], 3) for row in record.tables["points"] if row["main"]]
    [5.043]
    """
    checks.number("largest", largest, above=0.0)
    checks.integer("points", points, 2)
    checks.integer("zeros", zeros, 1, _MOST_ZEROS)
    if not 0 < share < 1:
        raise InvalidValueError("share", f"must lie between 0 and 1, got {share}")
    grid = np.linspace(0.0, largest, points)
    rows = [_describe(float(x), zeros) for x in grid]
    solutions = _solve_definitions(zeros, share)
    whole = largest if largest < 1 else float(math.floor(largest))
    return Record(
        kind="saturation",
        spec={"largest": largest, "points": points, "zeros": zeros, "share": share},
        tables={
            "points": solutions,
            "sweep": [_describe(x, zeros) for x in np.linspace(0.0, whole, 11).tolist()],
        },
        curves={name: [row[name] for row in rows] for name in rows[0]},
        sentences=_read(solutions, zeros, share, largest),
    )


def _describe(x: float, zeros: int) -> dict[str, float]:
    # With t = e^(−x) the weights are 1/(1 + zeros·t) and t/(1 + zeros·t); 1 − p is never formed, so nothing cancels.
    t = math.exp(-x)
    total = 1.0 + zeros * t
    other = t / total
    rest = zeros * other
    # The sum 1 + zeros·t loses the digits of a small rest, 1 − rest those of a small first weight.
    first = 1.0 - rest if rest < 0.5 else 1.0 / total
    entropy = math.log(total) + rest * x
    return {
        "x": x,
        "first_weight": first,
        "other_weight": other,
        "slope": first * rest,
        "jacobian_trace": rest * (1.0 + first) - zeros * other**2,
        "entropy_ratio": entropy / math.log(zeros + 1),
    }


def _solve_definitions(zeros: int, share: float) -> list[dict[str, Any]]:
    full_trace = zeros / (zeros + 1.0)
    percent = f"{100 * share:g}%"
    definitions: list[tuple[str, Callable[[float], bool]]] = [
        (
            f"Jacobian trace 1 − Σp² down to {percent} of its largest",
            lambda x: _describe(x, zeros)["jacobian_trace"] <= share * full_trace,
        ),
        (
            f"all but {percent} of the weight on the largest",
            # Each rounds on its own: both must hold, or the weight that is printed may lie below 1 − share.
            lambda x: (
                zeros * (at := _describe(x, zeros))["other_weight"] <= share and at["first_weight"] >= 1.0 - share
            ),
        ),
        (
            f"entropy down to {percent} of ln {zeros + 1}",
            lambda x: _describe(x, zeros)["entropy_ratio"] <= share,
        ),
        (
            f"derivative p(1 − p) of the largest weight down to {percent} of its largest, ¼",
            # The derivative rises until p = ½ at x = ln(zeros); only the fall after it is saturation.
            lambda x: x > math.log(zeros) and _describe(x, zeros)["slope"] <= share / 4.0,
        ),
        ("float32 rounds the largest weight to 1, so that its derivative p(1 − p) is exactly 0", _is_one_hot(zeros)),
    ]
    return [
        {"definition": text, "x": x, **_weights_at(x, zeros), "main": index == 0}
        for index, (text, saturated) in enumerate(definitions)
        for x in [_first_where(saturated)]
    ]


def _weights_at(x: float, zeros: int) -> dict[str, float]:
    at = _describe(x, zeros)
    return {name: at[name] for name in ("first_weight", "jacobian_trace")}


def _is_one_hot(zeros: int) -> Callable[[float], bool]:
    def is_one_hot(x: float) -> bool:
        exponentials = np.exp(np.array([0.0] + [-x] * zeros, dtype=np.float32))
        return bool(exponentials[0] / exponentials.sum() == 1.0)

    return is_one_hot


def _first_where(saturated: Callable[[float], bool]) -> float:
    """Find where a condition that holds from some x ≥ 0 on begins to hold, to the last bit."""
    if saturated(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not saturated(high):
        low, high = high, 2.0 * high
    while (middle := (low + high) / 2.0) not in (low, high):
        low, high = (low, middle) if saturated(middle) else (middle, high)
    return high


def _read(solutions: list[dict[str, Any]], zeros: int, share: float, largest: float) -> dict[str, str]:
    main = solutions[0]
    others = [row["x"] for row in solutions[1:-1]]
    shown = ", ".join(["x"] + ["0"] * zeros) if zeros <= 5 else f"x and {zeros} zeros"
    where = "within" if main["x"] <= largest else "beyond"
    rest = zeros * _describe(main["x"], zeros)["other_weight"]
    weight = f"{main['first_weight']:.4f}" if rest >= 5e-5 else f"1 − {write_number(rest, 2)}"
    single = solutions[-1]["x"]
    when = "only from" if single > max(main["x"], *others) else "already from" if single < main["x"] else "from"
    return {
        "point": f"softmax([{shown}]) saturates at x = {main['x']:.3f}, {where} the sweep. There the Jacobian trace "
        f"1 − Σp² is {100 * share:g}% of its value at x = 0, and the largest weight is {weight}.",
        "why": f"Why this definition: {_WHY}.",
        "other definitions": f"Other definitions with the same share place the point between x = "
        f"{min(others):.2f} and {max(others):.2f}. float32 rounds the largest weight to 1 {when} x = {single:.1f} on.",
    }
