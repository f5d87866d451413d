"""The command line: each command a few lines that call the layer below."""

from __future__ import annotations

import importlib.util
import inspect
import json as json_module
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sqrtdk import backends, exercises, scales
from sqrtdk.display import count
from sqrtdk.errors import InvalidValueError, SqrtdkError, missing_extra
from sqrtdk.options import name_options, naming, read_names, read_numbers
from sqrtdk.progress import Bar, follow, progress_bar
from sqrtdk.records import Record, cpu_name, versions
from sqrtdk.spelling import never_fail

app = typer.Typer(
    name="sqrtdk",
    help="The scale of attention: every claim checked, every exercise a command with a figure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw the figure into this .png, .svg or .html file.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.", min=0)]
Store = Annotated[
    Path | None,
    typer.Option(help="SQLite file that keeps finished training runs; started again, only the rest is trained."),
]
Workers = Annotated[int | None, typer.Option(help="Training processes; default: one per core.", min=1)]


def _print_versions(wanted: bool) -> None:
    if wanted:
        print(", ".join(f"{package} {version}" for package, version in versions().items()))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", callback=_print_versions, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: sqrtdk claims soft grad.vanish --markdown")
def claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claims or groups (op, var, soft, grad, scale); none: all.")
    ] = None,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="Training runs per setting for the claims about learning.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Training steps per run.", min=1)] = 600,
    store: Store = None,
    workers: Workers = None,
    training: Annotated[
        bool, typer.Option("--training/--no-training", help="Check the claims that train models (torch, minutes) too.")
    ] = True,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    plot: Plot = None,
) -> None:
    """Check every claim of the four texts by computation: claimed, computed, verdict, why."""
    from sqrtdk import terminal
    from sqrtdk.claims import check_claims, name_sources
    from sqrtdk.report.kinds import CLAIM_COLUMNS

    if json and markdown:
        raise InvalidValueError("--json and --markdown exclude each other, got both")
    _require_drawable(plot)
    with _evidence(seed, seeds, steps, store, workers) as (evidence, bar):
        record = check_claims(
            ids,
            evidence,
            training=training,
            on_claim=lambda claim, i, n: bar.show(f"checking {claim.id}", i / n),
        )
    if markdown:
        # Not typer's echo, which takes an ASCII terminal for a misconfigured one and writes UTF-8.
        print(terminal.markdown_table(record.tables["claims"], CLAIM_COLUMNS), f"\n{name_sources()}", sep="\n")
        _draw(record, plot)
        return
    _present(record, json, plot)


