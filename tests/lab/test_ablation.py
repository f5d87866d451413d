"""Sentences about the scale over time: they count what the curves say, and leave out runs that say nothing."""

import pytest

from sqrtdk.lab.ablation import read_scale


def run(pressure=(), temperature=(), scale="sqrt"):
    steps = [10 * at for at in range(max(len(pressure), len(temperature)))]
    curves = {"step": steps, "pressure": list(pressure), "temperature": list(temperature)}
    return {"scale": scale, "init": "unit", "qk_step": "unit", **{name: kept for name, kept in curves.items() if kept}}


@pytest.mark.parametrize(
    ("pressures", "told"),
    [
        (([1.0, None, -1.0], [-1.0, None, -2.0]), "1/√dₖ in 1 and 2 of 2 runs."),
        (([1.0, None, 2.0], [0.0, None, 0.0]), "1/√dₖ in 0 and 0 of 2 runs."),
        (([-1.0], [None, -1.0, None]), "1/√dₖ in 2 and 2 of 2 runs."),
    ],
)
def test_runs_whose_loss_would_fall_with_sharper_attention_are_counted(pressures, told):
    (sentence,) = read_scale([*(run(pressure) for pressure in pressures), run([None, None]), {**run(), "step": []}])
    assert sentence.endswith(told)


def test_the_temperature_furthest_from_the_start_is_said_with_its_step():
    runs = [run((), [1.0, 0.5, 0.9], "learned"), run((), [1.0, 0.7, 1.1], "learned"), {**run(), "step": [0]}]
    (sentence,) = read_scale(runs)
    assert sentence.endswith("learned 1.000 at the start, 1.000 at the end, furthest from 1 at step 10 (0.600).")


def test_without_curves_nothing_is_said():
    assert read_scale([{**run(), "step": [0, 10]}]) == []
