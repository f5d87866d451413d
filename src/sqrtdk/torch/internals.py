"""Wrappers around the private torch names that sqrtdk uses. A test tries each of them on the installed torch."""

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
from torch.nn import functional
from torch.nn.modules import module
from torch.utils import _python_dispatch


class _DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler at the first operation, which takes seconds, and then queries it at each.
        return False

    # The base class also sets a process-wide flag while a mode is on, and miscounts when threads overlap.
    def __enter__(self) -> _DispatchMode:
        _python_dispatch._push_mode(self)
        return self

    def __exit__(self, *details: object) -> None:
        leave_mode(self)


# The base class is documented, but its module is not, so it has no public path.
DispatchMode: Any = _DispatchMode

# Looked up once, because resolving their full names takes as long as calling them.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_tracing_state: Callable[[], object] = torch._C._get_tracing_state
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_peek_transforms = torch._C._functorch.peek_interpreter_stack
_are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # torch's tracer supports it
_is_autocast_on: Callable[[], bool] = (
    torch._C._is_any_autocast_enabled
)  # any device; takes a third of the public function's time
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_functorch = torch._C._functorch
_forward_ad: Any = forward_ad
_graph_task = torch._C._current_graph_task_id
_refer_weakly = cast(Callable[[torch.UntypedStorage], int], torch.UntypedStorage._weak_ref)
_free_weak = cast(Callable[[int], None], torch.UntypedStorage._free_weak_ref)
_is_expired = cast(Callable[[int], bool], torch.UntypedStorage._expired)
_has_storage: Callable[[Tensor], bool] = torch._C._has_storage
_count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_mode_at: Callable[[int], object] = torch._C._get_dispatch_stack_at
_push_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
_pop_mode: Callable[[None], object] = torch._C._pop_torch_dispatch_stack
_has_global_hook = cast(Callable[[], bool], module._has_any_global_hook)
_LINEAR, _LINEAR_MODULE = functional.linear, torch.nn.Linear.forward
_PLAIN = (Tensor, torch.nn.Parameter)
_FLEX = "torch.nn.attention.flex_attention"


def is_unobserved() -> bool:
    """Return whether nothing observes a call: no tracer, mode, profiler or autocast."""
    return not (
        _is_compiling()
        or _tracing_state() is not None
        or _count_dispatch_modes()
        or _peek_transforms() is not None
        or _forward_ad._current_level >= 0
        or _is_autocast_on()
        or _is_profiling()
    )


def is_recorded(query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None) -> bool:
    """Return whether autograd records computations on these tensors. torch.func may record them in addition."""
    if not _is_grad_enabled():
        return False
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return True
    for x in others:  # noqa: SIM110 -- half the time of `any`
        if x is not None and x.requires_grad:
            return True
    return False


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements lie at an address.

    False for zeros without storage, for wrappers around other tensors and for freed storage.
    """
    return _has_storage(tensor) and (tensor.data_ptr() != 0 or not tensor.numel())


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is on, so that tensors may carry tangents."""
    return bool(_forward_ad._current_level >= 0)


def is_transformed() -> bool:
    """Return whether a torch.func transform is active. Inside vmap, a tensor does not show that grad tracks it."""
    return _are_transforms_active()


@contextmanager
def without_derivatives() -> Iterator[None]:
    """Return a context whose results have neither gradients nor tangents."""
    with torch.no_grad(), _forward_ad._set_fwd_grad_enabled(False):
        yield


@contextmanager
def with_derivatives() -> Iterator[None]:
    """Return a context in which outer transforms record too, which an autograd function's forward pass forbids."""
    with torch.enable_grad(), _forward_ad._set_fwd_grad_enabled(True):
        yield


