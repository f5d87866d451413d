"""Recognises attention on nested tensors, which pack sequences of different lengths: one call per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sqrtdk.torch.internals import unseen
from sqrtdk.torch.watch.recognise.calls import SeenCall, place_queries
from sqrtdk.torch.watch.recognise.parts import Candidate
from sqrtdk.torch.watch.recognise.scores import Factors

if TYPE_CHECKING:
    from sqrtdk.torch.watch.recognise.recogniser import Recogniser


def see_nested(watcher: Recogniser, name: str, args: Any, result: Tensor) -> bool:
    """Return whether a nested-tensor operation was part of attention: a product, a softmax, or a second product."""
    first = watcher.memory.look_up(args[0]) if isinstance(args[0], Tensor) else None
    if name == "aten::matmul":
        if first is not None and first.candidates:
            watcher.confirm(*first.candidates)
            watcher.root(result, None)
        else:
            watcher.root(result, None, is_projection=False)
            q, k = (watcher.side_of(x) for x in args[:2])
            watcher.memory.note(result, factors=Factors(q, k, watcher.locate()))
        return True
    if name in ("aten::_safe_softmax", "aten::_softmax"):
        factors = None if first is None else first.factors
        watcher.memory.write(result, candidates=_read(watcher, factors, name == "aten::_safe_softmax"))
        return True
    return False


def _read(watcher: Recogniser, factors: Factors | None, is_own: bool) -> tuple[Candidate, ...]:
    """Return a candidate per sequence, or one that is not understood if the model computes attention itself."""
    if factors is None or not is_own:
        reason = "its scores are nested tensors, and the model computes their softmax in code of its own"
        return (Candidate(watcher.locate(), 0, 0, reason=reason),)
    q, k, candidates = factors.q, factors.k, []
    with unseen():
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
