"""What the runs of a grid say together: medians and quartiles over seeds, best learning rates, paired exact tests.

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

REFERENCE_SCALE = "sqrt"

RunRow = Mapping[str, Any]
Rows = list[dict[str, Any]]


class Setting(NamedTuple):
    """What the seeds of a group have in common."""

    scale: str
    d_k: int
    init: str
    lr: float


class Quartiles(NamedTuple):
    """Lower quartile, median and upper quartile."""

    lower: float
    median: float
    upper: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Quartiles by linear interpolation; infinite values take part as the largest (or smallest).

    >>> quartiles([3.0, 1.0, 2.0])
    Quartiles(lower=1.5, median=2.0, upper=2.5)
    >>> quartiles([1.0, 2.0, math.inf]).median
    2.0
    >>> quartiles([-math.inf, 1.0, 2.0]).lower
    -inf
    """
    if not values:
        raise InvalidValueError("values must hold at least one number, got none")
    ordered = sorted(values)

    def at(q: float) -> float:
        place = q * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        # Between two finite values or two equal ones; inf − inf would be NaN.
        return low if low == high or math.isinf(low) else low + (high - low) * (place % 1.0)

    return Quartiles(at(0.25), at(0.5), at(0.75))


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test, exact for every n and with ties.

    Zeros are left out, equal sizes share their mean rank, and the distribution counts all 2ⁿ signs
    (Wilcoxon 1945, with ties and zeros as he treats them). With eight pairs of one sign it is 2/2⁸ = 0.0078.

    >>> wilcoxon_p([0.1, 0.4, 0.2, 0.3, 0.5, 0.9, 0.8, 0.7])
    0.0078125
    >>> wilcoxon_p([0.0, 0.0])
    1.0
    """
    values = np.array([value for value in differences if value != 0.0], dtype=np.float64)
    if np.isnan(values).any():
        raise InvalidValueError(f"differences must not hold NaN, got {list(differences)}")
    sizes = np.abs(values)
    # Twice the mean rank is an integer: how many are smaller, plus how many are not larger, plus 1.
    doubled = [int((sizes < size).sum() + (sizes <= size).sum() + 1) for size in sizes]
    probability = np.zeros(sum(doubled) + 1)
    probability[0] = 1.0
    for rank in doubled:
        shifted = np.zeros_like(probability)
        shifted[rank:] = probability[: len(probability) - rank]
        probability = 0.5 * (probability + shifted)
    positive = sum(rank for rank, value in zip(doubled, values, strict=True) if value > 0.0)
    tail = min(probability[: positive + 1].sum(), probability[positive:].sum())
    return float(min(1.0, 2.0 * tail))


def summarise(runs: Sequence[RunRow]) -> Rows:
    """One row per setting: median, quartiles, fraction solved, median steps to the threshold, and how many runs.

    `final_loss_iqr` is [lower quartile, upper quartile] over the seeds, not a confidence interval.
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
    """Each (scale, d_k, init) at the learning rate with the lowest median loss, the smaller rate on a tie.

    `lrs` says how many rates were tried, `at_edge` whether the best is the smallest or largest of them, so that
    a better one may lie outside.
    """
    groups: dict[tuple[Any, ...], list[RunRow]] = defaultdict(list)
    for row in summary:
        groups[row["scale"], row["d_k"], row["init"]].append(row)
    best = []
    for rows in groups.values():
        chosen = min(rows, key=lambda row: (or_infinite(row["final_loss_median"]), row["lr"]))
        rates = [row["lr"] for row in rows]
        at_edge = len(rates) > 1 and chosen["lr"] in (min(rates), max(rates))
        best.append({**chosen, "lrs": len(rates), "at_edge": at_edge})
    return best


