"""Times contenders side by side: random order in every round, probes between rounds, ratios within rounds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contender import (
    SUBJECTS,
    WITHOUT_MASK,
    Contender,
    NotForThisCaseError,
    PeerError,
    RemoteRun,
    Run,
)
from benchmarks.probes import Probe, Prober, is_steady
from benchmarks.task import LARGEST_ERRORS, Array, Task

# A timing lasts at least this long, so that the clock and the loop around the call do not show.
_LEAST_SECONDS = 0.002
# Below this, one call goes before the clock starts: what the last contender left in caches and on cores is not its own.
_SHORT_SECONDS = 0.02
# Above this, one call tells how long it takes.
_LONG_SECONDS = 0.5
# Rejected rounds are repeated, but not for ever.
_MOST_ATTEMPTS = 3
# Fewer make no interval worth the name.
FEWEST_ROUNDS = 5
_RESAMPLES = 2000
_LONGEST_REASON = 200


class Ratio(NamedTuple):
    """Median of paired ratios with a 95% bootstrap interval over rounds; all None with too few rounds."""

    median: float | None
    low: float | None
    high: float | None


@dataclass
class Measurement:
    """Every timing of one task.

    `seconds` has one entry per round for each contender, `probes` one more than there are rounds: one before each and
    one after the last. `repeats` calls make one timing. `left_out` says who does not take part and why.
    """

    case: Task
    repeats: int
    seconds: dict[str, list[float]]
    probes: list[Probe]
    error: dict[str, float]
    entropy_error: dict[str, float]
    left_out: dict[str, str] = field(default_factory=dict)

    def leave_out(self, contender: str, why: str) -> None:
        """Take a contender out of the measurement, whatever was measured of it."""
        self.left_out[contender] = why
        for values in (self.seconds, self.error, self.entropy_error):
            values.pop(contender, None)

    def good_rounds(self) -> Array:
        """Which rounds count `[rounds]`: those in which the machine kept its speed, by the probes beside them.

        Not those beside the best probe of all: on a shared machine the peak may halve for minutes. That slows all
        contenders of a round alike, and their paired ratios stay what they are.
        """
        pairs = zip(self.probes[:-1], self.probes[1:], strict=True)
        return np.array([is_steady(before, after) for before, after in pairs], dtype=bool)

    def median_seconds(self, contender: str) -> float | None:
        """Median time of one call over the rounds that count; None with too few."""
        good = self.good_rounds()
        return float(np.median(np.array(self.seconds[contender])[good])) if is_enough(good) else None

    def share(self, contender: str, quantity: str, amount: float) -> float | None:
        """Median over rounds of amount per second relative to what the probes beside the round reached."""
        good = self.good_rounds()
        rates = [getattr(probe, quantity) for probe in self.probes]
        if not is_enough(good) or None in rates:
            return None
        beside = np.maximum(rates[:-1], rates[1:])
        return float(np.median((amount / np.array(self.seconds[contender]) / beside)[good]))

    def ratio(self, subject: str, peer: str, rng: np.random.Generator) -> Ratio:
        """Time of the peer over time of the subject: above 1 the subject is faster."""
        good = self.good_rounds()
        if not is_enough(good):
            return Ratio(None, None, None)
        return bootstrap_median((np.array(self.seconds[peer]) / np.array(self.seconds[subject]))[good], rng)


def is_enough(good: Array) -> bool:
    """Whether enough rounds count for a number.

    >>> is_enough(np.array([True] * 5 + [False])), is_enough(np.array([True] * 4))
    (True, False)
    """
    return bool(good.sum() >= FEWEST_ROUNDS)


def bootstrap_median(values: Array, rng: np.random.Generator) -> Ratio:
    """The median and its 95% percentile interval from resampled rounds.

    >>> bootstrap_median(np.array([2.0, 2.0, 2.0]), np.random.default_rng(0))
    Ratio(median=2.0, low=2.0, high=2.0)
    """
    medians = np.median(rng.choice(values, (_RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Ratio(float(np.median(values)), float(low), float(high))


def measure(
    case: Task,
    contenders: Sequence[Contender],
    prober: Prober,
    *,
    rounds: int,
    threads: int,
    rng: np.random.Generator,
    on_round: Callable[[int], None] | None = None,
) -> Measurement:
    """Time all contenders on one case, in random order in every round, until `rounds` of them count.

    Args:
        contenders: who takes part; one that cannot compute the case, computes it wrongly or is lost on the way is left
            out by name.
        rounds: rounds that should count; where probes were bad, up to three times as many are tried.
        threads: what contenders are told.
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
    case: Task, sets: Sequence[Any], contenders: Sequence[Contender], threads: int
) -> tuple[dict[str, Run | RemoteRun], Measurement]:
    truth = case.compute_truth(sets[0])
    found = Measurement(case, 1, {}, [], {}, {})
    runs: dict[str, Run | RemoteRun] = {}
    for contender in contenders:
        own = contender.name in (*SUBJECTS, WITHOUT_MASK)
        try:
            calls = [contender.prepare(case, inputs, threads) for inputs in sets]
            answer = contender.read(calls[0]())
        except NotForThisCaseError as reason:
            found.leave_out(contender.name, str(reason))
            continue
        except Exception as error:  # whatever another library raises is told, not hidden, and stops nothing
            if own:
                raise
            found.leave_out(contender.name, describe_error(error))
            continue
        off, entropy_error = truth.compare(answer)
        if not off <= LARGEST_ERRORS[case.dtype]:  # NaN too
            found.leave_out(contender.name, f"its answer is off by {off:.1e}")
            continue
        found.error[contender.name] = off
        if entropy_error is not None:
            found.entropy_error[contender.name] = entropy_error
        found.seconds[contender.name] = []
        runs[contender.name] = _take_turns(calls)
    return runs, found


