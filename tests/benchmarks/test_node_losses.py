"""The simulation of node losses: right where it can be counted by hand, and worse where more is lost."""

import pytest

from benchmarks.node_losses import simulate


def test_without_losses_it_is_a_division():
    assert simulate(25, 100.0, 10, 0.0) == pytest.approx((300.0 / 3600.0, 0.0, 0))


def test_losses_cost_what_lies_after_the_last_checkpoint():
    sweep = simulate(200, 3600.0, 20, 12.0, checkpoint_seconds=60.0, away_seconds=0.0)
    assert sweep.losses == pytest.approx(200 * 3600.0 * 12.0 / 86400.0, rel=0.3)
    # Half an interval for each loss, on average.
    assert sweep.lost_share == pytest.approx(sweep.losses * 30.0 / (200 * 3600.0), rel=0.3)


def test_without_checkpoints_more_is_lost():
    kept, lost = (simulate(200, 3600.0, 20, 12.0, checkpoint_seconds=seconds) for seconds in (4.0, None))
    assert lost.lost_share > 20 * kept.lost_share > 0.0
    assert lost.hours > kept.hours
