"""Trained reproductions at tiny sizes: they run, are stored, and their quantities are those of the expectations."""

import math

import numpy as np
import pytest
import torch

from sqrtdk.lab import Lab, Processes, RunRecord, RunSpec
from sqrtdk.reproductions import REPRODUCTIONS, lab_runs, reproduce, sets, sinks, small_models
from sqrtdk.reproductions.training import evaluate, train_model
from sqrtdk.torch import attention

TINY = {
    "failing-size": {"d_ks": (2,), "seeds": 2, "steps": 2},
    "init-and-step": {"d_k": 16, "seeds": 2, "steps": 12},
    "rate-sensitivity": {"lrs": (1e-3, 1e-1), "seeds": 2, "steps": 2},
    "logit-factor": {"factors": (0.25, 1.0, 4.0), "seeds": 2, "steps": 2},
    "settled-temperatures": {"seeds": 2, "steps": 2, "d_k": 8},
    "qk-clip": {"seeds": 2, "steps": 2},
    "dispersion": {"seeds": 2, "steps": 2, "sizes": (16, 64), "sets": 8},
    "length-generalisation": {"seeds": 2, "steps": 2, "sizes": (16, 64), "sets": 8},
    "sinks": {"seeds": 2, "steps": 2},
}


class Replayed:
    """Lab that answers with given losses instead of training."""

    def __init__(self, answer):
        self.answer = answer

    def run(self, specs):
        return [RunRecord(*self.answer(spec)) for spec in specs]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_expectation_has_its_quantity(name):
    one = REPRODUCTIONS[name]
    with Lab(executor=Processes(1)) as lab:
        measured = one.compute(0, lab, **TINY[name])
    assert set(measured) == {expected.quantity for expected in one.expectations}
    rows = measured.curves[one.chart.curve]
    assert all({one.chart.x, one.chart.y} <= row.keys() for row in rows)
    lines = {row[one.chart.by] for row in rows} if one.chart.by else set()
    assert set(one.chart.predicted) <= lines


def test_all_that_train_are_tried():
    assert TINY.keys() == {name for name, one in REPRODUCTIONS.items() if one.trains}
    assert all(one.scaled_down for one in REPRODUCTIONS.values() if one.trains)


def test_a_stored_reproduction_is_not_trained_again(monkeypatch, tmp_path):
    one = REPRODUCTIONS["sinks"]
    calls = []

    def compute(seed, lab):
        calls.append(seed)
        return small_models.Measured({expected.quantity: 0.0 for expected in one.expectations}, {"sinks": []})

    monkeypatch.setitem(REPRODUCTIONS, "sinks", type(one)(**{**vars(one), "compute": compute}))
    for _ in range(2):
        with Lab(tmp_path / "runs.sqlite") as lab:
            record = reproduce(["sinks"], 3, lab=lab)
    assert calls == [3]
    assert record.tables["reproductions"][0]["verdict"] == "fail"
    with Lab(tmp_path / "runs.sqlite") as lab:
        reproduce(["sinks"], 4, lab=lab)
    assert calls == [3, 4]


def test_the_failing_size_lies_between_the_last_that_is_solved_and_the_next():
    def answer(spec):
        pairs = spec.task_parameters["pairs"]
        if spec.d_k < 8:
            return ({"solved": False},)  # too few dimensions for either
        return ({"solved": spec.scale == "sqrt" or spec.d_k <= {4: 8, 8: 8, 16: 16}[pairs]},)

    measured = lab_runs.find_failing_size(0, Replayed(answer))
    assert measured["failing dₖ divided by 2 ln n, n = 12"].value == pytest.approx(
        math.sqrt(8 * 16) / (2 * math.log(12))
    )
    assert measured["failing dₖ at n = 48 divided by failing dₖ at n = 12"] == pytest.approx((2.0, 2.0, 2.0))
    assert measured["control: share solved with 1/√dₖ at dₖ 32, n = 24"].value == 1.0


@pytest.mark.parametrize(("solves", "ends"), [(False, (0.0, 4.0)), (True, (64.0, math.inf))])
def test_a_failing_size_outside_of_the_grid_has_an_open_interval(solves, ends):
    measured = lab_runs.find_failing_size(0, Replayed(lambda spec: ({"solved": spec.scale == "sqrt" or solves},)))
    low, high = (end / (2 * math.log(12)) for end in ends)
    found = measured["failing dₖ divided by 2 ln n, n = 12"]
    assert low <= found.low
    assert found.high <= high
    assert (found.low == 0.0) != solves
    growth = measured["failing dₖ at n = 48 divided by failing dₖ at n = 12"]
    assert (growth.low, growth.high) == (0.0, math.inf)


