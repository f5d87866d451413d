"""Options that several commands have, and how the help shows examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw the figure into this .png, .svg or .html file.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.", min=0)]
Store = Annotated[
    Path | None,
    typer.Option(help="SQLite file that keeps finished training runs; started again, only the rest is trained."),
]
Workers = Annotated[int | None, typer.Option(help="Training processes; default: one per core.", min=1)]


def examples(*lines: str) -> str:
    """The end of a command's help: lines that can be typed.

    >>> examples("sqrtdk info")
    'Examples:\\n\\nsqrtdk info'
    """
    # The help joins single lines to paragraphs: an empty line between keeps each on its own.
    return "\n\n".join(["Examples:", *lines])
