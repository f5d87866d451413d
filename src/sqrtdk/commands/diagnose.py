"""Commands that diagnose models: the audit of a stored model, and the scale of each model family."""

from __future__ import annotations

import importlib.util
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.commands.flags import Json, Plot, examples
from sqrtdk.commands.options import naming
from sqrtdk.commands.results import draw_figure, present, require_drawable, working
from sqrtdk.errors import InvalidValueError, missing_extra
from sqrtdk.records.files import read_bounded

commands = typer.Typer()

_LONGEST_TEXT = 16 * 2**20


class FailOn(StrEnum):
    """Least severity of a finding with which a command fails."""

    WARNING = "warning"
    ERROR = "error"


@commands.command(
    epilog=examples(
        "sqrtdk audit ./my-model",
        "sqrtdk audit step-2000 --compare step-1000 --html audit.html",
        "sqrtdk audit ./my-model --json --fail-on warning",
    )
)
def audit(
    model: Annotated[
        str, typer.Argument(help="A directory with config.json and safetensors, or an installed package with one.")
    ],
    text: Annotated[
        Path | None, typer.Option(help="File with the input. Default: an English text that comes with sqrtdk.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Earlier checkpoint, or another model. Changes are MODEL minus this one.")
    ] = None,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Also write a self-contained page to this file.")] = None,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit with status 1 if a finding is at least this severe.")
    ] = None,
) -> None:
    """Measure every head of a stored model and the scale of every layer, and list findings with cause and remedy.

    Runs no code that comes with the model, reads no pickle files and needs no network.
    """
    from sqrtdk.audits import compare as compare_audits
    from sqrtdk.audits.checkpoints import find_checkpoint
    from sqrtdk.report.files import require_directory

    words = None if text is None else _read_text(text)
    names = [model, *([] if compare is None else [compare])]
    for name, option in zip(names, ("MODEL", "--compare"), strict=False):
        with naming(option, "MODEL"):
            find_checkpoint(name)
    if html is not None:
        with naming("--html"):
            require_directory(html)
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "hf")
    with working("loading torch and transformers") as bar:
        from sqrtdk.torch.models.stored import audit_stored

        audits = [audit_stored(name, words, bar.show) for name in names]
    own, comparison = audits[0], None if compare is None else compare_audits(*audits)
    if html is not None:
        from sqrtdk.report.audit_page import write_audit_page

        print(f"page written to {write_audit_page(own, html, comparison, compare or '')}", file=sys.stderr)
    if json:
        from sqrtdk.commands.terminal import write_json

        write_json(own.as_json() | ({} if comparison is None else {"comparison": comparison.as_json()}))
    else:
        from sqrtdk.commands.audit_terminal import print_audit

        print_audit(own, comparison, compare or "")
    severe = {None: (), FailOn.ERROR: ("error",), FailOn.WARNING: ("error", "warning")}[fail_on]
    if own.worst in severe:
        raise typer.Exit(1)


@commands.command(epilog=examples("sqrtdk zoo", "sqrtdk zoo --all", "sqrtdk zoo --family gpt2 --family t5 --json"))
def zoo(
    family: Annotated[
        list[str] | None, typer.Option(help="Measure this family (model_type). Repeat the option for several.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every family, including those that use 1/√dₖ or were not measured.")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure every family now (takes minutes).")] = False,
    store: Annotated[
        Path | None,
        typer.Option(help="Directory with a file per family. A command that is started again measures only the rest."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one per core, at least two.", min=1)] = None,
    json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table of the families that do not use 1/√dₖ.")
    ] = False,
    plot: Plot = None,
) -> None:
    """List the Hugging Face model families that do not use 1/√dₖ, with declared and measured scale.

    Each family is measured in a small model of its default configuration. Without --family or --measure the command
    shows the record that comes with sqrtdk and computes nothing.
    """
    if json and markdown:
        raise InvalidValueError("--json and --markdown exclude each other, got both")
    require_drawable(plot)
    if not family and not measure:
        from sqrtdk.records.families import load_zoo

        record = load_zoo()
    else:
        from sqrtdk.zoo import take_census

        with working("measuring families") as bar:
            record = take_census(
                family,
                workers=workers,
                store=store,
                on_family=lambda name, done, total: bar.show(f"measured {name}, {done} of {total}", done / total),
            )
    if json or ((every or family) and not markdown):
        present(record, json, plot)
        return
    from sqrtdk.commands import terminal
    from sqrtdk.records.families import UNUSUAL_COLUMNS, list_unusual

    draw_figure(record, plot)
    if markdown:
        print(terminal.markdown_table(list_unusual(record), UNUSUAL_COLUMNS))
        return
    terminal.print_table(list_unusual(record), UNUSUAL_COLUMNS)
    terminal.print_sentences([*record.reading, "`sqrtdk zoo --all` lists every family."])


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path, _LONGEST_TEXT).decode()
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"--text must be a file with text in UTF-8, got {path} ({error})") from None
