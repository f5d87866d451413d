"""Commands for trying scales: the policies there are, and training with each of them."""

from __future__ import annotations

from typing import Annotated

import typer

from sqrtdk import scales
from sqrtdk.commands.flags import Json, Plot, Store, Workers, examples
from sqrtdk.commands.presenting import present, require_drawable
from sqrtdk.options import read_names, read_numbers
from sqrtdk.progress import follow, progress_bar
from sqrtdk.records import Record

commands = typer.Typer()


@commands.command(
    epilog=examples(
        "sqrtdk ablate --scale none,sqrt --control --store runs.sqlite",
        "sqrtdk ablate --scale none,sqrt,inverse --lr 3e-4,1e-3,3e-3,1e-2 --plot a.html",
    )
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
        str, typer.Option(help="Learning rates; of several each setting has the one that is best on other seeds.")
    ] = "1e-3",
    selection: Annotated[int, typer.Option(help="Seeds that choose among several learning rates.", min=1)] = 4,
    init: Annotated[str, typer.Option(help="unit, torch, xavier, absorbed or grown, separated by commas.")] = "unit",
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Add the controls: no scale with the start of 1/√dₖ, with its step, with both; 1/dₖ with its start.",
        ),
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
        also=lab.CONTROLS if control else (),
        selection=selection,
        heads=heads,
        layers=layers,
        d_model=d_model,
        batch=batch,
    )
    require_drawable(plot)
    with progress_bar() as bar, lab.Lab(store, lab.Processes(workers), follow(bar, "training")) as place:
        record = lab.ablate(spec, place)
    present(record, json, plot, curves=curves)


@commands.command(name="scales", epilog=examples("sqrtdk scales", "sqrtdk scales --json"))
def list_scales(json: Json = False) -> None:
    """The scaling policies: name, formula, source; and those that learn, with their module in sqrtdk.torch.nn."""
    fixed = [scales.policy_type(name) for name in scales.names()]
    rows = [{"name": one.name, "formula": one.formula, "source": one.source, "module": None} for one in fixed]
    rows += [
        {"name": one.name, "formula": one.formula, "source": one.source, "module": one.module}
        for one in scales.LEARNABLE.values()
    ]
    present(Record(kind="scales", spec={}, tables={"scales": rows}), json, None)
