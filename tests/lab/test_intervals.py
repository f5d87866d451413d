"""Intervals and tests for few seeds, against enumeration, mpmath and published values."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.intervals import (
    FEWEST_PAIRS,
    can_reject,
    hodges_lehmann,
    holm,
    share_difference,
    signed_rank_interval,
    wilcoxon_p,
    wilson,
)

# Hamilton depression scale factor of nine patients, from Hollander and Wolfe 1999, example 3.1.
DEPRESSION = [-0.952, 0.147, -1.022, -0.430, -0.620, -0.590, -0.490, 0.080, -0.010]


def enumerate_wilcoxon(differences):
    values = [value for value in differences if value != 0]
    if not values:
        return 1.0
    sizes = np.abs(values)
    ranks = [np.mean([i + 1 for i, other in enumerate(sorted(sizes)) if other == size]) for size in sizes]
    observed = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product((0, 1), repeat=len(values))]
    below = sum(total <= observed for total in sums) / len(sums)
    above = sum(total >= observed for total in sums) / len(sums)
    return min(1.0, 2 * min(below, above))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(-4, 4) | st.floats(-10, 10), max_size=9))
def test_wilcoxon_is_exact_with_ties_and_zeros(differences):
    assert wilcoxon_p(differences) == pytest.approx(enumerate_wilcoxon(differences), abs=1e-12)


def test_wilcoxon_takes_infinite_differences_and_refuses_nan():
    assert wilcoxon_p([math.inf, math.inf, 1.0, 2.0, 3.0]) == pytest.approx(2 / 32)
    assert wilcoxon_p([-math.inf, 1.0]) == enumerate_wilcoxon([-5.0, 1.0])
    with pytest.raises(InvalidValueError, match="must not hold NaN"):
        wilcoxon_p([1.0, math.nan])


def test_estimate_and_interval_of_a_published_example():
    assert hodges_lehmann(DEPRESSION) == pytest.approx(-0.46)
    assert signed_rank_interval(DEPRESSION) == (pytest.approx(-0.786), pytest.approx(-0.010))


@pytest.mark.parametrize("n", range(FEWEST_PAIRS, 11))
def test_interval_is_what_the_test_does_not_reject(n):
    """Shifts inside the interval have p > 5% by enumeration, shifts outside do not; its ends are where that changes."""
    differences = np.random.default_rng(n).standard_normal(n)
    low, high = signed_rank_interval(list(differences))
    for end, outward in ((low, -1e-6), (high, 1e-6)):
        assert enumerate_wilcoxon(differences - (end + outward)) <= 0.05
        assert enumerate_wilcoxon(differences - (end - outward)) > 0.05
    assert low < hodges_lehmann(list(differences)) < high


def test_interval_covers_as_often_as_it_says():
    """Over all signs of six sizes and over all of seven: 1 − 2/64 and 1 − 6/128 of them cover 0, exactly."""
    for n, expected in ((6, 1 - 2 / 64), (7, 1 - 6 / 128), (8, 1 - 10 / 256)):
        sizes = 1.37 ** np.arange(n)
        covers = []
        for signs in itertools.product((-1.0, 1.0), repeat=n):
            low, high = signed_rank_interval(list(sizes * signs))
            covers.append(low <= 0.0 <= high)
        assert np.mean(covers) >= 0.95
        assert np.mean(covers) == pytest.approx(expected)


def test_too_few_pairs_have_no_interval():
    assert signed_rank_interval([1.0] * (FEWEST_PAIRS - 1)) == (-math.inf, math.inf)
    assert signed_rank_interval([1.0] * FEWEST_PAIRS) == (1.0, 1.0)
    with pytest.raises(InvalidValueError, match="at least one number"):
        signed_rank_interval([])


def test_diverged_runs_make_an_interval_wider_and_never_nan():
    finite = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert signed_rank_interval([*finite, math.inf]).high == math.inf
    assert signed_rank_interval([*finite, math.inf]).low == signed_rank_interval([*finite, 1e9]).low
    assert signed_rank_interval([*finite, -math.inf]).low == -math.inf
    assert signed_rank_interval([math.inf] * 7) == (math.inf, math.inf)
    assert hodges_lehmann([math.inf] * 7) == math.inf
    # What two opposite divergences would average to is unknown: no choice of sizes may leave the interval. With eleven
    # differences the eleventh mean is the end, and each infinity makes ten without the other.
    finite += [0.8, 0.9]
    low, high = signed_rank_interval([*finite, math.inf, -math.inf])
    for up, down in ((1e3, 1e6), (1e6, 1e3), (1e4, 1e4)):
        inner = signed_rank_interval([*finite, up, -down])
        assert low <= inner.low <= inner.high <= high
    assert not math.isnan(hodges_lehmann([*finite, math.inf, -math.inf]))


@pytest.mark.parametrize("n", [1, 3, 16, 263])
def test_wilson_solves_its_equation(n):
    """Its ends are the p at which the observed share is z standard deviations away, by mpmath's root finder."""
    z = mpmath.sqrt(2) * mpmath.erfinv(mpmath.mpf("0.95"))
    for successes in {0, 1, n // 2, n}:
        share = mpmath.mpf(successes) / n
        roots = mpmath.polyroots([n + z**2, -(2 * n * share + z**2), n * share**2])
        assert wilson(successes, n) == pytest.approx([float(mpmath.re(root)) for root in sorted(roots)], abs=1e-12)


def test_published_intervals_of_shares():
    """Newcombe 1998, table I (Statistics in Medicine 17, 857)."""
    for (successes, n), ends in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson(successes, n) == pytest.approx(ends, abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(InvalidValueError, match="successes must be from 0 to n = 3, got 4"):
        wilson(4, 3)


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_difference_of_all_and_none_has_a_closed_form(n):
    """All against none is the farthest outcome; its chance pⁿ(1 − q)ⁿ is largest at p = (1 + d)/2, q = (1 − d)/2."""
    low, high = share_difference(n, n, 0, n)
    assert low == pytest.approx(2 * 0.025 ** (1 / (2 * n)) - 1, abs=1e-4)
    assert high == pytest.approx(1.0)
    assert share_difference(0, n, n, n) == pytest.approx((-high, -low))
    assert share_difference(0, 0, n, n) == (-1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_difference_of_shares_covers_whatever_the_probabilities(n):
    intervals = {pair: share_difference(pair[0], n, pair[1], n) for pair in itertools.product(range(n + 1), repeat=2)}
    for p, q in itertools.product(np.linspace(0.01, 0.99, 15), repeat=2):
        chance = {
            (mine, theirs): math.comb(n, mine) * p**mine * (1 - p) ** (n - mine)
            * math.comb(n, theirs) * q**theirs * (1 - q) ** (n - theirs)
            for mine, theirs in intervals
        }  # fmt: skip
        covered = sum(chance[pair] for pair, (low, high) in intervals.items() if low <= p - q <= high)
        assert covered >= 0.95 - 1e-9
    assert all(low <= (mine - theirs) / n <= high for (mine, theirs), (low, high) in intervals.items())


def test_holm_is_the_step_down_procedure():
    """Corrected values reject, at every level, what Holm's procedure rejects when it is carried out step by step."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        p_values = list(rng.uniform(0.0, 0.2, rng.integers(1, 8)))
        corrected = holm(p_values)
        for level in (0.01, 0.05, 0.2, 0.5):
            rejected = set()
            for rank, index in enumerate(np.argsort(p_values)):
                if p_values[index] > level / (len(p_values) - rank):
                    break
                rejected.add(int(index))
            assert {index for index, p in enumerate(corrected) if p <= level} == rejected
    assert holm([]) == []


def test_a_p_value_is_possible_only_with_pairs_enough():
    for n, comparisons in itertools.product(range(1, 12), range(1, 20)):
        smallest = wilcoxon_p([1.0] * n)
        assert can_reject(n, comparisons) == (holm([smallest] * comparisons)[0] <= 0.05)
