"""QK-Clip: shrinks the projections of heads whose scores passed a threshold, or changes nothing and says why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sqrtdk import checks
from sqrtdk.diagnosis.row_rules import count_non_finite
from sqrtdk.diagnosis.trend_rules import spread_of_scores
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name, warn
from sqrtdk.records.json import PlainRecord
from sqrtdk.show.table import Shown, Table, count, name_layer
from sqrtdk.torch.internals import is_spread, local_part, storage_address
from sqrtdk.torch.training.distributed import agree, largest_of_ranks
from sqrtdk.torch.training.mesh import Ranks, add_bits, take_shard
from sqrtdk.torch.training.optimiser_copies import check_optimisers, find_copies
from sqrtdk.torch.watch.modules import name_modules
from sqrtdk.torch.watch.recognise.projections import Columns, HeadParts, Stored
from sqrtdk.torch.watch.seen import Seen
from sqrtdk.wording.numbers import write_number

By = Literal["maximum", "spread"]


@dataclass(frozen=True)
class Shrunk(PlainRecord):
    """Factor on a head's part of one parameter; `side` is "q" or "k"."""

    parameter: str
    side: str
    factor: float


@dataclass(frozen=True)
class ClippedHead(PlainRecord):
    """Record of one clipped head.

    Attributes:
        layer, head: module path and head number.
        before: the largest score of the head; with `by="spread"`, its distance above the mean.
        gamma: threshold / before.
        group_maximum: the largest score among the heads that share the key; None if the head has its own key.
        parameters: the parameters that were multiplied, with their factors.
    """

    layer: str
    head: int
    before: float
    gamma: float
    group_maximum: float | None
    parameters: tuple[Shrunk, ...]


@dataclass(frozen=True, repr=False)
class Clipping(Shown, PlainRecord):
    """Result of `qk_clip_`: the heads that were clipped; empty if no score passed the threshold.

    `unattributed` names layers whose attention was seen but not understood, so that their scores are unknown.
    `by` is the rule. `passed_over` counts heads without a score above 0 whose spread exceeds the threshold.
    """

    threshold: float
    heads: tuple[ClippedHead, ...]
    of_heads: int
    unattributed: tuple[str, ...] = ()
    by: By = "maximum"
    passed_over: int = 0

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[ClippedHead]:
        return iter(self.heads)

    def _table(self) -> Table:
        lines = [
            (
                name_layer(head.layer),
                str(head.head),
                write_number(head.before),
                write_number(head.gamma),
                ", ".join(f"{one.parameter} ({one.side}) × {write_number(one.factor)}" for one in head.parameters),
            )
            for head in self.heads
        ]
        above = " above the mean" if self.by == "spread" else ""
        title = (
            f"clipped {len(lines)} of {count(self.of_heads, 'head')} to a largest score of {self.threshold:g}{above}"
        )
        if self.unattributed:
            title += f"; attention that was not understood stays as it is, in {', '.join(self.unattributed)}"
        return Table(title, ("layer", "head", "largest score", "γ", "multiplied"), lines, left=1)


