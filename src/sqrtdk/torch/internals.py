"""Every private name of torch that sqrtdk uses, and why; a test tries each of them on the installed torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module
from torch.utils import _python_dispatch


class _DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler at the first operation, which takes seconds, and asks it at every other one.
        return False

    # Torch also notes in a flag of the whole process that a mode is on, and loses count of it when threads overlap.
    def __enter__(self) -> _DispatchMode:
        _python_dispatch._push_mode(self)
        return self

    def __exit__(self, *details: object) -> None:
        leave_mode(self)


# The class that it is made from is documented, its module is not: there is no public path to it.
DispatchMode: Any = _DispatchMode

# Looked up once: finding them by their full names takes as long as calling them.
_is_compiling = torch.compiler.is_compiling
_tracing_state: Callable[[], object] = torch._C._get_tracing_state
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_peek_transforms = torch._C._functorch.peek_interpreter_stack
_are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # the tracer knows it
_is_autocast_on: Callable[[], bool] = (
    torch._C._is_any_autocast_enabled
)  # of any device; a third of the public one's time
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_functorch = torch._C._functorch
_forward_ad: Any = forward_ad
_graph_task = torch._C._current_graph_task_id
_is_expired = cast(Callable[[int], bool], torch.UntypedStorage._expired)  # below two functions in Python
_has_storage: Callable[[Tensor], bool] = torch._C._has_storage


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


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie at an address.

    Not those of zeros that torch keeps nowhere, of a wrapper around other tensors, of a storage that was given back.
    """
    return _has_storage(tensor) and (tensor.data_ptr() != 0 or not tensor.numel())


def is_forward_mode() -> bool:
    """Whether tensors may carry tangents."""
    return bool(_forward_ad._current_level >= 0)


def is_transformed() -> bool:
    """Whether a transform of torch.func is around: inside vmap a tensor does not tell that grad follows it."""
    return _are_transforms_active()


@contextmanager
def without_derivatives() -> Iterator[None]:
    """A context whose results have neither gradients nor tangents."""
    with torch.no_grad(), _forward_ad._set_fwd_grad_enabled(False):
        yield


@contextmanager
def with_derivatives() -> Iterator[None]:
    """A context in which transforms further out record, too; the forward pass of an autograd function forbids it."""
    with torch.enable_grad(), _forward_ad._set_fwd_grad_enabled(True):
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


def is_batch_of_gradients(tensor: Tensor | None) -> bool:
    """Whether a tensor stands for several: what torch.autograd's `is_grads_batched` and `vectorize` pass back."""
    return tensor is not None and bool(_functorch.is_legacy_batchedtensor(tensor))


