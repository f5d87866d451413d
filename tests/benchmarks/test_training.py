"""Training steps in the benchmark: each attention trains a model of its own, and its gradient is checked first."""

from dataclasses import replace

import numpy as np
import pytest

from bench_machine import GOOD, Script, measured
from benchmarks import benchmark, run_benchmark, suites, tabulation, timing
from benchmarks.contender import TRAINING, TRAINING_PEER, TRAINING_WITH_STATISTICS
from benchmarks.contenders import find_contender
from benchmarks.task import ContenderResult
from benchmarks.training import TrainingCase, TrainingTruth

TINY = TrainingCase(2, 12, "tiny", layers=1, heads=2, width=16, vocabulary=50)
EVERYONE = (TRAINING, TRAINING_WITH_STATISTICS, TRAINING_PEER)


def rng():
    return np.random.default_rng(0)


def test_the_suite_has_the_size_it_promises():
    (suite,) = suites.choose_suites(["training"])
    assert [(case.shape, case.dropout) for case in suite.cases] == [
        ((4, 512, 12, 12, 768, 50257), 0.0),
        ((4, 512, 12, 12, 768, 50257), 0.1),
    ]
    assert suite.contenders_for(suite.cases[0]) == list(EVERYONE)
    assert len({case.name for case in suite.cases}) == 2
    (quick, _) = suites.choose_suites(["training"], quick=True)[0].cases
    assert (type(quick), quick.batch, quick.tokens) == (TrainingCase, 1, 128)


def test_errors_are_relative_to_the_largest_entry():
    truth = TrainingTruth(np.array([[1.0, -4.0]]))
    assert truth.compare(ContenderResult(np.empty(0), gradients=(np.array([[1.0, -3.0]]),))).error == 0.25


def test_what_statistics_add_to_a_step():
    seconds = {TRAINING: [1.0] * 5, TRAINING_WITH_STATISTICS: [1.02] * 5, TRAINING_PEER: [1.1] * 5}
    (row,) = tabulation.tabulate_costs([measured(seconds, case=TINY)], rng())
    assert row["cost_of"] == "all statistics, in a training step"
    assert row["percent"] == pytest.approx(2.0)


@pytest.fixture
def tiny(monkeypatch):
    pytest.importorskip("transformers")
    (suite,) = suites.choose_suites(["training"])
    monkeypatch.setattr(suites, "SUITES", (replace(suite, cases=[TINY, replace(TINY, dropout=0.1)]),))
    monkeypatch.setattr(benchmark, "Prober", lambda level, threads: Script(GOOD))
    monkeypatch.setattr(timing, "_LEAST_SECONDS", 1e-6)


@pytest.mark.long
def test_steps_are_timed_with_each_attention(tiny):
    record = run_benchmark(["training"], rounds=5, threads=1)
    assert record.tables["left_out"] == []
    rows = record.tables["ratios"]
    assert [(row["case"], row["subject"], row["peer"]) for row in rows] == [
        (f"tiny, 2×12 tokens, training step, dropout {dropout}", subject, TRAINING_PEER)
        for dropout in ("0", "0.1")
        for subject in (TRAINING, TRAINING_WITH_STATISTICS)
    ]
    for row in rows:
        assert 0.0 < row["error"] < 1e-5
        assert 0.0 < row["peer_error"] < 1e-5


@pytest.mark.long
def test_each_trains_a_model_of_its_own_and_dropout_is_on(tiny, monkeypatch):
    """One step leaves the given weights as they were; with dropout two steps from the same weights differ."""
    torch = pytest.importorskip("torch")
    case = replace(TINY, dropout=0.5)
    inputs = case.make_inputs(rng())[0]
    before = {name: value.clone() for name, value in inputs.model.state_dict().items()}
    taken = []
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: taken.append(self.param_groups[0]["params"][0].grad + 0)
    )
    for name in EVERYONE:
        step = find_contender(name).prepare(case, inputs, 1)
        step()
        step()
    assert all(torch.equal(before[name], value) for name, value in inputs.model.state_dict().items())
    assert len(taken) == 6
    for first, second in zip(taken[::2], taken[1::2], strict=True):
        assert not torch.equal(first, second)
