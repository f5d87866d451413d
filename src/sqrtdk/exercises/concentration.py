"""Effective keys of a query as dₖ grows: without scaling, divided by √dₖ and by dₖ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqrtdk import theory
from sqrtdk.exercises.gaussian_rows import (
    BUDGET,
    POLICIES,
    choose_effort,
    require_counts,
    sample_policies,
    state_crossing,
)
from sqrtdk.records.record import Record
from sqrtdk.wording.numbers import write_number, write_range

_QUANTITIES = ("effective_keys", "sum_p2", "entropy_ratio", "max_weight")


def concentration(
    d_ks: Sequence[int] = (1, 4, 8, 16, 32, 64, 128, 256, 512),
    ns: Sequence[int] = (16, 1024),
    budget: int = BUDGET,
    seed: int = 0,
    on_size: Callable[[str, float], None] | None = None,
) -> Record:
    """Measure how attention concentrates on a few keys as dₖ grows, for several n and the three policies.

    q and k have independent standard normal entries; the rows are the same as in `gradients` and `explain`. The first
    dₖ at which rows without scaling have E Σp² ≥ ½ is exact (`theory.concentration_crossing`). In the many-key limit
    rows begin to concentrate at dₖ = 2 ln n and have E Σp² = ½ at dₖ = 8 ln n (`theory.crossover_without_scaling`).

    Args:
        d_ks: the sizes dₖ.
        ns: the numbers of keys.
        budget: weights to measure per size, as for `gradients`.
        seed: seed of the random numbers. The numbers of one size do not depend on the other sizes.
        on_size: called before each size with its name and the finished share.

    Returns:
        A record with two tables. ``concentration`` has one row per dₖ, n and policy: the means over rows of the
        effective keys 1/Σp², of Σp², of H/ln n and of the largest weight, each with a 95% interval over samples.
        ``crossover`` has one row per n, without scaling: the limits 2 ln n (`begins`) and 8 ln n (`concentrated`), the
        exact first dₖ with E Σp² ≥ ½ (`concentrated_from`), and the first of `d_ks` whose measured mean is at least ½
        (`half_from`, None if there is none).

    >>> rows = concentration(d_ks=(1, 64), ns=(16,), budget=1024).tables["concentration"]
    >>> [(row["d_k"], row["scale"]) for row in rows][-2:]
    [(64, 'sqrt'), (64, 'inverse')]
    """
    require_counts("d_ks", d_ks, 1)
    require_counts("ns", ns, 2)
    sizes = [(int(d_k), int(n)) for n in ns for d_k in sorted(d_ks)]
    rows: list[dict[str, Any]] = []
    for index, (d_k, n) in enumerate(sizes):
        if on_size is not None:
            on_size(f"dₖ {d_k}, n {n}", index / len(sizes))
        effort = choose_effort(d_k, n, budget)
        sampled = sample_policies(d_k=d_k, n=n, **effort._asdict(), seed=seed)
        for policy in POLICIES:
            row: dict[str, Any] = {"d_k": d_k, "n": n, "scale": policy, "rows": effort.samples * effort.queries}
            for quantity in _QUANTITIES:
                mean = sampled[policy].mean(quantity)
                row |= {quantity: mean.value, f"{quantity}_low": mean.low, f"{quantity}_high": mean.high}
            rows.append(row)
    crossover = [_find_crossover(rows, int(n)) for n in ns]
    return Record(
        kind="concentration",
        spec={"d_ks": sorted(map(int, d_ks)), "ns": list(map(int, ns)), "budget": budget, "seed": seed},
        tables={"concentration": rows, "crossover": crossover},
        sentences=(sentences := _read(rows, crossover, seed)),
        headline=sentences[f"n {ns[-1]}"],
    )


def _find_crossover(rows: Sequence[Mapping[str, Any]], n: int) -> dict[str, Any]:
    limit = theory.crossover_without_scaling(n)
    without_scaling = [row for row in rows if row["n"] == n and row["scale"] == "none"]
    half = next((row["d_k"] for row in without_scaling if row["sum_p2"] >= 0.5), None)
    return {
        "n": n,
        "begins": limit.begins,
        "concentrated": limit.concentrated,
        "concentrated_from": theory.concentration_crossing(n),
        "half_from": half,
    }


def _read(rows: Sequence[Mapping[str, Any]], crossover: Sequence[Mapping[str, Any]], seed: int) -> dict[str, str]:
    sentences = {}
    for at in crossover:
        largest = max(row["d_k"] for row in rows if row["n"] == at["n"])
        keys = {row["scale"]: row["effective_keys"] for row in rows if (row["n"], row["d_k"]) == (at["n"], largest)}
        sentences[f"n {at['n']}"] = (
            f"{state_crossing(at['n'])} At dₖ = {largest} a query attends to "
            f"{write_number(keys['none'], 2)} effective keys with no scaling, {write_number(keys['sqrt'], 2)} with "
            f"1/√dₖ and {write_number(keys['inverse'], 2)} with 1/dₖ."
        )
    sentences["samples"] = (
        f"Each size has {write_range(row['rows'] for row in rows)} rows, seed {seed}; 95% intervals in the JSON are "
        "over independent samples."
    )
    return sentences
