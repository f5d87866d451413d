"""What all ranks of a torch.distributed process group have seen, and agree upon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.moments import BINS, Array, Histogram, Moments
from sqrtdk.summary import HeadSummary, MaxKeys


def all_reduce(summary: HeadSummary, group: dist.ProcessGroup | None = None) -> HeadSummary:
    """The summary of all ranks of a process group (None: all) together, the same bits on every rank.

    Every rank of the group must call it, as often as the others; ranks without rows as well. It takes three
    collectives: the numbers of heads, so that ranks that disagree raise instead of hanging; the integers, summed
    (gathered histograms would grow with the number of ranks); the few floats, gathered and merged in rank order.

    Raises:
        InvalidTypeError: if summary is none.
        InvalidValueError: on every rank, if the ranks do not have the same number of heads, or if torch.distributed is
            not initialised.
    """
    if not isinstance(summary, HeadSummary):
        raise InvalidTypeError("summary", f"must be a HeadSummary, got {type(summary).__name__}")
    device = _device_of(group)
    heads = _gather(np.array([summary.heads]), device, group).ravel()
    if (heads != heads[0]).any():
        raise InvalidValueError(f"every rank must bring a summary of as many heads, got {heads.tolist()} by rank")
    integers = _sum(_pack_integers(summary), device, group)
    floats = _gather(_pack_floats(summary), device, group)
    rows_seen, rows_in_all, sequences, offsets, left_out, histograms = np.split(integers, _columns(summary), axis=1)
    keys = MaxKeys(offsets, reduce(np.add, floats[:, -1]), sequences[:, 0])
    moments = _merge(floats[:, :-1], left_out.T, histograms)
    return HeadSummary(moments, rows_seen[:, 0], rows_in_all[:, 0], keys)


def same_layers(layers: Iterable[str], group: dist.ProcessGroup | None = None) -> list[str]:
    """The layers that every rank of a group has, in this rank's order; ranks may have called different ones."""
    own = list(layers)
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, own, group=group)
    # In the order of the first rank, so that all ranks reduce in one order.
    return [path for path in ranks[0] if all(path in others for others in ranks)]


def largest_of_ranks(values: Mapping[str, Array], group: dist.ProcessGroup | None = None) -> dict[str, Array]:
    """The largest entries over all ranks of arrays `[H]` by layer; layers that any rank has."""
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, dict(values), group=group)
    return {
        path: reduce(np.maximum, [others[path] for others in ranks if path in others])
        for others in ranks
        for path in others
    }


def agree(reasons: list[str], group: dist.ProcessGroup | None = None) -> list[str]:
    """The reasons of all ranks not to do something: one that cannot must keep the others from it."""
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, reasons, group=group)
    return [reason for of_rank in ranks for reason in of_rank]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must lie for the group's collectives; raises if there is no group that this process is in."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidValueError(
            "all_reduce needs a process group, but torch.distributed is not initialised; "
            "call torch.distributed.init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise InvalidValueError("group", "must contain the calling process")
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _pack_integers(summary: HeadSummary) -> Array:
    """`[H, C]`: what `_integers` names, side by side."""
    return np.concatenate(_integers(summary), axis=1).astype(np.int64)


def _columns(summary: HeadSummary) -> Array:
    """Where `_pack_integers` begins each part but the first."""
    return np.cumsum([part.shape[1] for part in _integers(summary)])[:-1]


def _integers(summary: HeadSummary) -> list[Array]:
    """Rows seen, rows in all, sequences, offsets, then the rows left out and the histogram of every statistic."""
    keys, moments = summary.max_keys, summary.by_statistic
    histograms = np.concatenate(list(moments.histogram), axis=1)
    columns = (summary.rows_seen, summary.rows_in_all, keys.sequences)
    return [*(column[:, None] for column in columns), keys.offsets, moments.left_out.T, histograms]


def _pack_floats(summary: HeadSummary) -> Array:
    """`[C, H]`: count (exact in float64 to 2⁵³), mean, sum of squares, least and largest of every statistic, in this
    order; then the sum of the commonest keys' shares."""
    own = summary.by_statistic
    return np.concatenate([own.count, own.mean, own.m2, own.least, own.largest, summary.max_keys.share_sum[None]])


def _merge(ranks_RCH: Array, left_out_SH: Array, histograms: Array) -> Moments:
    """Merge the floats of the ranks in their order and set the integers, which have been summed already."""
    statistics, heads = left_out_SH.shape
    nothing = np.zeros((statistics, heads), np.int64)
    empty = Histogram.of_table(np.zeros((statistics * heads, BINS), np.int64))
    floats = reduce(
        Moments.merge,
        (
            Moments(count.astype(np.int64), nothing, mean, m2, least, largest, empty)
            for count, mean, m2, least, largest in ranks_RCH.reshape(-1, 5, statistics, heads)
        ),
    )
    histogram = np.swapaxes(histograms.reshape(heads, statistics, BINS), 0, 1)
    return replace(floats, left_out=left_out_SH, bins=Histogram.of_table(histogram))


def _sum(values: Array, device: torch.device, group: dist.ProcessGroup | None) -> Array:
    tensor = torch.from_numpy(values).to(device)
    dist.all_reduce(tensor, group=group)
    return np.asarray(tensor.cpu().numpy())


def _gather(values: Array, device: torch.device, group: dist.ProcessGroup | None) -> Array:
    """The arrays of all ranks, stacked `[R, ...]` in rank order."""
    own = torch.from_numpy(values).to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return np.stack([tensor.cpu().numpy() for tensor in every])
