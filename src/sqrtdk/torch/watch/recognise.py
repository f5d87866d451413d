"""Follows the tensors of a running model below autograd and recognises attention, fused or written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch.internals import DispatchMode, bind, is_in_backward, operator_name, storage_address, without_modes
from sqrtdk.torch.watch.calls import NotUnderstoodError, SeenCall, compare, measure, place_queries
from sqrtdk.torch.watch.coordinates import Spot, UnevenError
from sqrtdk.torch.watch.flexible import FLEXIBLE, read_flexible
from sqrtdk.torch.watch.following import move
from sqrtdk.torch.watch.fused import FUSED, OWN, arrange, read_statistics, with_statistics
from sqrtdk.torch.watch.lineage import Lineage
from sqrtdk.torch.watch.memory import Memory
from sqrtdk.torch.watch.modules import find_tensors
from sqrtdk.torch.watch.nested import see_nested
from sqrtdk.torch.watch.operations import HANDLERS, VIEWS, see_unknown
from sqrtdk.torch.watch.parts import Candidate, OpenCalls, Stack, common
from sqrtdk.torch.watch.projections import Projection
from sqrtdk.torch.watch.recover import NotAttentionError, recover
from sqrtdk.torch.watch.scores import Scores, Side
from sqrtdk.torch.watch.vectors import Origin, Projected, Trace, Way

# What is further back than this is not needed to tell whether queries and keys are of one sequence.
_MOST_SOURCES = 8
_UNEXPECTED = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    UnevenError,
)
_MIXED = "heads are mixed before the softmax, and statistics are of what it sees"


class Recogniser(DispatchMode):  # type: ignore[misc]
    """Sees every operation of one thread while a watched module runs; changes none of them."""

    # flex_attention and other operators of higher order are run as they are.
    supports_higher_order_operators = True

    def __init__(
        self,
        take: Callable[[Candidate], None],
        locate: Callable[[], Stack],
        is_parameter: Callable[[int], bool],
        sample_rows: int | None,
    ) -> None:
        super().__init__()
        self.memory = Memory()
        self.products = 0
        self.taken = 0
        self.is_measuring = True
        self.locate = locate
        self._open = OpenCalls(take, self._measure)
        # Numbers of the calls of modules in which a norm was seen.
        self._normalising: set[int] = set()
        self._is_parameter = is_parameter
        self._sample_rows = sample_rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_in_backward():
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            # Without autograd above, composite operations arrive whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = operator_name(func)
        if name == OWN:
            args = with_statistics(func, args)
        result = func(*args, **kwargs)
        try:
            self._look_at(name, func, args, kwargs, result)
        except _UNEXPECTED as error:
            # A model must run on, whatever it does: what we do not expect is said, not raised.
            self._refuse_fault(f"{name} could not be followed", error)
        return result

    def _refuse_fault(self, what: str, error: Exception) -> None:
        words = next(iter(str(error).splitlines()), "")
        self.refuse(f"{what}: {type(error).__name__}: {words}".removesuffix(": "))

    def _look_at(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if name in VIEWS:
            return
        if isinstance(result, Tensor) and result.is_nested and see_nested(self, name, args, result):
            return
        see = HANDLERS.get(name)
        if see is not None:
            handler, plain = see
            handler(self, plain, func, args, kwargs, result)
            self._see_learnt(args, result)
        elif name in FUSED or name == FLEXIBLE:
            self._see_fused(name, func, args, kwargs, result)
        elif looks_like_attention(name):
            self.refuse(f"{name} is not followed")
        else:
            see_unknown(self, name, args, result)
            self._see_learnt(args, result)

    def _see_learnt(self, args: Any, result: Any) -> None:
        """Note what is made from learnt tensors alone."""
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        is_any = False
        for arg in args:
            for part in arg if isinstance(arg, list | tuple) else (arg,):
                if isinstance(part, Tensor):
                    if not self.is_learnt(part):
                        return
                    is_any = True
        if is_any and not self.is_learnt(result):
            self.memory.note(result, is_learnt=True)

    # Fused operations

    def _see_fused(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take the calls of one operation, or the reason why they could not be read."""
        with without_modes(), torch.no_grad():
            calls = read_flexible(*args, **kwargs) if name == FLEXIBLE else FUSED[name](bind(func, args, kwargs))
            if isinstance(calls, str):
                self.refuse(calls)
                calls = []
            for call in calls:
                if call.q_lineage is None:
                    q, k = (self.side_of(x) for x in (call.q, call.k))
                    call = replace(call, q_lineage=q.lineage, k_lineage=k.lineage)
                    call = call if name == OWN else arrange(call, q, k)
                has_rows = name == OWN and self._sample_rows is None and self.is_measuring
                self.confirm(self.see_call(place_queries(call), read_statistics(result) if has_rows else None))
        self.root(result[0] if isinstance(result, tuple | list) else result, [])

    def see_call(self, call: SeenCall, rows: AttentionStatistics | None = None) -> Candidate:
        """A candidate with a call that is known, and its statistics."""
        keys = call.k.shape[-2]
        return Candidate(self.locate(), keys, keys, call, self._measure(call) if rows is None else rows)

    def _measure(self, call: SeenCall) -> AttentionStatistics | None:
        return measure(call, self._sample_rows) if self.is_measuring else None

    def refuse(self, reason: str) -> None:
        """Say that something was not understood."""
        self.confirm(Candidate(self.locate(), 0, 0, reason=reason))

    def confirm(self, *candidates: Candidate) -> None:
        """Take candidates for attention, each once: all of it ran in the module that is around its last part too."""
        for candidate in candidates:
            candidate.stack = common(candidate.stack, self.locate())
            if not candidate.is_taken:
                candidate.is_taken = True
                self.taken += 1
                self._open.add(candidate)

    @property
    def path(self) -> str:
        """Of the module that runs."""
        stack = self.locate()
        return stack[-1][1] if stack else ""

    # Products

    def root(
        self,
        output: Tensor,
        inputs: list[Tensor],
        projection: Projection | None = None,
        columns: tuple[int, ...] = (-1,),
        is_projection: bool = True,
    ) -> Lineage:
        """What comes out of a product is a projection, as far as anybody who follows it is concerned."""
        near = frozenset(origin for tensor in inputs if (origin := self.memory.origin_of(tensor)) is not None)
        lineages = [lineage for tensor in inputs if (lineage := self.memory.lineage_of(tensor)) is not None]
        sources = near.union(*(lineage.sources for lineage in lineages))
        self.products += 1
        sources = sources if len(sources) <= _MOST_SOURCES else near
        lineage = Lineage(
            self.path, sources, fresh=True, projection=projection, is_projection=is_projection, number=self.products
        )
        self.memory.write(output, lineage=lineage, trace=self._begin_trace(output, columns))
        return lineage

    def _begin_trace(self, output: Tensor, columns: tuple[int, ...]) -> Trace | None:
        if output.is_nested or output.ndim < 2 or not output.numel():
            return None
        width = 1
        for axis in columns:
            width *= output.shape[axis]
        origin = Origin(self.products, output.numel() // width, width)
        return Trace(origin, Way(Projected(Spot.of(output), columns)))

    def read_projection(self, weight: Tensor, output: Tensor, bias: Tensor | None) -> Projection | None:
        """The product with a parameter, or with a copy of one in another dtype; None if it is none."""
        weight = weight[0] if weight.ndim == 3 and weight.shape[0] == 1 else weight
        stored = self._parameter_of(weight)
        added = 0 if bias is None else self._parameter_of(bias)
        if not self.is_measuring or stored is None or added is None:
            return None
        with without_modes(), torch.no_grad():
            return Projection.of(weight, stored, bias, added, output)

    def _parameter_of(self, tensor: Tensor) -> int | None:
        """The address of the parameter that a tensor is or is a copy of; None if it is neither."""
        origin = self.memory.origin_of(tensor)
        return origin.address if origin is not None and self._is_parameter(origin.address) else None

    # Softmax

    def see_softmax(self, x: Tensor, axis: int, output: Tensor, is_fused: bool) -> None:
        """A softmax: of scores it makes weights; of anything else that is no projection, something unknown."""
        fact = self.memory.look_up(x)
        scores = None if fact is None else fact.scores
        if scores is None and fact is not None and fact.factors is not None:
            with without_modes():
                scores = fact.factors.add_up(None, x)
        candidate: Candidate | None = None
        trace = None
        if scores is not None and scores.stage == "logits":
            trace = scores.trace.move(x, output)
            candidate = self.judge(scores, x, output, axis % x.ndim)
            if is_fused and candidate is not None and candidate.call is not None:
                folded = scores.product.q.folded * scores.product.k.folded
                candidate.call = replace(candidate.call, folded=folded, how="math path")
        elif x.ndim >= 3 and (fact is None or fact.lineage is None or not fact.lineage.is_projection):
            reason = "the scores of its softmax could not be followed back to a product of queries and keys"
            candidate = Candidate(self.locate(), x.shape[axis], x.shape[axis], reason=reason, is_of_scores=False)
        if candidate is None and fact is not None and fact.lineage is not None:
            # A projection: a router, a pooling, a vocabulary; of keys over tokens, linear attention.
            lost = fact.lineage.lost("softmax")
            self.memory.write(output, lineage=lost, trace=move([(x, fact)], output))
            return
        self.memory.write(output, candidates=() if candidate is None else (candidate,), trace=trace)

    def judge(self, scores: Scores, x: Tensor, weights: Tensor, axis: int, is_block: bool = False) -> Candidate | None:
        """Recover the call behind scores `x`, compare with the model's own weights, measure it.

        A block of exponentials that meets values undivided is measured when it is known whether there are more.
        """
        stack = common(scores.product.stack, self.locate())
        heads = next((heads for _, _, heads in stack[:-3:-1] if heads is not None), None)
        candidate = Candidate(stack, x.shape[axis], x.shape[axis], is_block=is_block or scores.product.has_logsumexp)
        with without_modes(), torch.no_grad():
            try:
                call, reading = recover(scores, x, axis, heads)
                candidate.keys = call.k.shape[-2]
                difference = compare(call, reading.show(weights, candidate.keys))
                candidate.call = place_queries(replace(call, difference=difference))
                if call.logits is not None:
                    candidate.remarks.append(_MIXED)
                if not candidate.is_block:
                    candidate.statistics = self._measure(candidate.call)
            except NotAttentionError:
                return None
            except NotUnderstoodError as error:
                candidate.reason = str(error)
            except UnevenError:
                candidate.reason = "its scores are rearranged in a way that is not followed"
        # Of some rows of a product others may follow.
        if x.numel() >= scores.product.entries:
            self.memory.release(scores.product)
        return candidate

    def normalise(self, lineage: Lineage) -> Lineage:
        """The lineage of vectors after a norm in the module that runs."""
        stack = self.locate()
        number = stack[-1][0] if stack else 0
        self._normalising.add(number)
        return lineage.norm(number)

    def side_of(self, tensor: Tensor) -> Side:
        """Queries or keys with what is known of them; a parameter (the query of a pooling) is its own projection."""
        fact = self.memory.look_up(tensor)
        lineage = None if fact is None else fact.lineage
        if lineage is None and self._parameter_of(tensor) is not None:
            lineage = Lineage(self.path)
        return Side(tensor, lineage, None if fact is None else fact.trace, 1.0 if fact is None else fact.folded)

    def add_bias(self, lineage: Lineage, bias: Tensor) -> Lineage:
        """The lineage of a product after a learnt vector was added to it."""
        if lineage.projection is None:
            return lineage
        stored = self._parameter_of(bias)
        # One for each head, after the product was split, or made from parameters: no part of the projection.
        if not lineage.fresh or stored is None:
            return replace(lineage, projection=None)
        with without_modes(), torch.no_grad():
            return replace(lineage, projection=lineage.projection.plus(bias, stored))

    def is_learnt(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or made from parameters alone."""
        if self._is_parameter(storage_address(tensor)):
            return True
        fact = self.memory.look_up(tensor)
        return fact is not None and fact.is_learnt

    # Ends

    def end_module(self, number: int, path: str, output: Any, is_projection: bool) -> None:
        """A module's call has ended: its attention is complete, and its gain is part of its norm.

        Args:
            number, path: of the call.
            output: what it returned.
            is_projection: whether it had products and no attention: what it put together is its projection then.
        """
        try:
            self._open.close(number)
        except _UNEXPECTED as error:
            self._refuse_fault("attention in parts could not be put together", error)
        if not is_projection and number not in self._normalising:
            return
        self._normalising.discard(number)
        for tensor in find_tensors(output):
            fact = self.memory.look_up(tensor)
            lineage = None if fact is None else fact.lineage
            if fact is None or lineage is None or (lineage.is_exact and not lineage.gains):
                continue
            if lineage.normalised:
                if lineage.normalised_in == number:
                    fact.lineage = lineage.norm(number)
            elif is_projection:
                fact.lineage = Lineage(
                    path, lineage.sources, is_projection=lineage.is_projection, number=lineage.number
                )

    def end_call(self) -> None:
        """A call of the model has ended: nothing of it is followed any further."""
        self._open.clear()
        self._normalising.clear()
        self.memory.end_call()


@lru_cache(maxsize=1024)
def looks_like_attention(name: str) -> bool:
    """Whether the name of an operation that is not known says that it computes attention."""
    return re.search(r"attention|attn", name) is not None
