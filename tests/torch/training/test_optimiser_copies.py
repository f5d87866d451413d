"""QK-Clip beside an optimiser with copies of the weights: the next step keeps the clip, or nothing is clipped."""

import numpy as np
import pytest
import torch
from torch import nn

from monitored import Looks
from sqrtdk import SqrtdkError
from sqrtdk.torch import Monitor, qk_clip_, watch
from torch_watched import Fused, Stack, make_input

X = make_input(batch=2, tokens=24)
THRESHOLD = 5.0


def make_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Stack(Fused(), Fused()).to(dtype)


class MasterWeights:
    """SGD on float32 copies of the weights, rounded into the model after each step; flat in one tensor if asked.

    The copies are the optimiser's parameters, or lie in its state.
    """

    def __init__(self, model, keep="apart"):
        self.model_parameters = list(model.parameters())
        self.copies = [parameter.detach().float().clone() for parameter in self.model_parameters]
        self.state = {}
        if keep == "flat":
            flat = torch.cat([torch.zeros(3), *(copy.reshape(-1) for copy in self.copies)])
            sizes = [copy.numel() for copy in self.copies]
            parts = flat[3:].split(sizes)
            self.copies = [part.view(copy.shape) for part, copy in zip(parts, self.copies, strict=True)]
            self.param_groups = [{"params": [flat]}]
        elif keep == "state":
            self.param_groups = [{"params": self.model_parameters}]
            pairs = zip(self.model_parameters, self.copies, strict=True)
            self.state = {parameter: {"step": 3, "master": copy} for parameter, copy in pairs}
        elif keep == "hidden":
            self.param_groups = [{"params": [copy.reshape(-1)[1:] for copy in self.copies]}]
        else:
            self.param_groups = [{"params": self.copies}]
            self.state = {copy: {"master": copy} for copy in self.copies}

    def step(self, rate=0.0):
        for parameter, copy in zip(self.model_parameters, self.copies, strict=True):
            copy -= rate * parameter.grad.float()
            parameter.data.copy_(copy)


def see(model):
    with watch(model) as seen:
        model(X.to(next(model.parameters()).dtype)).float().square().mean().backward()
    return seen


def largest(seen):
    return max(float(summary["score_max"].largest.max()) for summary in seen.layers.values())


@pytest.mark.parametrize("keep", ["apart", "flat", "state"])
def test_copies_are_clipped_so_that_the_next_step_keeps_the_clip(keep):
    model = make_model()
    optimiser = MasterWeights(model, keep)
    seen = see(model)
    assert largest(seen) > 2 * THRESHOLD
    before = [copy.clone() for copy in optimiser.copies]
    assert len(qk_clip_(model, seen, threshold=THRESHOLD, optimiser=optimiser)) > 0
    clipped = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser.step()
    for parameter, one in zip(model.parameters(), clipped, strict=True):
        assert torch.equal(parameter, one)
    assert see(model).layers["layers.0"]["score_max"].largest.max() == pytest.approx(THRESHOLD, rel=0.05)
    factors = [after / before for after, before in zip(optimiser.copies, before, strict=True)]
    changed = {name for (name, _), one in zip(model.named_parameters(), factors, strict=True) if (one != 1).any()}
    assert changed == {
        f"layers.{at}.{side}_proj.{kind}" for at in (0, 1) for side in "qk" for kind in ("weight", "bias")
    }


def test_without_the_optimiser_a_step_undoes_the_clip():
    """The copies matter: otherwise the test above could not fail."""
    model = make_model()
    optimiser, before = MasterWeights(model), [parameter.detach().clone() for parameter in model.parameters()]
    qk_clip_(model, see(model), threshold=THRESHOLD)
    optimiser.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_a_clip_that_the_next_step_would_undo_is_refused_with_its_reason():
    model = make_model()
    optimiser, before = MasterWeights(model, "hidden"), [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(SqrtdkError, match=r"holds neither layers\.0\.\w_proj\.\w+ nor a copy that could be found"):
        qk_clip_(model, see(model), threshold=THRESHOLD, optimiser=optimiser)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_an_optimiser_of_torch_needs_nothing_and_other_weights_are_not_taken_for_copies():
    alone, model = make_model(torch.float32), make_model(torch.float32)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.0)
    seen, seen_alone = see(model), see(alone)
    optimiser.step()
    moments = [state["exp_avg"].clone() for state in optimiser.state.values()]
    clipped = qk_clip_(model, seen, threshold=THRESHOLD, optimiser=[optimiser])
    assert clipped == qk_clip_(alone, seen_alone, threshold=THRESHOLD)
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter, other)
    for state, before in zip(optimiser.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg"], before)


def test_a_monitor_clips_copies_and_a_skipped_step_in_between_does_not_matter():
    model, looks = make_model(), Looks()
    optimiser = MasterWeights(model)
    with Monitor(model, to=looks, every=1, clip=THRESHOLD, optimiser=optimiser, on_alert=print) as monitor:
        for at in range(4):
            model(X.bfloat16()).float().square().mean().backward()
            if at != 1:  # a scaler skipped the second step
                optimiser.step()
            model.zero_grad()
            monitor.step(skipped=at == 1)
    assert [entry["clipped"] is not None for _, entry in looks] == [True] * 4
    scores = [max(max(layer["max_logit"]) for layer in entry["layers"].values()) for _, entry in looks]
    assert scores[0] > 2 * THRESHOLD
    assert max(scores[1:]) < 1.2 * THRESHOLD


def clip_beside_zero(rank, world, as_view):
    """Train and clip with torch's ZeroRedundancyOptimizer; return the weights and how often a head was clipped."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_model(torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(model)
    options = {"lr": 1e-3, "momentum": 0.9}
    optimiser = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.SGD, parameters_as_bucket_view=as_view, **options
    )
    return train_and_clip(wrapped, optimiser)


def train_and_clip(model, optimiser):
    clipped = []
    for _ in range(3):
        with watch(model) as seen:
            model(X).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        result = qk_clip_(model, seen, threshold=THRESHOLD, optimiser=optimiser)
        clipped += [(one.layer, one.head, [shrunk.parameter for shrunk in one.parameters]) for one in result]
    return [parameter.detach().numpy().copy() for parameter in model.parameters()], clipped


def clip_beside_zero_in_views(rank, world):
    return clip_beside_zero(rank, world, True)


def clip_beside_zero_apart(rank, world):
    return clip_beside_zero(rank, world, False)


@pytest.mark.long
@pytest.mark.parametrize("task", [clip_beside_zero_apart, clip_beside_zero_in_views])
def test_the_zero_redundancy_optimiser_keeps_a_clip(tmp_path, task):
    from ranks import run_ranks

    results = run_ranks(tmp_path, 2, task)
    model = make_model(torch.float32)
    expected, clipped = train_and_clip(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    assert clipped
    for weights, its_clipped in results:
        assert its_clipped == clipped
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
