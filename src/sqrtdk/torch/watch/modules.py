"""Module paths, and which module of a watched model runs in a thread."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_query_heads")
# What wrappers put in front of a path: DistributedDataParallel and others, torch.compile, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def name_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The path of every module, the first of several names, without what wrappers put into it."""
    inner = model
    while isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = inner.module
    names = {inner: ""}
    for path, module in inner.named_modules():
        names.setdefault(module, ".".join(part for part in path.split(".") if part not in _WRAPPERS))
    unwrapped = getattr(inner, "_orig_mod", None)
    while isinstance(unwrapped, nn.parallel.DistributedDataParallel | nn.DataParallel):
        shortened = {module: path.removeprefix("module").removeprefix(".") for module, path in names.items()}
        names, unwrapped = shortened, unwrapped.module
    for module in model.modules():  # wrappers themselves
        names.setdefault(module, "")
    return names


def is_compiled(model: nn.Module) -> bool:
    """Whether any module runs through torch.compile."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


class Frame(NamedTuple):
    """One running call of a module: its number, and how much had been seen when it began."""

    number: int
    module: nn.Module
    path: str
    heads: int | None
    products: int
    taken: int
    pending: int


def read_heads(module: nn.Module) -> int | None:
    """How many heads a module says it has."""
    for name in _HEADS:
        heads = getattr(module, name, None)
        if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
            return heads
    return None


def bind_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward by name, as far as they can be told."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return dict(kwargs)
    given = dict(bound)
    for name in ("kwargs", "model_kwargs"):
        if isinstance(given.get(name), dict):
            given |= given.pop(name)
    return given


def find_tensors(output: Any) -> list[Tensor]:
    """The tensors that a module returned."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple | list):
        return [one for one in output if isinstance(one, Tensor)]
    return []
