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
Workers = Annotated[int | None, typer.Option(help="Training processes. Default: one per core.", min=1)]


def examples(*lines: str) -> str:
    """Write the examples at the end of a command's help.

    >>> examples("sqrtdk info")
    'Examples:\\n\\nsqrtdk info'
    """
    # The help joins single lines to paragraphs: an empty line between keeps each on its own.
    return "\n\n".join(["Examples:", *lines])
