"""What `sqrtdk audit` shows on stdout: a heat table of layers and heads, sentences, findings, comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from sqrtdk.audits import Audit, AuditedHead, Comparison
from sqrtdk.display import name_layer
from sqrtdk.findings import SEVERITIES, Finding
from sqrtdk.spelling import spell
from sqrtdk.terminal import print_table, stdout_console

_MARKS = {
    "broad": "b",
    "previous": "p",
    "self": "s",
    "next": "n",
    "sink": "k",
    "content": "c",
    "not enough data": "?",
}
_OFFSET = "o"
_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold"}
_CELL = 6
_LEAST_PATH = 12
_MOST_FINDINGS = 12
_MOST_CHANGES = 16


def print_audit(audit: Audit, comparison: Comparison | None = None, other: str = "") -> None:
    """Print an audit, and what changed against another one, which `other` names."""
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
        console.print(f"\n[bold]{escape(_clean(f'Compared with {other}'))}[/]")
        _print_comparison(comparison, console)


def _clean(text: str) -> str:
    """A text as the terminal can write it; names of layers are data and may not move the cursor."""
    return spell("".join(letter if letter.isprintable() else "?" for letter in text))


def _print_sentences(sentences: Iterable[str], console: Console) -> None:
    for sentence in sentences:
        console.print(escape(_clean(f"• {sentence}")))


def _print_heat(audit: Audit, console: Console) -> None:
    """Layers × heads, as many heads beside each other as fit; the layer's path is shortened before a head is moved."""
    layers = audit.layers
    most = max(map(len, layers.values()))
    longest = max(len(_clean(path)) for path in layers)
    number = len(str(max(heads[0].layer_index for heads in layers.values())))
    room = console.width - number - 1
    path_width = max(min(longest, room - most * _CELL), min(longest, _LEAST_PATH))
    fits = max((room - path_width) // _CELL, 1)
    for first in range(0, most, fits):
        shown = range(first, min(first + fits, most))
        head = "".join(f"{at:>{_CELL}}" for at in shown)
        console.print(f"{'':>{number}} {'head':<{path_width}}{head}", soft_wrap=True)
        for path, heads in layers.items():
            line = Text(f"{heads[0].layer_index:>{number}} {_shorten(_clean(path), path_width):<{path_width}}")
            for at in shown:
                line.append(" ")
                line.append(*_write_cell(heads[at]) if at < len(heads) else (" " * (_CELL - 1),))
            console.print(line, soft_wrap=True)
    names = sorted({head.pattern for head in audit.heads})
    legend = ", ".join(f"{_mark(name)} {name}" for name in names)
    console.print(escape(_clean(f"mean entropy ratio H/ln n; pattern: {legend}")), style="dim")


def _mark(pattern: str) -> str:
    return _MARKS.get(pattern, _OFFSET)


def _write_cell(head: AuditedHead) -> tuple[str, str]:
    ratio = head.entropy_ratio
    if ratio is None:
        return f"{'-':>{_CELL - 2}}{_mark(head.pattern)}", ""
    # From near white at 1 to blue at 0: dark letters stand on all of it.
    red, green, blue = (round(near + (far - near) * min(max(ratio, 0.0), 1.0)) for near, far in _RAMP)
    return f"{ratio:.2f}{_mark(head.pattern)}".rjust(_CELL - 1), f"black on rgb({red},{green},{blue})"


_RAMP = ((86, 240), (160, 244), (222, 248))


def _shorten(text: str, width: int) -> str:
    """The text with its middle left out, where it is too long."""
    if len(text) <= width:
        return text
    dots = spell("…")
    kept = max(width - len(dots), 2)
    return f"{text[: kept // 2]}{dots}{text[len(text) - (kept - kept // 2) :]}"[:width]


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    shown = sorted(findings, key=lambda one: SEVERITIES.index(one.severity))
    for finding in shown[:_MOST_FINDINGS]:
        style = _STYLES[finding.severity]
        rest = _clean(repr(finding)).removeprefix(f"{finding.severity}:")
        console.print(f"\n[{style}]{finding.severity}:[/]{escape(rest)}")
        console.print(escape(_clean(f"→ {finding.remedy}")))
        threshold = finding.threshold
        console.print(escape(_clean(f"  threshold {threshold.value:.4g}: {threshold.source}")), style="dim")
    if len(shown) > _MOST_FINDINGS:
        console.print(f"\n{len(shown) - _MOST_FINDINGS} more findings: --json or --html shows them all.")


def _print_comparison(comparison: Comparison, console: Console) -> None:
    rows = [
        {
            "layer": _clean(name_layer(change.layer)),
            "head": change.head,
            "pattern": f"{change.pattern_before} → {change.pattern}" if change.has_new_pattern else change.pattern,
            **{
                name: "-" if number is None else f"{number:+.3f}"
                for name, number in (
                    ("entropy_ratio", change.entropy_ratio_change),
                    ("saturation_index", change.saturation_index_change),
                    ("largest logit", change.max_logit_change),
                )
            },
        }
        for change in comparison.changed[:_MOST_CHANGES]
    ]
    print_table(rows, console=console)
    _print_sentences(comparison.reading, console)
    for words, findings in (("new", comparison.new), ("gone", comparison.gone)):
        for finding in findings[:_MOST_FINDINGS]:
            console.print(f"[{_STYLES[finding.severity]}]{words}:[/] {escape(_clean(repr(finding)))}")
