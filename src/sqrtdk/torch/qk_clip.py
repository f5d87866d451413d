"""QK-Clip: shrinks the projections of heads whose scores passed a threshold; or changes nothing and says why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sqrtdk.diagnosis import count_non_finite
from sqrtdk.display import Shown, Table, count, name_layer
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.torch.distributed import agree, largest_of_ranks
from sqrtdk.torch.internals import storage_address
from sqrtdk.torch.watch.modules import name_modules
from sqrtdk.torch.watch.projections import Columns, HeadParts, Stored
from sqrtdk.torch.watch.seen import Seen


class Shrunk(NamedTuple):
    """A factor on a head's part of one parameter; `side` is "q" or "k"."""

    parameter: str
    side: str
    factor: float


@dataclass(frozen=True)
class ClippedHead:
    """One head that was clipped.

    Attributes:
        layer, head: module path and number.
        before: its largest score.
        gamma: threshold / before.
        group_maximum: the largest score among the heads that share its key; None if it has one of its own.
        parameters: what was multiplied by which factor.
    """

    layer: str
    head: int
    before: float
    gamma: float
    group_maximum: float | None
    parameters: tuple[Shrunk, ...]

    def as_json(self) -> dict[str, Any]:
        """The record as numbers, texts and null."""
        return {**asdict(self), "parameters": [shrunk._asdict() for shrunk in self.parameters]}


@dataclass(frozen=True, repr=False)
class Clipping(Shown):
    """What `qk_clip_` did: the heads it clipped, none if no score passed the threshold.

    `unattributed` names the layers whose attention was seen and not understood: nothing is known of their scores.
    """

    threshold: float
    heads: tuple[ClippedHead, ...]
    of_heads: int
    unattributed: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[ClippedHead]:
        return iter(self.heads)

    def as_json(self) -> dict[str, Any]:
        """The record as numbers, texts and null."""
        heads = [head.as_json() for head in self.heads]
        numbers = {"threshold": self.threshold, "of_heads": self.of_heads}
        return {**numbers, "heads": heads, "unattributed": list(self.unattributed)}

    def _table(self) -> Table:
        lines = [
            (
                name_layer(head.layer),
                str(head.head),
                f"{head.before:.4g}",
                f"{head.gamma:.4g}",
                ", ".join(f"{one.parameter} ({one.side}) × {one.factor:.4g}" for one in head.parameters),
            )
            for head in self.heads
        ]
        title = f"clipped {len(lines)} of {count(self.of_heads, 'head')} to a largest score of {self.threshold:g}"
        if self.unattributed:
            title += f"; attention that was not understood stays as it is, in {', '.join(self.unattributed)}"
        return Table(title, ("layer", "head", "largest score", "γ", "multiplied"), lines, left=1)


def qk_clip_(
    model: nn.Module, seen: Seen, *, threshold: float = 100.0, group: dist.ProcessGroup | None = None
) -> Clipping:
    """Shrink the projections of q and k of every head whose largest score passed a threshold; in place.

    With γ = threshold / score_max, a head with a key of its own gets √γ on the rows of W_q and of W_k that make it; one
    that shares its key (GQA, keys of another layer) gets γ on W_q alone; biases with them. A query and key in parts
    (MLA) follow the same rule part by part: √γ on both where the key's part is the head's own, γ on the query's rotated
    part, whose key all heads share. Largest scores of 0 and less clip nothing. Kimi K2 technical report, 2025, §2.1.

    Call it after the optimiser's step with what was seen of that step's forward passes, all micro-batches in one watch.
    Which parameters make a head was found out by the watch, by numbers: columns whose lengths are those of the head's
    vectors. A module that is called several times in a forward pass is clipped once, by its largest score of all calls;
    weights that are tied are multiplied once, by the smallest factor.

    With torch.distributed initialised the maximum over the ranks of `group` (None: all) counts; every rank must call.

    Args:
        model: the model that was watched.
        seen: what `watch(model)` gave; neither `sample_rows` nor `every`: a sampled maximum is none.
        threshold: the largest score that is left alone, above 0.
        group: the ranks that share the weights.

    Returns:
        What was clipped: layer, head, largest score before, γ, parameters and factors.

    Raises:
        InvalidValueError: with the reason, and nothing is changed at all, if a head would have to be clipped whose
            parameters cannot be told or whose q or k passes a norm, which would undo it; if rows or calls are missing
            in `seen`, or all attention; if scores are not finite.

    >>> from sqrtdk.torch import watch
    >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with torch.no_grad(), watch(attention) as seen:
    ...     _ = attention(*[torch.eye(8)[None]] * 3)
    >>> qk_clip_(attention, seen, threshold=100.0)
    clipped 0 of 2 heads to a largest score of 100
    """
    _check(model, seen, threshold)
    largest: dict[str, Any] = {}
    reasons: list[str] = []
    for layer, summary in seen.layers.items():
        # One clip for all calls of a module.
        path, scores = seen.paths[layer], summary["score_max"].largest
        largest[path] = np.maximum(largest[path], scores) if path in largest else scores
        if count_non_finite(summary).any():
            reasons.append(f"{layer or 'the model'} has scores that are NaN or infinite")
    heads = sum(map(len, largest.values()))
    if not largest:
        missed = dict.fromkeys(f"; {name_layer(one.layer)}: {one.reason}" for one in seen.unattributed)
        reasons.append(f"no attention was understood{''.join(missed)}")
    if dist.is_available() and dist.is_initialized():
        largest = largest_of_ranks(largest, group)
    planned: list[ClippedHead] = []
    factors: dict[Stored, Tensor] = {}
    if not reasons:
        try:
            planned, factors = _plan(model, seen, largest, threshold)
        except InvalidValueError as error:
            reasons.append(str(error))
    if dist.is_available() and dist.is_initialized():
        reasons = agree(reasons, group)
    if reasons:
        raise InvalidValueError(f"nothing was clipped: {'; '.join(dict.fromkeys(reasons))}")
    _apply(model, factors)
    unattributed = dict.fromkeys(name_layer(missed.layer) for missed in seen.unattributed)
    return Clipping(float(threshold), tuple(planned), heads, tuple(unattributed))


