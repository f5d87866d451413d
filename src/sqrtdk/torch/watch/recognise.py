"""Follows the tensors of a running model below autograd and recognises attention, fused or written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch.internals import (
    DispatchMode,
    bind,
    is_in_backward,
    operator_name,
    storage_address,
    without_modes,
)
from sqrtdk.torch.watch.calls import MASKED_BELOW, SeenCall, measure, weigh
from sqrtdk.torch.watch.coordinates import Layout, Place, Step, UnevenError
from sqrtdk.torch.watch.fused import FUSED, OWN, read_statistics, with_statistics
from sqrtdk.torch.watch.lineage import Lineage, join, merge
from sqrtdk.torch.watch.memory import Memory
from sqrtdk.torch.watch.operations import HANDLERS
from sqrtdk.torch.watch.projections import Projection
from sqrtdk.torch.watch.scores import Done, NotAttentionError, NotUnderstoodError, Product, Scores, Term, recover

_LOOKS_LIKE_PRODUCT = re.compile(r"linear|mm|matmul|conv|gem[mv]")
# No query or key is put together from more.
_MOST_PIECES = 6
_MOST_ROWS_COMPARED = 4
# What is further back than this is not needed to tell whether queries and keys are of one sequence.
_MOST_SOURCES = 8


# The running modules, outermost first: the number of the call, its path, and how many heads the module says it has.
Stack = tuple[tuple[int, str, int | None], ...]


@dataclass(eq=False)
class Candidate:
    """A softmax that is attention if its result is multiplied with values; `reason` says why it was not understood."""

    stack: Stack
    keys: int
    call: SeenCall | None = None
    statistics: AttentionStatistics | None = None
    reason: str | None = None
    is_taken: bool = False

    @property
    def path(self) -> str:
        """Of the innermost module in which all of it ran."""
        return self.stack[-1][1] if self.stack else ""


def _common(one: Stack, other: Stack) -> Stack:
    """The modules in which both of two things ran."""
    count = 0
    for own, others in zip(one, other, strict=False):
        if own[0] != others[0]:
            break
        count += 1
    return one[:count]


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
        self._take = take
        self._locate = locate
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
        except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            # A model must run on, whatever it does: what we do not expect is said, not raised.
            words = next(iter(str(error).splitlines()), "")
            self._refuse(f"{name} could not be followed: {type(error).__name__}: {words}".removesuffix(": "))
        return result

    def _look_at(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        see = HANDLERS.get(name)
        if see is not None:
            see(self, func, args, kwargs, result)
            self._see_learnt(args, result)
        elif name in FUSED:
            self._see_fused(name, func, args, kwargs, result)
        elif name == "flex_attention":
            self._refuse("flex_attention is not followed")
        elif isinstance(result, Tensor) and _LOOKS_LIKE_PRODUCT.search(name):
            self._root(result, [arg for arg in args if isinstance(arg, Tensor)][:1])
        else:
            self._see_learnt(args, result)

    def _see_learnt(self, args: Any, result: Any) -> None:
        """Note what is made from learnt tensors alone."""
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        parts = [part for arg in args for part in (arg if isinstance(arg, list | tuple) else (arg,))]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if tensors and all(map(self.is_learnt, tensors)) and not self.is_learnt(result):
            self.memory.note(result, is_learnt=True)

    # Fused operations

    def _see_fused(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        with without_modes(), torch.no_grad():
            for call in FUSED[name](bind(func, args, kwargs)):
                if call.q_lineage is None:
                    q_lineage, k_lineage = (self._lineage_of(x) for x in (call.q, call.k))
                    call = replace(call, q_lineage=q_lineage, k_lineage=k_lineage)
                call = _place_queries(call)
                rows = read_statistics(result) if name == OWN and self._sample_rows is None else self._measure(call)
                self._confirm(Candidate(self._locate(), call.k.shape[-2], call, rows if self.is_measuring else None))
        self._root(result[0] if isinstance(result, tuple | list) else result, [])

    def _measure(self, call: SeenCall) -> AttentionStatistics | None:
        return measure(call, self._sample_rows) if self.is_measuring else None

    def _refuse(self, reason: str) -> None:
        self._confirm(Candidate(self._locate(), 0, reason=reason))

    def _confirm(self, candidate: Candidate) -> None:
        if not candidate.is_taken:
            candidate.is_taken = True
            self.taken += 1
            self._take(candidate)

    @property
    def path(self) -> str:
        """Of the module that runs."""
        stack = self._locate()
        return stack[-1][1] if stack else ""

    # Products

    def _root(self, output: Tensor, inputs: list[Tensor], projection: Projection | None = None) -> None:
        """What comes out of a product is a projection, as far as anybody who follows it is concerned."""
        near = frozenset(origin for tensor in inputs if (origin := self.memory.origin_of(tensor)) is not None)
        lineages = [lineage for tensor in inputs if (lineage := self.memory.lineage_of(tensor)) is not None]
        sources = near.union(*(lineage.sources for lineage in lineages))
        self.products += 1
        sources = sources if len(sources) <= _MOST_SOURCES else near
        self.memory.write(output, lineage=Lineage(self.path, sources, fresh=True, projection=projection))

    def _read_projection(self, weight: Tensor, output: Tensor, bias: Tensor | None) -> Projection | None:
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

    def see_product(
        self, a: Tensor, b: Tensor, output: Tensor, alpha: float = 1.0, added: Tensor | None = None, beta: float = 1.0
    ) -> None:
        """A matrix product: values with weights, a projection, or scores."""
        for one, other, contracted in ((a, b, a.shape[-1]), (b, a, b.shape[-2])):
            fact = self.memory.look_up(one)
            if fact is None:
                continue
            if fact.scores is not None and fact.scores.stage == "exp":
                axis = one.ndim - 1 if one is a else one.ndim - 2
                fact.candidate = self.judge(fact.scores, one, one, axis)
            if fact.candidate is not None and self.memory.look_up(other) is not fact:
                # What was not understood may have been rearranged since, as the diagonals of a sliding window are.
                is_lost = fact.candidate.reason is not None
                if is_lost or contracted in (fact.candidate.keys, fact.candidate.keys + 1):
                    fact.candidate.stack = _common(fact.candidate.stack, self._locate())
                    self._confirm(fact.candidate)
                self._root(output, [])
                return
        has_bias = added is not None and added.ndim == 1
        plain = alpha == beta == 1.0 and (added is None or has_bias)
        self._root(output, [a], self._read_projection(b, output, added) if plain and self.is_learnt(b) else None)
        if self.is_learnt(b) or has_bias or a.ndim not in (2, 3) or not output.is_floating_point():
            return
        projected = self.memory.lineage_of(output)
        lineage = None if projected is None else replace(projected, is_projection=False)
        own = self.memory.look_up(a)
        split = None if own is None else own.split
        q, k = (a, b.transpose(-1, -2)) if a.ndim == 3 else (a[None], b.t()[None])
        others = self.memory.look_up(b)
        folded = (1.0 if own is None else own.folded) * (1.0 if others is None else others.folded)
        lineages = self._lineage_of(a), self._lineage_of(b)
        product = Product(q, k, *lineages, split, folded, self.is_learnt(a), self._locate())
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        steps = (Step(queries, 0), Step(1, 0), Step(0, 1))
        shape = (batch, queries, keys)
        place = Place(shape, steps) if a.ndim == 3 else Place(shape[1:], steps[1:])
        done: tuple[Done, ...] = () if alpha == 1.0 else (Done("multiply", alpha),)
        if added is not None and beta != 0.0:
            done += (Done("add", Term(added.expand(output.shape), place), beta),)
        self.memory.write(output, scores=Scores(product, Layout.of(output, place), done), lineage=lineage)

    # Softmax

    def see_softmax(self, x: Tensor, axis: int, output: Tensor, is_fused: bool) -> None:
        """A softmax: of scores it makes weights; of anything else that is no projection, something unknown."""
        fact = self.memory.look_up(x)
        scores = None if fact is None else fact.scores
        if scores is not None and scores.stage == "logits":
            candidate: Candidate | None = self.judge(scores, x, output, axis % x.ndim)
            if is_fused and candidate is not None and candidate.call is not None:
                candidate.call = replace(candidate.call, folded=scores.product.folded, how="math path")
        elif x.ndim >= 3 and (fact is None or fact.lineage is None or not fact.lineage.is_projection):
            reason = "the scores of its softmax could not be followed back to a product of queries and keys"
            candidate = Candidate(self._locate(), x.shape[axis], reason=reason)
        else:
            candidate = None  # a projection: a router, a pooling, a vocabulary
        self.memory.write(output, candidate=candidate)

    def judge(self, scores: Scores, x: Tensor, weights: Tensor, axis: int) -> Candidate | None:
        """Recover the call behind scores `x`, compare with the model's own weights, measure it."""
        stack = _common(scores.product.stack, self._locate())
        heads = next((heads for _, _, heads in stack[:-3:-1] if heads is not None), None)
        candidate = Candidate(stack, x.shape[axis])
        with without_modes(), torch.no_grad():
            try:
                call, order = recover(scores, scores.layout.locate(x), axis, heads)
                candidate.keys = call.k.shape[-2]
                difference = _compare(call, weights.detach().permute(order))
                candidate.call = _place_queries(replace(call, difference=difference))
                candidate.statistics = self._measure(candidate.call)
            except NotAttentionError:
                return None
            except NotUnderstoodError as error:
                candidate.reason = str(error)
            except UnevenError:
                candidate.reason = "its scores are rearranged in a way that is not followed"
        self.memory.release(scores.product)
        return candidate

    # Lineage

    def follow(self, output: Tensor, inputs: list[Tensor], operation: str) -> None:
        """Note that an output is made from inputs, of which some come from projections.

        Lengths are taken only where they can tell something: taken everywhere they would cost as much as the model's
        own norms and activations.
        """
        known = [(tensor, lineage) for tensor in inputs if (lineage := self.memory.lineage_of(tensor)) is not None]
        first = next((lineage for _, lineage in known if not lineage.reduced), known[0][1])
        unknown = [tensor for tensor in inputs if self.memory.lineage_of(tensor) is None]
        if _is_own_norm(known, operation):
            after = first.lost(operation, normalised=True)
        elif any(lineage.is_lost for _, lineage in known) or _changes_lengths(operation, output, unknown):
            after = first.lost(operation)
        else:
            with without_modes(), torch.no_grad():
                after = merge(known, operation)
            if len(after.pieces) > _MOST_PIECES:
                after = first.lost(operation)
        self.memory.write(output, lineage=after)

    def follow_join(self, output: Tensor, tensors: list[Tensor], axis: int) -> None:
        """Note that an output is tensors put together along an axis."""
        lineages = [self.memory.lineage_of(tensor) for tensor in tensors]
        if any(lineage is not None for lineage in lineages):
            with without_modes(), torch.no_grad():
                self.memory.write(output, lineage=join(tensors, lineages, axis))

    def follow_columns(self, output: Tensor, source: Tensor, first: int) -> None:
        """Note that a source was written into some columns of an output that is put together piece by piece."""
        before = self.memory.lineage_of(output)
        added = self.memory.lineage_of(source)
        if added is None:
            return
        with without_modes(), torch.no_grad():
            part = merge([(source, added)], "copy")
        parts = () if before is None or first == 0 else before.parts
        if sum(columns for columns, _ in parts) == first:
            parts += ((source.shape[-1], part),)
        self.memory.write(output, lineage=replace(part, parts=parts))

    def _lineage_of(self, tensor: Tensor) -> Lineage | None:
        """The lineage of a query or key; a parameter, as the query of a pooling is, is its own projection."""
        lineage = self.memory.lineage_of(tensor)
        if lineage is None and self._parameter_of(tensor) is not None:
            return Lineage(self.path)
        return lineage

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

    def is_bias(self, tensor: Tensor, output: Tensor) -> bool:
        """Whether a tensor is a learnt vector, or one for each head, and the same for all tokens."""
        if not self.is_learnt(tensor):
            return False
        if tensor.ndim == 1 or (tensor.ndim > 1 and tensor.shape[-2] == 1):
            return True
        return tensor.ndim == 2 and output.ndim == 4

    def is_learnt(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or made from parameters alone."""
        if self._is_parameter(storage_address(tensor)):
            return True
        fact = self.memory.look_up(tensor)
        return fact is not None and fact.is_learnt

    def leave_module(self, path: str, outputs: list[Tensor]) -> None:
        """A module with products and without attention has ended: what it put together is its projection."""
        for output in outputs:
            fact = self.memory.look_up(output)
            if fact is None or fact.lineage is None or fact.lineage.is_exact or fact.lineage.normalised:
                continue
            fact.lineage = Lineage(path, fact.lineage.sources, is_projection=fact.lineage.is_projection)


def _is_own_norm(known: list[tuple[Tensor, Lineage]], operation: str) -> bool:
    """Whether vectors meet a number made from themselves, as in x·rsqrt(mean(x²))."""
    reduced = {lineage.name for _, lineage in known if lineage.reduced}
    whole = {lineage.name for _, lineage in known if not lineage.reduced}
    return operation in ("mul", "div") and bool(reduced & whole)


def _changes_lengths(operation: str, output: Tensor, unknown: list[Tensor]) -> bool:
    """Whether vectors meet a tensor after which lengths tell nothing: it is added, or has a number for each entry."""
    if operation in ("add", "sub"):
        return bool(unknown)
    # A rotation's cosines are the same for all heads; a gate or a dropout is not, and has no axis of heads.
    has_no_heads = output.ndim <= 3 and 1 not in output.shape[:-1]
    return operation in ("mul", "div") and has_no_heads and any(x.numel() == output.numel() for x in unknown)


def _compare(call: SeenCall, weights: Tensor) -> float:
    """The largest difference of the weights of some rows from what the recovered call gives.

    Raises:
        NotUnderstoodError: they differ by more than rounding explains.
    """
    batch, heads, queries, keys = call.shape
    count = min(queries, _MOST_ROWS_COMPARED)
    rows = torch.linspace(0, queries - 1, count, device=weights.device).round().long()
    own = weights.index_select(-2, rows)[..., :keys].reshape(batch, heads, count, keys)
    expected, largest = weigh(call, rows)
    own = own.to(expected.dtype)
    if call.sinks is None:
        own = own / own.sum(dim=-1, keepdim=True)  # before the division, if the model divides later
    difference = (own - expected).abs()
    # Rows that see nothing have no weights to compare.
    worst = float(difference.masked_fill(expected.isnan(), 0).nan_to_num(nan=2.0).max()) if own.numel() else 0.0
    resolution = max(float(torch.finfo(x.dtype).eps) for x in (weights, call.q, call.k))
    allowed = 1e-6 + 16 * resolution * (1 + float(largest))
    if worst > allowed:
        raise NotUnderstoodError(f"recovered weights differ from the model's own by {worst:.2g}")
    return worst


def _place_queries(call: SeenCall) -> SeenCall:
    """Where the queries stand among the keys, if both are of one sequence."""
    q, k = call.q_lineage, call.k_lineage
    _, _, queries, keys = call.shape
    if call.last is not None:
        return replace(call, first_position=call.last)
    if q is None or k is None or not q.sources & k.sources or queries > keys:
        return call
    if queries < keys and call.mask is not None:
        last = call.mask[..., -1, :]
        visible = last if last.dtype == torch.bool else last > MASKED_BELOW
        seen = visible.nonzero()
        if len(seen):
            return replace(call, first_position=int(seen[:, -1].max()) - queries + 1)
    return replace(call, first_position=keys - queries)
