"""Specs: what a run and a grid are, and which ones are refused."""

import subprocess
import sys

import pytest

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.lab import CONTROLS, AblationSpec, Choice, RunSpec


def test_grid_is_the_whole_product_seed_by_seed():
    spec = AblationSpec(scales=("none", "sqrt"), d_ks=(8, 16), seeds=(5, 3), inits=("unit", "torch"))
    runs = spec.runs()
    assert len(runs) == len({run.key for run in runs}) == 2 * 2 * 2 * 2
    assert [run.seed for run in runs] == [5] * 8 + [3] * 8
    assert spec.selection_runs() == []


def test_rates_are_chosen_on_seeds_that_are_not_reported():
    spec = AblationSpec(scales=("none", "sqrt"), d_ks=(8, 16), seeds=2, lrs=(1e-3, 2e-3), selection=3)
    tried = spec.selection_runs()
    assert len({run.key for run in tried}) == 2 * 2 * 2 * 3
    assert {run.seed for run in tried} == {1000, 1001, 1002}
    chosen = Choice("none", 16)
    reported = spec.runs({choice: 2e-3 if choice == chosen else 1e-3 for choice in spec.choices()})
    assert {run.seed for run in reported} == {0, 1}
    assert {(run.scale, run.d_k) for run in reported if run.lr == 2e-3} == {("none", 16)}
    assert len(reported) == 2 * 2 * 2


def test_a_setting_with_a_given_rate_is_not_selected():
    given = {Choice("sqrt", 64): 3e-3}
    spec = AblationSpec(scales=("none", "sqrt"), seeds=1, lrs=(1e-3, 2e-3), rates=given)
    assert {run.scale for run in spec.selection_runs()} == {"none"}
    assert {(run.scale, run.lr) for run in spec.runs()} == {("none", 1e-3), ("sqrt", 3e-3)}
    assert spec.as_dict()["rates"] == [{"scale": "sqrt", "d_k": 64, "init": "unit", "qk_step": "unit", "lr": 3e-3}]


def test_controls_stand_beside_the_grid_once():
    spec = AblationSpec(scales=("none", "sqrt"), seeds=1, also=[("none", "rescaled"), *CONTROLS, ("sqrt", "unit")])
    assert spec.choices() == [Choice("none", 64), Choice("sqrt", 64), *(Choice(c[0], 64, *c[1:]) for c in CONTROLS)]
    assert [(run.init, run.qk_step) for run in spec.runs()][-2] == ("rescaled", "rescaled")


def test_grid_hands_every_setting_on():
    spec = AblationSpec(
        seeds=1,
        steps=7,
        heads=2,
        layers=3,
        d_model=32,
        batch=4,
        feedforward=48,
        task_parameters={"pairs": 3},
        record_every=2,
    )
    run = spec.runs()[0]
    assert (run.steps, run.heads, run.layers, run.d_model, run.batch) == (7, 2, 3, 32, 4)
    assert (run.feedforward, run.make_task().length, run.record_every) == (48, 9, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": "none"},
        {"d_k": 32},
        {"seed": 1},
        {"init": "torch"},
        {"qk_step": "rescaled"},
        {"lr": 2e-3},
        {"steps": 601},
        {"batch": 8},
        {"layers": 1},
        {"d_model": 32},
        {"heads": 2},
        {"feedforward": 8},
        {"task_parameters": {"pairs": 4}},
        {"record_every": 5},
        {"task": "text"},
        {"start_scale": "none", "start_steps": 3},
    ],
)
def test_every_field_is_part_of_the_key(change):
    assert RunSpec(**change).key != RunSpec().key


def test_defaults_spelled_out_have_the_same_key():
    assert RunSpec(task_parameters={"pairs": 8, "symbols": 16}).key == RunSpec().key
    assert RunSpec(lr=1).key == RunSpec(lr=1.0).key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "recal"}, "unknown task 'recal'; known: digits, recall, text"),
        ({"scale": "squirt"}, "unknown scaling policy 'squirt'; known: .*fixed.* learned.* qk_norm, query, "),
        ({"scale": "learned:2"}, "'learned' has parameters to train"),
        ({"start_scale": "squirt", "start_steps": 1}, "unknown scaling policy 'squirt'"),
        ({"init": "zeros"}, "unknown init 'zeros'; known: grown, rescaled, torch, unit, xavier"),
        ({"qk_step": "torch"}, "unknown qk_step 'torch'; known: grown, rescaled, unit"),
        ({"d_k": 0}, "d_k must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"lr": float("nan")}, "lr must be positive and finite, got nan"),
        ({"heads": 3}, r"d_model must be a multiple of heads \(3\), got 64"),
        ({"start_steps": 5}, "start_scale and start_steps go together, got None and 5"),
        ({"start_scale": "sqrt"}, "start_scale and start_steps go together, got 'sqrt' and 0"),
        ({"task_parameters": {"pears": 2}}, "unknown parameter of task 'recall' 'pears'; known: pairs, symbols"),
        ({"task_parameters": {"pairs": 17}}, r"symbols must be at least pairs \(17\).* got 16"),
    ],
)
def test_bad_run_is_refused(change, message):
    with pytest.raises(InvalidValueError, match=message):
        RunSpec(**change)


@pytest.mark.parametrize("change", [{"d_k": 6.4}, {"steps": "600"}, {"batch": True}, {"scale": 0.5}, {"lr": "fast"}])
def test_wrong_type_is_refused(change):
    with pytest.raises(InvalidTypeError, match=next(iter(change))):
        RunSpec(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": ()}, "scales must name at least one value"),
        ({"lrs": (1e-3, 1e-3)}, "lrs must not repeat a value"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"seeds": (1, 1)}, "seeds must not repeat"),
        ({"inits": ("unit", "zeros")}, "unknown init 'zeros'"),
        ({"selection": 0}, "selection must be at least 1, got 0"),
        (
            {"seeds": (1, 1003), "lrs": (1e-3, 1e-2)},
            "seeds must not be among those that choose the learning rate, got 1003",
        ),
        ({"also": [("none",)]}, r"also must hold \(scale, init\) or \(scale, init, qk_step\), got"),
        ({"also": [("none", "unit", "half")]}, "unknown qk_step 'half'"),
        ({"rates": {Choice("sqrt", 64): -1.0}}, "lr must be positive and finite, got -1.0"),
    ],
)
def test_bad_grid_is_refused(change, message):
    with pytest.raises(InvalidValueError, match=message):
        AblationSpec(**change)


def test_a_single_text_is_not_a_list_of_scales():
    with pytest.raises(InvalidTypeError, match="scales must be a sequence, got str 'sqrt'"):
        AblationSpec(scales="sqrt")


@pytest.mark.slow
def test_import_of_the_lab_loads_no_torch():
    code = "import sys, sqrtdk.lab; sqrtdk.lab.AblationSpec().runs(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("scale", ["learned", "query", "position", "qk_norm", "qk_norm:1"])
def test_scales_that_learn_are_taken_by_their_bare_names(scale):
    assert AblationSpec(scales=(scale, "sqrt"), seeds=1).runs()[0].scale == scale
    assert RunSpec(start_scale=scale, start_steps=1).start_scale == scale
