"""Reading of files of bounded size."""

from __future__ import annotations

from pathlib import Path

from sqrtdk.errors import InvalidValueError


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. A device without end is read no further.

    Raises:
        OSError: the file cannot be read.
        InvalidValueError: the file is longer.

    >>> read_bounded(Path("/dev/zero"), 10)
    Traceback (most recent call last):
    ...
    sqrtdk.errors.InvalidValueError: the file must have at most 10 bytes, got more in /dev/zero
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise InvalidValueError(f"the file must have at most {most} bytes, got more in {path}")
    return content
