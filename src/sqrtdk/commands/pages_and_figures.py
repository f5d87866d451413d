"""Commands that show results: the report, the pages with sliders, the figure of a finished record."""

from __future__ import annotations

import importlib.util
import json as json_module
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sqrtdk.audits.checkpoints import find_checkpoint
from sqrtdk.commands.flags import Json, Seed, Store, Workers, examples
from sqrtdk.commands.options import naming
from sqrtdk.commands.report_records import MINILM
from sqrtdk.commands.results import draw_figure, gathering, require_drawable
from sqrtdk.errors import InvalidValueError, missing_extra
from sqrtdk.records.files import read_bounded
from sqrtdk.records.observations import read_observations
from sqrtdk.records.record import Record

if TYPE_CHECKING:
    from sqrtdk.torch.models.sentences import SentenceReader

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
            help="Write this section only; repeat the option for several. Sections: answer, variance, saturation, try, "
            "words, learning, training, gradients, inverse, temperature, models, literature, claims."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Train with eight seeds instead of three, and unfold all details.")
    ] = False,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Use the results in a store or in a file from --json, and compute nothing."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    seed: Seed = 0,
    seeds: Annotated[int | None, typer.Option(help="Training runs per setting. Default: 3.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Training steps per run.", min=1)] = 600,
    store: Store = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Write one self-contained page that answers why attention divides by √dₖ, with sliders, models and claims."""
    from sqrtdk.commands import terminal
    from sqrtdk.commands.report_records import Gathered, can_train, gather, list_topics, load_shipped
    from sqrtdk.report import require_page, write_report

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
            print(
                f"sqrtdk: sections that need training are left out: {missing_extra('torch', 'torch')}", file=sys.stderr
            )
    written = write_report(path=output, command=command, only=only, full=full, **gathered._asdict())
    if json:
        terminal.write_json([record.as_json() for record in gathered.records])
    else:
        terminal.print_summary(gathered.records, written)
    if open_page:
        import webbrowser

        webbrowser.open(written.resolve().as_uri())


@commands.command(
    epilog=examples(
        "sqrtdk serve --open",
        "sqrtdk serve --teach --open",
        "sqrtdk serve --store runs.sqlite --audit audit.json",
        "sqrtdk serve --store heads.jsonl",
    )
)
def serve(
    port: Annotated[int, typer.Option(help="Port to listen on. Use 0 for any free port.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address that other machines reach needs --token.")
    ] = ("127.0.0.1"),
    token: Annotated[
        str | None, typer.Option(help="Secret that every request must carry: 16 characters or more.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="File to follow: runs (SQLite) or what a Monitor writes (.jsonl). It may be created later."),
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="File from `sqrtdk audit --json`. Default: the audit of MiniLM.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model that reads sentences on the page Words, as for `audit`. Default: MiniLM if installed."
        ),
    ] = None,
    teach: Annotated[
        bool, typer.Option("--teach", help="Start in teach mode: large type, one figure per screen, arrow keys.")
    ] = False,
    browse: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve pages locally: Explore (sliders), Words (sentences), Audit (heads) and Runs (live). Needs no network."""
    from sqrtdk.web import serve as serve_pages

    def announce(address: str) -> None:
        address += "#teach" if teach else ""
        print(f"sqrtdk serves {address} (Ctrl-C ends it)", flush=True)
        if browse:
            import webbrowser

            webbrowser.open(address)

    reader = _find_reader(model)
    serve_pages(host=host, port=port, token=token, store=store, audit=audit, reader=reader, announce=announce)


class _LateReader:
    """Model for the page Words. torch loads when the first sentence comes, not before the pages are served."""

    def __init__(self, name: str) -> None:
        with naming("--model"):
            find_checkpoint(name)
        self.name = name

    @cached_property
    def _reader(self) -> SentenceReader:
        from sqrtdk.torch.models.sentences import SentenceReader

        return SentenceReader(self.name)

    def read(self, text: str) -> dict[str, Any]:
        return self._reader.read(text)

    def read_head(self, text: str, layer: int, head: int) -> list[list[int | None]]:
        return self._reader.read_head(text, layer, head)


def _find_reader(model: str | None) -> _LateReader | None:
    """Return the model for the page Words; none if no model is named and MiniLM is not installed."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if model is None and (missing or importlib.util.find_spec(MINILM) is None):
        return None
    if missing:
        raise missing_extra(missing[0], "hf")
    return _LateReader(model or MINILM)


@commands.command(
    name="plot",
    epilog=examples(
        "sqrtdk plot runs.sqlite ablation.html --kind ablation",
        "sqrtdk plot audit.json heads.png",
        "sqrtdk plot heads.jsonl run.png",
    ),
)
def plot_record(
    source: Annotated[
        Path, typer.Argument(help="A store, a file that a command wrote with --json, or one that Monitor wrote.")
    ],
    output: Annotated[Path, typer.Argument(help="File to write: .png, .svg or .html.")],
    kind: Annotated[str | None, typer.Option(help="Plot the latest record of this kind.")] = None,
) -> None:
    """Plot a finished record again, from a store or from JSON. Nothing is computed."""
    from sqrtdk.report import figure_kinds

    require_drawable(output, "OUTPUT")
    if source.suffix == ".jsonl" and kind in (None, "monitor"):
        with naming("SOURCE", "path"):
            draw_figure(read_observations(source), output)
        return
    content = _read_json(source, "SOURCE")
    if isinstance(content, dict) and "heads" in content and kind in (None, "audit"):
        from sqrtdk.audits import read_audit

        with naming("SOURCE", "audit"):
            draw_figure(read_audit(source), output)
        return
    records = [record for record in _read_records(source) if kind in (None, record.kind)]
    drawable = [record for record in records if record.kind in figure_kinds()]
    if not drawable:
        wanted = "with a figure" if kind is None else f"of kind {kind!r}"
        raise InvalidValueError("SOURCE", f"must hold a record {wanted}, got none in {source}")
    draw_figure(drawable[-1], output)


def _read_json(source: Path, name: str) -> Any:
    """Return the content of a JSON file, or None for another file such as a store."""
    if not source.is_file():
        raise InvalidValueError(name, f"must be a file, got {source}")
    with source.open("rb") as file:
        if file.read(1) not in (b"{", b"["):
            return None
    try:
        return json_module.loads(read_bounded(source, _MOST_BYTES).decode())
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(name, f"must be what --json prints, got {source} ({error})") from None


def _read_records(source: Path, name: str = "SOURCE") -> list[Record]:
    """Return the finished records of a store or of a JSON file."""
    content = _read_json(source, name)
    if content is not None:
        from sqrtdk.report.kinds import kind_of

        try:
            records = [Record.from_json(one) for one in (content if isinstance(content, list) else [content])]
            for record in records:
                kind_of(record)
            return records
        except (ValueError, TypeError) as error:
            raise InvalidValueError(name, f"must be what --json prints, got {source} ({error})") from None
    from sqrtdk.lab import Store

    with naming(name, "store"), Store(source, read_only=True) as store:
        return store.records()
