"""The way of a call to its engine: straight, by way of the dispatcher, or recorded for its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.call import FLAT_TENSORS, Backward, Band, Call, Forward, Slopes, Wanted, flatten, restore
from sqrtdk.engines import Engine
from sqrtdk.torch.engines import choose_engine
from sqrtdk.torch.engines.tensor_kernel import Plain
from sqrtdk.torch.internals import (
    is_forward_mode,
    is_transformed,
    is_unobserved,
    levels_that_follow,
    plain_apply,
)
from sqrtdk.torch.operator import drop_unsaved, require_finite, run_backward, run_forward

_PLAIN = (Tensor, torch.nn.Parameter)


def run(call: Call, wanted: Wanted) -> tuple[Forward, str | None]:
    """The forward pass, recorded if a tensor of the call needs a gradient, and the engine that made it.

    None for the engine of a graph that is being traced. The dispatcher and the Python function behind it cost more than
    all the rest of a small call: where nobody watches, it is left out.
    """
    if is_forward_mode():
        # Operators without a rule for tangents would lose them silently.
        wanted = wanted._replace(derivatives=True)
        engine = choose_engine(call, wanted, backends.plan())
        return engine.forward(call, wanted, backends.plan()), engine.name
    # The plan is asked for on the direct way alone: making it loads the kernel, which cannot be traced.
    is_direct = is_unobserved() and _is_plain(call)
    if _needs_gradient(call):
        wanted = wanted._replace(saved=True)
        if is_direct:
            require_finite(call)
            engine = choose_engine(call, wanted, backends.plan())
            return Forward(*_apply_plainly(*flatten(call), *wanted[:3], engine)), engine.name
        if torch.compiler.is_compiling():
            # The tracer takes no tensor twice.
            call = call._replace(key=call.key.view_as(call.key), value=call.value.view_as(call.value))
        return Forward(*cast(Any, Differentiable).apply(*flatten(call), *wanted[:3], None)), None
    if is_direct:
        if call.scale is not None or call.sinks is not None:
            require_finite(call)
        plan = backends.plan()
        engine = choose_engine(call, wanted, plan)
        return engine.forward(call, wanted, plan), engine.name
    return run_forward(call, wanted), None


def _is_plain(call: Call) -> bool:
    """Whether every tensor lies on the CPU and has memory of its own: a subclass may have none."""
    # A loop takes half the time of `all`.
    for x in flatten(call)[:FLAT_TENSORS]:  # noqa: SIM110
        if x is not None and not (type(x) in _PLAIN and x.is_cpu):
            return False
    return True


def _needs_gradient(call: Call) -> bool:
    return torch.is_grad_enabled() and (
        call.query.requires_grad
        or call.key.requires_grad
        or call.value.requires_grad
        or any(x is not None and x.requires_grad for x in (call.scale, call.mask, call.sinks))
        or is_transformed()
    )


class _Plain(torch.autograd.Function):
    """The gradients of a plain operation that was computed before: the least that autograd asks for."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, done: Plain) -> Tensor:
        """The output as it came."""
        ctx.done = done[1:]
        ctx.save_for_backward(query, key, value, done[0])
        return done[0]

    @staticmethod
    def backward(ctx: Any, to_output: Tensor) -> Any:
        """Gradients of q, k and v; differentiable again where a graph is asked for."""
        query, key, value, output = ctx.saved_tensors
        saved, factor, last = ctx.done
        call = Call(query, key, value, factor=factor, band=Band(last=last))
        slopes = Slopes(to_output, None, False, False)
        gradients = _differentiate(call, slopes, Forward(output, saved=saved, exact=output))
        return gradients.query, gradients.key, gradients.value, None


class Differentiable(torch.autograd.Function):
    """The forward pass with its gradients; the statistics have none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        """By the engine that was chosen, or by the operator; a plain tuple, as vmap's rule cannot carry a named one."""
        *flat, statistics, weights, saved, engine = arguments
        call, wanted = restore(flat), Wanted(statistics, weights, saved)
        if engine is None:
            return tuple(run_forward(call, wanted))
        return tuple(cast(Engine, engine).forward(call, wanted, backends.plan()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep the inputs, and of the outputs what the backward pass starts from."""
        done = Forward(*output)
        has_saved = done.saved is not None and done.saved.numel()
        has_exact = done.exact is not None and done.exact.numel()
        kept = (done.exact if has_exact else done.output) if has_saved else None
        ctx.save_for_backward(*inputs[:FLAT_TENSORS], kept, done.saved)
        ctx.rest = inputs[FLAT_TENSORS : FLAT_TENSORS + 5]
        ctx.has_weights = inputs[FLAT_TENSORS + 6]
        ctx.mark_non_differentiable(*(x for x in (done.measures, done.counts, done.saved, done.exact) if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gradients of q, k, v, scale, mask and sinks; differentiable again where a graph is asked for."""
        *tensors, output, saved = ctx.saved_tensors
        call = restore((*tensors, *ctx.rest))
        nothing = (None,) * len(ctx.needs_input_grad)
        to_output, to_weights = grads[0], grads[3] if ctx.has_weights else None
        if to_output is None and to_weights is None:
            return nothing
        if to_output is None:
            to_output = call.query.new_zeros((*call.query.shape[:-1], call.value.shape[-1]))
        slopes = Slopes(to_output, to_weights, bool(ctx.needs_input_grad[3]), bool(ctx.needs_input_grad[4]))
        gradients = _differentiate(call, slopes, Forward(output, saved=saved, exact=output))
        to_scale = to_sinks = None
        if slopes.scale:
            to_scale = gradients.scale.sum_to_size(call.scale.shape).to(call.scale.dtype)
        if call.sinks is not None and ctx.needs_input_grad[5]:
            per_head = gradients.sinks.sum(dim=-1).reshape(call.heads_shape)
            to_sinks = per_head.sum_to_size(call.sinks.shape).to(call.sinks.dtype)
        every = (gradients.query, gradients.key, gradients.value, to_scale, gradients.mask, to_sinks)
        return (*every, *nothing[6:])


def _differentiate(call: Call, slopes: Slopes, done: Forward) -> Backward:
    if _is_graph_wanted(call, slopes):
        slopes = slopes._replace(derivatives=True)
        plan = backends.plan()
        return choose_engine(call, slopes, plan).backward(call, slopes, done, plan)
    if is_unobserved() and _is_plain(call) and type(slopes.output) in _PLAIN:
        plan = backends.plan()
        if isinstance(done.saved, Tensor):
            done = drop_unsaved(done)
        return choose_engine(call, slopes, plan).backward(call, slopes, done, plan)
    return run_backward(call, slopes, done)


# For callers of the operator without `run`: the graphs of torch.export. Its schema ends before the engine.
cast(Any, torch.library).register_autograd(
    "sqrtdk::forward", Differentiable.backward, setup_context=Differentiable.setup_context
)

_apply_plainly = plain_apply(Differentiable)
# What gives a plain operation that was computed before its history.
record_plain: Callable[[Tensor, Tensor, Tensor, Plain], Tensor] = plain_apply(_Plain)


def _is_graph_wanted(call: Call, slopes: Slopes) -> bool:
    """Whether the gradients may be differentiated in their turn: create_graph, a transform around another, tangents."""
    if is_forward_mode():
        return True
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    transforms, by_autograd = levels_that_follow((*flatten(call)[:FLAT_TENSORS], slopes.output, slopes.weights))
    # torch.func.grad always asks for a graph; only if something else follows the tensors too does anybody use it.
    return by_autograd or len(transforms) > 1
