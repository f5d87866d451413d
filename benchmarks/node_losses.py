"""Simulation of a sweep on a cluster whose nodes are lost: how long it takes, and how much is computed twice."""

from __future__ import annotations

import heapq
import random
from typing import NamedTuple


class Sweep(NamedTuple):
    """Outcome of a simulated sweep: hours until the last run ends, and the share of computing that was lost."""

    hours: float
    lost_share: float
    losses: int


def simulate(
    runs: int,
    run_seconds: float,
    cpus: int,
    losses_per_day: float,
    *,
    checkpoint_seconds: float | None = 4.0,
    away_seconds: float = 600.0,
    seed: int = 0,
) -> Sweep:
    """Simulate runs on single CPUs, each of which is lost at random and comes back later.

    Args:
        runs: how many.
        run_seconds: what each takes without a loss.
        cpus: how many there are; each is lost alone, which loses no less than nodes of several.
        losses_per_day: how often each is lost, on average (exponentially distributed times).
        checkpoint_seconds: time from one checkpoint to the next; None: a run that is lost begins again.
        away_seconds: until a lost one is replaced.
        seed: of the times.

    >>> simulate(100, 60.0, 10, losses_per_day=0.0)
    Sweep(hours=0.16666666666666666, lost_share=0.0, losses=0)
    """
    rng = random.Random(seed)
    free = [0.0] * cpus  # when each CPU takes its next run
    left = [run_seconds] * runs
    ended = computed = 0.0
    losses = 0
    while left:
        began, rest = heapq.heappop(free), left.pop()
        until_loss = rng.expovariate(losses_per_day / 86400.0) if losses_per_day else float("inf")
        if until_loss >= rest:
            computed += rest
            ended = max(ended, began + rest)
            heapq.heappush(free, began + rest)
            continue
        losses += 1
        computed += until_loss
        kept = 0.0 if checkpoint_seconds is None else until_loss - until_loss % checkpoint_seconds
        left.append(rest - kept)
        heapq.heappush(free, began + until_loss + away_seconds)
    return Sweep(ended / 3600.0, 1.0 - runs * run_seconds / computed, losses)


def main() -> None:
    """Print a day of a hundred CPUs, by how often each is lost, with and without checkpoints."""
    print("| losses per CPU and day | hours | computed twice | the same without checkpoints |")
    print("|---|---|---|---|")
    for losses in (0, 1, 4, 24):
        with_checkpoints, without = (
            simulate(1000, 8000.0, 100, losses, checkpoint_seconds=seconds) for seconds in (4.0, None)
        )
        print(
            f"| {losses} | {with_checkpoints.hours:.1f} | {with_checkpoints.lost_share:.2%} "
            f"| {without.hours:.1f} h, {without.lost_share:.0%} twice |"
        )


if __name__ == "__main__":
    main()
