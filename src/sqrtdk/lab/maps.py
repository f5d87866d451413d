"""Recorder of attention maps: the same example at the same steps in every run of a task, while the run trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sqrtdk.lab.tasks import Batch, Task
from sqrtdk.lab.transformer import Transformer
from sqrtdk.records.maps import list_steps, pack
from sqrtdk.torch import attention

__all__ = ["MapRecorder"]

_MOST_CELLS = 640  # of a map, so that the maps of a run take some 40 kB at most


class MapRecorder:
    """Maps of the last layer's attention on the first held-out sequence, as many of its last queries as have room.

    The last layer reads what the answer is made from. Its heads are averaged, so that none is chosen after the fact.
    A sequence of more than 640 tokens has no maps. The forward passes of their own change no bit of the training.

    Args:
        task: what is trained.
        held_out: its held-out data.
        total: updates of the run.
    """

    def __init__(self, task: Task, held_out: Batch, total: int) -> None:
        tokens = held_out.tokens[0]
        queries = min(task.answers, _MOST_CELLS // len(tokens))
        self._tokens = torch.from_numpy(tokens[None])
        self._due = frozenset(list_steps(total)) if queries else frozenset()
        self._first = len(tokens) - queries
        self._about = {
            "tokens": task.write(tokens),
            "first": self._first,
            "right": task.find_answers(tokens)[-queries:] if queries else [],
            "chance_loss": task.chance_loss,
        }
        self._maps: dict[int, str] = {}

    @property
    def content(self) -> dict[str, Any]:
        """Return what is recorded so far; nothing before the first map."""
        if not self._maps:
            return {}
        return {**self._about, "steps": list(self._maps), "weights": list(self._maps.values())}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Go on from the content at a checkpoint."""
        self._maps = dict(zip(content.get("steps", ()), content.get("weights", ()), strict=True))

    def record(self, step: int, model: Transformer) -> None:
        """Record a map if one is due after so many updates."""
        if step not in self._due:
            return
        with torch.no_grad():
            last = model(self._tokens, True)[1][-1]
            result = attention(
                last.query, last.key, last.key, scale=last.scale, causal=True, statistics=False, weights=True
            )
        assert isinstance(result.weights, torch.Tensor)
        self._maps[step] = pack(result.weights[0, :, self._first :].double().mean(dim=0).numpy())
