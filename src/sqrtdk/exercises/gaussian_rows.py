"""Draws random attention rows and measures them, each size once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from sqrtdk import scales as policies
from sqrtdk import theory
from sqrtdk.attention import attention, attention_gradients
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.exercises.estimates import Array, Estimate, estimate_mean

POLICIES = ("none", "sqrt", "inverse")
"""The three scalings that the exercises compare."""

BUDGET = 2**19
"""Weights that are measured per size."""

# Few rows make skewed averages and intervals that miss: where dₖ is small, queries differ much in length, and a few
# long ones make the average of Σp². With these numbers 93 to 97 of 100 intervals hold the truth up to n = 1024.
_QUERIES, _FEWEST_DRAWS_OF_MANY_KEYS = 16, 16
_FEWEST_ROWS, _ROWS_AT_ONE, _MOST_ROWS = 512, 2**14, 4096
_MOST_WEIGHTS, _MOST_ENTRIES = 2**24, 2**21
_BLOCK = 2**17
_FEWEST_DRAWS = 8
_MOST_NUMBERS = 2**26
_LITTLE, _MUCH = 1.1, 2.0
# The law for n → ∞ states its error from here on.
_FEWEST_KEYS_OF_THE_LAW = 64


@dataclass(frozen=True)
class SampledRows:
    """What was measured on random rows, each array `[draws, queries]`; rows of one draw share their keys and values.

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
        """The mean over rows with a 95% interval over draws, as rows of one draw are not independent.

        `logit_std` and `saturation_index` are those of all logits together, σ = √E[x²] and σ/√(2 ln n): what theory
        predicts. A mean of the rows' own deviations would be smaller, as rows differ and each is fitted its own mean.
        """
        if quantity in ("logit_std", "saturation_index"):
            square = estimate_mean(self.logit_square.mean(axis=1))
            unit = math.sqrt(2.0 * math.log(self.n)) if quantity == "saturation_index" else 1.0
            return Estimate(*(math.sqrt(max(value, 0.0)) / unit for value in square))
        return estimate_mean(getattr(self, quantity).mean(axis=1))


def draw_attention(*, d_k: int, n: int, queries: int, seed: int) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Draw q `[queries, dₖ]`, k and v `[n, dₖ]` and the output's gradient, again and again: standard normal entries.

    The draws depend on the seed and the sizes alone, so that the first is the same wherever it is asked for.
    """
    rng = np.random.default_rng([seed, d_k, n])
    while True:
        k, v = rng.standard_normal((2, n, d_k))
        q, grad_output = rng.standard_normal((2, queries, d_k))
        yield q, k, v, grad_output


def sample_rows(scales: Sequence[float], *, d_k: int, n: int, draws: int, queries: int, seed: int) -> list[SampledRows]:
    """Measure rows of Gaussian attention under several scales, on the same draws so that differences are paired.

    q, k, v (dᵥ = dₖ) and the gradient of the loss at the output have independent standard normal entries.
    `grad_q` is ‖∂loss/∂q‖ of each row; `grad_k` is ‖∂loss/∂K‖/√L of each draw, repeated over its rows.
    """
    fields = [name for name in SampledRows.__dataclass_fields__ if name != "n"]
    collected: dict[float, list[dict[str, Array]]] = {scale: [] for scale in scales}
    drawn = draw_attention(d_k=d_k, n=n, queries=queries, seed=seed)
    at_once = max(1, _BLOCK // (n * d_k))
    for start in range(0, draws, at_once):
        # A block of one draw, the largest, is not copied.
        q, k, v, grad_output = (
            np.stack(arrays) if at_once > 1 else arrays[0][None]
            for arrays in zip(*islice(drawn, min(at_once, draws - start)), strict=True)
        )
        for scale, measured in collected.items():
            measured.append(_measure(q, k, v, grad_output, scale))
    return [
        SampledRows(n, **{name: np.concatenate([block[name] for block in collected[scale]]) for name in fields})
        for scale in scales
    ]


class Effort(NamedTuple):
    """How many draws of q, k and v, and how many queries in each."""

    draws: int
    queries: int


def choose_effort(d_k: int, n: int, budget: int = BUDGET) -> Effort:
    """Draws and queries that have about `budget` weights over n keys, in 512 to 4096 rows; more rows below dₖ = 32.

    >>> choose_effort(64, 1024), choose_effort(4, 1024), choose_effort(512, 1024)
    (Effort(draws=32, queries=16), Effort(draws=256, queries=16), Effort(draws=16, queries=32))
    """
    rows = max(min(max(budget // n, _ROWS_AT_ONE // min(d_k, n)), _MOST_ROWS, _MOST_WEIGHTS // n), _FEWEST_ROWS)
    draws = min(rows // _QUERIES, max(_MOST_ENTRIES // (n * d_k), _FEWEST_DRAWS_OF_MANY_KEYS))
    return Effort(draws, rows // draws)


def policy_factors(d_k: int) -> list[float]:
    """The multipliers of q·k of the three policies.

    >>> policy_factors(64)
    [1.0, 0.125, 0.015625]
    """
    return [float(policies.get(name).factor(policies.ScaleContext(d_k=d_k))) for name in POLICIES]


@lru_cache(maxsize=64)
def sample_policies(*, d_k: int, n: int, draws: int, queries: int, seed: int) -> dict[str, SampledRows]:
    """The rows of one size under each of the three policies.

    Measured once per size and seed: whatever speaks of a size speaks of the same numbers.
    """
    require_sampling(d_k=d_k, n=n, draws=draws, queries=queries, seed=seed)
    sampled = sample_rows(policy_factors(d_k), d_k=d_k, n=n, draws=draws, queries=queries, seed=seed)
    return dict(zip(POLICIES, sampled, strict=True))


def name_importance(ratio: float) -> Literal["little", "somewhat", "much"]:
    """Name how much scaling matters, by the effective keys with 1/√dₖ over those with no scaling: below 1.1, 2, above.

    >>> name_importance(1.05), name_importance(1.1), name_importance(2.0)
    ('little', 'somewhat', 'much')
    """
    return "little" if ratio < _LITTLE else "somewhat" if ratio < _MUCH else "much"


def state_crossing(n: int, d_k: int | None = None) -> str:
    """Say from which dₖ on unscaled rows of standard normal q and k concentrate, and where a given dₖ lies.

    The crossing is exact at this n; the limit n → ∞ stands beside it.

    >>> state_crossing(2, 64)
    'Two keys have Σp² ≥ ½ at every dₖ.'
    >>> print(state_crossing(16))
    Unscaled rows over 16 keys have Σp² ≥ ½ on average from dₖ = 12 on: one or two keys hold most of the weight. \
