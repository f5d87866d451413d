"""Every private name of torch that sqrtdk uses, and why; a test tries each of them on the installed torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module
from torch.utils import _python_dispatch

# The class is documented, its module is not: there is no public path to it.
DispatchMode: Any = _python_dispatch.TorchDispatchMode

# Looked up once: finding them by their full names takes as long as calling them.
_is_compiling = torch.compiler.is_compiling
_tracing_state: Callable[[], object] = torch._C._get_tracing_state
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_peek_transforms = torch._C._functorch.peek_interpreter_stack
_is_autocast_on: Callable[[], bool] = (
    torch._C._is_any_autocast_enabled
)  # of any device; a third of the public one's time
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_functorch = torch._C._functorch
_forward_ad: Any = forward_ad
_graph_task = torch._C._current_graph_task_id


def is_unobserved() -> bool:
    """Whether nothing between Python and the kernel has to be told of a call: no tracer, mode, profiler or autocast."""
    return not (
        _is_compiling()
        or _tracing_state() is not None
        or _count_dispatch_modes()
        or _peek_transforms() is not None
        or _forward_ad._current_level >= 0
        or _is_autocast_on()
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


def add_module_hooks(begin: Callable[..., None], end: Callable[..., None]) -> Callable[[], None]:
    """Call `begin` before and `end` after the forward of every module, also after an exception; returns the undoing.

    Registering is public; what it leaves behind is not: torch forgets to take a hook's wish for keyword arguments away
    with the hook, and compiled modules then warn of hooks for ever.
    """
    first = module.register_module_forward_pre_hook(begin)
    second = module.register_module_forward_hook(end, with_kwargs=True, always_call=True)

    def undo() -> None:
        first.remove()
        second.remove()
        module._global_forward_hooks_with_kwargs.pop(second.id, None)

    return undo


def without_modes() -> AbstractContextManager[object]:
    """Leave out every dispatch mode: what is computed about a call must not be seen by a second watch around it."""
    guard: AbstractContextManager[object] = _python_dispatch._disable_current_modes()
    return guard


def is_mode_on_top(mode: object) -> bool:
    """Whether a mode is the innermost of this thread: an interrupt may leave one behind, and no other may be taken."""
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    return bool(stack) and stack[-1] is mode


def is_mode_active(mode: object) -> bool:
    """Whether a mode is anywhere on this thread's stack."""
    return any(one is mode for one in _python_dispatch._get_current_dispatch_mode_stack())


def is_in_backward() -> bool:
    """Whether a backward pass runs in this thread: a forward inside it is the recomputation of a checkpoint."""
    return bool(_graph_task() != -1)


def storage_address(tensor: Tensor) -> int:
    """What identifies the memory of a tensor while it lives; 0 for tensors without memory of their own.

    A view under autograd is a tensor object of its own; that it is a view shows in its storage alone.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, nested and other wrapped tensors
        return 0


class WeakStorage:
    """Remembers the memory of a tensor without keeping it: while this lives, its address is not given to another.

    Two of them are equal if they are of the same memory, also after it is gone.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.address = storage_address(tensor)
        self._weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakStorage) and self.address == other.address

    def __hash__(self) -> int:
        return self.address

    def is_gone(self) -> bool:
        """Whether nobody else holds the memory any more."""
        return bool(self._weak.expired())  # type: ignore[no-untyped-call]


def bind(function: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by the names of its schema, defaults included."""
    arguments = function._schema.arguments
    bound = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    bound.update(zip((argument.name for argument in arguments), args, strict=False))
    bound.update(kwargs)
    return bound


def operator_name(function: Any) -> str:
    """`aten::mul` for torch.ops.aten.mul.Tensor; the name of a higher-order operator as it is."""
    schema = getattr(function, "_schema", None)
    return str(function) if schema is None else str(schema.name)
