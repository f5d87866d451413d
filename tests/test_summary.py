"""Head summaries: rows added up per head, merged in any split."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rows_of_noise import statistics_of_noise, take
from sqrtdk import AttentionStatistics, HeadSummary, SqrtdkError, attention
from sqrtdk.statistics import BIN_EDGES, ROW_FIELDS, SUMMARISED, Moments


def join(parts):
    """Rows of several batches as one `AttentionStatistics`."""
    return AttentionStatistics(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in ROW_FIELDS})


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=2, max_size=5),
    queries=st.integers(1, 6),
    sharpness=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
)
def test_merged_summaries_equal_the_whole(sizes, queries, sharpness):
    parts = [statistics_of_noise(seed, size, queries, sharpness) for seed, size in enumerate(sizes)]
    whole = HeadSummary.of(join(parts))
    merged = HeadSummary.of(parts[0])
    for part in parts[1:]:
        merged = merged.merge(HeadSummary.of(part))
    assert tuple(whole.moments) == SUMMARISED
    for name in SUMMARISED:
        one, other = whole[name], merged[name]
        for exact in ("count", "left_out", "histogram", "least", "largest"):
            np.testing.assert_array_equal(getattr(one, exact), getattr(other, exact), err_msg=name)
        np.testing.assert_allclose(other.mean, one.mean, rtol=1e-12, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(other.m2, one.m2, rtol=1e-12, atol=1e-25, err_msg=name)
        np.testing.assert_array_equal(other.quantile(0.5), one.quantile(0.5), err_msg=name)


def test_a_summary_is_the_mean_and_variance_of_each_heads_rows():
    rows = statistics_of_noise(5, 4, 7)
    summary = HeadSummary.of(rows)
    assert summary.heads == 3
    for head in range(3):
        values = rows.entropy[:, head].ravel()
        assert summary["entropy"].count[head] == 28
        assert summary["entropy"].mean[head] == pytest.approx(values.mean(), rel=1e-13)
        assert summary["entropy"].variance[head] == pytest.approx(values.var(), rel=1e-13)
        assert summary["entropy"].largest[head] == values.max()
        ratio = summary["entropy_ratio"]  # the first query sees one key and has no ratio
        assert (ratio.count[head], ratio.left_out[head]) == (24, 4)


def test_rows_that_see_nothing_are_counted_and_left_out():
    q, k, v = np.random.default_rng(1).standard_normal((3, 2, 6, 4))
    mask = np.ones((6, 6), bool)
    mask[:2] = False
    rows = attention(q, k, v, mask=mask).statistics
    summary = HeadSummary.of(rows)
    for name in SUMMARISED:
        left_out = [0, 0] if name == "visible_keys" else [2, 2]
        assert summary[name].left_out.tolist() == left_out, name
    np.testing.assert_allclose(summary["entropy"].mean, rows.entropy[:, 2:].mean(axis=1), rtol=1e-14)
    nothing = HeadSummary.of(attention(q, k, v, mask=np.zeros((6, 6), bool)).statistics)
    assert np.isnan(nothing["entropy"].mean).all()
    assert np.isnan(nothing["entropy"].variance).all()
    assert np.isnan(nothing["entropy"].quantile(0.5)).all()
    again = nothing.merge(summary)
    np.testing.assert_array_equal(again["entropy"].mean, summary["entropy"].mean)


def test_summaries_of_no_rows():
    for shape in [(2, 3, 0, 4), (0, 3, 5, 4)]:
        q = np.zeros(shape)
        summary = HeadSummary.of(attention(q, q, q).statistics)
        assert summary["entropy"].count.tolist() == [0, 0, 0]
    assert HeadSummary.of(attention(np.zeros((2, 4)), np.zeros((2, 4)), np.zeros((2, 4))).statistics).heads == 1


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    values=st.lists(st.floats(-1e8, 1e8), min_size=1, max_size=60),
    probability=st.sampled_from([0.0, 0.05, 0.25, 0.5, 0.9, 1.0]),
)
def test_quantiles_are_within_the_bin_of_the_true_one(values, probability):
    found = Moments.of(np.array([values])).quantile(probability)[0]
    rank = max(math.ceil(probability * len(values)), 1)
    expected = sorted(values)[rank - 1]
    assert abs(found - expected) <= max(0.03 * abs(expected), 1e-3)
    assert min(values) <= found <= max(values)


def test_bins_are_fixed_and_symmetric():
    assert len(BIN_EDGES) == 1922
    np.testing.assert_array_equal(BIN_EDGES, -BIN_EDGES[::-1])
    assert (np.diff(BIN_EDGES) > 0).all()


def test_a_wrong_summary_call_says_what_came():
    summary = HeadSummary.of(statistics_of_noise(0, 1, 2))
    with pytest.raises(SqrtdkError, match=r"statistics must be AttentionStatistics, got ndarray"):
        HeadSummary.of(np.zeros(3))
    with pytest.raises(SqrtdkError, match=r"unknown row statistic 'entropie'; known: .*entropy"):
        summary["entropie"]
    with pytest.raises(SqrtdkError, match=r"probability must lie in \[0, 1\], got 1.5"):
        summary["entropy"].quantile(1.5)
    other = HeadSummary.of(attention(*np.zeros((3, 2, 2, 4))).statistics)
    with pytest.raises(SqrtdkError, match=r"other must have 3 heads, got 2"):
        summary.merge(other)


def test_the_summary_of_a_sample_marks_its_maximum_as_a_lower_bound():
    rows = statistics_of_noise(0, 2, 8)
    whole, some = HeadSummary.of(rows), HeadSummary.of(take(rows, [1, 4, 6]))
    assert (whole.rows_seen.tolist(), whole.rows_in_all.tolist(), whole.is_sample) == ([16] * 3, [16] * 3, False)
    assert (some.rows_seen.tolist(), some.rows_in_all.tolist(), some.is_sample) == ([6] * 3, [16] * 3, True)
    assert (some["max_logit"].largest <= whole["max_logit"].largest).all()
    assert some.write_largest("max_logit") == [f"≥ {x:.3g}" for x in some["max_logit"].largest]
    assert whole.write_largest("max_logit") == [f"{x:.3g}" for x in whole["max_logit"].largest]
    assert "3 heads, 6 of 16 rows each" in repr(some)
    assert repr(some).count("≥") == 3
    assert "≥" not in repr(whole)
    both = whole.merge(some)
    assert (both.rows_seen.tolist(), both.rows_in_all.tolist(), both.is_sample) == ([22] * 3, [32] * 3, True)


def test_a_sample_of_all_rows_is_no_sample():
    rows = statistics_of_noise(0, 2, 3)
    assert not HeadSummary.of(take(rows, [0, 1, 2])).is_sample


def test_a_summary_without_rows_prints_no_maximum():
    q = np.zeros((2, 0, 4))
    summary = HeadSummary.of(attention(q, q, q).statistics)
    assert summary.write_largest("max_logit") == ["-", "-"]
    assert "0 of 0 rows" in repr(summary)


def test_summaries_are_equal_if_all_their_numbers_are():
    one, other = (HeadSummary.of(statistics_of_noise(seed, 2, 4)) for seed in (0, 1))
    assert one == HeadSummary.of(statistics_of_noise(0, 2, 4))
    assert one["entropy"] == HeadSummary.of(statistics_of_noise(0, 2, 4))["entropy"]
    assert one != other
    assert one["entropy"] != other["entropy"]
    assert one != dataclasses.replace(one, rows_in_all=one.rows_in_all + 1)
    assert one != 3
    assert one["entropy"] != 3
