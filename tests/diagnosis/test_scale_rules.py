"""Findings about the scale: the field's mistakes are found and named, and what is meant raises nothing."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heads_of_models import rules, set_head
from sqrtdk import SqrtdkError, diagnose
from sqrtdk.diagnosis.scale_rules import SCALE_TOLERANCE


def layer(measured, *, d_k=64, path="h.0", **known):
    return {"layer": path, "d_k": d_k, "measured": measured, **known}


def judge(*records, dtype="float32"):
    return diagnose({}, scales=list(records), dtype=dtype)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    widths=st.lists(st.integers(1, 1024), min_size=1, max_size=24),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", None]),
    rounding=st.floats(-0.5, 0.5),
)
def test_measured_with_the_rounding_of_the_dtype_the_usual_scale_raises_nothing(widths, dtype, rounding):
    epsilon = {"float32": 2.0**-23, "float16": 2.0**-10}.get(dtype, 2.0**-7)
    records = [layer(d_k**-0.5 * (1 + rounding * epsilon), d_k=d_k, path=f"h.{at}") for at, d_k in enumerate(widths)]
    assert judge(*records, dtype=dtype) == []


@pytest.mark.parametrize(
    ("measured", "declared", "d_k"), [(1.0, 1.0, 64), (1 / 64, 1 / 64, 64), (0.1, 0.1, 48), (-0.5, -0.5, 3)]
)
def test_what_is_declared_and_done_raises_nothing(measured, declared, d_k):
    assert judge(layer(measured, declared=declared, d_k=d_k)) == []


@pytest.mark.parametrize(
    ("mistake", "measured", "cause"),
    [
        ("omitted", 1.0, "No scale is applied: the product is multiplied by 1."),
        ("applied twice", 1 / 64, "The scale is 1/dₖ: that of muP, or 1/√dₖ applied twice."),
        ("of the model's width", 768**-0.5, "The scale is 1/√768, that of 768 dimensions instead of 64."),
        ("of the padded head", 96**-0.5, "The scale is 1/√96, that of 96 dimensions instead of 64."),
        ("doubled", 0.25, "The scale is 1/√16, that of 16 dimensions instead of 64."),
        ("lacks YaRN's factor", 0.125 * 1.3, "The product is multiplied by 0.1625, which is 1.3 times 1/√dₖ."),
        ("negative", -0.125, "The product is multiplied by −0.125, which is −1 times 1/√dₖ."),
    ],
)
def test_a_scale_that_is_not_the_declared_one_is_an_error_that_names_it(mistake, measured, cause):
    finding = judge(layer(measured, declared=0.125))[0]
    assert (finding.rule, finding.severity, finding.cause) == ("scale-differs-from-declared", "error", cause), mistake
    assert finding.evidence == {"measured": measured, "declared": 0.125, "ratio": measured / 0.125, "d_k": 64}
    undeclared = judge(layer(measured))[0]
    assert (undeclared.rule, undeclared.severity, undeclared.cause) == ("scale-undeclared", "warning", cause)


def test_a_declared_scale_that_is_not_applied_is_named():
    finding = judge(layer(0.125, declared=0.2))[0]
    assert finding.cause == "The scale is 1/√dₖ of dₖ = 64; the declared one is not applied."


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", SCALE_TOLERANCE), ("float16", SCALE_TOLERANCE), ("bfloat16", 2.0**-7), (None, 2.0**-7)],
)
def test_the_tolerance_from_both_sides(dtype, tolerance):
    for known in ({}, {"declared": 0.125}):
        assert judge(layer(0.125 * (1 + 0.99 * tolerance), **known), dtype=dtype) == []
        assert judge(layer(0.125 * (1 - 0.99 * tolerance), **known), dtype=dtype) == []
        finding = judge(layer(0.125 * (1 + 1.01 * tolerance), **known), dtype=dtype)[0]
        assert finding.threshold.value == tolerance
        assert len(judge(layer(0.125 * (1 - 1.01 * tolerance), **known), dtype=dtype)) == 1


def test_a_layer_with_a_dtype_of_its_own_is_judged_by_that_one():
    near = 0.125 * (1 + 2.0**-8)
    records = [layer(near, path="h.0", dtype="bfloat16"), layer(near, path="h.1", dtype="float32")]
    (finding,) = judge(*records, dtype="bfloat16")
    assert (finding.layer, finding.threshold.value) == ("h.1", SCALE_TOLERANCE)


def test_with_normalised_q_and_k_another_scale_is_information():
    records = [layer(10.0 + at, path=f"h.{at}", normalised=True) for at in range(3)]
    findings = judge(*records)
    assert rules(findings) == [("scale-undeclared", "info")] * 3
    assert all("q and k are normalised" in finding.cause for finding in findings)
    wrong = judge(layer(10.0, normalised=True, declared=12.0))
    assert rules(wrong) == [("scale-differs-from-declared", "error")]


def test_layers_that_differ_without_declaration_are_named_against_the_common_one():
    records = [layer(0.125, path="h.0"), layer(0.125 / 2, path="h.1"), layer(0.25, d_k=16, path="h.2")]
    findings = judge(*records)
    assert rules(findings) == [("scale-undeclared", "warning"), ("scale-differs-between-layers", "warning")]
    between = findings[1]
    assert (between.layer, between.layer_index) == ("h.1", 1)
    assert between.cause == "2 of 3 layers use 1/√dₖ, this one 0.5/√dₖ."
    assert rules(judge(*records[:2])) == rules(findings)  # of two, the usual one is taken for the common one
    declared = [{**record, "declared": record["measured"]} for record in records]
    assert judge(*declared) == []
    together = judge(layer(1.0, path="h.0"), layer(1.0, path="h.1"))
    assert rules(together) == [("scale-undeclared", "warning")] * 2


def test_every_rule_about_the_scale_says_so_in_its_name():
    records = [layer(1.0, declared=0.5), layer(0.2, path="h.1"), layer(0.125, path="h.2"), layer(0.125, path="h.3")]
    findings = judge(*records)
    assert {finding.rule for finding in findings} == {
        "scale-differs-from-declared",
        "scale-undeclared",
        "scale-differs-between-layers",
    }
    assert [finding.severity for finding in findings] == ["error", "warning", "warning"]


def test_the_index_of_a_layer_is_its_own_or_that_of_its_summary():
    summaries = {"h.0": set_head(), "h.1": set_head()}
    for known, index in (({"layer_index": 7}, 7), ({"layer_index": None}, 1), ({}, 1)):
        assert diagnose(summaries, scales=[layer(1.0, path="h.1", **known)])[0].layer_index == index


def test_a_scale_that_could_not_be_measured_is_passed_over():
    assert judge(layer(None, reason="a norm follows the projection"), layer(None, declared=0.5)) == []


def test_a_declared_scale_of_zero_has_no_ratio():
    finding = judge(layer(0.5, declared=0.0))[0]
    assert math.isinf(finding.evidence["ratio"])
    assert finding.as_json()["evidence"]["ratio"] is None


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"layer": "h.0"}, r"scales must be a sequence of records, one per layer, got dict"),
        ([3], r"scales\[0\] must be a mapping, got int"),
        ([{"layer": "h.0", "d_k": 4}], r"scales\[0\] must have layer, measured and d_k, got none of \['measured'\]"),
        ([layer(0.5, d_k=0)], r"d_k of scales\[0\] must be at least 1, got 0"),
        ([layer([0.5, 0.25])], r"measured of scales\[0\] must be a number or None, got list"),
        ([layer(math.nan)], r"measured of scales\[0\] must be finite, got nan"),
        ([layer(0.5, declared=math.inf)], r"declared of scales\[0\] must be finite, got inf"),
    ],
)
def test_records_that_cannot_be_read_say_why(scales, message):
    with pytest.raises(SqrtdkError, match=message):
        diagnose({}, scales=scales)
