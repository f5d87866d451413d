"""Where a monitor's numbers go: lines of JSON, a TensorBoard writer, or any function."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidTypeError, InvalidValueError

__all__ = ["Destination", "JsonLines", "Scalars", "open_destination"]

Destination = Callable[[int, Mapping[str, Any]], object]
"""Takes a step and what was seen at it: `layers`, `alerts`, `clipped`."""


def open_destination(to: Any) -> Destination:
    """The function behind what a user gives: a path, an object with `add_scalar`, or a function of (step, mapping).

    Raises:
        InvalidTypeError: for anything else.
        InvalidValueError: for a path in a directory that does not exist, or that is one.
    """
    if isinstance(to, str | os.PathLike):
        return JsonLines(Path(to))
    if callable(getattr(to, "add_scalar", None)):
        return Scalars(to)
    if callable(to):
        return to  # type: ignore[no-any-return]
    raise InvalidTypeError(
        "to",
        "must be a path, an object with add_scalar (a TensorBoard SummaryWriter) or a function of (step, mapping), "
        f"got {type(to).__name__}",
    )


class JsonLines:
    """A file with one JSON object per line. It is open only while a line is written: a kill leaves whole lines.

    A line that a run left unfinished nevertheless is taken away before the first one of the next.
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
    """Take away a last line without an end that is no JSON; give one that is its end."""
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
            if content[begin:].startswith(b'{"step"'):  # ours
                file.truncate(begin)
                return
        file.write(b"\n")


class Scalars:
    """A TensorBoard writer: a scalar per layer, head and number; alerts as text where it takes text."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, step: int, entry: Mapping[str, Any]) -> None:
        """Write the numbers of one step."""
        for path, layer in entry["layers"].items():
            for name, values in layer.items():
                for head, value in enumerate(values):
                    if isinstance(value, int | float) and math.isfinite(value):
                        self._writer.add_scalar(f"sqrtdk/{path or 'model'}/{name}/head {head}", value, step)
        if callable(getattr(self._writer, "add_text", None)):
            for alert in entry["alerts"]:
                where = f"{alert['layer'] or 'model'}, head {alert['head']}"
                self._writer.add_text(f"sqrtdk/{alert['rule']}", f"{alert['state']} in {where}: {alert['cause']}", step)