def map_gradients(function: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A function of such tensors by way of torch.func.vmap, which has rules for more operations than they have."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = next(x for x in tensors if is_batch_of_gradients(x))
    size = torch._remove_batch_dim(batched, level, 1, 0).shape[0]
    results = torch.func.vmap(function)(*(torch._remove_batch_dim(x, level, size, 0) for x in tensors))
    return tuple(torch._add_batch_dim(x, 0, level) for x in results)


def call_below_autograd(operator: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    """An operator's call from within its own kernel for autograd: on to what comes after."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def in_one_level() -> AbstractContextManager[None]:
    """A context in which an autograd function may be applied to tensors of the innermost transform alone."""
    return cast(AbstractContextManager[None], enable_single_level_autograd_function())


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What `function.apply` calls in the end.

    Before it, for the sake of transforms, `apply` looks up and binds the signature of `forward`, which takes 25 µs; and
    within an operator's kernel for autograd the transforms have been seen to.
    """
    return cast(Callable[..., Any], super(torch.autograd.Function, function).apply)  # type: ignore[misc]


class ModuleCalls:
    """Lets a function stand between every call of a module and torch, while it is installed.

    A hook on a module would switch the fast path of encoders off, a global one is passed by when the user interrupts,
    and neither is told keyword arguments before the call. All calls come to `_call_impl`, but those of modules that are
    compiled in place, which have one of their own: theirs are met at `__call__`.
    """

    def __init__(self, around: Callable[[module.Module, Callable[..., Any], Any, Any], Any]) -> None:
        thread = threading.local()
        self._torchs: dict[str, Callable[..., Any]] = {}

        def enter(self_: module.Module, *args: Any, **kwargs: Any) -> Any:
            thread.entered = self_
            return around(self_, self._torchs["__call__"], args, kwargs)

        def enter_within(self_: module.Module, *args: Any, **kwargs: Any) -> Any:
            call = self._torchs["_call_impl"]
            is_told = getattr(thread, "entered", None) is self_
            thread.entered = None
            return call(self_, *args, **kwargs) if is_told else around(self_, call, args, kwargs)

        self._own = {"__call__": enter, "_call_impl": enter_within}

    def install(self, has_compiled: bool) -> None:
        """Begin, with modules that are compiled in place or without; twice is once."""
        # A change of `__call__` takes ten times as long: every class of modules has a slot for it.
        for name in ("_call_impl", "__call__") if has_compiled else ("_call_impl",):
            present = getattr(module.Module, name)
            if present is not self._own[name]:
                self._torchs[name] = present
                setattr(module.Module, name, self._own[name])

    def remove(self) -> None:
        """End; what somebody else has put in its place meanwhile stays, and leads through here to torch."""
        for name, function in self._own.items():
            if getattr(module.Module, name) is function:
                setattr(module.Module, name, self._torchs[name])


def own_tensors(of: module.Module) -> list[Tensor]:
    """The parameters and buffers of a module alone; the public ways to them look for duplicates first."""
    return [tensor for named in (of._parameters, of._buffers) for tensor in named.values() if tensor is not None]


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has entries, which it has not on the device meta and as a fake tensor."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return tensor.device.type != "meta" and not (fakes is not None and isinstance(tensor, fakes.FakeTensor))


def without_modes() -> AbstractContextManager[object]:
    """Leave out every dispatch mode: what is computed about a call must not be seen by a second watch around it."""
    if not _count_dispatch_modes():  # within a mode's own handler it is off already
        return nullcontext()
    guard: AbstractContextManager[object] = _python_dispatch._disable_current_modes()
    return guard


def leave_mode(mode: object) -> None:
    """Take a mode from this thread's stack, where it is there the last time; the others stay in their order."""
    if not any(one is mode for one in _python_dispatch._get_current_dispatch_mode_stack()):
        return
    above: list[Any] = []
    while (top := _python_dispatch._pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _python_dispatch._push_mode(one)


def is_in_backward() -> bool:
    """Whether a backward pass runs in this thread: a forward inside it is the recomputation of a checkpoint."""
    return bool(_graph_task() != -1)


def storage_address(tensor: Tensor) -> int:
    """What identifies the memory of a tensor while it lives; 0 for tensors without memory of their own.

    A view under autograd is a tensor object of its own; that it is a view shows in its storage alone.
    """
    try:
        return int((_values_of(tensor) if tensor.is_nested else tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, nested and other wrapped tensors
        return 0


def _values_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory a jagged tensor shows; any other is its own."""
    if tensor.is_nested and tensor.layout is torch.jagged:
        return cast(Tensor, cast(Any, tensor)._values)
    return tensor


class WeakStorage:
    """Remembers the memory of a tensor without keeping it: while this lives, its address is not given to another.

    Two of them are equal if they are of the same memory, also after it is gone.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.address = storage_address(tensor)
        self._weak = StorageWeakRef(_values_of(tensor).untyped_storage())  # type: ignore[no-untyped-call]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakStorage) and self.address == other.address

    def __hash__(self) -> int:
        return self.address

    def is_gone(self) -> bool:
        """Whether nobody else holds the memory any more."""
        return _is_expired(self._weak.cdata)


def bind(function: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by the names of its schema, defaults included."""
    arguments = function._schema.arguments
    bound = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    bound.update(zip((argument.name for argument in arguments), args, strict=False))
    bound.update(kwargs)
    return bound


@lru_cache(maxsize=4096)
def operator_name(function: Any) -> str:
    """`aten::mul` for torch.ops.aten.mul.Tensor; the name of a higher-order operator as it is."""
    schema = getattr(function, "_schema", None)
    return str(function) if schema is None else str(schema.name)


def map_places(
    function: Callable[..., Tensor],
    sizes: tuple[int, int, int, int],
    device: torch.device,
    scores: Tensor | None,
    buffers: tuple[Any, ...],
) -> Tensor:
    """What a score or mask function of flex_attention gives at every place `[B, H, L, S]`, as the operation asks it.

    Inside, a tensor that is indexed by a place is looked up without reading the place as a number.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    places = [torch.arange(size, device=device) for size in sizes]
    given = () if scores is None else (scores,)
    mapped = _vmap_for_bhqkv(function, prefix=(0,) * len(given), suffix=(None,) * len(buffers))
    with TransformGetItemToIndex():
        result: Tensor = mapped(*given, *places, *buffers)
    return result
