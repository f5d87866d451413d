"""Reproduction of a published result: its expectations, the verdict on each, and the list of all reproductions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqrtdk.errors import missing_extra, unknown_name
from sqrtdk.exercises.estimates import Estimate
from sqrtdk.lab.laboratory import Lab
from sqrtdk.lab.outcomes import finite
from sqrtdk.lab.spec import REVISION
from sqrtdk.records.record import Record
from sqrtdk.wording.numbers import write_number

VerdictName = Literal["pass", "fail", "unclear"]


@dataclass(frozen=True)
class Expectation:
    """Quantity and the bound that it must keep, stated before anything is computed."""

    quantity: str
    relation: Literal["≤", "≥"]
    bound: float

    def __str__(self) -> str:
        return f"{self.quantity} {self.relation} {write_number(self.bound)}"

    def judge(self, measured: Estimate) -> VerdictName:
        """Return `pass` if the whole interval keeps the bound, `fail` if none of it does, else `unclear`.

        >>> rule = Expectation("share", "≥", 0.5)
        >>> [rule.judge(Estimate(*ends)) for ends in ((0.7, 0.6, 0.8), (0.5, 0.4, 0.6), (0.3, 0.2, 0.4))]
        ['pass', 'unclear', 'fail']
        """
        ends = (measured.low, measured.high)
        keeps = [end >= self.bound if self.relation == "≥" else end <= self.bound for end in ends]
        return "pass" if all(keeps) else "unclear" if any(keeps) else "fail"


class Measured(dict[str, Estimate]):
    """Estimates by quantity, and the curves of a figure."""

    def __init__(self, estimates: Mapping[str, Estimate | float], curves: Mapping[str, Any]) -> None:
        super().__init__(
            {name: one if isinstance(one, Estimate) else Estimate(one, one, one) for name, one in estimates.items()}
        )
        self.curves = curves


@dataclass(frozen=True)
class Chart:
    """Picture of one of the curves: a line per value of `by`, or one line.

    Attributes:
        curve: name of the curve, which is a list of rows.
        x, y: columns on the axes; columns `low` and `high` become error bars.
        x_title, y_title: titles of the axes.
        by: column that tells the lines apart.
        log_x, log_y: whether the axes are logarithmic.
        predicted: the values of `by` whose lines are predictions.
        bound: a value of y to compare with, and its name.
        joined: whether lines that are not predictions join their points.
    """

    curve: str
    x: str
    y: str
    x_title: str
    y_title: str
    by: str | None = None
    log_x: bool = False
    log_y: bool = False
    predicted: tuple[str, ...] = ()
    bound: tuple[float, str] | None = None
    joined: bool = True


@dataclass(frozen=True)
class Reproduction:
    """Published result that can be computed again.

    Attributes:
        name: name on the command line.
        title: the result as a sentence.
        source: authors, year, paper number, and the place in the paper.
        expectations: bounds that were stated before the computation runs.
        compute: returns the quantities of the expectations, by name, from a seed; the lab is for those that train.
        chart: picture of the result.
        scaled_down: how the size differs from the source; None if it is the same.
        trains: whether models are trained, which takes torch and minutes.
    """

    name: str
    title: str
    source: str
    expectations: tuple[Expectation, ...]
    compute: Callable[[int, Lab], Measured]
    chart: Chart
    scaled_down: str | None = None
    trains: bool = False


REPRODUCTIONS: dict[str, Reproduction] = {}


def reproduction(
    name: str, title: str, source: str, *expectations: Expectation, chart: Chart, scaled_down: str | None = None
) -> Callable[[Callable[[int], Measured]], Callable[[int], Measured]]:
    """Add the decorated computation, which takes a seed, to the list of reproductions."""

    def enter(compute: Callable[[int], Measured]) -> Callable[[int], Measured]:
        REPRODUCTIONS[name] = Reproduction(
            name, title, source, expectations, lambda seed, lab: compute(seed), chart, scaled_down
        )
        return compute

    return enter


def trained_reproduction(
    name: str, title: str, source: str, *expectations: Expectation, chart: Chart, scaled_down: str
) -> Callable[[Callable[..., Measured]], Callable[..., Measured]]:
    """Add the decorated training, which takes a first seed and a lab, to the list of reproductions."""

    def enter(compute: Callable[..., Measured]) -> Callable[..., Measured]:
        REPRODUCTIONS[name] = Reproduction(name, title, source, expectations, compute, chart, scaled_down, trains=True)
        return compute

    return enter


def reproduce(
    names: Iterable[str] | None = None,
    seed: int = 0,
    on_start: Callable[[str, float], None] | None = None,
    lab: Lab | None = None,
) -> Record:
    """Compute reproductions and judge each of their expectations.

    Args:
        names: names of the reproductions; None computes those that train nothing, which take seconds.
        seed: seed of the random numbers; the first seed of those that train.
        on_start: called before each reproduction with its name and the finished share.
        lab: where runs are trained and kept; None: one for this call alone.

    Returns:
        A record with one row per expectation in the table `reproductions`: the expectation, the measured value with its
        95% interval, and the verdict `pass`, `fail` or `unclear`. `curves` has the data of the figures, by name.

    Raises:
        InvalidValueError: if a name is unknown.
        MissingExtraError: a reproduction trains, and torch is not installed.

    >>> record = reproduce(["ssmax"])
    >>> [row["verdict"] for row in record.tables["reproductions"]]
    ['pass', 'pass', 'pass']
    """
    chosen = _choose([name for name, one in REPRODUCTIONS.items() if not one.trains] if names is None else names)
    if any(REPRODUCTIONS[name].trains for name in chosen) and importlib.util.find_spec("torch") is None:
        raise missing_extra("torch", "torch")
    if lab is None:
        with Lab() as own:
            return reproduce(chosen, seed, on_start, own)
    records = []
    for index, name in enumerate(chosen):
        if on_start is not None:
            on_start(name, index / len(chosen))
        records.append(_reproduce_one(REPRODUCTIONS[name], seed, lab))
    return combine(records)


def combine(records: Iterable[Record]) -> Record:
    """Return one record of reproductions that were computed apart, in their order.

    >>> combine([reproduce(["ssmax"]), reproduce(["critical-scaling"])]).spec["names"]
    ['ssmax', 'critical-scaling']
    """
    parts = list(records)
    return Record(
        "reproductions",
        {"names": [name for one in parts for name in one.spec["names"]], "seed": parts[0].spec["seed"]},
        {"reproductions": [row for one in parts for row in one.tables["reproductions"]]},
        {name: curves for one in parts for name, curves in one.curves.items()},
        sentences={name: sentence for one in parts for name, sentence in one.sentences.items()},
    )


def _reproduce_one(one: Reproduction, seed: int, lab: Lab) -> Record:
    """Compute one reproduction; one that trains is taken from the store if its specification is there."""
    spec = {
        "names": [one.name],
        "seed": seed,
        "expected": [str(expected) for expected in one.expectations],
        "scaled_down": one.scaled_down,
        "revision": REVISION,
    }
    if one.trains:
        for stored in lab.store.records("reproductions"):
            if stored.spec == spec:
                return stored
    measured = one.compute(seed, lab)
    rows = [_judge(one, expected, measured[expected.quantity]) for expected in one.expectations]
    curves = {**measured.curves, "chart": asdict(one.chart), "title": one.title, "outcome": name_outcome(rows)}
    record = Record(
        "reproductions",
        spec,
        {"reproductions": rows},
        {one.name: curves},
        sentences={one.name: _read(one, rows)},
    )
    return lab.keep(record) if one.trains else record


def _judge(one: Reproduction, expected: Expectation, measured: Estimate) -> dict[str, Any]:
    return {
        "name": one.name,
        "expected": str(expected),
        "measured": finite(measured.value),
        "low": finite(measured.low),
        "high": finite(measured.high),
        "verdict": expected.judge(measured),
        "source": one.source,
        "trains": one.trains,
        "scaled_down": one.scaled_down,
    }


def list_expectations(names: Iterable[str] | None = None) -> Record:
    """Return the results and expectations, without computing them, as a record with the table `reproductions`.

    Raises:
        InvalidValueError: if a name is unknown.

    >>> list_expectations(["ssmax"]).tables["reproductions"][2]["expected"]
    "softmax's largest weight at 16384 keys, distance from 0.009 ≤ 5.0·10⁻⁴"
    """
    rows = [
        {
            "name": name,
            "result": REPRODUCTIONS[name].title,
            "source": REPRODUCTIONS[name].source,
            "expected": str(one),
            "trains": REPRODUCTIONS[name].trains,
            "scaled_down": REPRODUCTIONS[name].scaled_down,
        }
        for name in _choose(names)
        for one in REPRODUCTIONS[name].expectations
    ]
    return Record("expectations", {}, {"reproductions": rows})


def _choose(names: Iterable[str] | None) -> list[str]:
    chosen = list(REPRODUCTIONS) if names is None else list(names)
    for name in chosen:
        if name not in REPRODUCTIONS:
            raise unknown_name("reproduction", name, list(REPRODUCTIONS))
    return chosen


def _read(one: Reproduction, rows: list[dict[str, Any]]) -> str:
    """Return a sentence that says whether a result was reproduced, and which expectations were missed."""
    missed = [
        f"{row['expected']} ({row['verdict']}: {_write_measured(row)})" for row in rows if row["verdict"] != "pass"
    ]
    told = f"{one.title}: {name_outcome(rows)}. {len(rows) - len(missed)} of {len(rows)} expectations hold"
    return f"{told}, but not {', '.join(missed)}." if missed else f"{told}."


def name_outcome(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return whether a result was reproduced, by the verdicts on its expectations.

    >>> name_outcome([{"verdict": "pass"}, {"verdict": "unclear"}])
    'reproduced in part'
    """
    kept = [row["verdict"] == "pass" for row in rows]
    return "reproduced" if all(kept) else "reproduced in part" if any(kept) else "not reproduced"


def _write_measured(row: Mapping[str, Any]) -> str:
    """Return the measured value, with its interval where it has a length; None is an infinite value."""
    value, low, high = ("∞" if row[name] is None else write_number(row[name]) for name in ("measured", "low", "high"))
    return value if row["low"] == row["high"] else f"{value} [{low}, {high}]"
