"""Schedule of a monitor: the training steps that are observed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError

EARLY_STEPS = frozenset({0, 1, 2, 5, 10, 20, 50})
"""Steps that are observed regardless of `every`, if they come before it, because most failing runs fail early."""


@dataclass(frozen=True)
class Schedule:
    """Steps to observe: multiples of `every`, early steps, and both ends of the range; an end of None is open.

    >>> schedule = Schedule.of(100, (20, 230))
    >>> [step for step in range(300) if schedule.is_due(step)]
    [20, 50, 100, 200, 230]
    """

    every: int
    first: int | None = None
    last: int | None = None

    @staticmethod
    def of(every: Any, steps: Any = None) -> Schedule:
        """Return the schedule for the arguments `every` and `steps` of a monitor.

        Raises:
            InvalidTypeError, InvalidValueError: naming the argument.
        """
        every = checks.integer("every", every, 1)
        if steps is None:
            return Schedule(every)
        if not isinstance(steps, tuple | list) or len(steps) != 2:
            raise InvalidTypeError("steps", f"must be a pair (first, last), either of them None, got {steps!r}")
        first = None if steps[0] is None else checks.integer("first of steps", steps[0], 0)
        last = None if steps[1] is None else checks.integer("last of steps", steps[1], first or 0)
        return Schedule(every, first, last)

    def is_due(self, step: int) -> bool:
        """Return whether a step is observed."""
        if not self.includes(step):
            return False
        is_early = step in EARLY_STEPS and step < self.every
        return is_early or step in (self.first, self.last) or step % self.every == 0

    def includes(self, step: int) -> bool:
        """Return whether a step lies in the range."""
        return (self.first is None or self.first <= step) and (self.last is None or step <= self.last)
