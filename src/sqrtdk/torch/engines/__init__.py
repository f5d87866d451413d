"""The engines of tensors, and which of them computes a call."""

from __future__ import annotations

import torch

from sqrtdk import backends
from sqrtdk.backends import Plan
from sqrtdk.call import Call, GradientRequest, Wanted
from sqrtdk.engines import Engine, choose
from sqrtdk.torch.engines.blocks import BLOCKS
from sqrtdk.torch.engines.tensor_kernel import TENSOR_KERNEL
from sqrtdk.torch.engines.tensor_reference import TENSOR_REFERENCE
from sqrtdk.torch.engines.whole import WHOLE

_WITH_KERNEL = (TENSOR_KERNEL, BLOCKS, WHOLE)
_WITH_REFERENCE = (TENSOR_REFERENCE, BLOCKS, WHOLE)
_WITHOUT_EITHER = (BLOCKS, WHOLE)
_NO_PLAN = Plan(None, None, backends.REFERENCE, 1, False)


def choose_engine(call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> Engine:
    """The engine of a call: the kernel on the CPU, or the reference if it was asked for, else torch itself."""
    if plan.forward is not None:
        return choose(_WITH_KERNEL, call, wanted, plan)
    if plan.is_forced:
        return choose(_WITH_REFERENCE, call, wanted, plan)
    backends.warn_without_kernel()
    return choose(_WITHOUT_EITHER, call, wanted, plan)


def choose_differentiable(call: Call, wanted: Wanted | GradientRequest) -> tuple[Engine, Plan]:
    """The engine whose results torch differentiates, and the plan that it is given.

    A tracer gets one that says nothing: making a plan loads the kernel, which cannot be traced.
    """
    if torch.compiler.is_compiling():
        return WHOLE, _NO_PLAN
    plan = backends.plan()
    return choose_engine(call, wanted, plan), plan
