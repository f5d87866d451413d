"""Exercise 5: the softmax Jacobian of uniform and peaked rows, and the size of gradients over dₖ and n."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sqrtdk import checks, theory
from sqrtdk.exercises.estimates import estimate_quantile
from sqrtdk.exercises.gaussian_rows import (
    BUDGET,
    POLICIES,
    SampledRows,
    choose_effort,
    require_counts,
    sample_policies,
)
from sqrtdk.records.record import Record
from sqrtdk.wording.numbers import write_number, write_percent, write_range

# Two rows of the sources between a uniform row and one as peaked as attention without scaling at dₖ = 512 usually is.
_EXAMPLES = {
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "mild": (0.3, 0.3, 0.2, 0.2),
    "peaked": (0.97, 0.01, 0.01, 0.01),
    "one-hot": (1.0 - 3e-6, 1e-6, 1e-6, 1e-6),
}


def gradients(
    d_ks: Sequence[int] = (4, 64, 512),
    ns: Sequence[int] = (16, 128, 1024),
    budget: int = BUDGET,
    seed: int = 0,
    on_size: Callable[[str, float], None] | None = None,
) -> Record:
    """Show ∂softmax/∂input for uniform to one-hot rows, and measure gradients over dₖ × n under the three policies.

    q, k, v (dᵥ = dₖ) and the gradient at the output have independent standard normal entries.

    Args:
        d_ks: the sizes dₖ.
        ns: the numbers of keys n.
        budget: weights to measure per size. A size has budget/n rows, from 512 to 4096; small dₖ or n have more.
        seed: seed of the random numbers. The numbers of one size do not depend on the other sizes.
        on_size: called before each size with its name and the finished share.

    Returns:
        A record with two tables. ``jacobians`` has one row per example of weights. ``vanish`` has one row per size and
        policy: mean, median and 5th percentile over rows of 1 − Σp², ‖J‖_F and ‖∂loss/∂q‖, 95% intervals of the
        gradient's mean and 5th percentile, and the share of Σ‖∂loss/∂q‖² in the twentieth of the rows with the largest
        gradients (0.05 if all were equal).

    >>> rows = gradients(d_ks=(64,), ns=(16,)).tables["vanish"]
    >>> [row["scale"] for row in rows]
    ['none', 'sqrt', 'inverse']
    """
    require_counts("d_ks", d_ks, 1)
    require_counts("ns", ns, 2)
    checks.integer("budget", budget, 1)
    rows: list[dict[str, Any]] = []
    sizes = [(int(d_k), int(n)) for d_k in d_ks for n in ns]
    for index, (d_k, n) in enumerate(sizes):
        if on_size is not None:
            on_size(f"dₖ {d_k}, n {n}", index / len(sizes))
        sampled = sample_policies(d_k=d_k, n=n, **choose_effort(d_k, n, budget)._asdict(), seed=seed)
        rows += [{"d_k": d_k, "n": n, "scale": policy, **_summarise(measured)} for policy, measured in sampled.items()]
    jacobians = [_describe_example(name, weights) for name, weights in _EXAMPLES.items()]
    return Record(
        kind="gradients",
        spec={"d_ks": list(map(int, d_ks)), "ns": list(map(int, ns)), "budget": budget, "seed": seed},
        tables={"jacobians": jacobians, "vanish": rows},
        curves={
            "jacobians": [
                {"name": name, "matrix": theory.softmax_jacobian(weights).tolist()}
                for name, weights in _EXAMPLES.items()
            ]
        },
        sentences=(sentences := _read(jacobians, rows, seed)),
        headline=sentences["unevenness"],
    )


def _describe_example(name: str, weights: Sequence[float]) -> dict[str, Any]:
    size = theory.jacobian_size(weights)
    jacobian = theory.softmax_jacobian(weights)
    return {
        "name": name,
        "weights": ", ".join(write_number(weight, 6) for weight in weights),
        "diagonal": ", ".join(write_number(entry, 3) for entry in np.diag(jacobian)),
        "largest_entry": float(np.abs(jacobian).max()),
        "jacobian_trace": float(size.trace),
        "jacobian_norm": float(size.frobenius),
    }


def _summarise(measured: SampledRows) -> dict[str, Any]:
    row: dict[str, Any] = {"rows": measured.grad_q.size}
    for name in ("jacobian_trace", "jacobian_norm", "grad_q"):
        values = getattr(measured, name)
        row |= {
            f"{name}_mean": float(values.mean()),
            f"{name}_median": float(np.median(values)),
            f"{name}_p5": float(np.quantile(values, 0.05)),
        }
    mean, lowest = measured.mean("grad_q"), estimate_quantile(measured.grad_q, 0.05)
    squares = np.sort(measured.grad_q, axis=None) ** 2
    top = max(1, round(squares.size / 20))
    return row | {
        "grad_q_low": mean.low,
        "grad_q_high": mean.high,
        "grad_q_p5_low": lowest.low,
        "grad_q_p5_high": lowest.high,
        "top_share": float(squares[-top:].sum() / squares.sum()),
    }


def _read(jacobians: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], seed: int) -> dict[str, str]:
    first, last = jacobians[0], jacobians[-1]
    cells = {(row["d_k"], row["n"], row["scale"]): row for row in rows}
    places = list(dict.fromkeys((row["d_k"], row["n"]) for row in rows))
    trace_falls = [
        at for at in places if cells[*at, "none"]["jacobian_trace_mean"] < cells[*at, "sqrt"]["jacobian_trace_mean"]
    ]
    larger = [at for at in places if cells[*at, "none"]["grad_q_mean"] > cells[*at, "sqrt"]["grad_q_mean"]]
    lower_half = [at for at in places if cells[*at, "none"]["grad_q_median"] < cells[*at, "sqrt"]["grad_q_median"]]
    smallest = [at for at in places if min(POLICIES, key=lambda name: cells[*at, name]["grad_q_mean"]) == "inverse"]
    most_uneven = max(places, key=lambda at: cells[*at, "none"]["top_share"])
    none, sqrt = cells[*most_uneven, "none"], cells[*most_uneven, "sqrt"]
    return {
        "jacobians": f"From the {first['name']} to the {last['name']} example the Jacobian trace falls from "
        f"{write_number(first['jacobian_trace'], 3)} to {write_number(last['jacobian_trace'], 2)}, and its largest "
        f"entry from {write_number(first['largest_entry'], 3)} to {write_number(last['largest_entry'], 2)}.",
        "traces": f"Without scaling the mean of 1 − Σp² is below that of 1/√dₖ in {len(trace_falls)} of {len(places)} "
        f"sizes{', as the sources say' if len(trace_falls) == len(places) else '; the sources say in all sizes'}.",
        "means": f"The mean gradient of the queries{', however,' if larger else ''} is larger without scaling than "
        f"with 1/√dₖ in {len(larger)} of {len(places)} sizes. The median gradient is smaller in {len(lower_half)} of "
        f"{len(places)} sizes{_list_places(lower_half)}. 1/dₖ has the smallest mean gradient in {len(smallest)} of "
        f"{len(places)} sizes.",
        "unevenness": f"{_name_unevenness(none, sqrt)}: at dₖ = {most_uneven[0]}, n = {most_uneven[1]} a "
        f"twentieth of the rows holds {write_percent(none['top_share'])} of the squared gradient without scaling, and "
        f"{write_percent(sqrt['top_share'])} with 1/√dₖ. Without scaling the median gradient is "
        f"{write_number(none['grad_q_median'], 2)}, the mean {write_number(none['grad_q_mean'], 2)} and the 5th "
        f"percentile {write_number(none['grad_q_p5'], 1)} (95% interval {write_number(none['grad_q_p5_low'], 1)} to "
        f"{write_number(none['grad_q_p5_high'], 1)}).",
        "samples": f"Each size has {write_range(row['rows'] for row in rows)} rows, seed {seed}; 95% intervals are "
        "over independent samples.",
    }


def _name_unevenness(none: dict[str, Any], sqrt: dict[str, Any]) -> str:
    more = "more uneven" if none["top_share"] > sqrt["top_share"] else "not more uneven"
    return f"Without scaling gradients are {more} than with 1/√dₖ"


def _list_places(places: Sequence[tuple[int, int]]) -> str:
    return f" ({'; '.join(f'dₖ {d_k}, n {n}' for d_k, n in places)})" if places else ""
