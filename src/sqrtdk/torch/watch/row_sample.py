"""Samples rows of watched calls: the scores of a limited number of queries with all keys that they see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sqrtdk.diagnosis.counterfactual import ScoreRow
from sqrtdk.summary.heads import Array
from sqrtdk.torch.internals import unseen
from sqrtdk.torch.minus_infinity import hides, shows
from sqrtdk.torch.watch.recognise.calls import SeenCall


class SampledRow(NamedTuple):
    """A row and its sampling priority; low priorities are kept."""

    priority: int
    row: ScoreRow


class Reservoir:
    """Keeps the rows with the lowest priorities. This is a uniform sample and uses no random generator."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._offered = 0
        self._rows: list[SampledRow] = []

    @property
    def rows(self) -> list[ScoreRow]:
        """The kept rows, lowest priority first."""
        return [kept.row for kept in self._rows]

    def offer(self, call: SeenCall, tokens: Tensor | None) -> None:
        """Keep the rows of a call with low enough priorities, leaving out padding (False in `tokens` `[B, L]`)."""
        batch, _, queries, _ = call.shape
        numbers = np.arange(batch * queries, dtype=np.uint64) + np.uint64(self._offered)
        first, self._offered = self._offered, self._offered + batch * queries
        priorities = _mix(numbers)
        if tokens is not None and tuple(tokens.shape) == (batch, queries):
            present = np.asarray(tokens.cpu()).ravel()
            priorities, numbers = priorities[present], numbers[present]
        least = np.argsort(priorities, kind="stable")[: self._size]
        # Rows with a higher priority number than all kept rows are dropped.
        worst = self._rows[-1].priority if len(self._rows) == self._size else None
        chosen = [(int(priorities[at]), *divmod(int(numbers[at]) - first, queries)) for at in least]
        chosen = [one for one in chosen if worst is None or one[0] < worst]
        with unseen():
            taken = [SampledRow(one[0], row) for one, row in zip(chosen, _read_rows(call, chosen), strict=True)]
        self._rows = sorted([*self._rows, *taken], key=lambda one: one.priority)[: self._size]


def _mix(numbers: Array) -> Array:
    """Return 64-bit hashes, distinct for distinct numbers, with all bits mixed (Steele et al. 2014: SplitMix64)."""
    words = numbers * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(words ^ (words >> np.uint64(31)))


def _read_rows(call: SeenCall, chosen: list[tuple[int, int, int]]) -> list[ScoreRow]:
    rows: list[ScoreRow] = []
    heads, groups = call.q.shape[1], call.k.shape[1]
    for _, sequence, query in chosen:
        if call.logits is not None:
            rows.append(_read_row(call, call.logits[sequence, :, query].float(), sequence, query))
            continue
        picked = (call.q[sequence, :, query].detach(), call.k[sequence].detach())
        q_HD, k_GSD = (x.float() if x.element_size() < 4 else x for x in picked)
        scores = torch.einsum("gid,gsd->gis", q_HD.reshape(groups, heads // groups, -1), k_GSD).flatten(0, 1)
        scores = scores * _pick(call.scale, sequence, query)
        rows.append(_read_row(call, scores, sequence, query))
    return rows


def _pick(scale: float | Tensor, sequence: int, query: int) -> float | Tensor:
    """Return the scale of one query, as a number or as a tensor `[H, 1]`."""
    if not isinstance(scale, Tensor):
        return scale
    sequence, query = (at if size > 1 else 0 for at, size in ((sequence, scale.shape[0]), (query, scale.shape[2])))
    return scale.detach()[sequence, :, query, None]


def _read_row(call: SeenCall, scores_HS: Tensor, sequence: int, query: int) -> ScoreRow:
    keys = scores_HS.shape[1]
    at = np.arange(keys)
    visible: Array = np.ones((1, keys), bool)
    if call.last is not None:
        visible &= at <= query + call.last
    if call.first is not None:
        visible &= at >= query + call.first
    added = None
    if call.logits is not None:
        visible = visible & shows(scores_HS).cpu().numpy()
    elif call.mask is not None:
        mask = call.mask.detach()
        mask = mask[sequence if mask.shape[0] > 1 else 0, :, query if mask.shape[2] > 1 else 0]
        visible = visible & shows(mask).cpu().numpy()
        if mask.dtype != torch.bool:
            added = mask.double().cpu().numpy()
    anybody: Array = np.asarray(visible.any(axis=0))
    scores = scores_HS.cpu().numpy()[:, anybody]
    visible = np.broadcast_to(visible[:, anybody], scores.shape)
    if added is not None:
        added = np.broadcast_to(np.where(hides(added), 0.0, added)[:, anybody], scores.shape)
        added = added.copy() if added.any() else None
    place = None
    if call.first_position is not None and 0 <= query + call.first_position < keys:
        place = int(anybody[: query + call.first_position].sum())
    return ScoreRow(scores, added, None if visible.all() else visible.copy(), call.softcap, place)
