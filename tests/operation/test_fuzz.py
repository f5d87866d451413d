"""Random calls of the whole package against the definition, and the fuzzer's own eyes.

SQRTDK_FUZZ_SEED=7 (or `fresh`) runs other seeds than the usual ones; `python -m tests.support.fuzzing` runs it by hand.
"""

import os
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from fuzzing.calls import run
from fuzzing.check import check, choose_rounding, compare_with_definition
from fuzzing.definition import attend, pose, soften
from fuzzing.draw import draw_case
from fuzzing.hunt import hunt
from levels import RUNNING
from oracle import attention_by_definition

LEVELS = tuple(RUNNING)
# Levels are forced on calls that torch alone computes.
pytestmark = pytest.mark.filterwarnings("ignore::sqrtdk.errors.FallbackWarning")


def choose_seed(usual):
    """The usual seed, unless the environment wants another one."""
    wanted = os.environ.get("SQRTDK_FUZZ_SEED")
    if wanted is None:
        return usual
    return time.time_ns() % 2**31 if wanted == "fresh" else int(wanted) + usual


def assert_nothing_found(seed, first, count):
    print(f"seed {seed}, cases {first} to {first + count - 1}")
    result = list(hunt(seed, first, count))
    assert not result, f"{len(result)} of {count} cases are wrong:\n" + "\n".join(map(str, result[:10]))


@pytest.mark.slow
def test_calls_agree_with_the_definition():
    assert_nothing_found(choose_seed(1), 0, 150)


@pytest.mark.long
@pytest.mark.parametrize("usual", range(100, 110))
def test_many_calls_agree_with_the_definition(usual):
    assert_nothing_found(choose_seed(usual), 0, 500)


def test_seed_and_index_decide_a_case():
    for index in range(20):
        one, other = (draw_case(3, index, LEVELS) for _ in range(2))
        assert one.describe() == other.describe()
        for name in ("q", "k", "v"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def draw_plain_case(front, dtype="float32"):
    """The first case of a front without anything extreme that gives gradients or statistics and no empty result."""
    for index in range(10**4):
        case = draw_case(5, index, LEVELS)
        if case.front == front and case.dtype == dtype and not case.extremes and case.visible().any(axis=-1).all():
            return replace(case, statistics=True, mask=None, scale=None, variants=())
    raise AssertionError("no such case")


@pytest.mark.slow
@pytest.mark.parametrize("front", ["arrays", "array gradients", "tensors", "tensor gradients", "drop-in", "jvp"])
def test_every_result_that_is_a_little_wrong_is_noticed(front):
    case = draw_plain_case(front)
    results = run(case)
    assert not compare_with_definition(case, results)
    for name, array in results.items():
        if not array.any():
            continue
        wrong = results | {name: array + 1 if array.dtype.kind == "i" else array * 1.001}
        assert any(mismatch.name.startswith(name) for mismatch in compare_with_definition(case, wrong)), name


def test_definition_agrees_with_the_one_written_key_by_key():
    case = replace(draw_plain_case("arrays", "float64"), softcap=3.0, window=(2, None), causal_offset=1)
    expected = attention_by_definition(
        case.q,
        case.k,
        case.v,
        causal=case.causal,
        causal_offset=1,
        window=(2, None),
        softcap=3.0,
        sinks=case.sinks,
    )
    problem = pose(case, choose_rounding(case))
    attended = attend(problem, soften(problem))
    for name, array in (("output", expected.output), ("weights", expected.weights)):
        np.testing.assert_allclose(attended[name].value.astype(float).reshape(array.shape), array, atol=1e-13)


@pytest.mark.slow
def test_call_that_raises_is_noticed():
    case = draw_plain_case("arrays")
    (mismatch,) = check(replace(case, k=case.k[..., :-1]))
    assert mismatch.name == "raises InvalidValueError"


def test_worker_that_dies_is_started_again_behind_the_call_that_killed_it(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "first, count = (int(x) for x in sys.argv[4:7:2])\n"
        "for case in range(first, first + count):\n"
        "    print(json.dumps({'case': case, 'call': '', 'mismatches': {}}), flush=True)\n"
        "    if case == 3: os.abort()\n"
        "    if case == 5: print(json.dumps({'case': 5, 'call': '', 'mismatches': {'output': 'off'}}), flush=True)\n"
    )
    result = list(hunt(0, 0, 8, (sys.executable, str(script))))
    assert [one.case for one in result] == [3, 5]
    assert "dies with -6" in result[0].mismatches
    assert "--seed 0 --case 5" in str(result[1])
