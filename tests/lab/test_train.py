"""Training: repeatable, paired across policies, honest about divergence, and it learns."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import sqrtdk.lab.train as train_module
from sqrtdk.lab import RunSpec
from sqrtdk.lab.store import CURVES, LEARNED_CURVES
from sqrtdk.lab.train import _Run, train
from sqrtdk.lab.transformer import Transformer
from sqrtdk.scales import LEARNABLE

SMALL = {"d_model": 16, "d_k": 16, "steps": 12, "batch": 4, "record_every": 5}


def numbers(record):
    return {name: value for name, value in record.row.items() if name != "seconds"}, record.curves


def test_same_spec_same_numbers():
    first, again = train(RunSpec(**SMALL)), train(RunSpec(**SMALL))
    assert numbers(first) == numbers(again)
    assert numbers(train(RunSpec(**SMALL, seed=1)))[1] != first.curves


CONTROLS = [("none", "rescaled"), ("inverse", "grown")]


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "init"), CONTROLS)
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_rescaled_init_and_step_follow_the_curve_of_sqrt_to_the_bit(scale, init, eps, monkeypatch):
    """At dₖ = 16 every factor is a power of two, so that nothing is rounded otherwise; Adam's eps is rescaled, too."""
    monkeypatch.setattr(train_module, "_EPS", eps)
    sqrt, both, start, step = (
        train(RunSpec(**{**SMALL, "record_every": 1}, lr=3e-2, **setting))
        for setting in (
            {"scale": "sqrt"},
            {"scale": scale, "init": init, "qk_step": init},
            {"scale": scale, "init": init},
            {"scale": scale, "qk_step": init},
        )
    )
    assert both.curves["loss"] == sqrt.curves["loss"]
    assert both.row["final_loss"] == sqrt.row["final_loss"]
    assert start.curves["loss"][0] == sqrt.curves["loss"][0]
    assert start.curves["loss"][3:] != sqrt.curves["loss"][3:]
    assert step.curves["loss"][0] != sqrt.curves["loss"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "init"), CONTROLS)
def test_where_the_factor_is_no_power_of_two_only_rounding_tells_them_apart(scale, init):
    spec = RunSpec(**{**SMALL, "d_k": 64, "record_every": 1})
    sqrt, both = train(spec), train(replace(spec, scale=scale, init=init, qk_step=init))
    np.testing.assert_allclose(both.curves["loss"], sqrt.curves["loss"], rtol=2e-6)
    other = train(replace(spec, scale=scale, init=init))
    assert np.abs(np.subtract(other.curves["loss"], sqrt.curves["loss"])).max() > 1e-4


def test_threads_do_not_change_the_numbers_and_are_given_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = numbers(train(RunSpec(**SMALL)))
        torch.set_num_threads(2)
        assert numbers(train(RunSpec(**SMALL))) == one
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_policies_see_the_same_data_in_the_same_order():
    seen = {}
    for scale in ("none", "sqrt", "cosine"):
        run = _Run(RunSpec(**SMALL, scale=scale, seed=3), None)
        sampled = [run.task.sample(run.rng, 4).tokens for _ in range(3)]
        seen[scale] = np.concatenate(sampled)
    np.testing.assert_array_equal(seen["none"], seen["sqrt"])
    np.testing.assert_array_equal(seen["none"], seen["cosine"])


def test_curves_have_a_point_every_few_steps_and_the_last():
    record = train(RunSpec(**SMALL))
    assert record.curves["step"] == [0, 5, 10, 11]
    assert set(record.curves) == set(CURVES)
    for name in CURVES:
        assert len(record.curves[name]) == 4
        assert np.isfinite([value for value in record.curves[name] if value is not None]).all()
    assert [name for name in CURVES if None in record.curves[name]] == ["pressure"]
    assert min(record.curves["grad_q"]) > 0.0
    assert 0.0 < min(record.curves["entropy_ratio"]) < max(record.curves["entropy_ratio"]) <= 1.0


