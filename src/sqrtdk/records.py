"""What a computation leaves behind: its tables, what it was asked, and where its numbers come from."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from sqrtdk.cells import format_cell, is_number, title_column
from sqrtdk.display import Table, count
from sqrtdk.errors import InvalidTypeError, InvalidValueError

SCHEMA_VERSION = 1

Row = Mapping[str, Any]

_OWN_FIELDS = (
    *("kind", "schema_version", "spec", "spec_hash", "versions", "cpu"),
    *("scalars", "curves", "reading", "sentences", "headline"),
)


# Of a cell that a notebook shows: a list of a thousand numbers is no table.
_MOST_LETTERS = 160


def spec_hash(spec: Mapping[str, Any]) -> str:
    """Name a specification by its content: equal specs, equal hash, whatever the order of keys.

    >>> spec_hash({"a": 1, "b": 2}) == spec_hash({"b": 2, "a": 1})
    True
    """
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), default=_without_numpy)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of Python, sqrtdk and what is installed of NumPy and torch, without importing them."""
    installed = {"python": platform.python_version()}
    for package in ("sqrtdk", "numpy", "torch"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def read_bounded(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes; more, as a device that never ends has, are not read.

    Raises:
        OSError: it cannot be read.
        InvalidValueError: it is longer.

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


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, repr=False)
class Record:
    """One finished computation, ready to print, plot or store; what it holds are plain JSON values from the start.

    NaN and infinities become None, as JSON has no word for them, tuples and arrays lists, keys text. So a record equals
    the one that is read back from its JSON.

    Args:
        kind: what was computed (``"variance"``, ``"claims"``, ``"ablation"`` …); its looks are found by it.
        spec: what was asked, the seed included.
        tables: named tables, each a list of flat rows; the first one is the headline table.
        curves: larger numeric material for figures: nested lists or mappings of numbers.
        reading: sentences that say what the numbers show, made from the numbers; all of `sentences` if not given.
        sentences: those that a page shows alone, by name; empty in records of earlier versions.
        headline: the one sentence for a summary; the first of the reading if not given.
        scalars: single numbers by name, beside the tables.
        versions: of what computed it; those of this process if not given.
        cpu: the processor that computed it; this one if not given.

    >>> record = Record("variance", {"d_ks": (4, 64)}, {"variance": [{"d_k": 4, "measured": float("nan")}]})
    >>> record.spec, record.tables["variance"]
    ({'d_ks': [4, 64]}, [{'d_k': 4, 'measured': None}])
    >>> Record.from_json(json.loads(json.dumps(record.as_json()))) == record
    True
    """

    kind: str
    spec: Mapping[str, Any]
    tables: Mapping[str, Sequence[Row]]
    curves: Mapping[str, Any] = field(default_factory=dict)
    reading: Sequence[str] = ()
    headline: str = ""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    sentences: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)
    cpu: str = field(default_factory=cpu_name)

    def __post_init__(self) -> None:
        if not self.reading:
            object.__setattr__(self, "reading", list(self.sentences.values()))
        if not self.headline and self.reading:
            object.__setattr__(self, "headline", self.reading[0])
        for name in ("spec", "tables", "curves", "reading", "sentences", "scalars", "versions"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        taken = sorted(set(_OWN_FIELDS) & set(self.tables))
        if taken:
            raise InvalidValueError("tables", f"must not be named like the record's own fields, got {taken}")

    def __repr__(self) -> str:
        return "\n".join([self._title(), *self.reading])

    def _repr_html_(self) -> str:
        return "".join([self._table().as_html(), *(Table(sentence, (), []).as_html() for sentence in self.reading)])

    def _title(self) -> str:
        sizes = [f"{name} ({count(len(rows), 'row')})" for name, rows in self.tables.items()]
        return f"Record of {self.kind}: {', '.join(sizes) or 'no tables'}"

    def _table(self) -> Table:
        """The headline table, all of its columns."""
        rows = next(iter(self.tables.values()), [])
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [tuple(_shorten(format_cell(row.get(name), name)) for name in columns) for row in rows]
        texts = takewhile(lambda name: not all(is_number(row.get(name)) for row in rows), columns)
        return Table(self._title(), tuple(map(title_column, columns)), cells, left=len(list(texts)))

    def as_json(self) -> dict[str, Any]:
        """The record as plain JSON values of its own: each table under its name, beside what the record says of itself.

        `spec_hash` names the spec by its content.
        """
        return {
            "kind": self.kind,
            "schema_version": SCHEMA_VERSION,
            "spec": plain(self.spec),
            "spec_hash": spec_hash(self.spec),
            "versions": plain(self.versions),
            "cpu": self.cpu,
            **{name: plain(rows) for name, rows in self.tables.items()},
            "scalars": plain(self.scalars),
            "curves": plain(self.curves),
            "reading": list(self.reading),
            "sentences": plain(self.sentences),
            "headline": self.headline,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Record:
        """The record that `as_json` was called on; curves and scalars may have been left out.

        Raises:
            InvalidTypeError: the content is no mapping.
            InvalidValueError: it is no record, or one of another schema version.
        """
        if not isinstance(content, Mapping):
            raise InvalidTypeError("content", f"must be a record as JSON, got {type(content).__name__}")
        if content.get("schema_version") != SCHEMA_VERSION:
            raise InvalidValueError(
                "content", f"must be a record of schema version {SCHEMA_VERSION}, got {content.get('schema_version')!r}"
            )
        missing = [name for name in ("kind", "spec", "versions", "cpu", "reading", "headline") if name not in content]
        if missing:
            raise InvalidValueError("content", f"must be a record, got one without {', '.join(missing)}")
        own = {name: content[name] for name in _OWN_FIELDS if name in content}
        del own["schema_version"]
        own.pop("spec_hash", None)
        return cls(tables={name: rows for name, rows in content.items() if name not in _OWN_FIELDS}, **own)


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _without_numpy(value: Any) -> Any:
    # NumPy's scalars equal Python's and must hash alike.
    return value.tolist() if hasattr(value, "tolist") else str(value)


def plain(value: Any) -> Any:
    """A value as JSON has it: NaN and infinities None, sequences and arrays lists, keys texts.

    >>> plain({1: (float("nan"), 2.0)})
    {'1': [None, 2.0]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float) else str(value)
