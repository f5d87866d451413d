"""Grids: every combination of policies, sizes, learning rates, inits, tasks and seeds, from Python or a TOML file."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sqrtdk import checks
from sqrtdk.errors import InvalidValueError, unknown_name
from sqrtdk.lab import tasks
from sqrtdk.lab.ablation import curves_of, read_scale
from sqrtdk.lab.laboratory import Lab
from sqrtdk.lab.outcomes import summarise
from sqrtdk.lab.spec import AblationSpec, RunSpec, list_seeds
from sqrtdk.records.record import Record
from sqrtdk.show.table import count
from sqrtdk.wording.names import name_setting
from sqrtdk.wording.numbers import write_loss, write_seconds

_AXES = ("tasks", "lengths", "scales", "d_ks", "heads", "lrs", "inits")
_TIMED_STEPS = 10
_MOST_STORED = 10_000


@dataclass(frozen=True)
class GridSpec:
    """Grid of runs: the product of all lists, every learning rate with every seed.

    It is one `AblationSpec` per task, length, number of heads and learning rate; `sqrtdk.lab.ablate` instead chooses
    a learning rate for each setting and compares the settings.

    Args:
        tasks, scales, d_ks, heads, lrs, inits: values of the axes, as in `RunSpec`.
        lengths: lengths n of the sequences; none: the task's own.
        seeds: how many seeds (0, 1, …), or the seeds themselves.
        steps, batch, layers, d_model, feedforward, record_every: as in `RunSpec`.
        stop_above: as in `RunSpec`, so that diverged runs end early.

    >>> len(GridSpec(d_ks=(16, 64), lrs=(1e-3, 1e-2), seeds=3).runs())
    24
    """

    tasks: Sequence[str] = ("recall",)
    lengths: Sequence[int] = ()
    scales: Sequence[str] = ("none", "sqrt")
    d_ks: Sequence[int] = (64,)
    heads: Sequence[int] = (1,)
    lrs: Sequence[float] = (1e-3,)
    inits: Sequence[str] = ("unit",)
    seeds: int | Sequence[int] = 4
    steps: int = 600
    batch: int = 16
    layers: int = 2
    d_model: int = 64
    feedforward: int = 0
    record_every: int = 10
    stop_above: float | None = 10.0

    def __post_init__(self) -> None:
        for name in _AXES:
            if name != "lengths" or self.lengths != ():
                checks.distinct(name, getattr(self, name))
        self.blocks()

    def blocks(self) -> list[AblationSpec]:
        """Return the parts of the grid, one per task, length, number of heads and learning rate."""
        shared = ("scales", "d_ks", "inits", "seeds", "steps", "batch", "layers", "d_model", "feedforward")
        base = {name: getattr(self, name) for name in (*shared, "record_every", "stop_above")}
        grid = itertools.product(self.tasks, self.lengths or (None,), self.heads, self.lrs)
        return [
            AblationSpec(task=task, task_parameters=tasks.parameters_at(task, n), heads=heads, lrs=(lr,), **base)
            for task, n, heads, lr in grid
        ]

    def runs(self) -> list[RunSpec]:
        """Return all runs, block by block."""
        return [run for block in self.blocks() for run in block.runs()]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _AXES}, "seeds": list_seeds(self.seeds)}


def read_grid(path: str | Path, **changes: Any) -> GridSpec:
    """Return the grid of a TOML file whose keys are the arguments of `GridSpec`.

    Args:
        path: the file.
        changes: arguments that replace those of the file.

    Raises:
        InvalidValueError: the file cannot be read, is no TOML, or has a key too many (the message lists the known).
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidValueError("grid", f"must be a TOML file that can be read, got {str(path)!r}: {error}") from error
    known = [item.name for item in fields(GridSpec)]
    for key in content:
        if key not in known:
            raise unknown_name(f"key in {Path(path).name}", key, known)
    return GridSpec(**{**content, **changes})


def train_grid(spec: GridSpec, lab: Lab | None = None) -> Record:
    """Train all runs of a grid that the lab's store lacks.

    Args:
        spec: the grid.
        lab: where it is trained and kept; None: one for this call alone.

    Returns:
        A record of kind ``"grid"``: the table `runs` has a row per run, `summary` one per setting with the fraction
        of seeds that solve the task; the curves `runs` have one set per run.

    Example:
        ``train_grid(GridSpec(d_ks=(16, 64), lrs=(1e-3, 1e-2))).tables["summary"]``
    """
    if lab is None:
        with Lab() as own:
            return train_grid(spec, own)
    blocks = [(block, block.runs()) for block in spec.blocks()]
    found = iter(lab.run([run for _, runs in blocks for run in runs]))
    table, summary, curves = [], [], []
    for block, runs in blocks:
        records = [next(found) for _ in runs]
        place = {"task": block.task, "length": runs[0].make_task().length, "heads": block.heads}
        rows = [{**record.row, "length": place["length"]} for record in records]
        table += rows
        summary += [{**place, **row} for row in summarise(rows)]
        curves += [{**place, **one} for one in curves_of(records)]
    return lab.keep(
        Record(
            kind="grid",
            spec=spec.as_dict(),
            tables={"summary": summary, "runs": table},
            curves={"runs": curves},
            reading=[*_read(table, summary), *read_scale(curves)],
            headline=_headline(table),
        )
    )


