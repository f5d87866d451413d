"""Makes tables from timings: ratios with errors, costs, shares of the machine's speed, growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.contender import (
    PLAIN,
    SUBJECTS,
    TENSORS,
    TENSORS_WITH_STATISTICS,
    TRAINING,
    TRAINING_WITH_STATISTICS,
    WITH_STATISTICS,
    WITHOUT_MASK,
)
from benchmarks.memory import Peak
from benchmarks.task import Array
from benchmarks.timing import Measurement, SpeedRatio, is_enough
from sqrtdk.records.record import Record
from sqrtdk.show.table import count

Rows = list[dict[str, Any]]
_RESAMPLES = 1000


def tabulate_ratios(measurements: Sequence[Measurement], rng: np.random.Generator) -> Rows:
    """Return the time of every peer over the time of sqrtdk, with both errors against float64; losses are included."""
    rows = []
    for one in measurements:
        good = one.good_rounds()
        for subject in (name for name in SUBJECTS if name in one.seconds):
            for peer in (name for name in one.seconds if name not in (*SUBJECTS, WITHOUT_MASK)):
                ratio = one.ratio(subject, peer, rng)
                rows.append(
                    {
                        "suite": one.case.suite,
                        "case": one.case.name,
                        "subject": subject,
                        "peer": peer,
                        "ratio": ratio.median,
                        "low": ratio.low,
                        "high": ratio.high,
                        "outcome": judge(ratio),
                        "error_of": one.case.error_of,
                        "error": one.error[subject],
                        "peer_error": one.error[peer],
                        "rounds": int(good.sum()),
                        "rejected": int((~good).sum()),
                    }
                )
    return rows


def judge(ratio: SpeedRatio) -> str:
    """Return the verdict on sqrtdk from an interval of ratios.

    >>> judge(SpeedRatio(1.3, 1.2, 1.4)), judge(SpeedRatio(0.9, 0.8, 0.95)), judge(SpeedRatio(1.0, 0.9, 1.1))
    ('faster', 'slower', 'undecided')
    """
    if ratio.low is None or ratio.high is None:
        return "too few good rounds"
    return "faster" if ratio.low > 1.0 else "slower" if ratio.high < 1.0 else "undecided"


def tabulate_timings(measurements: Sequence[Measurement]) -> Rows:
    """Return the median time of every contender, its errors, and its share of the probed speed in the same rounds."""
    rows = []
    for one in measurements:
        good = one.good_rounds()
        work, read = one.case.multiply_adds(), one.case.bytes_read()
        computes = read is None and one.case.dtype == "float32"  # the probes compute in float32
        for name in one.seconds:
            seconds = one.median_seconds(name)
            rows.append(
                {
                    "suite": one.case.suite,
                    "case": one.case.name,
                    "contender": name,
                    "milliseconds": None if seconds is None else 1e3 * seconds,
                    "share_of_peak": one.share(name, "multiply_adds", work) if computes else None,
                    "share_of_gemm": one.share(name, "gemm", work) if computes else None,
                    "share_of_reading": None if read is None else one.share(name, "bytes_read", read),
                    "error_of": one.case.error_of,
                    "error": one.error[name],
                    "entropy_error": one.entropy_error.get(name),
                    "rounds": int(good.sum()),
                    "rejected": int((~good).sum()),
                }
            )
    return rows


def tabulate_costs(measurements: Sequence[Measurement], rng: np.random.Generator) -> Rows:
    """Return the time that statistics and a mask add, in percent."""
    rows = []
    pairs = {
        "all statistics": (PLAIN, WITH_STATISTICS),
        "all statistics, tensors": (TENSORS, TENSORS_WITH_STATISTICS),
        "all statistics, in a training step": (TRAINING, TRAINING_WITH_STATISTICS),
        "a boolean mask": (WITHOUT_MASK, PLAIN),
    }
    for one in measurements:
        for what, (without, with_it) in pairs.items():
            if without in one.seconds and with_it in one.seconds:
                ratio = one.ratio(without, with_it, rng)
                percent = [None if value is None else 100.0 * (value - 1.0) for value in ratio]
                place = {"suite": one.case.suite, "case": one.case.name, "cost_of": what}
                rows.append({**place, **dict(zip(("percent", "low", "high"), percent, strict=True))})
    return rows


def tabulate_growth(measurements: Sequence[Measurement], peaks: Sequence[Peak], rng: np.random.Generator) -> Rows:
    """Return the power of N, or of the window, with which time and memory grow: the slope in logarithms."""
    growing = [(case, one) for case, one in _of_growth(measurements) if is_enough(one.good_rounds())]
    longest = max((case.queries for case, _ in growing), default=0)
    # The window that is timed at every N.
    common = {case.window for case, _ in growing if case.window is not None and case.queries != longest}
    full = [(case.queries, one) for case, one in growing if case.window is None]
    over_n = [(case.queries, one) for case, one in growing if case.window in common]
    at_longest = [(case.window, one) for case, one in growing if case.window is not None and case.queries == longest]
    rows = [
        *_time_slopes("time, full", "N", full, rng),
        *_time_slopes("time, window", "N", over_n, rng),
        *_time_slopes("time, window", "window", at_longest, rng),
    ]
    for name in dict.fromkeys(peak.contender for peak in peaks):
        known = [peak for peak in peaks if peak.contender == name and peak.extra_bytes]
        if len(known) > 1:
            slope = fit_slope([peak.n for peak in known], [float(peak.extra_bytes or 0) for peak in known])
            rows.append(
                _slope_row("memory, full", "N", name, [peak.n for peak in known], SpeedRatio(slope, None, None))
            )
    return rows


def trace_growth(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return times over N for the figure, one curve per contender and kind of visibility."""
    curves: dict[tuple[str, int | None], dict[str, Any]] = {}
    for case, one in _of_growth(measurements):
        for name in one.seconds:
            seconds = one.median_seconds(name)
            curve = curves.setdefault(
                (name, case.window), {"contender": name, "window": case.window, "n": [], "milliseconds": []}
            )
            curve["n"].append(case.queries)
            curve["milliseconds"].append(None if seconds is None else 1e3 * seconds)
    return [curve for curve in curves.values() if len(curve["n"]) > 1]