def compare(runs: Sequence[RunRow], best: Sequence[RunRow]) -> Rows:
    """Every setting against sqrt, paired by seed: the loss minus the loss that sqrt has with the same seed.

    With basis ``same_lr`` both have one learning rate; with ``best_lr`` each has its own best (only if several were
    tried). The partner has the same init, except that `absorbed` is held against `unit` where that was run:
    without a scale it begins as the very function that sqrt is with `unit`.
    """
    losses = {setting: _losses_by_seed(rows) for setting, rows in _group(runs).items()}
    inits = {setting.init for setting in losses}
    best_lr = {(row["scale"], row["d_k"], row["init"]): row["lr"] for row in best}
    rows = []
    for setting in losses:
        rows += _compare_one("same_lr", losses, setting, _partner(setting, inits))
    if len({setting.lr for setting in losses}) > 1:
        for (scale, d_k, init), lr in best_lr.items():
            setting = Setting(scale, d_k, init, lr)
            partner = _partner(setting, inits)
            partner_lr = best_lr.get((partner.scale, partner.d_k, partner.init))
            if partner_lr is not None:
                rows += _compare_one("best_lr", losses, setting, partner._replace(lr=partner_lr))
    return rows


def _partner(setting: Setting, inits: set[str]) -> Setting:
    absorbed = setting.init == "absorbed" and "unit" in inits
    return setting._replace(scale=REFERENCE_SCALE, init="unit" if absorbed else setting.init)


def _compare_one(basis: str, losses: Mapping[Setting, Mapping[int, float]], setting: Setting, partner: Setting) -> Rows:
    if setting == partner or partner not in losses:
        return []
    seeds = sorted(losses[setting].keys() & losses[partner].keys())
    if not seeds:
        return []
    pairs = [(losses[setting][seed], losses[partner][seed]) for seed in seeds]
    differences = [0.0 if mine == theirs else mine - theirs for mine, theirs in pairs]
    spread = quartiles(differences)
    return [
        {
            "basis": basis,
            **setting._asdict(),
            "against": partner.scale,
            "against_init": partner.init,
            "against_lr": partner.lr,
            "median_difference": finite(spread.median),
            "difference_iqr": [finite(spread.lower), finite(spread.upper)],
            "higher": sum(difference > 0.0 for difference in differences),
            "lower": sum(difference < 0.0 for difference in differences),
            "wilcoxon_p": wilcoxon_p(differences),
            "n": len(seeds),
        }
    ]


def _group(runs: Sequence[RunRow]) -> dict[Setting, list[RunRow]]:
    groups: dict[Setting, list[RunRow]] = defaultdict(list)
    for row in runs:
        groups[Setting(row["scale"], row["d_k"], row["init"], row["lr"])].append(row)
    return dict(groups)


def _losses_by_seed(rows: Sequence[RunRow]) -> dict[int, float]:
    return {row["seed"]: or_infinite(row["final_loss"]) for row in rows if row["status"] != "failed"}


def _summarise_setting(setting: Setting, rows: Sequence[RunRow]) -> dict[str, Any]:
    counted = [row for row in rows if row["status"] != "failed"]
    losses = [or_infinite(row["final_loss"]) for row in counted]
    spread = quartiles(losses) if losses else Quartiles(math.inf, math.inf, math.inf)
    reached = [row["steps_to_threshold"] for row in counted if row["steps_to_threshold"] is not None]
    accuracies = [row["final_accuracy"] for row in counted if row["final_accuracy"] is not None]
    return {
        **setting._asdict(),
        "final_loss_median": finite(spread.median),
        "final_loss_iqr": [finite(spread.lower), finite(spread.upper)],
        "final_accuracy_median": quartiles(accuracies).median if accuracies else None,
        "solved_fraction": sum(bool(row["solved"]) for row in counted) / len(counted) if counted else None,
        "steps_to_threshold_median": quartiles(reached).median if reached else None,
        "reached_threshold": len(reached),
        "n": len(counted),
        "diverged": sum(row["status"] == "diverged" for row in counted),
        "failed": len(rows) - len(counted),
    }


def _summarise_learned(rows: Sequence[RunRow]) -> dict[str, Any]:
    """Where learned temperatures ended, in units of √dₖ; None for a scale that does not learn.

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
    """A loss as a number to rank by: a diverged run has none and counts as the worst.

    >>> or_infinite(None)
    inf
    """
    return math.inf if loss is None else loss


def finite(value: float) -> float | None:
    """A number for a table: None where it is infinite.

    >>> finite(math.inf) is None
    True
    """
    return value if math.isfinite(value) else None
