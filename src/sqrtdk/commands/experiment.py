"""Commands for experiments: the training ablation, grids of runs, and the list of scaling policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sqrtdk import scales
from sqrtdk.commands.flags import Json, Maps, Memory, NumCpus, NumGpus, On, Plot, Store, Workers, examples
from sqrtdk.commands.interrupts import leaving_at_second_interrupt
from sqrtdk.commands.options import read_names, read_numbers
from sqrtdk.commands.results import present, require_drawable
from sqrtdk.records.record import Record
from sqrtdk.show.progress import follow, progress_bar

commands = typer.Typer()


@commands.command(
    epilog=examples(
        "sqrtdk ablate --scale none,sqrt --control --store runs.sqlite",
        "sqrtdk ablate --scale none,sqrt,inverse --lr 3e-4,1e-3,3e-3,1e-2 --plot a.html",
        "sqrtdk ablate --seeds 100 --store runs.sqlite --on auto",
    )
)
def ablate(
    task: Annotated[
        str, typer.Option(help="Task: recall (associative recall), text (next character) or digits (images).")
    ] = "recall",
    scale: Annotated[
        str,
        typer.Option(
            help="Policies, separated by commas: none (no scaling), sqrt, inverse, fixed:10 … Policies that learn: "
            "learned (a temperature per head), query and position (a temperature per query), qk_norm (a gain; "
            "qk_norm:1 has a fixed gain)."
        ),
    ] = "none,sqrt,inverse",
    d_k: Annotated[str, typer.Option(help="Lengths dₖ of queries and keys, separated by commas.")] = "64",
    seeds: Annotated[int, typer.Option(help="Seeds per setting.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Training steps per run.", min=1)] = 600,
    lr: Annotated[
        str, typer.Option(help="Learning rates. Each setting uses the rate that is best for it on other seeds.")
    ] = "1e-3",
    selection: Annotated[int, typer.Option(help="Seeds that choose among several learning rates.", min=1)] = 4,
    init: Annotated[
        str,
        typer.Option(
            help="Initialisations of W_q and W_k, separated by commas: unit, torch, xavier, rescaled "
            "(unit × dₖ^−¼), grown (unit × dₖ^¼)."
        ),
    ] = "unit",
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Add controls: no scaling with rescaled init, with rescaled step and with both; 1/dₖ with "
            "rescaled init. A rescaled init gives the initial scores of 1/√dₖ.",
        ),
    ] = False,
    heads: Annotated[int, typer.Option(help="Attention heads.", min=1)] = 1,
    layers: Annotated[int, typer.Option(help="Transformer blocks.", min=1)] = 2,
    d_model: Annotated[int, typer.Option(help="Width of the model.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Sequences per step.", min=1)] = 16,
    store: Store = None,
    maps: Maps = True,
    workers: Workers = None,
    to: Annotated[
        Path | None, typer.Option(help="Append the curves of each newly trained run to this file of JSON lines.")
    ] = None,
    on: On = None,
    num_cpus: NumCpus = None,
    num_gpus: NumGpus = None,
    memory: Memory = None,
    json: Json = False,
    curves: Annotated[bool, typer.Option("--curves", help="With --json: include the learning curves.")] = False,
    plot: Plot = None,
) -> None:
    """Exercise 3: train with and without scaling, with seeds, controls and paired tests."""
    from sqrtdk import lab

    spec = lab.AblationSpec(
        task=task,
        scales=read_names("--scale", scale),
        d_ks=read_numbers("--d-k", d_k, int),
        seeds=seeds,
        steps=steps,
        lrs=read_numbers("--lr", lr, float),
        inits=read_names("--init", init),
        also=lab.CONTROLS if control else (),
        selection=selection,
        heads=heads,
        layers=layers,
        d_model=d_model,
        batch=batch,
    )
    require_drawable(plot)
    executor = lab.choose_executor(on, workers, num_cpus=num_cpus, num_gpus=num_gpus, memory=memory)
    with (
        leaving_at_second_interrupt(),
        progress_bar() as bar,
        lab.Lab(store, executor, follow(bar, "training"), to=to, maps=maps) as place,
    ):
        record = lab.ablate(spec, place)
    present(record, json, plot, curves=curves)


@commands.command(
    epilog=examples(
        "sqrtdk grid sweep.toml --dry-run",
        "sqrtdk grid sweep.toml --store runs.sqlite --plot grid.html",
        "sqrtdk grid --scale none,sqrt --d-k 16,64 --lr 1e-3,1e-2 --seeds 2",
    )
)
def grid(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file; its keys are the arguments of sqrtdk.lab.GridSpec.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Tasks, separated by commas: recall, text, digits.")] = None,
    scale: Annotated[str | None, typer.Option(help="Policies, separated by commas.")] = None,
    d_k: Annotated[str | None, typer.Option(help="Lengths dₖ of queries and keys, separated by commas.")] = None,
    heads: Annotated[str | None, typer.Option(help="Numbers of heads, separated by commas.")] = None,
    n: Annotated[str | None, typer.Option(help="Lengths of the sequences, separated by commas.")] = None,
    lr: Annotated[str | None, typer.Option(help="Learning rates, separated by commas; all are trained.")] = None,
    init: Annotated[str | None, typer.Option(help="Initialisations of W_q and W_k, separated by commas.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per setting. Default: 4.", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps per run. Default: 600.", min=1)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how many runs there are and how long they take on this machine.")
    ] = False,
    store: Store = None,
    maps: Maps = True,
    workers: Workers = None,
    on: On = None,
    num_cpus: NumCpus = None,
    num_gpus: NumGpus = None,
    memory: Memory = None,
    json: Json = False,
    curves: Annotated[bool, typer.Option("--curves", help="With --json: include the learning curves.")] = False,
    plot: Plot = None,
) -> None:
    """Train every combination of policies, sizes, learning rates, inits, tasks and seeds; options replace the file."""
    from sqrtdk import lab

    names = (("tasks", "--task", task), ("scales", "--scale", scale), ("inits", "--init", init))
    integers = (("d_ks", "--d-k", d_k), ("heads", "--heads", heads), ("lengths", "--n", n))
    changes: dict[str, Any] = {
        **{name: read_names(option, text) for name, option, text in names if text is not None},
        **{name: read_numbers(option, text, int) for name, option, text in integers if text is not None},
        **({} if lr is None else {"lrs": read_numbers("--lr", lr, float)}),
        **{name: value for name, value in (("seeds", seeds), ("steps", steps)) if value is not None},
    }
    spec = lab.GridSpec(**changes) if file is None else lab.read_grid(file, **changes)
    require_drawable(plot)
    executor = lab.choose_executor(on, workers, num_cpus=num_cpus, num_gpus=num_gpus, memory=memory)
    with (
        leaving_at_second_interrupt(),
        progress_bar() as bar,
        lab.Lab(store, executor, follow(bar, "training"), maps=maps) as laboratory,
    ):
        if dry_run:
            bar.show("timing a few steps")
            record = lab.plan_grid(spec, laboratory, lab.Processes(workers).workers)
        else:
            record = lab.train_grid(spec, laboratory)
    present(record, json, None if dry_run else plot, curves=curves)


@commands.command(name="scales", epilog=examples("sqrtdk scales", "sqrtdk scales --json"))
def list_scales(json: Json = False) -> None:
    """List the scaling policies with formula and source, and the policies that learn with their module."""
    fixed = [scales.policy_type(name) for name in scales.names()]
    rows = [{"name": one.name, "formula": one.formula, "source": one.source, "module": None} for one in fixed]
    rows += [
        {"name": one.name, "formula": one.formula, "source": one.source, "module": one.module}
        for one in scales.LEARNABLE.values()
    ]
    present(Record(kind="scales", spec={}, tables={"scales": rows}), json, None)