def test_sensitivity_is_wortsmans():
    def answer(spec):
        # At the higher rate one policy ends above where it began, which counts as the first loss.
        final = {"sqrt": {0.1: 0.5, 1.0: 9.0}, "qk_norm": {0.1: 0.6, 1.0: 1.1}}[spec.scale][spec.lr]
        return {"final_loss": final}, {"loss": [2.5, final]}

    measured = lab_runs.compare_rate_sensitivity(0, Replayed(answer), lrs=(0.1, 1.0))
    (value,) = measured.values()
    assert value == pytest.approx(((2.5 - 0.5) / 2 - (1.1 - 0.6) / 2,) * 3)


def test_the_break_is_the_first_factor_past_the_threshold():
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    assert small_models._octaves_to_break([1.0, 0.1, 0.0, 0.0, 1.0], factors, 1) == 2.0
    assert small_models._octaves_to_break([1.0, 1.0, 0.0, 0.0, 0.0], factors, -1) == 1.0
    assert small_models._octaves_to_break([0.0] * 5, factors, 1) == 3.0  # beyond those tried


@pytest.mark.slow
def test_the_clip_holds_the_largest_logit():
    spec = RunSpec(steps=40, lr=3e-2)
    free, held = train_model(spec), train_model(spec, 4.0)
    assert free.largest[0] == held.largest[0]
    assert max(free.largest[-10:]) > 2 * max(held.largest[-10:])


@pytest.mark.slow
def test_without_a_threshold_the_loop_gives_the_bits_of_the_lab():
    from sqrtdk.lab.train import train

    spec = RunSpec(steps=15)
    assert evaluate(train_model(spec).model, spec) == train(spec).row["final_loss"]


def test_entropy_sets_the_temperature():
    q = torch.tensor([[[[1.0]]], [[[1.0]]]])
    k = torch.stack([torch.full((1, 64, 1), 0.0), torch.cat([torch.full((1, 1, 1), 50.0), torch.zeros(1, 63, 1)], 1)])
    beta = sets._sharpen(attention(q, k, k, scale=1.0).statistics).flatten()
    entropy = math.log(64)
    assert beta[0] == pytest.approx(np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], entropy), rel=1e-5)
    assert beta[1] == 1.0  # a sharp row stays as it is


def test_log_n_is_the_default_at_the_size_of_training():
    head = sets.SetHead(sets.RECALL, learns_ssmax=False)
    learned = sets.SetHead(sets.RECALL, learns_ssmax=True)
    learned.load_state_dict(head.state_dict(), strict=False)
    for items, equal in ((16, True), (64, False)):
        asked = sets.RECALL.sample(torch.Generator().manual_seed(0), 4, items)
        default = head(asked, "1/√dₖ")[0]
        for other in (head(asked, "log n")[0], learned(asked, "SSMax")[0]):
            assert torch.allclose(default, other, atol=1e-5) == equal


def test_sets_have_one_right_answer():
    generator = torch.Generator().manual_seed(0)
    maxima = sets.MAXIMUM.sample(generator, 50, 16)
    best = maxima.items[torch.arange(50), maxima.items[..., 0].argmax(dim=1)]
    assert torch.equal(best[:, 1:].argmax(dim=1), maxima.classes)
    pairs = sets.RECALL.sample(generator, 50, 16)
    places = (pairs.items[..., :32] == pairs.query[:, None]).all(dim=-1)
    assert torch.equal(pairs.items[places][:, 32:].argmax(dim=1), pairs.classes)


def test_the_answer_at_the_trigger_is_the_mean_of_the_tokens_before():
    sequences = sinks.sample_sequences(torch.Generator().manual_seed(0), 20)
    for tokens, targets, triggers in zip(*sequences, strict=True):
        (place,) = triggers.nonzero()
        assert place >= 2
        assert torch.allclose(targets[place], tokens[1:place, 3:].mean(dim=0, keepdim=True), atol=1e-6)
        assert not targets[~triggers].any()
        assert tokens[0, 3:].abs().sum() == 0
        assert tokens[:, :3].sum() == len(tokens)


@pytest.mark.parametrize("kind", ["softmax", "ReLU", "softmax with gate"])
def test_layers_are_causal(kind):
    layer = sinks.Layer(kind)
    tokens = sinks.sample_sequences(torch.Generator().manual_seed(0), 2).tokens
    changed = tokens.clone()
    changed[:, 9:] += 1.0
    (before, weights), (after, _) = layer(tokens), layer(changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:])
    assert torch.allclose(weights.sum(dim=-1), torch.ones(2, 17), atol=1e-5) == (kind != "ReLU")
