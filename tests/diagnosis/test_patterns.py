"""Patterns of heads: each named from both sides of its threshold, in their order, and never without enough data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heads_of_models import fresh_heads, head_at_offset, set_head, sink_head
from sqrtdk import HeadSummary, SqrtdkError, attention
from sqrtdk.diagnosis.patterns import NOT_ENOUGH_DATA, has_enough_data, pattern_of, patterns, rows_that_see


@pytest.mark.parametrize(
    ("offset", "name"),
    [(-1, "previous"), (0, "self"), (1, "next"), (-3, "offset −3"), (5, "offset +5"), (-64, "offset −64")],
)
def test_one_offset_in_most_rows_is_named(offset, name):
    summary = head_at_offset(offset, length=400)
    assert summary["entropy_ratio"].mean[0] < 1e-10
    assert pattern_of(summary, 0) == name


def test_offsets_that_are_not_told_apart_are_no_offset():
    assert pattern_of(head_at_offset(-65, length=400), 0) == "other"
    assert pattern_of(head_at_offset(90, length=400), 0) == "other"


@pytest.mark.parametrize("key", [0, 7, 319])
def test_one_key_for_all_rows_is_a_sink_wherever_it_is(key):
    assert patterns(sink_head(key=key)) == ["fixed key", "fixed key"]


@pytest.mark.parametrize(("sharpness", "name"), [(0.1, "broad"), (2.0, "other"), (30.0, "other")])
def test_random_heads_are_broad_or_look_at_content(sharpness, name):
    assert patterns(fresh_heads(0, sharpness=sharpness, causal=False)) == [name, name]


def test_each_threshold_from_both_sides():
    rows = np.arange(1200)
    elsewhere = np.random.default_rng(1).permutation(1200) + 5000
    assert pattern_of(set_head(ratio=0.95), 0) == "broad"
    assert pattern_of(set_head(ratio=0.9499), 0) == "other"
    assert pattern_of(set_head(rows=1200, max_key=np.where(rows < 400, rows + 1, elsewhere)), 0) == "next"
    assert pattern_of(set_head(rows=1200, max_key=np.where(rows < 399, rows + 1, elsewhere)), 0) == "other"
    assert pattern_of(set_head(rows=1200, max_key=np.where(rows < 720, 3, elsewhere)), 0) == "fixed key"
    assert pattern_of(set_head(rows=1200, max_key=np.where(rows < 719, 3, elsewhere)), 0) == "other"


@pytest.mark.parametrize(("others", "name"), [(200, "next"), (201, "other"), (399, "other")])
def test_an_offset_is_named_if_it_leads_by_far(others, name):
    rows = np.arange(1200)
    max_key = np.where(rows < 800, rows + 1, np.where(rows < 800 + others, rows + 2, rows + 5000))
    summary = set_head(rows=1200, max_key=max_key)
    assert summary.max_keys.offset_share(1)[0] == 2 / 3
    assert pattern_of(summary, 0) == name


def test_a_share_a_hair_below_any_number_is_named_by_its_lead():
    """Of MiniLM's sharpest head 79% of rows look at the token before, and 0.4% at the next offset."""
    rows = np.arange(1000)
    for before in (500, 600, 700, 790, 800, 801, 900):
        max_key = np.where(rows < before, rows - 1, np.where(rows % 5, rows + 5000, rows + rows % 60))
        assert pattern_of(set_head(rows=1000, max_key=max_key), 0) == "previous", before


def test_a_sink_with_more_rows_than_an_offset_is_a_sink():
    rows = np.arange(1000)
    offset_or_key = np.where(rows < 340, rows + 1, 3)
    summary = set_head(rows=1000, max_key=offset_or_key)
    assert summary.max_keys.offset_share(1)[0] >= 0.34
    assert summary.max_keys.commonest_share[0] > 0.65
    assert pattern_of(summary, 0) == "fixed key"


@pytest.mark.parametrize("length", [40, 64, 300])
def test_chance_names_no_offset(length):
    for seed in range(4):
        batch = -(-400 // length)
        names = patterns(fresh_heads(seed, heads=4, batch=batch, length=length, sharpness=6.0))
        assert set(names) <= {"other", NOT_ENOUGH_DATA}


def test_the_first_match_counts():
    to_previous = np.arange(300) - 1
    assert pattern_of(set_head(ratio=0.96, max_key=to_previous), 0) == "broad"
    assert pattern_of(set_head(ratio=0.96, max_key=3), 0) == "broad"
    both = set_head(max_key=np.arange(300) + 1)
    for _ in range(4):  # short sequences with a sink each: in the mean of sequences it is common, among rows it is not
        both = both.merge(set_head(rows=10, max_key=200))
    assert both.max_keys.commonest_share[0] > 0.7
    assert pattern_of(both, 0) == "next"


def test_enough_data_from_both_sides():
    assert pattern_of(set_head(rows=256, visible_keys=32), 0) == "other"
    assert pattern_of(set_head(rows=255, visible_keys=32), 0) == NOT_ENOUGH_DATA
    assert pattern_of(set_head(rows=256, visible_keys=31), 0) == NOT_ENOUGH_DATA
    halves = set_head(rows=128, visible_keys=32)
    assert not has_enough_data(halves)[0]
    assert has_enough_data(halves.merge(halves))[0]


def test_without_two_rows_in_a_sequence_a_sink_cannot_be_told_from_content():
    q = np.random.default_rng(0).standard_normal((300, 1, 1, 8))
    k = np.random.default_rng(1).standard_normal((300, 1, 64, 8))
    decoding = HeadSummary.of(attention(q, k, k).statistics)
    assert has_enough_data(decoding)[0]
    assert pattern_of(decoding, 0) == NOT_ENOUGH_DATA


def test_without_positions_there_is_no_offset():
    assert pattern_of(set_head(max_key=np.arange(300) - 1, positions=False), 0) == "other"
    assert pattern_of(set_head(max_key=np.arange(300) - 1), 0) == "previous"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(visible=st.lists(st.integers(0, 70), min_size=1, max_size=80), least=st.integers(0, 33))
def test_rows_with_so_many_keys_are_counted_exactly(visible, least):
    summary = set_head(rows=len(visible), visible_keys=visible)
    assert rows_that_see(summary, least).tolist() == [sum(keys >= least for keys in visible)]


def test_wrong_arguments_say_what_came():
    with pytest.raises(SqrtdkError, match=r"head must be from 0 to 0, got 1"):
        pattern_of(set_head(), 1)
    with pytest.raises(SqrtdkError, match=r"head must be an integer, got True"):
        pattern_of(set_head(), True)
    with pytest.raises(SqrtdkError, match=r"summary must be a HeadSummary, got dict"):
        patterns({})
    with pytest.raises(SqrtdkError, match=r"keys must lie in 0 to 33, .* got 34"):
        rows_that_see(set_head(), 34)
