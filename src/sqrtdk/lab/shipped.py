"""Larger ablation that ships with sqrtdk: three widths, controls, learning rates chosen on other seeds."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from sqrtdk.lab.outcomes import setting_of
from sqrtdk.lab.spec import CONTROLS, AblationSpec, Choice
from sqrtdk.records.json import round_numbers
from sqrtdk.records.record import Record

__all__ = ["COMMAND", "SHIPPED", "chosen_rates", "compact", "load_ablation"]

SHIPPED = AblationSpec(
    d_ks=(16, 64, 256), seeds=16, lrs=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), also=CONTROLS, selection=4
)
"""What was trained."""

COMMAND = (
    "sqrtdk ablate --d-k 16,64,256 --control --lr 0.0001,0.0003,0.001,0.003,0.01,0.03 --seeds 16 --store runs.sqlite"
)
"""The command that trains it again."""

_RUN_COLUMNS = ("scale", "d_k", "seed", "init", "qk_step", "lr", "status", "final_loss", "solved", "steps_to_threshold")
_CURVE_COLUMNS = ("scale", "d_k", "seed", "init", "qk_step", "lr", "step", "loss", "entropy_ratio")
_STRIDE = 4


@cache
def load_ablation() -> Record:
    """Return the record of `COMMAND` that comes with the package, thinned out by `compact`; with date and versions.

    >>> load_ablation().spec["d_ks"]
    [16, 64, 256]
    """
    content = (resources.files("sqrtdk.records.data") / "ablation.json").read_text(encoding="utf-8")
    return Record.from_json(json.loads(content))


def chosen_rates(d_k: int) -> dict[Choice, float]:
    """Return the learning rates that the shipped ablation chose on its selection seeds, by setting.

    >>> chosen_rates(64)[Choice("sqrt", 64)] in SHIPPED.lrs
    True
    """
    settings = (setting_of(row) for row in load_ablation().tables["best"])
    return {setting.choice: setting.lr for setting in settings if setting.d_k == d_k}


def compact(record: Record, date: str) -> Record:
    """Return an ablation small enough to ship: columns that tables and figures need, every fourth point of curves.

    Args:
        record: what `ablate(SHIPPED)` returned.
        date: the day on which it was trained.
    """
    tables = {
        name: [_keep(row, _RUN_COLUMNS) if name.endswith("runs") else round_numbers(row) for row in rows]
        for name, rows in record.tables.items()
        if name != "summary"
    }
    curves = [_thin_out(_keep(run, _CURVE_COLUMNS)) for run in record.curves["runs"]]
    # `best` has all columns of `summary` and more.
    return replace(
        record,
        spec={**record.spec, "command": COMMAND, "date": date},
        tables={**tables, "summary": tables["best"]},
        curves={"runs": curves},
    )


def _keep(row: Any, columns: tuple[str, ...]) -> dict[str, Any]:
    return {name: round_numbers(row[name]) for name in columns}


def _thin_out(run: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [*values[:-1:_STRIDE], values[-1]] if isinstance(values, list) and values else values
        for name, values in run.items()
    }