def levels_that_follow(tensors: tuple[Tensor | None, ...]) -> tuple[set[int], bool]:
    """Return the levels of the torch.func transforms that track some of the tensors, and whether autograd does."""
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
    """Return whether a tensor is a batch of gradients, as `is_grads_batched` and `vectorize` of torch.autograd pass."""
    return tensor is not None and bool(_functorch.is_legacy_batchedtensor(tensor))


def map_gradients(function: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the results of a function on batched gradients, by torch.func.vmap, which supports more operations."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = next(x for x in tensors if is_batch_of_gradients(x))
    size = torch._remove_batch_dim(batched, level, 1, 0).shape[0]
    results = torch.func.vmap(function)(*(torch._remove_batch_dim(x, level, size, 0) for x in tensors))
    return tuple(torch._add_batch_dim(x, 0, level) for x in results)


def softmax_gradient(to_weights: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the logits from that of their softmax (last axis). The result is differentiable."""
    gradient: Tensor = torch.ops.aten._softmax_backward_data.default(to_weights, weights, -1, to_weights.dtype)
    return gradient


def call_below_autograd(operator: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the result of an operator below autograd. Call this from the operator's own autograd kernel."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def in_one_level() -> AbstractContextManager[None]:
    """Return a context in which an autograd function applies to tensors of the innermost transform only."""
    return cast(AbstractContextManager[None], enable_single_level_autograd_function())


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the callable behind `function.apply`.

    `apply` first looks up and binds the signature of `forward` for transforms, which takes 25 µs. An operator's kernel
    for autograd does not need this step, because transforms are already handled there.
    """
    return cast(Callable[..., Any], super(torch.autograd.Function, function).apply)  # type: ignore[misc]


class ModuleCalls:
    """Runs a function around every module call while installed.

    Module hooks would disable the encoders' fast path. Global hooks are skipped when the user interrupts. Neither gets
    keyword arguments before the call. All calls pass through `_call_impl`, except those of modules compiled in place,
    which have a function of their own and are intercepted at `__call__`.
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
        """Start intercepting, with or without modules compiled in place. A repeated call has no effect."""
        # Replacing `__call__` takes ten times as long, because every module class has a slot for it.
        for name in ("_call_impl", "__call__") if has_compiled else ("_call_impl",):
            present = getattr(module.Module, name)
            if present is not self._own[name]:
                self._torchs[name] = present
                setattr(module.Module, name, self._own[name])

    def remove(self) -> None:
        """Stop intercepting. A replacement that other code has installed meanwhile stays, and still calls torch."""
        for name, function in self._own.items():
            if getattr(module.Module, name) is function:
                setattr(module.Module, name, self._torchs[name])


class FunctionCalls:
    """Runs a function around every call of `F.scaled_dot_product_attention` by that name while installed."""

    def __init__(self, around: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        self._torchs: Callable[..., Any] = functional.scaled_dot_product_attention
        self._own = lambda *args, **kwargs: around(self._torchs, args, kwargs)

    def install(self) -> None:
        """Start intercepting. A repeated call has no effect."""
        present = functional.scaled_dot_product_attention
        if present is not self._own:
            self._torchs, functional.scaled_dot_product_attention = present, self._own

    def remove(self) -> None:
        """Stop intercepting. A replacement that other code has installed meanwhile stays, and still calls torch."""
        if functional.scaled_dot_product_attention is self._own:
            functional.scaled_dot_product_attention = self._torchs


def is_plain_linear(one: module.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a module call is torch's linear function of a plain tensor and nothing else, not even a hook."""
    if type(one) is not torch.nn.Linear or kwargs or len(args) != 1 or type(args[0]) is not Tensor:
        return False
    x, own = args[0], one.__dict__
    if x.ndim < 2 or x.is_nested or x.layout is not torch.strided:
        return False
    parameters = own["_parameters"]
    if "bias" not in parameters or _count_function_modes():
        return False
    bias = parameters["bias"]
    return (
        type(parameters.get("weight")) is torch.nn.Parameter
        and (bias is None or type(bias) is torch.nn.Parameter)
        and not (own["_forward_hooks"] or own["_forward_pre_hooks"])
        and not (own["_backward_hooks"] or own["_backward_pre_hooks"])
        and not _has_global_hook()
        and "forward" not in own
        and torch.nn.Linear.forward is _LINEAR_MODULE
        and functional.linear is _LINEAR
    )


def read_linear(of: module.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a linear layer. Attributes of modules are looked up in ten times the time."""
    parameters: dict[str, Any] = of._parameters
    return parameters["weight"], parameters["bias"]


def own_tensors(of: module.Module) -> list[Tensor]:
    """Return a module's own parameters and buffers. The public methods check for duplicates first, which is slower."""
    return [tensor for named in (of._parameters, of._buffers) for tensor in named.values() if tensor is not None]


WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Module path parts that torch.compile, sharding and activation checkpointing add."""


def compiled_from(wrapper: module.Module) -> Any:
    """Return the module that torch.compile wrapped, or None if the given module is not such a wrapper."""
    return getattr(wrapper, "_orig_mod", None)


def is_compiled(one: module.Module) -> bool:
    """Return whether a module runs through torch.compile, wrapped or compiled in place."""
    return "_orig_mod" in one.__dict__.get("_modules", ()) or one.__dict__.get("_compiled_call_impl") is not None


def is_compiler_loaded() -> bool:
    """Return whether compiled code may exist. Importing the compiler to find out would take a second."""
    return "torch._dynamo" in sys.modules or _FLEX in sys.modules


@contextmanager
def running_eagerly(tell: Callable[[], None]) -> Iterator[None]:
    """Return a context in which compiled code runs eagerly and each of its calls is reported to `tell`.

    Calls of the function that flex_attention compiles internally are not reported.
    """
    from torch._dynamo import eval_frame

    frames: Any = eval_frame
    asked = frames._callback_from_stance

    def ask(callback: Any) -> Any:
        function: Any = sys._getframe(1).f_locals.get("fn")
        is_torchs = getattr(function, "__module__", None) == _FLEX and "<locals>" in function.__qualname__
        if callback not in (None, False) and not is_torchs:
            tell()
        return asked(callback)

    with torch.compiler.set_stance("force_eager"):
        frames._callback_from_stance = ask
        try:
            yield
        finally:
            frames._callback_from_stance = asked


def has_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor has entries: False on the meta device and for fake tensors."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return tensor.device.type != "meta" and not (fakes is not None and isinstance(tensor, fakes.FakeTensor))


def without_modes() -> AbstractContextManager[object]:
    """Return a context without dispatch modes, so that another watch does not see computations about a call."""
    if not _count_dispatch_modes():  # a mode is already off inside its own handler
        return nullcontext()
    guard: AbstractContextManager[object] = _python_dispatch._disable_current_modes()
    return guard


class _Unseen:
    def __enter__(self) -> None:
        self._modes = without_modes()
        self._modes.__enter__()
        self._has_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *details: Any) -> None:
        torch._C._set_grad_enabled(self._has_gradients)
        self._modes.__exit__(*details)


def unseen() -> AbstractContextManager[object]:
    """Return a context without dispatch modes and gradients, in a fraction of the time of `torch.no_grad`."""
    return _NOTHING if not torch.is_grad_enabled() and not _count_dispatch_modes() else _Unseen()


_NOTHING = nullcontext()


def take_off(mode: object) -> bool:
    """Take a mode off this thread's stack if nothing else observes, and return whether it was taken."""
    if _count_dispatch_modes() != 1 or _mode_at(0) is not mode:
        return False
    _pop_mode(None)
    if is_unobserved():
        return True
    _push_mode(mode)
    return False


def put_back(mode: object) -> None:
    """Put a mode that was taken off onto this thread's stack."""
    _push_mode(mode)


def leave_mode(mode: object) -> None:
    """Remove the topmost occurrence of a mode from this thread's stack, if any. The other modes keep their order."""
    if not any(one is mode for one in _python_dispatch._get_current_dispatch_mode_stack()):
        return
    above: list[Any] = []
    while (top := _python_dispatch._pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _python_dispatch._push_mode(one)


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread. A forward pass inside it recomputes a checkpoint."""
    return bool(_graph_task() != -1)


def storage_address(tensor: Tensor) -> int:
    """Return the address that identifies a tensor's storage while it exists, or 0 without storage of its own.

    Under autograd a view is a separate tensor object, and only its storage shows that it is a view.
    """
    try:
        address: int = (_values_of(tensor) if tensor.is_nested else tensor).untyped_storage()._cdata
    except Exception:  # sparse, nested and other wrapped tensors, each with an error of its own
        return 0
    return address


def count_changes(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place, for example by an optimiser."""
    return tensor._version


def is_spread(tensor: Tensor) -> bool:
    """Return whether a tensor is distributed over a device mesh."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def local_part(value: Any) -> Any:
    """Return this process's part of a distributed tensor or of an unfinished collective, and other values unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(map(local_part, value)) if type(value) in (list, tuple) else value
    if isinstance(value, Tensor) and type(value) not in _PLAIN:
        value = getattr(value, "_local_tensor", value)  # DTensor; its to_local() is an operation of autograd
        return getattr(value, "elem", value)  # AsyncCollectiveTensor
    return value


def _values_of(tensor: Tensor) -> Tensor:
    """Return the tensor that holds a jagged tensor's values, and any other tensor unchanged."""
    if tensor.is_nested and tensor.layout is torch.jagged:
        return cast(Tensor, cast(Any, tensor)._values)
    return tensor


class WeakStorage:
    """Weak reference to a tensor's storage. While the reference exists, the storage address is not reused.

    Two references are equal if they refer to the same storage, even after it is freed. It does in one object what
    torch's class does in two.
    """

    __slots__ = ("address",)

    def __init__(self, tensor: Tensor) -> None:
        self.address = 0
        self.address = _refer_weakly((_values_of(tensor) if tensor.is_nested else tensor).untyped_storage())

    def __del__(self, free: Callable[[int], None] = _free_weak) -> None:
        # The function is bound here because names of the module may be gone when Python exits.
        if self.address:
            free(self.address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakStorage) and self.address == other.address

    def __hash__(self) -> int:
        return self.address

    def is_gone(self) -> bool:
        """Return whether the storage has no other references."""
        return _is_expired(self.address)


def name_arguments(function: Any) -> tuple[str, ...]:
    """Return an operator's argument names from its schema."""
    return _read_schema(function)[0]


def bind(function: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by their names in its schema, including defaults."""
    names, defaults = _read_schema(function)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@lru_cache(maxsize=1024)
def _read_schema(function: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return an operator's argument names, and the default values by name."""
    arguments = function._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return tuple(argument.name for argument in arguments), defaults


@lru_cache(maxsize=4096)
def operator_name(function: Any) -> str:
    """Return an operator's name without its overload: `aten::mul` for torch.ops.aten.mul.Tensor."""
    schema = getattr(function, "_schema", None)
    return str(function) if schema is None else str(schema.name)


def map_places(
    function: Callable[..., Tensor],
    sizes: tuple[int, int, int, int],
    device: torch.device,
    scores: Tensor | None,
    buffers: tuple[Any, ...],
) -> Tensor:
    """Return the values of a flex_attention score or mask function at every position `[B, H, L, S]`.

    Inside the function, indexing a tensor by a position does not convert the position to a Python number.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    places = [torch.arange(size, device=device) for size in sizes]
    given = () if scores is None else (scores,)
    mapped = _vmap_for_bhqkv(function, prefix=(0,) * len(given), suffix=(None,) * len(buffers))
    with TransformGetItemToIndex():
        result: Tensor = mapped(*given, *places, *buffers)
    return result
