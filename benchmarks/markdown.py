"""Tables of a benchmark as Markdown, and documents whose tables are filled from its JSON.

A document holds `<!-- bench: NAME -->`, and further down `<!-- end -->`; what lies between is written here. NAME is
that of a suite, or `costs_` with that of a suite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.records import Record

_BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Rows = Sequence[Mapping[str, Any]]


def fill_tables(document: str, records: Sequence[Record]) -> str:
    """The document with each of its tables written anew from the record that has its numbers.

    Args:
        document: Markdown.
        records: benchmarks; the last that has a suite counts.

    Returns:
        The document; tables of suites that no record has stay as they were.

    Raises:
        InvalidValueError: no table of the document has numbers in the records.
    """
    tables: dict[str, str] = {}
    for record in records:
        tables |= write_tables(record)
    names = [name for _, name, _ in _BLOCK.findall(document)]
    if not tables.keys() & set(names):
        raise InvalidValueError(
            f"document must hold a table of {', '.join(sorted(tables)) or 'a benchmark'} between "
            f"`<!-- bench: NAME -->` and `<!-- end -->`, got {', '.join(names) or 'none'}"
        )

    def fill(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        return f"{begin}{tables[name]}{end}" if name in tables else block[0]

    return _BLOCK.sub(fill, document)


def write_tables(record: Record) -> dict[str, str]:
    """The ratios of each suite, and the costs, as Markdown with the circumstances under it, by name.

    A cell is the time of the peer over that of sqrtdk with its 95% interval, and the peer's error; bold where sqrtdk is
    slower.
    """
    ratios = record.tables.get("ratios", [])
    tables = {
        suite: _write_ratios([row for row in ratios if row["suite"] == suite])
        for suite in dict.fromkeys(row["suite"] for row in ratios)
    }
    costs = record.tables.get("costs", [])
    for suite in dict.fromkeys(row["suite"] for row in costs):
        tables[f"costs_{suite}"] = _write_costs([row for row in costs if row["suite"] == suite])
    left_out = record.tables.get("left_out", [])
    return {name: table + _describe(record, left_out) for name, table in tables.items()}


def _write_ratios(rows: Rows) -> str:
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    pairs = list(dict.fromkeys((row["subject"], row["peer"]) for row in rows))
    names = [peer if len(subjects) == 1 else f"{subject} / {peer}" for subject, peer in pairs]
    error_of = dict.fromkeys(row.get("error_of", "output") for row in rows)
    lines = [_line(("case", f"error ({'; '.join(error_of)})", *names)), _line(["---"] * (2 + len(pairs)))]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = {(row["subject"], row["peer"]): row for row in rows if row["case"] == case}
        first = next(iter(of_case.values()))
        cells = [_write_cell(of_case[pair]) if pair in of_case else "–" for pair in pairs]
        lines.append(_line((case, f"{first['error']:.1e}", *cells)))
    return "\n".join(lines) + "\n"


def _write_cell(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return str(row["outcome"])
    ratio = f"{row['ratio']:.2f}"
    ratio = f"**{ratio}**" if row["outcome"] == "slower" else ratio
    return f"{ratio} [{row['low']:.2f}, {row['high']:.2f}], {row['peer_error']:.1e}"


def _write_costs(rows: Rows) -> str:
    lines = [_line(("case", "cost of", "percent")), _line(["---"] * 3)]
    for row in rows:
        known = row["percent"] is not None
        percent = f"{row['percent']:.1f} [{row['low']:.1f}, {row['high']:.1f}]" if known else "too few good rounds"
        lines.append(_line((row["case"], row["cost_of"], percent)))
    return "\n".join(lines) + "\n"


def _describe(record: Record, left_out: Rows) -> str:
    """Under a table: the machine, the versions, the command, who is missing and why."""
    spec = record.spec
    versions = ", ".join(f"{name} {version}" for name, version in spec.get("peers", {}).items())
    machine = f"{spec['cpu']}, {spec['backend']}, threads: {spec['threads']}, rounds: {spec.get('rounds')}"
    about = f"{machine}; {versions or 'no peers'}. `{spec.get('command')}`"
    absent = dict.fromkeys(f"{row['contender']} ({row['why']})" for row in left_out)
    missing = f" Not timed, or not everywhere: {'; '.join(absent)}." if absent else ""
    return f"\n{about}{missing}\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
