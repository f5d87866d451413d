"""Roles of the processes that train one model: each sees its own rows, heads or layers, as a device mesh says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.torch.internals import is_spread, local_part
from sqrtdk.torch.watch.modules import name_modules

# Dimension names of a mesh, as torchtitan, Accelerate, Megatron and the torch tutorials use them. `sp` is left out
# because some libraries split heads along it (Ulysses) and others split rows.
ROWS = (
    *("dp", "data", "data_parallel", "ddp", "fsdp", "hsdp", "replicate", "shard"),
    *("dp_replicate", "dp_shard", "dp_cp", "dp_shard_cp", "batch", "loss", "ep", "expert"),
    *("cp", "context", "context_parallel", "seq", "sequence", "sequence_parallel"),
)
HEADS = ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel")
STAGES = ("pp", "pipe", "pipeline", "pipeline_parallel", "stage", "stages")


class Place(NamedTuple):
    """Place of a process in its mesh: the stage of the layers, the shard of the heads, the part of the rows."""

    stage: int
    shard: int
    part: int


class Bits(NamedTuple):
    """Bit sums of a module's parameters: over those that every rank has whole, and over all local parameters.

    The first `_ENOUGH` numbers of each parameter stand for it.
    """

    whole: int
    here: int


@dataclass(frozen=True)
class Ranks:
    """Group of processes, and the place of this process in the group.

    `is_told` is whether a mesh gave the places. Without a mesh, every rank counts as one that sees other rows, and
    `compared` collects the layers whose parameters were once found equal on all ranks.
    """

    group: dist.ProcessGroup | None
    place: Place
    is_told: bool
    model: nn.Module | None = None
    compared: set[str] = field(default_factory=set)

    @staticmethod
    def of(
        group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None, model: nn.Module | None = None
    ) -> Ranks:
        """Return the ranks of a mesh, or of a group (None: all), whose ranks then see other rows of the same heads.

        If neither is given and the model's parameters are sharded by heads, the mesh of the parameters is used.

        Raises:
            InvalidTypeError, InvalidValueError: if a mesh dimension has an unknown name; if torch.distributed is not
                initialised; if this process is not in the group.
        """
        _check_initialised(group)
        if mesh is None and group is None and model is not None:
            mesh = _find_mesh(model)
        if mesh is None:
            return Ranks(group, Place(0, 0, dist.get_rank(group)), False, model)
        if not isinstance(mesh, DeviceMesh):
            raise InvalidTypeError("mesh", f"must be a DeviceMesh, got {type(mesh).__name__}")
        coordinates = mesh.get_coordinate()
        if coordinates is None:
            raise InvalidValueError("mesh", "must contain the calling process")
        place = {"stage": 0, "shard": 0, "part": 0}
        for name, size, coordinate in zip(_names_of(mesh), mesh.shape, coordinates, strict=True):
            role = _role_of(name)
            place[role] = place[role] * size + coordinate
        return Ranks(_group_of(mesh), Place(**place), True, model)

    @property
    def device(self) -> torch.device:
        """Return the device on which the group's collectives need their tensors."""
        if dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def bits_of(self, paths: Iterable[str]) -> dict[str, Bits]:
        """Return the bit sums of the parameters of modules by path, as they are now; empty without a model.

        They are not kept: ranks may first see a layer at different steps, and its parameters change in between.
        """
        modules = {} if self.model is None else {path: module for module, path in name_modules(self.model).items()}
        return {path: _add_module(modules[path]) for path in paths if path in modules}

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of their places."""
        ranks: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(ranks, (self.place, value), group=self.group)
        return [value for _, value in sorted(ranks, key=lambda one: one[0])]


def _check_initialised(group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidValueError(
            "all_reduce needs a process group, but torch.distributed is not initialised; "
            "call torch.distributed.init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise InvalidValueError("group", "must contain the calling process")


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ("",) * mesh.ndim


def _role_of(name: str) -> str:
    for role, names in (("part", ROWS), ("shard", HEADS), ("stage", STAGES)):
        if name.lower() in names:
            return role
    known = "; ".join(f"{what}: {', '.join(names)}" for what, names in _MEANINGS)
    raise InvalidValueError("mesh", f"must have dimensions with names that are known ({known}), got {name!r}")


_MEANINGS = (("other rows", ROWS), ("other heads", HEADS), ("other layers", STAGES))


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of all ranks of a mesh; None if the mesh spans all processes."""
    if mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    known = _groups.get(ranks)
    if known is None or not _is_alive(known):
        known = _groups[ranks] = dist.new_group([*ranks], use_local_synchronization=True)
    return cast(dist.ProcessGroup, known)


# Groups of the ranks of meshes: a group holds sockets, and clipping asks for one in every step.
_groups: dict[tuple[int, ...], Any] = {}


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a group still exists: torch.distributed may have been initialised again."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def _find_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the parameters that are sharded by heads or stages; None if there is no such parameter.

    Raises:
        InvalidValueError: if the mesh does not contain all ranks, because the places of the others are then unknown.
    """
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or not any(one.lower() in (*HEADS, *STAGES) for one in _names_of(mesh)):
            continue
        if mesh.size() != dist.get_world_size():
            raise InvalidValueError(
                f"mesh must be given: {name} is spread over {mesh.size()} of {dist.get_world_size()} ranks "
                f"(dimensions {', '.join(_names_of(mesh))}), and what the others hold is not known"
            )
        return cast(DeviceMesh, mesh)
    return None


_ENOUGH = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def add_bits(tensor: Tensor) -> int:
    """Return the sum of a tensor's numbers read as integers. The sum does not depend on the machine or on the order."""
    if tensor.layout is not torch.strided or tensor.element_size() not in _INTEGERS:
        return 0
    return int(tensor.contiguous().view(_INTEGERS[tensor.element_size()]).sum())


def _add_module(module: nn.Module) -> Bits:
    whole = here = 0
    for number, parameter in enumerate(module.parameters(), start=1):
        total = number * add_bits(local_part(parameter).detach().reshape(-1)[:_ENOUGH])
        here += total
        whole += 0 if is_spread(parameter) else total
    return Bits(whole, here)


def take_shard(whole: Tensor, parameter: Any) -> Tensor | None:
    """Return the part of a tensor that matches the local shard of a parameter; None for an unknown layout.

    Args:
        whole: flat tensor, as long as the parameter gathered from all ranks with the same heads, plus padding.
        parameter: a DTensor. The numbers of `whole` are in the order that the parameter has while the model runs.
    """
    mesh, shape = parameter.device_mesh, [*parameter.shape]
    axes = zip(_names_of(mesh), mesh.shape, mesh.get_coordinate(), parameter.placements, strict=True)
    cuts = [
        (placement.dim, size, at, name.lower() in HEADS)
        for name, size, at, placement in axes
        if hasattr(placement, "dim")
    ]
    for axis, size, at, is_of_heads in cuts:
        if is_of_heads:
            shape[axis] = len(_chunk(torch.empty(shape[axis]), size, at, 0))
    if math.prod(shape) > len(whole):
        return None
    part = whole[: math.prod(shape)].view(shape)
    for axis, size, at, is_of_heads in cuts:
        if not is_of_heads:
            part = _chunk(part, size, at, axis)
    return part if part.shape == local_part(parameter).shape else None


def _chunk(tensor: Tensor, number: int, at: int, axis: int) -> Tensor:
    """Return chunk `at` of `number` chunks; empty if there are fewer chunks."""
    chunks = tensor.chunk(number, axis)
    return chunks[at] if at < len(chunks) else tensor.narrow(axis, 0, 0)