def test_loss_of_a_point_is_the_mean_since_the_point_before():
    every = train(RunSpec(**{**SMALL, "record_every": 1})).curves["loss"]
    sparse = train(RunSpec(**SMALL)).curves["loss"]
    expected = [every[0], np.mean(every[1:6]), np.mean(every[6:11]), every[11]]
    np.testing.assert_allclose(sparse, expected, rtol=1e-12)


def test_divergence_is_a_result():
    record = train(RunSpec(**SMALL, lr=1e30))
    assert record.row["status"] == "diverged"
    assert record.row["final_loss"] is None
    assert record.row["solved"] is False
    assert np.isfinite(record.curves["loss"]).all()


def test_divergence_before_a_swap_is_a_result_too():
    record = train(RunSpec(**SMALL, lr=1e30, start_scale="sqrt", start_steps=5))
    assert record.row["status"] == "diverged"
    assert record.row["swapped_loss"] is None


def test_swap_trains_with_one_scale_and_goes_on_with_the_other():
    swapped = train(RunSpec(**SMALL, scale="none", start_scale="sqrt", start_steps=10))
    alone = train(RunSpec(**{**SMALL, "steps": 10}, scale="sqrt"))
    assert swapped.row["start_loss"] == alone.row["final_loss"]
    assert swapped.row["swapped_loss"] != swapped.row["start_loss"]
    assert swapped.row["final_loss"] != swapped.row["swapped_loss"]
    assert swapped.curves["step"] == [0, 5, 9, 10, 15, 20, 21]


def test_steps_to_threshold_reads_the_curve_from_the_swap_on():
    run = _Run(RunSpec(**SMALL, scale="none", start_scale="sqrt", start_steps=10), None)
    run.curves["step"], run.curves["loss"] = [0, 9, 15, 20], [3.0, 0.1, 2.0, 0.2]
    assert run.steps_to_threshold() == 10
    run.curves["loss"] = [3.0, 0.1, 2.0, 2.0]
    assert run.steps_to_threshold() is None


def test_report_counts_the_updates():
    steps = []
    train(RunSpec(**SMALL, start_scale="none", start_steps=2), lambda step, *_: steps.append(step))
    assert steps == list(range(1, 15))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scale",
    [
        *("fixed:10", "temperature:0.5", "mup", "log_n", "yarn:4", "llama4", "cosine", "qk_norm:1"),
        *("learned", "query", "position", "qk_norm"),
    ],
)
def test_every_policy_trains(scale):
    record = train(RunSpec(**SMALL, scale=scale))
    assert record.row["status"] == "done"
    assert record.row["scale"] == scale
    assert ("temperature" in record.row) == (scale in LEARNABLE)


def test_what_each_head_does_in_the_end_is_recorded():
    run = train(RunSpec(**{**SMALL, "layers": 3}, heads=2, scale="none"))
    heads = run.row["measured_heads"]
    assert [(head["layer"], head["head"]) for head in heads] == [
        (layer, head) for layer in range(3) for head in range(2)
    ]
    assert all(0 < head["entropy_ratio"] < 1 and head["saturation_index"] > 0 for head in heads)
    # The means over heads are near those of the last training batch, which the curves have.
    mean = np.mean([head["entropy_ratio"] for head in heads])
    assert mean == pytest.approx(run.curves["entropy_ratio"][-1], abs=0.05)


@pytest.mark.parametrize("scale", ["learned", "query", "position", "qk_norm"])
def test_what_was_learned_is_recorded(scale):
    row = train(RunSpec(**{**SMALL, "layers": 3}, heads=2, scale=scale)).row
    assert len(row["temperatures"]) == 6
    assert len(set(row["temperatures"])) == 6, "each head goes its own way"
    assert row["temperature_least"] == min(row["temperatures"]) < row["temperature"] < row["temperature_largest"]
    assert (row["temperature_spread"] > 0.0) == (scale in ("query", "position"))
    # 12 updates of 1e-3 each: a head's own parameter cannot have moved further, one from the query can.
    assert max(abs(np.log(row["temperatures"]))) < (0.05 if scale != "position" else 0.1)


