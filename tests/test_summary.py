"""Head summaries: rows added up per head, merged in any split."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rows_of_noise import statistics_of_noise, take
from sqrtdk import AttentionStatistics, HeadSummary, SqrtdkError, attention
from sqrtdk.statistics import ROW_FIELDS
from sqrtdk.summary import BIN_EDGES, FARTHEST, SUMMARISED, Moments, heads
from sqrtdk.summary.heads import RowBlock, join_blocks, summarise
from sqrtdk.summary.in_kernel import summarise_rows
from sqrtdk.summary.moments import find_bins


@pytest.fixture(autouse=True, params=["kernel", "numpy"])
def computed_by(request, monkeypatch):
    """Every test runs with the kernel, which must be there, and without it."""
    if request.param == "numpy":
        monkeypatch.setattr(heads, "summarise_rows", lambda *arguments: None)
    else:
        compute = heads.summarise_rows

        def require(*arguments):
            found = compute(*arguments)
            assert found is not None
            return found

        monkeypatch.setattr(heads, "summarise_rows", require)
    return request.param


def entries_of(rows, at):
    """The rows of some batch entries."""
    return dataclasses.replace(rows, **{name: getattr(rows, name)[at] for name in ROW_FIELDS})


def assert_is_summary_of_all(merged, whole):
    """Counts, bins and extremes exactly, sums to 1e-12."""
    assert tuple(whole.moments) == tuple(merged.moments) == SUMMARISED
    for one, other in ((whole.rows_seen, merged.rows_seen), (whole.rows_in_all, merged.rows_in_all)):
        np.testing.assert_array_equal(one, other)
    for name in SUMMARISED:
        one, other = whole[name], merged[name]
        for exact in ("count", "left_out", "histogram", "least", "largest"):
            np.testing.assert_array_equal(getattr(one, exact), getattr(other, exact), err_msg=name)
        np.testing.assert_allclose(other.mean, one.mean, rtol=1e-12, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(other.m2, one.m2, rtol=1e-12, atol=1e-25, err_msg=name)
        np.testing.assert_array_equal(other.quantile(0.5), one.quantile(0.5), err_msg=name)
    np.testing.assert_array_equal(merged.max_keys.offsets, whole.max_keys.offsets)
    np.testing.assert_array_equal(merged.max_keys.sequences, whole.max_keys.sequences)
    np.testing.assert_allclose(merged.max_keys.share_sum, whole.max_keys.share_sum, rtol=1e-12)
    np.testing.assert_allclose(merged.max_keys.commonest_share, whole.max_keys.commonest_share, rtol=1e-12)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    parts_of=st.lists(st.integers(0, 3), min_size=0, max_size=9),
    queries=st.integers(0, 70),
    sharpness=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    order=st.permutations(range(4)),
    balanced=st.booleans(),
)
def test_summaries_merge_in_any_split_and_order(parts_of, queries, sharpness, order, balanced):
    rows = statistics_of_noise(1, len(parts_of), queries, sharpness)
    parts = [HeadSummary.of(entries_of(rows, np.array(parts_of, int) == part)) for part in order]
    if balanced:
        merged = parts[0].merge(parts[1]).merge(parts[2].merge(parts[3]))
    else:
        merged = parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3])
    assert_is_summary_of_all(merged, HeadSummary.of(rows))


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
    result = Moments.of(np.array([values])).quantile(probability)[0]
    rank = max(math.ceil(probability * len(values)), 1)
    expected = sorted(values)[rank - 1]
    assert abs(result - expected) <= max(0.03 * abs(expected), 1e-3)
    assert min(values) <= result <= max(values)


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
    assert summary.write_largest("max_logit") == ["–", "–"]
    assert "0 of 0 rows" in repr(summary)


def test_summaries_are_equal_if_all_their_numbers_are():
    one, other = (HeadSummary.of(statistics_of_noise(seed, 2, 4)) for seed in (0, 1))
    assert one == HeadSummary.of(statistics_of_noise(0, 2, 4))
    assert one["entropy"] == HeadSummary.of(statistics_of_noise(0, 2, 4))["entropy"]
    assert one != other
    assert one["entropy"] != other["entropy"]
    assert one != dataclasses.replace(one, rows_in_all=one.rows_in_all + 1)
    assert one != dataclasses.replace(one, max_keys=other.max_keys)
    assert one != 3
    assert one["entropy"] != 3


def choose(max_key, first_position=0, visible=100):
    """Statistics `[..., H, L]` of rows whose most attended keys are given; −1 sees nothing."""
    max_key = np.array(max_key)
    counts = np.stack([np.where(max_key >= 0, visible, 0), max_key])
    return AttentionStatistics.from_blocks(counts, np.zeros((11, *max_key.shape)), first_position=first_position)


def test_offsets_are_counted_one_by_one_and_far_ones_together():
    keys = HeadSummary.of(choose([[0, 0, 1, 2, 99, 4], [64, 66, 67, 3, 4, -1]])).max_keys
    assert keys.offsets.shape == (2, 2 * FARTHEST + 3)
    counted = [{at - FARTHEST - 1: int(n) for at, n in enumerate(row) if n} for row in keys.offsets]
    assert counted == [{0: 1, -1: 4, 65: 1}, {64: 1, 65: 2, 0: 2}]
    assert keys.rows.tolist() == [6, 5]
    np.testing.assert_array_equal(keys.offset_share(-1), [4 / 6, 0])
    np.testing.assert_array_equal(keys.offset_share(64), [0, 1 / 5])
    far = HeadSummary.of(choose([[0, 0, 0]], first_position=63)).max_keys.offsets[0]
    assert far.nonzero()[0].tolist() == [0, 1, 2]  # 65 back, 64, 63
    assert far.sum() == 3


def test_offsets_of_a_sample_and_of_shifted_queries_are_from_their_positions():
    rows = choose([[1, 2, 3, 4, 5, 6]], first_position=2)
    np.testing.assert_array_equal(HeadSummary.of(rows).max_keys.offset_share(-1), [1.0])
    np.testing.assert_array_equal(HeadSummary.of(take(rows, [0, 3, 5])).max_keys.offset_share(-1), [1.0])
    for distant in (2**61, -(2**61)):
        bins = HeadSummary.of(choose([[1, 2]], first_position=distant)).max_keys.offsets[0]
        assert bins[0 if distant > 0 else -1] == 2


def test_without_common_positions_no_offset_is_counted():
    keys = HeadSummary.of(choose([[1, 1, 3, -1]], first_position=None)).max_keys
    assert keys.offsets.sum() == 0
    assert np.isnan(keys.offset_share(0)).all()
    np.testing.assert_array_equal(keys.commonest_share, [2 / 3])
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    assert HeadSummary.of(attention(q[:, :3], k, v).statistics).max_keys.rows.tolist() == [0, 0]
    assert HeadSummary.of(attention(q, k, v).statistics).max_keys.rows.tolist() == [5, 5]


def test_the_share_on_the_most_attended_key_is_per_sequence():
    batch = [  # two sequences, two heads
        [[0, 0, 0, 1], [2, 2, -1, 3]],
        [[3, 3, 1, 1], [-1, -1, -1, 0]],
    ]
    keys = HeadSummary.of(choose(batch)).max_keys
    assert keys.sequences.tolist() == [2, 1]  # a sequence with one row says nothing
    np.testing.assert_allclose(keys.share_sum, [3 / 4 + 2 / 4, 2 / 3], rtol=1e-15)
    np.testing.assert_allclose(keys.commonest_share, [5 / 8, 2 / 3], rtol=1e-15)
    nothing = HeadSummary.of(choose([[-1, -1]])).max_keys
    assert (nothing.sequences.tolist(), np.isnan(nothing.commonest_share).all()) == ([0], True)
    assert "–" in repr(nothing)


def test_rows_that_are_not_finite_have_no_most_attended_key():
    rows = choose([[0, 1, 2]])
    entropy = np.array([[0.0, np.nan, 0.0]])
    keys = HeadSummary.of(dataclasses.replace(rows, entropy=entropy)).max_keys
    assert keys.rows.tolist() == [2]
    np.testing.assert_array_equal(keys.commonest_share, [1 / 2])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(keys=st.lists(st.lists(st.integers(-1, 6), min_size=5, max_size=5), min_size=1, max_size=4))
def test_shares_and_offsets_against_counting(keys):
    result = HeadSummary.of(choose([[line] for line in keys])).max_keys
    seen = [[key for key in line if key >= 0] for line in keys]
    shares = [max(line.count(key) for key in line) / len(line) for line in seen if len(line) > 1]
    assert result.share_sum[0] == pytest.approx(sum(shares), rel=1e-14)
    apart = [key - i for line in keys for i, key in enumerate(line) if key >= 0]
    assert [int(n) for n in result.offsets[0, 57:74]] == [apart.count(offset) for offset in range(-8, 9)]


@pytest.mark.parametrize("offset", [65, -65, 1.0, True, "previous"])
def test_an_offset_without_a_bin_is_refused(offset):
    keys = HeadSummary.of(choose([[0, 1]])).max_keys
    with pytest.raises(SqrtdkError, match=r"offset must be (an integer|from -64 to 64), got "):
        keys.offset_share(offset)


def test_bins_are_those_of_a_search_among_the_edges():
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-6, 12, 20000)
    near = [np.nextafter(BIN_EDGES, -np.inf), BIN_EDGES, np.nextafter(BIN_EDGES, np.inf)]
    odd = [0.0, -0.0, 5e-324, -5e-324, 1e308, -1e308]
    for values in (sizes, np.concatenate([sizes, -sizes, *near, odd])):
        np.testing.assert_array_equal(find_bins(values), np.searchsorted(BIN_EDGES, values, side="right"))
    assert find_bins(np.zeros((3, 0))).shape == (3, 0)


def test_blocks_are_summarised_together_as_each_alone():
    shapes = [(2, 7), (2, 7), (1, 300), (0, 5), (2, 7), (3, 1500)]  # small ones together, a large one by statistics
    rows = [statistics_of_noise(seed, *shape) for seed, shape in enumerate(shapes)]
    rows[1] = dataclasses.replace(rows[1], first_position=None)
    together = summarise([RowBlock.of(one) for one in rows])
    assert together == [HeadSummary.of(one) for one in rows]
    assert summarise([]) == []


def test_calls_that_are_joined_are_those_merged():
    rows = [statistics_of_noise(seed, 2, queries) for seed, queries in enumerate([5, 1, 1, 5, 1])]
    rows = [dataclasses.replace(one, first_position=at) for at, one in enumerate(rows)]
    joined = join_blocks([RowBlock.of(one) for one in rows])
    assert [block.counts.shape for block in joined] == [(2, 4, 3, 5), (2, 6, 3, 1)]
    merged = [HeadSummary.of(rows[0]).merge(HeadSummary.of(rows[3]))]
    merged.append(HeadSummary.of(rows[1]).merge(HeadSummary.of(rows[2])).merge(HeadSummary.of(rows[4])))
    for one, other in zip(summarise(joined), merged, strict=True):
        assert_is_summary_of_all(one, other)


def test_padding_is_in_no_number_and_not_among_the_rows_left_out():
    present = np.arange(9) < np.array([[9], [4], [0]])
    rows = statistics_of_noise(3, 3, 9)
    parts = [HeadSummary.of(take(entries_of(rows, [at]), range(n))) for at, n in ((0, 9), (1, 4))]
    whole = parts[0].merge(dataclasses.replace(parts[1], rows_in_all=parts[1].rows_seen))
    (summary,) = summarise([RowBlock.of(rows, present)])
    assert_is_summary_of_all(summary, whole)
    assert summary.rows_seen.tolist() == [13] * 3
    sampled = RowBlock.of(take(rows, [0, 3, 6]), present[:, [0, 3, 6]])
    assert sampled.rows_in_all == 9 + 6  # of the second sequence 2 of 3 rows are there: 6 of its 9


def test_a_summary_takes_space_for_the_bins_that_are_filled():
    q = np.random.default_rng(0).standard_normal((1, 16, 32, 8))
    summary = HeadSummary.of(attention(q, q, q).statistics)
    assert summary["entropy"].histogram.shape == (16, 1923)
    assert len(pickle.dumps(summary)) < 150_000  # all bins of 15 statistics would be 3.7 MB
    for _ in range(40):
        summary = summary.merge(summary)
        assert len(pickle.dumps(summary)) < 150_000


def random_block(seed):
    """Return a block of any shape whose numbers are ordinary, extreme, NaN or infinite, with rows that see nothing."""
    rng = np.random.default_rng(seed)
    batch, number, queries = (int(size) for size in rng.integers([0, 1, 0], [5, 4, 40]))
    shape = (batch, number, queries)
    counts = np.stack([rng.integers(0, 30, shape), rng.integers(-1, 30, shape)])
    measures = rng.random((11, *shape)) * 10.0 ** rng.integers(-30, 30, (11, *shape))
    kind = rng.integers(0, 12 if seed % 2 else 300, measures.shape)
    for at, special in enumerate((np.nan, np.inf, -np.inf, 0.0, 1e308, -1e308, 5e-324)):
        measures[kind == at] = special
    if seed % 3 == 0:
        measures[3:6] = rng.random((3, *shape))  # weights as they are in attention
    present = rng.random((batch, queries)) < (0.7 if seed % 5 else 1.0)
    positions = rng.integers(-100, 100, (batch, queries)) if seed % 4 else None
    return RowBlock(counts, measures, positions, present, int(present.sum()))


@pytest.mark.parametrize("computed_by", ["kernel"], indirect=True)
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_counts_as_numpy_does(seed):
    block = random_block(seed)
    with np.errstate(all="ignore"):
        (own,) = summarise([block])
        (defined,) = heads._summarise_alike([block])
    assert own.max_keys == defined.max_keys
    np.testing.assert_array_equal(own.rows_seen, defined.rows_seen)
    for name in SUMMARISED:
        one, other = own[name], defined[name]
        for exact in ("count", "left_out"):
            np.testing.assert_array_equal(getattr(one, exact), getattr(other, exact), err_msg=name)
        for close in ("least", "largest"):  # logarithms may differ in their last bit
            np.testing.assert_allclose(getattr(one, close), getattr(other, close), rtol=1e-15, err_msg=name)
        apart = np.abs(one.histogram.cumsum(axis=-1) - other.histogram.cumsum(axis=-1)).sum()
        assert apart <= (2 if name in ("entropy_ratio", "saturation_index") else 0), name
        size = np.maximum(np.abs(other.largest), np.abs(other.least))
        some = (other.count > 0) & (size < 1e150)  # sums of squares of larger numbers overflow
        size = size[some]
        assert (np.abs(one.mean[some] - other.mean[some]) <= 1e-13 * size).all(), name
        assert (np.abs(one.m2[some] - other.m2[some]) <= 1e-12 * size**2 * other.count[some]).all(), name
        assert np.isnan(one.mean[other.count == 0]).all(), name


@pytest.mark.parametrize("computed_by", ["kernel"], indirect=True)
def test_threads_do_not_change_a_bit():
    block = RowBlock.of(statistics_of_noise(1, 5, 700))
    (one,), (three,) = summarise([block]), summarise([block], threads=3)
    assert one.max_keys == three.max_keys
    for name in SUMMARISED:
        for part in ("count", "mean", "m2", "least", "largest", "histogram"):
            assert getattr(one[name], part).tobytes() == getattr(three[name], part).tobytes(), (name, part)


@pytest.mark.parametrize("computed_by", ["numpy"], indirect=True)
def test_keys_far_away_are_counted_without_the_kernel():
    rows = statistics_of_noise(0, 2, 9)
    far = dataclasses.replace(rows, max_key=rows.max_key + (1 << 40))
    assert summarise_rows(SUMMARISED, FARTHEST, *RowBlock.of(far)[:4]) is None
    assert summarise_rows(SUMMARISED, FARTHEST, *RowBlock.of(rows)[:4]) is not None
    assert HeadSummary.of(far).max_keys.offsets[:, -1].sum() == rows.max_key.size
