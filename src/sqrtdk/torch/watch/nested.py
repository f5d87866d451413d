"""Attention of sequences of several lengths, packed as a nested tensor: one call for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.torch.internals import without_modes
from sqrtdk.torch.watch.calls import SeenCall, place_queries
from sqrtdk.torch.watch.parts import Candidate
from sqrtdk.torch.watch.scores import Factors

if TYPE_CHECKING:
    from sqrtdk.torch.watch.recognise import Recogniser


def see_nested(watcher: Recogniser, name: str, args: Any, result: Tensor) -> bool:
    """Whether an operation on nested tensors was part of attention: torch's own multiplies, softens and multiplies."""
    first = watcher.memory.look_up(args[0]) if isinstance(args[0], Tensor) else None
    if name == "aten::matmul":
        if first is not None and first.candidates:
            watcher.confirm(*first.candidates)
            watcher.root(result, [])
        else:
            watcher.root(result, [], is_projection=False)
            q, k = (watcher.side_of(x) for x in args[:2])
            watcher.memory.note(result, factors=Factors(q, k, watcher.locate()))
        return True
    if name in ("aten::_safe_softmax", "aten::_softmax"):
        factors = None if first is None else first.factors
        watcher.memory.write(result, candidates=_read(watcher, factors, name == "aten::_safe_softmax"))
        return True
    return False


def _read(watcher: Recogniser, factors: Factors | None, is_own: bool) -> tuple[Candidate, ...]:
    """A candidate for each sequence; one that is not understood where the model wrote attention itself."""
    if factors is None or not is_own:
        reason = "its scores are nested tensors, and the model computes their softmax in code of its own"
        return (Candidate(watcher.locate(), 0, 0, reason=reason),)
    q, k, candidates = factors.q, factors.k, []
    with without_modes(), torch.no_grad():
        for q_HLD, k_HDS in zip(q.vectors.unbind(), k.vectors.unbind(), strict=True):
            call = SeenCall(
                q_HLD[None],
                k_HDS.transpose(-1, -2)[None],
                1.0,
                how="math path",
                folded=q.folded * k.folded,
                q_lineage=q.lineage,
                k_lineage=k.lineage,
            )
            candidates.append(watcher.see_call(place_queries(call)))
    return tuple(candidates)
