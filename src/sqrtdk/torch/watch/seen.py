"""Results of a watch: summaries per layer and head, scales, and attention that could not be attributed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sqrtdk import HeadSummary
from sqrtdk.audits.audit import ScaleRecord
from sqrtdk.backends import MAX_THREADS
from sqrtdk.diagnosis.counterfactual import ScoreRow
from sqrtdk.diagnosis.score_size import CauseSplit
from sqrtdk.show.table import Shown, Table, name_layer
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.summary.heads import RowBlock, join_blocks, summarise
from sqrtdk.torch.engines.openmp import find_team
from sqrtdk.torch.internals import WeakStorage
from sqrtdk.torch.watch.layer_scale import read_scale
from sqrtdk.torch.watch.modules import MOST_CALLS, LayerKey, name_layers
from sqrtdk.torch.watch.padding import Padding
from sqrtdk.torch.watch.recognise.calls import SeenCall
from sqrtdk.torch.watch.recognise.projections import HeadEvidence, HeadParts, UntoldError, find_heads
from sqrtdk.torch.watch.row_sample import Reservoir
from sqrtdk.torch.watch.score_sums import CauseSums
from sqrtdk.torch.watch.table import MOST_LINES, make_table, write_remarks

# Limit for rows of all layers and heads that wait to be summarised together: 104 bytes each.
_MOST_WAITING = 1 << 17
# Limit for rows that are summarised except for their histograms, which are rarely needed: 120 bytes each.
_MOST_UNCOUNTED = 1 << 18

_Value = TypeVar("_Value")


class Unattributed(NamedTuple):
    """A computation that looks like attention but was not understood: its layer, the reason and the count."""

    layer: str
    reason: str
    times: int


class SeenRows(NamedTuple):
    """Rows of one call: statistics, first position, token mask and cause sums."""

    statistics: AttentionStatistics
    first_position: int | None
    tokens: Tensor | None
    causes: Tensor | None

    def as_block(self) -> RowBlock:
        """Return the rows as a block for `summarise`, without the token mask if its shape does not fit."""
        rows = self.statistics.numpy()
        batch, queries = rows.shape[0], rows.shape[-1]
        tokens = None
        if self.tokens is not None:
            tokens = self.tokens.detach().cpu().numpy()
            tokens = tokens if tokens.shape == (batch, queries) else None
        first = self.first_position
        positions = None if first is None else np.broadcast_to(np.arange(queries) + first, (batch, queries))
        return RowBlock.of(rows, tokens)._replace(positions=positions)


class Seen(Shown):
    """Results of watching a model, printed as a table of layers and heads.

    `layers` has a `HeadSummary` per layer, in the order of first calls, and `scales` has a record per layer. `calls` is
    the number of observed model calls. A layer is named by its module path. A module that is called several times in a
    forward pass makes several layers, `path (call 0)`, `path (call 1)` and so on, and `paths` has the path of each.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.notes: list[str] = []
        # None until rows of the layer are summarised.
        self._summaries: dict[LayerKey, HeadSummary | None] = {}
        self._waiting: dict[LayerKey, list[SeenRows]] = {}
        self._number_waiting = self._number_uncounted = 0
        self._scales: dict[LayerKey, ScaleRecord] = {}
        self._missed: dict[tuple[str, str], int] = {}
        self._padding: dict[LayerKey, Padding] = {}
        # Prevents the reuse of parameter addresses.
        self.held: list[WeakStorage] = []
        # Names of parameters that are whole only while their module runs (FSDP), by the address of the whole.
        self.gathered: dict[int, str] = {}
        # Per module the parameters that compute each head, or the reason why they are unknown.
        self._evidence: dict[str, HeadEvidence | str] = {}
        self._causes: dict[LayerKey, CauseSums] = {}
        self.keep_rows: int | None = None
        self._reservoirs: dict[LayerKey, Reservoir] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without memory addresses of this process. A copy supports everything except clipping."""
        self._summarise()
        copied = "what was seen is a copy, in which addresses of parameters do not hold"
        return {**self.__dict__, "held": [], "_evidence": dict.fromkeys(self._evidence, copied)}

    @property
    def layers(self) -> dict[str, HeadSummary]:
        """The summary of every layer by layer name, in the order of first calls."""
        self._summarise()
        return self._by_name({key: summary for key, summary in self._summaries.items() if summary is not None})

    @property
    def paths(self) -> dict[str, str]:
        """The module path of every layer by layer name."""
        return self._by_name({key: key.path for key in self._scales})

    def _by_name(self, by_layer: dict[LayerKey, _Value]) -> dict[str, _Value]:
        names = name_layers(self._scales)
        return {names[key]: value for key, value in by_layer.items()}

    @property
    def cause_sums(self) -> dict[str, CauseSums]:
        """Sums over rows from which `causes` is computed, per layer. Sums of other ranks can be merged."""
        self._summarise()
        return self._by_name(self._causes)

    @property
    def causes(self) -> dict[str, CauseSplit]:
        """Causes of large scores per layer and head: length of q, spread of k, and their alignment."""
        layers, sums = self.layers, self.cause_sums
        return {name: sums[name].split(layers[name]) for name in sums if name in layers}

    @property
    def rows(self) -> dict[str, list[ScoreRow]]:
        """Scores of the sampled rows per layer, empty without `keep_rows`."""
        return self._by_name({key: reservoir.rows for key, reservoir in self._reservoirs.items()})

    @property
    def scales(self) -> list[ScaleRecord]:
        """The scale record of every layer, in the order of first calls."""
        names = name_layers(self._scales)
        return [
            record if names[key] == key.path else replace(record, layer=names[key], call=key.call)
            for key, record in self._scales.items()
        ]

    @property
    def unattributed(self) -> list[Unattributed]:
        """Computations that look like attention but could not be attributed."""
        return [Unattributed(path, reason, count) for (path, reason), count in self._missed.items()]

    @property
    def padding(self) -> str:
        """Source of the padding mask: "attention mask", "key padding" or "unknown", with counts if layers differ."""
        kinds = list(self._padding.values())
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        if len(counts) < 2:
            return next(iter(counts), "unknown")
        return ", ".join(f"{kind} in {count} of {len(kinds)} layers" for kind, count in counts.items())

    def miss(self, path: str, reason: str) -> None:
        """Count a computation that was not understood."""
        self._missed[path, reason] = self._missed.get((path, reason), 0) + 1

    def note_loop(self, path: str) -> None:
        """Add a note that a module was called too often in a forward pass to make a layer of each call."""
        note = f"{name_layer(path)}: from call {MOST_CALLS - 1} of a forward pass on all its calls are one layer"
        if note not in self.notes:
            self.notes.append(note)

    def remark(self, path: str, text: str) -> None:
        """Add a note about a layer. Layers with the same remark share one note."""
        if not any(note.startswith(text) for note in self.notes):
            self.notes.append(f"{text} (first in {name_layer(path)})")

    def is_new(self, layer: LayerKey) -> bool:
        """Return whether no call of a layer was seen yet."""
        return layer not in self._scales

    def note_scale(self, layer: LayerKey, call: SeenCall) -> ScaleRecord:
        """Return the scale record of a layer. The first call with a known scale counts."""
        known = self._scales.get(layer)
        if known is None or (known.effective is None and not known.normalised):
            known = self._scales[layer] = read_scale(layer.path, call)
        return known

    def scale_of(self, layer: LayerKey) -> ScaleRecord:
        """Return the scale record of a layer that was seen."""
        return self._scales[layer]

    def note_heads(self, path: str, call: SeenCall) -> None:
        """Record the parameters that compute a module's heads. All calls must use the same parameters."""
        known = self._evidence.get(path)
        if known is None:
            self._evidence[path] = HeadEvidence.of(call)
        elif not isinstance(known, str) and not known.is_of(call):
            self._evidence[path] = "its calls have queries and keys of different projections"

    def keep(self, layer: LayerKey, call: SeenCall, tokens: Tensor | None) -> None:
        """Offer the rows of a call to the sample of its layer, if `keep_rows` is set."""
        if self.keep_rows is not None:
            self._reservoirs.setdefault(layer, Reservoir(self.keep_rows)).offer(call, tokens)

    def heads_of(self, path: str) -> list[HeadParts] | str:
        """Return the parameter columns that compute each head of a module, or the reason why they are unknown."""
        evidence = self._evidence.get(path, "it was not seen")
        if isinstance(evidence, str):
            return evidence
        try:
            return find_heads(evidence)
        except UntoldError as reason:
            return str(reason)

    def add(self, layer: LayerKey, rows: SeenRows, number: int, padding: Padding) -> None:
        """Add the rows of a call to its layer."""
        self._summaries.setdefault(layer, None)
        self._padding.setdefault(layer, padding)
        self._waiting.setdefault(layer, []).append(rows)
        self._number_waiting += number
        if self._number_waiting > _MOST_WAITING:
            self._summarise()

    def _summarise(self) -> None:
        """Summarise the waiting rows of all layers in one pass."""
        waiting, self._waiting = self._waiting, {}
        self._number_uncounted += self._number_waiting
        self._number_waiting = 0
        blocks = [(layer, block) for layer, rows in waiting.items() for block in _join(rows)]
        threads = min(torch.get_num_threads(), MAX_THREADS)
        summaries = summarise([block for _, block in blocks], threads, find_team())
        for (layer, _), summary in zip(blocks, summaries, strict=True):
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
    """Return the rows of a layer's calls as blocks, without calls that are entirely padding."""
    return join_blocks([block for block in (one.as_block() for one in rows) if block.present.any()])
