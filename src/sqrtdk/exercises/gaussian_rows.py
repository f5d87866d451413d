"""Draws random attention rows, measures them, and says how well the averages are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import scales as policies
from sqrtdk.attention import attention, attention_gradients
from sqrtdk.errors import InvalidTypeError, InvalidValueError

Array = npt.NDArray[np.float64]

Z_95 = 1.959963984540054
"""The 97.5th percentile of the normal distribution: ± this many standard errors hold 95%."""

POLICIES = ("none", "sqrt", "inverse")
"""The three scalings that the exercises compare."""

BUDGET = 2**19
"""Weights that are measured per size."""

_FEWEST_QUERIES, _MOST_ROWS = 16, 4096
# Rows of one draw are nearly independent and a few large products beat many small ones, so that draws are few; but few
# keys in all make skewed averages and intervals that miss, and so do rows whose queries differ in length by half of it
# and more: at dₖ = 1, n = 256 the interval of Σp² over 16 draws held the truth in 51 of 60 seeds.
_USUAL_DRAWS, _MOST_DRAWS, _FEWEST_KEYS, _DRAWS_AT_ONE = 16, 256, 2048, 128
_FEWEST_DRAWS = 8
_MOST_NUMBERS = 2**26
_LITTLE, _MUCH = 1.1, 2.0


class Estimate(NamedTuple):
    """A mean and the ends of its 95% confidence interval."""

    value: float
    low: float
    high: float

    def holds(self, truth: float) -> bool:
        """Whether the interval contains a value."""
        return self.low <= truth <= self.high


def estimate_mean(values: npt.ArrayLike) -> Estimate:
    """The mean of independent values with its 95% interval by Student's t.

    >>> estimate_mean([1.0] * 8)
    Estimate(value=1.0, low=1.0, high=1.0)
    """
    x = np.asarray(values, dtype=np.float64)
    half = _student_95(x.size - 1) * float(x.std(ddof=1)) / math.sqrt(x.size)
    mean = float(x.mean())
    return Estimate(mean, mean - half, mean + half)


def _student_95(freedom: int) -> float:
    # Cornish–Fisher expansion of the t quantile around the normal one; within 0.001 from 7 degrees of freedom on.
    z = Z_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


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
    collected: list[dict[str, list[Array]]] = [{name: [] for name in fields} for _ in scales]
    for q, k, v, grad_output in islice(draw_attention(d_k=d_k, n=n, queries=queries, seed=seed), draws):
        for scale, rows in zip(scales, collected, strict=True):
            measured = _measure(q, k, v, grad_output, scale)
            for name in fields:
                rows[name].append(measured[name])
    return [SampledRows(n, **{name: np.stack(values) for name, values in rows.items()}) for rows in collected]


class Effort(NamedTuple):
    """How many draws of q, k and v, and how many queries in each."""

    draws: int
    queries: int


def choose_effort(d_k: int, n: int, budget: int = BUDGET) -> Effort:
    """Draws and queries that have about `budget` weights over n keys, in 256 to 4096 rows; more draws below dₖ = 3.

    >>> choose_effort(64, 1024), choose_effort(64, 16), choose_effort(1, 1024)
    (Effort(draws=16, queries=32), Effort(draws=128, queries=32), Effort(draws=128, queries=16))
    """
    draws = min(max(_FEWEST_KEYS // n, _DRAWS_AT_ONE // d_k**2, _USUAL_DRAWS), _MOST_DRAWS)
    return Effort(draws, min(max(budget // (n * draws), _FEWEST_QUERIES), _MOST_ROWS // draws))


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


def _measure(q: Array, k: Array, v: Array, grad_output: Array, scale: float) -> dict[str, Array]:
    statistics = attention(q, k, v, scale=scale).statistics
    assert statistics is not None
    slopes = attention_gradients(q, k, v, grad_output, scale=scale)
    measured = {
        name: np.asarray(getattr(statistics, name), dtype=np.float64)
        for name in SampledRows.__dataclass_fields__
        if name not in ("n", "logit_square", "grad_q", "grad_k")
    }
    key_norm = float(np.linalg.norm(slopes.key)) / math.sqrt(q.shape[0])
    return measured | {
        "logit_square": statistics.logit_variance + statistics.logit_mean**2,
        "grad_q": np.linalg.norm(slopes.query, axis=-1),
        "grad_k": np.full(q.shape[0], key_norm),
    }


def require_count(name: str, value: int, least: int) -> None:
    """Refuse what is not an integer of at least the given size, naming the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidTypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise InvalidValueError(f"{name} must be at least {least}, got {value}")


def require_counts(name: str, values: Sequence[int], least: int) -> None:
    """Refuse an empty sequence, repeated values, or one that holds anything but integers of at least the given size."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidTypeError(f"{name} must be a sequence of integers, got {values!r}")
    if not values:
        raise InvalidValueError(f"{name} must name at least one size, got none")
    for value in values:
        require_count(f"each of {name}", value, least)
    if len(set(values)) < len(values):
        raise InvalidValueError(f"{name} must not repeat a size, got {tuple(values)}")


def require_size(name: str, count: int) -> None:
    """Refuse a draw of more numbers at once than memory should hold."""
    if count > _MOST_NUMBERS:
        raise InvalidValueError(f"{name} must not exceed {_MOST_NUMBERS}, got {count}")


def require_sampling(*, d_k: int, n: int, draws: int, queries: int, seed: int) -> None:
    """Refuse sizes that cannot be sampled: too few draws for an interval, or more numbers than memory should hold."""
    require_count("d_k", d_k, 1)
    require_count("n", n, 2)
    require_count("draws", draws, _FEWEST_DRAWS)
    require_count("queries", queries, 1)
    require_count("seed", seed, 0)
    for product, count in (("n·d_k", n * d_k), ("queries·d_k", queries * d_k), ("queries·n", queries * n)):
        require_size(product, count)
