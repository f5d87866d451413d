"""What a watch has seen: summaries per layer and head, scales, and what could not be attributed."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sqrtdk import HeadSummary
from sqrtdk.display import Shown, Table
from sqrtdk.statistics import ROW_FIELDS, AttentionStatistics, Sample
from sqrtdk.torch.internals import WeakStorage
from sqrtdk.torch.watch.calls import SeenCall
from sqrtdk.torch.watch.effective import ScaleRecord, read_scale
from sqrtdk.torch.watch.projections import HeadParts, Projection, UntoldError, find_heads
from sqrtdk.torch.watch.table import MOST_LINES, make_table, write_remarks

Array = npt.NDArray[Any]

_TOLD, _KEYS, _UNKNOWN = "attention mask", "key padding", "unknown"
# Rows of a layer that wait to be summarised together.
_MOST_WAITING = 1 << 17


class Unattributed(NamedTuple):
    """Something that looks like attention and was not understood: where, why, how often."""

    layer: str
    reason: str
    times: int


@dataclass
class Pending:
    """One measured call, until the modules around it have told which of its rows are padding."""

    path: str
    statistics: AttentionStatistics
    batch: int
    queries: int
    keys: int
    is_self: bool
    first_position: int | None
    tokens: Tensor | None
    is_told: bool = False
    # A module inside was called without a mask: what a module around it was told is about other tokens, or says "all".
    is_unmasked: bool = False

    def tell(self, tokens: Tensor | None) -> None:
        """Note which tokens `[B, L]` are there; None for a module that was told nothing."""
        if tokens is None:
            self.is_unmasked = True
        elif not self.is_unmasked or bool(tokens.all()):
            self.is_told = True
            self.tokens = tokens

    @property
    def padding(self) -> str:
        """How it is known which rows are padding."""
        return _TOLD if self.is_told else _KEYS if self.tokens is not None else _UNKNOWN


class Seen(Shown):
    """What was seen while a model was watched; it prints as a table of layers and heads.

    `layers` has a `HeadSummary` per module path, in the order of first calls; `scales` a record per layer; `calls` is
    how many calls of the model were looked at.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.notes: list[str] = []
        self._summaries: dict[str, HeadSummary] = {}
        self._waiting: dict[str, list[Pending]] = {}
        self._scales: dict[str, ScaleRecord] = {}
        self._missed: dict[tuple[str, str], int] = {}
        self._padding: dict[str, str] = {}
        # Calls of the model that were passed over, by `every`.
        self.passed_over = 0
        # The addresses of parameters are given to no other memory while this lives.
        self.held: list[WeakStorage] = []
        # Per layer the columns of the parameters that make each head, or why they cannot be told.
        self._heads: dict[str, list[HeadParts] | str] = {}
        self._projections: dict[str, tuple[Projection, ...]] = {}

    @property
    def layers(self) -> dict[str, HeadSummary]:
        """The summary of every layer by its module path, in the order of first calls."""
        for path in list(self._waiting):
            self._summarise(path)
        return dict(self._summaries)

    @property
    def scales(self) -> list[ScaleRecord]:
        """The scale of every layer, in the order of first calls."""
        return list(self._scales.values())

    @property
    def unattributed(self) -> list[Unattributed]:
        """What looks like attention and could not be attributed."""
        return [Unattributed(path, reason, count) for (path, reason), count in self._missed.items()]

    @property
    def padding(self) -> str:
        """How it was told which rows are padding: "attention mask", "key padding", "unknown", or how often each."""
        kinds = list(self._padding.values())
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        if len(counts) < 2:
            return next(iter(counts), _UNKNOWN)
        return ", ".join(f"{kind} in {count} of {len(kinds)} layers" for kind, count in counts.items())

    def miss(self, path: str, reason: str) -> None:
        """Count something that was not understood."""
        self._missed[path, reason] = self._missed.get((path, reason), 0) + 1

    def note_scale(self, path: str, call: SeenCall) -> None:
        """Work out the scale of a layer; the first call that tells it holds."""
        known = self._scales.get(path)
        if known is None or (known.effective is None and not known.normalised):
            self._scales[path] = read_scale(path, call)

    def note_heads(self, path: str, call: SeenCall) -> None:
        """Work out which parameters make the heads of a layer; another call must have been made by the same ones."""
        used = _projections_of(call)
        known = self._projections.get(path)
        if known is None or (isinstance(self._heads[path], str) and not known):
            self._projections[path] = used
            try:
                self._heads[path] = find_heads(call)
            except UntoldError as reason:
                self._heads[path] = str(reason)
        elif len(known) != len(used) or not all(one.is_same(two) for one, two in zip(known, used, strict=True)):
            self._heads[path] = "its calls have queries and keys of different projections"

    def heads_of(self, path: str) -> list[HeadParts] | str:
        """The columns of the parameters that make each head of a layer, or why they cannot be told."""
        return self._heads.get(path, "it was not seen")

    def add(self, pending: Pending) -> None:
        """Add the rows of a call to its layer."""
        waiting = self._waiting.setdefault(pending.path, [])
        if pending.path not in self._summaries:
            self._summaries[pending.path] = _EMPTY
        self._padding.setdefault(pending.path, pending.padding)
        waiting.append(pending)
        if sum(one.batch * one.queries for one in waiting) > _MOST_WAITING:
            self._summarise(pending.path)

    def _summarise(self, path: str) -> None:
        for pending in self._waiting.pop(path, []):
            for rows in _present_rows(pending):
                summary = HeadSummary.of(rows)
                before = self._summaries.get(path, _EMPTY)
                self._summaries[path] = summary if before is _EMPTY else before.merge(summary)
        if self._summaries.get(path) is _EMPTY:
            del self._summaries[path]

    def _table(self) -> Table:
        return make_table(self)

    def __repr__(self) -> str:
        return "\n".join([self._table().as_text(MOST_LINES), *write_remarks(self)])

    def _repr_html_(self) -> str:
        remarks = "".join(f"<div>{escape(line)}</div>" for line in write_remarks(self))
        return self._table().as_html(MOST_LINES) + remarks


