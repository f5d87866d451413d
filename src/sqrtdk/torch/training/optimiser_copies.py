"""Finds an optimiser's own copies of weights, which its next step would write back over a clip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.torch.internals import local_part, storage_address


def check_optimisers(optimiser: Any) -> list[Any]:
    """Return the optimisers of an argument: None, one optimiser, or a list of several.

    Raises:
        InvalidTypeError: if one of them has no `param_groups`.
    """
    optimisers = [] if optimiser is None else [*optimiser] if isinstance(optimiser, list | tuple) else [optimiser]
    for one in optimisers:
        if not hasattr(one, "param_groups"):
            raise InvalidTypeError(
                "optimiser", f"must have param_groups, as those of torch do, or be a list, got {type(one).__name__}"
            )
    return optimisers


def find_copies(optimisers: Iterable[Any], parameters: Iterable[tuple[str, Tensor]]) -> list[list[Tensor]]:
    """Return for each parameter the optimisers' copies of it, shaped as its local part; empty if it has none.

    A copy is a tensor among an optimiser's parameters or in its state that has the parameter's numbers once it is
    rounded to the parameter's dtype. A flat copy of many parameters counts where it has the parameter whole.

    Raises:
        InvalidValueError: if optimisers hold neither a parameter that is trained nor a copy of it, so that the next
            step would undo its change.
    """
    optimisers = list(optimisers)
    # Once each: a copy may be among the parameters of an optimiser and in its state.
    held_once = {id(one): one for optimiser in optimisers for one in _held(optimiser)}
    held = [local_part(one).detach() for one in held_once.values()]
    owned = {
        storage_address(local_part(one))
        for optimiser in optimisers
        for group in optimiser.param_groups
        for one in group["params"]
    }
    return [_find(name, parameter, held, owned) if optimisers else [] for name, parameter in parameters]


def _held(optimiser: Any) -> Iterator[Tensor]:
    for group in optimiser.param_groups:
        yield from group["params"]
    for state in getattr(optimiser, "state", {}).values():
        if isinstance(state, dict):
            yield from (one for one in state.values() if isinstance(one, Tensor) and one.is_floating_point())


def _find(name: str, parameter: Tensor, held: list[Tensor], owned: set[int]) -> list[Tensor]:
    local = local_part(parameter).detach()
    address, copies = storage_address(local), []
    for one in held:
        if storage_address(one) == address or one.device != local.device:
            continue
        if one.shape == local.shape:
            copies += [one] if torch.equal(one.to(local.dtype), local) else []
        elif one.ndim == 1 and one.numel() > local.numel() > 0:
            copies += _find_in_flat(one, local)
    if not copies and address not in owned and parameter.requires_grad:
        raise InvalidValueError(
            f"the optimiser holds neither {name} nor a copy that could be found, so that its next step would undo the "
            "clip; optimisers that split a weight over several processes or tensors are not followed"
        )
    return copies


def _find_in_flat(flat: Tensor, local: Tensor) -> list[Tensor]:
    """Return the part of a flat tensor that is a copy of a parameter, if it has one."""
    rounded, wanted = flat.to(local.dtype), local.reshape(-1)
    last = flat.numel() - wanted.numel()
    for start in (rounded[: last + 1] == wanted[0]).nonzero().flatten().tolist():
        if torch.equal(rounded[start : start + wanted.numel()], wanted):
            return [flat[start : start + wanted.numel()].view(local.shape)]
    return []
