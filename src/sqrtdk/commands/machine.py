"""Command that lists the backends of this machine."""

from __future__ import annotations

import typer

from sqrtdk import backends
from sqrtdk.commands.flags import Json, examples
from sqrtdk.commands.results import present
from sqrtdk.records.record import Record, cpu_name, versions
from sqrtdk.show.table import count

commands = typer.Typer()


@commands.command(epilog=examples("sqrtdk info", "sqrtdk info --json"))
def info(json: Json = False) -> None:
    """List the backends of this machine, the one in use, threads, versions and CPU."""
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
    present(record, json, None)