def _take_turns(calls: Sequence[Run]) -> Run:
    if len(calls) == 1:
        return calls[0]
    endless = itertools.cycle(calls)
    return lambda: next(endless)()


def describe_error(error: Exception) -> str:
    """An error in one line; of one that was described in another process the description.

    >>> describe_error(OSError("no such\\nlibrary"))
    'OSError: no such library'
    """
    text = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_LONGEST_REASON]


def _lose(name: str, error: PeerError, runs: dict[str, Run | RemoteRun], found: Measurement) -> None:
    """Go on without a peer that was lost while it was timed; without sqrtdk there is nothing to go on with."""
    if name in SUBJECTS:
        raise error
    del runs[name]
    found.leave_out(name, describe_error(error))


def _choose_repeats(runs: dict[str, Run | RemoteRun], found: Measurement) -> tuple[int, bool]:
    """How many calls make a timing, and whether one goes before; the same for everyone, by the fastest."""
    fastest, sets = _LONG_SECONDS, found.case.sets
    for name, run in list(runs.items()):
        try:
            fastest = min(fastest, _estimate(run))
        except PeerError as error:
            _lose(name, error, runs, found)
    # With several sets of inputs each is used equally often.
    return sets * math.ceil(_LEAST_SECONDS / fastest / sets), fastest < _SHORT_SECONDS


def _estimate(run: Run | RemoteRun) -> float:
    once = _time(run, 1, False)
    return once if once > _LONG_SECONDS else min(_time(run, 1, True) for _ in range(3))


def _time(run: Run | RemoteRun, repeats: int, warm_up: bool) -> float:
    elsewhere = getattr(run, "time", None)
    return float(elsewhere(repeats, warm_up)) if elsewhere is not None else time_run(run, repeats, warm_up)


def time_run(run: Run, repeats: int, warm_up: bool) -> float:
    """Seconds of one call, averaged over `repeats` of them; one goes before, untimed, to warm up."""
    if warm_up:
        run()
    calls = itertools.repeat(None, repeats)
    began = time.perf_counter()
    for _ in calls:
        run()
    return (time.perf_counter() - began) / repeats
