"""Names the modules of a watched model and describes their running calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from sqrtdk.torch.internals import WRAPPERS, compiled_from, local_part, own_tensors

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_query_heads")
_WRAPPED = re.compile("|".join(WRAPPERS))
# Modules that compute no part of attention; in eval mode they return their input.
_IDLE = (nn.Dropout, nn.Identity)
# Upper limit for the calls of one module in one forward pass that become separate layers. More calls are a loop, and
# would fill the memory.
MOST_CALLS = 64


def name_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return the path of every module that may compute attention or a part of it.

    A module with several names gets the first; wrapper parts are removed.
    """
    inner = model
    while isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = inner.module
    names = {inner: ""}
    for path, module in inner.named_modules():
        if _WRAPPED.search(path):
            path = ".".join(part for part in path.split(".") if part not in WRAPPERS)
        if type(module) not in _IDLE:
            names.setdefault(module, path)
    unwrapped = compiled_from(inner)
    while isinstance(unwrapped, nn.parallel.DistributedDataParallel | nn.DataParallel):
        shortened = {module: path.removeprefix("module").removeprefix(".") for module, path in names.items()}
        names, unwrapped = shortened, unwrapped.module
    if inner is not model:
        for module in model.modules():  # the wrappers themselves
            names.setdefault(module, "")
    return names


class LayerKey(NamedTuple):
    """Identifies a layer by its module path and the number of the module's call in a forward pass."""

    path: str
    call: int


def name_layers(keys: Iterable[LayerKey]) -> dict[LayerKey, str]:
    """Return the names of layers. The name is the path alone if the module is called once in a forward pass.

    >>> list(name_layers([LayerKey("embed", 0), LayerKey("layer", 0), LayerKey("layer", 1)]).values())
    ['embed', 'layer (call 0)', 'layer (call 1)']
    """
    keys = list(keys)
    repeated = {key.path for key in keys if key.call}
    return {key: f"{key.path} (call {key.call})".strip() if key.path in repeated else key.path for key in keys}


class CallCounter:
    """Counts each module's calls that compute attention within one forward pass."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Hashable, int]] = {}

    def restart(self) -> None:
        """Reset the counts for a new forward pass."""
        self._numbers.clear()

    def find(self, path: str, number: Hashable) -> LayerKey:
        """Return the layer of the module call with this number. Calls beyond the limit share the last layer."""
        calls = self._numbers.setdefault(path, {})
        return LayerKey(path, min(calls.setdefault(number, len(calls)), MOST_CALLS - 1))


class Frame:
    """One running module call: its number, its arguments, and the recogniser's counts when the call began."""

    __slots__ = ("_given", "args", "has_attended", "kwargs", "module", "number", "path", "products", "stack", "taken")

    def __init__(
        self,
        number: int,
        module: nn.Module,
        path: str,
        products: int,
        taken: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.number, self.module, self.path = number, module, path
        self.products, self.taken = products, taken
        # The running modules up to this one in the recogniser's form, once they are asked for.
        self.stack: tuple[tuple[int, str, int | None], ...] | None = None
        self.args, self.kwargs = args, kwargs
        self.has_attended = False
        self._given: dict[str, Any] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the module's forward by name, as far as the names are known."""
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
    """Return the names of a function's positional arguments, or () if its signature cannot be read."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))


@lru_cache(maxsize=1024)
def _read_names_of_method(function: Any) -> tuple[str, ...]:
    return _read_names(function)[1:]


def find_learnt(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters of modules, including integer buffers, which hold quantised weights."""
    return [
        tensor
        for module in modules
        for tensor in own_tensors(module)
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point()
    ]


def read_heads(module: nn.Module) -> int | None:
    """Return the number of heads that a module declares, or None if it declares none."""
    own, kind = vars(module), type(module)
    for name in _HEADS:
        # A module looks for a missing attribute among its parameters and children, which takes ten times as long.
        heads = own[name] if name in own else getattr(module, name, None) if hasattr(kind, name) else None
        if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
            return heads
    return None


def find_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a module's output: the output itself or the tensors of a tuple or list."""
    if isinstance(output, Tensor):
        return [local_part(output)]
    if isinstance(output, tuple | list):
        return [local_part(one) for one in output if isinstance(one, Tensor)]
    return []