def _check(model: Any, seen: Any, threshold: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(seen, Seen):
        raise InvalidTypeError("seen", f"must be what watch(model) gives, got {type(seen).__name__}")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise InvalidTypeError("threshold", f"must be a number, got {threshold!r}")
    if not 0 < threshold < math.inf:
        raise InvalidValueError("threshold", f"must be positive and finite, got {threshold}")
    if any(summary.is_sample for summary in seen.layers.values()):
        raise InvalidValueError(
            "seen", "must have all rows, for the largest score of a sample is none; watch without sample_rows"
        )
    if seen.passed_over:
        raise InvalidValueError(
            "seen", f"must have all calls, but {seen.passed_over} were passed over; watch without every"
        )


def _plan(
    model: nn.Module, seen: Seen, largest: dict[str, Any], threshold: float
) -> tuple[list[ClippedHead], dict[Stored, Tensor]]:
    """The heads to clip, and a factor for every column of every parameter that changes."""
    above = {path: [head for head, score in enumerate(scores) if score > threshold] for path, scores in largest.items()}
    named = {storage_address(parameter): (name, parameter) for name, parameter in _name_parameters(model)}
    if not any(above.values()):
        return [], {}
    by_layer = {path: seen.heads_of(path) for path in largest}
    told = {path: heads for path, heads in by_layer.items() if not isinstance(heads, str)}
    reasons = [f"{path or 'the model'}: {by_layer[path]}" for path in above if above[path] and path not in told]
    if reasons:
        raise InvalidValueError("; ".join(reasons))
    # A key may serve several heads, of a group or of several layers.
    users: dict[Any, dict[tuple[str, int], float]] = {}
    for path, heads in told.items():
        for head, parts in enumerate(heads):
            for columns in parts.keys:
                users.setdefault(columns.key, {})[path, head] = float(largest[path][head])
    planned, factors = [], _Factors(named)
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


def _name_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the paths that layers have, without the names of wrappers; the first name of tied ones last."""
    for module, path in reversed(name_modules(model).items()):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}".removeprefix("."), parameter


class _Factors:
    """A factor for every column of the parameters that change; the smallest holds where several are asked for."""

    def __init__(self, named: dict[int, tuple[str, nn.Parameter]]) -> None:
        self._named = named
        self.by_columns: dict[Stored, Tensor] = {}

    def ask(self, columns: Columns, factor: float, path: str) -> list[str]:
        """Ask for a factor on columns of a weight, and of its bias; the names of both."""
        names = []
        for stored in (columns.projection.weight, columns.projection.bias):
            if stored is None:
                continue
            name, parameter = self._named.get(stored.address, ("", None))
            if parameter is None or parameter.untyped_storage().nbytes() // parameter.element_size() != stored.entries:
                raise InvalidValueError(
                    f"{path or 'the model'}: a parameter that was seen is not among those of model any more"
                )
            vector = self.by_columns.setdefault(stored, torch.ones(stored.shape[-1], dtype=torch.float64))
            vector[columns.slice] = vector[columns.slice].clamp(max=factor)
            names.append(name)
        return names


def _shrink(parts: HeadParts, gamma: float, users: dict[Any, Any], factors: _Factors, path: str) -> Iterator[Shrunk]:
    """The factors of one head: √γ on q and k where the key is its own, γ on q where it is shared."""
    for query, key in zip(parts.queries, parts.keys, strict=True):
        is_shared = len(users[key.key]) > 1
        own = gamma if is_shared else math.sqrt(gamma)
        sides = [("q", query)] if is_shared else [("q", query), ("k", key)]
        for side, columns in sides:
            for name in factors.ask(columns, own, path):
                yield Shrunk(name, side, own)


def _apply(model: nn.Module, factors: dict[Stored, Tensor]) -> None:
    """Multiply; a view of each parameter as its product saw it, so that transposed and fused ones are alike."""
    by_address = {storage_address(parameter): parameter for parameter in model.parameters()}
    with torch.no_grad():
        for stored, vector in factors.items():
            parameter = by_address[stored.address].detach()
            shown = parameter.as_strided(stored.shape, stored.strides, stored.offset)
            shown.mul_(vector.to(parameter.device, parameter.dtype))
