"""Chooses the engine that computes a call on tensors."""

from __future__ import annotations

import torch

from sqrtdk import backends
from sqrtdk.backends import Plan
from sqrtdk.operation.call import Call, GradientRequest, Wanted
from sqrtdk.operation.engines.choose import Engine, choose
from sqrtdk.torch.engines.blocks import BLOCKS
from sqrtdk.torch.engines.kernel import TENSOR_KERNEL
from sqrtdk.torch.engines.reference import TENSOR_REFERENCE
from sqrtdk.torch.engines.whole import WHOLE

_WITH_KERNEL = (TENSOR_KERNEL, BLOCKS, WHOLE)
_WITH_REFERENCE = (TENSOR_REFERENCE, BLOCKS, WHOLE)
_WITHOUT_EITHER = (BLOCKS, WHOLE)
_NO_PLAN = Plan(None, None, backends.REFERENCE, 1, False)


def choose_engine(call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> Engine:
    """Return the engine of a call: the kernel on the CPU, or the reference if it was asked for, else torch itself."""
    if plan.forward is not None:
        return choose(_WITH_KERNEL, call, wanted, plan)
    if plan.is_forced:
        return choose(_WITH_REFERENCE, call, wanted, plan)
    backends.warn_without_kernel()
    return choose(_WITHOUT_EITHER, call, wanted, plan)


def choose_differentiable(call: Call, wanted: Wanted | GradientRequest) -> tuple[Engine, Plan]:
    """Return the engine whose results torch differentiates, and its plan.

    A tracer gets an empty plan: making a plan loads the kernel, which cannot be traced.
    """
    if torch.compiler.is_compiling():
        return WHOLE, _NO_PLAN
    plan = backends.plan()
    return choose_engine(call, wanted, plan), plan
