"""Tensors in the benchmark: wrong gradients are out, and each contender is set against its like."""

from dataclasses import replace

import numpy as np
import pytest

from bench_machine import GOOD, Script, measured
from benchmarks import suites, tabulation, timing
from benchmarks.cases import Case
from benchmarks.contenders import find_contender
from benchmarks.tensors import BackwardCase, RecordedCase
from sqrtdk import backends

torch = pytest.importorskip("torch")

CASES = [
    BackwardCase("test", "full", 2, 2, 9, 8),
    BackwardCase("test", "causal", 1, 2, 70, 8, causal=True),
    BackwardCase("test", "cross", 1, 2, 9, 8, keys=13),
    BackwardCase("test", "padded", 3, 2, 16, 8, padding=0.5, by_token=True),
    BackwardCase("test", "causal and padded", 3, 2, 16, 8, padding=0.5, causal=True),
    BackwardCase("test", "window", 1, 2, 40, 8, causal=True, window=5),
    BackwardCase("test", "grouped", 2, 8, 17, 8, groups=4, causal=True, by_token=True),
]
BOTH = ("sqrtdk.torch forward and backward", "torch SDPA forward and backward")


def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _reference():
    with backends.use(backends.REFERENCE):
        yield


def differentiate(case, inputs):
    """Gradients of the textbook formula in float64, by torch, for all heads."""
    leaves = [torch.from_numpy(array.astype(np.float64)).requires_grad_() for array in inputs[:3]]
    q, k, v = leaves
    served = case.shape[1] // case.shape[2]
    logits = q @ k.repeat_interleave(served, 1).transpose(-1, -2) / case.d_k**0.5
    visible = case.visible()
    if visible is not None:
        logits = logits.masked_fill(~torch.from_numpy(visible), -torch.inf)
    output = logits.softmax(-1) @ v.repeat_interleave(served, 1)
    grad_output = torch.from_numpy(inputs.grad_output.astype(np.float64))
    return [gradient.numpy() for gradient in torch.autograd.grad(output, leaves, grad_output)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_truth_is_the_derivative(case):
    inputs = case.make_inputs(rng())[0]
    truth = case.compute_truth(inputs)
    served = case.shape[1] // case.shape[2]
    assert truth.sequence == case.batch - 1
    assert set(truth.groups.tolist()) == {0, case.shape[2] - 1}
    assert (truth.heads // served).tolist() == np.repeat(truth.groups, served).tolist()
    whole = differentiate(case, inputs)
    for measurement, exact, taken in zip(
        whole, truth.gradients, (truth.heads, truth.groups, truth.groups), strict=True
    ):
        np.testing.assert_allclose(measurement[truth.sequence][taken], exact, atol=1e-13)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contenders_differentiate_the_case(case, name):
    inputs = case.make_inputs(rng())[0]
    contender = find_contender(name)
    answer = contender.read(contender.prepare(case, inputs, 1)())
    assert [gradient.shape for gradient in answer.gradients] == [array.shape for array in inputs[:3]]
    error, entropy_error = case.compute_truth(inputs).compare(answer)
    assert 0.0 < error < 3e-6
    assert entropy_error is None


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_gradient_is_checked(which):
    case = CASES[0]
    inputs = case.make_inputs(rng())[0]
    contender = find_contender(BOTH[1])
    answer = contender.read(contender.prepare(case, inputs, 1)())
    for wrong, least in ((answer.gradients[which] * np.float32(1.01), 9e-3), (answer.gradients[which] * np.nan, None)):
        gradients = tuple(wrong if i == which else right for i, right in enumerate(answer.gradients))
        error, _ = case.compute_truth(inputs).compare(answer._replace(gradients=gradients))
        assert np.isnan(error) if least is None else error == pytest.approx(0.01, rel=0.1)


def test_wrong_gradients_are_left_out():
    right = find_contender(BOTH[0])

    def prepare(case, inputs, threads):
        # The gradient of another loss: twice the one that is asked for.
        return right.prepare(case, inputs._replace(grad_output=2 * inputs.grad_output), threads)

    pair = [right, replace(right, name="twice", prepare=prepare)]
    measurement = timing.measure(CASES[0], pair, Script(GOOD), rounds=5, threads=1, rng=rng())
    assert list(measurement.seconds) == [right.name]
    assert measurement.left_out == {"twice": "its answer is off by 1.0e+00"}


def test_backward_runs_the_forward_each_time():
    case = CASES[0]
    run = find_contender(BOTH[0]).prepare(case, case.make_inputs(rng())[0], 1)
    (first, gradients), (second, _) = run(), run()
    assert first is not second
    assert first.requires_grad
    assert not any(gradient.requires_grad for gradient in gradients)


def test_like_is_timed_with_like():
    (suite,) = suites.choose_suites(["tensors"])
    forward = [case for case in suite.cases if not isinstance(case, BackwardCase)]
    backward = [case for case in suite.cases if isinstance(case, BackwardCase)]
    assert [case.shape for case in forward] == [case.shape for case in backward]
    assert [f"{case.name}, with gradients" for case in forward] == [case.name for case in backward]
    for case in forward:
        assert suite.contenders_for(case) == ["sqrtdk.torch", "sqrtdk.torch with statistics", "torch SDPA"]
    for case in backward:
        assert suite.contenders_for(case) == list(BOTH)
    for kind in (forward, backward):
        assert {case.shape[:2] + case.shape[3:] for case in kind} >= {(1, 8, 2048, 2048, 64), (1, 4, 4096, 4096, 128)}
        assert (32, 8) in {(case.heads, case.groups) for case in kind if case.by_token}
        assert any(case.padding for case in kind)
    (overhead,) = suites.choose_suites(["overhead"])
    assert {"sqrtdk", "sqrtdk.torch", "torch SDPA"} <= set(overhead.contenders_for(overhead.cases[0]))


def test_backward_counts_seven_products():
    case = Case("test", "causal", 1, 2, 4, 8, causal=True)
    assert case.multiply_adds() == 2 * 8 * 20
    assert BackwardCase("test", "causal", 1, 2, 4, 8, causal=True).multiply_adds() == 7 * 8 * 20


def test_ratios_say_what_the_errors_are_of():
    forward = measured({"sqrtdk.torch": [1.0] * 5, "sqrtdk.torch with statistics": [1.1] * 5, "torch SDPA": [2.0] * 5})
    backward = measured({BOTH[0]: [1.0] * 5, BOTH[1]: [0.5] * 5}, case=CASES[0])
    rows = tabulation.tabulate_ratios([forward, backward], rng())
    assert [(row["subject"], row["peer"], row["ratio"], row["error_of"]) for row in rows] == [
        ("sqrtdk.torch", "torch SDPA", 2.0, "output"),
        ("sqrtdk.torch with statistics", "torch SDPA", pytest.approx(2.0 / 1.1), "output"),
        (*BOTH, 0.5, "gradients, relative"),
    ]
    (cost,) = tabulation.tabulate_costs([forward], rng())
    assert (cost["cost_of"], round(cost["percent"], 6)) == ("all statistics, tensors", 10.0)
    assert [row["error_of"] for row in tabulation.tabulate_timings([backward])] == ["gradients, relative"] * 2


def test_recorded_calls_are_compared_among_themselves():
    (suite,) = suites.choose_suites(["overhead"])
    (case,) = (case for case in suite.cases if isinstance(case, RecordedCase))
    assert suite.contenders_for(case) == ["sqrtdk.torch recorded", "torch SDPA recorded"]
    inputs = case.make_inputs(np.random.default_rng(0))[0]
    for name in suite.contenders_for(case):
        contender = find_contender(name)
        output = contender.prepare(case, inputs, 1)()
        assert output.requires_grad
        assert case.compute_truth(inputs).compare(contender.read(output)).error < 1e-6
    (backward,) = (case for case in suite.cases if isinstance(case, BackwardCase))
    assert suite.contenders_for(backward) == [
        "sqrtdk.torch forward and backward",
        "torch SDPA forward and backward",
    ]