@app.command(epilog="Example: sqrtdk variance --d-k 4,64,512 --plot variance.png")
def variance(
    d_k: Annotated[str, typer.Option(help="Sizes, separated by commas.")] = "4,64,512",
    samples: Annotated[int, typer.Option(help="Pairs (q, k) per size.")] = 20_000,
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 1: the standard deviation of unscaled scores at any dₖ, and after dividing by √dₖ and dₖ."""
    _require_drawable(plot)
    with _working("drawing q and k"):
        record = exercises.variance(read_numbers("--d-k", d_k, int), samples, seed)
    _present(record, json, plot)


@app.command(epilog="Example: sqrtdk saturation --largest 10 --plot saturation.svg")
def saturation(
    largest: Annotated[float, typer.Option(help="Sweep x from 0 to here.")] = 10.0,
    zeros: Annotated[int, typer.Option(help="How many zeros stand beside x.")] = 3,
    share: Annotated[float, typer.Option(help="Saturated: this share of the Jacobian's trace is left.")] = 0.05,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 2: softmax([x, 0, 0, 0]) for x from 0 to 10; where does it saturate?"""
    _require_drawable(plot)
    record = exercises.saturation(largest=largest, zeros=zeros, share=share)
    _present(record, json, plot)


@app.command(
    epilog="Example: sqrtdk ablate --scale none,sqrt,inverse --lr 3e-4,1e-3,3e-3 --store runs.sqlite --plot a.html"
)
def ablate(
    task: Annotated[str, typer.Option(help="recall (associative recall) or text (next character).")] = "recall",
    scale: Annotated[
        str,
        typer.Option(
            help="Policies, separated by commas: none,sqrt,fixed:10 … and those that learn: learned (a temperature per "
            "head), query, position (a temperature per query), qk_norm (its gain; qk_norm:1 has a fixed one)."
        ),
    ] = "none,sqrt,inverse",
    d_k: Annotated[str, typer.Option(help="Sizes dₖ, separated by commas.")] = "64",
    seeds: Annotated[int, typer.Option(help="Seeds per setting.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Training steps per run.", min=1)] = 600,
    lr: Annotated[
        str, typer.Option(help="Learning rates; three or more also compare each policy at its best.")
    ] = "1e-3",
    init: Annotated[str, typer.Option(help="unit, torch, xavier or absorbed, separated by commas.")] = "unit",
    control: Annotated[
        bool, typer.Option("--control", help="Add the control: no scale, its factor inside W_q and W_k (absorbed).")
    ] = False,
    heads: Annotated[int, typer.Option(help="Attention heads.", min=1)] = 1,
    layers: Annotated[int, typer.Option(help="Blocks.", min=1)] = 2,
    d_model: Annotated[int, typer.Option(help="Width.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Sequences per step.", min=1)] = 16,
    store: Store = None,
    workers: Workers = None,
    json: Json = False,
    curves: Annotated[bool, typer.Option("--curves", help="With --json: the learning curves too.")] = False,
    plot: Plot = None,
) -> None:
    """Exercise 3: train with and without scaling and compare learning, with seeds, controls and paired tests."""
    from sqrtdk import lab

    spec = lab.AblationSpec(
        task=task,
        scales=read_names("--scale", scale),
        d_ks=read_numbers("--d-k", d_k, int),
        seeds=seeds,
        steps=steps,
        lrs=read_numbers("--lr", lr, float),
        inits=read_names("--init", init),
        also=(("none", "absorbed"),) if control else (),
        heads=heads,
        layers=layers,
        d_model=d_model,
        batch=batch,
    )
    _require_drawable(plot)
    with progress_bar() as bar, lab.Lab(store, lab.Processes(workers), follow(bar, "training")) as place:
        record = lab.ablate(spec, place)
    _present(record, json, plot, curves=curves)


@app.command(epilog="Example: sqrtdk temperature --d-k 64 --n 32 --plot temperature.png")
def temperature(
    d_k: Annotated[int, typer.Option(help="Length of queries and keys.")] = 64,
    n: Annotated[int, typer.Option(help="Keys per query.")] = 32,
    relative: Annotated[str, typer.Option(help="Temperatures in units of √dₖ.")] = "0.5,1,2",
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 4: τ = ½, 1, 2 × √dₖ: patterns side by side, entropy, saturation index, gradients."""
    _require_drawable(plot)
    with _working("measuring attention at each temperature"):
        record = exercises.temperature(d_k=d_k, n=n, relatives=read_numbers("--relative", relative, float), seed=seed)
    _present(record, json, plot)


@app.command(epilog="Example: sqrtdk gradients --d-k 64,512 --n 16,1024 --plot gradients.html")
def gradients(
    d_k: Annotated[str, typer.Option(help="Sizes dₖ, separated by commas.")] = "4,64,512",
    n: Annotated[str, typer.Option(help="Numbers of keys, separated by commas.")] = "16,128,1024",
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Exercise 5: ∂softmax/∂input for uniform and peaked rows, and how large gradients are over dₖ × n."""
    _require_drawable(plot)
    with _working("measuring gradients") as bar:
        record = exercises.gradients(
            d_ks=read_numbers("--d-k", d_k, int),
            ns=read_numbers("--n", n, int),
            seed=seed,
            on_size=lambda size, done: bar.show(f"measuring gradients: {size}", done),
        )
    _present(record, json, plot)


@app.command(epilog="Example: sqrtdk explain --d-k 64 --n 1024")
def explain(
    d_k: Annotated[int, typer.Option(help="Length of queries and keys.")] = 64,
    n: Annotated[int, typer.Option(help="Keys per query.")] = 1024,
    seed: Seed = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """What no scaling, 1/√dₖ and 1/dₖ do at this size: predicted beside measured."""
    _require_drawable(plot)
    with _working(f"measuring dₖ {d_k}, n {n}"):
        record = exercises.explain(d_k=d_k, n=n, seed=seed)
    _present(record, json, plot)


@app.command(epilog="Example: sqrtdk info --json")
def info(json: Json = False) -> None:
    """What computes attention here: the backends, which one is in use, threads, versions and CPU."""
    listed, used, threads = backends.list(), backends.current(), backends.threads()
    rows = [
        {"name": one.name, "runs_here": one.runs_here, "in_use": one.name == used, "about": one.why_not or one.about}
        for one in listed
    ]
    reading = [
        f"Attention runs on {used} with {count(threads, 'thread')}.",
        f"{cpu_name()}; " + ", ".join(f"{package} {version}" for package, version in versions().items()) + ".",
    ]
    if not any(one.runs_here for one in listed[:-1]):
        reading.insert(0, f"sqrtdk runs without its kernel ({listed[0].why_not}): attention is computed in NumPy.")
    record = Record(kind="info", spec={"backend": used, "threads": threads}, tables={"backends": rows}, reading=reading)
    _present(record, json, None)


@app.command(name="scales", epilog="Example: sqrtdk scales --json")
def list_scales(json: Json = False) -> None:
    """The scaling policies: name, formula, source; and those that learn, with their module in sqrtdk.torch.nn."""
    fixed = [scales.policy_type(name) for name in scales.names()]
    rows = [{"name": one.name, "formula": one.formula, "source": one.source, "module": None} for one in fixed]
    rows += [
        {"name": one.name, "formula": one.formula, "source": one.source, "module": one.module}
        for one in scales.LEARNABLE.values()
    ]
    _present(Record(kind="scales", spec={}, tables={"scales": rows}), json, None)


@app.command(epilog="Example: sqrtdk bench --suite square,real --output benchmark.json --plot benchmark.png")
def bench(
    suite: Annotated[
        str | None,
        typer.Option(
            help="square, statistics, real, overhead, tensors, bfloat16, peers, model, training, growth, memory; all."
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per case that should count; default: 15, quick 7.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of everyone; default: as `sqrtdk info` says.")] = None,
    backend: Annotated[str | None, typer.Option(help="avx512, avx2, portable or reference; default: the best.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Sequences up to 2048 only, fewer rounds.")] = False,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option(help="Also write JSON with every timing into this file.")] = None,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Time attention beside its peers: paired ratios, shares of the probed peak, errors, memory, growth."""
    from sqrtdk.bench import run_benchmark, write_raw
    from sqrtdk.bench.tabulation import keep_measured, was_too_busy
    from sqrtdk.bench.timing import FEWEST_ROUNDS
    from sqrtdk.report.files import require_directory

    _require_drawable(plot)
    if output is not None:
        with naming("--output"):
            require_directory(output)
    suites = None if suite is None else read_names("--suite", suite)
    with progress_bar() as bar:
        record = run_benchmark(
            suites, rounds=rounds, threads=threads, backend=backend, quick=quick, seed=seed, on_step=bar.show
        )
    if output is not None:
        write_raw(record, output)
    busy = was_too_busy(record)
    # JSON has every case; tables and figures show what was measured.
    shown = record if json else replace(record, tables=keep_measured(record))
    _present(shown, json, None if busy else plot)
    if busy:
        _fail(
            f"the machine was too busy: in no case did {FEWEST_ROUNDS} rounds count"
            f"{'' if plot is None else ', so there is no figure'}; try again when it is idle, or with more --rounds",
            1,
        )


@app.command(epilog="Example: sqrtdk report --output report.html --store runs.sqlite --seeds 8")
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
    with _evidence(seed, seeds, steps, store, workers) as (evidence, bar):
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


class FailOn(StrEnum):
    """From which severity on a finding makes a command fail."""

    WARNING = "warning"
    ERROR = "error"


@app.command(epilog="Examples: sqrtdk audit ./my-model; sqrtdk audit step-2000 --compare step-1000 --html audit.html")
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
    with _working("loading torch and transformers") as bar:
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


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"--text must be a file with text in UTF-8, got {path} ({error})") from None


@app.command(epilog="Example: sqrtdk zoo --family gpt2 --family t5 --json")
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
    _require_drawable(plot)
    if not family and not measure:
        from sqrtdk.families import load_zoo

        record = load_zoo()
    else:
        from sqrtdk.zoo import take_census

        with _working("measuring families") as bar:
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
        _draw(record, plot)
        return
    _present(record, json, plot)


@app.command(epilog="Example: sqrtdk draw runs.sqlite ablation.html --kind ablation")
def draw(
    source: Annotated[Path, typer.Argument(help="A store, or a file with what a command printed with --json.")],
    output: Annotated[Path, typer.Argument(help="The .png, .svg or .html file to write.")],
    kind: Annotated[str | None, typer.Option(help="Of several records in a store: the latest of this kind.")] = None,
) -> None:
    """Draw the figure of a finished record again, from a store or from JSON: nothing is computed."""
    from sqrtdk.report import figure_kinds

    _require_drawable(output, "OUTPUT")
    records = [record for record in _read_records(source) if kind in (None, record.kind)]
    drawable = [record for record in records if record.kind in figure_kinds()]
    if not drawable:
        wanted = "with a figure" if kind is None else f"of kind {kind!r}"
        raise InvalidValueError(f"SOURCE must hold a record {wanted}, got none in {source}")
    _draw(drawable[-1], output)


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


@contextmanager
def _evidence(seed: int, seeds: int, steps: int, store: Path | None, workers: int | None) -> Iterator[tuple[Any, Any]]:
    """Evidence from a lab with a progress bar; without a store, one that lasts as long as the command."""
    from sqrtdk.claims import Evidence
    from sqrtdk.lab import Lab, Processes

    with progress_bar() as bar, Lab(store, Processes(workers), follow(bar, "training")) as lab:
        yield Evidence(seed, seeds, steps, lab), bar


@contextmanager
def _working(doing: str) -> Iterator[Bar]:
    """Progress for what has no steps to count, or tells them itself."""
    with progress_bar() as bar:
        bar.show(doing)
        yield bar


def _present(record: Record, json: bool, plot: Path | None, *, curves: bool = False) -> None:
    from sqrtdk import terminal
    from sqrtdk.report.kinds import kind_of, shown_tables

    _draw(record, plot)
    if json:
        terminal.print_json(record, curves=curves or kind_of(record).prints_curves)
    else:
        terminal.print_record(record, shown_tables(record))


def _draw(record: Record, plot: Path | None) -> None:
    if plot is not None:
        from sqrtdk.report import save_figure

        written = save_figure(record, plot)
        print(f"figure written to {written}", file=sys.stderr)


def _require_drawable(plot: Path | None, option: str = "--plot") -> None:
    """Refuse a file that cannot be drawn before hours of work, not after."""
    if plot is not None:
        from sqrtdk.report import require_drawable

        with naming(option):
            require_drawable(plot)


# The help is read as markup: brackets in it, as those of softmax([x, 0, 0, 0]), must not vanish.
for _command in app.registered_commands:
    _command.help = inspect.getdoc(_command.callback).replace("[", "\\[")  # type: ignore[union-attr]

_INTERRUPTED = 130


def _list_options() -> set[str]:
    """Every long option of every command."""
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    return {name for command in commands for option in command.params for name in option.opts if name[:2] == "--"}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; wrong input ends with one line on stderr and exit code 2."""
    never_fail(sys.stdout, sys.stderr)
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="sqrtdk")
    except SqrtdkError as error:
        _fail(name_options(str(error), _list_options()), 2)
    except OSError as error:  # a full disk, a file that is gone: nothing that a traceback would explain
        _fail(str(error), 1)
    except Exception as error:
        # Usage errors of the option parser know their own words and exit code; anything else is a bug and shows itself.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _fail(" ".join(str(format_message()).split()), int(getattr(error, "exit_code", 2)))
    else:
        # The option parser turns Ctrl-C into this exit code.
        if code == _INTERRUPTED:
            _fail("interrupted; finished runs are in the store if one was given", _INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    if message:  # without arguments the help has said everything
        print(f"sqrtdk: {message}", file=sys.stderr)
    sys.exit(code)
