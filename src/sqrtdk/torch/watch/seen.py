"""What a watch has seen: summaries per layer and head, scales, and what could not be attributed."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sqrtdk import HeadSummary
from sqrtdk.causes import CauseSplit
from sqrtdk.counterfactual import ScoreRow
from sqrtdk.display import Shown, Table
from sqrtdk.statistics import ROW_FIELDS, AttentionStatistics, Sample
from sqrtdk.torch.internals import WeakStorage
from sqrtdk.torch.watch.calls import SeenCall
from sqrtdk.torch.watch.causes import CauseSums
from sqrtdk.torch.watch.effective import ScaleRecord, read_scale
from sqrtdk.torch.watch.kept import KeptRow, Reservoir
from sqrtdk.torch.watch.projections import HeadEvidence, HeadParts, UntoldError, find_heads
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
    # What makes its scores large, as sums `[5, H]`.
    causes: Tensor | None = None
    # Rows that may be kept.
    drawn: list[KeptRow] = field(default_factory=list)

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
        # Per layer what tells which parameters make each head, or why they cannot be told.
        self._evidence: dict[str, HeadEvidence | str] = {}
        self._causes: dict[str, CauseSums] = {}
        self.keep_rows: int | None = None
        self._reservoirs: dict[str, Reservoir] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what holds for this process and these tensors alone: a copy serves all but clipping."""
        copied = "what was seen is a copy, in which addresses of parameters do not hold"
        return {**self.__dict__, "held": [], "_evidence": dict.fromkeys(self._evidence, copied)}

    @property
    def layers(self) -> dict[str, HeadSummary]:
        """The summary of every layer by its module path, in the order of first calls."""
        for path in list(self._waiting):
            self._summarise(path)
        return dict(self._summaries)

    @property
    def causes(self) -> dict[str, CauseSplit]:
        """Per layer and head the length of q, the spread of k and their alignment: what makes scores large."""
        layers = self.layers
        return {path: sums.split(layers[path]) for path, sums in self._causes.items() if path in layers}

    @property
    def rows(self) -> dict[str, list[ScoreRow]]:
        """Per layer the scores of the rows that were kept; empty without `keep_rows`."""
        return {path: reservoir.rows for path, reservoir in self._reservoirs.items()}

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

    def note_scale(self, path: str, call: SeenCall) -> ScaleRecord:
        """Work out the scale of a layer; the first call that tells it holds."""
        known = self._scales.get(path)
        if known is None or (known.effective is None and not known.normalised):
            known = self._scales[path] = read_scale(path, call)
        return known

    def note_heads(self, path: str, call: SeenCall) -> None:
        """Keep what tells which parameters make the heads of a layer; every call must have been made by the same."""
        known = self._evidence.get(path)
        if known is None:
            self._evidence[path] = HeadEvidence.of(call)
        elif not isinstance(known, str) and not known.is_of(call):
            self._evidence[path] = "its calls have queries and keys of different projections"

    def draw_rows(self, path: str, call: SeenCall, tokens: Tensor | None) -> list[KeptRow]:
        """Rows of a call that may be kept, if any are to be."""
        if self.keep_rows is None:
            return []
        return self._reservoirs.setdefault(path, Reservoir(self.keep_rows)).draw(call, tokens)

    def heads_of(self, path: str) -> list[HeadParts] | str:
        """The columns of the parameters that make each head of a layer, or why they cannot be told."""
        evidence = self._evidence.get(path, "it was not seen")
        if isinstance(evidence, str):
            return evidence
        try:
            return find_heads(evidence)
        except UntoldError as reason:
            return str(reason)

    def add(self, pending: Pending) -> None:
        """Add the rows of a call to its layer."""
        waiting = self._waiting.setdefault(pending.path, [])
        if pending.path not in self._summaries:
            self._summaries[pending.path] = _EMPTY
        self._padding.setdefault(pending.path, pending.padding)
        waiting.append(pending)
        if pending.drawn:
            fits = pending.tokens is not None and tuple(pending.tokens.shape) == (pending.batch, pending.queries)
            self._reservoirs[pending.path].add(pending.drawn, pending.tokens if fits else None)
            pending.drawn = []
        if sum(one.batch * one.queries for one in waiting) > _MOST_WAITING:
            self._summarise(pending.path)

    def _summarise(self, path: str) -> None:
        for pending in self._waiting.pop(path, []):
            if pending.causes is not None:
                sums = CauseSums(*pending.causes.double().cpu().numpy())
                self._causes[path] = sums.merge(self._causes[path]) if path in self._causes else sums
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
