"""The float64 NumPy reference on CPU tensors, used only if it is asked for by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sqrtdk.backends import Plan
from sqrtdk.operation.call import ARRAYS, BY_ROW, Backward, Call, Forward, GradientRequest, Wanted
from sqrtdk.operation.engines.reference import REFERENCE_ENGINE


class TensorReference:
    """The NumPy reference as an engine for tensors."""

    name = REFERENCE_ENGINE.name

    def takes(self, call: Call, wanted: Wanted | GradientRequest, plan: Plan) -> str | None:
        """Return None, or the reason: tensors elsewhere, or a call that the NumPy reference does not take."""
        if not call.query.is_cpu:
            return f"tensors are on {call.query.device}"
        if call.sinks is not None and call.sinks.dim() != 1:
            return "sinks differ within a batch"
        return REFERENCE_ENGINE.takes(call, wanted, plan)

    def forward(self, call: Call, wanted: Wanted, plan: Plan) -> Forward:
        """Return output, statistics and weights of the float64 pass, rounded once."""
        dtype = call.query.dtype
        done = REFERENCE_ENGINE.forward(_as_arrays(call), wanted, plan)
        output, measures, counts, weights = (None if x is None else torch.from_numpy(x) for x in done[:4])
        assert output is not None
        return Forward(output.to(dtype), measures, counts, None if weights is None else weights.to(dtype))

    def backward(self, call: Call, request: GradientRequest, done: Forward, plan: Plan) -> Backward:
        """Return the gradients of the float64 pass, rounded once."""
        given = request._replace(output=_as_array(request.output), weights=_as_array(request.weights))
        gradients = REFERENCE_ENGINE.backward(_as_arrays(call), given, done, plan)
        return Backward(
            **{
                name: _as_tensor(x, None if name in BY_ROW else getattr(call, name))
                for name, x in gradients._asdict().items()
            }
        )


TENSOR_REFERENCE = TensorReference()


def _as_arrays(call: Call) -> Call:
    """Return the call as arrays that share the tensors' memory, where NumPy has their dtype."""
    return call._replace(**{name: _as_array(getattr(call, name)) for name in ARRAYS})


def _as_array(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach().resolve_neg()
    # bfloat16 goes through float64, rounded once like all results; zeros that torch does not store have no array.
    is_foreign = tensor.dtype == torch.bfloat16 or (tensor.numel() and not tensor.data_ptr())
    return tensor.double().numpy() if is_foreign else tensor.numpy()


def _as_tensor(array: Any, like: Tensor | None) -> Tensor | None:
    if array is None:
        return None
    return torch.from_numpy(array) if like is None else torch.from_numpy(array).to(like.dtype)