def test_a_swap_to_a_scale_that_learns_trains_it_from_the_swap_on():
    swapped = train(RunSpec(**SMALL, scale="learned", start_scale="sqrt", start_steps=10))
    alone = train(RunSpec(**{**SMALL, "steps": 10}, scale="sqrt"))
    assert swapped.row["start_loss"] == alone.row["final_loss"]
    assert swapped.row["swapped_loss"] == swapped.row["start_loss"], "it begins as sqrt"
    assert swapped.row["temperature"] != 1.0


def test_text_trains_and_names_its_data():
    record = train(RunSpec(**{**SMALL, "steps": 30}, task="text", task_parameters={"context": 16}))
    assert record.curves["loss"][-1] < record.curves["loss"][0]
    assert len(record.row["data_sha256"]) == 64
    assert record.row["context"] == 16


@pytest.mark.long
def test_recall_is_learned_with_sqrt_and_not_without_scale():
    """Seeds 0 and 1 at the documented defaults: 2 layers, one head, dₖ = 64, Adam 1e-3, 600 steps."""
    for seed in (0, 1):
        scaled, plain = (train(RunSpec(scale=scale, seed=seed)).row for scale in ("sqrt", "none"))
        assert scaled["solved"]
        assert scaled["final_loss"] < 0.05
        assert scaled["final_accuracy"] > 0.99
        assert scaled["steps_to_threshold"] < 600
        assert not plain["solved"]
        assert plain["final_loss"] > 2.0
        assert plain["steps_to_threshold"] is None


@pytest.mark.parametrize(("policy", "sign"), [("fixed", -1), ("qk_norm", 1)], ids=["a divisor", "a gain"])
def test_pressure_is_the_derivative_of_the_loss_by_the_logarithm_of_the_scale(policy, sign):
    def first(parameter):
        return train(RunSpec(**{**SMALL, "steps": 1}, scale=f"{policy}:{parameter}", heads=2)).curves

    (pressure,) = first(1.3)["pressure"]
    (low,), (high,) = (first(1.3 * math.exp(step))["loss"] for step in (-0.02, 0.02))
    assert pressure == pytest.approx(sign * (high - low) / 0.04, rel=0.02)
    assert abs(pressure) > 1e-3


@pytest.mark.parametrize("scale", ["sqrt", "learned"])
def test_pressure_and_temperature_are_sparse_and_training_does_not_feel_them(scale, monkeypatch):
    spec = RunSpec(**{**SMALL, "record_every": 1}, scale=scale, heads=2)
    followed = train(spec)
    taken = [at for at, value in enumerate(followed.curves["pressure"]) if value is not None]
    assert taken == [0, 4, 8, 11]
    assert set(followed.curves) - set(CURVES) == (set(LEARNED_CURVES) if scale == "learned" else set())
    for name in set(followed.curves) - set(CURVES):
        assert [at for at, value in enumerate(followed.curves[name]) if value is not None] == taken
    real = Transformer.forward
    monkeypatch.setattr(
        Transformer,
        "forward",
        lambda self, tokens, statistics=False, pressure=False: real(self, tokens, statistics, False),
    )
    plain = train(spec)
    assert plain.curves["pressure"] == [None] * 12
    for name in set(CURVES) - {"pressure"}:
        assert plain.curves[name] == followed.curves[name]
    assert plain.row["final_loss"] == followed.row["final_loss"]


def test_the_learned_temperature_ends_where_the_row_says():
    record = train(RunSpec(**SMALL, scale="learned", heads=2, lr=0.03))
    assert record.curves["temperature"][0] == pytest.approx(1.0, abs=1e-6)
    # The last point is taken before the last update.
    assert record.curves["temperature"][-1] == pytest.approx(record.row["temperature"], rel=0.05)
    assert abs(record.curves["temperature"][-1] - 1.0) > 0.05
    for low, middle, high in zip(
        *(record.curves[name] for name in ("temperature_least", "temperature", "temperature_largest")), strict=True
    ):
        assert low is None or low <= middle <= high