def qk_clip_(
    model: nn.Module,
    seen: Seen,
    *,
    threshold: float = 100.0,
    by: By = "maximum",
    optimiser: Any = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> Clipping:
    """Shrink, in place, the q and k projections of every head whose largest score passed a threshold.

    With γ = threshold / score_max, a head with its own key gets √γ on its rows of W_q and W_k. A head that shares its
    key (GQA, keys of another layer) gets γ on W_q alone. Biases are shrunk with their weights. A query and key in parts
    (MLA) follow the same rule part by part: √γ on both sides if the head owns the key part, γ on the rotated query
    part, whose key all heads share. Source: Kimi K2 technical report, 2025, §2.1.

    The published rule uses the largest score. It clips nothing if all scores are below 0, although softmax depends only
    on differences. `by="spread"` uses the largest score above the mean of the scores instead. A warning names the
    number of heads that the published rule leaves alone although their spread exceeds the threshold.

    Call this after the optimiser's step, with a watch of that step's forward passes, all micro-batches in one watch.
    The watch finds the parameters of each head numerically, by columns whose lengths match those of the head's vectors.
    A module that is called several times in a forward pass is clipped once, by the largest score of all calls. Tied
    weights are multiplied once, by the smallest factor.

    If torch.distributed is initialised, the maximum is taken over the ranks of `group` (None: all) or `mesh` that see
    other rows of the same heads. Every rank must call.

    Args:
        model: the model that was watched.
        seen: the result of `watch(model)`.
        threshold: the largest score that is left unchanged, above 0.
        by: "maximum", the published rule, or "spread".
        optimiser: the optimiser that trains the model, or a list of several. If it keeps copies of the weights, such as
            float32 copies of bfloat16 weights, the copies are clipped too; its next step would undo the clip otherwise.
        group: the ranks that share the weights.
        mesh: the mesh that the model is spread over, with named dimensions, as for `all_reduce`.

    Returns:
        The clipped heads: layer, head, largest score before, γ, parameters and factors.

    Raises:
        InvalidValueError: with the reason, and without any change, if the parameters of a head to clip are unknown; if
            its q or k passes a norm, which would undo the clip; if `seen` has no attention; if scores are not
            finite; if the optimiser holds neither a parameter to clip nor a copy of it that can be found.

    >>> from sqrtdk.torch import watch
    >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with torch.no_grad(), watch(attention) as seen:
    ...     _ = attention(*[torch.eye(8)[None]] * 3)
    >>> qk_clip_(attention, seen, threshold=100.0)
    clipped 0 of 2 heads to a largest score of 100
    """
    _check(model, seen, threshold, by)
    optimisers = check_optimisers(optimiser)
    largest: dict[str, Any] = {}
    spreads: dict[str, Any] = {}
    reasons: list[str] = []
    for layer, summary in seen.layers.items():
        # All calls of a module share one clip.
        path = seen.paths[layer]
        for known, scores in ((largest, summary["score_max"].largest), (spreads, spread_of_scores(summary))):
            known[path] = np.maximum(known[path], scores) if path in known else scores
        if count_non_finite(summary).any():
            reasons.append(f"{layer or 'the model'} has scores that are NaN or infinite")
    heads = sum(map(len, largest.values()))
    if not largest:
        missed = dict.fromkeys(f"; {name_layer(one.layer)}: {one.reason}" for one in seen.unattributed)
        reasons.append(f"no attention was understood{''.join(missed)}")
    ranks = Ranks.of(group, mesh, model) if dist.is_available() and dist.is_initialized() else None
    parameters = _Parameters(model, seen)
    told = {path: _tell_adapters(model, path, seen.heads_of(path)) for path in largest}
    elsewhere: set[_Bits] = set()
    if ranks is not None:
        largest, spreads = largest_of_ranks(largest, ranks), largest_of_ranks(spreads, ranks)
        elsewhere = _keys_of_others(told, parameters, ranks)
    planned: list[ClippedHead] = []
    changes: list[_Change] = []
    if not reasons:
        try:
            judged = spreads if by == "spread" else largest
            planned, factors = _plan(parameters, told, judged, threshold, elsewhere)
            changes = _prepare(parameters, factors, optimisers)
        except InvalidValueError as error:
            reasons.append(str(error))
    if ranks is not None:
        reasons = agree(reasons, ranks)
    if reasons:
        raise InvalidValueError(f"nothing was clipped: {'; '.join(dict.fromkeys(reasons))}")
    with torch.no_grad():
        for change in changes:
            change.apply()
    unattributed = dict.fromkeys(name_layer(missed.layer) for missed in seen.unattributed)
    passed_over = 0
    if by == "maximum":
        passed_over = sum(int(((spreads[path] > threshold) & (largest[path] <= 0)).sum()) for path in largest)
    if passed_over:
        warn(
            f"{count(passed_over, 'head')} of {heads} {'has' if passed_over == 1 else 'have'} scores more than "
            f'{threshold:g} above their mean, none of them above 0; by="spread" clips such heads'
        )
    return Clipping(float(threshold), tuple(planned), heads, tuple(unattributed), by, passed_over)


def check_rule(argument: str, by: Any) -> By:
    """Return the name of a rule; raise for an unknown name and name the argument."""
    if by not in ("maximum", "spread"):
        raise unknown_name("rule of clipping", str(by), ["maximum", "spread"], argument)
    return by  # type: ignore[no-any-return]


def _tell_adapters(model: nn.Module, path: str, heads: list[HeadParts] | str) -> list[HeadParts] | str:
    """Return the parts of a layer's heads, or the reason why they are unknown. LoRA takes precedence as a reason."""
    layer = next((module for module, name in name_modules(model).items() if name == path), None)
    if not isinstance(heads, str) or layer is None:
        return heads
    adapted = [name for name, module in layer.named_modules() if hasattr(module, "lora_A")]
    return f"LoRA on {', '.join(adapted)}; clip a model into which it is merged" if adapted else heads


def _check(model: Any, seen: Any, threshold: Any, by: Any) -> None:
    check_rule("by", by)
    if not isinstance(model, nn.Module):
        raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(seen, Seen):
        raise InvalidTypeError("seen", f"must be what watch(model) gives, got {type(seen).__name__}")
    checks.number("threshold", threshold, above=0.0)


class _Parameter(NamedTuple):
    """Parameter and its name; `is_gathered` if products see the parameter whole and this process keeps a shard."""

    name: str
    parameter: Tensor
    is_gathered: bool = False


class _Parameters:
    """Parameters by the storage that products saw, named like layers; tied ones get the first name."""

    def __init__(self, model: nn.Module, seen: Seen) -> None:
        named = {
            f"{path}.{name}".removeprefix("."): parameter
            for module, path in reversed(name_modules(model).items())
            for name, parameter in module.named_parameters(recurse=False)
        }
        # Several parameters may be views of one storage, such as the buckets of ZeroRedundancyOptimizer.
        self._by_place: dict[int, dict[int, _Parameter]] = {}
        for name, parameter in named.items():
            local = local_part(parameter)
            if address := storage_address(local):
                own = self._by_place.setdefault(address, {})
                own[int(local.storage_offset())] = _Parameter(name, parameter)
        for address, name in seen.gathered.items():
            if name in named and is_spread(named[name]):
                self._by_place[address] = {0: _Parameter(name, named[name], True)}

    def find(self, stored: Stored) -> _Parameter | None:
        """Return the parameter that a product saw: the last one that begins at or before the product's tensor."""
        own = self._by_place.get(stored.address, {})
        begin = max((offset for offset in own if offset <= stored.offset), default=None)
        return own[begin] if begin is not None else None


# The layer, and the sum over the bits of a key's columns.
_Bits = tuple[str, tuple[int, ...]]


def _keys_of_others(told: _Told, parameters: _Parameters, ranks: Ranks) -> set[_Bits]:
    """Return the keys that queries on other shards use: a group's key is copied if there are fewer keys than shards."""
    heads_here = [(path, parts) for path, heads in told.items() if not isinstance(heads, str) for parts in heads]
    own = {
        (path, _add_bits(query, parameters), _add_bits(key, parameters))
        for path, parts in heads_here
        for query, key in zip(parts.queries, parts.keys, strict=True)
    }
    place = ranks.place
    others = [
        heads
        for where, heads in ranks.gather((place, own))
        if (where.stage, where.part) == (place.stage, place.part) and where.shard != place.shard
    ]
    return {(path, key) for heads in others for path, _, key in heads - own}


def _add_bits(columns: Columns, parameters: _Parameters) -> tuple[int, ...]:
    """Return a sum over the bits of a key's columns; for a shard, the sum over all of it and the column numbers."""
    stored = columns.projection.weight
    known = parameters.find(stored)
    if known is None:
        return ()
    local = local_part(known.parameter).detach()
    if known.is_gathered:
        return (add_bits(local), columns.start, columns.step, columns.width)
    return (add_bits(local.as_strided(stored.shape, stored.strides, stored.offset)[:, columns.slice]),)


_Told = dict[str, list[HeadParts] | str]


def _plan(
    parameters: _Parameters, by_layer: _Told, largest: dict[str, Any], threshold: float, elsewhere: set[_Bits]
) -> tuple[list[ClippedHead], dict[Stored, Tensor]]:
    """Return the heads to clip, and a factor for every column of every parameter that changes."""
    above = {path: [head for head, score in enumerate(scores) if score > threshold] for path, scores in largest.items()}
    if not any(above.values()):
        return [], {}
    told = {path: heads for path, heads in by_layer.items() if not isinstance(heads, str)}
    reasons = [
        f"{path or 'the model'}: {by_layer.get(path, 'it was not seen')}"
        for path in above
        if above[path] and path not in told
    ]
    if reasons:
        raise InvalidValueError("; ".join(reasons))
    # Several heads of a group, or of several layers, may share a key.
    users: dict[Any, dict[tuple[str, int], float]] = {}
    for path, heads in told.items():
        for head, parts in enumerate(heads):
            for columns in parts.keys:
                users.setdefault(columns.key, {})[path, head] = float(largest[path][head])
                if elsewhere and (path, _add_bits(columns, parameters)) in elsewhere:
                    users[columns.key][path, -1] = -math.inf
    planned, factors = [], _Factors(parameters)
    for path, heads_above in above.items():
        for head in heads_above:
            before = float(largest[path][head])
            gamma = threshold / before
            parts = told[path][head]
            shrunk = list(_shrink(parts, gamma, users, factors, path))
            groups = [users[columns.key].values() for columns in parts.keys if len(users[columns.key]) > 1]
            group_maximum = max((max(scores) for scores in groups), default=None)
            planned.append(ClippedHead(path, head, before, gamma, group_maximum, tuple(dict.fromkeys(shrunk))))
    return planned, factors.by_columns


class _Factors:
    """Factor for every column of the parameters that change; the smallest applies if several are requested."""

    def __init__(self, parameters: _Parameters) -> None:
        self._parameters = parameters
        self.by_columns: dict[Stored, Tensor] = {}

    def ask(self, columns: Columns, factor: float, path: str) -> list[str]:
        """Request a factor on columns of a weight and of its bias; return the names of both."""
        names = []
        for stored in (columns.projection.weight, columns.projection.bias):
            if stored is None:
                continue
            known = self._parameters.find(stored)
            if known is None or not (
                known.is_gathered or _count_entries(local_part(known.parameter)) == stored.entries
            ):
                raise InvalidValueError(
                    f"{path or 'the model'}: a parameter that was seen is not among those of model any more"
                )
            vector = self.by_columns.setdefault(stored, torch.ones(stored.shape[-1], dtype=torch.float64))
            vector[columns.slice] = vector[columns.slice].clamp(max=factor)
            names.append(known.name)
        return names


def _count_entries(tensor: Tensor) -> int:
    """Return the number of entries in the storage of a tensor."""
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())


