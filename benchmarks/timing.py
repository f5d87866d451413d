"""Times contenders side by side: random order in every round, probes between rounds, ratios within rounds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contender import SUBJECTS, WITHOUT_MASK, Contender, NotForThisCaseError, PeerError, RemoteRun, TimedCall
from benchmarks.probes import Probe, Prober, is_steady
from benchmarks.task import LARGEST_ERRORS, Array, TimedTask

# Least duration of a timing, so that the clock and the loop around the call do not matter.
_LEAST_SECONDS = 0.002
# Below this, an untimed call runs first, because the last contender left its data in caches and threads on cores.
_SHORT_SECONDS = 0.02
# Above this, a single call is enough to estimate the duration.
_LONG_SECONDS = 0.5
# Rejected rounds are repeated up to this factor.
_MOST_ATTEMPTS = 3
# Fewer rounds give no useful interval.
FEWEST_ROUNDS = 5
_RESAMPLES = 2000
_LONGEST_REASON = 200


class SpeedRatio(NamedTuple):
    """Median of paired ratios with a 95% bootstrap interval over rounds; all None with too few rounds."""

    median: float | None
    low: float | None
    high: float | None


@dataclass
class Measurement:
    """Every timing of one task.

    `seconds` has one entry per round for each contender. `probes` has one entry before each round and one after the
    last. `repeats` calls make one timing. `left_out` has the reason for each contender that does not take part.
    """

    case: TimedTask
    repeats: int
    seconds: dict[str, list[float]]
    probes: list[Probe]
    error: dict[str, float]
    entropy_error: dict[str, float]
    left_out: dict[str, str] = field(default_factory=dict)

    def leave_out(self, contender: str, why: str) -> None:
        """Remove a contender and its results from the measurement."""
        self.left_out[contender] = why
        for values in (self.seconds, self.error, self.entropy_error):
            values.pop(contender, None)

    def good_rounds(self) -> Array:
        """Return which rounds count `[rounds]`: those whose two neighbouring probes show the same speed.

        Probes are not compared with the best probe of the run: on a shared machine the peak may halve for minutes. That
        slows all contenders of a round equally, and their paired ratios stay valid.
        """
        pairs = zip(self.probes[:-1], self.probes[1:], strict=True)
        return np.array([is_steady(before, after) for before, after in pairs], dtype=bool)

    def median_seconds(self, contender: str) -> float | None:
        """Return the median time of one call over the rounds that count; None with too few rounds."""
        good = self.good_rounds()
        return float(np.median(np.array(self.seconds[contender])[good])) if is_enough(good) else None

    def share(self, contender: str, quantity: str, amount: float) -> float | None:
        """Return the median over rounds of amount per second, relative to the probes around the round."""
        good = self.good_rounds()
        rates = [getattr(probe, quantity) for probe in self.probes]
        if not is_enough(good) or None in rates:
            return None
        beside = np.maximum(rates[:-1], rates[1:])
        return float(np.median((amount / np.array(self.seconds[contender]) / beside)[good]))

    def ratio(self, subject: str, peer: str, rng: np.random.Generator) -> SpeedRatio:
        """Return the time of the peer over the time of the subject; above 1 the subject is faster."""
        good = self.good_rounds()
        if not is_enough(good):
            return SpeedRatio(None, None, None)
        return bootstrap_median((np.array(self.seconds[peer]) / np.array(self.seconds[subject]))[good], rng)


def is_enough(good: Array) -> bool:
    """Return whether enough rounds count for a number.

    >>> is_enough(np.array([True] * 5 + [False])), is_enough(np.array([True] * 4))
    (True, False)
    """
    return bool(good.sum() >= FEWEST_ROUNDS)


def bootstrap_median(values: Array, rng: np.random.Generator) -> SpeedRatio:
    """Return the median and its 95% percentile interval from resampled rounds.

    >>> bootstrap_median(np.array([2.0, 2.0, 2.0]), np.random.default_rng(0))
    SpeedRatio(median=2.0, low=2.0, high=2.0)
    """
    medians = np.median(rng.choice(values, (_RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return SpeedRatio(float(np.median(values)), float(low), float(high))


def measure(
    case: TimedTask,
    contenders: Sequence[Contender],
    prober: Prober,
    *,
    rounds: int,
    threads: int,
    rng: np.random.Generator,
    on_round: Callable[[int], None] | None = None,
) -> Measurement:
    """Time all contenders on one case, in random order in every round, until `rounds` rounds count.

    Args:
        contenders: contenders to time. One that cannot compute the case, computes it wrongly or is lost on the way is
            left out by name.
        rounds: number of rounds that should count; up to three times as many are tried if probes differ.
        threads: number of threads for each contender.
        on_round: called before each round with its index.
    """
    sets = case.make_inputs(rng)
    reading = case.bytes_read() is not None
    runs, found = _prepare_all(case, sets, contenders, threads)
    found.repeats, warm_up = _choose_repeats(runs, found)
    found.probes.append(prober.probe(reading=reading))
    while found.good_rounds().sum() < rounds:
        done = len(found.probes) - 1
        if done == _MOST_ATTEMPTS * rounds or not runs:
            break
        if on_round is not None:
            on_round(done)
        for name in rng.permutation(sorted(runs)):
            prober.settle()
            try:
                found.seconds[name].append(_time(runs[name], found.repeats, warm_up))
            except PeerError as error:
                _lose(name, error, runs, found)
        found.probes.append(prober.probe(reading=reading))
    return found


def _prepare_all(
    case: TimedTask, sets: Sequence[Any], contenders: Sequence[Contender], threads: int
) -> tuple[dict[str, TimedCall | RemoteRun], Measurement]:
    truth = case.compute_truth(sets[0])
    found = Measurement(case, 1, {}, [], {}, {})
    runs: dict[str, TimedCall | RemoteRun] = {}
    for contender in contenders:
        own = contender.name in (*SUBJECTS, WITHOUT_MASK)
        try:
            calls = [contender.prepare(case, inputs, threads) for inputs in sets]
            answer = contender.read(calls[0]())
        except NotForThisCaseError as reason:
            found.leave_out(contender.name, str(reason))
            continue
        except Exception as error:  # any error of another library is reported and stops nothing
            if own:
                raise
            found.leave_out(contender.name, describe_error(error))
            continue
        off, entropy_error = truth.compare(answer)
        if not off <= LARGEST_ERRORS[case.dtype]:  # also true for NaN
            found.leave_out(contender.name, f"its answer is off by {off:.1e}")
            continue
        found.error[contender.name] = off
        if entropy_error is not None:
            found.entropy_error[contender.name] = entropy_error
        found.seconds[contender.name] = []
        runs[contender.name] = _take_turns(calls)
    return runs, found


def _take_turns(calls: Sequence[TimedCall]) -> TimedCall:
    if len(calls) == 1:
        return calls[0]
    endless = itertools.cycle(calls)
    return lambda: next(endless)()


def describe_error(error: Exception) -> str:
    """Return an error in one line; a `PeerError` already has its description.

    >>> describe_error(OSError("no such\\nlibrary"))
    'OSError: no such library'
    """
    text = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_LONGEST_REASON]


def _lose(name: str, error: PeerError, runs: dict[str, TimedCall | RemoteRun], found: Measurement) -> None:
    """Continue without a peer that was lost during timing; raise if the lost contender is sqrtdk."""
    if name in SUBJECTS:
        raise error
    del runs[name]
    found.leave_out(name, describe_error(error))


def _choose_repeats(runs: dict[str, TimedCall | RemoteRun], found: Measurement) -> tuple[int, bool]:
    """Return the calls per timing, and whether an untimed call runs first; the fastest contender decides for all."""
    fastest, sets = _LONG_SECONDS, found.case.sets
    for name, run in list(runs.items()):
        try:
            fastest = min(fastest, _estimate(run))
        except PeerError as error:
            _lose(name, error, runs, found)
    # Every set of inputs is used equally often.
    return sets * math.ceil(_LEAST_SECONDS / fastest / sets), fastest < _SHORT_SECONDS


def _estimate(run: TimedCall | RemoteRun) -> float:
    once = _time(run, 1, False)
    return once if once > _LONG_SECONDS else min(_time(run, 1, True) for _ in range(3))


def _time(run: TimedCall | RemoteRun, repeats: int, warm_up: bool) -> float:
    elsewhere = getattr(run, "time", None)
    return float(elsewhere(repeats, warm_up)) if elsewhere is not None else time_run(run, repeats, warm_up)


def time_run(run: TimedCall, repeats: int, warm_up: bool) -> float:
    """Return the seconds of one call, averaged over `repeats` calls; `warm_up` adds an untimed call in front."""
    if warm_up:
        run()
    calls = itertools.repeat(None, repeats)
    began = time.perf_counter()
    for _ in calls:
        run()
    return (time.perf_counter() - began) / repeats
