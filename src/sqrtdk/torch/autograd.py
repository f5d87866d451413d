"""Routes a call to its engine: directly, through the dispatcher, or recorded by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from sqrtdk import backends
from sqrtdk.operation.call import (
    BY_ROW,
    DIFFERENTIABLE,
    FIELDS,
    TENSORS,
    Backward,
    Call,
    Forward,
    GradientRequest,
    Wanted,
    flatten,
    restore,
)
from sqrtdk.operation.engines.choose import Engine
from sqrtdk.operation.visibility import Band
from sqrtdk.torch.engines.choose import choose_differentiable, choose_engine
from sqrtdk.torch.engines.kernel import Plain
from sqrtdk.torch.internals import (
    call_below_autograd,
    has_memory,
    in_one_level,
    is_batch_of_gradients,
    is_forward_mode,
    is_recorded,
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
    """Return the results of the forward pass, recorded if a tensor needs a gradient, and the engine's name.

    The name is None in a graph that is being traced. The dispatcher and the Python function behind it cost more than
    all the rest of a small call: where nobody watches, it is left out.
    """
    if is_forward_mode():
        # Operators without a rule for tangents would silently lose them.
        wanted = wanted._replace(derivatives=True)
        engine, plan = choose_differentiable(call, wanted)
        return engine.forward(call, wanted, plan), engine.name
    # Only the direct route asks for the plan: making it loads the kernel, which cannot be traced.
    is_direct = _is_direct(call.tensors)
    if is_recorded(*call.tensors) or (is_transformed() and torch.is_grad_enabled()):
        wanted = wanted._replace(saved=True)
        if is_direct:
            require_finite(call)
            engine = choose_engine(call, wanted, backends.plan())
            return Forward(*_apply_plainly(*flatten(call), *wanted[:-1], engine)), engine.name
        if torch.compiler.is_compiling():
            if is_transformed():
                # Inside torch.func the tracer sees no gradients and would record the function's forward pass alone.
                return run_forward(call, wanted), None
            # The tracer refuses a tensor that is passed twice.
            call = call._replace(key=call.key.view_as(call.key), value=call.value.view_as(call.value))
        return Forward(*cast(Any, Differentiable).apply(*flatten(call), *wanted[:-1], None)), None
    if is_direct:
        require_finite(call)
        plan = backends.plan()
        engine = choose_engine(call, wanted, plan)
        return engine.forward(call, wanted, plan), engine.name
    return run_forward(call, wanted), None


def _is_direct(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether nothing observes the call and every tensor lies in CPU memory.

    Only the dispatcher can handle other tensors.
    """
    if not is_unobserved():
        return False
    # A loop takes half the time of `all`.
    for x in tensors:  # noqa: SIM110
        if x is not None and not (type(x) in _PLAIN and x.is_cpu and has_memory(x)):
            return False
    return True


