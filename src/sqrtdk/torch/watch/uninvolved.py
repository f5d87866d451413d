"""Finds modules that take no part in a model's attention, so that later calls of the model need not follow them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from sqrtdk.torch.internals import own_tensors, storage_address
from sqrtdk.torch.watch.modules import Frame
from sqrtdk.torch.watch.recognise.calls import SeenCall
from sqrtdk.torch.watch.recognise.known_tensors import KnownTensors
from sqrtdk.torch.watch.recognise.parts import Candidate

WHOLE_CALLS = frozenset(4**power for power in range(1, 32))
"""Numbers of the repeated calls that are followed in the whole model."""


class _Span(NamedTuple):
    """Part of a model call, by the numbers of products before its start and before its end."""

    first: int
    last: int


class CallRecord:
    """Records when modules ran and when attention was computed in a model call that is followed fully.

    The number of products so far serves as the time.

    Args:
        start: the number of products before the call.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._spans: dict[nn.Module, list[_Span]] = {}
        self._attention: list[_Span] = []
        # Modules whose output must be followed.
        self._needed: set[nn.Module] = set()
        self._has_lineage: set[nn.Module] = set()
        self.ran: set[nn.Module] = set()
        self.heard: set[tuple[str, str]] = set()

    def note_module(self, frame: Frame, products: int, output: Any, memory: KnownTensors) -> None:
        """Record the end of a module call after this number of products."""
        module = frame.module
        self.ran.add(module)
        self._spans.setdefault(module, []).append(_Span(frame.products, products))
        if not _is_plain(frame, output):
            self._needed.add(module)
            return
        fact = memory.look_up(output)
        lineage = None if fact is None else fact.lineage
        if (lineage is not None and (not lineage.is_projection or lineage.reduced)) or (
            fact is not None
            and (fact.scores or fact.candidates or fact.factors or fact.is_pair or fact.is_learnt or fact.origin)
        ):
            self._needed.add(module)
        elif lineage is not None:
            self._has_lineage.add(module)

    def note_attention(self, candidate: Candidate, frames: Iterable[Frame], products: int) -> None:
        """Record attention, understood or not, with the running modules and the number of products so far."""
        first = products
        for frame in frames:
            self._needed.add(frame.module)
            if frame.number == candidate.frame:
                first = frame.products + 1
        numbers = _find_products(candidate.call)
        # 0 stands for any product. Keys of a cache come from products of earlier calls.
        since = self._start if 0 in numbers else min((one for one in numbers if one > self._start), default=first)
        self._attention.append(_Span(min(first, since), products))

    def find(self, model: nn.Module) -> dict[nn.Module, bool]:
        """Return the outermost modules without part in attention, and whether their outputs have a lineage.

        Such a module ran only before the projections of queries and keys, or after the attention. All modules inside
        that have parameters ran too, because a module that did not run may compute attention in another call.
        """
        found: dict[nn.Module, bool] = {}
        inside: set[nn.Module] = set()
        attention = _join(self._attention)
        for module in model.modules() if attention else ():
            if module is not model and module not in inside and self._is_uninvolved(module, attention):
                found[module] = module in self._has_lineage
                inside.update(module.modules())
        return found

    def _is_uninvolved(self, module: nn.Module, attention: list[_Span]) -> bool:
        # A linear layer alone is seen as one product, which takes as little time.
        if module in self._needed or module not in self._spans or type(module) is nn.Linear:
            return False
        for first, last in self._spans[module]:
            before = bisect_right(attention, last, key=lambda span: span.first)
            if before and attention[before - 1].last >= first:
                return False
        return all(one in self.ran or not own_tensors(one) for one in module.modules())


def _join(spans: Iterable[_Span]) -> list[_Span]:
    """Return the spans in order, those that overlap as one."""
    joined: list[_Span] = []
    for span in sorted(spans):
        if joined and span.first <= joined[-1].last:
            span = _Span(joined[-1].first, max(span.last, joined.pop().last))
        joined.append(span)
    return joined


def find_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a module."""
    return [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]


def _is_plain(frame: Frame, output: Any) -> bool:
    """Return whether a module computes one new tensor of real numbers from tensors that it received directly."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return False
    if any(isinstance(one, list | tuple | dict) for one in (*frame.args, *frame.kwargs.values())):
        return False
    inputs = [storage_address(one) for one in find_inputs(frame.args, frame.kwargs)]
    return bool(inputs) and 0 not in inputs and storage_address(output) not in {0, *inputs}


def _find_products(call: SeenCall | None) -> set[int]:
    """Return the numbers of the products that queries and keys come from; 0 stands for unknown ones."""
    numbers: set[int] = set()
    waiting = [None] if call is None else [call.q_lineage, call.k_lineage]
    while waiting:
        lineage = waiting.pop()
        numbers |= {0} if lineage is None else lineage.products
        waiting += [] if lineage is None else [part for _, part in lineage.parts if part is not None]
    return numbers


def may_be_unfollowed(call: SeenCall | None, *, is_spared: bool) -> bool:
    """Return whether queries or keys come from a module that was not followed, or may in a model call that is spared.

    Keys of a cache may come from an earlier model call.
    """
    least = min(_find_products(call), default=1)
    return least < 0 or (least == 0 and is_spared)


class Uninvolved:
    """Modules of one model without part in its attention, as the last fully followed call showed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._is_training: bool | None = None
        # True after queries or keys may have come from such a module.
        self.is_wrong = False
        # Whether the output of each has a lineage.
        self.modules: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        # These modules and the modules inside.
        self.covered: WeakSet[nn.Module] = WeakSet()
        # Paths of modules, with the operations in them that are attention elsewhere.
        self.heard: frozenset[tuple[str, str]] = frozenset()

    def count_call(self, model: nn.Module) -> bool:
        """Count a model call, and return whether it must be followed fully."""
        with self._lock:
            self._calls += 1
            return not self.modules or self._is_training != model.training or self._calls in WHOLE_CALLS

    def learn(self, record: CallRecord, model: nn.Module) -> None:
        """Replace the modules by those of a fully followed call."""
        found = record.find(model)
        with self._lock:
            self._is_training = model.training
            self.covered = WeakSet(one for module in found for one in module.modules())
            self.heard = frozenset(record.heard)
            self.modules = WeakKeyDictionary(found)

    def check_modules(self) -> None:
        """Forget modules in which another module was put since."""
        with self._lock:
            for module in [one for one in self.modules if not all(part in self.covered for part in one.modules())]:
                del self.modules[module]

    def forget(self) -> None:
        """Follow the next call fully."""
        with self._lock:
            self.modules = WeakKeyDictionary()

    def give_up(self) -> None:
        """Follow all later calls of the model fully, because a module may take part in attention after all."""
        self.is_wrong = True
        self.forget()


_of_models: WeakKeyDictionary[nn.Module, Uninvolved] = WeakKeyDictionary()


def recall_uninvolved(model: nn.Module) -> Uninvolved:
    """Return what earlier watches of a model found out."""
    return _of_models.setdefault(model, Uninvolved())
