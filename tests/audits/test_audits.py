"""The record of an audit: strict JSON both ways, sentences from its numbers, HTML that escapes, comparisons."""

import json
from dataclasses import replace

import numpy as np
import pytest

from heads_of_models import fresh_heads, head_at_offset, sink_head
from sqrtdk import HeadSummary, SqrtdkError, attention
from sqrtdk.audits import Audit, AuditedHead, AuditedRows, AuditedScale, compare, read_shipped
from sqrtdk.audits.comparison import ScaleChange
from sqrtdk.audits.html import render_comparison
from sqrtdk.diagnosis.counterfactual import ScoreRow, counterfactual
from sqrtdk.diagnosis.findings import Finding, Threshold

HOSTILE = 'h.<script>alert(1)</script>&"quoted"'


def a_scale(layer="h.0", at=0, **known):
    measured = known.pop("measured", 0.25)
    return AuditedScale(
        **{
            "layer": layer,
            "layer_index": at,
            "declared": None,
            "declared_by": None,
            "effective": measured,
            "at_the_call": measured,
            "before_the_call": 1.0,
            "d_k": 16,
            "normalised": False,
            "softcap": None,
            "how": "exact",
            "reason": None,
            "dtype": "float32",
            "logits_dtype": "float32",
            **known,
        }
    )


def a_finding(layer="h.0", at=0, severity="error", **evidence):
    threshold = Threshold(1e-3, "<b>source</b>")
    return Finding("scale-differs", severity, layer, at, None, evidence, threshold, "<i>cause</i>", "<u>remedy</u>")


def an_audit(first="h.0", **known):
    heads = AuditedHead.of(first, 0, head_at_offset(-1)) + AuditedHead.of("h.1", 1, sink_head())
    return Audit(
        **{
            "heads": heads,
            "findings": [a_finding(first)],
            "scale": [a_scale(first), a_scale("h.1", 1)],
            "unattributed": 0,
            "unattributed_where": [],
            "padding": "unknown",
            "about": {"model": "Model", "notes": []},
            **known,
        }
    )


def test_the_keys_of_the_json_are_the_agreed_ones():
    content = an_audit(unattributed=2, unattributed_where=["router"]).as_json()
    agreed = {"heads", "findings", "scale", "unattributed", "unattributed_where", "padding"}
    assert content.keys() == agreed | {"about"}
    head = {"layer", "layer_index", "head", "pattern", "saturation_index", "entropy_ratio", "max_weight", "max_logit"}
    assert head <= content["heads"][0].keys()
    finding = {"rule", "severity", "layer", "layer_index", "head", "evidence", "cause", "remedy", "threshold"}
    assert content["findings"][0].keys() == finding
    assert content["findings"][0]["threshold"].keys() == {"value", "source"}
    scale = {"layer", "layer_index", "declared", "measured", "at_the_call", "before_the_call", "d_k", "normalised"}
    assert scale | {"softcap", "how", "reason"} <= content["scale"][0].keys()
    assert (content["unattributed"], content["unattributed_where"]) == (2, ["router"])


def test_an_audit_round_trips_through_strict_json():
    with np.errstate(invalid="ignore"):
        lost = HeadSummary.of(attention(np.full((1, 4, 8), np.nan), *np.zeros((2, 1, 4, 8))).statistics)
    audit = an_audit(
        heads=AuditedHead.of("h.0", 0, lost),
        findings=[a_finding(ratio=np.inf, heads=[1, 2])],
        scale=[a_scale(measured=np.nan, reason="it is a tensor")],
        about={"model": "Model", "drawn": float("nan"), "sizes": (1, 2)},
    )
    text = json.dumps(audit.as_json(), allow_nan=False)
    assert Audit.from_json(json.loads(text)) == audit
    assert audit.heads[0].entropy_ratio is None
    assert audit.scale[0].measured is None
    assert audit.findings[0].evidence == {"ratio": None, "heads": [1, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("scale"), "without scale"),
        (lambda c: c["about"].update(schema_version=99), "schema version 1, got 99"),
        (lambda c: c["about"].update(kind="ablation"), "must be an audit"),
        (lambda c: c["heads"][0].pop("pattern"), "pattern"),
    ],
)
def test_other_content_is_refused_as_an_audit(change, message):
    content = json.loads(json.dumps(an_audit().as_json()))
    change(content)
    with pytest.raises(SqrtdkError, match=message):
        Audit.from_json(content)
    with pytest.raises(SqrtdkError, match="content must be an audit as JSON, got list"):
        Audit.from_json([])