class _Plain(torch.autograd.Function):
    """Gradients of a plain call that is already computed: the least that autograd needs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, done: Plain) -> Tensor:
        """Return the output unchanged."""
        ctx.done = done[1:]
        ctx.save_for_backward(query, key, value, done[0])
        return done[0]

    @staticmethod
    def backward(ctx: Any, to_output: Tensor) -> Any:
        """Return the gradients of q, k and v; differentiable again if a graph is wanted."""
        query, key, value, output = ctx.saved_tensors
        saved, factor, last = ctx.done
        call = Call(query, key, value, factor=factor, band=Band(last=last))
        request = GradientRequest(to_output, scale=False)
        gradients = _differentiate(call, request, Forward(output, saved=saved, exact=output))
        return gradients.query, gradients.key, gradients.value, None


class Differentiable(torch.autograd.Function):
    """The forward pass with its gradients; statistics have no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        """Run the chosen engine, or the operator; return a plain tuple, as vmap's rule cannot carry a named one."""
        *flat, engine = arguments
        call, wanted = restore(flat[: len(FIELDS)]), Wanted(*flat[len(FIELDS) :])
        if engine is None:
            return tuple(run_forward(call, wanted))
        return tuple(cast(Engine, engine).forward(call, wanted, backends.plan()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the inputs, and the outputs that the backward pass starts from."""
        done = Forward(*output)
        has_saved = done.saved is not None and done.saved.numel()
        has_exact = done.exact is not None and done.exact.numel()
        kept = (done.exact if has_exact else done.output) if has_saved else None
        ctx.save_for_backward(*inputs[:TENSORS], kept, done.saved)
        ctx.rest = inputs[TENSORS : len(FIELDS)]
        ctx.has_weights = Wanted(*inputs[len(FIELDS) : -1]).weights
        ctx.mark_non_differentiable(*(x for x in (done.measures, done.counts, done.saved, done.exact) if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of the differentiable fields; differentiable again if a graph is wanted."""
        *tensors, output, saved = ctx.saved_tensors
        call, of = restore((*tensors, *ctx.rest)), Forward(*grads)
        needs = dict(zip(FIELDS, ctx.needs_input_grad, strict=False))
        to_output, to_weights = of.output, of.weights if ctx.has_weights else None
        if to_output is None and to_weights is None:
            return (None,) * len(ctx.needs_input_grad)
        if to_output is None:
            to_output = call.query.new_zeros((*call.query.shape[:-1], call.value.shape[-1]))
        request = GradientRequest(to_output, to_weights, needs["scale"], needs["mask"])
        gradients = _differentiate(call, request, Forward(output, saved=saved, exact=output))
        by_field = dict(zip(DIFFERENTIABLE, gradients, strict=True))
        for name in BY_ROW:
            by_field[name] = _sum_to(by_field[name], call, name) if needs[name] else None
        return tuple(map(by_field.get, FIELDS)) + (None,) * (len(ctx.needs_input_grad) - len(FIELDS))


def _sum_to(per_row: Tensor, call: Call, name: str) -> Tensor:
    """Return a gradient per row `[..., H, L]`, summed to the shape and dtype of its field."""
    field = getattr(call, name)
    if FIELDS[name].lacks == 2:
        per_row = per_row.sum(dim=-1).reshape(call.heads_shape)
    return per_row.sum_to_size(field.shape).to(field.dtype)


def _differentiate(call: Call, request: GradientRequest, done: Forward) -> Backward:
    if _is_graph_wanted(call, request):
        request = request._replace(derivatives=True)
        engine, plan = choose_differentiable(call, request)
        if is_batch_of_gradients(request.output) or is_batch_of_gradients(request.weights):
            return _differentiate_each(call, request, lambda each: engine.backward(call, each, done, plan))
        return engine.backward(call, request, done, plan)
    if _is_direct((*call.tensors, request.output, request.weights)):
        plan = backends.plan()
        if isinstance(done.saved, Tensor):
            done = drop_unsaved(done)
        return choose_engine(call, request, plan).backward(call, request, done, plan)
    return run_backward(call, request, done)


def _differentiate_each(
    call: Call, request: GradientRequest, differentiate: Callable[[GradientRequest], Backward]
) -> Backward:
    is_there = [request.gives(name, call) for name in Backward._fields]

    def differentiate_one(output: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        every = differentiate(request._replace(output=output, weights=weights[0] if weights else None))
        return tuple(x for x, there in zip(every, is_there, strict=True) if there)

    given = (request.output,) if request.weights is None else (request.output, request.weights)
    gradients = iter(map_gradients(differentiate_one, given))
    return Backward(*(next(gradients) if there else None for there in is_there))


class _Operator(torch.autograd.Function):
    """The same gradients for callers of the operator without `run`: torch.export, and compiled torch.func.

    `torch.library.register_autograd` has no transforms of torch.func.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Run the operator below autograd; the last argument is its set of dispatch keys."""
        *flat, keyset = arguments
        with with_derivatives():
            done = call_below_autograd(torch.ops.sqrtdk.forward.default, keyset, tuple(flat))
        Differentiable.setup_context(ctx, arguments, done)
        return done

    backward = Differentiable.backward


_apply_operator = plain_apply(_Operator)


@register_autograd
def _record(keyset: Any, *flat: Any) -> Any:
    if is_recorded(*flat[:TENSORS]):
        with in_one_level():
            return _apply_operator(*flat, keyset)
    return call_below_autograd(torch.ops.sqrtdk.forward.default, keyset, flat)


_apply_plainly = plain_apply(Differentiable)
# Gives a plain call that is already computed its autograd history.
record_plain: Callable[[Tensor, Tensor, Tensor, Plain], Tensor] = plain_apply(_Plain)


def _is_graph_wanted(call: Call, request: GradientRequest) -> bool:
    """Return whether the gradients may be differentiated again: create_graph, nested transforms, tangents."""
    if is_forward_mode():
        return True
    # A tracer that reads this code follows no gradients; under one that runs it, tensors have their usual flags.
    if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return False
    transforms, by_autograd = levels_that_follow((*call.tensors, request.output, request.weights))
    # torch.func.grad always asks for a graph; the graph is used only if something else follows the tensors, too.
    return by_autograd or len(transforms) > 1
