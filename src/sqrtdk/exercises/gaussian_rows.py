"""Random attention rows: sampled and measured once per size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from sqrtdk import checks, theory
from sqrtdk import scales as policies
from sqrtdk.errors import InvalidValueError
from sqrtdk.exercises.estimates import Array, Estimate, estimate_mean
from sqrtdk.operation.attention import attention, attention_gradients

POLICIES = ("none", "sqrt", "inverse")
"""The three scalings that the exercises compare."""

BUDGET = 2**19
"""Weights that are measured per size."""

# With few rows averages are skewed and intervals miss the true value: at small dₖ queries differ much in length, and a
# few long ones dominate the average of Σp². With these numbers 93 to 97 of 100 intervals hold it up to n = 1024.
_QUERIES, _FEWEST_SAMPLES_OF_MANY_KEYS = 16, 16
_FEWEST_ROWS, _ROWS_AT_ONE, _MOST_ROWS = 512, 2**14, 4096
_MOST_WEIGHTS, _MOST_ENTRIES = 2**24, 2**21
_BLOCK = 2**17
_FEWEST_SAMPLES = 8
_MOST_NUMBERS = 2**26
_LITTLE, _MUCH = 1.1, 2.0
# The many-key limit states its error from this n on.
_FEWEST_KEYS_OF_THE_LIMIT = 64


@dataclass(frozen=True)
class SampledRows:
    """Measurements of random rows, each array `[samples, queries]`. Rows of one sample share their keys and values.

    `logit_square` is the mean of x² over the logits x of a row: its second moment about 0, the mean that Gaussian
    logits are known to have, so that its average is Var(x) itself at every n.
    """

    n: int
    logit_square: Array
    entropy_ratio: Array
    sum_p2: Array
    effective_keys: Array
    max_weight: Array
    jacobian_trace: Array
    jacobian_norm: Array
    grad_q: Array
    grad_k: Array

    def mean(self, quantity: str) -> Estimate:
        """Return the mean over rows with a 95% interval over samples, as rows of one sample are not independent.

        `logit_std` and `saturation_index` are those of all logits together, σ = √E[x²] and σ/√(2 ln n), which theory
        predicts. A mean of the rows' own deviations would be smaller, as rows differ and each is fitted its own mean.
        """
        if quantity in ("logit_std", "saturation_index"):
            square = estimate_mean(self.logit_square.mean(axis=1))
            unit = math.sqrt(2.0 * math.log(self.n)) if quantity == "saturation_index" else 1.0
            return Estimate(*(math.sqrt(max(value, 0.0)) / unit for value in square))
        return estimate_mean(getattr(self, quantity).mean(axis=1))


def sample_attention(*, d_k: int, n: int, queries: int, seed: int) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Yield samples without end: q `[queries, dₖ]`, k and v `[n, dₖ]` and the output's gradient, standard normal.

    The samples depend on the seed and the sizes alone, so every caller gets the same first sample.
    """
    rng = np.random.default_rng([seed, d_k, n])
    while True:
        k, v = rng.standard_normal((2, n, d_k))
        q, grad_output = rng.standard_normal((2, queries, d_k))
        yield q, k, v, grad_output


