"""Follows repeated calls of a model whose attention is all fused: only the fused operations, where they were before."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn

from sqrtdk import errors
from sqrtdk.torch.internals import DispatchMode, bind, is_in_backward, local_part, operator_name, unseen
from sqrtdk.torch.watch.modules import LayerKey
from sqrtdk.torch.watch.recognise.calls import NotUnderstoodError, SeenCall, measure
from sqrtdk.torch.watch.recognise.fused_operations import FUSED, OWN, find_rows, looks_like_attention, with_statistics
from sqrtdk.torch.watch.recognise.masks import forget_mask
from sqrtdk.torch.watch.recognise.parts import Candidate, Stack

TELLING = frozenset({"aten::_softmax", "aten::_safe_softmax", "aten::softmax", "aten::bmm", "aten::baddbmm"})
"""Operations of attention that is not fused."""

NONE = "it computed no fused attention in a call of the model that was followed for fused attention alone"
"""Reason for a module that attended in earlier calls and may attend in another way now."""

UNLIKE = "{} ran in another place or way than in earlier calls of the model, which was not followed in this call"
"""Reason for attention that a repeated call was not followed for, with the operation."""


class Known:
    """Facts from calls that were followed fully: modules that ran, modules with fused attention, telling operations."""

    def __init__(self) -> None:
        # False after attention that is not fused, is rearranged, or was not understood.
        self.is_all_fused = True
        self.ran: set[nn.Module] = set()
        # Modules whose attention is torch's function by name, and modules that call other fused operations.
        self.calling: set[nn.Module] = set()
        self.attending: set[nn.Module] = set()
        # Both kinds and the modules around them.
        self.around: set[nn.Module] = set()
        # Module paths with the telling operations that ran inside without being attention.
        self.heard: set[tuple[str, str]] = set()
        # Whether queries and keys of a layer are of one sequence.
        self.one_sequence: dict[LayerKey, bool] = {}

    @property
    def is_enough(self) -> bool:
        """Whether later calls may be followed for fused operations alone."""
        return self.is_all_fused and bool(self.around)


class _Kind(Enum):
    OTHER, FUSED, TELLING = range(3)


_kinds: dict[Any, _Kind] = {}


def _find_kind(function: Any) -> _Kind:
    kind = _kinds.get(function)
    if kind is None:
        name = operator_name(function)
        is_telling = name in TELLING or looks_like_attention(name)
        kind = _Kind.FUSED if name in FUSED else _Kind.TELLING if is_telling else _Kind.OTHER
        _kinds[function] = kind
    return kind


class FusedOnly(DispatchMode):  # type: ignore[misc]
    """Observes fused attention of one thread, and reports operations that may be attention of another kind.

    Args:
        known: facts of earlier calls.
        take: receives candidates.
        locate: returns the running modules.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Known, take: Callable[[Candidate], None], locate: Callable[[], Stack]) -> None:
        super().__init__()
        self._known, self._take, self._locate = known, take, locate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        kind = _find_kind(func)
        if kind is _Kind.OTHER or is_in_backward():
            return func(*args, **kwargs)
        name = operator_name(func)
        if name == OWN:
            args = with_statistics(func, args)
        result = func(*args, **kwargs)
        try:
            if kind is _Kind.TELLING:
                self._note_unlike(name)
            else:
                seen = result
                if types:
                    # For tensors distributed over a mesh, observe this process's part.
                    args, seen = local_part(args), local_part(result)
                    kwargs = {key: local_part(value) for key, value in kwargs.items()}
                self._see(name, FUSED[name](bind(func, args, kwargs)), seen)
        except Exception as error:  # the model must keep running after any error here
            if errors.faults_are_raised:
                raise
            self._refuse(f"{name} could not be followed: {type(error).__name__}")
        return result

    def _see(self, name: str, calls: list[SeenCall], result: Any) -> None:
        forget_mask()
        with unseen():
            for call in calls:
                rows = find_rows(name, call, result)
                try:
                    rows = measure(call) if rows is None else rows
                except NotUnderstoodError as error:
                    self._refuse(str(error))
                    continue
                keys = call.k.shape[-2]
                self._take(Candidate(self._locate(), keys, keys, call, rows, is_repeated=True))

    def _note_unlike(self, name: str) -> None:
        stack = self._locate()
        if stack and (stack[-1][1], name) not in self._known.heard:
            self._refuse(UNLIKE.format(name))

    def _refuse(self, reason: str) -> None:
        self._known.is_all_fused = False
        self._take(Candidate(self._locate(), 0, 0, reason=reason))
