"""Rules that need a trend: growth and collapse are found when planted, and chance and health raise nothing."""

import numpy as np
import pytest

from heads_of_models import fresh_heads, head_at_offset, rules, set_head, sink_head
from sqrtdk import SqrtdkError, diagnose
from sqrtdk.diagnosis.trend_rules import fit_line


def follow(summaries, *, every=100):
    """The findings about one layer whose summaries were taken one after another."""
    history = [(every * at, {"h.0": summary}) for at, summary in enumerate(summaries)]
    return diagnose(history[-1][1], history=history)


def scores(values, **options):
    return [set_head(score_max=value, **options) for value in values]


def ratios(values, **options):
    return [set_head(ratio=value, **options) for value in values]


def test_growth_is_found_with_its_slope_and_the_step_at_which_it_passes_100():
    finding = follow(scores([20, 37, 49, 66, 80]))[0]
    assert (finding.rule, finding.severity, finding.layer, finding.head) == ("logit-growth", "warning", "h.0", 0)
    slope, intercept = np.polyfit([0, 100, 200, 300, 400], [20, 37, 49, 66, 80], 1)
    assert finding.evidence["slope_per_step"] == pytest.approx(slope)
    assert finding.evidence["passes_100_at_step"] == pytest.approx((100 - intercept) / slope)
    assert finding.evidence["score_max_above_mean"] == 80
    assert f"will pass 100 at step {(100 - intercept) / slope:.0f}." in finding.cause
    assert finding.threshold.value == 100


def test_one_observation_of_scores_beyond_the_limit_is_a_fact():
    (finding,) = follow(scores([40, 100.1]))
    assert (finding.rule, finding.severity, finding.threshold.value) == ("logit-growth", "warning", 100)
    assert finding.cause == "The largest score is 100.1 above the mean (limit 100), 40 at step 0."
    assert follow(scores([40, 100])) == []
    assert follow(scores([40, 100.1], rows=1)) != []
    assert follow(scores([40, 1000.1]))[0].severity == "error"


def test_a_head_that_begins_with_large_scores_has_twice_those_as_its_limit():
    assert follow(scores([300, 590])) == []
    assert follow(scores([300, 601]))[0].threshold.value == 600
    assert follow(scores([900])) == []
    assert rules(follow(scores([1001]))) == [("logit-growth", "warning")]  # no trained model begins there


def test_a_jump_is_tenfold_since_the_observation_before_and_beyond_half_the_limit():
    (finding,) = follow(scores([2, 6, 60]))
    assert "from step 100 to 200 it went from 6 to 60" in finding.cause
    assert finding.remedy.startswith("Look at the batches of these steps, lower the learning rate")
    assert follow(scores([2, 6.1, 60])) == []
    assert follow(scores([2, 4.9, 49])) == []


def test_growth_holds_until_the_scores_have_recovered():
    assert [bool(follow(scores([20, 120, *rest]))) for rest in ([51], [99, 51], [49], [49, 60])] == [
        True,
        True,
        False,
        False,
    ]
    broken = [set_head(score_max=20.0), set_head(score_max=120.0), set_head(score_max=np.nan)]
    held = [one for one in follow(broken) if one.rule == "logit-growth"]
    assert [one.severity for one in held] == ["info"]  # not finite: neither raised nor recovered


def test_a_remedy_that_is_in_use_is_not_recommended():
    history = [(0, set_head(score_max=20.0)), (1, set_head(score_max=200.0))]
    assert "qk_clip_" in diagnose(history[-1][1], history=history)[0].remedy
    assert "qk_clip_" not in diagnose(history[-1][1], history=history, is_clipped=True)[0].remedy


def test_growth_names_a_wrong_scale():
    history = [(step, {"h.0": set_head(score_max=score)}) for step, score in enumerate((20.0, 200.0))]
    scales = [{"layer": "h.0", "d_k": 64, "measured": 1.0}]
    grown = next(one for one in diagnose(history[-1][1], history=history, scales=scales) if one.rule == "logit-growth")
    assert grown.cause.endswith("No scale is applied: the product is multiplied by 1.")
    assert grown.remedy.endswith("else multiply by 1/√dₖ.")
    right = [{**scales[0], "measured": 0.125}]
    assert "product" not in diagnose(history[-1][1], history=history, scales=right)[0].cause


