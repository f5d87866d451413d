"""Facts about tensors, by the memory they lie in; no tensor is kept alive by a fact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sqrtdk.torch.internals import WeakStorage, storage_address
from sqrtdk.torch.watch.lineage import Lineage
from sqrtdk.torch.watch.scores import Factors, Product, Scores
from sqrtdk.torch.watch.vectors import Trace

# Operations between two looks at what has gone.
_BETWEEN = 64


@dataclass(eq=False)
class Fact:
    """What is known about the tensors in one storage: scores, weights of a candidate, or a projection's output."""

    weak: WeakStorage
    scores: Scores | None = None
    candidates: tuple[Any, ...] = ()
    lineage: Lineage | None = None
    trace: Trace | None = None
    # Two tensors that were multiplied entry by entry: summed up, they are scores.
    factors: Factors | None = None
    is_pair: bool = False
    # What torch's own attention multiplied it by.
    folded: float = 1.0
    # Made from learnt tensors alone: a copy in another dtype, a dequantised weight.
    is_learnt: bool = False
    # The memory that this is a copy of.
    origin: WeakStorage | None = None


class Memory:
    """Facts by address. A storage that is gone keeps its address as long as its fact is here: none is mistaken."""

    def __init__(self) -> None:
        self._facts: dict[int, Fact] = {}
        self._written = 0

    def look_up(self, tensor: Tensor) -> Fact | None:
        """The fact about a tensor's memory."""
        address = storage_address(tensor)
        fact = self._facts.get(address)
        if fact is None:
            return None
        if fact.weak.is_gone():
            del self._facts[address]
            return None
        return fact

    def lineage_of(self, tensor: Tensor) -> Lineage | None:
        """The lineage of a tensor, if any is known."""
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
        """Note what a tensor's memory now holds, in place of what was known."""
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
            fact = self._facts[address] = Fact(WeakStorage(tensor))
        fact.scores, fact.candidates, fact.lineage = scores, candidates, lineage
        fact.trace, fact.factors, fact.is_pair = trace, None, False
        fact.folded, fact.is_learnt, fact.origin = 1.0, False, None
        if scores is not None:
            scores.product.addresses.append(address)

    def note(self, tensor: Tensor, **known: Any) -> None:
        """Note, beside what is known, one more field of the fact."""
        address = storage_address(tensor)
        fact = self.look_up(tensor)
        if fact is None and address:
            fact = self._facts[address] = Fact(WeakStorage(tensor))
        for name, value in known.items():
            setattr(fact, name, value)

    def origin_of(self, tensor: Tensor) -> WeakStorage | None:
        """The memory that a tensor lies in or is a copy of; None if it has none of its own.

        Whoever keeps it keeps the address from being given to another tensor, and so from being mistaken for this one.
        """
        if not storage_address(tensor):
            return None
        fact = self.look_up(tensor)
        if fact is None:
            return WeakStorage(tensor)
        return fact.weak if fact.origin is None else fact.origin

    def release(self, product: Product) -> None:
        """Forget the scores of a product: their softmax has been seen, and what was added to them is not needed."""
        for address in product.addresses:
            fact = self._facts.get(address)
            if fact is not None and fact.scores is not None and fact.scores.product is product:
                fact.scores = None

    def purge(self, keep: Callable[[Fact], bool] = lambda fact: True) -> None:
        """Forget storages that are gone, and those whose fact is not to be kept."""
        self._written = 0
        gone = [address for address, fact in self._facts.items() if fact.weak.is_gone() or not keep(fact)]
        for address in gone:
            del self._facts[address]

    def end_call(self) -> None:
        """After a call of the model: only where cached keys came from, and cast weights, are still of use."""
        for fact in self._facts.values():
            fact.scores = fact.factors = fact.trace = None
            fact.candidates = ()
        self.purge(lambda fact: fact.lineage is not None or fact.is_learnt)
