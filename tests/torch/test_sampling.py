"""Sampled positions: one per stratum, uniform, the same everywhere, and no random stream moved."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sqrtdk import HeadSummary, SqrtdkError  # noqa: E402
from sqrtdk.torch import attention  # noqa: E402
from sqrtdk.torch.sampling import sample_positions  # noqa: E402

SIZES = [(0, 4), (1, 1), (1, 256), (3, 4), (4, 4), (5, 4), (7, 1), (97, 13), (256, 256), (257, 256), (1009, 256)]


@pytest.mark.parametrize(("rows", "count"), SIZES)
@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_there_is_one_position_in_each_stratum(rows, count, seed):
    result = sample_positions(rows, count, seed)
    n = min(rows, count)
    assert result.dtype == torch.int64
    assert result.shape == (n,)
    for i, position in enumerate(result.tolist()):
        assert i * rows // n <= position < (i + 1) * rows // n


def test_all_rows_are_taken_if_there_are_no_more_than_asked_for():
    assert sample_positions(5, 5, 3).tolist() == sample_positions(5, 2**40, 3).tolist() == [0, 1, 2, 3, 4]


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
def test_positions_are_uniform_within_each_stratum():
    """χ² over 10 places has 9 degrees of freedom: 34 is passed once in 10 000 times. Seeds 0 to 2999."""
    drawn = np.stack([sample_positions(200, 20, seed).numpy() for seed in range(3000)])
    within = drawn - np.arange(0, 200, 10)
    result = [chi_square(np.bincount(column, minlength=10)) for column in within.T]
    assert max(result) < 34
    assert 5 < np.mean(result) < 13  # the mean of 20 is 9 ± 0.95


@pytest.mark.slow
def test_strata_and_seeds_are_independent_of_each_other():
    """Correlations of 3000 draws are 0 ± 0.018 for independent ones; 5 deviations is 0.09. Seeds 0 to 2999."""
    drawn = np.stack([sample_positions(6400, 8, seed).numpy() for seed in range(3000)]) % 800
    across = np.corrcoef(drawn.T) - np.eye(8)
    assert np.abs(across).max() < 0.09
    later = [np.corrcoef(drawn[:-lag, i], drawn[lag:, i])[0, 1] for lag in (1, 2, 256) for i in range(8)]
    assert np.abs(later).max() < 0.09


def test_the_same_seed_gives_the_same_positions_and_another_one_others():
    first = sample_positions(10_000, 256, 7)
    assert torch.equal(first, sample_positions(10_000, 256, 7))
    assert torch.equal(first, sample_positions(10_000, 256, 7, device="cpu"))
    # 256 draws of about 39 places each: two seeds agree on 6.6 ± 2.5 of them
    for seed in (8, 7 + 2**32, 7 + 2**62):
        assert int((first == sample_positions(10_000, 256, seed)).sum()) < 25
    assert sample_positions(10_000, 256, 7, device="meta").shape == (256,)


def test_no_random_stream_is_touched():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    sample_positions(1000, 100, 0)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert before[2] == random.getstate()


@pytest.mark.slow
def test_tracing_with_any_number_of_rows_gives_the_same():
    traced = torch.compile(
        lambda x: sample_positions(x.shape[0], 4, 11, x.device), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (101, 57, 5, 4, 3, 2):
        assert torch.equal(traced(torch.zeros(rows)), sample_positions(rows, 4, 11)), rows


@pytest.mark.parametrize(
    ("count", "seed", "says"),
    [
        (0, 0, r"sample_rows must be from 1 to 9223372036854775807, got 0"),
        (-3, 0, r"sample_rows must be from 1 to .*, got -3"),
        (True, 0, r"sample_rows must be an integer, got True"),
        (2.0, 0, r"sample_rows must be an integer, got 2\.0"),
        (2, -1, r"sample_seed must be from 0 to .*, got -1"),
        (2, 2**63, r"sample_seed must be from 0 to 9223372036854775807, got 9223372036854775808"),
        (2, None, r"sample_seed must be an integer, got None"),
    ],
)
def test_a_wrong_sample_says_what_came(count, seed, says):
    with pytest.raises(SqrtdkError, match=says):
        sample_positions(10, count, seed)


def test_the_mean_over_strata_is_closer_than_that_of_rows_drawn_freely():
    """Causal rows see more keys the later they are: strata take that variance out. Seeds 0 to 199, 8 of 128 rows."""
    q, k, v = torch.randn(3, 2, 128, 16, generator=torch.Generator().manual_seed(0))
    rows = attention(q, k, v, causal=True).statistics
    means = torch.stack([rows.entropy[:, sample_positions(128, 8, seed)].mean(dim=1) for seed in range(200)])
    off = (means - rows.entropy.mean(dim=1)).abs().mean(dim=0)
    freely = rows.entropy.std(dim=1) / 8**0.5
    assert (off < 0.5 * freely).all()
    # unbiased: the mean of 200 estimates is within 4 of its standard errors
    assert ((means.mean(dim=0) - rows.entropy.mean(dim=1)).abs() < 4 * means.std(dim=0) / 200**0.5).all()


def test_attention_reports_the_rows_of_its_sample():
    q, k, v = torch.randn(3, 2, 3, 50, 8, generator=torch.Generator().manual_seed(1))
    rows = attention(q, k, v, causal=True).statistics
    some = attention(q, k, v, causal=True, sample_rows=7, sample_seed=5).statistics
    positions = sample_positions(50, 7, 5)
    assert torch.equal(some.sample.positions, positions)
    assert some.sample.rows == 50
    assert torch.equal(some.max_key, rows.max_key[..., positions])
    torch.testing.assert_close(some.entropy, rows.entropy[..., positions], rtol=1e-6, atol=1e-7)
    summary = HeadSummary.of(some)
    assert (summary.rows_seen.tolist(), summary.rows_in_all.tolist(), summary.is_sample) == ([14] * 3, [100] * 3, True)
    assert repr(summary).count("≥") == 3