def test_heads_have_the_numbers_of_their_summary():
    summary = head_at_offset(-3)
    (head, *_) = AuditedHead.of("h.0", 4, summary)
    assert (head.layer_index, head.head, head.pattern, head.offset) == (4, 0, "offset −3", -3)
    assert head.offset_share == pytest.approx(summary.max_keys.offset_share(-3)[0])
    assert head.entropy_ratio == pytest.approx(summary["entropy_ratio"].mean[0])
    assert head.max_logit == summary["max_logit"].largest[0]
    assert head.rows_judged <= head.rows == summary.rows_seen[0]


@pytest.mark.parametrize(
    ("scales", "line"),
    [
        ([a_scale()], "The scale is 1/√dₖ in the only layer, which is 0.25 at dₖ 16, not declared."),
        (
            [
                a_scale(declared=0.25, declared_by="config.scale"),
                a_scale("h.1", 1, declared=0.25, declared_by="config.scale"),
            ],
            "The scale is 1/√dₖ in both layers, which is 0.25 at dₖ 16, as declared by config.scale.",
        ),
        ([a_scale(measured=0.1)], "The scale is 0.1 in the only layer at dₖ 16, not declared."),
        (
            [a_scale(measured=1.0, normalised=True)],
            "The scale is 1 in the only layer at dₖ 16, not declared; q or k",
        ),
        ([a_scale(measured=0.1, declared=0.25)], "not as declared (0.25 by the model)"),
        ([a_scale(measured=None, reason="it varies")], "The scale of the only layer is unknown: it varies."),
        ([a_scale(), a_scale("h.1", 1, measured=1 / 16)], "The scale is 1/dₖ in 1 of 2 layers (h.1), which is 0.0625"),
        ([a_scale(measured=0.2513)], "The scale is 0.2513 in"),
        ([a_scale(measured=0.2513, dtype="bfloat16")], "The scale is 1/√dₖ in"),
    ],
)
def test_the_scale_has_a_sentence(scales, line):
    assert any(line in sentence for sentence in an_audit(scale=scales).reading)


def test_a_printed_audit_is_short_and_lists_calls_not_understood():
    audit = an_audit(unattributed=3, unattributed_where=["a", "b", "c", "d"], findings=[])
    assert len(repr(audit).splitlines()) <= 9
    assert "\nh.0   0.00p\n" in repr(audit)
    assert "No problem was found." in repr(audit)
    assert "Not understood: 3 calls that look like attention, in a, b, c and 1 more." in repr(audit)
    few = an_audit(heads=AuditedHead.of("h.0", 0, fresh_heads(0, length=40)))
    assert "Not enough data for the pattern of" in repr(few)
    assert "Findings: 1 error." in repr(few)
    (finding,) = few.findings
    assert repr(few).endswith(f"{finding!r}\n→ {finding.remedy}")
    assert finding.cause in repr(finding)
    assert (few.worst, audit.worst) == ("error", None)


def test_what_was_not_measured_is_not_said_to_be_checked():
    nothing = an_audit(heads=[], findings=[], scale=[])
    assert "Nothing was measured, so nothing was checked." in repr(nothing)
    known, unknown = a_scale("h.0"), a_scale("h.1", 1, measured=None)
    assert "No problem was found. Scale, masks, NaN" in repr(an_audit(findings=[], scale=[known]))
    assert "The scale of 1 of 2 layers, masks, NaN" in repr(an_audit(findings=[], scale=[known, unknown]))
    assert "No problem was found. Masks, NaN" in repr(an_audit(findings=[], scale=[unknown]))


def test_findings_beyond_the_last_shown_are_counted():
    (finding,) = an_audit().findings
    assert repr(an_audit(findings=[finding] * 12)).count("→ ") == 12
    assert repr(an_audit(findings=[finding] * 13)).endswith("1 more finding: `findings` has them all.")


def test_names_are_data_in_html():
    scales = [a_scale(HOSTILE, declared=0.3, declared_by="<b>config</b>", reason="<em>")]
    audit = an_audit(HOSTILE, scale=scales, unattributed=1, unattributed_where=[HOSTILE], padding="<p>")
    audit = replace(audit, about={"model": "<M>", "unattributed_why": {HOSTILE: "<why>"}, "notes": ["<note>"]})
    pages = [audit._repr_html_(), render_comparison(compare(audit, an_audit(findings=[])))]
    for page in pages:
        for forbidden in ("<script", "<b>source", "<b>config", "<i>", "<u>", "<em>", "<M>", "<why>", "<note>", "http"):
            assert forbidden not in page
    assert "h.&lt;script&gt;" in pages[0]
    assert 'title="' in pages[0]


