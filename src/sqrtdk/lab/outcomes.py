"""Outcomes of a grid: medians and quartiles over seeds, best learning rates, paired differences with intervals.

Outcomes are bimodal (a run solves its task or does not), so there is no mean ± deviation. A diverged run counts as
an infinite loss; a failed run is left out and counted apart. A number that would be infinite is None.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.intervals import Interval, can_reject, hodges_lehmann, holm, signed_rank_interval, wilcoxon_p, wilson
from sqrtdk.lab.spec import STEPS, Choice

REFERENCE_SCALE = "sqrt"

MARGIN = 0.01
"""Losses that differ by less than this share of the chance loss count as equal."""

RunRow = Mapping[str, Any]
Rows = list[dict[str, Any]]


class Setting(NamedTuple):
    """Setting that the seeds of a group have in common."""

    scale: str
    d_k: int
    init: str
    qk_step: str
    lr: float

    @property
    def choice(self) -> Choice:
        """Return the setting without its learning rate."""
        return Choice(*self[:-1])


class Quartiles(NamedTuple):
    """Lower quartile, median and upper quartile."""

    lower: float
    median: float
    upper: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return quartiles by linear interpolation; infinite values take part as the largest (or smallest).

    >>> quartiles([3.0, 1.0, 2.0])
    Quartiles(lower=1.5, median=2.0, upper=2.5)
    >>> quartiles([1.0, 2.0, math.inf]).median
    2.0
    >>> quartiles([-math.inf, 1.0, 2.0]).lower
    -inf
    """
    if not values:
        raise InvalidValueError("values", "must hold at least one number, got none")
    ordered = sorted(values)

    def at(q: float) -> float:
        place = q * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        # Between two finite values or two equal ones; inf − inf would be NaN.
        return low if low == high or math.isinf(low) else low + (high - low) * (place % 1.0)

    return Quartiles(at(0.25), at(0.5), at(0.75))


def summarise(runs: Sequence[RunRow]) -> Rows:
    """Return a row per setting: median, quartiles, fraction solved, median steps to the threshold, number of runs.

    `final_loss_iqr` is [lower quartile, upper quartile] over the seeds, not a confidence interval; `solved_interval` is
    Wilson's 95% interval of the fraction solved.
    `steps_to_threshold_median` is over the `reached_threshold` runs whose training loss got below the threshold.
    With a scale that learns in the grid there are columns more, see `_summarise_learned`.
    """
    groups = _group(runs)
    learned = any("temperature" in row for row in runs)
    return [
        _summarise_setting(setting, rows) | (_summarise_learned(rows) if learned else {})
        for setting, rows in groups.items()
    ]


def choose_best(summary: Sequence[RunRow]) -> Rows:
    """Return each setting at the learning rate with the lowest median loss, the smaller rate on a tie.

    `lrs` says how many rates were tried, `at_edge` whether the best is the smallest or largest of them, so that
    a better one may lie outside.
    """
    groups: dict[Choice, list[RunRow]] = defaultdict(list)
    for row in summary:
        groups[setting_of(row).choice].append(row)
    best = []
    for rows in groups.values():
        chosen = min(rows, key=lambda row: (or_infinite(row["final_loss_median"]), row["lr"]))
        rates = [row["lr"] for row in rows]
        at_edge = len(rates) > 1 and chosen["lr"] in (min(rates), max(rates))
        best.append({**chosen, "lrs": len(rates), "at_edge": at_edge})
    return best


def compare(runs: Sequence[RunRow], margin: float, basis: str = "same_lr") -> Rows:
    """Compare every setting with sqrt, paired by seed: its loss minus the loss of sqrt with the same seed.

    The partner has the same d_k and init, except that inits which are `unit` times a factor are held against `unit`
    where that was run: without scaling, `rescaled` begins as the same function as sqrt with `unit`.
    `difference` is the Hodges–Lehmann estimate of the differences and `difference_interval` the 95% interval of its
    signed-rank test. `outcome` is ``"as well"`` where the interval lies within the margin, ``"worse"`` or ``"better"``
    where it leaves out 0, else ``"not distinguishable"``. `holm_p` is corrected for all comparisons in the table; it is
    None where so few seeds cannot reject.

    Args:
        runs: rows of runs, one learning rate per setting.
        margin: differences of losses that count as none.
        basis: how the learning rates came about: ``"same_lr"`` or ``"best_lr"``.
    """
    losses = {setting: _losses_by_seed(rows) for setting, rows in _group(runs).items()}
    partners = {setting: _partner(setting, losses) for setting in losses}
    rows = [
        row
        for setting, partner in partners.items()
        if partner is not None
        for row in _compare_one(basis, losses, setting, partner, margin)
    ]
    corrected = holm([row["wilcoxon_p"] for row in rows])
    return [
        {**row, "holm_p": p if can_reject(row["n"], len(rows)) else None}
        for row, p in zip(rows, corrected, strict=True)
    ]


