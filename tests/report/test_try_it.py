"""The sliders of the report in Python: the counter's numbers are normal, the measurements are the product's own."""

import math

import numpy as np
import pytest

from sqrtdk import softmax
from sqrtdk.errors import InvalidValueError
from sqrtdk.report.counter import mix, sample_normal
from sqrtdk.report.try_it import QUANTITIES, RANGES, TryIt, measure_try_it, render_try_it


def test_entries_do_not_depend_on_the_size_of_the_table():
    whole = sample_normal(40, 33, seed=3)
    for rows, columns in ((1, 1), (7, 2), (40, 32), (39, 33)):
        assert (sample_normal(rows, columns, seed=3) == whole[:rows, :columns]).all()
    assert (sample_normal(5, 33, seed=3, first_row=9) == whole[9:14]).all()
    assert not (sample_normal(40, 33, seed=4) == whole).any()


def test_numbers_are_standard_normal_and_uncorrelated():
    table = sample_normal(1024, 512, seed=1)
    size = table.size
    assert abs(table.mean()) < 4 / math.sqrt(size)
    assert abs(table.var() - 1) < 4 * math.sqrt(2 / size)
    assert abs((table**4).mean() - 3) < 4 * math.sqrt(96 / size)
    for shifted in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1], table[:, 2:] * table[:, :-2]):
        assert abs(shifted.mean()) < 4 / math.sqrt(shifted.size)
    # Box and Muller: the two numbers of a pair share their radius, and must be independent nevertheless.
    assert abs((table[:, 0::2] ** 2 * table[:, 1::2] ** 2).mean() - 1) < 0.05


def test_mixing_is_one_to_one():
    assert len(np.unique(mix(np.arange(2**16, dtype=np.uint32) * np.uint32(65537)))) == 2**16


@pytest.mark.parametrize(
    "state",
    [
        TryIt(),
        TryIt(d_k=1, n=2, policy="none"),
        TryIt(d_k=7, n=13, policy="inverse", t=0.5, correlation=0.6),
        TryIt(d_k=64, n=32, t=8.0, correlation=1.0),
    ],
)
def test_numbers_against_the_formulas(state):
    q = sample_normal(1, state.d_k, seed=state.seed)[0]
    values = sample_normal(1, state.n, seed=state.seed, first_row=1)[0]
    k = sample_normal(state.n, state.d_k, seed=state.seed, first_row=2)
    k[0] = state.correlation * q + math.sqrt(1 - state.correlation**2) * k[0]
    measured = measure_try_it(state)
    for column, scale in (("none", 1.0), ("chosen", state.scale)):
        logits = scale * k @ q
        p = softmax(logits)
        jacobian = np.diag(p) - np.outer(p, p)
        expected = {
            "expected_variance": state.d_k * scale**2,
            "logit_variance": logits.var(),
            "max_logit": logits.max(),
            "max_weight": p.max(),
            "own_weight": p[0],
            "entropy_ratio": -(p * np.log(p)).sum() / math.log(state.n),
            "effective_keys": 1 / (p**2).sum(),
            "saturation_index": logits.std() / math.sqrt(2 * math.log(state.n)),
            "jacobian_trace": np.trace(jacobian),
            "jacobian_norm": np.linalg.norm(jacobian),
            "gradient": np.linalg.norm(scale * k.T @ jacobian @ values),
        }
        assert measured[column].keys() == expected.keys() == QUANTITIES.keys()
        for name, value in expected.items():
            assert measured[column][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_a_correlated_key_is_found_with_the_scale_and_lost_with_one_over_d():
    found, lost = (measure_try_it(TryIt(policy=name, correlation=1.0))["chosen"] for name in ("sqrt", "inverse"))
    assert found["own_weight"] > 0.3 > 30 * lost["own_weight"]


def test_sliders_reach_the_sizes_they_promise():
    assert (RANGES["d_k"][0], RANGES["d_k"][-1], RANGES["n"][0], RANGES["n"][-1]) == (1, 512, 2, 2048)
    assert all(
        values[0] < getattr(TryIt(), name) < values[-1] for name, values in RANGES.items() if name != "correlation"
    )
    assert 64 in RANGES["d_k"]
    for values in RANGES.values():
        assert list(values) == sorted(set(values))


@pytest.mark.parametrize(("argument", "value"), [("d_k", 513), ("n", 1), ("t", 0.0), ("correlation", 1.5)])
def test_what_no_slider_reaches_is_refused(argument, value):
    with pytest.raises(InvalidValueError, match=f"{argument} must lie between"):
        TryIt(**{argument: value})
    with pytest.raises(InvalidValueError, match="unknown policy 'log'; known: inverse, none, sqrt"):
        TryIt(policy="log")


def test_numbers_stand_on_the_page_before_a_script_runs():
    html = render_try_it()
    for column, numbers in measure_try_it(TryIt()).items():
        for name, value in numbers.items():
            assert f'data-quantity="{name}" data-column="{column}" data-value="{value!r}"' in html
    assert html.count('type="range"') == 4
    assert html.count('type="radio"') == 3