def test_comparing_names_heads_findings_and_scales_that_differ():
    before = an_audit(scale=[a_scale(), a_scale("h.1", 1)])
    later = replace(
        before,
        heads=AuditedHead.of("h.0", 0, fresh_heads(0)) + list(before.heads[len(before.layers["h.0"]) :]),
        findings=[a_finding("h.1", 1)],
        scale=[a_scale(measured=1.0), a_scale("h.1", 1)],
    )
    comparison = compare(later, before)
    first = comparison.changes[0]
    assert (first.layer, first.pattern_before, first.has_new_pattern) == ("h.0", "previous", True)
    assert first.entropy_ratio_change == pytest.approx(first.entropy_ratio - first.entropy_ratio_before)
    assert [one.layer for one in comparison.new] == ["h.1"]
    assert [one.layer for one in comparison.gone] == ["h.0"]
    assert comparison.scale_changes == [ScaleChange("h.0", "1/√dₖ", "1")]
    assert "The scale of h.0 was 1/√dₖ and is 1." in comparison.reading
    assert json.loads(json.dumps(comparison.as_json(), allow_nan=False))["new"]
    assert compare(before, before).new == compare(before, before).gone == []
    assert not any(change.has_new_pattern for change in compare(before, before).changes)
    with pytest.raises(SqrtdkError, match="before must be an Audit, got dict"):
        compare(before, {})


def test_layers_of_another_architecture_are_named():
    other = an_audit("layers.0")
    comparison = compare(other, an_audit())
    assert (comparison.only_now, comparison.only_before) == (["layers.0"], ["h.0"])
    assert any("Only now: 1 layer (layers.0)." in line for line in comparison.reading)


def test_rows_of_a_head_are_its_histogram_in_few_bins():
    q, k, v = np.random.default_rng(3).standard_normal((3, 2, 4, 50, 8)) * 2.0
    summary = HeadSummary.of(attention(q, k, v).statistics)
    scores = q[0] @ k[0].transpose(0, 2, 1) / np.sqrt(8)
    kept = {"a": [ScoreRow(scores[:, row]) for row in range(5)]}
    varied = counterfactual(kept, temperatures=[0.5, 1.0, 2.0]).variations
    rows = AuditedRows.of("a", summary, varied)
    assert [one.head for one in rows] == [0, 1, 2, 3]
    for head, one in enumerate(rows):
        for name, histogram in one.histograms.items():
            moments = summary[name]
            edges, counts = histogram["edges"], histogram["counts"]
            assert len(edges) == len(counts) + 1 <= 17
            assert edges == sorted(edges)
            assert sum(counts) == moments.count[head] == 100
            assert (edges[0], edges[-1]) == pytest.approx((moments.least[head], moments.largest[head]), rel=1e-5)
        unchanged = next(own for own in varied if (own.head, own.change) == (head, "none"))
        assert one.temperatures == [0.5, 1.0, 2.0]
        assert one.entropy_ratio[1] == pytest.approx(unchanged.entropy_ratio, rel=1e-5)
        assert one.entropy_ratio == sorted(one.entropy_ratio)


def test_rows_of_one_value_have_one_bin():
    (one,) = AuditedRows.of(
        "a", HeadSummary.of(attention(np.zeros((3, 2)), np.ones((4, 2)), np.ones((4, 2))).statistics)
    )
    assert one.histograms["entropy_ratio"] == {"edges": [1.0, 1.0], "counts": [3]}
    assert (one.temperatures, one.entropy_ratio) == ([], [])


def test_rows_of_the_shipped_audit_are_all_there_and_round_trip():
    minilm = read_shipped("minilm")
    assert [(one.layer, one.head) for one in minilm.rows] == [(head.layer, head.head) for head in minilm.heads]
    for one, head in zip(minilm.rows, minilm.heads, strict=True):
        assert sum(one.histograms["entropy_ratio"]["counts"]) == head.rows
        assert one.entropy_ratio == sorted(one.entropy_ratio)
    assert Audit.from_json(json.loads(json.dumps(minilm.as_json()))) == minilm
    content = minilm.as_json()
    del content["rows"]
    assert Audit.from_json(content) == replace(minilm, rows=())


def test_the_spread_of_real_heads_is_split_and_read_from_the_numbers():
    from sqrtdk.exercises import spread

    shipped = read_shipped("minilm")
    record = spread(shipped)
    rows = record.tables["spread"]
    assert [row["std"] for row in rows] == sorted((row["std"] for row in rows), reverse=True)
    for row in rows:
        assert row["width"] * row["length"] * row["distinct"] * row["alignment"] == pytest.approx(row["std"], rel=1e-9)
    assert "The factor farthest from 1 is the lengths of q and k." in record.reading[-1]
    # Another head in front, and another factor is named.
    shared = {"std": 50.0, "width": 1.0, "length": 2.0, "distinct": 0.1, "alignment": 1.0}
    other = replace(shipped, heads=[replace(shipped.heads[0], spread=shared), *shipped.heads[1:]])
    assert "The factor farthest from 1 is what differs between keys." in spread(other).reading[-1]
    with pytest.raises(SqrtdkError, match="audit must hold heads whose spread is known, got none"):
        spread(replace(shipped, heads=[replace(head, spread=None) for head in shipped.heads]))
