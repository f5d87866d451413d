"""Results of a watch: summaries per layer and head, scales, and what could not be attributed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from sqrtdk import HeadSummary
from sqrtdk.causes import CauseSplit
from sqrtdk.counterfactual import ScoreRow
from sqrtdk.display import Shown, Table, name_layer
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.summary import RowBlock, join_blocks, summarise
from sqrtdk.torch.internals import WeakStorage
from sqrtdk.torch.watch.calls import SeenCall
from sqrtdk.torch.watch.causes import CauseSums
from sqrtdk.torch.watch.effective import ScaleRecord, read_scale
from sqrtdk.torch.watch.kept import Reservoir
from sqrtdk.torch.watch.modules import MOST_CALLS, LayerKey, name_layers
from sqrtdk.torch.watch.padding import Padding
from sqrtdk.torch.watch.projections import HeadEvidence, HeadParts, UntoldError, find_heads
from sqrtdk.torch.watch.table import MOST_LINES, make_table, write_remarks

# Rows of all layers and heads that wait to be summarised together: 104 bytes each.
_MOST_WAITING = 1 << 17
# Rows that are summarised but for their bins, of which few are asked for: 120 bytes each.
_MOST_UNCOUNTED = 1 << 18

_Value = TypeVar("_Value")


class Unattributed(NamedTuple):
    """Something that looks like attention and was not understood: where, why, how often."""

    layer: str
    reason: str
    times: int


class SeenRows(NamedTuple):
    """The rows of one call: their statistics, where they stand, which of them are tokens, and sums of causes."""

    statistics: AttentionStatistics
    first_position: int | None
    tokens: Tensor | None
    causes: Tensor | None

    def as_block(self) -> RowBlock:
        """The rows as they are summarised."""
        rows = self.statistics.numpy()
        batch, queries = rows.shape[0], rows.shape[-1]
        at = np.arange(queries) if rows.sample is None else rows.sample.positions
        tokens = None
        if self.tokens is not None:
            tokens = self.tokens.detach().cpu().numpy()
            tokens = tokens if rows.sample is None or tokens.shape[-1] == queries else tokens[:, at]
            tokens = tokens if tokens.shape == (batch, queries) else None
        first = self.first_position
        positions = None if first is None else np.broadcast_to(at + first, (batch, queries))
        return RowBlock.of(rows, tokens)._replace(positions=positions)


class Seen(Shown):
    """What was seen while a model was watched; it prints as a table of layers and heads.

    `layers` has a `HeadSummary` per layer, in the order of first calls; `scales` a record per layer; `calls` is how
    many calls of the model were looked at. A layer is named by its module path; a module that is called several times
    in a forward pass is as many layers, `path (call 0)`, `path (call 1)` and so on, and `paths` has the path of each.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.notes: list[str] = []
        # None while no row of the layer is summarised.
        self._summaries: dict[LayerKey, HeadSummary | None] = {}
        self._waiting: dict[LayerKey, list[SeenRows]] = {}
        self._number_waiting = self._number_uncounted = 0
        self._scales: dict[LayerKey, ScaleRecord] = {}
        self._missed: dict[tuple[str, str], int] = {}
        self._padding: dict[LayerKey, Padding] = {}
        # Calls of the model that were passed over, by `every`.
        self.passed_over = 0
        # The addresses of parameters are given to no other memory while this lives.
        self.held: list[WeakStorage] = []
        # Per module what tells which parameters make each head, or why they cannot be told.
        self._evidence: dict[str, HeadEvidence | str] = {}
        self._causes: dict[LayerKey, CauseSums] = {}
        self.keep_rows: int | None = None
        self._reservoirs: dict[LayerKey, Reservoir] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what holds for this process and these tensors alone: a copy serves all but clipping."""
        self._summarise()
        copied = "what was seen is a copy, in which addresses of parameters do not hold"
        return {**self.__dict__, "held": [], "_evidence": dict.fromkeys(self._evidence, copied)}

    @property
    def layers(self) -> dict[str, HeadSummary]:
        """The summary of every layer by its name, in the order of first calls."""
        self._summarise()
        return self._by_name({key: summary for key, summary in self._summaries.items() if summary is not None})

    @property
    def paths(self) -> dict[str, str]:
        """The module path of every layer by its name."""
        return self._by_name({key: key.path for key in self._scales})

    def _by_name(self, by_layer: dict[LayerKey, _Value]) -> dict[str, _Value]:
        names = name_layers(self._scales)
        return {names[key]: value for key, value in by_layer.items()}

    @property
    def causes(self) -> dict[str, CauseSplit]:
        """Per layer and head the length of q, the spread of k and their alignment: what makes scores large."""
        layers = self.layers
        sums = self._by_name(self._causes)
        return {name: sums[name].split(layers[name]) for name in sums if name in layers}

    @property
    def rows(self) -> dict[str, list[ScoreRow]]:
        """Per layer the scores of the rows that were kept; empty without `keep_rows`."""
        return self._by_name({key: reservoir.rows for key, reservoir in self._reservoirs.items()})

    @property
    def scales(self) -> list[ScaleRecord]:
        """The scale of every layer, in the order of first calls."""
        names = name_layers(self._scales)
        return [
            record if names[key] == key.path else replace(record, layer=names[key], call=key.call)
            for key, record in self._scales.items()
        ]

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
            return next(iter(counts), "unknown")
        return ", ".join(f"{kind} in {count} of {len(kinds)} layers" for kind, count in counts.items())

    def miss(self, path: str, reason: str) -> None:
        """Count something that was not understood."""
        self._missed[path, reason] = self._missed.get((path, reason), 0) + 1

    def note_loop(self, path: str) -> None:
        """Say that a module was called too often in a forward pass for a layer each."""
        note = f"{name_layer(path)}: from call {MOST_CALLS - 1} of a forward pass on all its calls are one layer"
        if note not in self.notes:
            self.notes.append(note)

    def remark(self, path: str, text: str) -> None:
        """Say something about a layer, once for all layers that it is true of."""
        if not any(note.startswith(text) for note in self.notes):
            self.notes.append(f"{text} (first in {name_layer(path)})")

    def note_scale(self, layer: LayerKey, call: SeenCall) -> ScaleRecord:
        """Work out the scale of a layer; the first call that tells it holds."""
        known = self._scales.get(layer)
        if known is None or (known.effective is None and not known.normalised):
            known = self._scales[layer] = read_scale(layer.path, call)
        return known

    def note_heads(self, path: str, call: SeenCall) -> None:
        """Keep what tells which parameters make the heads of a module; every call must have been made by the same."""
        known = self._evidence.get(path)
        if known is None:
            self._evidence[path] = HeadEvidence.of(call)
        elif not isinstance(known, str) and not known.is_of(call):
            self._evidence[path] = "its calls have queries and keys of different projections"

    def keep(self, layer: LayerKey, call: SeenCall, tokens: Tensor | None) -> None:
        """Offer the rows of a call to the sample of its layer, if there is to be one."""
        if self.keep_rows is not None:
            self._reservoirs.setdefault(layer, Reservoir(self.keep_rows)).offer(call, tokens)

    def heads_of(self, path: str) -> list[HeadParts] | str:
        """The columns of the parameters that make each head of a module, or why they cannot be told."""
        evidence = self._evidence.get(path, "it was not seen")
        if isinstance(evidence, str):
            return evidence
        try:
            return find_heads(evidence)
        except UntoldError as reason:
            return str(reason)

    def add(self, layer: LayerKey, rows: SeenRows, number: int, padding: Padding) -> None:
        """Add the rows of a call, of which there are so many, to its layer."""
        self._summaries.setdefault(layer, None)
        self._padding.setdefault(layer, padding)
        self._waiting.setdefault(layer, []).append(rows)
        self._number_waiting += number
        if self._number_waiting > _MOST_WAITING:
            self._summarise()

    def _summarise(self) -> None:
        """Summarise the rows that wait, those of all layers together."""
        waiting, self._waiting = self._waiting, {}
        self._number_uncounted += self._number_waiting
        self._number_waiting = 0
        blocks = [(layer, block) for layer, rows in waiting.items() for block in _join(rows)]
        for (layer, _), summary in zip(blocks, summarise([block for _, block in blocks]), strict=True):
            before = self._summaries[layer]
            self._summaries[layer] = summary if before is None else before.merge(summary)
        for layer, rows in waiting.items():
            for one in rows:
                if one.causes is not None:
                    sums = CauseSums(*one.causes.double().cpu().numpy())
                    self._causes[layer] = sums.merge(self._causes[layer]) if layer in self._causes else sums
        if self._number_uncounted > _MOST_UNCOUNTED:
            self._number_uncounted = 0
            for whole in self._summaries.values():
                if whole is not None:
                    whole.forget_rows()

    def _table(self) -> Table:
        return make_table(self)

    def __repr__(self) -> str:
        return "\n".join([self._table().as_text(MOST_LINES), *write_remarks(self)])

    def _repr_html_(self) -> str:
        remarks = "".join(f"<div>{escape(line)}</div>" for line in write_remarks(self))
        return self._table().as_html(MOST_LINES) + remarks


def _join(rows: Iterable[SeenRows]) -> list[RowBlock]:
    """The rows of a layer's calls, without calls that are padding alone."""
    return join_blocks([block for block in (one.as_block() for one in rows) if block.present.any()])
