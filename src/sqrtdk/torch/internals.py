"""Every private name of torch that sqrtdk uses, and why; a test tries each of them on the installed torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Looked up once: finding them by their full names takes as long as calling them.
_is_compiling = torch.compiler.is_compiling
_tracing_state: Callable[[], object] = torch._C._get_tracing_state
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_peek_transforms = torch._C._functorch.peek_interpreter_stack
_is_autocast_enabled = torch.is_autocast_enabled
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_functorch = torch._C._functorch
_forward_ad: Any = forward_ad


def is_unobserved() -> bool:
    """Whether nothing between Python and the kernel has to be told of a call: no tracer, mode, profiler or autocast."""
    return not (
        _is_compiling()
        or _tracing_state() is not None
        or _count_dispatch_modes()
        or _peek_transforms() is not None
        or _forward_ad._current_level >= 0
        or _is_autocast_enabled("cpu")
        or _is_profiling()
    )


def is_forward_mode() -> bool:
    """Whether tensors may carry tangents."""
    return bool(_forward_ad._current_level >= 0)


def is_transformed() -> bool:
    """Whether a transform of torch.func is around: inside vmap a tensor does not tell that grad follows it."""
    return not _is_compiling() and _peek_transforms() is not None


@contextmanager
def without_derivatives() -> Iterator[None]:
    """A context whose results have neither gradients nor tangents."""
    with torch.no_grad(), _forward_ad._set_fwd_grad_enabled(False):
        yield


def levels_that_follow(tensors: tuple[Tensor | None, ...]) -> tuple[set[int], bool]:
    """Which transforms of torch.func take gradients of some of the tensors, and whether autograd itself does."""
    transforms = set()
    for tensor in tensors:
        inner: Any = tensor
        while inner is not None and _functorch.is_functorch_wrapped_tensor(inner):
            if _functorch.is_gradtrackingtensor(inner) and inner.requires_grad:
                transforms.add(_functorch.maybe_get_level(inner))
            inner = _functorch.get_unwrapped(inner)
        if inner is not None and inner.requires_grad:
            return transforms, True
    return transforms, False


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What `function.apply` calls in the end.

    Before it, for the sake of transforms that are not there, `apply` looks up and binds the signature of `forward`,
    which takes 25 µs.
    """
    return cast(Callable[..., Any], super(torch.autograd.Function, function).apply)  # type: ignore[misc]
