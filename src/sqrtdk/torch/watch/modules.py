"""Module paths, and which module of a watched model runs in a thread."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from sqrtdk.torch.internals import own_tensors

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_query_heads")
# What wrappers put in front of a path: DistributedDataParallel and others, torch.compile, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Calls of one module in one forward pass that are told apart: more of them are a loop, and would fill the memory.
MOST_CALLS = 64


def name_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The path of every module, the first of several names, without what wrappers put into it."""
    inner = model
    while isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = inner.module
    names = {inner: ""}
    for path, module in inner.named_modules():
        if any(wrapper in path for wrapper in _WRAPPERS):
            path = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        names.setdefault(module, path)
    unwrapped = getattr(inner, "_orig_mod", None)
    while isinstance(unwrapped, nn.parallel.DistributedDataParallel | nn.DataParallel):
        shortened = {module: path.removeprefix("module").removeprefix(".") for module, path in names.items()}
        names, unwrapped = shortened, unwrapped.module
    if inner is not model:
        for module in model.modules():  # wrappers themselves
            names.setdefault(module, "")
    return names


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether any module runs through torch.compile."""
    return any(
        "_orig_mod" in module.__dict__.get("_modules", ()) or module.__dict__.get("_compiled_call_impl") is not None
        for module in modules
    )


class LayerKey(NamedTuple):
    """A layer: the path of its module, and which of the module's calls in a forward pass it is."""

    path: str
    call: int


def name_layers(keys: Iterable[LayerKey]) -> dict[LayerKey, str]:
    """The names of layers: the path alone where a module is called once in a forward pass.

    >>> list(name_layers([LayerKey("embed", 0), LayerKey("layer", 0), LayerKey("layer", 1)]).values())
    ['embed', 'layer (call 0)', 'layer (call 1)']
    """
    keys = list(keys)
    repeated = {key.path for key in keys if key.call}
    return {key: f"{key.path} (call {key.call})".strip() if key.path in repeated else key.path for key in keys}


class CallCounter:
    """Counts the calls of each module that compute attention, within one forward pass."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Hashable, int]] = {}

    def restart(self) -> None:
        """Begin with another forward pass."""
        self._numbers.clear()

    def find(self, path: str, number: Hashable) -> LayerKey:
        """The layer of a module's call, whose number no other running call has; beyond the last, the last."""
        calls = self._numbers.setdefault(path, {})
        return LayerKey(path, min(calls.setdefault(number, len(calls)), MOST_CALLS - 1))


class Frame:
    """One running call of a module: its number, its arguments, and how much had been seen when it began."""

    __slots__ = ("_given", "args", "heads", "kwargs", "module", "number", "path", "products", "taken")

    def __init__(
        self,
        number: int,
        module: nn.Module,
        path: str,
        heads: int | None,
        products: int,
        taken: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.number, self.module, self.path, self.heads = number, module, path, heads
        self.products, self.taken = products, taken
        self.args, self.kwargs = args, kwargs
        self._given: dict[str, Any] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the module's forward by name, as far as they can be told."""
        if self._given is None:
            given = self.kwargs
            if self.args:
                forward = self.module.forward
                function = getattr(forward, "__func__", None)
                names = _read_names(forward) if function is None else _read_names_of_method(function)
                given = dict(zip(names, self.args, strict=False)) | given
            for name in ("kwargs", "model_kwargs"):
                if isinstance(given.get(name), dict):
                    given = given | given[name]
            self._given = given
        return self._given


def _read_names(forward: Any) -> tuple[str, ...]:
    """The names of the arguments that may be given by place."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))


@lru_cache(maxsize=1024)
def _read_names_of_method(function: Any) -> tuple[str, ...]:
    return _read_names(function)[1:]


def find_learnt(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters of modules; quantised weights are buffers of integers."""
    tensors = (tensor for module in modules for tensor in own_tensors(module))
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point()]


def read_heads(module: nn.Module) -> int | None:
    """How many heads a module says it has."""
    for name in _HEADS:
        heads = getattr(module, name, None)
        if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
            return heads
    return None


def find_tensors(output: Any) -> list[Tensor]:
    """The tensors that a module returned."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple | list):
        return [one for one in output if isinstance(one, Tensor)]
    return []
