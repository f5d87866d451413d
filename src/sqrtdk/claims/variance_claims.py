"""Claims about the variance of the dot product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from importlib import resources
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import theory
from sqrtdk.claims.claim import Verdict, agree, claim, covers, estimate_variance, show_interval, state
from sqrtdk.claims.evidence import Evidence
from sqrtdk.exercises.estimates import Estimate, estimate_mean
from sqrtdk.exercises.variance import sample_dot_products
from sqrtdk.wording.numbers import write_number

Array = npt.NDArray[np.float64]

_DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda rng, count: rng.standard_normal(count),
    "uniform": lambda rng, count: rng.uniform(-math.sqrt(3), math.sqrt(3), count),
    "±1": lambda rng, count: rng.choice([-1.0, 1.0], count),
}


_PAIRS = 20_000


def _dot_products(evidence: Evidence, d_k: int) -> Array:
    """Return the products that `sqrtdk variance` measures."""
    return sample_dot_products(d_k, _PAIRS, evidence.seed)


@claim("var.product", "S0, S3", "independent X, Y with mean 0 and variance 1: Var(XY) = 1")
def _product(evidence: Evidence) -> Verdict:
    rng = np.random.default_rng(evidence.seed)
    estimates = {
        name: estimate_variance(sample(rng, 1_000_000) * sample(rng, 1_000_000))
        for name, sample in _DISTRIBUTIONS.items()
        if name != "±1"  # its product is ±1: variance 1 without any scatter
    }
    signs = estimate_variance(rng.choice([-1.0, 1.0], 1_000_000) * rng.choice([-1.0, 1.0], 1_000_000))
    fits = all(covers(estimate, 1.0) for estimate in estimates.values()) and abs(signs.value - 1) < 1e-3
    return Verdict(
        f"normal {state(estimates['normal'], samples=1_000_000, seed=evidence.seed)}; "
        f"uniform {estimates['uniform'].value:.4f}; ±1 {signs.value:.4f}",
        "holds" if fits else "wrong",
        "E[X²Y²] = E[X²]·E[Y²] = 1 and E[XY] = 0 need independence and the moments only, not normality.",
        {"normal": estimates["normal"].value, "interval": [estimates["normal"].low, estimates["normal"].high]},
    )


@claim("var.dot", "all", "Var(q·k) = dₖ exactly; std = √dₖ (dₖ = 64 → 8; dₖ = 512 → 22.63)")
def _dot(evidence: Evidence) -> Verdict:
    estimates = {d: estimate_variance(_dot_products(evidence, d)) for d in (4, 64, 512)}
    predicted = {d: theory.dot_product_variance(d) for d in estimates}
    fits = all(covers(estimates[d], predicted[d]) for d in estimates)
    stds = agree([8, 22.63], [math.sqrt(predicted[64]), math.sqrt(predicted[512])], decimals=2)
    correlated = theory.dot_product_variance(64, correlation=1.0)
    return Verdict(
        f"formula: 64 → std {math.sqrt(predicted[64]):.0f}, 512 → {math.sqrt(predicted[512]):.2f}; sampled variance at "
        f"64: {state(estimates[64], samples=_PAIRS, seed=evidence.seed)}, "
        f"at 512: {estimates[512].value:.1f} [{estimates[512].low:.1f}, {estimates[512].high:.1f}]",
        "holds" if fits and stds else "wrong",
        f"True for independent q and k of mean 0 and variance 1; fully correlated ones (q = k) would give "
        f"{correlated:.0f} at dₖ = 64.",
        {
            "predicted": predicted,
            "sampled": {d: e.value for d, e in estimates.items()},
            "interval": {d: [e.low, e.high] for d, e in estimates.items()},
        },
    )


@claim(
    "var.terms",
    "S0",
    "squaring the sum gives dₖ² terms: dₖ average 1, dₖ²−dₖ average 0 (3 → 9 = 3 + 6; 64 → 4096 = 64 + 4032)",
)
def _terms(evidence: Evidence) -> Verdict:
    rng = np.random.default_rng(evidence.seed)
    counted = {}
    for d in (3, 64):
        pairs = [(i == j) for i, j in itertools.product(range(d), repeat=2)]
        counted[d] = (len(pairs), sum(pairs), len(pairs) - sum(pairs))
    products = rng.standard_normal((100_000, 3)) * rng.standard_normal((100_000, 3))
    second = products.T @ products / len(products)
    squares = estimate_mean((products**2).mean(axis=1))
    crosses = float(np.mean([second[i, j] for i, j in itertools.permutations(range(3), 2)]))
    as_claimed = counted == {3: (9, 3, 6), 64: (4096, 64, 4032)}
    as_predicted = all(tuple(theory.squared_sum_terms(d)) == counted[d] for d in counted)
    fits = covers(squares, 1.0) and abs(crosses) < 0.02
    return Verdict(
        f"3 → {counted[3][0]} = {counted[3][1]} + {counted[3][2]}; 64 → {counted[64][0]} = {counted[64][1]} + "
        f"{counted[64][2]}; squares average {state(squares, samples=100_000, seed=evidence.seed)}, "
        f"cross terms {crosses:+.4f}",
        "holds" if as_claimed and as_predicted and fits else "wrong",
        "Counted one by one; the averages are sampled at dₖ = 3.",
        {"counted": counted, "squares": squares.value, "crosses": crosses},
    )


# Enough sizes to expect that a few 95% intervals miss.
_MEAN_SIZES = (*range(2, 65, 2), 128, 256, 512)


@claim("var.mean", "S0, S3", "E[q·k] = 0")
def _mean(evidence: Evidence) -> Verdict:
    estimates = {d: estimate_mean(_dot_products(evidence, d)) for d in _MEAN_SIZES}
    include = [d for d, estimate in estimates.items() if estimate.holds(0.0)]
    shifted = theory.dot_product_mean(64, mean_q=0.1, mean_k=0.1)
    return Verdict(
        f"the 95% interval of the mean includes 0 at {len(include)} of {len(estimates)} sizes from dₖ = "
        f"{min(estimates)} to {max(estimates)} ({0.95 * len(estimates):.0f} are expected if it is 0); at dₖ = 64 the "
        f"mean is {state(estimates[64], samples=_PAIRS, seed=evidence.seed)}",
        "holds" if all(covers(estimate, 0.0) for estimate in estimates.values()) else "wrong",
        f"It needs a zero mean on at least one side: means of 0.1 on both give {shifted:.2f} at dₖ = 64.",
        {"sampled": {d: e.value for d, e in estimates.items()}, "includes_0": include},
    )


@claim("var.divide", "S0", "Var(x/c) = Var(x)/c²; [2,4,6] has 2.67, [1,2,3] has 0.67 = 2.67/4")
def _divide(evidence: Evidence) -> Verdict:
    before, after = float(np.var([2, 4, 6])), float(np.var([1, 2, 3]))
    x = np.random.default_rng(evidence.seed).standard_normal(1000)
    exact = all(
        math.isclose(np.var(x / c), theory.divided_variance(float(np.var(x)), c)) for c in (0.5, 2.0, 8.0, -3.0)
    )
    fits = agree([2.67, 0.67], [before, after], decimals=2) and math.isclose(after, before / 4) and exact
    return Verdict(
        f"{before:.4f} and {after:.4f} = {before:.4f}/4",
        "holds" if fits else "wrong",
        "Population variances (divided by n); the identity is checked for four divisors on random numbers too.",
        {"before": before, "after": after},
    )


@claim("var.root", "all", "dividing by √dₖ gives variance 1 at every dₖ; c² = dₖ is the only c that does")
def _root(evidence: Evidence) -> Verdict:
    estimates = {d: estimate_variance(_dot_products(evidence, d) / math.sqrt(d)) for d in (1, 4, 64, 512)}
    # Var/c² falls strictly in c > 0, so there is one solution; find it without knowing the answer.
    solutions = {}
    for d in estimates:
        low, high = 1e-3, 1e3
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (
                (middle, high) if theory.divided_variance(theory.dot_product_variance(d), middle) > 1 else (low, middle)
            )
        solutions[d] = low
    fits = all(covers(e, 1.0) for e in estimates.values()) and all(
        math.isclose(c * c, d, rel_tol=1e-9) for d, c in solutions.items()
    )
    return Verdict(
        f"sampled at dₖ = 512: {state(estimates[512], samples=_PAIRS, seed=evidence.seed)}; the divisor by bisection: "
        + ", ".join(f"{d} → {c:.4f}" for d, c in solutions.items()),
        "holds" if fits else "wrong",
        "Var/c² = 1 has one positive solution, c = √dₖ (and its negative, which turns every score around).",
        {"sampled": {d: e.value for d, e in estimates.items()}, "divisor": solutions},
    )


@claim("var.inverse", "S1", "dividing by dₖ gives variance 1/dₖ")
def _inverse(evidence: Evidence) -> Verdict:
    estimates = {d: estimate_variance(_dot_products(evidence, d) / d) for d in (4, 64, 512)}
    fits = all(covers(e, 1 / d) and math.isclose(theory.divided_variance(d, d), 1 / d) for d, e in estimates.items())
    return Verdict(
        f"at dₖ = 64: {state(estimates[64], samples=_PAIRS, seed=evidence.seed)} against {1 / 64:.5f}; "
        f"at 512: {estimates[512].value:.6f} against {1 / 512:.6f}",
        "holds" if fits else "wrong",
        "dₖ/dₖ² = 1/dₖ.",
        {"sampled": {d: e.value for d, e in estimates.items()}},
    )


@claim("var.init", "S2", "weights are typically initialised with unit variance")
def _init(evidence: Evidence) -> Verdict:
    d_model, d_k = 512, 64
    rng = np.random.default_rng(evidence.seed)
    x = rng.standard_normal((2, 400, d_model))
    sampled = {}
    for name in theory.initialisations():
        predicted = theory.initial_variance(name, d_model=d_model, d_k=d_k, heads=d_model // d_k)
        w_q, w_k = rng.standard_normal((2, d_model, d_k)) * math.sqrt(predicted.weight)
        bias = rng.standard_normal((2, d_k)) * math.sqrt(max(predicted.entry - d_model * predicted.weight, 0.0))
        scores = (x[0] @ w_q + bias[0]) @ (x[1] @ w_k + bias[1]).T
        sampled[name] = (predicted.dot_product, float(scores.var()))
    as_predicted = all(0.7 < measured / predicted < 1.4 for predicted, measured in sampled.values())
    unit = [name for name, (predicted, _) in sampled.items() if math.isclose(predicted, d_k)]
    smaller = [name for name, (predicted, _) in sampled.items() if predicted < 0.99 * d_k]
    larger = [name for name, (predicted, _) in sampled.items() if predicted > 1.01 * d_k]
    listed = ", ".join(
        f"{name} {write_number(predicted, 3)} (sampled {write_number(measured, 3)})"
        for name, (predicted, measured) in sampled.items()
    )
    return Verdict(
        f"Var(q·k) at d_model {d_model}, dₖ {d_k}, {d_model // d_k} heads (seed {evidence.seed}): {listed}",
        "depends" if as_predicted and unit and smaller and larger else "wrong",
        f"q·k gets the variance dₖ from {', '.join(unit)}; {', '.join(smaller)} give less, "
        f"{', '.join(larger)} more. "
        "Entries of unit variance are the default of embeddings, not of projections.",
        {"predicted_and_sampled": sampled},
    )


def _layer_norm(x: Array) -> Array:
    """Subtract each token's mean and divide by its standard deviation, without learned gain and bias."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True)))


