"""The record of a computation: its tables, its arguments, and the origin of its numbers."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.records.json import plain
from sqrtdk.show.table import Table, count
from sqrtdk.wording.quantities import format_cell, is_numeric, title_column

SCHEMA_VERSION = 1

Row = Mapping[str, Any]

_OWN_FIELDS = (
    *("kind", "schema_version", "spec", "spec_hash", "versions", "cpu"),
    *("scalars", "curves", "reading", "sentences", "headline"),
)

_SHAPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("kind", "cpu", "headline"), (str, "a string")),
    **dict.fromkeys(("spec", "versions", "scalars", "curves", "sentences"), (dict, "a mapping")),
    "reading": (list, "a list"),
}

# Letters of a cell in a notebook: a list of a thousand numbers would make the table unreadable.
_MOST_LETTERS = 160


def spec_hash(spec: Mapping[str, Any]) -> str:
    """Return a hash of a specification's content. Equal specifications have equal hashes, in any order of keys.

    >>> spec_hash({"a": 1, "b": 2}) == spec_hash({"b": 2, "a": 1})
    True
    """
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), default=_without_numpy)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of Python and sqrtdk, and of NumPy and torch if installed, without importing them."""
    installed = {"python": platform.python_version()}
    for package in ("sqrtdk", "numpy", "torch"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def cpu_name() -> str:
    """Return the processor's name if the system gives it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, repr=False)
class Record:
    """One finished computation, ready to print, plot or store. Its contents are plain JSON values from the start.

    NaN and infinities become None, because JSON cannot express them; tuples and arrays become lists, and keys become
    text. A record therefore equals the record that is read back from its JSON.

    Args:
        kind: what was computed (``"variance"``, ``"claims"``, ``"ablation"`` …); tables and figures are chosen by it.
        spec: the arguments of the computation, including the seed.
        tables: named tables, each a list of flat rows; the first one is the headline table.
        curves: larger numeric material for figures, as nested lists or mappings of numbers.
        reading: sentences about the numbers, derived from them. Default: all of `sentences`.
        sentences: sentences by name, for pages that show one of them. Records of earlier versions have none.
        headline: the one sentence for a summary. Default: the first of the reading.
        scalars: single numbers by name, beside the tables.
        versions: versions of the packages that computed it. Default: those of this process.
        cpu: the processor that computed it. Default: this processor.

    >>> import json
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
        """Return the headline table with all its columns."""
        table = tabulate(next(iter(self.tables.values()), []))
        return table._replace(title=self._title(), rows=[tuple(map(_shorten, row)) for row in table.rows])

    def as_json(self) -> dict[str, Any]:
        """Return the record as new plain JSON values: fields, each table under its own name, and the `spec_hash`."""
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
        """Return the record that `as_json` was called on. Curves and scalars may be missing.

        Raises:
            InvalidTypeError: the content is not a mapping, or one of its fields or tables has another type.
            InvalidValueError: the content is not a record, or is a record of another schema version.
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
        tables = {name: rows for name, rows in content.items() if name not in _OWN_FIELDS}
        for name, (kind, words) in _SHAPES.items():
            if not isinstance(content.get(name, kind()), kind):
                raise InvalidTypeError("content", f"must have {words} as {name}, got {type(content[name]).__name__}")
        for name, rows in tables.items():
            if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
                raise InvalidTypeError("content", f"must have tables that are lists of rows, got another {name!r}")
        own = {name: content[name] for name in _OWN_FIELDS if name in content}
        del own["schema_version"]
        own.pop("spec_hash", None)
        return cls(tables=tables, **own)


def tabulate(rows: Sequence[Row], columns: Sequence[str] | None = None) -> Table:
    """Return rows as a table, with column names and values as readers see them. Columns of numbers are right-aligned.

    Without `columns` the table has the columns of all rows, in order of appearance. A missing value is –.

    >>> print(tabulate([{"scale": "sqrt", "sum_p2": 0.25}, {"scale": "none", "sum_p2": None}]).as_markdown())
    | scaling | Σp² |
    |---|---|
    | 1/√dₖ | 0.25 |
    | no scaling | – |
    """
    names = list(dict.fromkeys(name for row in rows for name in row)) if columns is None else columns
    words = frozenset(at for at, name in enumerate(names) if not all(is_numeric(row.get(name)) for row in rows))
    cells = [tuple(format_cell(row.get(name), name) for name in names) for row in rows]
    return Table("", tuple(map(title_column, names)), cells, left=words)


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _without_numpy(value: Any) -> Any:
    # NumPy scalars equal Python numbers and must have the same hash.
    return value.tolist() if hasattr(value, "tolist") else str(value)
