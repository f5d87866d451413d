"""Writes the tables of a benchmark as Markdown, and fills documents from the benchmark's JSON.

A document holds `<!-- bench: NAME -->`, and further down `<!-- end -->`. The table is written between the two. NAME is
the name of a suite, `costs_` and the name of a suite, or `per_logit`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.records.record import Record

_BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Rows = Sequence[Mapping[str, Any]]


def fill_tables(document: str, records: Sequence[Record]) -> str:
    """Return the document with each of its tables rewritten from the record that has its numbers.

    Args:
        document: Markdown.
        records: benchmarks; for each suite, the last record that has it counts.

    Returns:
        The document. Tables of suites that no record has stay unchanged.

    Raises:
        InvalidValueError: if the records have numbers for none of the document's tables.
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
    """Return the ratios of each suite, and the costs, as Markdown tables by name, with machine and command below.

    A cell has the time of the peer over that of sqrtdk with its 95% interval, and the peer's error. It is bold if
    sqrtdk is slower.
    """
    ratios = record.tables.get("ratios", [])
    tables = {
        suite: _write_ratios([row for row in ratios if row["suite"] == suite])
        for suite in dict.fromkeys(row["suite"] for row in ratios)
    }
    costs = record.tables.get("costs", [])
    for suite in dict.fromkeys(row["suite"] for row in costs):
        tables[f"costs_{suite}"] = _write_costs([row for row in costs if row["suite"] == suite])
    if record.tables.get("growth"):
        tables["per_logit"] = _write_growth(record)
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


def _write_growth(record: Record) -> str:
    """Return time per logit and peak memory at each number of keys, then the powers with which both grow."""
    curves = [curve for curve in record.curves["growth"] if curve["window"] is None]
    memory = {(row["contender"], row["n"]): row for row in record.tables.get("memory", [])}
    names = [curve["contender"] for curve in curves]
    head = ["queries and keys", *(f"{name}, ns per logit" for name in names), *(f"{name}, MiB" for name in names)]
    lines = [_line(head), _line(["---"] * len(head))]
    for n in sorted({n for curve in curves for n in curve["n"]}):
        times = [dict(zip(curve["n"], curve["milliseconds"], strict=True)).get(n) for curve in curves]
        peaks = [memory.get((name, n), {}).get("mebibytes") for name in names]
        per_logit = ["–" if time is None else f"{1e6 * time / n**2:.3g}" for time in times]
        lines.append(_line((f"{n}", *per_logit, *("–" if peak is None else f"{peak:.1f}" for peak in peaks))))
    return "\n".join([*lines, "", *map(_read_power, record.tables["growth"])]) + "\n"


def _read_power(row: Mapping[str, Any]) -> str:
    interval = "" if row["low"] is None else f" [{row['low']:.2f}, {row['high']:.2f}]"
    over = f"{row['grows_with']} from {row['smallest']} to {row['largest']}"
    return f"- {row['contender']}, {row['what']}: grows as {over} to the power {row['power']:.2f}{interval}."


def _describe(record: Record, left_out: Rows) -> str:
    """Return the text below a table: the machine, the versions, the command, and the contenders left out."""
    spec = record.spec
    versions = ", ".join(f"{name} {version}" for name, version in spec.get("peers", {}).items())
    machine = f"{spec['cpu']}, {spec['backend']}, threads: {spec['threads']}, rounds: {spec.get('rounds')}"
    about = f"{machine}; {versions or 'no peers'}. `{spec.get('command')}`"
    absent = dict.fromkeys(f"{row['contender']} ({row['why']})" for row in left_out)
    missing = f" Not timed, or not everywhere: {'; '.join(absent)}." if absent else ""
    return f"\n{about}{missing}\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