_EMPTY: Any = object()


def _projections_of(call: SeenCall) -> tuple[Projection, ...]:
    lineages = [lineage for lineage in (call.q_lineage, call.k_lineage) if lineage is not None]
    whole = [*lineages, *(part for lineage in lineages for _, part in lineage.parts if part is not None)]
    return tuple(lineage.projection for lineage in whole if lineage.projection is not None)


def _present_rows(pending: Pending) -> list[AttentionStatistics]:
    """The rows that are no padding: sequences with the same rows together."""
    rows = pending.statistics.numpy()
    queries = rows.shape[-1]
    if pending.tokens is None:
        return [_pick(rows, None, None, pending.first_position)]
    tokens = pending.tokens.detach().cpu().numpy()
    if rows.sample is not None:
        tokens = tokens[:, rows.sample.positions]
    if tokens.shape != (pending.batch, queries):
        return [_pick(rows, None, None, pending.first_position)]
    groups: dict[bytes, list[int]] = {}
    for sequence, present in enumerate(tokens):
        groups.setdefault(present.tobytes(), []).append(sequence)
    return [
        _pick(rows, sequences, None if tokens[sequences[0]].all() else tokens[sequences[0]], pending.first_position)
        for sequences in groups.values()
        if tokens[sequences[0]].any()
    ]


def _pick(
    rows: AttentionStatistics, sequences: list[int] | None, present: Array | None, first_position: int | None
) -> AttentionStatistics:
    """Some sequences, and some rows of each, with the positions that they have."""

    def pick(values: Array) -> Array:
        values = values if sequences is None else values[sequences]
        return values if present is None else values[..., present]

    sample = rows.sample
    if present is not None:
        at = np.flatnonzero(present)
        if sample is None:
            sample = Sample(at, len(at))
        else:
            share = len(at) / len(present)
            sample = Sample(sample.positions[at], max(len(at), round(sample.rows * share)))
    named: dict[str, Any] = {name: pick(np.asarray(getattr(rows, name))) for name in ROW_FIELDS}
    return AttentionStatistics(**named, sample=sample, first_position=first_position)
