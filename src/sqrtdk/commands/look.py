"""Commands that show: everything on one page, pages to move sliders on, the figure of a finished record."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.commands.flags import Json, Seed, Store, Workers, examples
from sqrtdk.commands.presenting import draw_figure, gathering, require_drawable
from sqrtdk.errors import InvalidValueError, missing_extra
from sqrtdk.options import naming
from sqrtdk.records import Record, read_bounded

commands = typer.Typer()

_MOST_BYTES = 512 * 2**20


@commands.command(
    epilog=examples("sqrtdk report --open", "sqrtdk report --only gradients --only claims --output report.html")
)
def report(
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("sqrtdk-report.html"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="A section to write, several if given several times: answer, try, variance, saturation, gradients, "
            "training, temperature, models, claims; nothing else is computed."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Eight seeds in place of three, and nothing folded.")] = False,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Tell it from a store or from what --json printed: nothing is computed."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    seed: Seed = 0,
    seeds: Annotated[int | None, typer.Option(help="Training runs per setting; default: 3.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Training steps per run.", min=1)] = 600,
    store: Store = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Why √dₖ, as a story on one self-contained page: the answer, sliders, every finding, real models, the claims."""
    from sqrtdk import terminal
    from sqrtdk.report import require_page, write_report
    from sqrtdk.report_records import Gathered, can_train, gather, list_topics, load_shipped

    topics = list_topics(only)
    with naming("--output"):
        require_page(output)
    if source and store is not None:
        raise InvalidValueError("--from and --store exclude each other, got both")
    runs = seeds if seeds is not None else 8 if full else 3
    if source:
        told = [record for path in source for record in _read_records(path, "--from")]
        gathered = Gathered([*load_shipped(), *told], None, {})
        command = "sqrtdk report " + " ".join(f"--from {path}" for path in source)
    else:
        with gathering(seed, runs, steps, store, workers) as (evidence, bar):
            gathered = gather(topics, evidence, bar.show)
        command = f"sqrtdk report --seed {seed} --seeds {runs} --steps {steps}"
        if not can_train() and only is None:
            print(f"sqrtdk: what has to be trained is left out: {missing_extra('torch', 'torch')}", file=sys.stderr)
    written = write_report(path=output, command=command, only=only, full=full, **gathered._asdict())
    if json:
        terminal.write_json([record.as_json() for record in gathered.records])
    else:
        terminal.print_summary(gathered.records, written)
    if open_page:
        import webbrowser

        webbrowser.open(written.resolve().as_uri())


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
        raise InvalidValueError("SOURCE", f"must hold a record {wanted}, got none in {source}")
    draw_figure(drawable[-1], output)


def _read_records(source: Path, name: str = "SOURCE") -> list[Record]:
    """The finished records of a store, or those of a JSON file."""
    if not source.is_file():
        raise InvalidValueError(name, f"must be a file, got {source}")
    with source.open("rb") as file:
        is_json = file.read(1) in (b"{", b"[")
    if is_json:
        try:
            content = json_module.loads(read_bounded(source, _MOST_BYTES).decode())
            return [Record.from_json(one) for one in (content if isinstance(content, list) else [content])]
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(name, f"must be what --json prints, got {source} ({error})") from None
    from sqrtdk.lab import Store

    with naming(name, "store"), Store(source, read_only=True) as store:
        return store.records()
