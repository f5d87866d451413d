"""Reproduction of a published result: its expectations, the verdict on each, and the list of all reproductions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqrtdk.errors import unknown_name
from sqrtdk.exercises.estimates import Estimate
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
class Reproduction:
    """Published result that can be computed again.

    Attributes:
        name: name on the command line.
        title: the result as a sentence.
        source: authors, year, paper number, and the place in the paper.
        expectations: bounds that were stated before the computation runs.
        compute: returns the quantities of the expectations, by name, from a seed.
        scaled_down: how the size differs from the source; None if it is the same.
    """

    name: str
    title: str
    source: str
    expectations: tuple[Expectation, ...]
    compute: Callable[[int], Measured]
    scaled_down: str | None = None


REPRODUCTIONS: dict[str, Reproduction] = {}


def reproduction(
    name: str, title: str, source: str, *expectations: Expectation, scaled_down: str | None = None
) -> Callable[[Callable[[int], Measured]], Callable[[int], Measured]]:
    """Add the decorated computation to the list of reproductions."""

    def enter(compute: Callable[[int], Measured]) -> Callable[[int], Measured]:
        REPRODUCTIONS[name] = Reproduction(name, title, source, expectations, compute, scaled_down)
        return compute

    return enter


def reproduce(
    names: Iterable[str] | None = None, seed: int = 0, on_start: Callable[[str, float], None] | None = None
) -> Record:
    """Compute reproductions and judge each of their expectations.

    Args:
        names: names of the reproductions; None computes all.
        seed: seed of the random numbers.
        on_start: called before each reproduction with its name and the finished share.

    Returns:
        A record with one row per expectation in the table `reproductions`: the expectation, the measured value with its
        95% interval, and the verdict `pass`, `fail` or `unclear`. `curves` has the data of the figures, by name.

    Raises:
        InvalidValueError: if a name is unknown.

    >>> record = reproduce(["ssmax"])
    >>> [row["verdict"] for row in record.tables["reproductions"]]
    ['pass', 'pass', 'pass']
    """
    chosen = _choose(names)
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    for index, name in enumerate(chosen):
        if on_start is not None:
            on_start(name, index / len(chosen))
        one = REPRODUCTIONS[name]
        measured = one.compute(seed)
        curves[name] = measured.curves
        for expected in one.expectations:
            value = measured[expected.quantity]
            rows.append(
                {
                    "name": name,
                    "expected": str(expected),
                    "measured": value.value,
                    "low": value.low,
                    "high": value.high,
                    "verdict": expected.judge(value),
                    "source": one.source,
                    "scaled_down": one.scaled_down,
                }
            )
    sentences = {name: _read(REPRODUCTIONS[name], [row for row in rows if row["name"] == name]) for name in chosen}
    return Record(
        "reproductions", {"names": chosen, "seed": seed}, {"reproductions": rows}, curves, sentences=sentences
    )


def list_expectations(names: Iterable[str] | None = None) -> Record:
    """Return the results and expectations, without computing them, as a record with the table `reproductions`.

    Raises:
        InvalidValueError: if a name is unknown.

    >>> list_expectations(["ssmax"]).tables["reproductions"][2]["expected"]
    "softmax's largest weight at 16384 keys, distance from 0.009 ≤ 5.0·10⁻⁴"
    """
    rows = [
        {"name": name, "result": REPRODUCTIONS[name].title, "source": REPRODUCTIONS[name].source, "expected": str(one)}
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
        f"{row['expected']} ({row['verdict']}: {write_number(row['measured'])})"
        for row in rows
        if row["verdict"] != "pass"
    ]
    kept = len(rows) - len(missed)
    verdict = "reproduced" if not missed else "not reproduced" if not kept else "reproduced in part"
    told = f"{one.title}: {verdict}. {kept} of {len(rows)} expectations hold"
    return f"{told}, but not {', '.join(missed)}." if missed else f"{told}."
