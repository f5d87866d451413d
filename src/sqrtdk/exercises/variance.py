"""Exercise 1: the standard deviation of q·k with no scaling, with 1/√dₖ and with 1/dₖ, predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sqrtdk import checks, scales, theory
from sqrtdk.exercises.estimates import Array, Estimate, estimate_mean
from sqrtdk.exercises.gaussian_rows import POLICIES, require_counts, require_size
from sqrtdk.records.record import Record
from sqrtdk.wording.numbers import write_number

_BLOCK = 2**20
_FEWEST_SAMPLES = 1000  # with 100 the interval held the truth in 88 of 100 seeds at dₖ = 1


def variance(d_ks: Sequence[int] = (4, 64, 512), samples: int = 20_000, seed: int = 0) -> Record:
    """Measure the standard deviation of q·k for independent standard normal q and k, and compare it with √dₖ.

    Args:
        d_ks: the sizes dₖ.
        samples: independent pairs (q, k) per size.
        seed: seed of the random numbers. The numbers of one dₖ do not depend on the other sizes.

    Returns:
        A record with the table ``variance``: one row per dₖ and policy with the predicted and the measured standard
        deviation and its 95% interval (from the sample's own moments, as q·k is not Gaussian at small dₖ).

    Raises:
        InvalidValueError: a size below 1 or beyond memory, fewer than 1000 samples, a negative seed.

    >>> row = variance(d_ks=(64,), samples=1000).tables["variance"][0]
    >>> row["predicted"], row["low"] < 8 < row["high"]
    (8.0, True)
    """
    require_counts("d_ks", d_ks, 1)
    checks.integer("samples", samples, _FEWEST_SAMPLES)
    checks.integer("seed", seed, 0)
    require_size("d_k", max(d_ks))
    require_size("samples", samples)
    rows: list[dict[str, Any]] = []
    densities: list[dict[str, Any]] = []
    for d_k in d_ks:
        dots = sample_dot_products(int(d_k), samples, seed)
        for policy in POLICIES:
            factor = float(scales.get(policy).factor(scales.ScaleContext(d_k=int(d_k))))
            measured = estimate_std(dots * factor)
            predicted = math.sqrt(theory.dot_product_variance(int(d_k))) * factor
            rows.append(
                {
                    "d_k": int(d_k),
                    "scale": policy,
                    "predicted": predicted,
                    "measured": measured.value,
                    "low": measured.low,
                    "high": measured.high,
                    "inside": measured.holds(predicted),
                    "samples": samples,
                    "seed": seed,
                }
            )
            if policy != "inverse":
                densities.append({"d_k": int(d_k), "scale": policy, **_density(dots * factor)})
    return Record(
        kind="variance",
        spec={"d_ks": [int(d_k) for d_k in d_ks], "samples": samples, "seed": seed},
        tables={"variance": rows},
        curves={"densities": densities},
        sentences=(sentences := _read(rows)),
        headline=sentences[f"no scaling, d_k {d_ks[-1]}"],
    )


def estimate_std(values: Array) -> Estimate:
    """Return the standard deviation with its 95% interval, from the interval of the mean squared deviation.

    >>> estimate_std(np.array([-1.0, 1.0] * 50))         # every squared deviation of ±1 is 1
    Estimate(value=1.0, low=1.0, high=1.0)
    """
    return Estimate(*(math.sqrt(max(end, 0.0)) for end in estimate_mean((values - values.mean()) ** 2)))


def sample_dot_products(d_k: int, samples: int, seed: int) -> Array:
    """Return products q·k of independent standard normal q and k. Equal sizes and seeds give equal products.

    >>> sample_dot_products(64, 5, 0).shape
    (5,)
    """
    rng = np.random.default_rng([seed, d_k])
    block = max(1, _BLOCK // d_k)
    parts = []
    for start in range(0, samples, block):
        q, k = rng.standard_normal((2, min(block, samples - start), d_k))
        parts.append(np.einsum("sd,sd->s", q, k))
    return np.concatenate(parts)


def _density(values: Array) -> dict[str, list[float]]:
    # Half a percent in each tail is left out of the picture, not out of the numbers.
    low, high = np.quantile(values, [0.005, 0.995])
    counts, edges = np.histogram(values, bins=41, range=(float(low), float(high)))
    density = counts / (values.size * np.diff(edges))
    return {"x": ((edges[1:] + edges[:-1]) / 2).tolist(), "density": density.tolist()}


def _read(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    without_scaling = [row for row in rows if row["scale"] == "none"]
    sentences = {
        f"no scaling, d_k {row['d_k']}": (
            f"dₖ = {row['d_k']}: with no scaling scores have standard deviation {write_number(row['measured'])} (95% "
            f"interval {write_number(row['low'])} to {write_number(row['high'])}, {row['samples']} pairs, seed "
            f"{row['seed']}). √dₖ = {write_number(row['predicted'])} lies {'inside' if row['inside'] else 'outside'} "
            "the interval."
        )
        for row in without_scaling
    }
    after_sqrt = [row["measured"] for row in rows if row["scale"] == "sqrt"]
    after_inverse = [row["measured"] for row in rows if row["scale"] == "inverse"]
    sizes = [row["d_k"] for row in without_scaling]
    after = f"{write_number(after_inverse[0], 3)} at dₖ = {sizes[0]}"
    sentences["scaled"] = (
        f"Divided by √dₖ, the standard deviation is {after_sqrt[0]:.3f}. Divided by dₖ, it is {after}."
        if len(sizes) == 1
        else f"Divided by √dₖ, the standard deviation is {min(after_sqrt):.3f} to {max(after_sqrt):.3f} at every size. "
        f"Divided by dₖ, it is {after} and {write_number(after_inverse[-1], 3)} at dₖ = {sizes[-1]}."
    )
    return sentences
