"""Destinations of observations: a JSON Lines file, an experiment logger, a Trainer, a function, or a list of these."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidTypeError, InvalidValueError

__all__ = ["Destination", "JsonLines", "Scalars", "name_scalars", "open_destination"]

Destination = Callable[[int, Mapping[str, Any]], object]
"""Function that takes a step and its observation: a mapping with `layers` and `alerts`, or with `scalars`."""


def open_destination(to: Any, write_alert: Callable[[Mapping[str, Any]], str] | None = None) -> Destination:
    """Return the function that writes to a destination, or to each destination of a list.

    A destination is a path, an object with `add_scalar` (TensorBoard's SummaryWriter), `log` (a W&B run, trackio) or
    `log_metrics` (MLflow), a Hugging Face Trainer, or a function of (step, mapping).

    Args:
        to: the destination or a list of destinations.
        write_alert: function that writes the JSON of an alert as one line; None writes its cause.

    Raises:
        InvalidTypeError: for anything else.
        InvalidValueError: if a path is a directory, or if its directory does not exist.
    """
    if isinstance(to, list | tuple) and to and not callable(to):
        several = [open_destination(one, write_alert) for one in to]
        return lambda step, entry: _write_all(several, step, entry)
    if isinstance(to, str | os.PathLike):
        return JsonLines(Path(to))
    if callable(getattr(to, "add_scalar", None)):
        return Scalars(to, write_alert)
    if callable(getattr(getattr(to, "callback_handler", None), "on_log", None)):
        return lambda step, entry: _report_through(to, entry)
    if callable(getattr(to, "log_metrics", None)):
        return lambda step, entry: to.log_metrics(_name_plainly(entry), step=step)
    if callable(getattr(to, "log", None)):
        return lambda step, entry: to.log(dict(name_scalars(entry)), step=step)
    if callable(to):
        return to  # type: ignore[no-any-return]
    raise InvalidTypeError(
        "to",
        "must be a path, an object with add_scalar (a TensorBoard SummaryWriter), log (W&B, trackio) or log_metrics "
        "(MLflow), a Hugging Face Trainer, a function of (step, mapping), or a list of these, got "
        f"{type(to).__name__}",
    )


# MLflow allows letters, digits, underscores, dashes, periods, spaces, colons and slashes in metric names.
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
# Callbacks of a Trainer that print each report; hundreds of numbers would bury the loss.
_PRINTERS = {"PrinterCallback", "ProgressCallback"}


def _name_plainly(entry: Mapping[str, Any]) -> dict[str, float]:
    return {_NOT_IN_NAMES.sub("_", name): value for name, value in name_scalars(entry)}


def _report_through(trainer: Any, entry: Mapping[str, Any]) -> None:
    """Give the numbers to the loggers of a Trainer (`report_to`), which use the Trainer's own step.

    `trainer.log` is not called: it prints, and Trainers of TRL end their running means there.
    """
    for callback in trainer.callback_handler.callbacks:
        if not _PRINTERS.intersection(kind.__name__ for kind in type(callback).__mro__):
            logs = _name_plainly(entry)
            callback.on_log(trainer.args, trainer.state, trainer.control, logs=logs, model=trainer.model)


def _write_all(several: Sequence[Destination], step: int, entry: Mapping[str, Any]) -> None:
    """Write to every destination. If some fail, raise the first error after all destinations were tried."""
    errors = []
    for write in several:
        try:
            write(step, entry)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def name_scalars(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of an observation by name: the least and the largest per layer, then one per head.

    The numbers of a lab's run are named by the key of the run.

    >>> list(name_scalars({"layers": {"h.0": {"max_logit": [2.0, 1.0], "pattern": ["broad", "other"]}}}))[:3]
    [('sqrtdk/h.0/max_logit/least', 1.0), ('sqrtdk/h.0/max_logit/largest', 2.0), ('sqrtdk heads/h.0/max_logit/0', 2.0)]
    >>> list(name_scalars({"run": "4f2a", "scalars": {"loss": 2.5}}))
    [('sqrtdk lab/4f2a/loss', 2.5)]
    """
    for name, value in entry.get("scalars", {}).items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield f"sqrtdk lab/{entry['run']}/{name}", value
    for path, layer in entry.get("layers", {}).items():
        for name, values in layer.items():
            numbers = {
                head: value
                for head, value in enumerate(values)
                if isinstance(value, int | float) and math.isfinite(value)
            }
            if numbers:
                where = f"{path or 'model'}/{name}"
                yield f"sqrtdk/{where}/least", min(numbers.values())
                yield f"sqrtdk/{where}/largest", max(numbers.values())
                for head, value in numbers.items():
                    yield f"sqrtdk heads/{where}/{head}", value


class JsonLines:
    """File with one JSON object per line. The file is open only while a line is written, so a kill leaves whole lines.

    The first write removes an incomplete last line that an earlier run may have left.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir() or not path.parent.is_dir():
            reason = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
            raise InvalidValueError("to", f"must be a path of a file that can be written, got {str(path)!r}: {reason}")
        self._path = path
        self._is_mended = False

    def __call__(self, step: int, entry: Mapping[str, Any]) -> None:
        """Append one line."""
        if not self._is_mended:
            _mend(self._path)
            self._is_mended = True
        line = json.dumps({"step": step, **entry}, ensure_ascii=False, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _mend(path: Path) -> None:
    """Remove an incomplete last line, or end a last line that is complete but has no newline."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if not content or content.endswith(b"\n"):
            return
        begin = content.rfind(b"\n") + 1
        try:
            json.loads(content[begin:])
        except ValueError:
            if content[begin:].startswith(b'{"step"'):  # an incomplete line that a monitor wrote
                file.truncate(begin)
                return
        file.write(b"\n")


class Scalars:
    """TensorBoard writer: writes numbers as scalars, and alerts as text if the writer accepts text."""

    def __init__(self, writer: Any, write_alert: Callable[[Mapping[str, Any]], str] | None = None) -> None:
        self._writer = writer
        self._write_alert = write_alert or (lambda alert: str(alert["cause"]))

    def __call__(self, step: int, entry: Mapping[str, Any]) -> None:
        """Write the numbers and alerts of one step."""
        for name, value in name_scalars(entry):
            self._writer.add_scalar(name, value, step)
        if callable(getattr(self._writer, "add_text", None)):
            for alert in entry.get("alerts", ()):
                self._writer.add_text(f"sqrtdk/{alert['rule']}", self._write_alert(alert), step)
