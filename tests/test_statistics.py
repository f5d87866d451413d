"""Row statistics against arbitrary precision, their bounds, and the summaries that merge."""

import copy
import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import exact_row
from sqrtdk import AttentionStatistics, HeadSummary, SqrtdkError, attention
from sqrtdk.statistics import BIN_EDGES, SUMMARISED, Moments, Sample

pytestmark = pytest.mark.usefixtures("backend")

FIELDS = (
    "logsumexp",
    "entropy",
    "max_weight",
    "tail_weight",
    "sum_p2",
    "sum_p3",
    "jacobian_trace",
    "jacobian_norm",
    "logit_variance",
)


def rows_of(logits, dtype=np.float64, queries=1):
    """Statistics of rows whose logits are given: dₖ = 1, q = 1, scale = 1, so k is the logits.

    More queries, all the same, take the kernel's loop for many rows.
    """
    k = np.atleast_2d(np.asarray(logits, dtype=dtype))[:, :, None]
    q = np.ones((k.shape[0], queries, 1), dtype)
    return attention(q, k, np.zeros((*k.shape[:2], 1), dtype), scale=1.0).statistics


def one_ulp(n, rng):
    return np.where(rng.random(n) < 0.5, 1000.0, np.nextafter(1000.0, 2000.0))


def with_peak(height, at):
    def build(n, rng):
        x = rng.standard_normal(n)
        x[at(n)] += height
        return x

    return build


