"""Candidates for attention, and parts of one call put together: heads one by one, keys block by block.

A module may compute its attention in slices. Which heads, queries and keys a slice has is known from the traces of its
vectors, so slices of heads become one call, and blocks of keys whose exponentials are added up become whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch.watch.calls import SeenCall, place_queries

# The running modules, outermost first: the number of the call, its path, and how many heads the module says it has.
Stack = tuple[tuple[int, str, int | None], ...]

# Groups of parts that wait for more at the same time.
_MOST_OPEN = 4
_APART = "its keys are taken in blocks, which could not be put together"


@dataclass(eq=False)
class Candidate:
    """A softmax that is attention if its result is multiplied with values; `reason` says why it was not understood."""

    stack: Stack
    # Its keys, and how many columns its softmax has: more where sinks have some.
    keys: int
    width: int
    call: SeenCall | None = None
    statistics: AttentionStatistics | None = None
    reason: str | None = None
    is_taken: bool = False
    # Exponentials that meet values before they are divided by their sum: the row may have more keys.
    is_block: bool = False
    # Whether it is a softmax; what else becomes of scores is attention only if it meets values.
    is_softmax: bool = True
    # Whether it is known to be made from a product of queries and keys.
    is_of_scores: bool = True
    # Dot products of pairs: an exponential would make them a softmax.
    needs_exponential: bool = False
    # What is said about the layer beside its numbers.
    remarks: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Of the innermost module in which all of it ran."""
        return self.stack[-1][1] if self.stack else ""

    @property
    def frame(self) -> int:
        """The number of that module's call."""
        return self.stack[-1][0] if self.stack else 0

    @property
    def is_part(self) -> bool:
        """Whether there may be more of the same call: other heads, other queries, other keys."""
        call = self.call
        if call is None or call.q_span is None or call.k_span is None:
            return self.is_block and call is not None
        q, k, width = call.q_span, call.k_span, call.q.shape[-1]
        heads, groups = (len(set(span.columns)) * width for span in (q, k))
        # A projection of queries alone, or of queries, keys and values of one width.
        whole = (heads, heads + 2 * groups) if q.origin == k.origin else (heads,)
        return self.is_block or q.covered < q.origin.tokens or q.origin.columns not in whole


def common(one: Stack, other: Stack) -> Stack:
    """The modules in which both of two things ran."""
    count = 0
    for own, others in zip(one, other, strict=False):
        if own[0] != others[0]:
            break
        count += 1
    return one[:count]


class OpenCalls:
    """Parts of calls that wait until the module around them ends, or until others have taken their place."""

    def __init__(
        self, take: Callable[[Candidate], None], measure: Callable[[SeenCall], AttentionStatistics | None]
    ) -> None:
        self._take = take
        self._measure = measure
        self._groups: dict[Hashable, list[Candidate]] = {}

    def add(self, candidate: Candidate) -> None:
        """Take a candidate, or keep it where it is part of a call that may have more."""
        if not candidate.is_part:
            self._take(candidate)
            return
        call = candidate.call
        assert call is not None
        origins = tuple(None if span is None else span.origin for span in (call.q_span, call.k_span))
        key = (candidate.frame, candidate.is_block, *origins)
        self._groups.setdefault(key, []).append(candidate)
        while len(self._groups) > _MOST_OPEN:
            self._close(next(iter(self._groups)))

    def close(self, frame: int) -> None:
        """Take what waits for the end of a module's call."""
        for key in [key for key, group in self._groups.items() if group[0].frame == frame]:
            self._close(key)

    def clear(self) -> None:
        """Forget what waits: the call of the model ended, by an exception, before its modules did."""
        self._groups.clear()

    def _close(self, key: Hashable) -> None:
        group = self._groups.pop(key)
        if len(group) > 1:
            with torch.no_grad():
                group = self._join_heads(self._join_keys(group) if group[0].is_block else group)
        for candidate in group:
            if candidate.call is not None and candidate.statistics is None:
                candidate.statistics = self._measure(candidate.call)
            self._take(candidate)

    def _join_keys(self, group: list[Candidate]) -> list[Candidate]:
        """Blocks of keys of the same queries as whole rows; all of them refused if that cannot be told."""
        by_queries: dict[Hashable, list[Candidate]] = {}
        for candidate in group:
            call = candidate.call
            if call is None or call.q_span is None or call.k_span is None:
                return _refuse(group)
            where = (call.q_span.columns, call.q_span.tokens, call.k_span.columns)
            by_queries.setdefault(where, []).append(candidate)
        try:
            return [
                replace(blocks[0], call=call, statistics=None, is_block=False)
                for blocks in by_queries.values()
                for call in [_with_all_keys([one.call for one in blocks if one.call is not None])]
            ]
        except UnlikeError:
            return _refuse(group)

    def _join_heads(self, group: list[Candidate]) -> list[Candidate]:
        """Slices of heads that see the same tokens as one call of all of them."""
        by_tokens: dict[Hashable, list[Candidate]] = {}
        for candidate in group:
            call = candidate.call
            if call is None or call.q_span is None or call.k_span is None:
                by_tokens[id(candidate)] = [candidate]
            else:
                by_tokens.setdefault((call.q_span.tokens, call.k_span.tokens), []).append(candidate)
        return [candidate for slices in by_tokens.values() for candidate in self._join_slices(slices)]

    def _join_slices(self, slices: list[Candidate]) -> list[Candidate]:
        if len(slices) == 1:
            return slices
        try:
            call = _with_all_heads([candidate.call for candidate in slices if candidate.call is not None])
        except UnlikeError:
            return slices
        remarks = list(dict.fromkeys(remark for one in slices for remark in one.remarks))
        return [replace(slices[0], call=call, statistics=None, remarks=remarks)]


