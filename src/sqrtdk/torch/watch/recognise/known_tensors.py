"""Stores known facts about tensors by storage address, without keeping the tensors alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sqrtdk.torch.internals import WeakStorage, storage_address
from sqrtdk.torch.watch.recognise.lineage import Lineage
from sqrtdk.torch.watch.recognise.scores import Factors, Product, Scores
from sqrtdk.torch.watch.recognise.vectors import Trace

# Number of writes between two searches for freed storage.
_BETWEEN = 64


@dataclass(eq=False)
class KnownTensor:
    """Facts about the tensors in one storage: scores, weights of a candidate, or a projection's output."""

    weak: WeakStorage
    scores: Scores | None = None
    candidates: tuple[Any, ...] = ()
    lineage: Lineage | None = None
    trace: Trace | None = None
    # Two tensors whose elementwise product this is; summed up, they give scores.
    factors: Factors | None = None
    is_pair: bool = False
    # The factor that torch's own attention multiplied the tensor by.
    folded: float = 1.0
    # Computed from learnt tensors alone, such as a copy in another dtype or a dequantised weight.
    is_learnt: bool = False
    # The storage that this tensor is a copy of.
    origin: WeakStorage | None = None


class KnownTensors:
    """Facts by storage address. The address of a freed storage is not reused while a fact about it is kept."""

    def __init__(self) -> None:
        self._facts: dict[int, KnownTensor] = {}
        self._written = 0

    def look_up(self, tensor: Tensor) -> KnownTensor | None:
        """Return the facts about a tensor's storage, or None."""
        address = storage_address(tensor)
        fact = self._facts.get(address)
        if fact is None:
            return None
        if fact.weak.is_gone():
            del self._facts[address]
            return None
        return fact

    def lineage_of(self, tensor: Tensor) -> Lineage | None:
        """Return the lineage of a tensor, or None if unknown."""
        fact = self.look_up(tensor)
        return None if fact is None else fact.lineage

    def write(
        self,
        tensor: Tensor,
        *,
        scores: Scores | None = None,
        candidates: tuple[Any, ...] = (),
        lineage: Lineage | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Replace the facts about a tensor's storage. Does nothing for a tensor without storage."""
        address = storage_address(tensor)
        if not address:
            return
        self._written += 1
        if self._written >= _BETWEEN:
            self.purge()
        fact = self._facts.get(address)
        if fact is None or fact.weak.is_gone():
            if scores is None and not candidates and lineage is None:
                return
            fact = self._facts[address] = KnownTensor(WeakStorage(tensor))
        fact.scores, fact.candidates, fact.lineage = scores, candidates, lineage
        fact.trace, fact.factors, fact.is_pair = trace, None, False
        fact.folded, fact.is_learnt, fact.origin = 1.0, False, None
        if scores is not None:
            scores.product.addresses.append(address)

    def note(self, tensor: Tensor, **known: Any) -> None:
        """Set single fields of the facts about a tensor's storage and keep the others."""
        address = storage_address(tensor)
        fact = self.look_up(tensor)
        if fact is None and address:
            fact = self._facts[address] = KnownTensor(WeakStorage(tensor))
        if fact is not None:  # a sparse tensor has no storage address
            for name, value in known.items():
                setattr(fact, name, value)

    def origin_of(self, tensor: Tensor, fact: KnownTensor | None) -> WeakStorage | None:
        """Return the storage of a tensor or of the tensor that it copies, or None without storage of its own.

        While the returned reference exists, the address is not reused for another tensor.
        """
        if fact is None:
            return WeakStorage(tensor) if storage_address(tensor) else None
        return fact.weak if fact.origin is None else fact.origin

    def release(self, product: Product) -> None:
        """Remove the scores of a product. They are not needed after their softmax."""
        for address in product.addresses:
            fact = self._facts.get(address)
            if fact is not None and fact.scores is not None and fact.scores.product is product:
                fact.scores = None

    def purge(self, keep: Callable[[KnownTensor], bool] = lambda fact: True) -> None:
        """Remove the facts about freed storages and those that `keep` rejects."""
        self._written = 0
        gone = [address for address, fact in self._facts.items() if fact.weak.is_gone() or not keep(fact)]
        for address in gone:
            del self._facts[address]

    def end_call(self) -> None:
        """Remove facts after a model call, except the lineage of cached keys and cast weights."""
        for fact in self._facts.values():
            fact.scores = fact.factors = fact.trace = None
            fact.candidates = ()
        self.purge(lambda fact: fact.lineage is not None or fact.is_learnt)