def _of_growth(measurements: Sequence[Measurement]) -> list[tuple[Case, Measurement]]:
    return [(one.case, one) for one in measurements if isinstance(one.case, Case) and one.case.suite == "growth"]


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of log y over log x.

    >>> round(fit_slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _time_slopes(
    what: str, over: str, measurements: Sequence[tuple[int, Measurement]], rng: np.random.Generator
) -> Rows:
    x = [size for size, _ in measurements]
    if len(set(x)) < 2:
        return []
    rows = []
    for name in measurements[0][1].seconds:
        times = [np.array(one.seconds[name])[one.good_rounds()] for _, one in measurements]
        slope = fit_slope(x, [float(np.median(values)) for values in times])
        slopes = [fit_slope(x, [_resampled_median(values, rng) for values in times]) for _ in range(_RESAMPLES)]
        low, high = np.quantile(slopes, [0.025, 0.975])
        rows.append(_slope_row(what, over, name, x, SpeedRatio(slope, float(low), float(high))))
    return rows


def _slope_row(what: str, over: str, contender: str, x: Sequence[int], slope: SpeedRatio) -> dict[str, Any]:
    between = {"grows_with": over, "smallest": min(x), "largest": max(x)}
    return {
        "what": what,
        "contender": contender,
        **between,
        "power": slope.median,
        "low": slope.low,
        "high": slope.high,
    }


def _resampled_median(values: Array, rng: np.random.Generator) -> float:
    return float(np.median(rng.choice(values, len(values))))


def tabulate_memory(peaks: Sequence[Peak]) -> Rows:
    """Return peak memory beyond inputs and results, in MiB."""
    return [
        {
            "contender": peak.contender,
            "n": peak.n,
            "mebibytes": None if peak.extra_bytes is None else peak.extra_bytes / 2**20,
            "why_not": peak.why_not,
        }
        for peak in peaks
    ]


def tabulate_left_out(missing: dict[str, str], measurements: Sequence[Measurement]) -> Rows:
    """Return the contenders that were left out, with cases and reasons."""
    rows = [{"contender": name, "cases": "all", "why": why} for name, why in missing.items()]
    cases: dict[tuple[str, str], list[str]] = {}
    for one in measurements:
        for name, why in one.left_out.items():
            cases.setdefault((name, why), []).append(f"{one.case.suite}: {one.case.name}")
    rows += [{"contender": name, "cases": "; ".join(where), "why": why} for (name, why), where in cases.items()]
    return rows


def keep_measured(record: Record) -> dict[str, Rows]:
    """Return the tables without rows that have no number, such as cases with too few good rounds."""
    value_of = {"ratios": "ratio", "timings": "milliseconds", "costs": "percent"}
    return {
        name: [dict(row) for row in rows if name not in value_of or row[value_of[name]] is not None]
        for name, rows in record.tables.items()
    }


def was_too_busy(record: Record) -> bool:
    """Return whether there were ratios to measure and none could be measured."""
    ratios = record.tables["ratios"]
    return bool(ratios) and all(row["ratio"] is None for row in ratios)


def read_tables(tables: dict[str, Rows], about: str) -> list[str]:
    """Return sentences about the tables; the first is the headline."""
    sentences = [_read_headline(tables["ratios"], about), *_read_ratios(tables["ratios"])]
    timings = tables["timings"]
    if timings:
        lost, kept = (sum(row[name] for row in timings) for name in ("rejected", "rounds"))
        sentences.append(f"{lost} of {lost + kept} timings were rejected because the machine changed its speed.")
    sentences += [
        f"{row['case']}: {row['contender']} reads at {row['share_of_reading']:.2f} of the probed bandwidth."
        for row in timings
        if row["share_of_reading"] is not None and row["contender"] == PLAIN
    ]
    largest = max((row["n"] for row in tables["memory"]), default=0)
    for row in tables["memory"]:
        if row["n"] == largest and row["mebibytes"] is not None:
            taken = f"{row['mebibytes']:.1f} MiB beyond inputs and results"
            sentences.append(f"At N = {largest}, one head of 64, {row['contender']} takes {taken}.")
    if tables["left_out"]:
        absent = dict.fromkeys(f"{row['contender']} ({row['why']})" for row in tables["left_out"])
        sentences.append(f"Not timed, or not everywhere: {'; '.join(absent)}.")
    return sentences


def _read_headline(ratios: Rows, about: str) -> str:
    known = [row for row in ratios if row["ratio"] is not None]
    if not known:
        return f"{about}: the machine was too busy, no ratio was measured." if ratios else f"{about}."
    first = known[0]
    chosen = [row for row in known if all(row[name] == first[name] for name in ("suite", "subject", "peer"))]
    speeds = [row["ratio"] for row in chosen]
    middle = math.exp(float(np.mean(np.log(speeds))))
    return (
        f"{about}: {first['subject']} is {middle:.2f} times as fast as {first['peer']} (geometric mean over "
        f"{count(len(chosen), 'case')} of the suite {first['suite']}, from {min(speeds):.2f} to {max(speeds):.2f})."
    )


def _read_ratios(ratios: Rows) -> list[str]:
    slower = [
        f"{row['case']}, {row['subject']} against {row['peer']} ({row['ratio']:.2f})"
        for row in ratios
        if row["outcome"] == "slower"
    ]
    sentences = []
    if any(row["ratio"] is not None for row in ratios):
        sentences.append(f"Slower than a peer: {'; '.join(slower) if slower else 'nowhere'}.")
    unknown = dict.fromkeys(row["case"] for row in ratios if row["ratio"] is None)
    if unknown:
        sentences.append(f"Too few good rounds for a number, so none is given: {'; '.join(unknown)}.")
    return sentences