def test_the_horizon_of_growth_from_both_sides():
    assert rules(follow(scores([20, 30, 40, 50, 60.1]))) == [("logit-growth", "warning")]
    assert follow(scores([19.5, 29.5, 39.5, 49.5, 59.5])) == []  # would pass 100 only after as long again


def test_the_rise_of_growth_from_both_sides():
    assert rules(follow(scores(np.linspace(95, 105.1, 5)))) == [("logit-growth", "warning")]
    assert follow(scores(np.linspace(95, 104.9, 5))) == []


def test_the_number_of_snapshots_from_both_sides():
    assert follow(scores([20, 40, 60, 80])) == []
    assert len(follow(scores([20, 40, 60, 80, 100]))) == 1
    assert follow(scores([20, 40, 60, 80, 100], rows=255)) == []  # not enough data in any of them
    assert follow([*scores([20, 40, 60, 80]), *scores([100], rows=255)]) == []


def test_a_slope_that_is_uncertain_is_no_growth():
    heights = [60, 130, 50, 120, 100]
    line = fit_line(np.arange(5.0), np.array(heights, float))
    assert line.slope > 5  # by its slope alone it would have passed 100
    assert line.last > 100
    assert follow(scores(heights)) == []


def test_growth_by_a_factor_is_growth():
    heights = np.array([5.0, 10, 20, 40, 80])
    assert not fit_line(np.arange(5.0), heights).rises  # no line fits it well
    assert rules(follow(scores(heights))) == [("logit-growth", "warning")]
    assert follow(scores(heights / 10)) == []


def test_a_shift_of_all_scores_is_no_growth():
    shifted = [set_head(score_max=5.0 + shift, logit_mean=shift) for shift in (0, 50, 100, 150, 200)]
    assert follow(shifted) == []


def test_what_grew_and_has_settled_does_not_grow():
    noise = np.random.default_rng(0).normal(size=20)
    assert follow(scores([*np.linspace(5, 95, 10), *(95 + noise[:10])])) == []
    assert rules(follow(scores([*(30 + noise[:10]), *np.linspace(30, 90, 10)]))) == [("logit-growth", "warning")]


def test_under_a_soft_cap_the_scores_before_it_are_followed():
    capped = [fresh_heads(0, causal=False, sharpness=sharpness, softcap=5.0) for sharpness in (5, 10, 15, 20, 25)]
    findings = follow(capped)
    assert [finding.head for finding in findings if finding.rule == "logit-growth"] == [0, 1]
    assert findings[0].evidence["score_max_above_mean"] == capped[-1]["score_max"].largest[0]


@pytest.mark.slow
@pytest.mark.parametrize("snapshots", [5, 6, 9, 16, 40])
def test_chance_makes_a_line_rise_in_one_of_a_thousand_series(snapshots):
    steps = np.arange(snapshots, dtype=float)
    noise = np.random.default_rng(snapshots).normal(size=(20_000, snapshots))
    rising = sum(fit_line(steps, series).rises for series in noise)
    assert 5 <= rising <= 40  # 20 expected, give or take 4.5


def test_a_line_has_the_slope_and_error_of_least_squares():
    steps, values = np.array([0.0, 1, 3, 7, 9, 20]), np.array([1.0, 4, 2, 8, 9, 15])
    line = fit_line(steps, values)
    (slope, intercept), covariance = np.polyfit(steps, values, 1, cov=True)
    assert line.slope == pytest.approx(slope)
    assert line.error == pytest.approx(np.sqrt(covariance[0, 0]))
    assert line.last == pytest.approx(intercept + slope * 20)


def test_a_collapse_that_no_position_explains_is_a_warning():
    finding = follow(ratios([0.8, 0.8, 0.7, 0.05, 0.04], score_max=60.0))[0]
    assert (finding.rule, finding.severity) == ("entropy-collapse", "warning")
    assert finding.evidence["below_since_step"] == 300
    assert finding.evidence["entropy_ratio_at_first"] == pytest.approx(0.8)
    assert "fell from 0.8 to 0.04 and no position explains it" in finding.cause
    assert finding.cause.endswith("the largest score stayed at 60 above the mean.")


