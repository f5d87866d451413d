"""Follows the tensors of a running model below autograd and recognises fused and hand-written attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sqrtdk import errors
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch.internals import (
    DispatchMode,
    WeakStorage,
    bind,
    is_in_backward,
    local_part,
    operator_name,
    storage_address,
    unseen,
    without_modes,
)
from sqrtdk.torch.watch.modules import find_tensors
from sqrtdk.torch.watch.recognise.calls import NotUnderstoodError, SeenCall, compare, measure, place_queries
from sqrtdk.torch.watch.recognise.coordinates import Spot, UnevenError
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.flexible import FLEXIBLE, read_flexible
from sqrtdk.torch.watch.recognise.following import move
from sqrtdk.torch.watch.recognise.fused_operations import (
    FUSED,
    OWN,
    arrange,
    find_rows,
    looks_like_attention,
    with_statistics,
)
from sqrtdk.torch.watch.recognise.known_tensors import KnownTensors
from sqrtdk.torch.watch.recognise.lineage import Lineage
from sqrtdk.torch.watch.recognise.masks import forget_mask
from sqrtdk.torch.watch.recognise.nested import see_nested
from sqrtdk.torch.watch.recognise.operations import HANDLERS, VIEWS, see_unknown
from sqrtdk.torch.watch.recognise.parts import Candidate, OpenCalls, Stack, common
from sqrtdk.torch.watch.recognise.products import see_product
from sqrtdk.torch.watch.recognise.projections import Projection
from sqrtdk.torch.watch.recognise.recover import NotAttentionError, recover
from sqrtdk.torch.watch.recognise.repeated import TELLING
from sqrtdk.torch.watch.recognise.scores import Scores, Side
from sqrtdk.torch.watch.recognise.vectors import Origin, Projected, Trace, Way

# Limit for the recorded sources. More are not needed to find out whether queries and keys are of one sequence.
_MOST_SOURCES = 8
# Limit for linear layers that wait to be recorded.
_MOST_LINEARS = 8
_UNFOLLOWED = "in a module that was not followed"
_MIXED = "heads are mixed before the softmax, and statistics are of what it sees"


class Recogniser(DispatchMode):  # type: ignore[misc]
    """Observes every operation of one thread while a watched module runs, and changes none of them."""

    # flex_attention and other higher-order operators run unchanged.
    supports_higher_order_operators = True

    def __init__(
        self,
        take: Callable[[Candidate], None],
        locate: Callable[[], Stack],
        path: Callable[[], str],
        is_parameter: Callable[[int], bool],
        hear: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__()
        self.memory = KnownTensors()
        self.products = 0
        self.taken = 0
        # The running modules, and the path of the innermost one.
        self.locate, self.path = locate, path
        self._open = OpenCalls(take)
        # Linear layers that are not recorded yet: path, input, weight, bias and output.
        self._linears: list[tuple[str, Tensor, Tensor, Tensor | None, Tensor]] = []
        # Numbers of the module calls that contain a norm.
        self._normalising: set[int] = set()
        self._is_parameter = is_parameter
        self._hear = hear

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and not is_in_backward() and hasattr(func, "decompose"):
            # In inference mode, composite operations are not decomposed before they arrive here.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = operator_name(func)
        # Views are half of all operations. What is known of a tensor is known of its storage.
        if name in VIEWS or is_in_backward():
            return func(*args, **kwargs)
        if self._linears:
            self.settle()
        if name == OWN:
            args = with_statistics(func, args)
        result = func(*args, **kwargs)
        try:
            seen = result
            if types:
                # For tensors distributed over a mesh, observe this process's part.
                args, seen = local_part(args), local_part(result)
                kwargs = {key: local_part(value) for key, value in kwargs.items()}
            self._look_at(name, func, args, kwargs, seen)
        except Exception as error:  # the model must keep running after any error here
            self._refuse_fault(f"{name} could not be followed", error)
        return result

    def _refuse_fault(self, what: str, error: Exception) -> None:
        if errors.faults_are_raised:
            raise error
        words = next(iter(str(error).splitlines()), "")
        self.refuse(f"{what}: {type(error).__name__}: {words}".removesuffix(": "))

    def _look_at(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        forget_mask()
        if name in TELLING:
            self._hear(name)
        if isinstance(result, Tensor) and result.is_nested and see_nested(self, name, args, result):
            return
        see = HANDLERS.get(name)
        if see is not None:
            handler, plain = see
            if not handler(self, plain, func, args, kwargs, result):
                self._see_learnt(args, result)
        elif name in FUSED or name == FLEXIBLE:
            self._see_fused(name, func, args, kwargs, result)
        elif looks_like_attention(name):
            self.refuse(f"{name} is not followed")
        else:
            see_unknown(self, name, args, result)
            self._see_learnt(args, result)

    def _see_learnt(self, args: Any, result: Any) -> None:
        """Record that a result is computed from learnt tensors alone."""
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

    def knows_scores(self, tensor: Tensor) -> bool:
        """Return whether a tensor is known as scores or weights."""
        fact = self.memory.look_up(tensor)
        return fact is not None and (fact.scores is not None or bool(fact.candidates))

    def note_linear(self, path: str, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
        """Note a linear layer that ran unobserved, to be recorded before the next operation that is followed.

        Queries, keys and values are projected one after another and are recorded together.
        """
        if self._linears and self._linears[-1][-1] is x:
            self.settle()  # so that no chain of outputs stays in memory
        self._linears.append((path, x, weight, bias, output))
        if len(self._linears) >= _MOST_LINEARS:
            self.settle()

    def settle(self) -> None:
        """Record the linear layers that were noted."""
        if not self._linears:
            return
        linears, self._linears = self._linears, []
        for path, x, weight, bias, output in linears:
            try:
                with unseen():
                    rows = output if output.ndim == 2 else output.flatten(0, -2)
                    if not see_product(self, x, weight.t(), rows, added=bias, path=path):
                        self._see_learnt((x, weight) if bias is None else (x, weight, bias), output)
            except Exception as error:  # the model must keep running after any error here
                self._refuse_fault("a linear layer could not be followed", error)

    # Fused operations

    def _see_fused(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the calls of a fused operation, or the reason why they cannot be read."""
        with unseen():
            calls = read_flexible(*args, **kwargs) if name == FLEXIBLE else FUSED[name](bind(func, args, kwargs))
            if isinstance(calls, str):
                self.refuse(calls)
                calls = []
            for call in calls:
                given = call.q
                if call.q_lineage is None:
                    q, k = (self.side_of(x) for x in (call.q, call.k))
                    call = replace(call, q_lineage=q.lineage, k_lineage=k.lineage)
                    call = call if name == OWN else arrange(call, q, k)
                try:
                    candidate = self.see_call(place_queries(call), find_rows(name, call, result))
                    candidate.is_plain = call.q is given and name != FLEXIBLE and not candidate.is_part
                    self.confirm(candidate)
                except NotUnderstoodError as error:
                    self.refuse(str(error))
        self.root(result[0] if isinstance(result, tuple | list) else result, None)

    def see_call(self, call: SeenCall, rows: AttentionStatistics | None = None) -> Candidate:
        """Return a candidate for a known call with its statistics, measured unless given.

        Raises:
            NotUnderstoodError: the scale or the sinks are NaN or infinite.
        """
        keys = call.k.shape[-2]
        return Candidate(self.locate(), keys, keys, call, measure(call) if rows is None else rows)

    def refuse(self, reason: str) -> None:
        """Record a computation that was not understood, with the reason."""
        self.confirm(Candidate(self.locate(), 0, 0, reason=reason))

    def confirm(self, *candidates: Candidate) -> None:
        """Record candidates as attention, each once, in the innermost module around all of their parts."""
        for candidate in candidates:
            candidate.stack = common(candidate.stack, self.locate())
            if not candidate.is_taken:
                candidate.is_taken = True
                self.taken += 1
                self._open.add(candidate)

    # Products

    def root(
        self,
        output: Tensor,
        source: Tensor | None,
        projection: Projection | None = None,
        columns: tuple[int, ...] = (-1,),
        is_projection: bool = True,
        path: str | None = None,
    ) -> Lineage:
        """Return and record a new lineage for the output of a product. Every product is followed like a projection.

        `path` is that of the module, None for the one that runs.
        """
        self.products += 1
        lineage = Lineage(
            self.path() if path is None else path,
            self._find_sources(source),
            fresh=True,
            projection=projection,
            is_projection=is_projection,
            number=self.products,
            products=frozenset((self.products,)),
        )
        self.memory.write(output, lineage=lineage, trace=self._begin_trace(output, columns))
        return lineage

    def root_unfollowed(self, output: Tensor, inputs: Iterable[Tensor], path: str) -> None:
        """Record the lineage of the output of a module that was not followed. Only the sources are known."""
        self.products += 1
        sources = frozenset().union(*(self._find_sources(one) for one in inputs if storage_address(one)))
        lineage = Lineage(
            path,
            sources if len(sources) <= _MOST_SOURCES else frozenset(),
            is_exact=False,
            changed_by=(_UNFOLLOWED,),
            number=self.products,
            products=frozenset((-self.products,)),
        )
        self.memory.write(output, lineage=lineage)

    def _find_sources(self, source: Tensor | None) -> frozenset[WeakStorage]:
        """Return the storage that a product's input has, and the sources of the input."""
        if source is None:
            return frozenset()
        fact = self.memory.look_up(source)
        origin = self.memory.origin_of(source, fact)
        near = frozenset() if origin is None else frozenset((origin,))
        sources = near if fact is None or fact.lineage is None else near | fact.lineage.sources
        return sources if len(sources) <= _MOST_SOURCES else near

    def _begin_trace(self, output: Tensor, columns: tuple[int, ...]) -> Trace | None:
        entries = 0 if output.is_nested else output.numel()
        if not entries or output.ndim < 2:
            return None
        spot = Spot.of(output)
        width = 1
        for axis in columns:
            width *= spot.shape[axis]
        return Trace(Origin(self.products, entries // width, width), Way(Projected(spot, columns)))

    def read_projection(self, weight: Tensor, output: Tensor, bias: Tensor | None) -> Projection | None:
        """Return the projection by a parameter or by its copy in another dtype, or None for any other product."""
        weight = weight[0] if weight.ndim == 3 and weight.shape[0] == 1 else weight
        stored = self._parameter_of(weight)
        added = 0 if bias is None else self._parameter_of(bias)
        if stored is None or added is None:
            return None
        with unseen():
            return Projection.of(weight, stored, bias, added, output)

    def _parameter_of(self, tensor: Tensor) -> int | None:
        """Return the address of the parameter that a tensor is or copies, or None if it is neither."""
        address = storage_address(tensor)
        if not address or self._is_parameter(address):
            return address or None
        fact = self.memory.look_up(tensor)
        copied = None if fact is None or fact.origin is None else fact.origin.address
        return copied if copied and self._is_parameter(copied) else None

    # Softmax

    def see_softmax(self, x: Tensor, axis: int, output: Tensor, is_fused: bool) -> None:
        """Record a softmax as weights if its input is scores, or as not understood if its input is not a projection."""
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
            # A softmax of a projection is a router, a pooling, a vocabulary, or (keys over tokens) linear attention.
            lost = fact.lineage.lost("softmax")
            self.memory.write(output, lineage=lost, trace=move([(x, fact)], output))
            return
        self.memory.write(output, candidates=() if candidate is None else (candidate,), trace=trace)

    def judge(self, scores: Scores, x: Tensor, weights: Tensor, axis: int, is_block: bool = False) -> Candidate | None:
        """Return a candidate with the call behind scores `x`, compared with the model's weights; None if not attention.

        A block of exponentials that is multiplied with values undivided is measured later, when all blocks are known.
        """
        stack = common(scores.product.stack, self.locate())
        heads = next((heads for _, _, heads in stack[:-3:-1] if heads is not None), None)
        candidate = Candidate(stack, x.shape[axis], x.shape[axis], is_block=is_block or scores.product.has_logsumexp)
        with unseen():
            try:
                call, reading = recover(scores, x, axis, heads)
                candidate.keys = call.k.shape[-2]
                difference = compare(call, reading.show(weights, candidate.keys))
                candidate.call = place_queries(replace(call, difference=difference))
                if call.logits is not None:
                    candidate.remarks.append(_MIXED)
                if not candidate.is_block:
                    candidate.statistics = measure(candidate.call)
            except NotAttentionError:
                return None
            except NotUnderstoodError as error:
                candidate.reason = str(error)
            except UnevenError:
                candidate.reason = "its scores are rearranged in a way that is not followed"
        # If `x` has only some rows of a product, others may follow.
        if x.numel() >= scores.product.entries:
            self.memory.release(scores.product)
        return candidate

    def normalise(self, lineage: Lineage) -> Lineage:
        """Return the lineage of vectors after a norm in the running module."""
        stack = self.locate()
        number = stack[-1][0] if stack else 0
        self._normalising.add(number)
        return lineage.norm(number)

    def side_of(self, tensor: Tensor) -> Side:
        """Return a tensor with its known facts. A parameter (the query of a pooling) counts as its own projection."""
        fact = self.memory.look_up(tensor)
        lineage = None if fact is None else fact.lineage
        if lineage is None and self._parameter_of(tensor) is not None:
            lineage = Lineage(self.path())
        return Side(tensor, lineage, None if fact is None else fact.trace, 1.0 if fact is None else fact.folded)

    def add_bias(self, lineage: Lineage, bias: Tensor) -> Lineage:
        """Return the lineage of a product after a learnt vector was added."""
        if lineage.projection is None:
            return lineage
        stored = self._parameter_of(bias)
        # A bias per head after the split, or one computed from parameters, is not part of the projection.
        if not lineage.fresh or stored is None:
            return replace(lineage, projection=None)
        with unseen():
            return replace(lineage, projection=lineage.projection.plus(bias, stored))

    def is_learnt(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or computed from parameters alone."""
        if self._is_parameter(storage_address(tensor)):
            return True
        fact = self.memory.look_up(tensor)
        return fact is not None and fact.is_learnt

    # Ends of calls

    def end_module(self, number: int, path: str, output: Any, is_projection: bool) -> None:
        """Handle the end of a module call: its attention is complete, and its gain belongs to its norm.

        Args:
            number, path: the number and the module path of the call.
            output: the module's output.
            is_projection: whether the call had products and no attention, so that its output counts as a projection.
        """
        try:
            self._open.close(number)
        except Exception as error:
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
                    path,
                    lineage.sources,
                    is_projection=lineage.is_projection,
                    number=lineage.number,
                    products=lineage.products,
                )

    def end_call(self) -> None:
        """Handle the end of a model call: stop following its tensors."""
        self._linears.clear()
        self._open.clear()
        self._normalising.clear()
        self.memory.end_call()
