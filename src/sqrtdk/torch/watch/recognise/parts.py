"""Collects candidates for attention and joins the parts of one call: separate heads and blocks of keys.

A module may compute its attention in slices. The traces of the vectors show which heads, queries and keys a slice
has. Slices of heads become one call, and blocks of keys whose exponentials are summed become whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch.watch.recognise.calls import NotUnderstoodError, SeenCall, measure, place_queries
from sqrtdk.torch.watch.recognise.copying import replace

# The running modules, outermost first: the number of the call, its path, and the number of heads it declares.
Stack = tuple[tuple[int, str, int | None], ...]

# Limit for groups of parts that wait for more parts at the same time.
_MOST_OPEN = 4
_APART = "its keys are taken in blocks, which could not be put together"


@dataclass(eq=False)
class Candidate:
    """A softmax that is attention if multiplied with values. `reason` says why it was not understood."""

    stack: Stack
    # The number of keys, and the number of columns of the softmax, which includes sinks.
    keys: int
    width: int
    call: SeenCall | None = None
    statistics: AttentionStatistics | None = None
    reason: str | None = None
    is_taken: bool = False
    # Whether exponentials are multiplied with values before their division by the sum. The row may have more keys.
    is_block: bool = False
    # Whether this is a softmax. Other functions of scores are attention only if multiplied with values.
    is_softmax: bool = True
    # Whether this is known to come from a product of queries and keys.
    is_of_scores: bool = True
    # Whether these are dot products of pairs, which an exponential would turn into a softmax.
    needs_exponential: bool = False
    # Whether this is of a fused operation with the heads where the operation has them.
    is_plain: bool = False
    # Whether this is of a repeated call, whose vectors were not followed.
    is_repeated: bool = False
    # Notes about the layer.
    remarks: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Path of the innermost module that ran all of this candidate."""
        return self.stack[-1][1] if self.stack else ""

    @property
    def frame(self) -> int:
        """Number of that module's call."""
        return self.stack[-1][0] if self.stack else 0

    @property
    def is_part(self) -> bool:
        """Whether the same call may have more heads, queries or keys in other parts."""
        call = self.call
        if call is None or call.q_span is None or call.k_span is None:
            return self.is_block and call is not None
        q, k, width = call.q_span, call.k_span, call.q.shape[-1]
        heads, groups = (len(set(span.columns)) * width for span in (q, k))
        # The projection is of queries alone, or of queries, keys and values of equal width.
        whole = (heads, heads + 2 * groups) if q.origin == k.origin else (heads,)
        return self.is_block or q.covered < q.origin.tokens or q.origin.columns not in whole


def common(one: Stack, other: Stack) -> Stack:
    """Return the modules, outermost first, that two stacks share."""
    count = 0
    for own, others in zip(one, other, strict=False):
        if own[0] != others[0]:
            break
        count += 1
    return one[:count]


class OpenCalls:
    """Holds parts of calls until the module around them ends, or until there are too many groups."""

    def __init__(self, take: Callable[[Candidate], None]) -> None:
        self._take = take
        self._groups: dict[Hashable, list[Candidate]] = {}

    def add(self, candidate: Candidate) -> None:
        """Pass a candidate on, or hold it if its call may have more parts."""
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
        """Join and pass on the parts that wait for the end of a module's call."""
        for key in [key for key, group in self._groups.items() if group[0].frame == frame]:
            self._close(key)

    def clear(self) -> None:
        """Drop the waiting parts, which exist at the end of a model call only after an exception."""
        self._groups.clear()

    def _close(self, key: Hashable) -> None:
        group = self._groups.pop(key)
        if len(group) > 1:
            with torch.no_grad():
                group = self._join_heads(self._join_keys(group) if group[0].is_block else group)
        for candidate in group:
            if candidate.call is not None and candidate.statistics is None:
                try:
                    candidate.statistics = measure(candidate.call)
                except NotUnderstoodError as error:
                    candidate.reason = str(error)
            self._take(candidate)

    def _join_keys(self, group: list[Candidate]) -> list[Candidate]:
        """Return blocks of keys of the same queries as whole rows, or one refusal if they cannot be joined."""
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
        """Return slices of heads with the same tokens as one call; slices that differ stay separate."""
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
    """The calls differ in more than the axis to join along."""


def _refuse(group: list[Candidate]) -> list[Candidate]:
    """Return one candidate with the reason that blocks could not be joined."""
    return [replace(group[0], call=None, statistics=None, reason=_APART)]


def _with_all_keys(calls: list[SeenCall]) -> SeenCall:
    """Return one call with the keys of all calls, in token order.

    Raises:
        UnlikeError: the calls differ in more than their keys, or share keys.
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
    """Return one call with the heads of all calls, in column order.

    Raises:
        UnlikeError: the calls differ in more than their heads, or share heads.
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
    """Return the first of equal calls, with the largest difference of all. Raises UnlikeError if they are unequal."""
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
    """Return the masks joined along an axis, or None without masks. Different dtypes raise UnlikeError."""
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