def _partner(setting: Setting, known: Mapping[Setting, object]) -> Setting | None:
    inits = ("unit", setting.init) if setting.init in STEPS else (setting.init,)
    wanted = [Choice(REFERENCE_SCALE, setting.d_k, init) for init in inits]
    found = [other for choice in wanted for other in known if other.choice == choice]
    return found[0] if found and found[0] != setting else None


def _compare_one(
    basis: str, losses: Mapping[Setting, Mapping[int, float]], setting: Setting, partner: Setting, margin: float
) -> Rows:
    seeds = sorted(losses[setting].keys() & losses[partner].keys())
    if not seeds:
        return []
    pairs = [(losses[setting][seed], losses[partner][seed]) for seed in seeds]
    differences = [0.0 if mine == theirs else mine - theirs for mine, theirs in pairs]
    spread = quartiles(differences)
    interval = signed_rank_interval(differences)
    return [
        {
            "basis": basis,
            **setting._asdict(),
            "against": partner.scale,
            "against_init": partner.init,
            "against_lr": partner.lr,
            "median_difference": finite(spread.median),
            "difference_iqr": [finite(spread.lower), finite(spread.upper)],
            "difference": finite(hodges_lehmann(differences)),
            "difference_interval": [finite(interval.low), finite(interval.high)],
            "margin": margin,
            "outcome": _judge(interval, margin),
            "higher": sum(difference > 0.0 for difference in differences),
            "lower": sum(difference < 0.0 for difference in differences),
            "wilcoxon_p": wilcoxon_p(differences),
            "n": len(seeds),
        }
    ]


def _judge(interval: Interval, margin: float) -> str:
    if interval.within(margin):
        return "as well"
    if interval.low > 0.0 or interval.high < 0.0:
        return "worse" if interval.low > 0.0 else "better"
    return "not distinguishable"


def setting_of(row: RunRow) -> Setting:
    """Return the setting of a run, or of a row about runs; rows of older records have no `qk_step`."""
    return Setting(row["scale"], row["d_k"], row["init"], row.get("qk_step", "unit"), row["lr"])


def _group(runs: Sequence[RunRow]) -> dict[Setting, list[RunRow]]:
    groups: dict[Setting, list[RunRow]] = defaultdict(list)
    for row in runs:
        groups[setting_of(row)].append(row)
    return dict(groups)


def _losses_by_seed(rows: Sequence[RunRow]) -> dict[int, float]:
    return {row["seed"]: or_infinite(row["final_loss"]) for row in rows if row["status"] != "failed"}


def _summarise_setting(setting: Setting, rows: Sequence[RunRow]) -> dict[str, Any]:
    counted = [row for row in rows if row["status"] != "failed"]
    losses = [or_infinite(row["final_loss"]) for row in counted]
    spread = quartiles(losses) if losses else Quartiles(math.inf, math.inf, math.inf)
    reached = [row["steps_to_threshold"] for row in counted if row["steps_to_threshold"] is not None]
    accuracies = [row["final_accuracy"] for row in counted if row["final_accuracy"] is not None]
    solved = sum(bool(row["solved"]) for row in counted)
    return {
        **setting._asdict(),
        "final_loss_median": finite(spread.median),
        "final_loss_iqr": [finite(spread.lower), finite(spread.upper)],
        "final_accuracy_median": quartiles(accuracies).median if accuracies else None,
        "solved_fraction": solved / len(counted) if counted else None,
        "solved_interval": list(wilson(solved, len(counted))),
        "steps_to_threshold_median": quartiles(reached).median if reached else None,
        "reached_threshold": len(reached),
        "n": len(counted),
        "diverged": sum(row["status"] == "diverged" for row in counted),
        "failed": len(rows) - len(counted),
    }


def _summarise_learned(rows: Sequence[RunRow]) -> dict[str, Any]:
    """Summarise the final learned temperatures in units of √dₖ; None for a scale that does not learn.

    Medians over the seeds of each layer's mean and of the run's, least and largest head of all runs, and the median
    spread of ln τ over queries.
    """
    learned = [row for row in rows if "temperature" in row]
    if not learned:
        names = ("temperature_by_layer", "temperature_median", "temperature_range", "temperature_spread_median")
        return dict.fromkeys(names)
    # Temperatures multiply: the mean of a layer's heads is the geometric one, as that of a whole run is.
    by_layer = [np.log(row["temperatures"]).reshape(row["layers"], -1).mean(axis=1) for row in learned]
    return {
        "temperature_by_layer": np.exp(np.median(by_layer, axis=0)).tolist(),
        "temperature_median": quartiles([row["temperature"] for row in learned]).median,
        "temperature_range": [
            min(row["temperature_least"] for row in learned),
            max(row["temperature_largest"] for row in learned),
        ],
        "temperature_spread_median": quartiles([row["temperature_spread"] for row in learned]).median,
    }


def or_infinite(loss: float | None) -> float:
    """Return a loss as a number to rank by: a diverged run has none and counts as the worst.

    >>> or_infinite(None)
    inf
    """
    return math.inf if loss is None else loss


def finite(value: float) -> float | None:
    """Return a number for a table: None where it is infinite.

    >>> finite(math.inf) is None
    True
    """
    return value if math.isfinite(value) else None
