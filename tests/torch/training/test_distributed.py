"""Head summaries over real processes: the summary of all ranks is that of all rows, on every rank, to the bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from ranks import run_ranks  # noqa: E402
from sqrtdk import AttentionStatistics, HeadSummary, SqrtdkError, attention  # noqa: E402
from sqrtdk.statistics import ROW_FIELDS, Sample  # noqa: E402
from sqrtdk.summary import SUMMARISED  # noqa: E402
from sqrtdk.torch import all_reduce  # noqa: E402

FIELDS = ROW_FIELDS


def rows_of_rank(rank, batch, heads=3, sharpness=2.0):
    q, k, v = np.random.default_rng(rank).standard_normal((3, batch, heads, 11, 4))
    return attention((1 + rank) * sharpness * q, k, v, causal=True).statistics


BATCHES = {2: (3, 2), 3: (2, 0, 1)}  # with three ranks one has no rows


def reduce_everything(rank, world):
    """Over all ranks, twice in a row; then over a group of the last rank alone."""
    own = HeadSummary.of(rows_of_rank(rank, BATCHES[world][rank]))
    together = all_reduce(own)
    alone = dist.new_group([world - 1])
    apart = all_reduce(own, alone) if rank == world - 1 else refusal_of(own, alone)
    return own, together, all_reduce(own), apart


def refusal_of(summary, group):
    with pytest.raises(SqrtdkError) as caught:
        all_reduce(summary, group)
    return str(caught.value)


def assert_summary_of(summary, parts):
    """The summary is that of all rows of the parts together: integers and extremes exactly, moments to 1e-12."""
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS}
    whole = HeadSummary.of(AttentionStatistics(**joined, first_position=0))
    np.testing.assert_array_equal(summary.rows_seen, whole.rows_seen)
    np.testing.assert_array_equal(summary.rows_in_all, whole.rows_in_all)
    for name in SUMMARISED:
        one, other = whole[name], summary[name]
        for exact in ("count", "left_out", "histogram", "least", "largest"):
            np.testing.assert_array_equal(getattr(other, exact), getattr(one, exact), err_msg=name)
            assert getattr(other, exact).dtype == getattr(one, exact).dtype
        np.testing.assert_allclose(other.mean, one.mean, rtol=1e-12, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(other.m2, one.m2, rtol=1e-12, atol=1e-25, err_msg=name)
        np.testing.assert_array_equal(other.quantile(0.5), one.quantile(0.5), err_msg=name)
    for exact in ("offsets", "sequences"):
        one, other = getattr(whole.max_keys, exact), getattr(summary.max_keys, exact)
        np.testing.assert_array_equal(other, one, err_msg=exact)
        assert other.sum() > 0
        assert other.dtype == one.dtype
    np.testing.assert_allclose(summary.max_keys.share_sum, whole.max_keys.share_sum, rtol=1e-12)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_the_summary_of_all_ranks_is_that_of_all_rows(tmp_path, world):
    results = run_ranks(tmp_path, world, reduce_everything)
    own, together, _, apart = results[0]
    assert_summary_of(together, [rows_of_rank(rank, BATCHES[world][rank]) for rank in range(world)])
    for result in results:
        assert result[1] == together
        assert result[2] == together
    merged = own
    for result in results[1:]:
        merged = merged.merge(result[0])
    assert merged == together
    assert results[-1][3] == results[-1][0]
    assert apart == "group must contain the calling process"


def reduce_other_heads(rank, world):
    return all_reduce(HeadSummary.of(rows_of_rank(rank, 1, heads=3 + rank)))


@pytest.mark.long
@pytest.mark.slow
def test_ranks_that_disagree_about_heads_raise_instead_of_hanging(tmp_path):
    says = "every rank must bring a summary of as many heads, got [3, 4] by rank"
    assert run_ranks(tmp_path, 2, reduce_other_heads) == [says, says]


def test_one_rank_gets_its_own_summary_with_its_sample(tmp_path):
    rows = rows_of_rank(0, 2)
    blocks = [np.stack([getattr(rows, name) for name in names]) for names in (FIELDS[:2], FIELDS[2:])]
    own = HeadSummary.of(AttentionStatistics.from_blocks(*blocks, sample=Sample(np.arange(11), 500), first_position=0))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        result = all_reduce(own)
    finally:
        dist.destroy_process_group()
    assert result == own
    assert (result.rows_seen.tolist(), result.rows_in_all.tolist(), result.is_sample) == ([22] * 3, [1000] * 3, True)


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(SqrtdkError, match=r"torch.distributed is not initialised; call .*init_process_group first"):
        all_reduce(HeadSummary.of(rows_of_rank(0, 1)))
    with pytest.raises(SqrtdkError, match=r"summary must be a HeadSummary, got AttentionStatistics"):
        all_reduce(rows_of_rank(0, 1))
