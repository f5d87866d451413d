"""Reproductions on the lab's transformer and its recall task: runs are stored, and a store continues them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from sqrtdk.exercises.estimates import Estimate, estimate_mean
from sqrtdk.lab.intervals import hodges_lehmann, signed_rank_interval, wilson
from sqrtdk.lab.laboratory import Lab
from sqrtdk.lab.outcomes import MARGIN, or_infinite
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import RunRecord
from sqrtdk.reproductions.reproduction import Chart, Expectation, Measured, trained_reproduction

_MARGIN = MARGIN * math.log(16)  # of the chance loss of recall with 16 symbols
_LENGTHS = (12, 24, 48)


def estimate_shift(differences: Iterable[float]) -> Estimate:
    """Return the Hodges–Lehmann estimate of paired differences with its exact signed-rank interval.

    >>> estimate_shift([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    Estimate(value=3.5, low=1.0, high=6.0)
    """
    values = [float(one) for one in differences]
    return Estimate(hodges_lehmann(values), *signed_rank_interval(values))


def estimate_share(successes: int, n: int) -> Estimate:
    """Return a share with Wilson's interval.

    >>> estimate_share(4, 4).value
    1.0
    """
    return Estimate(successes / n, *wilson(successes, n))


def list_seeds(first: int, count: int) -> range:
    """Return so many seeds from the first on."""
    return range(first, first + count)


@trained_reproduction(
    "failing-size",
    "Training without the scale begins to fail at a dₖ between 2 ln n, where attention begins to concentrate, and "
    "8 ln n, where one or two keys hold most of the weight",
    "Vaswani et al. 2017 (1706.03762), section 3.2.1, with the limits of Derrida 1981",
    *(Expectation(f"failing dₖ divided by 2 ln n, n = {n}", "≥", 1.0) for n in _LENGTHS),
    *(Expectation(f"failing dₖ divided by 8 ln n, n = {n}", "≤", 1.0) for n in _LENGTHS),
    Expectation("failing dₖ at n = 48 divided by failing dₖ at n = 12", "≥", 1.0),
    *(Expectation(f"control: share solved with 1/√dₖ at dₖ 32, n = {n}", "≥", 0.5) for n in _LENGTHS),
    chart=Chart(
        "failing",
        "n",
        "d_k",
        "length n",
        "dₖ at which training begins to fail",
        by="line",
        log_x=True,
        log_y=True,
        predicted=("2 ln n", "8 ln n"),
    ),
    scaled_down="recall of 4, 8 and 16 pairs, dₖ 4 to 64, 600 steps at a learning rate of 0.001, 4 seeds",
)
def find_failing_size(
    seed: int, lab: Lab, *, d_ks: Sequence[int] = (4, 8, 16, 32, 64), seeds: int = 4, steps: int = 600
) -> Measured:
    """Return, per length, the smallest dₖ at which no scaling fails although 1/√dₖ solves the task with the same seed.

    It lies between that dₖ and the one before. A seed that has failed is not trained at larger dₖ. Where a seed fails
    at the smallest dₖ or at none, only one end is known, and the interval is open on the other side.
    """
    chosen = list_seeds(seed, seeds)
    cells = [(n, one) for n in _LENGTHS for one in chosen]

    def solve(scale: str, d_k: int, asked: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        specs = [
            RunSpec(scale=scale, d_k=d_k, seed=one, steps=steps, task_parameters={"pairs": n // 3}) for n, one in asked
        ]
        return {cell for cell, record in zip(asked, lab.run(specs), strict=True) if record.row["solved"]}

    controls = Counter(n for n, _ in solve("sqrt", 32, cells))
    levels, left = dict.fromkeys(cells, len(d_ks)), cells
    for level, d_k in enumerate(d_ks):
        solved = solve("none", d_k, left)
        failed = solve("sqrt", d_k, [cell for cell in left if cell not in solved])
        levels |= dict.fromkeys(failed, level)
        left = [cell for cell in left if cell not in failed]
    grid = [d_ks[0] / 2, *d_ks, 2 * d_ks[-1]]
    logs = {n: [math.log2(grid[levels[n, one]] * grid[levels[n, one] + 1]) / 2 for one in chosen] for n in _LENGTHS}
    below = {n: any(levels[n, one] == 0 for one in chosen) for n in _LENGTHS}
    above = {n: any(levels[n, one] == len(d_ks) for one in chosen) for n in _LENGTHS}
    estimates: dict[str, Estimate] = {}
    failing = []
    for n in _LENGTHS:
        found = _open_ends(estimate_mean(logs[n]), below[n], above[n])
        for factor in (2, 8):
            limit = factor * math.log(n)
            estimates[f"failing dₖ divided by {factor} ln n, n = {n}"] = Estimate(*(end / limit for end in found))
            failing.append({"line": f"{factor} ln n", "n": n, "d_k": limit})
        ends = {"low": max(found.low, 1.0), "high": min(found.high, 4.0 * d_ks[-1])}
        failing.append({"line": "no scaling", "n": n, "d_k": found.value, **ends})
        estimates[f"control: share solved with 1/√dₖ at dₖ 32, n = {n}"] = estimate_share(controls[n], seeds)
    growth = estimate_mean(np.subtract(logs[48], logs[12]))
    estimates["failing dₖ at n = 48 divided by failing dₖ at n = 12"] = _open_ends(
        growth, below[48] or above[12], above[48] or below[12]
    )
    return Measured(estimates, {"failing": failing})


def _open_ends(log: Estimate, below: bool, above: bool) -> Estimate:
    """Return 2 to the power of an estimate, open on the sides where some value lies outside of the grid."""
    value, low, high = (2.0**end for end in log)
    return Estimate(value, 0.0 if below else low, math.inf if above else high)


_START: dict[str, dict[str, str]] = {
    "1/√dₖ": {},
    "no scaling": {"scale": "none"},
    "no scaling, rescaled init": {"scale": "none", "init": "rescaled"},
    "no scaling, rescaled init and step": {"scale": "none", "init": "rescaled", "qk_step": "rescaled"},
}


@trained_reproduction(
    "init-and-step",
    "The scale 1/√dₖ can move into the initialisation, as in T5, and with Adam also into the step of W_q and W_k; the "
    "initialisation alone gives the same start and another training",
    "Raffel et al. 2020 (1910.10683), T5 without scaling; Yang et al. 2022 (2203.03466), on factors that move between "
    "multiplier, initialisation and learning rate",
    Expectation("largest distance from the losses of 1/√dₖ at step 0, rescaled init", "≤", 1e-6),
    Expectation("largest distance from the losses of 1/√dₖ over training, rescaled init and step", "≤", 1e-6),
    Expectation("final loss of the rescaled init alone minus that of 1/√dₖ", "≥", 0.0),
    Expectation("final loss of no scaling minus that of 1/√dₖ", "≥", 1.0),
    chart=Chart("losses", "step", "loss", "step", "training loss, median of seeds", by="line", log_y=True),
    scaled_down="recall, dₖ 256, 400 steps at a learning rate of 0.003, 6 seeds",
)
def compare_start_with_scale(
    seed: int, lab: Lab, *, d_k: int = 256, seeds: int = 6, steps: int = 400, lr: float = 3e-3
) -> Measured:
    """Return training losses of four settings that share data and all weights but W_q and W_k, seed by seed."""
    chosen = list_seeds(seed, seeds)
    specs = [
        replace(RunSpec(d_k=d_k, seed=one, steps=steps, lr=lr), **setting)  # type: ignore[arg-type]
        for setting in _START.values()
        for one in chosen
    ]
    records = lab.run(specs)
    runs = {name: records[place * seeds : (place + 1) * seeds] for place, name in enumerate(_START)}
    scaled, none, start, both = runs.values()
    rows = []
    for name, of_name in runs.items():
        # A run that diverged has fewer points; it has no loss from there on.
        shortest = min(len(one.curves["step"]) for one in of_name)
        medians = np.median([one.curves["loss"][:shortest] for one in of_name], axis=0)
        steps_shown = of_name[0].curves["step"][:shortest]
        rows += [
            {"line": name, "step": step, "loss": float(loss)} for step, loss in zip(steps_shown, medians, strict=True)
        ]
    return Measured(
        {
            "largest distance from the losses of 1/√dₖ at step 0, rescaled init": _largest_distance(start, scaled, 1),
            "largest distance from the losses of 1/√dₖ over training, rescaled init and step": _largest_distance(
                both, scaled
            ),
            "final loss of the rescaled init alone minus that of 1/√dₖ": _compare_finals(start, scaled),
            "final loss of no scaling minus that of 1/√dₖ": _compare_finals(none, scaled),
        },
        {"losses": rows},
    )


def _largest_distance(runs: Sequence[RunRecord], others: Sequence[RunRecord], points: int | None = None) -> float:
    return max(
        float(abs(mine - theirs))
        for one, other in zip(runs, others, strict=True)
        for mine, theirs in zip(one.curves["loss"][:points], other.curves["loss"][:points], strict=True)
    )


def _compare_finals(runs: Sequence[RunRecord], others: Sequence[RunRecord]) -> Estimate:
    pairs = zip(runs, others, strict=True)
    return estimate_shift(
        [or_infinite(one.row["final_loss"]) - or_infinite(other.row["final_loss"]) for one, other in pairs]
    )


_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


@trained_reproduction(
    "rate-sensitivity",
    "QK-norm makes the loss depend less on the learning rate: the mean over rates of min(loss, first loss) minus the "
    "best loss is smaller with it",
    "Wortsman et al. 2023 (2309.14322), learning-rate sensitivity and qk-layernorm",
    Expectation("learning-rate sensitivity of 1/√dₖ minus that of QK-norm", "≥", 0.0),
    chart=Chart("losses", "lr", "loss", "learning rate", "held-out loss, mean of seeds", by="line", log_x=True),
    scaled_down="recall, dₖ 64, five learning rates from 0.001 to 0.1, 400 steps, 6 seeds",
)
def compare_rate_sensitivity(
    seed: int, lab: Lab, *, lrs: Sequence[float] = _RATES, seeds: int = 6, steps: int = 400
) -> Measured:
    """Return Wortsman's learning-rate sensitivity with and without QK-norm, rates evenly spaced in their logarithm."""
    policies = {"1/√dₖ": "sqrt", "QK-norm": "qk_norm"}
    specs = [
        RunSpec(scale=scale, seed=one, lr=lr, steps=steps)
        for scale in policies.values()
        for one in list_seeds(seed, seeds)
        for lr in lrs
    ]
    records = lab.run(specs)
    first = np.array([one.curves["loss"][0] if one.curves["loss"] else math.inf for one in records])
    final = np.array([or_infinite(one.row["final_loss"]) for one in records])
    losses = np.minimum(final, first).reshape(len(policies), seeds, len(lrs))
    sensitivity = (losses - losses.min(axis=2, keepdims=True)).mean(axis=2)
    rows = []
    for name, of_policy in zip(policies, losses, strict=True):
        for lr, of_rate in zip(lrs, of_policy.T, strict=True):
            rows.append({"line": name, "lr": lr, "loss": float(of_rate.mean())} | span_seeds(of_rate))
    return Measured(
        {"learning-rate sensitivity of 1/√dₖ minus that of QK-norm": estimate_shift(sensitivity[0] - sensitivity[1])},
        {
            "losses": rows,
            "sensitivity": [
                {"line": name, "seed": one, "sensitivity": float(value)}
                for name, values in zip(policies, sensitivity, strict=True)
                for one, value in zip(list_seeds(seed, seeds), values, strict=True)
            ],
        },
    )


def span_seeds(values: Iterable[float]) -> dict[str, float]:
    """Return the smallest and the largest value, for the bars of a chart."""
    found = [float(value) for value in values]
    return {"low": min(found), "high": max(found)}


_LEARNED = {"one per head": "learned", "one per query": "query"}


@trained_reproduction(
    "settled-temperatures",
    "Learned temperatures end below √dₖ, sharper than the default, and temperatures per query come to differ between "
    "queries",
    "Radford et al. 2021 (2103.00020) and Liu et al. 2022 (2111.09883) for learned temperatures; "
    "Zhang et al. 2024 (2411.12892) for temperatures per query",
    *(Expectation(f"τ/√dₖ at the end, {name}", "≤", 1.0) for name in _LEARNED),
    Expectation("standard deviation of ln τ over the queries of a head, one per query", "≥", 0.05),
    *(Expectation(f"final loss minus that of 1/√dₖ, {name}", "≤", _MARGIN) for name in _LEARNED),
    chart=Chart(
        "temperatures",
        "layer",
        "temperature",
        "layer",
        "τ/√dₖ at the end, geometric mean",
        by="line",
        log_y=True,
        bound=(1.0, "1/√dₖ"),
    ),
    scaled_down="recall, dₖ 64, two layers of two heads, 400 steps at a learning rate of 0.003, 6 seeds",
)
def settle_temperatures(seed: int, lab: Lab, *, seeds: int = 6, steps: int = 400, d_k: int = 64) -> Measured:
    """Return where learned temperatures end, over all heads, and the losses beside the fixed scale."""
    chosen = list_seeds(seed, seeds)
    specs = [
        RunSpec(scale=scale, d_k=d_k, heads=2, seed=one, steps=steps, lr=3e-3)
        for scale in ("sqrt", *_LEARNED.values())
        for one in chosen
    ]
    records = lab.run(specs)
    fixed, groups = records[:seeds], (records[seeds : 2 * seeds], records[2 * seeds :])
    estimates, rows = {}, []
    for name, of_name in zip(_LEARNED, groups, strict=True):
        logs = np.log([one.row["temperatures"] for one in of_name if one.row["status"] == "done"])
        estimates[f"τ/√dₖ at the end, {name}"] = Estimate(*map(math.exp, estimate_shift(logs.mean(axis=1))))
        estimates[f"final loss minus that of 1/√dₖ, {name}"] = _compare_finals(of_name, fixed)
        for layer, of_layer in enumerate(logs.reshape(len(logs), -1, 2).mean(axis=2).T, start=1):
            temperatures = np.exp(of_layer)
            centre = math.exp(float(of_layer.mean()))
            rows.append({"line": name, "layer": layer, "temperature": centre, **span_seeds(temperatures)})
    spread = [one.row["temperature_spread"] for one in groups[1] if one.row["status"] == "done"]
    estimates["standard deviation of ln τ over the queries of a head, one per query"] = estimate_shift(spread)
    return Measured(estimates, {"temperatures": rows})
