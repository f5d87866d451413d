"""Combines the observations of all ranks of a torch.distributed process group or mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.show.table import name_layer
from sqrtdk.summary import SUMMARISED, HeadSummary, MaxKeys
from sqrtdk.summary.heads import FARTHEST
from sqrtdk.summary.moments import BINS, Array, Histogram, Moments
from sqrtdk.torch.training.mesh import Bits, Place, Ranks
from sqrtdk.torch.watch.score_sums import CauseSums

_STATISTICS = len(SUMMARISED)
# Integer columns: rows seen, rows in all, sequences, offsets, then left-out rows and histogram of each statistic.
_INTEGERS = np.cumsum([1, 1, 1, 2 * FARTHEST + 3, _STATISTICS, _STATISTICS * BINS])
_FLOATS = 5 * _STATISTICS + 1
_SUMS = len(CauseSums._fields)
# Number of heads whose integers are summed at once: 64 MB.
_AT_ONCE = 256


def all_reduce(
    summary: HeadSummary, group: dist.ProcessGroup | None = None, *, mesh: DeviceMesh | None = None
) -> HeadSummary:
    """Return the combined summary of all ranks of a process group (None: all) or mesh, bit-identical on every rank.

    Every rank must call this function equally often, including ranks without rows. Ranks of a group see different rows
    of the same heads, so their rows are added up. In a mesh, the name of each dimension says what differs along it.
    Along `dp`, `fsdp`, `cp`, … the rows differ. Along `tp`, … the heads differ and are joined in the order of the
    shards.

    The function takes three collectives. The first compares the ranks, so that a mismatch raises instead of hanging.
    The second sums the integers, because gathered histograms would grow with the number of ranks. The third gathers the
    few floats, which are merged in the order of the ranks.

    Raises:
        InvalidTypeError: if summary is not a HeadSummary, or mesh is not a DeviceMesh.
        InvalidValueError: on every rank, if ranks with the same heads report different numbers of heads; if
            torch.distributed is not initialised; if a dimension of the mesh has an unknown name.
    """
    if not isinstance(summary, HeadSummary):
        raise InvalidTypeError("summary", f"must be a HeadSummary, got {type(summary).__name__}")
    return unite({"": summary}, {}, Ranks.of(group, mesh))[0][""]


class Brought(NamedTuple):
    """Contribution of one rank: its place, the number of heads and the parameter bits of each layer, and its step."""

    place: Place
    heads: dict[str, int]
    bits: dict[str, Bits | None]
    step: int | None


class Layer(NamedTuple):
    """Layer of the whole model: its name, its first head among all heads, its number of heads, and the start per shard.

    `starts` leaves out shards that hold copies of the same heads.
    """

    name: str
    first: int
    heads: int
    starts: dict[int, int]


def unite(
    layers: Mapping[str, HeadSummary],
    sums: Mapping[str, CauseSums],
    ranks: Ranks,
    paths: Mapping[str, str] | None = None,
    step: int | None = None,
) -> tuple[dict[str, HeadSummary], dict[str, CauseSums]]:
    """Return the layers of all ranks and the sums that explain their score sizes, equal on every rank.

    Heads of shards are joined side by side and layers of stages one after another; rows of the same heads are added up.
    If two stages use the same name, the stage precedes the name. A layer that every shard holds whole counts once.

    Args:
        layers: summaries by layer name; a rank may have none.
        sums: sums for some of the layers.
        ranks: the ranks that take part; all of them must call.
        paths: module paths of layers whose name is not their path, such as repeated calls of one module.
        step: step of the observation, the same on every rank.

    Raises:
        InvalidValueError: on every rank, if ranks disagree about heads or steps, or hold different parameters without
            a mesh that explains the difference.
    """
    path_of = {name: (paths or {}).get(name, name) for name in layers}
    by_path = ranks.bits_of(path_of.values())
    bits = {name: by_path.get(path) for name, path in path_of.items()}
    own = Brought(ranks.place, {name: summary.heads for name, summary in layers.items()}, bits, step)
    brought: list[Brought] = ranks.gather(own)
    steps = [one.step for one in brought]
    if len(set(steps)) > 1:
        raise InvalidValueError(f"every rank's monitor must observe the same step, got {steps} by rank")
    whole = _lay_out(brought, ranks)
    all_summaries: dict[str, HeadSummary] = {}
    all_sums: dict[str, CauseSums] = {}
    for some in _batches(whole):
        first, last = whole[some[0]].first, whole[some[-1]].first + whole[some[-1]].heads
        integers, floats = _nothing(last - first)
        for key in some:
            stage, name = key
            start = whole[key].starts.get(ranks.place.shard)
            if stage == ranks.place.stage and name in layers and start is not None:
                at = slice(start - first, start - first + layers[name].heads)
                integers[at] = _pack_integers(layers[name])
                floats[:_FLOATS, at] = _pack_floats(layers[name])
                floats[_FLOATS:, at] = np.stack(sums[name]) if name in sums else 0.0
        integers = _sum(integers, ranks)
        of_ranks = _gather(floats, ranks)
        for key in some:
            layer = whole[key]
            at = slice(layer.first - first, layer.first - first + layer.heads)
            all_summaries[layer.name] = _read(integers[at], of_ranks[..., at])
            added = CauseSums(*reduce(np.add, of_ranks[:, _FLOATS:, at]))
            if added.queries.any():
                all_sums[layer.name] = added
    return all_summaries, all_sums


def _lay_out(brought: list[Brought], ranks: Ranks) -> dict[tuple[int, str], Layer]:
    """Return the layers of all stages in order, by stage and name.

    Without a mesh, the parameters of a layer are compared until all ranks have brought equal ones. A rank whose weights
    are damaged later still sees the same heads.
    """
    found = dict.fromkeys((one.place.stage, name) for one in brought for name in one.heads)
    used = [name for _, name in found]
    whole: dict[tuple[int, str], Layer] = {}
    first = 0
    for stage, name in found:
        there = [one for one in brought if one.place.stage == stage]
        holders = [one for one in there if name in one.heads]
        if not ranks.is_told and name not in ranks.compared:
            if len({bits.whole for one in holders if (bits := one.bits[name]) is not None}) > 1:
                raise InvalidValueError(
                    f"mesh must be given: the ranks hold different parameters of {name_layer(name)}, so that their "
                    "heads are not known to be the same"
                )
            if len(holders) == len(brought):
                ranks.compared.add(name)
        heads = _count_heads(name, there, holders)
        if _are_copies(name, holders):
            heads = {min(heads): heads[min(heads)]}
        starts = dict(zip(heads, first + np.cumsum([0, *heads.values()]), strict=False))
        shown = f"stage {stage}: {name}" if used.count(name) > 1 else name
        whole[stage, name] = Layer(shown, first, sum(heads.values()), starts)
        first += sum(heads.values())
    return whole


def _count_heads(name: str, there: list[Brought], holders: list[Brought]) -> dict[int, int]:
    """Return the number of heads per shard of a layer. Ranks that see other rows of a shard must agree on it."""
    heads: dict[int, int] = {}
    for one in holders:
        if heads.setdefault(one.place.shard, one.heads[name]) != one.heads[name]:
            numbers = [other.heads[name] for other in holders if other.place.shard == one.place.shard]
            raise InvalidValueError(f"every rank must bring a summary of as many heads, got {numbers} by rank")
    missing = {one.place.shard for one in there} - heads.keys()
    if missing:
        raise InvalidValueError(f"every shard of the heads must see {name_layer(name)}, got none by {sorted(missing)}")
    return dict(sorted(heads.items()))


def _are_copies(name: str, holders: list[Brought]) -> bool:
    """Return whether all shards hold the same parameters, and so the same heads."""
    by_part: dict[int, set[Any]] = {}
    for one in holders:
        bits = one.bits[name]
        by_part.setdefault(one.place.part, set()).add(one.place.shard if bits is None else ("bits", bits.here))
    return all(len(some) == 1 for some in by_part.values())


def _batches(whole: dict[Any, Layer]) -> Iterator[list[Any]]:
    """Yield batches of layer keys that are processed together, so that memory stays bounded."""
    some: list[Any] = []
    for key in whole:
        if some and whole[key].first + whole[key].heads - whole[some[0]].first > _AT_ONCE:
            yield some
            some = []
        some.append(key)
    if some:
        yield some


def largest_of_ranks(values: Mapping[str, Array], ranks: Ranks) -> dict[str, Array]:
    """Return the largest entries of arrays `[H]` by layer, over the ranks that see other rows of the same heads."""
    same = [others for place, others in ranks.gather((ranks.place, dict(values))) if place[:2] == ranks.place[:2]]
    return {
        path: reduce(np.maximum, [others[path] for others in same if path in others]) for one in same for path in one
    }


def agree(reasons: list[str], ranks: Ranks) -> list[str]:
    """Return the reasons of all ranks against an action, so that one rank can stop all of them."""
    return [reason for of_rank in ranks.gather(reasons) for reason in of_rank]


def _nothing(heads: int) -> tuple[Array, Array]:
    """Return the integers `[H, C]` and floats `[C, H]` of heads without rows."""
    floats = np.zeros((_FLOATS + _SUMS, heads))
    of_moments = floats[: 5 * _STATISTICS].reshape(5, _STATISTICS, heads)
    of_moments[1], of_moments[3], of_moments[4] = np.nan, np.inf, -np.inf
    return np.zeros((heads, _INTEGERS[-1]), np.int64), floats


def _pack_integers(summary: HeadSummary) -> Array:
    """Return the integers `[H, C]` of a summary, in the order of `_INTEGERS`."""
    keys, moments = summary.max_keys, summary.by_statistic
    columns = (summary.rows_seen, summary.rows_in_all, keys.sequences)
    histograms = np.concatenate(list(moments.histogram), axis=1)
    return np.concatenate([*(one[:, None] for one in columns), keys.offsets, moments.left_out.T, histograms], axis=1)


def _pack_floats(summary: HeadSummary) -> Array:
    """Return `[C, H]`: count (exact in float64 up to 2⁵³), mean, sum of squares, least and largest of every statistic,
    in this order, then the summed shares on the most attended key."""
    own = summary.by_statistic
    return np.concatenate([own.count, own.mean, own.m2, own.least, own.largest, summary.max_keys.share_sum[None]])


def _read(integers_HC: Array, floats_RCH: Array) -> HeadSummary:
    """Return a summary from summed integers and from the floats of the ranks, merged in rank order."""
    heads = len(integers_HC)
    rows_seen, rows_in_all, sequences, offsets, left_out, histograms = np.split(integers_HC, _INTEGERS[:-1], axis=1)
    nothing = np.zeros((_STATISTICS, heads), np.int64)
    empty = Histogram.of_table(np.zeros((_STATISTICS * heads, BINS), np.int64))
    merged = reduce(
        Moments.merge,
        (
            Moments(count.astype(np.int64), nothing, mean, m2, least, largest, empty)
            for count, mean, m2, least, largest in floats_RCH[:, : _FLOATS - 1].reshape(-1, 5, _STATISTICS, heads)
        ),
    )
    histogram = np.swapaxes(histograms.reshape(heads, _STATISTICS, BINS), 0, 1)
    moments = replace(merged, left_out=left_out.T, bins=Histogram.of_table(histogram))
    keys = MaxKeys(offsets, reduce(np.add, floats_RCH[:, _FLOATS - 1]), sequences[:, 0])
    return HeadSummary(moments, rows_seen[:, 0], rows_in_all[:, 0], keys)


def _sum(values: Array, ranks: Ranks) -> Array:
    tensor = torch.from_numpy(values).to(ranks.device)
    dist.all_reduce(tensor, group=ranks.group)
    return np.asarray(tensor.cpu().numpy())


def _gather(values: Array, ranks: Ranks) -> Array:
    """Return the arrays of all ranks, stacked `[R, ...]` in rank order."""
    own = torch.from_numpy(values).to(ranks.device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(ranks.group))]
    dist.all_gather(every, own, group=ranks.group)
    return np.stack([tensor.cpu().numpy() for tensor in every])