def sample_rows(
    scales: Sequence[float], *, d_k: int, n: int, samples: int, queries: int, seed: int
) -> list[SampledRows]:
    """Measure rows of Gaussian attention under several scales, on the same samples so that differences are paired.

    q, k, v (dᵥ = dₖ) and the gradient of the loss at the output have independent standard normal entries.
    `grad_q` is ‖∂loss/∂q‖ of each row; `grad_k` is ‖∂loss/∂K‖/√L of each sample, repeated over its rows.
    """
    fields = [name for name in SampledRows.__dataclass_fields__ if name != "n"]
    collected: dict[float, list[dict[str, Array]]] = {scale: [] for scale in scales}
    stream = sample_attention(d_k=d_k, n=n, queries=queries, seed=seed)
    at_once = max(1, _BLOCK // (n * d_k))
    for start in range(0, samples, at_once):
        # A block of one sample, the largest, is not copied.
        q, k, v, grad_output = (
            np.stack(arrays) if at_once > 1 else arrays[0][None]
            for arrays in zip(*islice(stream, min(at_once, samples - start)), strict=True)
        )
        for scale, measured in collected.items():
            measured.append(_measure(q, k, v, grad_output, scale))
    return [
        SampledRows(n, **{name: np.concatenate([block[name] for block in collected[scale]]) for name in fields})
        for scale in scales
    ]


class Effort(NamedTuple):
    """Number of samples of q, k and v, and of queries in each."""

    samples: int
    queries: int


def choose_effort(d_k: int, n: int, budget: int = BUDGET) -> Effort:
    """Return samples and queries with about `budget` weights over n keys: 512 to 4096 rows, more below dₖ = 32.

    >>> choose_effort(64, 1024), choose_effort(4, 1024), choose_effort(512, 1024)
    (Effort(samples=32, queries=16), Effort(samples=256, queries=16), Effort(samples=16, queries=32))
    """
    rows = max(min(max(budget // n, _ROWS_AT_ONE // min(d_k, n)), _MOST_ROWS, _MOST_WEIGHTS // n), _FEWEST_ROWS)
    samples = min(rows // _QUERIES, max(_MOST_ENTRIES // (n * d_k), _FEWEST_SAMPLES_OF_MANY_KEYS))
    return Effort(samples, rows // samples)


def policy_factors(d_k: int) -> list[float]:
    """Return the multiplier of q·k under each of the three policies.

    >>> policy_factors(64)
    [1.0, 0.125, 0.015625]
    """
    return [float(policies.get(name).factor(policies.ScaleContext(d_k=d_k))) for name in POLICIES]


@lru_cache(maxsize=64)
def sample_policies(*, d_k: int, n: int, samples: int, queries: int, seed: int) -> dict[str, SampledRows]:
    """Return the measured rows of one size under each of the three policies.

    Rows are measured once per size and seed, so every command reports the same numbers for a size.
    """
    require_sampling(d_k=d_k, n=n, samples=samples, queries=queries, seed=seed)
    sampled = sample_rows(policy_factors(d_k), d_k=d_k, n=n, samples=samples, queries=queries, seed=seed)
    return dict(zip(POLICIES, sampled, strict=True))


def name_importance(ratio: float) -> Literal["little", "somewhat", "much"]:
    """Name how much scaling matters: effective keys with 1/√dₖ over those with no scaling below 1.1, below 2, above.

    >>> name_importance(1.05), name_importance(1.1), name_importance(2.0)
    ('little', 'somewhat', 'much')
    """
    return "little" if ratio < _LITTLE else "somewhat" if ratio < _MUCH else "much"


def state_crossing(n: int, d_k: int | None = None) -> str:
    """Say from which dₖ on rows without scaling concentrate, and where a given dₖ lies. q and k are standard normal.

    The crossing is exact at this n and is stated beside the many-key limit.

    >>> state_crossing(2, 64)
    'Two keys have Σp² ≥ ½ at every dₖ and every scale.'
    >>> print(state_crossing(16))
    Without scaling, rows over 16 keys have Σp² ≥ ½ on average from dₖ = 12 on: one or two keys hold most of the \
weight. The many-key limit (n → ∞) is 8 ln n = 22.2.
    >>> state_crossing(16, 8).endswith("dₖ = 8 lies below dₖ = 12.")
    True
    """
    if n == 2:
        return "Two keys have Σp² ≥ ½ at every dₖ and every scale."
    crossing, limit = theory.concentration_crossing(n), theory.crossover_without_scaling(n)
    sentence = (
        f"Without scaling, rows over {n} keys have Σp² ≥ ½ on average from dₖ = {crossing} on: one or two keys hold "
        f"most of the weight. The many-key limit (n → ∞) is 8 ln n = {limit.concentrated:.1f}."
    )
    if d_k is None:
        return sentence
    place = "is the first" if d_k == crossing else f"lies {'below' if d_k < crossing else 'past'} dₖ = {crossing}"
    return f"{sentence} dₖ = {d_k} {place}."


def _measure(q: Array, k: Array, v: Array, grad_output: Array, scale: float) -> dict[str, Array]:
    statistics = attention(q, k, v, scale=scale).statistics
    assert statistics is not None
    gradients = attention_gradients(q, k, v, grad_output, scale=scale)
    measured = {
        name: np.asarray(getattr(statistics, name), dtype=np.float64)
        for name in SampledRows.__dataclass_fields__
        if name not in ("n", "logit_square", "grad_q", "grad_k")
    }
    key_norms = np.linalg.norm(gradients.key, axis=(-2, -1)) / math.sqrt(q.shape[-2])
    return measured | {
        "logit_square": statistics.logit_variance + statistics.logit_mean**2,
        "grad_q": np.linalg.norm(gradients.query, axis=-1),
        "grad_k": np.repeat(key_norms[:, None], q.shape[-2], axis=1),
    }


def many_key_limit(sigma: float, n: int) -> dict[str, float]:
    """Return the many-key limit of each quantity whose error is known at this size.

    >>> many_key_limit(1.0, 1024).keys(), many_key_limit(8.0, 1024).keys(), many_key_limit(3.0, 1024)
    (dict_keys(['entropy_ratio']), dict_keys(['sum_p2']), {})
    """
    limit = theory.condensation(sigma, n)
    if not limit.trusted or n < _FEWEST_KEYS_OF_THE_LIMIT:
        return {}
    return {"entropy_ratio": limit.entropy_ratio} if limit.regime == "spread" else {"sum_p2": limit.sum_p2}


def rank_weights(weights: Array) -> dict[str, list[float]]:
    """Return the median over rows of the sorted weights, largest first, at ranks that are even on a logarithmic axis.

    >>> rank_weights(np.array([[0.2, 0.8], [0.6, 0.4]]))
    {'rank': [1, 2], 'weight': [0.7, 0.30000000000000004]}
    """
    ranks = np.unique(np.geomspace(1, weights.shape[-1], 60).round().astype(int))
    typical = np.median(-np.sort(-weights, axis=-1), axis=0)
    return {"rank": ranks.tolist(), "weight": typical[ranks - 1].tolist()}


def require_counts(name: str, values: Sequence[int], least: int) -> None:
    """Refuse an empty sequence, repeated values, and anything but integers of at least the given size."""
    checks.distinct(name, values, "size")
    for value in values:
        checks.integer(name, value, least, each=True)


def require_size(name: str, count: int) -> None:
    """Refuse to sample more numbers at once than memory should hold."""
    if count > _MOST_NUMBERS:
        raise InvalidValueError(name, f"must not exceed {_MOST_NUMBERS}, got {count}")


def require_sampling(*, d_k: int, n: int, samples: int, queries: int, seed: int) -> None:
    """Refuse sizes that cannot be sampled: too few samples for an interval, or more numbers than memory should hold."""
    checks.integer("d_k", d_k, 1)
    checks.integer("n", n, 2)
    checks.integer("samples", samples, _FEWEST_SAMPLES)
    checks.integer("queries", queries, 1)
    checks.integer("seed", seed, 0)
    for product, count in (("n·d_k", n * d_k), ("queries·d_k", queries * d_k), ("queries·n", queries * n)):
        require_size(product, count)
