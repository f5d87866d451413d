"""Protocol of an engine, and the one function that chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sqrtdk.backends import Plan
from sqrtdk.errors import FallbackWarning, InvalidValueError, warn
from sqrtdk.operation.call import Backward, Call, Forward, GradientRequest, Wanted


class Engine(Protocol):
    """One way to compute attention; engines know nothing of one another."""

    name: str

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Return None if the engine computes this call and every result wanted, else the reason why not."""

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Return the output and the other results wanted, from one pass."""

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """Return the gradients; `done` has the output and the saved numbers of the forward pass, if there were any."""


def choose(candidates: Sequence[Engine], call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> Engine:
    """Return the first candidate that takes the call; a call that none takes raises.

    If the user asked for the first one by name, a warning names the other and the reason. Nothing is computed here, and
    no other function decides.
    """
    first = candidates[0]
    reason = first.takes(call, wanted, plan)
    if reason is None:
        return first
    reasons, other = [f"{first.name}: {reason}"], None
    for engine in candidates[1:]:
        other = engine.takes(call, wanted, plan)
        if other is None:
            if plan.is_forced:
                warn(
                    f"backend {plan.level!r} was asked for but does not compute this call ({reason}); "
                    f"the engine {engine.name!r} does",
                    FallbackWarning,
                )
            return engine
        reasons.append(f"{engine.name}: {other}")
    raise InvalidValueError(f"{other or reason} (no engine computes this call: {'; '.join(reasons)})")
