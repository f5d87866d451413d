"""What `explain` says follows from its numbers, at sizes where a fixed sentence would be false."""

import math

import numpy as np
import pytest

from sqrtdk import exercises, theory
from sqrtdk.exercises.expectation import expect_rows
from sqrtdk.exercises.gaussian_rows import choose_effort, sample_rows

SIZES = [(d_k, n) for d_k in (1, 4, 13, 64, 512) for n in (2, 16, 1024)]


def cells_of(record):
    return {(row["scale"], row["quantity"]): row for row in record.tables["explain"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d_k", "n", "place"),
    [
        (4, 1024, "below 2 ln n = 13.9"),
        (32, 1024, "between 2 ln n = 13.9 and 8 ln n = 55.5"),
        (64, 1024, "past 8 ln n = 55.5"),
    ],
)
def test_explain_says_where_the_size_lies(d_k, n, place):
    assert place in exercises.explain(d_k=d_k, n=n, draws=8, queries=2).reading[0]


@pytest.mark.slow
@pytest.mark.parametrize(("d_k", "n"), SIZES)
def test_explain_says_what_its_numbers_say(d_k, n):
    """Every sentence at sizes where a fixed one would be false somewhere."""
    record = exercises.explain(d_k=d_k, n=n, draws=8, queries=4)
    result = cells_of(record)
    keys = {scale: result[scale, "effective_keys"]["measured"] for scale in ("none", "sqrt", "inverse")}
    ratio = keys["sqrt"] / keys["none"]
    last = record.reading[-1]
    assert last == record.headline
    assert last.startswith(f"In short: of {n} keys a query attends to about ")
    assert ("scaling matters little" in last) == (ratio < 1.1 and d_k > 1)
    assert ("scaling matters somewhat" in last) == (1.1 <= ratio < 2)
    assert last.endswith("scaling matters.") == (ratio >= 2)
    assert ("nothing to scale" in last) == (d_k == 1)
    way = (result["none", "sum_p2"]["predicted"] - 1 / n) / (1 - 1 / n)
    assert f"{100 * way:.0f} % of the way" in record.reading[1]
    assert ("nearly one-hot" in record.reading[1]) == (way >= 0.5) == (record.spec["regime"] == "nearly one-hot")
    gradient = [result[scale, "grad_q"]["measured"] for scale in ("sqrt", "none", "inverse")]
    assert f"is {gradient[0]:.3g} with 1/√dₖ, {gradient[1] / gradient[0]:.3g} times that" in record.reading[2]
    judged = [result[scale, name]["inside"] for scale in keys for name in ("logit_std", "entropy_ratio", "sum_p2")]
    assert f"Of 9 predictions (σ, H/ln n and Σp²) {sum(judged)} lie inside" in record.reading[3]


@pytest.mark.slow
def test_explain_at_the_size_where_a_rule_of_thumb_fails():
    record = exercises.explain(d_k=13, n=1024)
    result = cells_of(record)
    assert result["none", "effective_keys"]["measured"] < 20
    assert result["sqrt", "effective_keys"]["measured"] > 350
    assert record.reading[-1].endswith("at this size scaling matters.")


@pytest.mark.slow
def test_explain_predicts_what_it_measures():
    """Eight seeds, six sizes: each prediction is exact, so that its 95% interval holds it 19 times in 20."""
    rows = [
        row
        for d_k, n in ((1, 2), (1, 16), (4, 2), (4, 16), (13, 16), (64, 16))
        for seed in range(8)
        for row in exercises.explain(d_k=d_k, n=n, seed=seed).tables["explain"]
        if row["inside"] is not None
    ]
    for quantity in ("logit_std", "saturation_index", "entropy_ratio", "sum_p2"):
        inside = [row["inside"] for row in rows if row["quantity"] == quantity]
        # 144 of them, but the scalings of a draw hang together as one would: 48 trials, 41 with probability 0.99.
        assert np.mean(inside) >= 41 / 48, quantity


@pytest.mark.slow
def test_intervals_hold_at_the_smallest_size_too():
    """dₖ = 1, n = 256, where Σp² is most skewed; 60 seeds: 52 or more with probability 0.998 if 19 of 20 hold."""
    predicted = expect_rows(1, 256).at_scale(1.0).sum_p2
    usual = choose_effort(1, 256)._asdict()
    inside = [
        sample_rows([1.0], d_k=1, n=256, **usual, seed=seed)[0].mean("sum_p2").holds(predicted) for seed in range(60)
    ]
    assert sum(inside) >= 52


@pytest.mark.slow
def test_pooled_deviation_is_the_predicted_quantity():
    """At n = 2 a row's own deviation is about half of σ; seeds 0 to 3."""
    for seed in range(4):
        row = cells_of(exercises.explain(d_k=64, n=2, seed=seed))["none", "logit_std"]
        assert row["predicted"] == 8.0
        assert row["measured"] == pytest.approx(8.0, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("d_k", "n"), [(64, 1024), (13, 1024), (64, 16), (4, 2)])
def test_explain_leaves_out_the_law_where_it_states_no_error(d_k, n):
    for (scale, quantity), row in cells_of(exercises.explain(d_k=d_k, n=n, draws=8, queries=4)).items():
        if row["law"] is not None:
            rho = d_k ** {"none": 0.5, "sqrt": 0.0, "inverse": -0.5}[scale] / math.sqrt(2 * math.log(n))
            assert n >= 64
            assert (quantity, rho <= 0.5, rho >= 2) in (("entropy_ratio", True, False), ("sum_p2", False, True))
            assert abs(row["law"] - row["predicted"]) < 0.12


def test_the_estimate_of_the_gradient_stands_with_what_it_is_off_by():
    result = cells_of(exercises.explain(d_k=64, n=1024))
    for scale in ("none", "sqrt", "inverse"):
        row = result[scale, "grad_q"]
        assert row["inside"] is None
        assert row["ratio"] == pytest.approx(row["measured"] / row["predicted"])
    side = {row["quantity"]: row for row in exercises.explain(d_k=64, n=1024).tables["side_by_side"]}
    assert side["grad_q"]["none_predicted"] == f"≈ 31.3 (measured {result['none', 'grad_q']['ratio']:.2g} × that)"
    assert side["effective_keys"]["none_predicted"] is None


def test_explain_measures_what_the_design_states():
    result = cells_of(exercises.explain(seed=0))
    assert result["sqrt", "entropy_ratio"]["law"] == pytest.approx(0.928, abs=5e-4)
    assert result["sqrt", "entropy_ratio"]["measured"] == pytest.approx(0.928, abs=0.004)
    assert result["none", "sum_p2"]["law"] == pytest.approx(0.535, abs=1e-3)
    assert result["none", "sum_p2"]["measured"] == pytest.approx(0.605, abs=0.03)
    assert result["none", "logit_std"]["low"] < 8.0 < result["none", "logit_std"]["high"]
    assert result["inverse", "effective_keys"]["measured"] > 1000
    assert result["none", "effective_keys"]["law"] is None
    order = [result[scale, "grad_q"]["measured"] for scale in ("none", "sqrt", "inverse")]
    assert order == sorted(order, reverse=True)


def test_explain_and_gradients_are_one_measurement():
    vanish = {(row["scale"]): row for row in exercises.gradients(d_ks=(64,), ns=(1024,)).tables["vanish"]}
    for scale in ("none", "sqrt", "inverse"):
        row = cells_of(exercises.explain(d_k=64, n=1024))[scale, "grad_q"]
        assert row["measured"] == pytest.approx(vanish[scale]["grad_q_mean"], rel=1e-12)
        assert row["low"] == vanish[scale]["grad_q_low"]


@pytest.mark.slow
def test_explain_curves_meet_the_table():
    record = exercises.explain(d_k=16, n=64, draws=8, queries=4)
    for curve in record.curves["ranked"]:
        assert curve["rank"][0] == 1
        assert curve["rank"][-1] == 64
        assert curve["weight"] == sorted(curve["weight"], reverse=True)
    here = record.curves["map"]
    assert here["begins"][0] == pytest.approx(2 * math.log(2))
    assert here["here"] == {"d_k": 16, "n": 64}


@pytest.mark.slow
@pytest.mark.parametrize(("d_k", "n"), [(1, 2), (13, 1024), (512, 16)])
def test_expected_rows_against_theory_and_a_direct_average(d_k, n):
    rows = expect_rows(d_k, n)
    for sigma in (0.0, 0.3, 1.0, math.sqrt(d_k)):
        exact = theory.expected_softmax(sigma, n)
        assert rows.at_sigma(sigma).entropy_ratio == pytest.approx(exact.entropy_ratio, abs=1e-6)
        assert rows.at_sigma(sigma).sum_p2 == pytest.approx(exact.sum_p2, rel=1e-5)
    # |q| at the middles of 25 equally likely parts of its distribution, from 100 000 draws of seed 0.
    squares = np.random.default_rng(0).chisquare(d_k, 100_000)
    lengths = np.sqrt(np.quantile(squares, (np.arange(25) + 0.5) / 25))
    direct = np.mean([theory.expected_softmax(float(length), n)[1:] for length in lengths], axis=0)
    np.testing.assert_allclose(rows.at_scale(1.0)[1:], direct, rtol=0.02)
