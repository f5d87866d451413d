"""Recorded maps: the weights of the trained model, the same on every run, small, and without influence on training."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from sqrtdk.lab import Lab, Processes, RunSpec
from sqrtdk.lab.maps import MapRecorder
from sqrtdk.lab.tasks import get
from sqrtdk.lab.train import _Run, train
from sqrtdk.operation.engines.reference import softmax
from sqrtdk.records.maps import list_steps, unpack

SMALL = {"d_model": 16, "d_k": 16, "steps": 12, "batch": 4, "record_every": 5}


@pytest.mark.parametrize("scale", ["none", "learned", "qk_norm"])
def test_without_maps_the_other_numbers_are_the_same_to_the_bit(scale):
    spec = RunSpec(**SMALL, scale=scale, heads=2)
    mapped, again, bare = train(spec), train(spec), train(spec, maps=False)
    assert mapped.maps == again.maps
    assert mapped.maps["steps"] == list_steps(12)
    assert bare.maps == {}
    assert {**mapped.row, "seconds": 0} == {**bare.row, "seconds": 0}
    assert mapped.curves == bare.curves


def test_a_map_is_the_mean_of_the_last_layers_heads_on_the_first_held_out_sequence():
    run = _Run(RunSpec(**SMALL, heads=2, layers=2), None)
    run.execute()
    x = (run.model.embedding[torch.from_numpy(run.held_out.tokens[0])] + run.model.positions).detach().numpy()
    x = x.astype(np.float64)
    for block in run.model.blocks:
        normed = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
        w_q, w_k, w_v, w_o = (one.detach().numpy().astype(np.float64) for one in list(block.parameters())[:4])
        q, k, v = (np.split(normed @ w.T, 2, axis=1) for w in (w_q, w_k, w_v))
        hidden = np.triu(np.full((24, 24), -np.inf), 1)
        weights = [softmax(one @ other.T / 4 + hidden) for one, other in zip(q, k, strict=True)]
        x = x + np.concatenate([one @ own for one, own in zip(weights, v, strict=True)], axis=1) @ w_o.T
    maps = run.show_maps()
    assert (maps["first"], len(maps["tokens"])) == (16, 24)
    np.testing.assert_allclose(unpack(maps, -1) / 255, np.mean(weights, axis=0)[16:], atol=0.51 / 255)
    assert np.abs(unpack(maps, -1).astype(int) - unpack(maps, 0)).max() > 2, "training changes the map"


def test_the_example_is_the_same_for_every_run_of_a_task():
    first, other = (train(RunSpec(**SMALL, **more)).maps for more in ({}, {"scale": "none", "seed": 3, "lr": 0.01}))
    assert {name: first[name] for name in ("tokens", "first", "right", "steps")} == {
        name: other[name] for name in ("tokens", "first", "right", "steps")
    }
    assert first["weights"] != other["weights"]
    keys, values, asked = first["tokens"][:16:2], first["tokens"][1:16:2], first["tokens"][16:]
    assert [first["tokens"][right] for right in first["right"]] == [values[keys.index(key)] for key in asked]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [600, 100_000])
@pytest.mark.parametrize(
    ("task", "parameters"), [("recall", {}), ("text", {}), ("recall", {"pairs": 128, "symbols": 128}), ("digits", {})]
)
def test_the_maps_of_a_run_take_forty_kilobytes_at_most(task, parameters, steps):
    made = get(task, parameters)
    spec = RunSpec(task=task, task_parameters=parameters, steps=steps, d_model=16, d_k=16)
    run = _Run(replace(spec, steps=1), None)
    recorder = MapRecorder(made, made.held_out(), steps)
    for step in list_steps(steps):
        recorder.record(step, run.model)
    assert recorder.content["steps"] == list_steps(steps)
    assert len(json.dumps(recorder.content)) < 40_000


def test_a_sequence_that_is_too_long_has_no_maps():
    task = get("recall", {"pairs": 300, "symbols": 300})
    recorder = MapRecorder(task, task.held_out(), 10)
    recorder.record(0, None)
    assert recorder.content == {}


def test_text_has_its_characters_and_no_right_keys():
    maps = train(RunSpec(**{**SMALL, "steps": 1}, task="text", task_parameters={"context": 16})).maps
    assert all(len(token) == 1 for token in maps["tokens"])
    assert (maps["right"], maps["first"]) == ([], 0)


def test_a_swap_shows_the_scale_that_is_in_use():
    swapped = train(RunSpec(**SMALL, scale="none", start_scale="sqrt", start_steps=6)).maps
    plain = train(RunSpec(**{**SMALL, "steps": 18}, scale="sqrt")).maps
    at = swapped["steps"].index(6)
    assert swapped["weights"][:at] == plain["weights"][:at]
    assert swapped["weights"][at] != plain["weights"][at]


def test_a_checkpoint_without_maps_goes_on_with_those_to_come():
    spec, made = RunSpec(**SMALL), {}
    train(spec, lambda step, curves, make, maps: made.update({step: make()}), maps=False)
    whole, rest = train(spec), train(spec, None, made[5])
    assert rest.curves == whole.curves
    assert rest.maps == {**whole.maps, "steps": whole.maps["steps"][5:], "weights": whole.maps["weights"][5:]}


@pytest.mark.parametrize("maps", [True, False])
def test_whoever_starts_a_lab_chooses_whether_maps_are_recorded(maps):
    spec = RunSpec(**SMALL)
    with Lab(executor=Processes(1), maps=maps) as lab:
        assert bool(lab.run([spec])[0].maps) == maps
        assert bool(lab.store.get(spec).maps) == maps
