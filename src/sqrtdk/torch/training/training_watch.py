"""Watch of one training step: observes calls in training mode with gradients, and the rows that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, unknown_name
from sqrtdk.torch.internals import count_changes
from sqrtdk.torch.watch.modules import Frame
from sqrtdk.torch.watch.padding import Padding
from sqrtdk.torch.watch.recognise.calls import SeenCall
from sqrtdk.torch.watch.session import Watch
from sqrtdk.torch.watch.uninvolved import recall_uninvolved

IGNORED_LABEL = -100
"""Label of tokens that have no part in the loss, in torch's cross-entropy and in Hugging Face models."""

Rows = Literal["labels"] | Callable[[Mapping[str, Any]], Tensor | None]
"""Choice of rows: by labels, or by a function of the model's arguments that returns a boolean mask `[B, L]`."""


def check_rows(rows: Any) -> Rows | None:
    """Return the argument `rows` of a monitor; raise if it is none."""
    if rows is None or callable(rows) or rows == "labels":
        return rows  # type: ignore[no-any-return]
    if isinstance(rows, str):
        raise unknown_name("rows", rows, ["labels"])
    raise InvalidTypeError("rows", f'must be None, "labels" or a function of the arguments, got {type(rows).__name__}')


class TrainingWatch(Watch):
    """Watch that observes only calls in training mode with gradients, and so neither evaluation nor generation.

    A failing call ends the watch, because a trainer that an exception ends does not notify the monitor.

    Args:
        model: the model that trains.
        step: number of the step, for warnings.
        rows: the rows to count, beside those that the attention mask leaves out anyway.
        is_paused: tells whether calls are to be ignored at the moment.
        say: function that warns once of a text, under a key.
    """

    def __init__(
        self,
        model: nn.Module,
        step: int,
        rows: Rows | None,
        is_paused: Callable[[], bool],
        say: Callable[[str, str], None],
    ) -> None:
        super().__init__(model, uninvolved=recall_uninvolved(model))
        self._step, self._rows = step, rows
        self._is_paused, self._say = is_paused, say
        self._versions: int | None = None
        # The outermost call that the chosen rows belong to, and the rows.
        self._chosen: tuple[int, Tensor | None] = (0, None)
        config = getattr(model, "config", None)
        self._has_encoder = bool(getattr(config, "is_encoder_decoder", False))

    def _begin_call(self) -> None:
        if not self._model.training or not torch.is_grad_enabled() or self._is_paused():
            return
        versions = sum(count_changes(parameter) for parameter in self._model.parameters() if parameter.requires_grad)
        if self._versions not in (None, versions):
            self._say(
                f"the weights changed between two calls of the model in step {self._step}; call monitor.step() after "
                "every optimiser.step(), or put calls that belong to no step into monitor.paused()",
                "changed weights",
            )
        self._versions = versions
        super()._begin_call()

    def _end_call(self, has_failed: bool) -> None:
        super()._end_call(has_failed)
        self._chosen = (0, None)
        if has_failed:
            self.__exit__()

    def _find_padding(self, call: SeenCall) -> tuple[Tensor | None, Padding]:
        """Return the mask of the tokens without the rows that were not chosen."""
        tokens, source = super()._find_padding(call)
        chosen = None if self._rows is None else self._choose_rows()
        if chosen is None or tuple(chosen.shape) != (call.shape[0], call.shape[2]):
            return tokens, source
        return (chosen if tokens is None else chosen & tokens.to(chosen.device)), "rows"

    def _choose_rows(self) -> Tensor | None:
        """Return the chosen rows `[B, L]` of the running call of the model; None for all.

        Labels of an encoder-decoder model belong to its decoder.
        """
        frames = self._thread.frames
        if self._has_encoder and self._rows == "labels" and any("encoder" in one.path.split(".") for one in frames):
            return None
        number = frames[0].number
        if self._chosen[0] != number:
            self._chosen = (number, self._read_rows(frames))
        return self._chosen[1]

    def _read_rows(self, frames: list[Frame]) -> Tensor | None:
        # A wrapper has the path of its model and does not know the names of the arguments.
        given = next((one.given for one in reversed(frames) if not one.path), frames[0].given)
        try:
            rows = self._rows(given) if callable(self._rows) else _read_labels(given)
            if rows is None:
                return None
            if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.dtype != torch.bool:
                kind = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
                raise InvalidTypeError("rows", f"must give a boolean mask [B, L], got {kind}")
        except Exception as error:
            self._say(f"rows= has no effect: {type(error).__name__}: {error}", "rows")
            return None
        return rows.detach()


def _read_labels(given: Mapping[str, Any]) -> Tensor:
    labels = given.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        kind = f"shape {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InvalidTypeError(f"the model must be called with labels [B, L], got {kind}; give rows= a function")
    return labels != IGNORED_LABEL
