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
from sqrtdk.records import Record

_QUANTITIES = ("effective_keys", "sum_p2", "entropy_ratio", "max_weight")


def condensation(
    d_ks: Sequence[int] = (1, 4, 8, 16, 32, 64, 128, 256, 512),
    ns: Sequence[int] = (16, 1024),
    budget: int = BUDGET,
    seed: int = 0,
    on_size: Callable[[str, float], None] | None = None,
) -> Record:
    """Measure how attention concentrates on a few keys as dₖ grows, for several n and the three policies.

    Rows are those of `gradients` and `explain`: q and k have independent standard normal entries. The first dₖ at which
    unscaled rows have E Σp² ≥ ½ is solved for (`theory.concentration_crossing`); for n → ∞ they begin to concentrate at
    2 ln n and have E Σp² = ½ at 8 ln n (`theory.unscaled_crossover`).

    Args:
        d_ks: the sizes dₖ.
        ns: the numbers of keys.
        budget: weights to measure per size, as for `gradients`.
        seed: of the random numbers; those of one size do not depend on the other sizes.
        on_size: called before each size with its name and the share that is done.

    Returns:
        A record with the tables ``condensation`` (per dₖ, n and policy the means over rows of the effective keys 1/Σp²,
        of Σp², H/ln n and the largest weight, each with its 95% interval over draws) and ``crossover`` (per n: 2 ln n,
        8 ln n, the first dₖ at which unscaled rows have E Σp² ≥ ½, exact, and the first one of `d_ks` at which the
        measured mean has, None if there is none).

    >>> rows = condensation(d_ks=(1, 64), ns=(16,), budget=1024).tables["condensation"]
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
            row: dict[str, Any] = {"d_k": d_k, "n": n, "scale": policy, "rows": effort.draws * effort.queries}
            for quantity in _QUANTITIES:
                mean = sampled[policy].mean(quantity)
                row |= {quantity: mean.value, f"{quantity}_low": mean.low, f"{quantity}_high": mean.high}
            rows.append(row)
    crossover = [_find_crossover(rows, int(n)) for n in ns]
    return Record(
        kind="condensation",
        spec={"d_ks": sorted(map(int, d_ks)), "ns": list(map(int, ns)), "budget": budget, "seed": seed},
        tables={"condensation": rows, "crossover": crossover},
        sentences=(sentences := _read(rows, crossover, seed)),
        headline=sentences[f"n {ns[-1]}"],
    )


def _find_crossover(rows: Sequence[Mapping[str, Any]], n: int) -> dict[str, Any]:
    limit = theory.unscaled_crossover(n)
    unscaled = [row for row in rows if row["n"] == n and row["scale"] == "none"]
    half = next((row["d_k"] for row in unscaled if row["sum_p2"] >= 0.5), None)
    return {
        "n": n,
        "begins": limit.begins,
        "nearly_one_hot": limit.nearly_one_hot,
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
            f"{_name_keys(keys['none'])} keys without scaling, {_name_keys(keys['sqrt'])} with 1/√dₖ and "
            f"{_name_keys(keys['inverse'])} with 1/dₖ (effective keys)."
        )
    counts = [row["rows"] for row in rows]
    sentences["samples"] = f"{min(counts)} to {max(counts)} rows per size, seed {seed}; intervals are 95% over draws."
    return sentences


def _name_keys(keys: float) -> str:
    return f"{keys:.2g}" if keys < 10 else f"{keys:.0f}"