ADVERSARIES = {
    "normal": lambda n, rng: rng.standard_normal(n),
    "constant": lambda n, rng: np.full(n, 0.1),
    "large mean": lambda n, rng: 1e6 + rng.standard_normal(n),
    "large negative mean": lambda n, rng: -1e8 + rng.standard_normal(n),
    "one ulp": one_ulp,
    "peak 25": with_peak(25.0, lambda n: n // 2),
    "peak 60": with_peak(60.0, lambda n: n - 1),
    "peak 300": with_peak(300.0, lambda n: n // 3),
    "sink at key 0": with_peak(12.0, lambda n: 0),
    "two equal peaks": lambda n, rng: np.where(np.arange(n) < 2, 40.0, rng.standard_normal(n)),
    "ramp": lambda n, rng: np.linspace(-50.0, 50.0, n),
    "steep ramp": lambda n, rng: np.arange(n)[::-1] * 1.0,
    "wild": lambda n, rng: 1e4 * rng.standard_normal(n),
    "huge": lambda n, rng: 1e30 * rng.standard_normal(n),
}


def assert_exact(logits, dtype=np.float64, queries=1):
    """The contract is 1e-6; float64 all the way gives better, and a loss of digits should show."""
    logits = np.asarray(logits).astype(dtype).astype(np.float64)
    rows, exact = rows_of(logits, dtype, queries), exact_row(logits)
    # Numbers below `least` need not be told from 0; for the norm squares of weights come into it. The distance of two
    # float32 logits is rounded itself, by up to 2⁻²⁴ of it, and what hangs on its exponential as much.
    apart = float(np.ptp(np.sort(logits)[-2:])) if len(logits) > 1 else 0.0
    relative, least = (1e-9, 1e-300) if dtype == np.float64 else (1e-6 + 2**-24 * apart, 1e-37)
    rounding = 1e-12 if dtype == np.float64 else 1e-6
    for name in FIELDS:
        found, expected = float(np.asarray(getattr(rows, name))[0, -1]), float(exact[name])
        smallest = math.sqrt(least) if "norm" in name else least
        # A cube carries three times the rounding of its weight.
        assert found == pytest.approx(expected, rel=(2 if "p3" in name else 1) * relative, abs=smallest), name
    # A mean may be zero by cancellation: its rounding is relative to the logits.
    spread = float(np.abs(logits).max())
    mean = pytest.approx(float(exact["logit_mean"]), rel=rounding, abs=0.2 * rounding * spread)
    assert float(rows.logit_mean[0, 0]) == mean
    assert float(rows.max_logit[0, 0]) == float(exact["max_logit"]) == logits[int(rows.max_key[0, 0])]
    assert int(rows.visible_keys[0, 0]) == len(logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", ADVERSARIES)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 127, 1024])
def test_statistics_are_those_of_arbitrary_precision(family, n):
    for dtype, queries in itertools.product((np.float64, np.float32), (1, 9)):
        assert_exact(ADVERSARIES[family](n, np.random.default_rng(n)), dtype, queries)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "n"),
    [
        ("normal", 20011),
        ("one ulp", 20011),
        ("large mean", 20011),
        ("peak 25", 20011),
        ("peak 60", 131072),
        ("one ulp", 131072),
        ("sink at key 0", 65536),
        ("ramp", 65536),
    ],
)
def test_long_rows_are_those_of_arbitrary_precision(family, n):
    assert_exact(ADVERSARIES[family](n, np.random.default_rng(n)))


@pytest.mark.parametrize("height", [1.0, 40.0, 46.0, 100.0, 300.0])
def test_one_hot_rows_keep_their_small_numbers(height):
    """1 − Σp² of a row that is one-hot but for e^−300 is 2e^−300, not 0."""
    rows, exact = rows_of([height, 0.0, 0.0]), exact_row([height, 0.0, 0.0])
    for name in ("jacobian_trace", "jacobian_norm", "entropy", "tail_weight"):
        assert float(np.asarray(getattr(rows, name))[0, 0]) == pytest.approx(float(exact[name]), rel=1e-12), name
        assert float(np.asarray(getattr(rows, name))[0, 0]) > 0


def assert_bounds(rows):
    n = rows.visible_keys.astype(np.float64)
    assert (rows.entropy >= 0).all()
    assert (rows.entropy <= np.log(n)).all()
    assert (rows.sum_p2 >= 1 / n).all()
    assert (rows.sum_p2 <= 1).all()
    assert (rows.logit_variance >= 0).all()
    assert (rows.score_variance >= 0).all()
    assert (rows.max_weight >= 1 / n).all()
    assert (rows.jacobian_trace >= 0).all()
    assert (rows.jacobian_trace <= 1 - 1 / n).all()
    assert (rows.effective_keys <= n).all()
    several = n > 1
    assert (rows.entropy_ratio[several] <= 1).all()


@pytest.mark.parametrize("family", ADVERSARIES)
def test_bounds_hold_to_the_last_bit(family):
    for n in (1, 2, 3, 5, 7, 10, 49, 127, 1000, 4099):
        rng = np.random.default_rng(n)
        assert_bounds(rows_of(np.stack([ADVERSARIES[family](n, rng) for _ in range(20)])))


def test_bounds_hold_for_nearly_uniform_rows():
    rng = np.random.default_rng(0)
    for n in range(1, 300):
        assert_bounds(rows_of(np.array([[1e-3], [1e-8], [1e-15], [0.0]]) * rng.standard_normal((4, n))))


def test_a_row_that_sees_nothing_has_the_documented_values():
    rows = attention(np.ones((1, 2)), np.ones((3, 2)), np.ones((3, 2)), mask=np.zeros(3, bool)).statistics
    zero = ("entropy", "tail_weight", "sum_p2", "sum_p3", "max_weight", "effective_keys", "jacobian_trace")
    assert all(getattr(rows, name)[0] == 0 for name in (*zero, "jacobian_norm", "sink_weight", "visible_keys"))
    assert rows.max_key[0] == -1
    assert all(getattr(rows, name)[0] == -np.inf for name in ("max_logit", "score_max", "logsumexp"))
    missing = ("logit_mean", "logit_variance", "score_variance", "entropy_ratio", "saturation_index")
    assert all(np.isnan(getattr(rows, name)[0]) for name in missing)


def test_one_key_has_no_ratio_and_no_index():
    rows = rows_of([3.0])
    assert np.isnan(rows.entropy_ratio)
    assert np.isnan(rows.saturation_index)
    assert (rows.entropy, rows.sum_p2, rows.logit_variance, rows.jacobian_norm) == (0, 1, 0, 0)


def test_derived_numbers_by_hand():
    rows = rows_of([math.log(6), math.log(3), math.log(1)])  # weights 0.6, 0.3, 0.1
    assert rows.shape == (1, 1)
    assert float(rows.sum_p2[0, 0]) == pytest.approx(0.46)
    assert float(rows.sum_p3[0, 0]) == pytest.approx(0.244)
    assert float(rows.effective_keys[0, 0]) == pytest.approx(1 / 0.46)
    assert float(rows.max_weight[0, 0]) == pytest.approx(0.6)
    assert float(rows.jacobian_trace[0, 0]) == pytest.approx(0.54)
    assert float(rows.jacobian_norm[0, 0]) == pytest.approx(math.sqrt(0.46 - 0.488 + 0.46**2))
    assert float(rows.entropy_ratio[0, 0]) == pytest.approx(0.8979457 / math.log(3), rel=1e-6)
    sigma = np.std([math.log(6), math.log(3), 0.0])
    assert float(rows.saturation_index[0, 0]) == pytest.approx(sigma / math.sqrt(2 * math.log(3)))


def statistics_of_noise(seed, batch, queries, sharpness=1.0):
    q, k, v = np.random.default_rng(seed).standard_normal((3, batch, 3, queries, 4))
    return attention(sharpness * q, k, v, causal=True).statistics


def join(parts):
    """Rows of several batches as one `AttentionStatistics`."""
    names = [item.name for item in dataclasses.fields(AttentionStatistics)]
    return AttentionStatistics(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


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


def test_rows_travel_between_processes_and_copies():
    rows = statistics_of_noise(0, 2, 3)
    for other in (pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows), dataclasses.replace(rows)):
        for item in dataclasses.fields(AttentionStatistics):
            np.testing.assert_array_equal(getattr(other, item.name), getattr(rows, item.name), err_msg=item.name)
    assert not hasattr(rows, "entropie")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.entropy = None


def sampled(rows, positions):
    """The rows at these query positions, as statistics that know it."""
    names = [item.name for item in dataclasses.fields(AttentionStatistics)]
    parts = [getattr(rows, name)[..., positions] for name in names]
    positions = np.array(positions)
    return AttentionStatistics.from_blocks(
        np.stack(parts[:2]), np.stack(parts[2:]), sample=Sample(positions, rows.shape[-1])
    )


def test_a_sample_tells_its_positions_and_how_many_rows_there_are():
    rows = statistics_of_noise(0, 2, 8)
    assert rows.sample is None
    some = sampled(rows, [1, 4, 6])
    assert some.sample.positions.tolist() == [1, 4, 6]
    assert some.sample.rows == 8
    np.testing.assert_array_equal(some.entropy_ratio, rows.entropy_ratio[..., [1, 4, 6]])
    for other in (pickle.loads(pickle.dumps(some)), copy.deepcopy(some), some.numpy()):
        assert other.sample.rows == 8
    assert rows.numpy() is rows


def test_the_summary_of_a_sample_marks_its_maximum_as_a_lower_bound():
    rows = statistics_of_noise(0, 2, 8)
    whole, some = HeadSummary.of(rows), HeadSummary.of(sampled(rows, [1, 4, 6]))
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
    assert not HeadSummary.of(sampled(rows, [0, 1, 2])).is_sample


def test_a_summary_without_rows_prints_no_maximum():
    q = np.zeros((2, 0, 4))
    summary = HeadSummary.of(attention(q, q, q).statistics)
    assert summary.write_largest("max_logit") == ["-", "-"]
    assert "0 of 0 rows" in repr(summary)