@pytest.mark.parametrize(("last", "words"), [(80.0, "rose from 70 to 80"), (60.0, "fell from 70 to 60")])
def test_a_collapse_tells_what_the_scores_did(last, words):
    heads = [*[set_head(ratio=0.8, score_max=70.0)] * 3, *[set_head(ratio=0.02, score_max=last)] * 2]
    assert follow(heads)[0].cause.endswith(f"score {words} above the mean.")


def test_a_head_that_became_sharp_with_the_scores_of_healthy_models_is_information():
    for score, severity in [(49.9, "info"), (50.0, "warning")]:
        assert rules(follow(ratios([0.8, 0.8, 0.7, 0.05, 0.04], score_max=score))) == [("entropy-collapse", severity)]


def test_a_collapse_holds_until_the_entropy_has_recovered():
    fallen = [0.8, 0.8, 0.7, 0.05, 0.04]
    held = [bool(follow(ratios([*fallen, *rest]))) for rest in ([0.19], [0.19, 0.01], [0.2], [0.2, 0.01])]
    assert held == [True, True, False, False]


def test_a_collapse_is_information_where_the_scores_have_been_warned_of():
    heads = [*[set_head(ratio=0.8, score_max=70.0)] * 3, *[set_head(ratio=0.02, score_max=150.0)] * 2]
    assert rules(follow(heads)) == [("logit-growth", "warning"), ("entropy-collapse", "info")]


def test_a_head_that_found_its_place_is_information():
    finding = follow(ratios([0.8, 0.8, 0.7, 0.05, 0.04], max_key=np.arange(300) - 1))[0]
    assert (finding.rule, finding.severity, finding.evidence["pattern"]) == ("entropy-collapse", "info", "previous")


def test_the_thresholds_of_collapse_from_both_sides():
    assert len(follow(ratios([0.3, 0.3, 0.2, 0.099, 0.099]))) == 1
    assert follow(ratios([0.299, 0.299, 0.2, 0.099, 0.099])) == []
    assert follow(ratios([0.3, 0.3, 0.2, 0.101, 0.099])) == []  # one snapshot may be out of the ordinary
    assert follow(ratios([0.3, 0.3, 0.099, 0.099])) == []


def test_level_sharp_heads_of_all_kinds_raise_nothing():
    for head in (head_at_offset(-1), head_at_offset(0), head_at_offset(-3), sink_head()):
        assert head["entropy_ratio"].mean[0] < 1e-6
        assert follow([head] * 8) == []


def test_fresh_heads_over_many_batches_raise_nothing():
    for sharpness in (0.02, 1.0, 8.0):
        assert follow([fresh_heads(seed, heads=4, sharpness=sharpness) for seed in range(12)]) == []


def test_layers_that_are_not_in_every_snapshot_are_followed_where_they_are():
    growing = scores([20, 40, 60, 80, 100])
    history = [(at, {"h.0": summary, **({"h.1": summary} if at else {})}) for at, summary in enumerate(growing)]
    assert [finding.layer for finding in diagnose(history[-1][1], history=history)] == ["h.0"]
    alone = list(enumerate(growing))
    assert [finding.layer for finding in diagnose(growing[-1], history=alone)] == [None]


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([(0, set_head()), (0, set_head())], r"history must have finite, ascending steps, got 0 after step 0"),
        ([(np.nan, set_head())], r"history must have finite, ascending steps, got nan"),
        ([set_head()], r"history must be pairs \(step, summaries\)"),
        ([("a", set_head())], r"history must have numbers as steps, got 'a'"),
        ([(0, 3)], r"history at step 0 must be a HeadSummary or a mapping from layer path to one, got int"),
        ([(0, set_head()), (1, sink_head())], r"history must keep the number of heads of None, got 1, then 2"),
    ],
)
def test_a_history_that_cannot_be_read_says_why(history, message):
    with pytest.raises(SqrtdkError, match=message):
        diagnose(set_head(), history=history)
