"""Reproductions that need only formulas and random numbers: they take seconds and train nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sqrtdk import theory
from sqrtdk.exercises.estimates import estimate_mean
from sqrtdk.operation.attention import attention
from sqrtdk.reproductions.reproduction import Chart, Expectation, Measured, reproduction

Array = npt.NDArray[np.float64]


@reproduction(
    "entropy-bound",
    "The entropy of a row has a lower bound that falls with the spread of its logits, and one row reaches it",
    "Zhai et al. 2023 (2303.06296), theorem 3.1",
    Expectation("rows below the bound", "≤", 0.0),
    Expectation("distance of the extremal row from the bound", "≤", 1e-12),
    chart=Chart(
        "entropy",
        "sigma",
        "value",
        "standard deviation of the logits",
        "entropy in nats",
        by="line",
        log_x=True,
        predicted=("bound, n = 8", "bound, n = 512"),
        joined=False,
    ),
)
def compare_entropy_with_its_bound(seed: int) -> Measured:
    """Return entropies against their bound, for eight kinds of random logits of 2 to 512 keys and extremal rows."""
    rng = np.random.default_rng(seed)
    below, apart = 0, 0.0
    spreads: dict[int, list[Array]] = defaultdict(list)
    entropies: dict[int, list[Array]] = defaultdict(list)
    for n in (2, 3, 8, 64, 512):
        for spread in (0.01, 0.1, 1.0, 3.0, 10.0, 30.0):
            draws = (rng.standard_normal, rng.standard_exponential, rng.standard_cauchy, rng.random)
            logits = np.concatenate([sign * spread * draw((500, n)) for draw in draws for sign in (1, -1)])
            sigma = logits.std(axis=1)
            below += int((_entropy(logits) < theory.entropy_lower_bound(sigma, n) - 1e-12).sum())
            extremal = np.zeros((1, n))
            extremal[0, 0] = spread * n / math.sqrt(n - 1)  # a row with standard deviation `spread`
            floor = float(theory.entropy_lower_bound(spread, n))
            apart = max(apart, abs(float(_entropy(extremal)[0]) - floor))
            spreads[n].append(sigma)
            entropies[n].append(_entropy(logits))
    curve = []
    for n in (8, 512):
        sigma, entropy = np.concatenate(spreads[n]), np.concatenate(entropies[n])
        edges = np.geomspace(0.01, 100.0, 33)
        curve += [
            {"line": f"bound, n = {n}", "sigma": float(edge), "value": float(theory.entropy_lower_bound(edge, n))}
            for edge in edges
        ]
        for low, high in pairwise(edges[::2]):
            inside = np.flatnonzero((sigma >= low) & (sigma < high))
            if inside.size:
                least = inside[entropy[inside].argmin()]
                row = {"sigma": float(sigma[least]), "value": float(entropy[least])}
                curve.append({"line": f"lowest entropies, n = {n}", **row})
    return Measured(
        {"rows below the bound": below, "distance of the extremal row from the bound": apart}, {"entropy": curve}
    )


def _entropy(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=1)
    return np.asarray(np.log(total) - (weights * shifted).sum(axis=1) / total)


@reproduction(
    "ssmax",
    "Softmax of one high logit fades as keys are added, and SSMax with s ln n does not",
    "Nakanishi 2025 (2501.19399), figure 1: entries of −2, one of 3, s = 0.43",
    Expectation("softmax's largest weight at 1024 keys, distance from 0.127", "≤", 0.0005),
    Expectation("SSMax's largest weight at 1024 keys, distance from 0.9997", "≤", 0.00005),
    Expectation("softmax's largest weight at 16384 keys, distance from 0.009", "≤", 0.0005),
    chart=Chart("max_weight", "n", "max_weight", "keys n", "largest weight", by="policy", log_x=True),
)
def compare_softmax_with_ssmax(seed: int) -> Measured:
    """Return the largest weight over 2 to 16 384 keys, by `sqrtdk.attention` with one feature per logit."""
    found: dict[tuple[str, int], float] = {}
    for n in map(int, 2 ** np.arange(1, 15)):
        keys = np.full((n, 1), -2.0)
        keys[0] = 3.0
        for policy, scale in (("softmax", 1.0), ("ssmax", 0.43 * math.log(n))):
            found[policy, n] = _largest_weight(np.ones((1, 1)), keys, scale)
    curve = [{"n": n, "policy": policy, "max_weight": weight} for (policy, n), weight in found.items()]
    return Measured(
        {
            "softmax's largest weight at 1024 keys, distance from 0.127": abs(found["softmax", 1024] - 0.127),
            "SSMax's largest weight at 1024 keys, distance from 0.9997": abs(found["ssmax", 1024] - 0.9997),
            "softmax's largest weight at 16384 keys, distance from 0.009": abs(found["softmax", 16384] - 0.009),
        },
        {"max_weight": curve},
    )


_CORRELATIONS = (0.0, 0.25, 0.5, 0.75)


@reproduction(
    "critical-scaling",
    "With a scale of γ ln n, tokens of common correlation ρ attend to themselves above γ = 1/(1 − ρ) and to all below",
    "arXiv 2510.05554 (2025), β = γ ln n",
    *(Expectation(f"γ·(1 − ρ) at half the weight, ρ = {rho:g}: distance from 1", "≤", 0.01) for rho in _CORRELATIONS),
    Expectation("largest weight on oneself at γ·(1 − ρ) = 0.7 and 2048 keys", "≤", 0.15),
    Expectation("least weight on oneself at γ·(1 − ρ) = 1.3 and 2048 keys", "≥", 0.85),
    chart=Chart("half_correlated", "of_critical", "weight", "γ·(1 − ρ)", "weight of a token on itself", by="line"),
    scaled_down="one layer, to 2048 tokens",
)
def find_critical_scale(seed: int) -> Measured:
    """Return the weight of a token on itself, by `sqrtdk.attention` of tokens with the given correlation."""
    curve, crossings, below, above = [], {}, [], []
    for rho in _CORRELATIONS:
        for n in (32, 256, 2048):
            for of_critical in (0.7, 0.85, 1.0, 1.15, 1.3):
                weight = _weigh_itself(rho, n, of_critical / (1 - rho))
                curve.append(
                    {"line": f"n = {n}, ρ = {rho:g}", "rho": rho, "n": n, "of_critical": of_critical, "weight": weight}
                )
        below.append(_weigh_itself(rho, 2048, 0.7 / (1 - rho)))
        above.append(_weigh_itself(rho, 2048, 1.3 / (1 - rho)))
        low, high = 0.5, 1.5
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if _weigh_itself(rho, 2048, middle / (1 - rho)) > 0.5 else (middle, high)
        crossings[f"γ·(1 − ρ) at half the weight, ρ = {rho:g}: distance from 1"] = abs(low - 1)
    return Measured(
        {
            **crossings,
            "largest weight on oneself at γ·(1 − ρ) = 0.7 and 2048 keys": max(below),
            "least weight on oneself at γ·(1 − ρ) = 1.3 and 2048 keys": min(above),
        },
        {"weight": curve, "half_correlated": [row for row in curve if row["rho"] == 0.5]},
    )


def _weigh_itself(rho: float, n: int, gamma: float) -> float:
    """Return the weight of one unit vector √ρ·e₀ + √(1 − ρ)·eᵢ on itself: q·k is 1 with itself and ρ with others."""
    keys = np.full((n, 2), 0.0)
    keys[:, 0], keys[0, 1] = math.sqrt(rho), math.sqrt(1 - rho)  # the query has no component on the axes of the others
    return _largest_weight(keys[:1], keys, gamma * math.log(n))


def _largest_weight(query: Array, keys: Array, scale: float) -> float:
    statistics = attention(query, keys, keys, scale=scale).statistics
    assert statistics is not None
    return float(statistics.max_weight[0])


_SIZES = tuple(4**power for power in range(2, 7))


@reproduction(
    "growth-with-width",
    "q·k grows like √dₖ while q and k are independent, whatever their distribution, and like dₖ once they are aligned",
    "Vaswani et al. 2017 (1706.03762), footnote 4; Yang et al. 2022 (2203.03466), for 1/dₖ in muP",
    *(
        rule
        for name in ("normal", "uniform", "laplace", "signs", "normal of deviation 3")
        for rule in (
            Expectation(f"exponent of dₖ, {name}", "≥", 0.48),
            Expectation(f"exponent of dₖ, {name}", "≤", 0.52),
        )
    ),
    Expectation("exponent of dₖ, correlation ½", "≥", 0.9),
    Expectation("exponent of dₖ, correlation ½", "≤", 1.0),
    chart=Chart(
        "growth",
        "d_k",
        "root_mean_square",
        "dₖ",
        "root mean square of q·k",
        by="distribution",
        log_x=True,
        log_y=True,
    ),
)
def fit_growth(seed: int) -> Measured:
    """Return the exponent of the root mean square of q·k, fitted over dₖ 16 to 4096, once per part of the samples."""
    rng = np.random.default_rng(seed)
    draws: dict[str, Callable[[tuple[int, ...]], Array]] = {
        "normal": lambda shape: rng.standard_normal(shape),
        "uniform": lambda shape: rng.uniform(-math.sqrt(3), math.sqrt(3), shape),
        "laplace": lambda shape: rng.laplace(scale=math.sqrt(0.5), size=shape),
        "signs": lambda shape: rng.choice([-1.0, 1.0], shape),
        "normal of deviation 3": lambda shape: 3.0 * rng.standard_normal(shape),
    }
    estimates, curve = {}, []
    for name, draw in {**draws, "correlation ½": draws["normal"]}.items():
        roots = []
        for d_k in _SIZES:
            q, k = draw((16, 200, d_k)), draw((16, 200, d_k))
            k = 0.5 * q + math.sqrt(0.75) * k if name == "correlation ½" else k
            squares = np.einsum("psd,psd->ps", q, k) ** 2
            roots.append(np.sqrt(squares.mean(axis=1)))
            curve.append({"distribution": name, "d_k": d_k, "root_mean_square": float(np.sqrt(squares.mean()))})
        fits = np.polyfit(np.log(_SIZES), np.log(np.stack(roots)), 1)[0]
        estimates[f"exponent of dₖ, {name}"] = estimate_mean(fits)
    return Measured(estimates, {"growth": curve})


@reproduction(
    "concentration",
    "Gaussian logits concentrate on few keys once their deviation exceeds √(2 ln n): the entropy follows ln n − σ²/2 "
    "below, and Σp² follows 1 − 1/ρ above",
    "Derrida 1981, the random energy model",
    Expectation("largest error of H/ln n at ρ = ½, n from 128 to 8192", "≤", 0.03),
    Expectation("largest error of Σp² at ρ = 2, n from 128 to 8192", "≤", 0.12),
    Expectation("error of Σp² at ρ = 1 and 8192 keys, where the limit is 0", "≥", 0.05),
    chart=Chart(
        "lines", "rho", "sum_p2", "saturation index ρ", "mean Σp²", by="line", predicted=("limit of many keys",)
    ),
)
def compare_limits(seed: int) -> Measured:
    """Return both limits and the averages that are exact at finite n; near ρ = 1 the limits are far off."""
    curve = []
    for n in 2 ** np.arange(7, 14):
        for rho in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0):
            sigma = rho * math.sqrt(2 * math.log(n))
            exact, limit = theory.expected_softmax(sigma, int(n)), theory.condensation(sigma, int(n))
            row = {"n": int(n), "rho": rho, "entropy_ratio": exact.entropy / math.log(n), "sum_p2": exact.sum_p2}
            curve.append({**row, "entropy_ratio_limit": limit.entropy_ratio, "sum_p2_limit": limit.sum_p2})
    ratio = [abs(row["entropy_ratio"] - (1 - row["rho"] ** 2)) for row in curve if row["rho"] == 0.5]
    above = [abs(row["sum_p2"] - 0.5) for row in curve if row["rho"] == 2.0]
    lines = [
        {"line": f"n = {row['n']}", "rho": row["rho"], "sum_p2": row["sum_p2"]}
        for row in curve
        if row["n"] in (128, 1024, 8192)
    ]
    lines += [
        {"line": "limit of many keys", "rho": row["rho"], "sum_p2": row["sum_p2_limit"]}
        for row in curve
        if row["n"] == 8192
    ]
    (at_one,) = [row["sum_p2"] for row in curve if row["rho"] == 1.0 and row["n"] == 8192]
    return Measured(
        {
            "largest error of H/ln n at ρ = ½, n from 128 to 8192": max(ratio),
            "largest error of Σp² at ρ = 2, n from 128 to 8192": max(above),
            "error of Σp² at ρ = 1 and 8192 keys, where the limit is 0": at_one,
        },
        {"concentration": curve, "lines": lines},
    )