The many-key limit (n → ∞) is 8 ln n = 22.2.
    >>> state_crossing(16, 8).endswith("dₖ = 8 lies below dₖ = 12.")
    True
    """
    if n == 2:
        return "Two keys have Σp² ≥ ½ at every dₖ."
    crossing = theory.concentration_crossing(n)
    sentence = (
        f"Unscaled rows over {n} keys have Σp² ≥ ½ on average from dₖ = {crossing} on: one or two keys hold most of "
        f"the weight. The many-key limit (n → ∞) is 8 ln n = {theory.unscaled_crossover(n).nearly_one_hot:.1f}."
    )
    if d_k is None:
        return sentence
    place = "is the first" if d_k == crossing else f"lies {'below' if d_k < crossing else 'past'} dₖ = {crossing}"
    return f"{sentence} dₖ = {d_k} {place}."


def _measure(q: Array, k: Array, v: Array, grad_output: Array, scale: float) -> dict[str, Array]:
    statistics = attention(q, k, v, scale=scale).statistics
    assert statistics is not None
    slopes = attention_gradients(q, k, v, grad_output, scale=scale)
    measured = {
        name: np.asarray(getattr(statistics, name), dtype=np.float64)
        for name in SampledRows.__dataclass_fields__
        if name not in ("n", "logit_square", "grad_q", "grad_k")
    }
    key_norms = np.linalg.norm(slopes.key, axis=(-2, -1)) / math.sqrt(q.shape[-2])
    return measured | {
        "logit_square": statistics.logit_variance + statistics.logit_mean**2,
        "grad_q": np.linalg.norm(slopes.query, axis=-1),
        "grad_k": np.repeat(key_norms[:, None], q.shape[-2], axis=1),
    }


def many_key_law(sigma: float, n: int) -> dict[str, float]:
    """The law for n → ∞ where it states its error, by quantity.

    >>> many_key_law(1.0, 1024).keys(), many_key_law(8.0, 1024).keys(), many_key_law(3.0, 1024)
    (dict_keys(['entropy_ratio']), dict_keys(['sum_p2']), {})
    """
    law = theory.condensation(sigma, n)
    if not law.trusted or n < _FEWEST_KEYS_OF_THE_LAW:
        return {}
    return {"entropy_ratio": law.entropy_ratio} if law.regime == "spread" else {"sum_p2": law.sum_p2}


def rank_weights(weights: Array) -> dict[str, list[float]]:
    """The median over rows of the weights in descending order, at ranks that are even on a logarithmic axis.

    >>> rank_weights(np.array([[0.2, 0.8], [0.6, 0.4]]))
    {'rank': [1, 2], 'weight': [0.7, 0.30000000000000004]}
    """
    ranks = np.unique(np.geomspace(1, weights.shape[-1], 60).round().astype(int))
    typical = np.median(-np.sort(-weights, axis=-1), axis=0)
    return {"rank": ranks.tolist(), "weight": typical[ranks - 1].tolist()}


def require_count(name: str, value: int, least: int, *, each: bool = False) -> None:
    """Refuse what is not an integer of at least the given size, naming the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidTypeError(name, f"must be an integer, got {value!r}", each=each)
    if value < least:
        raise InvalidValueError(name, f"must be at least {least}, got {value}", each=each)


def require_counts(name: str, values: Sequence[int], least: int) -> None:
    """Refuse an empty sequence, repeated values, or one that holds anything but integers of at least the given size."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidTypeError(name, f"must be a sequence of integers, got {values!r}")
    if not values:
        raise InvalidValueError(name, "must name at least one size, got none")
    for value in values:
        require_count(name, value, least, each=True)
    if len(set(values)) < len(values):
        raise InvalidValueError(name, f"must not repeat a size, got {tuple(values)}")


def require_size(name: str, count: int) -> None:
    """Refuse a draw of more numbers at once than memory should hold."""
    if count > _MOST_NUMBERS:
        raise InvalidValueError(name, f"must not exceed {_MOST_NUMBERS}, got {count}")


def require_sampling(*, d_k: int, n: int, draws: int, queries: int, seed: int) -> None:
    """Refuse sizes that cannot be sampled: too few draws for an interval, or more numbers than memory should hold."""
    require_count("d_k", d_k, 1)
    require_count("n", n, 2)
    require_count("draws", draws, _FEWEST_DRAWS)
    require_count("queries", queries, 1)
    require_count("seed", seed, 0)
    for product, count in (("n·d_k", n * d_k), ("queries·d_k", queries * d_k), ("queries·n", queries * n)):
        require_size(product, count)
