"""Monitors of several ranks: they observe together or end in an error."""

import datetime

import numpy as np
import pytest
import torch

from monitored import Looks, X, make_model
from ranks import run_ranks
from sqrtdk.torch import Monitor
from torch_watched import WIDTH


def monitor_on_rank(rank, world):
    """What a rank of a data-parallel run writes and has afterwards; ranks have other data."""
    model, looks, alerts = torch.nn.parallel.DistributedDataParallel(make_model()), Looks(), []
    torch.manual_seed(rank)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, to=looks, every=1, clip=30.0, on_alert=alerts.append) as monitor:
        for _ in range(2):
            (model((1 + rank) * torch.randn(2, 64, WIDTH)).square().mean()).backward()
            optimiser.step()
            optimiser.zero_grad()
            monitor.step()
        weights = [parameter.detach().numpy().copy() for parameter in model.parameters()]
        model.module.layers[0].q_proj.bias.data[0] = torch.nan if rank == 1 else 0.0
        with torch.enable_grad():
            model.module(torch.randn(2, 64, WIDTH))
        monitor.step()
    return (
        [(step, entry["layers"]["layers.0"]["max_logit"], entry["clipped"]) for step, entry in looks],
        weights,
        alerts,
    )


@pytest.mark.long
def test_ranks_look_together_clip_alike_and_the_first_one_writes(tmp_path):
    (first, weights, alerts), (second, others, its_alerts) = run_ranks(tmp_path, 2, monitor_on_rank)
    assert second == []
    assert [step for step, *_ in first] == [0, 1, 2]
    assert [alert.rule for alert in alerts][-1] == "non-finite-rows"  # of the second rank's weights
    assert repr(alerts) == repr(its_alerts)
    assert first[0][2]["heads"]
    largest = max(head["before"] for head in first[0][2]["heads"] if head["layer"] == "layers.0")
    assert largest == pytest.approx(max(first[0][1]), rel=1e-4)  # of all ranks, as the numbers are
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)


def observe_other_steps(rank, world):
    model = make_model()
    with Monitor(model, to=Looks(), every=1, first_step=3 + rank) as monitor:
        model(X)
        monitor.step()


def observe_on_the_first_rank_alone(rank, world):
    if rank:
        return None
    from sqrtdk.torch.training import monitor

    monitor.WAIT = datetime.timedelta(seconds=3)
    return observe_other_steps(0, world)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "says"),
    [
        (observe_other_steps, "every rank's monitor must observe the same step, got [3, 4] by rank"),
        (observe_on_the_first_rank_alone, "the monitor of rank 0 waited for the other ranks at step 3 in vain"),
    ],
)
def test_ranks_that_do_not_meet_end_in_an_error_that_names_the_monitor(tmp_path, task, says):
    assert says in run_ranks(tmp_path, 2, task)[0]
