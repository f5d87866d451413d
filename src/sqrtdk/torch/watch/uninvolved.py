"""Finds modules that take no part in a model's attention, so that later calls of the model need not follow them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from sqrtdk.torch.internals import own_tensors
from sqrtdk.torch.watch.modules import Frame
from sqrtdk.torch.watch.recognise.known_tensors import KnownTensors
from sqrtdk.torch.watch.recognise.lineage import Lineage
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
        outputs = _find_outputs(output)
        if outputs is None:
            self._needed.add(module)
            return
        for fact in map(memory.look_up, outputs):
            if fact is None:
                continue
            if fact.scores or fact.candidates or fact.factors or fact.is_pair or fact.is_learnt or fact.origin:
                self._needed.add(module)
            elif fact.lineage is not None:
                self._has_lineage.add(module)

    def note_attention(self, candidate: Candidate, frames: Iterable[Frame], products: int) -> None:
        """Record attention, understood or not, with the running modules and the number of products so far."""
        first, call = products, candidate.call
        for frame in frames:
            self._needed.add(frame.module)
            if frame.number == candidate.frame:
                first = frame.products + 1
        for lineage in () if call is None else (call.q_lineage, call.k_lineage):
            numbers = [0] if lineage is None else list(_find_numbers(lineage))
            # Keys of a cache come from products of earlier calls.
            first = min([first, *(number for number in numbers if number > self._start)])
            if lineage is None:
                first = self._start
        self._attention.append(_Span(first, products))

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


def _find_outputs(output: Any) -> list[Tensor] | None:
    """Return the tensors of an output, or None for an output of another kind than a tensor or a flat tuple."""
    outputs = output if isinstance(output, tuple | list) else (output,)
    if any(not (one is None or isinstance(one, Tensor)) for one in outputs):
        return None
    return [one for one in outputs if one is not None]


def _find_numbers(lineage: Lineage) -> Iterable[int]:
    yield lineage.number
    for _, part in lineage.parts:
        yield from () if part is None else _find_numbers(part)


class Uninvolved:
    """Modules of one model without part in its attention, as the last fully followed call showed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._is_training: bool | None = None
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

    def forget(self) -> None:
        """Follow the next call fully."""
        with self._lock:
            self.modules = WeakKeyDictionary()


_of_models: WeakKeyDictionary[nn.Module, Uninvolved] = WeakKeyDictionary()


def recall_uninvolved(model: nn.Module) -> Uninvolved:
    """Return what earlier watches of a model found out."""
    return _of_models.setdefault(model, Uninvolved())