def _headline(table: Sequence[Mapping[str, Any]]) -> str:
    solved = sum(bool(row["solved"]) for row in table)
    return f"{solved} of {count(len(table), 'run')} solve the task."


def _read(table: Sequence[Mapping[str, Any]], summary: Sequence[Mapping[str, Any]]) -> list[str]:
    sentences = [_headline(table)]
    by_scale: dict[str, list[Mapping[str, Any]]] = {}
    for row in summary:
        by_scale.setdefault(row["scale"], []).append(row)
    for scale, rows in by_scale.items():
        finite = [row for row in rows if row["final_loss_median"] is not None]
        if finite:
            best = min(finite, key=lambda row: row["final_loss_median"])
            sentences.append(
                f"{name_setting(scale, best['init'])}: lowest median loss {write_loss(best['final_loss_median'])} "
                f"({best['task']}, n = {best['length']}, dₖ = {best['d_k']}, {count(best['heads'], 'head')}, "
                f"lr {best['lr']:g})."
            )
    diverged = [row["diverged_at"] for row in table if row["status"] == "diverged"]
    if diverged:
        sentences.append(f"{count(len(diverged), 'run')} diverged, the first at step {min(diverged)}.")
    return sentences


def plan_grid(spec: GridSpec, lab: Lab, workers: int) -> Record:
    """Return how many runs a grid has, how many the store lacks, and how long those take.

    Each shape of a model is timed by stored runs of the shape, else by a few steps here.

    Returns:
        A record of kind ``"grid plan"`` with a row per shape in the table `plan`.
    """
    shapes: dict[str, list[RunSpec]] = {}
    for run in spec.runs():
        shapes.setdefault(_shape(run.as_dict()), []).append(run)
    stored: dict[str, list[float]] = {}
    for row in (one["row"] for one in lab.store.runs(_MOST_STORED)):
        if row.get("status") == "done" and row.get("seconds") and "start_steps" not in row:
            stored.setdefault(_shape(row), []).append(row["seconds"] / row["steps"])
    rows: list[dict[str, Any]] = []
    for shape, runs in shapes.items():
        missing = [run for run in runs if lab.store.get(run) is None]
        paces = stored.get(shape)
        pace = min(paces) if paces else _time_step(runs[0]) if missing else 0.0
        first = runs[0]
        rows.append(
            {
                "task": first.task,
                "length": first.make_task().length,
                "d_k": first.d_k,
                "heads": first.heads,
                "runs": len(runs),
                "stored": len(runs) - len(missing),
                "seconds": pace * sum(run.total_steps for run in missing),
                "timed": "stored runs" if paces else "a few steps" if missing else "not needed",
            }
        )
    total, left = sum(row["runs"] for row in rows), sum(row["runs"] - row["stored"] for row in rows)
    seconds = sum(row["seconds"] for row in rows) / max(1, min(workers, left))
    reading = [
        f"{count(total, 'run')}, {total - left} of them stored. The other {left} take about {write_seconds(seconds)} "
        f"with {count(workers, 'process')}."
    ]
    return Record("grid plan", spec.as_dict(), {"plan": rows}, reading=reading, scalars={"seconds": seconds})


def _shape(row: Mapping[str, Any]) -> str:
    """Return what decides the time of a step. Rows of runs have the task's parameters among their columns."""
    parameters = row.get("task_parameters", row)
    names = ("task", "d_k", "heads", "layers", "d_model", "batch", "feedforward")
    return str([*(row[name] for name in names), *(parameters.get(name) for name in ("pairs", "symbols", "context"))])


def _time_step(run: RunSpec) -> float:
    """Return the seconds of a step, without those of the start and of the judgement."""
    from sqrtdk.lab.train import train

    train(replace(run, steps=1, record_every=1))  # what is slow only once
    short, long = (train(replace(run, steps=steps)).row["seconds"] for steps in (1, 1 + _TIMED_STEPS))
    return max(float(long - short) / _TIMED_STEPS, 1e-4)