class UnlikeError(Exception):
    """Calls that differ in more than what they would be put together along."""


def _refuse(group: list[Candidate]) -> list[Candidate]:
    """One candidate that says that there were blocks."""
    return [replace(group[0], call=None, statistics=None, reason=_APART)]


def _with_all_keys(calls: list[SeenCall]) -> SeenCall:
    """One call with the keys of all, in the order of their tokens.

    Raises:
        UnlikeError: they differ in more than their keys, or have some keys in common.
    """
    spans = [(call.k_span, call) for call in calls if call.k_span is not None]
    spans.sort(key=lambda pair: pair[0].start.row)
    for (one, _), (after, _) in pairwise(spans):
        if after.start.row <= one.start.row + (one.rows[0] - 1) * one.rows[1].row:
            raise UnlikeError
    span, ordered = spans[0][0], [call for _, call in spans]
    if ordered[0].sinks is not None:
        raise UnlikeError
    whole = replace(
        _check_alike(ordered),
        k=torch.cat([call.k for call in ordered], dim=-2),
        mask=_join_masks(ordered, 3),
        k_span=span._replace(rows=(sum(one.rows[0] for one, _ in spans), span.rows[1])),
        first_position=None,
    )
    return place_queries(whole)


def _with_all_heads(calls: list[SeenCall]) -> SeenCall:
    """One call with the heads of all, in the order of their columns.

    Raises:
        UnlikeError: they differ in more than their heads, or have some heads in common.
    """
    spans = [(call.q_span.columns, call) for call in calls if call.q_span is not None]
    spans.sort(key=lambda pair: pair[0])
    columns, ordered = [column for own, _ in spans for column in own], [call for _, call in spans]
    groups = {call.q.shape[1] // call.k.shape[1] for call in ordered}
    if len(set(columns)) < len(columns) or len(groups) > 1 or any(call.sinks is not None for call in ordered):
        raise UnlikeError
    q, k, mask = (
        torch.cat([call.q for call in ordered], dim=1),
        torch.cat([call.k for call in ordered], dim=1),
        _join_masks(ordered, 1),
    )
    if groups == {1} and columns != sorted(columns):
        order = torch.tensor(sorted(range(len(columns)), key=columns.__getitem__), device=q.device)
        q, k = q.index_select(1, order), k.index_select(1, order)
        mask = mask if mask is None or mask.shape[1] == 1 else mask.index_select(1, order)
    return replace(_check_alike(ordered), q=q, k=k, mask=mask)


def _check_alike(calls: list[SeenCall]) -> SeenCall:
    """The first of calls whose arguments are the same, with the largest difference of all."""
    first = calls[0]
    for call in calls[1:]:
        shapes = (call.q.shape[0], call.q.shape[-2:]) == (first.q.shape[0], first.q.shape[-2:])
        if not shapes or any(isinstance(one.scale, Tensor) or one.logits is not None for one in (first, call)):
            raise UnlikeError
        if any(getattr(call, name) != getattr(first, name) for name in ("scale", "softcap", "first", "last", "folded")):
            raise UnlikeError
    differences = [call.difference for call in calls if call.difference is not None]
    return replace(first, difference=max(differences, default=None))


def _join_masks(calls: list[SeenCall], axis: int) -> Tensor | None:
    """The masks put together along an axis; one that is the same for all heads stays so."""
    masks = [call.mask for call in calls]
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    dtype = given[0].dtype
    if any(mask.dtype != dtype for mask in given):
        raise UnlikeError
    shape = [max(mask.shape[at] for mask in given) for at in range(4)]
    full = []
    for call, mask in zip(calls, masks, strict=True):
        if mask is None:
            mask = torch.full((1, 1, 1, 1), dtype == torch.bool, dtype=dtype, device=call.q.device)
        sizes = list(shape)
        sizes[axis], sizes[3] = (call.shape[axis], call.shape[3])
        full.append(mask.expand(sizes))
    return torch.cat(full, dim=axis)
