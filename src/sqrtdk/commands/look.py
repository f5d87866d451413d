"""Commands that show: everything on one page, pages to move sliders on, the figure of a finished record."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk import exercises
from sqrtdk.commands.flags import Json, Seed, Store, Workers, examples
from sqrtdk.commands.presenting import draw_figure, gathering, require_drawable
from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.options import naming
from sqrtdk.records import Record

commands = typer.Typer()


@commands.command(epilog=examples("sqrtdk report", "sqrtdk report --output report.html --store runs.sqlite --seeds 8"))
def report(
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("sqrtdk-report.html"),
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="Training runs per setting.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Training steps per run.", min=1)] = 600,
    store: Store = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Claims, exercises and the ablation in one self-contained HTML file, and a summary here."""
    from sqrtdk import terminal
    from sqrtdk.claims import check_claims
    from sqrtdk.report import require_page, write_report

    with naming("--output"):
        require_page(output)
    with gathering(seed, seeds, steps, store, workers) as (evidence, bar):
        if not len(evidence.lab.store):
            evidence.lab.prepare()
        checked = check_claims(None, evidence, on_claim=lambda claim, i, n: bar.show(f"checking {claim.id}", i / n))
        bar.show("exercises", 0.9)
        made = [
            checked,
            exercises.variance(seed=seed),
            exercises.saturation(),
            exercises.temperature(seed=seed),
            exercises.gradients(seed=seed),
            exercises.explain(seed=seed),
        ]
        records = [*(evidence.lab.keep(record) for record in made)]
        records += [evidence.learning, evidence.temperatures, evidence.swap]
    written = write_report(records, output, command=f"sqrtdk report --seed {seed} --seeds {seeds} --steps {steps}")
    if json:
        terminal.print_json(checked)
    else:
        terminal.print_summary(records, written)


@commands.command(epilog=examples("sqrtdk serve --open", "sqrtdk serve --store runs.sqlite --audit audit.json"))
def serve(
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Where to listen; one that other machines reach needs --token.")] = (
        "127.0.0.1"
    ),
    token: Annotated[str | None, typer.Option(help="What every request must bring: 16 characters or more.")] = None,
    store: Annotated[Path | None, typer.Option(help="SQLite file of runs to follow; it need not exist yet.")] = None,
    audit: Annotated[Path | None, typer.Option(help="What `sqrtdk audit --json` printed; default: MiniLM's.")] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Pages on this machine: Explore (sliders over the real operation), Audit (layers × heads), Runs (live curves)."""
    from sqrtdk.web import serve as serve_pages

    def announce(address: str) -> None:
        print(f"sqrtdk serves {address} (Ctrl-C ends it)", flush=True)
        if browse:
            import webbrowser

            webbrowser.open(address)

    serve_pages(host=host, port=port, token=token, store=store, audit=audit, announce=announce)


@commands.command(epilog=examples("sqrtdk draw runs.sqlite ablation.html --kind ablation"))
def draw(
    source: Annotated[Path, typer.Argument(help="A store, or a file with what a command printed with --json.")],
    output: Annotated[Path, typer.Argument(help="The .png, .svg or .html file to write.")],
    kind: Annotated[str | None, typer.Option(help="Of several records in a store: the latest of this kind.")] = None,
) -> None:
    """Draw the figure of a finished record again, from a store or from JSON: nothing is computed."""
    from sqrtdk.report import figure_kinds

    require_drawable(output, "OUTPUT")
    records = [record for record in _read_records(source) if kind in (None, record.kind)]
    drawable = [record for record in records if record.kind in figure_kinds()]
    if not drawable:
        wanted = "with a figure" if kind is None else f"of kind {kind!r}"
        raise InvalidValueError(f"SOURCE must hold a record {wanted}, got none in {source}")
    draw_figure(drawable[-1], output)


def _read_records(source: Path) -> list[Record]:
    """The finished records of a store, or the one of a JSON file."""
    if not source.is_file():
        raise InvalidValueError(f"SOURCE must be a file, got {source}")
    if source.read_bytes()[:1] == b"{":
        try:
            return [Record.from_json(json_module.loads(source.read_text(encoding="utf-8")))]
        except ValueError as error:
            raise InvalidValueError(f"SOURCE must be what --json prints, got {source} ({error})") from None
    from sqrtdk.lab import Store

    try:
        with Store(source) as store:
            return store.records()
    except SqrtdkError as error:
        raise type(error)(str(error).replace("store", "SOURCE", 1)) from None
