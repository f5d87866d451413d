"""Guests: contenders in processes of their own, asked in turn; who dies or hangs is named and stops nobody else."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bench_peers
import sqrtdk
from bench_machine import FULL, GOOD, Script
from benchmarks import benchmark, children, run_benchmark, suites, timing
from benchmarks.cases import Case
from benchmarks.children import Guest
from benchmarks.contender import TENSORS, TORCH, PeerError
from sqrtdk import backends

FINDER = "bench_peers:find_contender"


def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _beside(monkeypatch):
    """Guests find the contenders of the tests; nobody waits long, and nobody reads these times."""
    monkeypatch.setenv("PYTHONPATH", str(Path(bench_peers.__file__).parent))
    monkeypatch.setattr(children, "TIMING_SECONDS", 1.0)
    monkeypatch.setattr(timing, "_LEAST_SECONDS", 1e-6)


@pytest.fixture
def invite():
    guests = []

    def make(name, finder=FINDER):
        guests.append(Guest(name, backends.REFERENCE, 1, finder))
        return guests[-1]

    yield make
    for guest in guests:
        guest.close()


def measure(guests, case=FULL):
    contenders = [guest.as_contender() for guest in guests]
    return timing.measure(case, contenders, Script(GOOD), rounds=5, threads=1, rng=rng())


@pytest.mark.slow
def test_a_guest_answers_and_times_where_it_is(invite):
    inputs = FULL.make_inputs(rng())[0]
    run = invite("right").as_contender().prepare(FULL, inputs, 1)
    with backends.use(backends.REFERENCE):
        np.testing.assert_array_equal(run().output, sqrtdk.attention(*inputs[:3]).output)
    assert bench_peers.SECONDS <= run.time(3, True) < 1.0


@pytest.mark.slow
def test_a_guest_rests_while_nobody_asks(invite):
    guest = invite("right")
    run = guest.as_contender().prepare(FULL, FULL.make_inputs(rng())[0], 1)
    status = Path(f"/proc/{guest._process.pid}/stat")
    deadline = time.monotonic() + 10.0
    while status.read_text().rpartition(")")[2].split()[0] != "T":  # stopped, a moment after its answer
        assert time.monotonic() < deadline
    assert run.time(1, False) > 0.0


@pytest.mark.slow
def test_each_guest_has_a_process_that_ends_with_it(invite):
    guests = [invite("right"), invite("right")]
    for guest in guests:
        guest.as_contender().prepare(FULL, FULL.make_inputs(rng())[0], 1)
    processes = [guest._process for guest in guests]
    assert len({os.getpid(), *(process.pid for process in processes)}) == 3
    guests[0].close()
    assert processes[0].returncode == 0
    assert processes[1].poll() is None


@pytest.mark.long
def test_who_refuses_fails_dies_hangs_or_is_wrong_is_named(invite):
    peers = ("right", "refuses", "fails", "dies", "exits", "hangs", "wrong")
    measurement = measure([invite(name) for name in ("sqrtdk.torch", *peers)])
    assert sorted(measurement.seconds) == ["right", "sqrtdk.torch"]
    assert all(len(times) == 5 for times in measurement.seconds.values())
    assert sorted(measurement.error) == ["right", "sqrtdk.torch"]
    off = measurement.left_out.pop("wrong")
    assert off.startswith("its answer is off by")
    assert measurement.left_out == {
        "refuses": "no such mask",
        "fails": "OSError: no such library",
        "dies": "its process was ended by SIGKILL",
        "exits": "its process ended with 1: out of luck",
        "hangs": "did not answer within 1 s and was ended",
    }


@pytest.mark.slow
def test_who_was_lost_is_not_asked_again(invite):
    guests = [invite("sqrtdk.torch"), invite("exits")]
    for case in (FULL, replace(FULL, name="another")):
        assert measure(guests, case).left_out == {"exits": "its process ended with 1: out of luck"}


@pytest.mark.slow
def test_without_sqrtdk_there_is_nothing_to_compare(invite):
    subject = replace(invite("dies").as_contender(), name="sqrtdk.torch")
    with pytest.raises(PeerError, match="SIGKILL"):
        timing.measure(FULL, [subject], Script(GOOD), rounds=9, threads=1, rng=rng())


@pytest.fixture
def tiny(monkeypatch):
    (suite,) = suites.choose_suites(["peers"])
    one = Case("peers", "one", 1, 2, 9, 8)
    narrow = replace(one, name="one, bfloat16", causal=True, dtype="bfloat16")
    monkeypatch.setattr(suites, "SUITES", (replace(suite, cases=[one, narrow], contenders=(TENSORS, TORCH)),))
    monkeypatch.setattr(benchmark, "Prober", lambda level, threads: Script(GOOD))
    monkeypatch.setattr(children, "TIMING_SECONDS", 120.0)


@pytest.mark.long
def test_the_suite_runs_torch_beside_sqrtdk(tiny):
    record = run_benchmark(["peers"], rounds=5, threads=1)
    rows = record.tables["ratios"]
    assert [(row["case"], row["subject"], row["peer"]) for row in rows] == [
        ("one", TENSORS, TORCH),
        ("one, bfloat16", TENSORS, TORCH),
    ]
    for row, largest in zip(rows, (2e-6, 2e-2), strict=True):
        assert row["low"] <= row["ratio"] <= row["high"]
        assert 0.0 < row["error"] < largest
        assert 0.0 < row["peer_error"] < largest
    assert record.tables["left_out"] == []
    assert record.spec["dtype"] == "bfloat16, float32"


def test_the_suite_holds_the_shapes_in_both_dtypes_and_keeps_everyone_apart():
    (suite,) = suites.choose_suites(["peers"])
    assert suite.apart
    assert {case.shape[:2] + case.shape[3:] for case in suite.cases} == {
        (8, 8, 128, 128, 64),
        (1, 12, 512, 512, 64),
        (1, 8, 2048, 2048, 64),
        (1, 4, 4096, 4096, 128),
    }
    assert {(case.causal, case.dtype) for case in suite.cases} == {
        (causal, dtype) for causal in (False, True) for dtype in ("float32", "bfloat16")
    }
    assert len(suite.cases) == 16
    # Two libraries in one process would disturb one another.
    for other in suites.SUITES:
        assert other.apart or not set(suites.PEERS) & set(other.contenders)
