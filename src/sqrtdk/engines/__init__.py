"""Who can compute a call of attention, and the one function that chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sqrtdk.backends import Plan
from sqrtdk.call import Backward, Call, Forward, GradientRequest, Wanted
from sqrtdk.errors import FallbackWarning, InvalidValueError, warn


class Engine(Protocol):
    """One way to compute attention; engines know nothing of one another."""

    name: str

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """None if it computes this call and all that is wanted of it, else the reason why not."""

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Output, and what else is wanted, from one pass."""

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """The gradients; `done` has the output and the saved numbers of the forward pass, if there were any."""


def choose(candidates: Sequence[Engine], call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> Engine:
    """The first of the candidates that takes the call.

    If the first one had been asked for by name, the choice of another is said, with the reason. Nothing is computed
    here, and nobody else decides.
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
