"""Diagnosis: planted faults are found with their evidence, healthy heads of every sharpness raise nothing."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heads_of_models import fresh_heads, head_at_offset, rules, set_head, sink_head
from sqrtdk import HeadSummary, SqrtdkError, attention, diagnose
from sqrtdk.diagnosis import Finding, Threshold, patterns
from sqrtdk.diagnosis.precision import PRECISIONS


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(0, 200),
    d_k=st.sampled_from([1, 4, 16, 64, 128]),
    sharpness=st.sampled_from([0.0, 0.02, 1.0, 3.0]),
    causal=st.booleans(),
    options=st.sampled_from([{}, {"softcap": 20.0}, {"window": (8, 0)}]),
    dtype=st.sampled_from([None, "bfloat16", "float16", "float32", "float64"]),
)
@pytest.mark.slow
def test_freshly_initialised_heads_raise_nothing(seed, length, d_k, sharpness, causal, options, dtype):
    layers = {
        f"h.{at}": fresh_heads(
            seed + at, batch=1, length=length, d_k=d_k, causal=causal, sharpness=sharpness, **options
        )
        for at in range(2)
    }
    scales = [{"layer": path, "d_k": d_k, "measured": d_k**-0.5, "declared": None} for path in layers]
    assert diagnose(layers, scales=scales, dtype=dtype) == []
    assert diagnose(layers["h.0"]) == []


@pytest.mark.parametrize(
    ("summary", "name"),
    [
        (head_at_offset(-1), "previous"),
        (head_at_offset(-1, causal=True), "previous"),
        (head_at_offset(0), "self"),
        (head_at_offset(1), "next"),
        (head_at_offset(-3), "offset −3"),
        (sink_head(), "fixed key"),
        (fresh_heads(0, sharpness=60.0, causal=False), "other"),
    ],
)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_sharp_head_is_not_a_sick_head(summary, name, dtype):
    assert summary["entropy_ratio"].mean[0] < 0.1
    assert set(patterns(summary)) == {name}
    assert diagnose({"h.0": summary}, dtype=dtype) == []


def test_rows_that_see_nothing_are_no_fault():
    mask = np.ones((40, 40), bool)
    mask[:7] = False
    q = np.random.default_rng(0).standard_normal((2, 40, 8))
    assert diagnose(HeadSummary.of(attention(q, q, q, mask=mask).statistics), dtype="bfloat16") == []


def broken(fault, *, heads=(1,), mask=None):
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 50, 8))
    q[list(heads), 10:15, 0] = fault
    with np.errstate(invalid="ignore"):
        return HeadSummary.of(attention(q, k, v, mask=mask).statistics)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_found_with_the_first_layer(fault):
    healthy = fresh_heads(0)
    layers = {"h.0": healthy, "h.1": broken(fault), "h.2": broken(fault, heads=(0, 1, 2))}
    (finding,) = diagnose(layers)
    assert (finding.rule, finding.severity, finding.layer) == ("non-finite-rows", "error", "h.1")
    assert (finding.layer_index, finding.head) == (1, 1)
    assert finding.evidence == {"rows": 5, "of_rows": 50, "heads": [1], "layers": 2}
    assert finding.cause == "h.1 is the first of 2 layers with scores that are NaN or infinite."
    (several,) = diagnose({"h.2": layers["h.2"], "h.0": healthy})
    assert (several.head, several.evidence["heads"], several.evidence["rows"]) == (None, [0, 1, 2], 15)
    assert several.cause == "h.2 is the only one of 2 layers with scores that are NaN or infinite."
    (alone,) = diagnose(layers["h.1"])
    assert (alone.layer, alone.cause) == (None, "Scores of these rows are NaN or infinite.")


def test_one_infinite_key_makes_every_row_that_sees_it_infinite():
    q, k, v = np.abs(np.random.default_rng(0).standard_normal((3, 1, 50, 8)))
    k[0, 20, 0] = -np.inf  # the largest score of each row stays finite
    rows = HeadSummary.of(attention(q, k, v, causal=True).statistics)
    assert rows["score_max"].left_out[0] == 0
    assert diagnose(rows)[0].evidence["rows"] == 30


def test_a_soft_cap_does_not_hide_infinite_scores():
    q, k, v = np.abs(np.random.default_rng(0).standard_normal((3, 1, 50, 8)))
    q[0, :4, 0] = np.inf
    rows = HeadSummary.of(attention(q, k, v, softcap=5.0).statistics)
    assert rows["logit_mean"].left_out[0] == 0
    assert diagnose(rows)[0].evidence["rows"] == 4


def test_a_row_that_sees_nothing_and_a_broken_row_are_told_apart():
    mask = np.ones((50, 50), bool)
    mask[12:20] = False
    assert diagnose(broken(np.nan, mask=mask))[0].evidence["rows"] == 2
    assert diagnose(broken(1.0, mask=mask)) == []


@pytest.mark.parametrize(("dtype", "coarse"), [("bfloat16", 256.0), ("float16", 2048.0), ("float32", 2.0**24)])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_rounding_moves_by_1_from_both_sides(dtype, coarse, sign):
    assert diagnose(set_head(score_max=sign * np.nextafter(coarse, 0)), dtype=dtype) == []
    (finding,) = diagnose({"h.0": set_head(score_max=sign * coarse)}, dtype=dtype)
    assert (finding.rule, finding.severity, finding.head) == ("score-rounding", "warning", 0)
    assert finding.threshold.value == coarse
    assert finding.evidence == {"largest_score_in_size": coarse, "dtype": dtype, "spacing": 2.0}
    assert "a logit is off by up to 1, a weight by a factor of up to 2.72" in finding.cause
    assert diagnose(set_head(score_max=sign * coarse)) == []  # not known to be rounded


def test_one_row_is_enough_for_a_score_that_is_too_large_either_way():
    for size in (-300.0, 300.0):
        scores = np.where(np.arange(300) == 17, size, 5.0)
        (finding,) = diagnose(set_head(score_max=scores), dtype="bfloat16")
        assert finding.evidence["largest_score_in_size"] == 300.0


def test_the_spacing_of_a_dtype_is_its_own():
    import ml_dtypes

    for name, kind in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)):
        limits = ml_dtypes.finfo(kind)
        assert (float(limits.eps), float(limits.max)) == PRECISIONS[name]
    assert (np.finfo(np.float64).eps, np.finfo(np.float64).max) == PRECISIONS["float64"]
    (finding,) = diagnose(set_head(score_max=5000.0), dtype=np.float16)
    assert finding.evidence["spacing"] == float(np.spacing(np.float16(5000.0))) == 4.0


def test_scores_beyond_the_largest_number_from_both_sides():
    assert rules(diagnose(set_head(score_max=65504.0), dtype="float16")) == [("score-rounding", "warning")]
    (finding,) = diagnose(set_head(score_max=65505.0), dtype="float16")
    assert (finding.rule, finding.severity, finding.threshold.value) == ("score-overflow", "error", 65504.0)
    q = np.full((1, 4, 8), 1e25)
    measured = HeadSummary.of(attention(q, q, q).statistics)
    assert rules(diagnose(measured, dtype="float32")) == [("score-overflow", "error")]
    assert rules(diagnose(measured, dtype="float64")) == [("score-rounding", "warning")]


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "bfloat16"])
def test_a_dtype_may_be_named_as_torch_prints_it(dtype):
    assert rules(diagnose(set_head(score_max=300.0), dtype=dtype)) == [("score-rounding", "warning")]


def test_a_dtype_may_differ_between_layers():
    layers = {name: set_head(score_max=300.0) for name in ("h.0", "h.1", "h.2")}
    findings = diagnose(layers, dtype={"h.0": "float32", "h.1": "bfloat16", "h.2": None})
    assert [(one.rule, one.layer, one.layer_index) for one in findings] == [("score-rounding", "h.1", 1)]
    with pytest.raises(SqrtdkError, match=r"dtype must name layers of summaries, got 'h\.9'"):
        diagnose(layers, dtype={"h.9": "float32"})


def dead_head(alive, *, rows=400, short=0, **options):
    """Of `rows` rows with 64 keys `alive` have 1 − Σp² = 0.01, the others less; `short` more rows see one key."""
    trace = np.where(np.arange(rows + short) < alive, 0.0101, 0.0099)
    keys = np.where(np.arange(rows + short) < rows, 64, 1)
    return set_head(rows=rows + short, trace=np.where(keys > 1, trace, 0.0), visible_keys=keys, **options)


def test_a_dead_gradient_needs_a_backward_pass_and_95_of_100_rows():
    assert diagnose(dead_head(0)) == []
    dead, alive = dead_head(20), dead_head(21)
    assert rules(diagnose(dead, pressures=[0.0])) == [("dead-gradient", "warning")]
    assert diagnose(alive, pressures=[0.0]) == []
    assert diagnose(dead_head(21, short=2000), pressures=[0.0]) == []  # rows with one key have no gradient to lose
    assert diagnose(dead_head(0, rows=255), pressures=[0.0]) == []
    (finding,) = diagnose({"h.0": dead}, pressures={"h.0": np.zeros(1)})
    assert finding.evidence["share_of_rows_below_0.01"] == pytest.approx(0.95)
    assert "no position explains it" in finding.cause


def test_the_gradient_of_a_head_without_a_pattern_is_not_judged():
    one_hot = 90.0 * np.eye(64)
    q = np.stack([one_hot[(7 * at) % 64][None, None] for at in range(300)])
    decoding = HeadSummary.of(
        attention(q, np.broadcast_to(one_hot, (300, 1, 64, 64)), q[..., :1].repeat(64, -2)).statistics
    )
    assert decoding["jacobian_trace"].largest[0] < 1e-6
    assert diagnose(decoding, pressures=[0.0]) == []


@pytest.mark.parametrize("summary", [head_at_offset(-1), head_at_offset(0)])
def test_the_dead_gradient_of_a_positional_head_is_information(summary):
    (finding,) = diagnose(summary, pressures=[0.0])
    assert (finding.rule, finding.severity) == ("dead-gradient", "info")
    assert repr(finding.evidence["pattern"]) in finding.cause


def test_temperature_pressure_is_information_about_a_layer():
    (finding,) = diagnose({"h.0": fresh_heads(0, heads=4)}, pressures={"h.0": [0.5, -2.0, 0.0, np.nan]})
    assert (finding.rule, finding.severity, finding.head) == ("temperature-pressure", "info", None)
    assert (finding.evidence["sharper"], finding.evidence["softer"]) == ([1], [0])
    assert "head 1 feels it most, −2 per unit of log scale" in finding.cause
    assert finding.as_json()["evidence"]["pressures"] == [0.5, -2.0, 0.0, None]
    assert diagnose({"h.0": fresh_heads(0)}, pressures={"h.0": None}) == []
    assert diagnose({"h.0": fresh_heads(0)}, pressures={"h.0": [0.0, 0.0]}) == []


def test_the_severe_come_first_and_layers_keep_their_order():
    layers = {"b": set_head(score_max=300.0), "a": broken(np.nan), "c": set_head(score_max=300.0)}
    findings = diagnose(
        layers,
        pressures={"b": [1.0]},
        scales=[{"layer": "c", "d_k": 4, "measured": 1.0, "declared": 0.5}],
        dtype="bfloat16",
    )
    assert [(finding.severity, finding.layer) for finding in findings] == [
        ("error", "a"),
        ("error", "c"),
        ("warning", "b"),
        ("warning", "c"),
        ("info", "b"),
    ]


def test_of_one_severity_the_earlier_layer_comes_first_whatever_the_rule():
    findings = diagnose({"a": set_head(score_max=1e6), "b": broken(np.nan)}, dtype="float16")
    assert [(finding.rule, finding.layer) for finding in findings] == [
        ("score-overflow", "a"),
        ("non-finite-rows", "b"),
    ]


def test_findings_are_one_line_and_plain_json():
    layers = {"a\nb": dead_head(0, score_max=300.0), "nan": broken(np.nan)}
    scales = [{"layer": "a\nb", "d_k": 64, "measured": 1.0}]
    findings = diagnose(layers, pressures={"a\nb": [3.0]}, scales=scales, dtype="bfloat16")
    assert len(findings) == 5
    for finding in findings:
        assert str(finding) == repr(finding)
        assert "\n" not in str(finding)
        assert str(finding).startswith(f"{finding.severity}: {finding.rule} in ")
        again = json.loads(json.dumps(finding.as_json(), allow_nan=False))
        assert again == finding.as_json()
        assert set(again) == {
            *("rule", "severity", "layer", "layer_index", "head", "evidence", "threshold", "cause", "remedy"),
        }
        assert again["evidence"]
        assert again["threshold"]["source"]
        assert again["cause"].endswith(".")
        assert again["remedy"].endswith(".")


def test_a_long_list_of_evidence_is_shortened_in_print_only():
    finding = Finding("r", "info", "h", 0, None, {"heads": list(range(20))}, Threshold(0.0, "s"), "Why.", "Do.")
    assert str(finding) == "info: r in h: heads [0, 1, 2, 3, 4, 5, 6, 7, …]. Why."
    assert finding.as_json()["evidence"]["heads"] == list(range(20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"summaries": 3}, r"summaries must be a HeadSummary or a mapping from layer path to one, got int"),
        ({"summaries": {"h.0": 3}}, r"summaries\['h.0'\] must be a HeadSummary, got int"),
        ({"dtype": "int8"}, r"unknown dtype 'int8'; known: bfloat16, float16"),
        ({"pressures": {"h.9": [1.0]}}, r"pressures must be among the layers of summaries, got 'h.9'"),
        ({"pressures": [1.0]}, r"pressures must be a mapping from layer path to \[H\], got one array"),
        ({"pressures": {"h.0": [1.0, 2.0]}}, r"pressures of 'h.0' must have shape \[1\], got \(2,\)"),
    ],
)
def test_arguments_that_do_not_fit_say_why(arguments, message):
    with pytest.raises(SqrtdkError, match=message):
        diagnose(**{"summaries": {"h.0": set_head()}, **arguments})
