"""The benchmark: what it reports follows from the timings, rejected rounds do not count, and losses are shown."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest

import sqrtdk
from bench_machine import BAD, FULL, GOOD, Script, measured
from benchmarks import benchmark, contender, contenders, memory, run_benchmark, suites, tabulation, timing, write_raw
from benchmarks.__main__ import main
from benchmarks.cases import Case
from benchmarks.contender import Contender, NotForThisCaseError
from benchmarks.contenders import find_contender
from benchmarks.probes import LEAST_SHARES, Probe, Prober, is_steady
from benchmarks.task import ContenderResult
from benchmarks.tensors import BackwardCase
from sqrtdk import backends
from sqrtdk.errors import InvalidValueError


def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _reference():
    with backends.use(backends.REFERENCE):
        yield


# How it is timed


def wait_for(name, seconds, error=0.0):
    """A contender that takes a known number of ticks and is wrong by a known amount."""

    def prepare(case, inputs, threads):
        truth = sqrtdk.attention(*inputs[:3]).output + np.float32(error)

        def run():
            CLOCK.now += seconds
            return truth

        return run

    return Contender(name, (), prepare, ContenderResult)


class CLOCK:
    now = 0.0


@pytest.fixture
def clock(monkeypatch):
    CLOCK.now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: CLOCK.now)
    return CLOCK


def test_timings_are_those_of_the_clock(clock):
    pair = [wait_for("sqrtdk", 0.010), wait_for("peer", 0.025)]
    measurement = timing.measure(FULL, pair, Script(GOOD), rounds=5, threads=1, rng=rng())
    assert measurement.repeats == 1
    np.testing.assert_allclose(measurement.seconds["sqrtdk"], [0.010] * 5)
    np.testing.assert_allclose(measurement.seconds["peer"], [0.025] * 5)
    np.testing.assert_allclose(measurement.ratio("sqrtdk", "peer", rng()), (2.5, 2.5, 2.5))


def test_short_calls_are_repeated_equally_often_for_everyone(clock):
    pair = [wait_for("sqrtdk", 1e-5), wait_for("peer", 1e-4)]
    case = replace(FULL, sets=3)
    measurement = timing.measure(case, pair, Script(GOOD), rounds=5, threads=1, rng=rng())
    assert measurement.repeats * 1e-5 >= 0.002
    assert measurement.repeats % 3 == 0
    np.testing.assert_allclose(measurement.seconds["peer"], [1e-4] * 5)


def test_the_order_is_random_in_every_round(clock):
    order = []

    def prepare(name):
        made = wait_for(name, 0.03)

        def listen(case, inputs, threads):
            run = made.prepare(case, inputs, threads)

            def heard():
                order.append(name)
                return run()

            return heard

        return replace(made, prepare=listen)

    three = [prepare(name) for name in ("sqrtdk", "a", "b")]
    timing.measure(FULL, three, Script(GOOD), rounds=20, threads=1, rng=rng())
    rounds = [tuple(order[-60:][i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "sqrtdk"] for one in rounds)
    assert len(set(rounds)) > 3


def test_rounds_in_which_the_machine_changed_do_not_count_and_are_repeated(clock):
    pair = [wait_for("sqrtdk", 0.01), wait_for("peer", 0.02)]
    prober = Script(GOOD, GOOD, BAD, GOOD)
    measurement = timing.measure(FULL, pair, prober, rounds=4, threads=1, rng=rng())
    assert measurement.good_rounds().tolist() == [True, False, False, True, True, True]


def test_a_machine_that_stays_slow_gives_a_number(clock):
    pair = [wait_for("sqrtdk", 0.01), wait_for("peer", 0.02)]
    measurement = timing.measure(FULL, pair, Script(GOOD, BAD), rounds=5, threads=1, rng=rng())
    assert measurement.good_rounds().tolist() == [False, *[True] * 5]
    assert measurement.ratio("sqrtdk", "peer", rng()).median == pytest.approx(2.0)


def test_a_machine_that_keeps_changing_gives_no_number(clock):
    pair = [wait_for("sqrtdk", 0.01), wait_for("peer", 0.02)]
    prober = Script(*[GOOD, BAD] * 20)
    measurement = timing.measure(FULL, pair, prober, rounds=4, threads=1, rng=rng())
    assert len(measurement.seconds["peer"]) == 12
    assert measurement.ratio("sqrtdk", "peer", rng()) == (None, None, None)
    assert measurement.median_seconds("peer") is None
    (row,) = tabulation.tabulate_ratios([measurement], rng())
    assert row["outcome"] == "too few good rounds"
    assert row["rejected"] == 12
    assert "Too few good rounds for a number, so none is given: full." in tabulation.read_tables(
        tables([measurement]), "CPU"
    )


def test_who_is_wrong_or_fails_is_left_out_by_name(clock):
    def fail(case, inputs, threads):
        raise OSError("no such\nlibrary")

    def refuse(case, inputs, threads):
        raise NotForThisCaseError("no windows")

    everyone = [
        wait_for("sqrtdk", 0.01),
        wait_for("wrong", 0.001, error=0.1),
        wait_for("NaN", 0.001, error=np.nan),
        Contender("broken", (), fail, ContenderResult),
        Contender("limited", (), refuse, ContenderResult),
    ]
    measurement = timing.measure(FULL, everyone, Script(GOOD), rounds=5, threads=1, rng=rng())
    assert list(measurement.seconds) == ["sqrtdk"]
    assert measurement.left_out == {
        "wrong": "its answer is off by 1.0e-01",
        "NaN": "its answer is off by nan",
        "broken": "OSError: no such library",
        "limited": "no windows",
    }
    rows = tabulation.tabulate_left_out({"jax": "not installed: jax"}, [measurement])
    assert [row["contender"] for row in rows] == ["jax", "wrong", "NaN", "broken", "limited"]
    with pytest.raises(OSError, match="no such"):
        timing.measure(
            FULL, [Contender("sqrtdk", (), fail, ContenderResult)], Script(GOOD), rounds=5, threads=1, rng=rng()
        )


@pytest.mark.parametrize("quantity", LEAST_SHARES)
def test_each_probe_can_reject(quantity):
    assert is_steady(GOOD, GOOD)
    assert not is_steady(GOOD._replace(**{quantity: 70.0}), GOOD)
    assert not is_steady(GOOD, GOOD._replace(**{quantity: 70.0}))
    assert is_steady(Probe(None, 100.0, None), Probe(None, 100.0, None))


def test_the_matrix_product_is_probed_without_the_kernel():
    measurement = Prober(backends.REFERENCE, 1).probe(reading=True)
    assert measurement.gemm > 0
    assert (measurement.multiply_adds, measurement.bytes_read) == (None, None)


@pytest.mark.slow
@pytest.mark.skipif(not backends.inspect("portable").runs_here, reason="the kernel is not compiled")
def test_the_kernel_probes_itself():
    measurement = Prober("portable", 1).probe(reading=True)
    assert measurement.multiply_adds > 0
    assert measurement.bytes_read > 0


# What is reported


def tables(measurement, peaks=()):
    return {
        "ratios": tabulation.tabulate_ratios(measurement, rng()),
        "timings": tabulation.tabulate_timings(measurement),
        "memory": tabulation.tabulate_memory(peaks),
        "left_out": tabulation.tabulate_left_out({}, measurement),
    }


def test_losses_are_said():
    case = replace(FULL, suite="square")
    slow = measured({"sqrtdk": [2.0, 2.2, 1.8, 2.0, 2.0], "torch SDPA": [1.0, 1.1, 0.9, 1.0, 1.0]}, case=case)
    content = tables([slow])
    assert content["ratios"][0]["outcome"] == "slower"
    assert content["ratios"][0]["ratio"] == pytest.approx(0.5)
    reading = tabulation.read_tables(content, "CPU")
    assert reading[0].startswith("CPU: sqrtdk is 0.50 times as fast as torch SDPA")
    assert "Slower than a peer: full, sqrtdk against torch SDPA (0.50)." in reading


def test_ratios_are_paired_within_rounds():
    # The machine is ten times slower in one round, for both alike.
    measurement = measured({"sqrtdk": [1.0, 10.0, 1.0, 1.0, 1.0], "peer": [2.0, 20.0, 2.0, 2.0, 2.0]})
    assert measurement.ratio("sqrtdk", "peer", rng()) == (2.0, 2.0, 2.0)


def test_every_ratio_has_both_errors_beside_it():
    measurement = measured({"sqrtdk": [1.0] * 5, "sqrtdk with statistics": [1.0] * 5, "a": [1.0] * 5, "b": [1.0] * 5})
    measurement.error = {"sqrtdk": 1e-8, "sqrtdk with statistics": 2e-8, "a": 3e-8, "b": 4e-8}
    rows = tabulation.tabulate_ratios([measurement], rng())
    assert [(row["error"], row["peer_error"]) for row in rows] == [
        (1e-8, 3e-8),
        (1e-8, 4e-8),
        (2e-8, 3e-8),
        (2e-8, 4e-8),
    ]


def test_shares_are_of_the_probes_in_the_same_round():
    case = Case("square", "case", 1, 1, 10, 5)  # 1000 multiply-adds
    rates = [Probe(1000.0, 500.0, None)] * 6
    measurement = measured({"sqrtdk": [2.0] * 5}, rates, case)
    (row,) = tabulation.tabulate_timings([measurement])
    assert (row["share_of_peak"], row["share_of_gemm"], row["share_of_reading"]) == (0.5, 1.0, None)
    decode = Case("real", "decode", 1, 1, 1, 5, keys=25, bound_by_reading=True)  # 1000 bytes
    measurement = measured({"sqrtdk": [2.0] * 5}, [Probe(1.0, 1.0, 1000.0)] * 6, decode)
    (row,) = tabulation.tabulate_timings([measurement])
    assert (row["share_of_peak"], row["share_of_gemm"], row["share_of_reading"]) == (None, None, 0.5)


def test_costs_are_percent_of_the_time_without():
    seconds = {"sqrtdk": [1.0] * 5, "sqrtdk with statistics": [1.05] * 5, "sqrtdk without the mask": [0.8] * 5}
    rows = tabulation.tabulate_costs([measured(seconds)], rng())
    assert {row["cost_of"]: round(row["percent"], 6) for row in rows} == {"all statistics": 5.0, "a boolean mask": 25.0}


@pytest.mark.slow
def test_growth_finds_the_power():
    measurement = []
    for n in (512, 1024, 2048):
        measurement.append(measured({"sqrtdk": [n**2.0] * 5}, case=Case("growth", f"full {n}", 1, 1, n, 8)))
        narrow = Case("growth", f"window {n}", 1, 1, n, 8, causal=True, window=64)
        measurement.append(measured({"sqrtdk": [64.0 * n] * 5}, case=narrow))
    wide = Case("growth", "wide", 1, 1, 2048, 8, causal=True, window=256)
    measurement.append(measured({"sqrtdk": [256.0 * 2048] * 5}, case=wide))
    peaks = [memory.Peak("n×n in NumPy", n, 4 * n * n) for n in (1024, 2048)]
    rows = tabulation.tabulate_growth(measurement, peaks, rng())
    assert [(row["what"], row["grows_with"], round(row["power"], 6)) for row in rows] == [
        ("time, full", "N", 2.0),
        ("time, window", "N", 1.0),
        ("time, window", "window", 1.0),
        ("memory, full", "N", 2.0),
    ]
    assert rows[0]["low"] == pytest.approx(2.0)
    (full, window) = tabulation.trace_growth(measurement)
    assert full["n"] == window["n"] == [512, 1024, 2048]


@pytest.mark.slow
def test_peak_memory_sees_the_matrix():
    n = 1024
    blocks = memory.measure_peak(find_contender("sqrtdk"), n, 1)
    matrix = memory.measure_peak(find_contender("n×n in NumPy"), n, 1)
    assert (blocks.why_not, matrix.why_not) == (None, None)
    assert blocks.extra_bytes > 0
    assert matrix.extra_bytes > 3 * 4 * n * n


@pytest.mark.skipif(not memory._can_reset(), reason="peak memory cannot be read on this system")
@pytest.mark.parametrize(("kept", "lowest", "highest"), [(2**24, 0, 2**23), (8, 2**26 - 2**23, 2**26 + 2**23)])
def test_peak_counts_what_is_held_for_a_while_and_not_the_result(kept, lowest, highest):
    def prepare(case, inputs, threads):
        # 64 MiB, of which all is the result, or next to nothing.
        return lambda: np.ones(2**24, np.float32)[:kept].copy() if kept < 2**24 else np.ones(kept, np.float32)

    assert lowest <= memory._rise_of_peak(Contender("held", (), prepare, ContenderResult), 8, 1) <= highest


def test_memory_says_why_there_is_no_number(monkeypatch):
    monkeypatch.setattr(contenders.os, "sysconf", lambda name: 2**10)
    measurement = memory.measure_peak(find_contender("n×n in NumPy"), 2**15, 1)
    assert measurement.extra_bytes is None
    assert measurement.why_not == "needs about 24 GiB, more than is free"
    monkeypatch.setattr(memory, "_can_reset", lambda: False)
    assert "cannot be read" in memory.measure_peak(find_contender("sqrtdk"), 8, 1).why_not
    (row, _) = tabulation.tabulate_memory([measurement, measurement])
    assert row["mebibytes"] is None


def test_results_are_not_counted_as_extra_memory():
    result = sqrtdk.attention(*np.ones((3, 4, 8), np.float32))
    assert memory._count_bytes(result) == 4 * 8 * 4 + 13 * 4 * 8


# The whole


@pytest.fixture
def tiny(monkeypatch):
    """One tiny case per suite, and a machine that is always itself."""
    small = [
        replace(suite, cases=[replace(FULL, suite=suite.name, name=f"{suite.name} case")])
        for suite in suites.SUITES
        if suite.cases and suite.name not in ("growth", "model", "training") and not suite.apart
    ]
    (tensors,) = (suite for suite in small if suite.name == "tensors")
    tensors.cases.append(BackwardCase("tensors", "backward case", 2, 2, 9, 8))
    monkeypatch.setattr(suites, "SUITES", tuple(small))
    monkeypatch.setattr(benchmark, "Prober", lambda level, threads: Script(GOOD))
    monkeypatch.setattr(timing, "_LEAST_SECONDS", 1e-6)  # no repeats: nobody reads these times


def test_a_run_keeps_every_timing(tiny):
    steps = []
    record = run_benchmark(rounds=5, threads=1, backend="reference", on_step=lambda *step: steps.append(step))
    assert record.kind == "bench"
    assert record.spec["threads"] == 1
    assert record.spec["backend"] == "reference"
    assert record.spec["command"].startswith(
        "python -m benchmarks --suite square,statistics,real,overhead,tensors,bfloat16 --rounds 5 --thr"
    )
    content = json.loads(json.dumps(record.as_json()))
    assert content["cpu"]
    for case in content["curves"]["cases"]:
        assert all(len(times) == 5 for times in case["seconds"].values())
        assert len(case["probes"]) == 6
        assert case["counted"] == [True] * 5
    assert {row["suite"] for row in record.tables["ratios"]} >= {"square", "statistics", "real", "overhead"}
    assert all(row["outcome"] in ("faster", "slower", "undecided") for row in record.tables["ratios"])
    fractions = [fraction for _, fraction in steps]
    assert fractions == sorted(fractions)
    assert 0.0 <= fractions[0] <= fractions[-1] <= 1.0


def test_missing_peers_are_named(tiny, monkeypatch):
    absent = ["jax", "torch", "transformers"]
    monkeypatch.setattr(contender.importlib.util, "find_spec", lambda name: None if name in absent else object())
    peer = find_contender("jax")
    assert peer.why_missing(2, 2) == "not installed: jax"
    comes_with = 'not installed: {}; it comes with: pip install "sqrtdk[{}]"'
    assert find_contender("sqrtdk.torch").why_missing(2, 2) == comes_with.format("torch", "torch")
    assert find_contender("model with sdpa").why_missing(2, 2) == comes_with.format("torch, transformers", "hf")
    absent.clear()
    assert peer.why_missing(2, 2) is None
    assert peer.why_missing(1, 2) == "always uses 2 threads here and cannot be told to use 1"


def test_cases_are_chosen_by_a_part_of_their_name(tiny):
    from benchmarks.suites import choose_suites

    names = [case.name for suite in choose_suites(None) for case in suite.cases]
    part = names[0][-4:]
    chosen = choose_suites(None, case=part)
    assert [case.name for suite in chosen for case in suite.cases] == [name for name in names if part in name]
    assert all(suite.cases for suite in chosen)
    record = run_benchmark(["overhead"], case=part, rounds=5, threads=1, backend="reference")
    assert {row["case"] for row in record.tables["timings"]} == {
        case.name for suite in choose_suites(["overhead"], case=part) for case in suite.cases
    }
    assert f"--case {shlex.quote(part)} " in record.spec["command"]
    with pytest.raises(InvalidValueError, match="nowhere"):
        choose_suites(None, case="nowhere")


def test_a_run_that_is_stopped_keeps_its_cases(tiny):
    kept = []

    def stop_at_the_second(record):
        kept.append(record)
        if len(kept) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_benchmark(rounds=5, threads=1, backend="reference", on_case=stop_at_the_second)
    whole = run_benchmark(rounds=5, threads=1, backend="reference")
    cases = list(dict.fromkeys(row["case"] for row in whole.tables["timings"]))
    for count, record in enumerate(kept, start=1):
        assert list(dict.fromkeys(row["case"] for row in record.tables["timings"])) == cases[:count]
        assert record.spec["cases_left"] == len(cases) - count
        assert record.reading[-1].startswith("The run was stopped before its end")
    assert "cases_left" not in whole.spec
    assert not any("stopped" in sentence for sentence in whole.reading)


def test_threads_are_the_same_for_torch_and_given_back(tiny):
    torch = pytest.importorskip("torch")
    before, own = torch.get_num_threads(), backends.threads()
    seen = []
    try:
        torch.set_num_threads(2)
        run_benchmark(
            ["overhead"],
            rounds=5,
            threads=1,
            on_step=lambda *_: seen.append((torch.get_num_threads(), backends.threads())),
        )
        assert set(seen) == {(1, 1)}
        assert (torch.get_num_threads(), backends.threads()) == (2, own)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_a_busy_machine_is_said_and_is_an_error(tiny, monkeypatch, capsys, tmp_path, as_json):
    monkeypatch.setattr(benchmark, "Prober", lambda level, threads: Script(*[GOOD, BAD] * 50))
    raw = tmp_path / "bench.json"
    line = f"--suite overhead --rounds 5 --backend reference --output {raw}"
    with pytest.raises(SystemExit) as ended:
        main([*line.split(), *(["--json"] if as_json else [])])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert "sqrtdk: the machine was too busy: in no case did 5 rounds count; try again" in err
    assert json.loads(raw.read_text())["ratios"][0]["ratio"] is None
    if as_json:
        assert json.loads(out)["ratios"]
    else:
        assert "–" not in out  # no table of dashes
        assert "the machine was too busy, no ratio was measured." in " ".join(out.split())


@pytest.mark.slow
def test_command_writes_json(tiny, capsys, tmp_path):
    raw = tmp_path / "bench.json"
    line = f"--suite overhead --rounds 5 --backend reference --output {raw} --json"
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert not ended.value.code
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(raw.read_text())
    assert "curves" not in printed
    assert written["curves"]["cases"][0]["seconds"]["sqrtdk"]
    assert written["ratios"] == printed["ratios"]
    with pytest.raises(SystemExit):
        main(["--suite", "overhead", "--rounds", "5"])
    assert "overhead case" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--suite", "squares"],
            "known: bfloat16, growth, memory, model, overhead, peers, real, square, statistics, tensors",
        ),
        (["--rounds", "4"], "rounds must be at least 5 for an interval, got 4"),
        (["--threads", "0"], "--threads must be from 1 to 256, got 0"),
        (["--backend", "sse"], "unknown backend 'sse'; known: avx2, avx512, avx512_bf16, portable, reference"),
        (["--output", "no/such/place.json"], "--output must lie in an existing directory"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m benchmarks --suite" in " ".join(capsys.readouterr().out.split())


def test_raw_file_replaces_the_old_one_whole(tiny, tmp_path):
    record = run_benchmark(["overhead"], rounds=5, backend="reference")
    path = tmp_path / "raw.json"
    path.write_text("old")
    assert write_raw(record, path) == path
    assert json.loads(path.read_text())["kind"] == "bench"
    with pytest.raises(InvalidValueError, match="existing directory"):
        write_raw(record, tmp_path / "nowhere" / "raw.json")
