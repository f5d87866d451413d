"""`explain`: every sentence follows from its numbers, at sizes where a fixed sentence would be false."""

import math

import numpy as np
import pytest

from sqrtdk import exercises, theory
from sqrtdk.exercises.gaussian_rows import state_crossing
from sqrtdk.wording.numbers import write_number, write_percent

SIZES = [(d_k, n) for d_k in (1, 4, 13, 64, 512) for n in (2, 16, 1024)]


def cells_of(record):
    return {(row["scale"], row["quantity"]): row for row in record.tables["explain"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d_k", "n", "place", "regime"),
    [
        (4, 1024, "dₖ = 4 lies below dₖ = 41.", "spread"),
        (40, 1024, "dₖ = 40 lies below dₖ = 41.", "concentrating"),
        (41, 1024, "dₖ = 41 is the first.", "concentrated"),
        (64, 1024, "dₖ = 64 lies past dₖ = 41.", "concentrated"),
        (4, 3, "dₖ = 4 lies past dₖ = 2.", "concentrated"),
        (1, 2, "Two keys have Σp² ≥ ½ at every dₖ and every scale.", "two keys"),
    ],
)
def test_explain_says_where_the_size_lies(d_k, n, place, regime):
    """At (41, 1024) the many-key limit, 55.5, would say that Σp² is not yet ½."""
    record = exercises.explain(d_k=d_k, n=n, samples=8, queries=2)
    assert record.reading[1].endswith(place)
    assert record.spec["regime"] == regime
    predicted = cells_of(record)["none", "sum_p2"]["predicted"]
    assert (predicted >= 0.5) == (regime in ("concentrated", "two keys"))
    assert "one-hot" not in record.reading[0] + record.reading[1]


@pytest.mark.parametrize(("samples", "warned"), [(255, True), (256, False), (None, False)])
def test_explain_warns_of_fewer_rows_than_its_intervals_need(samples, warned):
    record = exercises.explain(d_k=4, n=4, samples=samples)
    assert (
        any("With fewer than 4096 rows they contain the true value less often" in said for said in record.reading)
        == warned
    )


def test_the_many_key_limit_is_stated_with_the_crossing():
    assert "from dₖ = 52 on" in state_crossing(4096)
    assert state_crossing(4096).endswith("(n → ∞) is 8 ln n = 66.5.")


@pytest.mark.slow
@pytest.mark.parametrize(("d_k", "n"), SIZES)
def test_explain_says_what_its_numbers_say(d_k, n):
    """Every sentence at sizes where a fixed one would be false somewhere."""
    record = exercises.explain(d_k=d_k, n=n, samples=8, queries=4)
    result = cells_of(record)
    keys = {scale: result[scale, "effective_keys"]["measured"] for scale in ("none", "sqrt", "inverse")}
    ratio = keys["sqrt"] / keys["none"]
    first = record.reading[0]
    assert first == record.headline
    assert first.startswith(f"Of {n} keys a query attends to about ") == (d_k > 1)
    assert ("scaling matters little" in first) == (ratio < 1.1 and d_k > 1)
    assert ("scaling matters somewhat" in first) == (1.1 <= ratio < 2)
    assert first.endswith("scaling matters.") == (ratio >= 2)
    assert ("do not differ" in first) == (d_k == 1)
    way = (result["none", "sum_p2"]["predicted"] - 1 / n) / (1 - 1 / n)
    assert f"{write_percent(way)} of the way" in record.reading[2]
    mean_keys, keys_of_mean = (write_number(x, 3) for x in (keys["none"], 1 / result["none", "sum_p2"]["measured"]))
    compared = f"mean of 1/Σp² over rows ({mean_keys}), not 1 over the mean Σp² ({keys_of_mean})"
    assert (compared in record.reading[2]) == (mean_keys != keys_of_mean)
    gradient = [result[scale, "grad_q"]["measured"] for scale in ("sqrt", "none", "inverse")]
    assert f"is {gradient[0]:.3g}{'.' if d_k == 1 else ' with 1/√dₖ'}" in record.reading[3]
    ratio = f"With no scaling it is {gradient[1]:.3g}, which is {gradient[1] / gradient[0]:.3g} times as large"
    assert (ratio in record.reading[3]) == (d_k > 1)
    different = ("sqrt",) if d_k == 1 else ("none", "sqrt", "inverse")
    judged = [result[scale, name]["inside"] for scale in different for name in ("logit_std", "entropy_ratio", "sum_p2")]
    assert f"{sum(judged)} of {len(judged)} predictions (σ, H/ln n and Σp²) lie inside" in record.reading[4]
    assert f"they are not {len(judged)} independent tests" in record.reading[4]
    assert [name for name in different if name in record.tables["side_by_side"][0]] == list(different)
    assert len(record.tables["side_by_side"][0]) == 1 + 2 * len(different)
    (joint,) = record.tables["joint"]
    assert joint["inside"] == sum(judged)
    assert f"{joint['standard_errors']:.2g} standard errors" in record.reading[4]
    assert f"were exact, {write_percent(joint['probability'])} of seeds" in record.reading[4]


@pytest.mark.slow
def test_explain_at_the_size_where_a_rule_of_thumb_fails():
    record = exercises.explain(d_k=13, n=1024)
    result = cells_of(record)
    assert result["none", "effective_keys"]["measured"] < 20
    assert result["sqrt", "effective_keys"]["measured"] > 350
    assert record.headline.endswith("at this size scaling matters.")


@pytest.mark.slow
def test_explain_predicts_what_it_measures():
    """Eight seeds, six sizes: each prediction is exact, so that its 95% interval holds it 19 times in 20."""
    records = [
        exercises.explain(d_k=d_k, n=n, seed=seed)
        for d_k, n in ((1, 2), (1, 16), (4, 2), (4, 16), (13, 16), (64, 16))
        for seed in range(8)
    ]
    for quantity in ("logit_std", "saturation_index", "entropy_ratio", "sum_p2"):
        inside = [
            row["inside"] for record in records for row in record.tables["explain"] if row["quantity"] == quantity
        ]
        # 144 of them, but the scalings of a sample depend on each other: 48 trials, 41 with probability 0.99.
        assert np.mean(inside) >= 41 / 48, quantity
    # 48 numbers that are uniform: 9 or more below 0.1 with probability 0.04, one below 0.0001 with 0.005.
    probabilities = [record.tables["joint"][0]["probability"] for record in records]
    assert sum(probability < 0.1 for probability in probabilities) <= 9
    assert min(probabilities) > 1e-4
    assert 0.3 < np.mean(probabilities) < 0.7


def test_a_wrong_prediction_has_a_small_joint_probability(monkeypatch):
    """Σp² wrong by a tenth: some interval misses, and the sentence says how improbable that is."""
    exact = theory.expected_rows
    monkeypatch.setattr(theory, "expected_rows", lambda *size: exact(*size)._replace(sum_p2=1.1 * exact(*size).sum_p2))
    record = exercises.explain(d_k=16, n=16)
    assert record.tables["joint"][0]["probability"] < 0.001
    assert "less than 0.1% of seeds would show a distance as large" in record.reading[4]
    assert "outside: Σp² with no scaling" in record.reading[4]


@pytest.mark.slow
def test_pooled_deviation_is_the_predicted_quantity():
    """At n = 2 a row's own deviation is about half of σ; seeds 0 to 3."""
    for seed in range(4):
        row = cells_of(exercises.explain(d_k=64, n=2, seed=seed))["none", "logit_std"]
        assert row["predicted"] == 8.0
        assert row["measured"] == pytest.approx(8.0, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("d_k", "n"), [(64, 1024), (13, 1024), (64, 16), (4, 2)])
def test_explain_leaves_out_the_limit_where_its_error_is_unknown(d_k, n):
    for (scale, quantity), row in cells_of(exercises.explain(d_k=d_k, n=n, samples=8, queries=4)).items():
        if row["limit"] is not None:
            rho = d_k ** {"none": 0.5, "sqrt": 0.0, "inverse": -0.5}[scale] / math.sqrt(2 * math.log(n))
            assert n >= 64
            assert (quantity, rho <= 0.5, rho >= 2) in (("entropy_ratio", True, False), ("sum_p2", False, True))
            assert abs(row["limit"] - row["predicted"]) < 0.12


def test_the_predicted_gradient_is_shown_with_its_ratio_to_the_measured_one():
    result = cells_of(exercises.explain(d_k=64, n=1024))
    for scale in ("none", "sqrt", "inverse"):
        row = result[scale, "grad_q"]
        assert row["inside"] is None
        assert row["ratio"] == pytest.approx(row["measured"] / row["predicted"])
    side = {row["quantity"]: row for row in exercises.explain(d_k=64, n=1024).tables["side_by_side"]}
    row = result["none", "grad_q"]
    assert side["grad_q"]["none_predicted"] == f"rms {row['predicted']:.3g} (mean {row['ratio']:.2g} × that)"
    assert side["effective_keys"]["none_predicted"] is None


def test_explain_measures_what_the_design_states():
    result = cells_of(exercises.explain(seed=0))
    assert result["sqrt", "entropy_ratio"]["limit"] == pytest.approx(0.928, abs=5e-4)
    assert result["sqrt", "entropy_ratio"]["measured"] == pytest.approx(0.928, abs=0.004)
    assert result["none", "sum_p2"]["limit"] == pytest.approx(0.535, abs=1e-3)
    assert result["none", "sum_p2"]["predicted"] == pytest.approx(0.597, abs=1e-3)
    assert result["none", "sum_p2"]["measured"] == pytest.approx(0.597, abs=0.03)
    assert result["none", "logit_std"]["low"] < 8.0 < result["none", "logit_std"]["high"]
    assert result["inverse", "effective_keys"]["measured"] > 1000
    assert result["none", "effective_keys"]["limit"] is None
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
    record = exercises.explain(d_k=16, n=64, samples=8, queries=4)
    for curve in record.curves["ranked"]:
        assert curve["rank"][0] == 1
        assert curve["rank"][-1] == 64
        assert curve["weight"] == sorted(curve["weight"], reverse=True)
    here = record.curves["map"]
    assert here["begins"][0] == pytest.approx(2 * math.log(2))
    assert dict(zip(here["exact_n"], here["concentrated_from"], strict=True))[4] == 4
    assert here["exact_n"][-1] == here["n"][-1]
    assert here["here"] == {"d_k": 16, "n": 64}
