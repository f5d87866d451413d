"""Kinds of records: the columns of their tables, their figure and their title."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sqrtdk.errors import InvalidValueError, unknown_name
from sqrtdk.records.record import Record
from sqrtdk.report import (
    exercise_figures,
    gradient_figures,
    grid_figures,
    learning_figures,
    monitor_figures,
    reproduction_figures,
    story_figures,
    zoo_figures,
)
from sqrtdk.report.panels import Figure

Columns = Sequence[str] | None


class Kind(NamedTuple):
    """Presentation of a kind of record.

    Args:
        tables: the tables that a terminal shows, each with its columns; None: all of them.
        figure: plans its figure; None: the kind has no figure.
        title: above it on a page of its own; empty: the kind itself.
        prints_curves: whether `--json` prints the curves without being asked.
    """

    tables: Mapping[str, Columns]
    figure: Callable[[Record], Figure] | None = None
    title: str = ""
    prints_curves: bool = True


_ABLATION = Kind(
    {
        "summary": (
            *("scale", "d_k", "init", "qk_step", "lr", "final_loss_median", "final_loss_iqr", "solved_fraction"),
            *("solved_interval", "steps_to_threshold_median", "n"),
            *("temperature_by_layer", "temperature_range", "temperature_spread_median"),
        )
    },
    learning_figures.show_ablation,
    "Training with and without the scale",
    prints_curves=False,
)

_BEST_COLUMNS = ("scale", "init", "lr", "d_k", "final_loss_median")

CLAIM_COLUMNS = ("id", "source", "claimed", "computed", "verdict", "why")
"""The columns of claims in the report and in Markdown."""

KINDS: dict[str, Kind] = {
    "claims": Kind(
        {"claims": ("id", "source", "verdict", "claimed", "computed", "why")},
        title="What the four sources claim",
    ),
    "concentration": Kind(
        {
            "concentration": ("d_k", "n", "scale", "rows", "effective_keys", "sum_p2", "entropy_ratio", "max_weight"),
            "crossover": None,
        },
        story_figures.show_effective_keys,
        "How many keys a query attends to",
    ),
    "explain": Kind({"side_by_side": None}, gradient_figures.show_explanation, "What the scale does at one size"),
    "variance": Kind(
        {"variance": ("d_k", "scale", "predicted", "measured", "low", "high", "inside")},
        exercise_figures.show_variance,
        "How far scores spread",
    ),
    "saturation": Kind({"sweep": None, "points": None}, exercise_figures.show_saturation, "Where softmax saturates"),
    "ablation": _ABLATION,
    "learned": _ABLATION._replace(title="Temperatures that learn"),
    "widths": _ABLATION._replace(title="Training with and without the scale at several widths"),
    "swap": Kind({"summary": None}, learning_figures.show_swap, "Changing the scale of a trained model"),
    "grid": Kind(
        {
            "summary": (
                *("task", "length", "heads", "scale", "d_k", "init", "lr", "final_loss_median", "final_loss_iqr"),
                *("solved_fraction", "solved_interval", "n", "diverged"),
            )
        },
        grid_figures.show_grid,
        "A grid of training runs",
        prints_curves=False,
    ),
    "grid plan": Kind({"plan": None}),
    "temperature": Kind({"temperature": None}, exercise_figures.show_temperature, "Temperatures around √dₖ"),
    "gradients": Kind(
        {
            "jacobians": None,
            "vanish": (
                *("d_k", "n", "scale", "rows", "jacobian_trace_mean", "jacobian_trace_median", "jacobian_trace_p5"),
                *("jacobian_norm_mean", "grad_q_mean", "grad_q_median", "grad_q_p5", "top_share"),
            ),
        },
        gradient_figures.show_gradients,
        "What gradients do",
    ),
    "bench": Kind(
        dict.fromkeys(("ratios", "timings", "costs", "growth", "memory", "left_out")),
        prints_curves=False,
    ),
    "monitor": Kind(
        {"alerts": None}, monitor_figures.show_monitor, "What heads do while they train", prints_curves=False
    ),
    "zoo": Kind({"families": None}, zoo_figures.show_zoo, "The scale that models use"),
    "spread": Kind({"spread": None}),
    "info": Kind({"backends": None}),
    "nodes": Kind({"nodes": None}, title="Nodes that differ from the driver"),
    "runs": Kind({"runs": None}),
    "run": Kind({"run": None}),
    "run differences": Kind({"differences": None}),
    "scales": Kind({"scales": None}),
    "claim list": Kind({"claims": None}),
    "expectations": Kind({"reproductions": None}),
    "reproductions": Kind(
        {"reproductions": ("name", "expected", "measured", "low", "high", "verdict", "source", "scaled_down")},
        reproduction_figures.show_reproductions,
        "Published results, computed again",
    ),
}
"""Every kind of record."""


def topic_of(record: Record) -> str:
    """Return a record's key in `KINDS`: its kind; ablations are "learned" if scales learn, "widths" with several dₖ."""
    if record.kind != "ablation":
        return record.kind
    best = record.tables.get("best", [])
    missing = [name for name in _BEST_COLUMNS if not best or any(name not in row for row in best)]
    if missing:
        raise InvalidValueError("record", f"must be an ablation whose table best has {', '.join(missing)}, got another")
    if any(row.get("temperature_by_layer") for row in best):
        return "learned"
    return "widths" if len({row["d_k"] for row in best}) > 1 else "ablation"


def kind_of(record: Record) -> Kind:
    """Return the presentation of a record; an unknown kind raises and lists the known ones."""
    if record.kind not in KINDS:
        raise unknown_name("record kind", record.kind, list(KINDS))
    return KINDS[topic_of(record)]


def shown_tables(record: Record) -> dict[str, Columns]:
    """Return the tables that a terminal shows, each with those of its columns that the record has; None: all."""
    shown: dict[str, Columns] = {}
    for name, columns in kind_of(record).tables.items():
        rows = record.tables[name]
        shown[name] = columns if columns is None or not rows else [column for column in columns if column in rows[0]]
    return shown


def figure_for(record: Record) -> Figure:
    """Return the figure that shows a record.

    Raises:
        InvalidValueError: no figure is defined for the record's kind; the message lists the known kinds.

    >>> from sqrtdk.exercises import saturation
    >>> [panel.title for panel in figure_for(saturation()).panels][0]
    'Weights'
    """
    draw = KINDS[record.kind].figure if record.kind in KINDS else None
    if draw is None:
        raise unknown_name("record kind", record.kind, figure_kinds())
    return draw(record)


def figure_kinds() -> list[str]:
    """Return the kinds of records that have a figure.

    >>> "variance" in figure_kinds()
    True
    """
    return [name for name, kind in KINDS.items() if kind.figure is not None and name not in ("learned", "widths")]
