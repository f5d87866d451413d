"""Runs the suites of a benchmark and returns one record that keeps every timing."""

from __future__ import annotations

import importlib.util
import json
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tabulation
from benchmarks.children import Guest
from benchmarks.contender import Contender
from benchmarks.contenders import find_contender, peer_versions
from benchmarks.memory import Peak, measure_peak
from benchmarks.probes import Probe, Prober, best_of
from benchmarks.suites import Suite, choose_suites, memory_lengths
from benchmarks.timing import FEWEST_ROUNDS, Measurement, measure
from sqrtdk import backends
from sqrtdk.errors import FallbackWarning, InvalidValueError
from sqrtdk.records.record import Record, cpu_name
from sqrtdk.report.files import write_whole
from sqrtdk.show.table import count

COMMAND = "python -m benchmarks"
DEFAULT_ROUNDS, QUICK_ROUNDS = 15, 7
_FIRST_PROBES = 5

Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class _Setting:
    """Settings of the whole run."""

    rounds: int
    threads: int
    level: str
    case: str | None
    quick: bool
    rng: np.random.Generator


def run_benchmark(
    suites: Sequence[str] | None = None,
    *,
    case: str | None = None,
    rounds: int | None = None,
    threads: int | None = None,
    backend: str | None = None,
    quick: bool = False,
    seed: int = 0,
    on_step: Tell | None = None,
    on_case: Callable[[Record], object] | None = None,
) -> Record:
    """Time attention on arrays, on tensors and in a model against its peers, interleaved.

    Contenders share one process, except in the suite `peers`, where each contender has its own process.

    Args:
        suites: names from `suites.SUITES`; None for all suites.
        case: run only cases whose name contains this.
        rounds: number of good rounds per case; None for 15, or 7 if quick.
        threads: threads per library; None for `sqrtdk.backends.threads()`.
        backend: backend of sqrtdk; None for the default backend.
        quick: leave out sequences beyond 2048; the model gets one short sequence.
        seed: seed of inputs, orders and resampling.
        on_step: called with a description and the finished share.
        on_case: called with the record so far after each case but the last, so that an interrupted run is not lost.

    Returns:
        A record of kind ``"bench"`` with the tables ratios, timings, costs, growth, memory and left_out. Its curves
        hold every timing and every probe. Suites whose packages are not installed are listed in left_out.

    Raises:
        InvalidValueError: for an unknown suite, case or backend, too few rounds, or an impossible number of threads.
    """
    chosen = choose_suites(suites, case=case, quick=quick)
    rounds = (QUICK_ROUNDS if quick else DEFAULT_ROUNDS) if rounds is None else rounds
    if rounds < FEWEST_ROUNDS:
        raise InvalidValueError("rounds", f"must be at least {FEWEST_ROUNDS} for an interval, got {rounds}")
    default_threads = backends.threads()
    with (
        backends.use(backends.current() if backend is None else backend),
        _threads(threads) as used,
        warnings.catch_warnings(),
    ):
        # If the backend does not compute a call, the engine that does is timed.
        warnings.simplefilter("ignore", FallbackWarning)
        setting = _Setting(rounds, used, backends.current(), case, quick, np.random.default_rng(seed))
        present, missing = _find_present(chosen, used, default_threads)
        kept, missing = _leave_out(chosen, present, missing)
        spec = {
            "suites": [suite.name for suite in chosen],
            "rounds": rounds,
            "threads": used,
            "backend": setting.level,
            "case": case,
            "quick": quick,
            "seed": seed,
            "dtype": ", ".join(sorted({case.dtype for suite in kept for case in suite.cases} or {"float32"})),
            "cpu": cpu_name(),
            "peers": peer_versions(),
            "command": _name_command([suite.name for suite in chosen], setting, seed),
        }

        def keep(measurements: Sequence[Measurement], probes: Sequence[Probe], left: int) -> None:
            if on_case is not None and left > 0:
                on_case(_make_record({**spec, "cases_left": left}, measurements, probes, [], missing))

        measurements, probes, peaks = _run_suites(kept, present, setting, on_step or (lambda *_: None), keep)
    return _make_record(spec, measurements, probes, peaks, missing)


def write_raw(record: Record, path: str | Path) -> Path:
    """Write a record as JSON, including every timing; an existing file is replaced once the new one is complete."""
    return write_whole(path, (json.dumps(record.as_json(), indent=1, ensure_ascii=False) + "\n").encode())


