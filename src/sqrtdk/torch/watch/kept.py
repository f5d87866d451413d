"""A bounded sample of the rows of seen calls: the scores of a few queries with all keys that they see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sqrtdk.counterfactual import ScoreRow
from sqrtdk.summary import Array
from sqrtdk.torch.internals import without_modes
from sqrtdk.torch.watch.calls import MASKED_BELOW, SeenCall


class KeptRow(NamedTuple):
    """A row, and the number that decides whether it stays."""

    priority: int
    row: ScoreRow


class Reservoir:
    """The rows with the least priorities of all that were offered: a uniform sample, without any random stream."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._offered = 0
        self._rows: list[KeptRow] = []

    @property
    def rows(self) -> list[ScoreRow]:
        """The rows that are kept."""
        return [kept.row for kept in self._rows]

    def offer(self, call: SeenCall, tokens: Tensor | None) -> None:
        """Take the rows of a call that stay, while its tensors are there; padding (tokens `[B, L]`) is left out."""
        batch, _, queries, _ = call.shape
        numbers = np.arange(batch * queries, dtype=np.uint64) + np.uint64(self._offered)
        first, self._offered = self._offered, self._offered + batch * queries
        priorities = _mix(numbers)
        if tokens is not None and tuple(tokens.shape) == (batch, queries):
            present = np.asarray(tokens.cpu()).ravel()
            priorities, numbers = priorities[present], numbers[present]
        least = np.argsort(priorities, kind="stable")[: self._size]
        # Beyond the worst of those that are kept nothing stays.
        worst = self._rows[-1].priority if len(self._rows) == self._size else None
        chosen = [(int(priorities[at]), *divmod(int(numbers[at]) - first, queries)) for at in least]
        chosen = [one for one in chosen if worst is None or one[0] < worst]
        with without_modes(), torch.no_grad():
            taken = [KeptRow(one[0], row) for one, row in zip(chosen, _read_rows(call, chosen), strict=True)]
        self._rows = sorted([*self._rows, *taken], key=lambda one: one.priority)[: self._size]


def _mix(numbers: Array) -> Array:
    """A permutation of the 64-bit words in which every bit moves every other (Steele et al. 2014: SplitMix64)."""
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
    """The scale of one row, as a number or `[H, 1]`."""
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
        visible = visible & (scores_HS > MASKED_BELOW).cpu().numpy()
    elif call.mask is not None:
        mask = call.mask.detach()
        mask = mask[sequence if mask.shape[0] > 1 else 0, :, query if mask.shape[2] > 1 else 0]
        if mask.dtype == torch.bool:
            visible = visible & mask.cpu().numpy()
        else:
            added = mask.double().cpu().numpy()
            visible = visible & (added > MASKED_BELOW)
    anybody: Array = np.asarray(visible.any(axis=0))
    scores = scores_HS.cpu().numpy()[:, anybody]
    visible = np.broadcast_to(visible[:, anybody], scores.shape)
    if added is not None:
        added = np.broadcast_to(np.where(added > MASKED_BELOW, added, 0.0)[:, anybody], scores.shape)
        added = added.copy() if added.any() else None
    place = None
    if call.first_position is not None and 0 <= query + call.first_position < keys:
        place = int(anybody[: query + call.first_position].sum())
    return ScoreRow(scores, added, None if visible.all() else visible.copy(), call.softcap, place)