def _embed_text(rng: np.random.Generator, tokens: int, d_model: int) -> dict[str, Array]:
    """Return inputs `[tokens, d_model]` of a first layer for the built-in input, by kind of embedding."""
    characters = (resources.files("sqrtdk.records.data") / "text.txt").read_text(encoding="utf-8")[:tokens]
    _, ids = np.unique(list(characters), return_inverse=True)
    table = rng.standard_normal((ids.max() + 1, d_model))[ids]
    angles = np.arange(tokens)[:, None] / 10_000.0 ** (np.arange(0, d_model, 2) / d_model)
    with_positions = table + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return {
        "embeddings of variance 1": table,
        "embeddings of standard deviation 0.02": 0.02 * table,
        "embeddings of variance 1 plus sinusoids": with_positions,
        "layer norm of the latter": _layer_norm(with_positions),
    }


class _Products(NamedTuple):
    """Var(q·k) predicted and sampled, over all pairs and within the rows."""

    predicted: float
    sampled: Estimate
    within_rows: Estimate


@claim("var.inputs", "S0", "input values are typically normalised to zero mean and unit variance")
def _inputs(evidence: Evidence) -> Verdict:
    tokens, d_model, d_k, heads = 256, 512, 64, 32
    rng = np.random.default_rng(evidence.seed)
    rows = {}
    for name, x in _embed_text(rng, tokens, d_model).items():
        predicted = theory.initial_variance("unit", d_model=d_model, d_k=d_k, input_variance=float((x**2).mean()))
        w_q, w_k = rng.standard_normal((2, heads, d_model, d_k)) * math.sqrt(predicted.weight)
        scores = (x @ w_q) @ np.swapaxes(x @ w_k, -1, -2)
        rows[name] = _Products(
            predicted.dot_product,
            estimate_mean((scores**2).mean(axis=(1, 2))),
            estimate_mean(scores.var(axis=-1).mean(axis=-1)),
        )
    as_predicted = all(covers(one.sampled, one.predicted) for one in rows.values())
    unit = [name for name, one in rows.items() if math.isclose(one.predicted, d_k, rel_tol=0.2)]
    others = [name for name in rows if name not in unit]
    within = show_interval(rows["layer norm of the latter"].within_rows)
    return Verdict(
        f"Var(q·k) at dₖ {d_k} for {tokens} characters of the built-in input, W of variance 1/{d_model} (95% over "
        f"{heads} heads, seed {evidence.seed}): "
        + "; ".join(f"{name} {show_interval(one.sampled)}" for name, one in rows.items()),
        ("depends" if unit and others else ("holds" if unit else "wrong")) if as_predicted else "wrong",
        f"Layer norm gives every token mean 0 and variance 1 over its entries, so that Var(q·k) is dₖ. Softmax sees "
        f"{within} of it, the part in which the keys of a row differ. "
        + (f"Not normalised so: {', '.join(others)}." if others else "All inputs are normalised so."),
        {name: one._asdict() for name, one in rows.items()},
    )


