"""The model in the benchmark: shared weights, logits checked in float64, and left out by name where it cannot be."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from bench_machine import GOOD, Script
from benchmarks import benchmark, contender, run_benchmark, suites, timing
from benchmarks.cases import Case
from benchmarks.contender import MODEL, MODEL_PEERS
from benchmarks.contenders import find_contender
from benchmarks.model import LogitTruth, ModelCase
from benchmarks.task import ContenderResult
from sqrtdk import backends
from sqrtdk.errors import MissingExtraError

TINY = ModelCase(2, 12, "tiny", layers=1, heads=2, width=16, vocabulary=50)


def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _reference():
    with backends.use(backends.REFERENCE):
        yield


@pytest.fixture
def tiny(monkeypatch):
    """Two suites, one of them the model's with a tiny model, and a machine that is always itself."""
    cases = {"overhead": Case("overhead", "one", 1, 1, 1, 8), "model": TINY}
    small = [replace(suite, cases=[cases[suite.name]]) for suite in suites.choose_suites(list(cases))]
    monkeypatch.setattr(suites, "SUITES", tuple(small))
    monkeypatch.setattr(benchmark, "Prober", lambda level, threads: Script(GOOD))
    monkeypatch.setattr(timing, "_LEAST_SECONDS", 1e-6)  # no repeats: nobody reads these times


def test_the_suite_has_the_size_it_promises():
    (suite,) = suites.choose_suites(["model"])
    (case,) = suite.cases
    assert case.shape == (4, 512, 12, 12, 768, 50257)
    assert suite.contenders_for(case) == [MODEL, *MODEL_PEERS]
    (quick,) = suites.choose_suites(["model"], quick=True)[0].cases
    assert quick == replace(case, batch=1, tokens=128)
    assert quick.name == "GPT-2 small, 1×128 tokens"


def test_errors_are_relative_to_the_largest_logit():
    truth = LogitTruth(np.array([[1.0, -4.0], [2.0, 0.0]]))
    logits = np.zeros((2, 3, 2))
    logits[1, :2] = truth.logits
    assert truth.compare(ContenderResult(logits)).error == 0.0
    logits[1, 1, 1] = 1.0
    assert truth.compare(ContenderResult(logits)).error == 0.25
    logits[1, 0, 0] = np.nan
    assert np.isnan(truth.compare(ContenderResult(logits)).error)


def test_without_transformers_the_suite_is_left_out_by_name(tiny, monkeypatch):
    pytest.importorskip("torch")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        contender.importlib.util, "find_spec", lambda name: find(name) if name != "transformers" else None
    )
    record = run_benchmark(rounds=5, threads=1, backend="reference")
    why = 'not installed: transformers; it comes with: pip install "sqrtdk[hf]"'
    assert record.tables["left_out"] == [{"contender": "the suite model", "cases": "all", "why": why}]
    assert {row["suite"] for row in record.tables["timings"]} == {"overhead"}
    assert f"Not timed, or not everywhere: the suite model ({why})." in record.reading


def test_without_torch_the_other_suites_run(tiny, monkeypatch):
    absent = ("torch", "transformers")
    find = importlib.util.find_spec
    monkeypatch.setattr(contender.importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    record = run_benchmark(rounds=5, threads=1, backend="reference")
    assert [row["contender"] for row in record.tables["left_out"]] == [
        "the suite model",
        "sqrtdk.torch",
        "sqrtdk.torch with statistics",
        "torch SDPA",
        "sqrtdk.torch recorded",
        "torch SDPA recorded",
        "sqrtdk.torch forward and backward",
        "torch SDPA forward and backward",
    ]
    assert {row["contender"] for row in record.tables["timings"]} == {"sqrtdk", "sqrtdk with statistics"}


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.long
def test_a_model_is_timed_with_each_attention(tiny, transformers):
    record = run_benchmark(["model"], rounds=5, threads=1, backend="reference")
    rows = record.tables["ratios"]
    assert [(row["subject"], row["peer"]) for row in rows] == [(MODEL, peer) for peer in MODEL_PEERS]
    for row in rows:
        assert row["case"] == "tiny, 2×12 tokens"
        assert row["error_of"] == "logits, relative"
        assert row["low"] <= row["ratio"] <= row["high"]
        assert 0.0 < row["error"] < 3e-6
        assert 0.0 < row["peer_error"] < 3e-6
    assert record.tables["left_out"] == []
    assert record.spec["peers"]["transformers"] == transformers.__version__


@pytest.mark.long
def test_weights_are_shared_and_the_random_stream_is_untouched(transformers):
    import torch

    before = torch.get_rng_state()
    (inputs,) = TINY.make_inputs(rng())
    assert torch.equal(torch.get_rng_state(), before)
    runs = [find_contender(name).prepare(TINY, inputs, 1) for name in (MODEL, *MODEL_PEERS)]
    first = [run() for run in runs]
    with torch.no_grad():
        inputs.model.transformer.wte.weight.mul_(2.0)
    for run, old in zip(runs, first, strict=True):
        assert (run() - old).abs().max() > 0.1
    assert inputs.model.config._attn_implementation == "sdpa"
    again = TINY.make_inputs(rng())[0]
    assert torch.equal(again.tokens, inputs.tokens)
    assert torch.equal(again.model.transformer.wpe.weight, inputs.model.transformer.wpe.weight)


@pytest.mark.long
def test_another_scale_or_no_causal_mask_shows(transformers):
    from transformers import AttentionInterface, AttentionMaskInterface

    from benchmarks.model import _prepare
    from sqrtdk.torch.huggingface import attend, make_mask

    right = find_contender(MODEL)
    wrong = {
        "scaled": lambda *args, scaling=None, **kwargs: attend(*args, scaling=1.05 / 8**0.5, **kwargs),
        "open": lambda *args, is_causal=None, **kwargs: attend(*args, is_causal=False, **kwargs),
    }
    for name, function in wrong.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    everyone = [right, *(replace(right, name=name, prepare=_prepare(name)) for name in wrong)]
    measurement = timing.measure(TINY, everyone, Script(GOOD), rounds=5, threads=1, rng=rng())
    assert list(measurement.seconds) == [MODEL]
    assert sorted(measurement.left_out) == sorted(wrong)


@pytest.mark.long
def test_a_transformers_too_old_is_told(transformers, monkeypatch):
    def refuse():
        raise MissingExtraError("transformers 4.0 has no mask interface")

    monkeypatch.setattr("sqrtdk.torch.huggingface.register_huggingface", refuse)
    everyone = [find_contender(name) for name in (MODEL, MODEL_PEERS[0])]
    measurement = timing.measure(TINY, everyone, Script(GOOD), rounds=5, threads=1, rng=rng())
    assert measurement.left_out == {MODEL: "transformers 4.0 has no mask interface"}
    assert list(measurement.seconds) == [MODEL_PEERS[0]]
