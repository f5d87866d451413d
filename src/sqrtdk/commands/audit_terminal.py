"""Output of `sqrtdk audit` on stdout: a heat table of layers and heads, sentences, findings, comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from sqrtdk.audits import Audit, Comparison
from sqrtdk.audits.heat_map import HeatCell, map_heads, mark_pattern, write_legend
from sqrtdk.commands.terminal import lay_out, stdout_console
from sqrtdk.diagnosis.findings import Finding, severe_first
from sqrtdk.show.table import count
from sqrtdk.wording.encoding import spell
from sqrtdk.wording.numbers import write_number

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold"}
_CELL = 6
_LEAST_PATH = 12
_MOST_FINDINGS = 12
_MOST_CHANGES = 16


def print_audit(audit: Audit, comparison: Comparison | None = None, other: str = "") -> None:
    """Print an audit, and what changed since another one, which `other` names."""
    console = stdout_console()
    console.print(f"[bold]{escape(_clean(audit.title))}[/]")
    if "input" in audit.about:
        console.print(escape(_clean(f"Input: {audit.about['input']}.")))
    if audit.heads:
        console.print()
        _print_heat(audit, console)
    console.print()
    _print_sentences(audit.reading, console)
    _print_findings(audit.findings, console)
    if comparison is not None:
        console.print(f"\n[bold]{escape(_clean(f'Changes since {other}'))}[/]")
        _print_comparison(comparison, console)


def _clean(text: str) -> str:
    """Return a text as the terminal can write it. Names of layers are data and must not move the cursor."""
    return spell("".join(letter if letter.isprintable() else "?" for letter in text))


def _print_sentences(sentences: Iterable[str], console: Console) -> None:
    for sentence in sentences:
        console.print(escape(_clean(f"• {sentence}")))


def _print_heat(audit: Audit, console: Console) -> None:
    """Print layers × heads, as many heads per line as fit. Layer paths are shortened before heads move down."""
    heat = map_heads(audit)
    most = len(heat[0].cells)
    longest = max(len(_clean(row.name)) for row in heat)
    number = len(str(max(row.number for row in heat)))
    room = console.width - number - 1
    path_width = max(min(longest, room - most * _CELL), min(longest, _LEAST_PATH))
    fits = max((room - path_width) // _CELL, 1)
    for first in range(0, most, fits):
        shown = range(first, min(first + fits, most))
        head = "".join(f"{at:>{_CELL}}" for at in shown)
        console.print(f"{'':>{number}} {'head':<{path_width}}{head}", soft_wrap=True)
        for row in heat:
            line = Text(f"{row.number:>{number}} {_shorten(_clean(row.name), path_width):<{path_width}}")
            for cell in row.cells[shown.start : shown.stop]:
                line.append(" ")
                line.append(*(" " * (_CELL - 1),) if cell is None else _write_cell(cell))
            console.print(line, soft_wrap=True)
    console.print(escape(_clean(write_legend(audit))), style="dim")


def _write_cell(cell: HeatCell) -> tuple[str, str]:
    text, ratio = f"{spell(cell.text)}{mark_pattern(cell.head.pattern)}".rjust(_CELL - 1), cell.head.entropy_ratio
    if ratio is None:
        return text, ""
    # From near white at 1 to blue at 0: dark letters are readable on every shade.
    red, green, blue = (round(near + (far - near) * min(max(ratio, 0.0), 1.0)) for near, far in _RAMP)
    return text, f"black on rgb({red},{green},{blue})"


_RAMP = ((86, 240), (160, 244), (222, 248))


def _shorten(text: str, width: int) -> str:
    """Return the text, without its middle where it is too long."""
    if len(text) <= width:
        return text
    dots = spell("…")
    kept = max(width - len(dots), 2)
    return f"{text[: kept // 2]}{dots}{text[len(text) - (kept - kept // 2) :]}"[:width]


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    shown = severe_first(findings)
    for finding in shown[:_MOST_FINDINGS]:
        style = _STYLES[finding.severity]
        rest = _clean(repr(finding)).removeprefix(f"{finding.severity}:")
        console.print(f"\n[{style}]{finding.severity}:[/]{escape(rest)}")
        console.print(escape(_clean(f"→ {finding.remedy}")))
        threshold = finding.threshold
        console.print(escape(_clean(f"  threshold {write_number(threshold.value)}: {threshold.source}")), style="dim")
    if len(shown) > _MOST_FINDINGS:
        more = count(len(shown) - _MOST_FINDINGS, "more finding")
        console.print(f"\n{more}: --json or --html shows them all.")


def _print_comparison(comparison: Comparison, console: Console) -> None:
    table = comparison.tabulate(_MOST_CHANGES)
    if table.rows:
        console.print(escape(_clean(table.title)))
        lay_out(table._replace(rows=[tuple(map(_clean, cells)) for cells in table.rows]), console)
    _print_sentences(comparison.reading, console)
    for words, findings in (("new", comparison.new), ("gone", comparison.gone)):
        for finding in findings[:_MOST_FINDINGS]:
            console.print(f"[{_STYLES[finding.severity]}]{words}:[/] {escape(_clean(repr(finding)))}")