_FIVE_SCORES = (9.2, -3.1, 8.8, -5.4, 1.2)


@claim("var.five", "S3", "the scores [9.2, −3.1, 8.8, −5.4, 1.2] have standard deviation ≈ 8")
def _five(evidence: Evidence) -> Verdict:
    population, sample = (float(np.std(_FIVE_SCORES, ddof=ddof)) for ddof in (0, 1))
    fits = any(agree(8.0, std, decimals=0) for std in (population, sample))
    samples = 8.0 * np.random.default_rng(evidence.seed).standard_normal((100_000, len(_FIVE_SCORES)))
    low, high = np.quantile(samples.std(axis=1, ddof=1), [0.025, 0.975])
    possible = low <= sample <= high
    return Verdict(
        f"{population:.2f} (divided by n − 1: {sample:.2f})",
        "holds" if fits else "wrong",
        f"The standard deviation of the five scores is {population:.2f}; 8 is √dₖ at dₖ = 64. Five scores from dₖ = 64 "
        f"have {low:.1f} to {high:.1f} in 95% of samples (divided by n − 1), so these "
        f"{'can' if possible else 'cannot'} come from dₖ = 64.",
        {"population": population, "sample": sample, "range_of_five": [float(low), float(high)]},
    )


@claim("var.normal", "S3", "at random initialisation scores are near N(0, dₖ)")
def _normal(evidence: Evidence) -> Verdict:
    rng = np.random.default_rng(evidence.seed)
    samples = 1_000_000
    # Given q, q·k is N(0, |q|²) for normal k, so that E(q·k)⁴ = 3·E|q|⁴: the average over k is taken exactly.
    excess = {d: estimate_mean(3.0 * (rng.chisquare(d, samples) / d) ** 2 - 3.0) for d in (4, 64, 512)}
    predicted = {d: 6.0 / d for d in excess}
    fits = all(covers(excess[d], predicted[d]) for d in excess)
    initial = {
        name: theory.initial_variance(name, d_model=512, d_k=64, heads=8).dot_product
        for name in theory.initialisations()
    }
    off = [variance for variance in initial.values() if not math.isclose(variance, 64.0, rel_tol=0.05)]
    return Verdict(
        "excess kurtosis "
        + ", ".join(f"{show_interval(excess[d])} at dₖ = {d} (6/dₖ = {write_number(predicted[d])})" for d in excess)
        + f" (95%, {samples} samples of q, seed {evidence.seed}); a normal distribution has 0",
        ("depends" if off else "holds") if fits else "wrong",
        "Near normal at usual widths, with heavier tails at small dₖ. The variance is dₖ for entries of q and k with "
        f"variance 1: {len(off)} of {len(initial)} initialisations have another one"
        + (f", {write_number(min(off), 3)} to {write_number(max(off), 3)} at dₖ = 64 (see var.init)." if off else ".")
        if fits
        else "The excess kurtosis is not 6/dₖ.",
        {
            "excess_kurtosis": {d: e.value for d, e in excess.items()},
            "predicted": predicted,
            "initial_variance": initial,
        },
    )
