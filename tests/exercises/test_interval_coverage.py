"""Coverage of the printed 95% intervals, and calibration of the joint probability, over 400 seeds per setting."""

import math
from collections import defaultdict
from functools import cache

import numpy as np
import pytest

from sqrtdk import theory
from sqrtdk.exercises.estimates import estimate_quantile
from sqrtdk.exercises.explain import _compare, _judge
from sqrtdk.exercises.gaussian_rows import BUDGET, POLICIES, choose_effort, policy_factors, sample_rows
from sqrtdk.exercises.variance import estimate_std, sample_dot_products

SEEDS = 400
LEAST, MOST = 0.93, 0.97
# dₖ, n and the budget: 1 gives the fewest rows that a size may have.
SETTINGS = (
    *((1, 2, BUDGET), (1, 16, BUDGET), (1, 256, BUDGET), (1, 1024, BUDGET)),
    *((2, 4, BUDGET), (2, 64, BUDGET), (4, 2, BUDGET), (4, 16, BUDGET), (4, 256, BUDGET), (4, 1024, BUDGET)),
    *((8, 128, 1), (8, 1024, 1), (16, 16, 1), (16, 256, 1), (32, 64, 1)),
    *((64, 2, 1), (64, 16, 1), (64, 128, 1), (256, 16, 1), (512, 32, 1)),
)
PREDICTED = ("logit_std", "saturation_index", "entropy_ratio", "sum_p2", "jacobian_trace")
# Of these no exact value is known: the mean over the rows of all seeds stands for it, 20 times as well known as one's.
POOLED = ("effective_keys", "max_weight", "grad_q")

pytestmark = pytest.mark.long


def is_within_chance(share):
    """Whether 400 seeds may show this share with a probability of 0.001 or more if the coverage is 93 to 97 %."""
    return (
        LEAST - 3.1 * math.sqrt(LEAST * (1 - LEAST) / SEEDS)
        <= share
        <= MOST + 3.1 * math.sqrt(MOST * (1 - MOST) / SEEDS)
    )


@cache
def cover(d_k, n, budget):
    """The share of seeds whose interval holds the truth, by policy and quantity, and the joint probability of each."""
    inside, estimates, rows, joint = defaultdict(list), defaultdict(list), defaultdict(list), []
    policies = POLICIES if d_k > 1 else POLICIES[:1]
    for seed in range(SEEDS):
        measured = sample_rows(policy_factors(d_k), d_k=d_k, n=n, **choose_effort(d_k, n, budget)._asdict(), seed=seed)
        sampled = dict(zip(POLICIES, measured, strict=True))
        table = [
            row
            for policy, factor in zip(POLICIES, policy_factors(d_k), strict=True)
            for row in _compare(policy, factor, sampled[policy], d_k)
        ]
        joint.append(_judge(table, sampled, d_k)["probability"])
        for row in table:
            if row["scale"] in policies and row["quantity"] in PREDICTED:
                inside[row["scale"], row["quantity"]].append(row["inside"])
        for policy in policies:
            for quantity in POOLED:
                estimates[policy, quantity].append(sampled[policy].mean(quantity))
            estimates[policy, "grad_q_p5"].append(estimate_quantile(sampled[policy].grad_q, 0.05))
            rows[policy].append(sampled[policy].grad_q.ravel())
    for (policy, quantity), results in estimates.items():
        pooled = np.quantile(np.concatenate(rows[policy]), 0.05) if quantity == "grad_q_p5" else None
        truth = np.mean([result.value for result in results]) if pooled is None else pooled
        inside[policy, quantity] = [result.holds(truth) for result in results]
    return {at: float(np.mean(held)) for at, held in inside.items()}, np.array(joint)


@pytest.mark.parametrize(("d_k", "n", "budget"), SETTINGS)
def test_intervals_of_one_size_hold_the_truth(d_k, n, budget):
    shares, _ = cover(d_k, n, budget)
    assert len(shares) == (9 if d_k == 1 else 27)
    assert {at: share for at, share in shares.items() if not is_within_chance(share)} == {}
    assert LEAST <= np.mean(list(shares.values())) <= MOST


def test_intervals_of_one_quantity_hold_the_truth():
    shares = defaultdict(list)
    for setting in SETTINGS:
        for (_, quantity), share in cover(*setting)[0].items():
            shares[quantity].append(share)
    means = {quantity: float(np.mean(of_sizes)) for quantity, of_sizes in shares.items()}
    assert len(means) == 9
    assert {quantity: mean for quantity, mean in means.items() if not LEAST <= mean <= MOST} == {}


@pytest.mark.parametrize("level", [0.01, 0.05, 0.1, 0.5])
def test_the_joint_probability_is_uniform(level):
    """Over 20 sizes: 8000 runs, each with predictions that are exact."""
    below = [np.mean(cover(*setting)[1] <= level) for setting in SETTINGS]
    assert max(below) <= level + 4 * math.sqrt(level * (1 - level) / SEEDS)
    assert np.mean(below) == pytest.approx(level, abs=0.3 * level * (1 - level) + 0.002)


@pytest.mark.parametrize("d_k", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("samples", [1000, 2000, 4000, 8000])
def test_intervals_of_the_standard_deviation_hold_the_truth(d_k, samples):
    held = [estimate_std(sample_dot_products(d_k, samples, seed)).holds(math.sqrt(d_k)) for seed in range(SEEDS)]
    assert is_within_chance(np.mean(held))


@pytest.mark.parametrize(("d_k", "n"), [(64, 32), (4, 64), (1, 256), (16, 4)])
def test_intervals_of_temperatures_hold_the_truth(d_k, n):
    relatives = (0.5, 1.0, 2.0)
    scales = [1.0 / (relative * math.sqrt(d_k)) for relative in relatives]
    seeds = [sample_rows(scales, d_k=d_k, n=n, samples=64, queries=16, seed=seed) for seed in range(SEEDS)]
    for index, scale in enumerate(scales):
        gradients = [sampled[index].mean("grad_q") for sampled in seeds]
        truth = np.mean([gradient.value for gradient in gradients])
        assert is_within_chance(np.mean([gradient.holds(truth) for gradient in gradients]))
        truth = theory.expected_rows(scale, d_k, n).entropy_ratio
        assert is_within_chance(np.mean([sampled[index].mean("entropy_ratio").holds(truth) for sampled in seeds]))