def _name_command(suites: Sequence[str], setting: _Setting, seed: int) -> str:
    """Return the command that repeats the run, with all defaults written out."""
    quick = " --quick" if setting.quick else ""
    case = "" if setting.case is None else f" --case {shlex.quote(setting.case)}"
    return (
        f"{COMMAND} --suite {','.join(suites)}{case} --rounds {setting.rounds} --threads {setting.threads} "
        f"--backend {setting.level} --seed {seed}{quick}"
    )


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Use the same number of threads for sqrtdk and torch, and yield that number."""
    with backends.use_threads(backends.threads() if count is None else count):
        used = backends.threads()
        if importlib.util.find_spec("torch") is None:
            yield used
            return
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(used)
        try:
            yield used
        finally:
            torch.set_num_threads(before)


def _find_present(
    suites: Sequence[Suite], threads: int, default_threads: int
) -> tuple[dict[str, Contender], dict[str, str]]:
    present, missing = {}, {}
    for name in dict.fromkeys(name for suite in suites for name in suite.contenders):
        contender = find_contender(name)
        why = contender.why_missing(threads, default_threads)
        if why is None:
            present[name] = contender
        else:
            missing[name] = why
    return present, missing


def _leave_out(
    suites: Sequence[Suite], present: dict[str, Contender], missing: dict[str, str]
) -> tuple[list[Suite], dict[str, str]]:
    """Return the suites that have a contender to compare, and the reasons for missing suites and contenders."""
    kept = [suite for suite in suites if any(name in present for name in suite.subjects)]
    absent = {f"the suite {suite.name}": missing[suite.subjects[0]] for suite in suites if suite not in kept}
    wanted = {name for suite in kept for name in suite.contenders}
    return kept, absent | {name: why for name, why in missing.items() if name in wanted}


def _run_suites(
    suites: Sequence[Suite],
    present: dict[str, Contender],
    setting: _Setting,
    tell: Tell,
    keep: Callable[[Sequence[Measurement], Sequence[Probe], int], None],
) -> tuple[list[Measurement], list[Probe], list[Peak]]:
    cases = [(suite, case) for suite in suites for case in suite.cases]
    remembering = [suite for suite in suites if suite.name == "memory"]
    tasks = [
        (present[name], n)
        for suite in remembering
        for n in memory_lengths(quick=setting.quick)
        for name in suite.contenders
        if name in present
    ]
    steps = len(cases) + len(tasks)
    prober = Prober(setting.level, setting.threads)
    for _ in range(_FIRST_PROBES):
        prober.probe()
    measurements = []
    with ExitStack() as stack:
        guests = _invite(suites, present, setting, stack)
        for index, (suite, case) in enumerate(cases):
            names = [name for name in suite.contenders_for(case) if name in present]
            contenders = [guests[name].as_contender() if suite.apart else present[name] for name in names]
            label = f"{suite.name}: {case.name}"

            def follow(done: int, label: str = label, index: int = index) -> None:
                tell(label, (index + min(done / setting.rounds, 1.0)) / steps)

            tell(label, index / steps)
            common: dict[str, Any] = {"rounds": setting.rounds, "threads": setting.threads, "rng": setting.rng}
            measurements.append(measure(case, contenders, prober, on_round=follow, **common))
            keep(measurements, prober.results, steps - index - 1)
    peaks = []
    for index, (contender, n) in enumerate(tasks):
        tell(f"memory: {contender.name}, N {n}", (len(cases) + index) / steps)
        peaks.append(measure_peak(contender, n, setting.threads))
    return measurements, prober.results, peaks


def _invite(
    suites: Sequence[Suite], present: dict[str, Contender], setting: _Setting, stack: ExitStack
) -> dict[str, Guest]:
    """Return the contenders of suites that use separate processes; the stack ends each process."""
    guests = {
        name: Guest(name, setting.level, setting.threads)
        for suite in suites
        if suite.apart
        for name in suite.contenders
        if name in present
    }
    for guest in guests.values():
        stack.callback(guest.close)
    return guests


def _make_record(
    spec: dict[str, Any],
    measurements: Sequence[Measurement],
    probes: Sequence[Probe],
    peaks: Sequence[Peak],
    missing: dict[str, str],
) -> Record:
    best = best_of(probes)
    rng = np.random.default_rng(spec["seed"])
    tables = {
        "ratios": tabulation.tabulate_ratios(measurements, rng),
        "timings": tabulation.tabulate_timings(measurements),
        "costs": tabulation.tabulate_costs(measurements, rng),
        "growth": tabulation.tabulate_growth(measurements, peaks, rng),
        "memory": tabulation.tabulate_memory(peaks),
        "left_out": tabulation.tabulate_left_out(missing, measurements),
    }
    curves = {
        "cases": [
            {
                "suite": one.case.suite,
                "case": one.case.name,
                "shape": one.case.shape,
                "dtype": one.case.dtype,
                "repeats": one.repeats,
                "seconds": one.seconds,
                "probes": [probe._asdict() for probe in one.probes],
                "counted": one.good_rounds().tolist(),
            }
            for one in measurements
        ],
        "growth": tabulation.trace_growth(measurements),
        "probes": [probe._asdict() for probe in probes],
        "best_probe": best._asdict(),
    }
    about = f"{spec['cpu']}, {spec['backend']}, {count(spec['threads'], 'thread')}, {spec['dtype']}"
    sentences = tabulation.read_tables(tables, about)
    if left := spec.get("cases_left", 0):
        sentences.append(f"The run was stopped before its end; missing: {count(left, 'measurement')}.")
    return Record("bench", spec, tables, curves, sentences)
