"""Commands about models: what the heads of a stored one do, which scale each family uses."""

from __future__ import annotations

import importlib.util
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.commands.flags import Json, Plot, examples
from sqrtdk.commands.presenting import draw_figure, present, require_drawable, working
from sqrtdk.errors import InvalidValueError, missing_extra
from sqrtdk.options import naming
from sqrtdk.records import read_bounded

commands = typer.Typer()

_LONGEST_TEXT = 16 * 2**20


class FailOn(StrEnum):
    """From which severity on a finding makes a command fail."""

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
    text: Annotated[Path | None, typer.Option(help="What the model reads; default: a text of sqrtdk's own.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another model, as an earlier checkpoint: what changed since?")
    ] = None,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Also write a self-contained page into this file.")] = None,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit with 1 if a finding is at least as severe as this.")
    ] = None,
) -> None:
    """What every head of a stored model does, the scale it really uses, and what is wrong. Runs no code of the model's,
    reads no pickle, asks no network."""
    from sqrtdk.audits import compare as compare_audits
    from sqrtdk.checkpoints import find_checkpoint
    from sqrtdk.report.files import require_directory

    words = None if text is None else _read_text(text)
    names = [model, *([] if compare is None else [compare])]
    for name in names:
        find_checkpoint(name)
    if html is not None:
        with naming("--html"):
            require_directory(html)
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "hf")
    with working("loading torch and transformers") as bar:
        from sqrtdk.torch.stored_audit import audit_stored

        audits = [audit_stored(name, words, bar.show) for name in names]
    own, comparison = audits[0], None if compare is None else compare_audits(*audits)
    if html is not None:
        from sqrtdk.report.audit_page import write_audit_page

        print(f"page written to {write_audit_page(own, html, comparison, compare or '')}", file=sys.stderr)
    if json:
        from sqrtdk.terminal import write_json

        write_json(own.as_json() | ({} if comparison is None else {"comparison": comparison.as_json()}))
    else:
        from sqrtdk.audit_terminal import print_audit

        print_audit(own, comparison, compare or "")
    severe = {None: (), FailOn.ERROR: ("error",), FailOn.WARNING: ("error", "warning")}[fail_on]
    if own.worst in severe:
        raise typer.Exit(1)


@commands.command(epilog=examples("sqrtdk zoo", "sqrtdk zoo --family gpt2 --family t5 --json"))
def zoo(
    family: Annotated[
        list[str] | None, typer.Option(help="Measure this family (model_type) here; may be given several times.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure every family here (minutes), not only show what was measured.")
    ] = False,
    store: Annotated[
        Path | None, typer.Option(help="Directory with a file per family; started again, only the rest is measured.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core, two at least.", min=1)] = None,
    json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table of the families that do not use 1/√dₖ.")
    ] = False,
    plot: Plot = None,
) -> None:
    """The scale that each family of transformers declares and the one its code applies, in small models.

    Without options the record that comes with sqrtdk, with its date and versions; nothing is computed.
    """
    if json and markdown:
        raise InvalidValueError("--json and --markdown exclude each other, got both")
    require_drawable(plot)
    if not family and not measure:
        from sqrtdk.families import load_zoo

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
    if markdown:
        from sqrtdk import terminal
        from sqrtdk.families import UNUSUAL_COLUMNS, list_unusual

        print(terminal.markdown_table(list_unusual(record), UNUSUAL_COLUMNS))
        draw_figure(record, plot)
        return
    present(record, json, plot)


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path, _LONGEST_TEXT).decode()
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"--text must be a file with text in UTF-8, got {path} ({error})") from None
