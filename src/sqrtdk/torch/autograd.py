"""The gradients of attention: which calls need them, and how they reach q, k, v, scale, sinks and mask."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sqrtdk.torch.call import TENSORS, Forward, TensorCall
from sqrtdk.torch.dense import attend_in_one_piece, differentiate_in_one_piece
from sqrtdk.torch.kernel import is_unobserved
from sqrtdk.torch.operator import run_backward, run_forward

_functorch = torch._C._functorch


def run(call: TensorCall, statistics: bool, weights: bool) -> Forward:
    """The forward pass, recorded for the backward one if any tensor of the call needs a gradient."""
    if forward_ad._current_level >= 0:
        return _run_with_tangents(call, statistics)
    if torch.is_grad_enabled() and (
        call.query.requires_grad
        or call.key.requires_grad
        or call.value.requires_grad
        or any(x is not None and x.requires_grad for x in (call.scale, call.mask, call.sinks))
        # Inside vmap a tensor does not tell that torch.func.grad around it follows it.
        or (not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is not None)
    ):
        if is_unobserved():
            return Forward(*_apply_plainly(*call, statistics, weights))
        if torch.compiler.is_compiling():
            # The tracer takes no tensor twice.
            call = call._replace(key=call.key.view_as(call.key), value=call.value.view_as(call.value))
        return Forward(*cast(Any, Differentiable).apply(*call, statistics, weights))
    return run_forward(call, statistics, weights)


def _run_with_tangents(call: TensorCall, statistics: bool) -> Forward:
    """For forward-mode derivatives: operators without a rule for them would lose the tangents silently."""
    output, every = attend_in_one_piece(call)
    if not statistics:
        return Forward(output, None, None, every)
    with torch.no_grad(), cast(Any, forward_ad)._set_fwd_grad_enabled(False):
        described = run_forward(call, True, False)
    return described._replace(output=output, weights=every)


class Differentiable(torch.autograd.Function):
    """The forward operator with its gradients; the statistics have none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        """The operator; a plain tuple, as vmap's rule cannot carry a named one."""
        *given, statistics, weights = arguments
        return tuple(run_forward(TensorCall(*given), statistics, weights))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep the inputs: the backward pass computes the softmax anew."""
        ctx.save_for_backward(*inputs[:TENSORS])
        ctx.numbers, ctx.has_weights = inputs[TENSORS:-2], inputs[-1]
        if output[1] is not None and output[2] is not None:
            ctx.mark_non_differentiable(output[1], output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gradients of q, k, v, scale, mask and sinks; differentiable again where a graph is asked for."""
        call = TensorCall(*ctx.saved_tensors, *ctx.numbers)
        grad_output, _, _, grad_weights = grads
        nothing = (None,) * (len(call) + 2)
        grad_weights = grad_weights if ctx.has_weights else None
        if grad_output is None and grad_weights is None:
            return nothing
        if grad_output is None:
            grad_output = call.query.new_zeros((*call.query.shape[:-1], call.value.shape[-1]))
        scale_too, mask_too = bool(ctx.needs_input_grad[3]), bool(ctx.needs_input_grad[4])
        differentiate = (
            differentiate_in_one_piece if _is_graph_wanted(call, grad_output, grad_weights) else run_backward
        )
        found = differentiate(call, grad_output, grad_weights, scale_too=scale_too, mask_too=mask_too)
        to_scale = to_sinks = None
        if call.scale is not None and scale_too:
            to_scale = found.scale.sum_to_size(call.scale.shape).to(call.scale.dtype)
        if call.sinks is not None and ctx.needs_input_grad[5]:
            per_head = found.sinks.sum(dim=-1).reshape(call.heads_shape)
            to_sinks = per_head.sum_to_size(call.sinks.shape).to(call.sinks.dtype)
        to_mask = found.mask if mask_too else None
        return found.query, found.key, found.value, to_scale, to_mask, to_sinks, *nothing[6:]


# For who calls the operator without `run`: the graphs of torch.export.
cast(Any, torch.library).register_autograd(
    "sqrtdk::forward", Differentiable.backward, setup_context=Differentiable.setup_context
)

# What `Differentiable.apply` calls in the end. Before it, for the sake of transforms that are not there, it looks up
# and binds the signature of `forward`, which takes 25 µs.
_apply_plainly: Any = super(torch.autograd.Function, Differentiable).apply


def _is_graph_wanted(call: TensorCall, *grads: Tensor | None) -> bool:
    """Whether the gradients may be differentiated in their turn: create_graph, a transform around another, tangents."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    # torch.func.grad always asks for a graph; only if something else follows the tensors too does anybody use it.
    transforms = set()
    for x in (*call[:TENSORS], *grads):
        inner: Any = x
        while inner is not None and _functorch.is_functorch_wrapped_tensor(inner):
            if _functorch.is_gradtrackingtensor(inner) and inner.requires_grad:
                transforms.add(_functorch.maybe_get_level(inner))
            inner = _functorch.get_unwrapped(inner)
        if inner is not None and inner.requires_grad:
            return True
    return len(transforms) > 1
