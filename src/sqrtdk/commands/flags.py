"""Options that several commands share, and the examples at the end of a help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Also write the figure to this .png, .svg or .html file.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.", min=0)]
Store = Annotated[
    Path | None,
    typer.Option(help="SQLite file for finished training runs. A command that is started again trains only the rest."),
]
Maps = Annotated[
    bool, typer.Option("--maps/--no-maps", help="Record attention maps of one example, which the page Runs replays.")
]
Workers = Annotated[int | None, typer.Option(help="Training processes. Default: one per core.", min=1)]

On = Annotated[
    str | None,
    typer.Option(
        help="Where to train: ray (a Ray cluster of this machine's own), auto (the one that runs here) or the address "
        "host:port of a cluster. Default: processes of this machine."
    ),
]
NumCpus = Annotated[float | None, typer.Option(help="With --on: CPUs that a run occupies. Default: 1.")]
NumGpus = Annotated[float | None, typer.Option(help="With --on: GPUs that a run occupies.")]
Memory = Annotated[int | None, typer.Option(help="With --on: bytes of memory that a run occupies.", min=1)]


def examples(*lines: str) -> str:
    """Write the examples at the end of a command's help.

    >>> examples("sqrtdk info")
    'Examples:\\n\\nsqrtdk info'
    """
    # The help joins single lines to paragraphs: an empty line between keeps each on its own.
    return "\n\n".join(["Examples:", *lines])
