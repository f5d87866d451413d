"""The way of a call to its engine: straight, by way of the dispatcher, or recorded for its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.call import FLAT_TENSORS, Backward, Band, Call, Forward, Slopes, Wanted, flatten, restore
from sqrtdk.engines import Engine
from sqrtdk.torch.engines import choose_differentiable, choose_engine
from sqrtdk.torch.engines.tensor_kernel import Plain
from sqrtdk.torch.internals import (
    call_below_autograd,
    has_memory,
    in_one_level,
    is_batch_of_gradients,
    is_forward_mode,
    is_transformed,
    is_unobserved,
    levels_that_follow,
    map_gradients,
    plain_apply,
    with_derivatives,
)
from sqrtdk.torch.operator import drop_unsaved, register_autograd, require_finite, run_backward, run_forward

_PLAIN = (Tensor, torch.nn.Parameter)


def run(call: Call, wanted: Wanted) -> tuple[Forward, str | None]:
    """The forward pass, recorded if a tensor of the call needs a gradient, and the engine that made it.

    None for the engine of a graph that is being traced. The dispatcher and the Python function behind it cost more than
    all the rest of a small call: where nobody watches, it is left out.
    """
    if is_forward_mode():
        # Operators without a rule for tangents would lose them silently.
        wanted = wanted._replace(derivatives=True)
        engine, plan = choose_differentiable(call, wanted)
        return engine.forward(call, wanted, plan), engine.name
    # The plan is asked for on the direct way alone: making it loads the kernel, which cannot be traced.
    is_direct = is_unobserved() and _are_plain(flatten(call)[:FLAT_TENSORS])
    if _needs_gradient(call):
        wanted = wanted._replace(saved=True)
        if is_direct:
            require_finite(call)
            engine = choose_engine(call, wanted, backends.plan())
            return Forward(*_apply_plainly(*flatten(call), *wanted[:3], engine)), engine.name
        if torch.compiler.is_compiling():
            if is_transformed():
                # The tracer knows of no gradients inside torch.func and would take the function's forward pass alone.
                return run_forward(call, wanted), None
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


def _are_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether every tensor lies in the memory of the CPU; the dispatcher knows what the others stand for."""
    # A loop takes half the time of `all`.
    for x in tensors:  # noqa: SIM110
        if x is not None and not (type(x) in _PLAIN and x.is_cpu and has_memory(x)):
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
        engine, plan = choose_differentiable(call, slopes)
        if is_batch_of_gradients(slopes.output) or is_batch_of_gradients(slopes.weights):
            return _differentiate_each(call, slopes, lambda each: engine.backward(call, each, done, plan))
        return engine.backward(call, slopes, done, plan)
    if is_unobserved() and _are_plain((*flatten(call)[:FLAT_TENSORS], slopes.output, slopes.weights)):
        plan = backends.plan()
        if isinstance(done.saved, Tensor):
            done = drop_unsaved(done)
        return choose_engine(call, slopes, plan).backward(call, slopes, done, plan)
    return run_backward(call, slopes, done)


def _differentiate_each(call: Call, slopes: Slopes, differentiate: Callable[[Slopes], Backward]) -> Backward:
    is_there = (True, True, True, slopes.scale, call.sinks is not None, slopes.mask)

    def differentiate_one(output: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        every = differentiate(slopes._replace(output=output, weights=weights[0] if weights else None))
        return tuple(x for x, there in zip(every, is_there, strict=True) if there)

    given = (slopes.output,) if slopes.weights is None else (slopes.output, slopes.weights)
    gradients = iter(map_gradients(differentiate_one, given))
    return Backward(*(next(gradients) if there else None for there in is_there))


class _Operator(torch.autograd.Function):
    """The same gradients for callers of the operator without `run`: torch.export, and torch.func where it is compiled.

    `torch.library.register_autograd` has no transforms of torch.func.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """The operator without its gradients; the last argument is its set of dispatch keys."""
        *flat, keyset = arguments
        with with_derivatives():
            done = call_below_autograd(torch.ops.sqrtdk.forward.default, keyset, tuple(flat))
        Differentiable.setup_context(ctx, arguments, done)
        return done

    backward = Differentiable.backward


_apply_operator = plain_apply(_Operator)


@register_autograd
def _record(keyset: Any, *flat: Any) -> Any:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in flat[:FLAT_TENSORS]):
        with in_one_level():
            return _apply_operator(*flat, keyset)
    return call_below_autograd(torch.ops.sqrtdk.forward.default, keyset, flat)


_apply_plainly = plain_apply(Differentiable)
# What gives a plain operation that was computed before its history.
record_plain: Callable[[Tensor, Tensor, Tensor, Plain], Tensor] = plain_apply(_Plain)


def _is_graph_wanted(call: Call, slopes: Slopes) -> bool:
    """Whether the gradients may be differentiated in their turn: create_graph, a transform around another, tangents."""
    if is_forward_mode():
        return True
    # Where a tracer reads this code nothing follows the gradients; where one runs it, tensors tell as usual.
    if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return False
    transforms, by_autograd = levels_that_follow((*flatten(call)[:FLAT_TENSORS], slopes.output, slopes.weights))
    # torch.func.grad always asks for a graph; only if something else follows the tensors too does anybody use it.
    return by_autograd or len(transforms) > 1