def _shrink(parts: HeadParts, gamma: float, users: dict[Any, Any], factors: _Factors, path: str) -> Iterator[Shrunk]:
    """Yield the factors of one head: √γ on q and k if the head owns the key, γ on q if the key is shared."""
    for query, key in zip(parts.queries, parts.keys, strict=True):
        is_shared = len(users[key.key]) > 1
        own = gamma if is_shared else math.sqrt(gamma)
        sides = [("q", query)] if is_shared else [("q", query), ("k", key)]
        for side, columns in sides:
            for name in factors.ask(columns, own, path):
                yield Shrunk(name, side, own)


class _Change(NamedTuple):
    """Factors for the local part of a parameter, of its shape, and the optimiser's copies of it."""

    local: Tensor
    factors: Tensor
    copies: list[Tensor]

    def apply(self) -> None:
        for tensor in self.copies or [self.local]:
            tensor.mul_(self.factors.to(tensor.device, tensor.dtype))
        if self.copies:  # the next step rounds the copy, so the parameter is rounded from it now
            self.local.copy_(self.copies[0])


def _prepare(parameters: _Parameters, factors: dict[Stored, Tensor], optimisers: list[Any]) -> list[_Change]:
    """Return the changes of all parameters. The factors of a parameter are written through the view that its product
    saw, so that transposed and fused parameters need no special case."""
    known = [one for one in map(parameters.find, factors) if one is not None]  # all: `_Factors.ask` found them
    copies = find_copies(optimisers, [(one.name, one.parameter) for one in known])
    changes = []
    for (stored, vector), (name, parameter, is_gathered), own in zip(factors.items(), known, copies, strict=True):
        local = local_part(parameter).detach()
        whole = torch.ones(stored.entries, dtype=torch.float64)
        whole.as_strided(stored.shape, stored.strides, stored.offset).mul_(vector)
        if is_gathered:
            shard = take_shard(whole, parameter)
            if shard is None:
                raise InvalidValueError(f"{name} is sharded in a way that is not followed")
        else:
            shard = whole.as_strided(local.shape, local.stride(), local.storage_offset())
        changes.append(_Change(local, shard, own))
    return changes
