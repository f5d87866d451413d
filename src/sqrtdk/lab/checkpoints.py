"""Checkpoints of unfinished runs: files in safetensors format with a checksum, replaced atomically, two per run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqrtdk import backends
from sqrtdk.errors import warn
from sqrtdk.records.record import versions

__all__ = ["Checkpoints", "describe_machine", "read_state", "seal"]

_LENGTH = 8  # bytes at the beginning that hold the length of the header


def describe_machine() -> dict[str, str]:
    """Return what the bits of a run depend on beside its spec: versions, and the CPU level of the kernel.

    >>> describe_machine()["level"] == backends.current()
    True
    """
    return {**versions(), "level": backends.current()}


def seal(content: bytes) -> bytes:
    """Return safetensors bytes with a checksum of header and tensors among their metadata.

    >>> header = json.dumps({"__metadata__": {"state": json.dumps({"key": "a", "machine": describe_machine()})}})
    >>> checkpoint = seal(len(header).to_bytes(8, "little") + header.encode())
    >>> read_state(checkpoint, "a")["key"]
    'a'
    """
    header, tensors = _split(content)
    header["__metadata__"]["checksum"] = _digest(header, tensors)
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % _LENGTH)  # tensors begin at a multiple of eight bytes
    return len(written).to_bytes(_LENGTH, "little") + written + tensors


def read_state(content: bytes, key: str) -> dict[str, Any]:
    """Return the state beside the tensors of a checkpoint, whose every byte is verified.

    Raises:
        ValueError: the checkpoint is truncated or damaged, or of another run, other versions or another CPU level, from
            where the run would not go on with the same bits.
    """
    try:
        header, tensors = _split(content)
        metadata = header["__metadata__"]
        if metadata.pop("checksum") != _digest(header, tensors):
            raise ValueError("its checksum does not fit")
        state: dict[str, Any] = json.loads(metadata["state"])
        if state["key"] != key:
            raise ValueError(f"it is of run {state['key']}")
        here = describe_machine()
        others = [f"{name} {value}" for name, value in state["machine"].items() if here.get(name) != value]
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("it is no checkpoint") from None
    if others:
        raise ValueError(f"it was made with {', '.join(others)}")
    return state


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    return json.loads(content[_LENGTH:end]), content[end:]


def _digest(header: dict[str, Any], tensors: bytes) -> str:
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    digest.update(tensors)
    return digest.hexdigest()


class Checkpoints:
    """Folder with the last two checkpoints of each unfinished run; made when the first is put, removed when empty.

    Args:
        folder: where they are; None keeps none.
        on_damage: called with words about a checkpoint that cannot be used or written; warns if not given.
    """

    def __init__(self, folder: Path | None, on_damage: Callable[[str], None] = warn) -> None:
        self.folder = folder
        self._on_damage = on_damage

    def put(self, key: str, content: bytes) -> None:
        """Keep a checkpoint, and the one before it. A disk that is full is reported; what was there stays."""
        if self.folder is None:
            return
        latest, before, new = self._files(key)
        try:
            self.folder.mkdir(exist_ok=True)
            with open(new, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if latest.exists():
                os.replace(latest, before)
            os.replace(new, latest)
            with _opened(self.folder) as folder:
                os.fsync(folder)  # a name that was changed is on the disk only after this
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            self._on_damage(f"checkpoint {latest} cannot be written ({error}); the run goes on without this checkpoint")

    def get(self, key: str) -> bytes | None:
        """Return the latest checkpoint of a run that can be used, or None. Others are reported and removed."""
        if self.folder is None:
            return None
        latest, before, _ = self._files(key)
        for path in (latest, before):
            try:
                content = path.read_bytes()
                read_state(content, key)
                return content
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                with suppress(OSError):
                    path.unlink()
                instead = "the one before it" if path == latest and before.exists() else "the start"
                self._on_damage(f"checkpoint {path} cannot be used ({error}); the run goes on from {instead}")
        return None

    def drop(self, key: str) -> None:
        """Remove the checkpoints of a run; a key that is a path names none."""
        if self.folder is not None and self.folder.exists() and Path(key).name == key:
            for path in self._files(key):
                path.unlink(missing_ok=True)

    def list_keys(self) -> list[str]:
        """Return the runs that have a checkpoint."""
        if self.folder is None or not self.folder.exists():
            return []
        return sorted({path.name.partition(".")[0] for path in self.folder.glob("*.safetensors")})

    def measure(self) -> dict[str, int]:
        """Return the runs that have a checkpoint, with the bytes of their files."""
        sizes: dict[str, int] = {}
        for key in self.list_keys():
            for path in self._files(key):
                with suppress(OSError):  # it has just been replaced or dropped
                    sizes[key] = sizes.get(key, 0) + path.stat().st_size
        return sizes

    def close(self) -> None:
        """Remove the folder if nothing is in it."""
        if self.folder is not None:
            with suppress(OSError):
                self.folder.rmdir()

    def _files(self, key: str) -> tuple[Path, Path, Path]:
        assert self.folder is not None
        return tuple(self.folder / f"{key}{kind}.safetensors" for kind in ("", ".before", ".new"))  # type: ignore[return-value]


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
