"""How each kind of record looks, in one place: the columns of its tables, its figure, its section of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sqrtdk.errors import unknown_name
from sqrtdk.records import Record
from sqrtdk.report import (
    bench_figures,
    claim_figures,
    exercise_figures,
    gradient_figures,
    learning_figures,
    zoo_figures,
)
from sqrtdk.report.figure import Figure

Columns = Sequence[str] | None


class Section(NamedTuple):
    """How the report introduces a record: a title, the question it answers, and the command that makes it, if any."""

    title: str
    asks: str
    command: str | None


class Kind(NamedTuple):
    """How a kind of record looks.

    Args:
        tables: the tables that a terminal shows, each with its columns; None: all of them.
        figure: draws it; None: there is nothing to draw.
        section: of the report; None: it is in none.
        titles: of its tables in the report, where they are not what the tables are called.
        folded: tables that the report folds away whatever their length.
        prints_curves: whether `--json` prints the curves without being asked.
    """

    tables: Mapping[str, Columns]
    figure: Callable[[Record], Figure] | None = None
    section: Section | None = None
    titles: Mapping[str, str] = {}
    folded: Sequence[str] = ()
    prints_curves: bool = True


_ABLATION_COLUMNS = (
    *("scale", "d_k", "init", "lr", "final_loss_median", "final_loss_iqr", "solved_fraction"),
    *("steps_to_threshold_median", "n"),
    *("temperature_by_layer", "temperature_range", "temperature_spread_median"),
)
_ABLATION = Kind(
    {"summary": _ABLATION_COLUMNS},
    learning_figures.show_ablation,
    Section(
        "Exercise 3: training with and without the scale",
        "Does a model learn without the scale? And is a failure due to the scale, or only to the initialisation or "
        "the learning rate?",
        "sqrtdk ablate",
    ),
    {
        "runs": "Every run",
        "summary": "Summary over seeds",
        "best": "Control: each policy at its own best learning rate",
        "comparisons": "Paired comparisons, seed by seed",
    },
    folded=("runs",),
    prints_curves=False,
)

CLAIM_COLUMNS = ("id", "source", "claimed", "computed", "verdict", "why")
"""The columns of claims in the report and in Markdown."""

KINDS: dict[str, Kind] = {
    "claims": Kind(
        {"claims": ("id", "source", "verdict", "claimed", "computed", "why")},
        claim_figures.show_claims,
        Section(
            "What the texts claim",
            "Each sentence of four texts on the scale of attention, computed: does it hold, is it wrong, or does it "
            "depend?",
            "sqrtdk claims",
        ),
    ),
    "explain": Kind(
        {"side_by_side": None},
        gradient_figures.show_explanation,
        Section(
            "What the scale does",
            "What do no scaling, 1/√dₖ and 1/dₖ do to attention of one size, and does theory predict it?",
            "sqrtdk explain",
        ),
        {
            "side_by_side": "Side by side: measured, and predicted inside or outside the 95% interval of the "
            "measurement",
            "explain": "Every number with its interval",
        },
    ),
    "variance": Kind(
        {"variance": ("d_k", "scale", "predicted", "measured", "low", "high", "inside")},
        exercise_figures.show_variance,
        Section(
            "Exercise 1: how far scores spread",
            "What is the standard deviation of unscaled scores, and what is left of it after dividing by √dₖ or by dₖ?",
            "sqrtdk variance",
        ),
    ),
    "saturation": Kind(
        {"sweep": None, "points": None},
        exercise_figures.show_saturation,
        Section(
            "Exercise 2: where softmax saturates",
            "softmax([x, 0, 0, 0]) for growing x: from which x on does it saturate, and in which sense?",
            "sqrtdk saturation",
        ),
        {"points": "Points of saturation", "sweep": "The sweep"},
    ),
    "ablation": _ABLATION,
    "learned": _ABLATION._replace(
        section=Section(
            "Temperatures that learn",
            "Where does a temperature go that is learned with the weights, do queries come to differ, and does it "
            "help?",
            "sqrtdk ablate --scale sqrt,learned,query",
        ),
    ),
    "swap": Kind(
        {"summary": None},
        learning_figures.show_swap,
        Section(
            "Changing the scale of a trained model",
            "Is the scale critical only at random initialisation, or in a trained model as well?",
            None,
        ),
        {"summary": "Summary over seeds", "swap": "Every seed"},
        folded=("swap",),
    ),
    "temperature": Kind(
        {"temperature": None},
        exercise_figures.show_temperature,
        Section(
            "Exercise 4: temperatures around √dₖ",
            "How do attention patterns differ at τ = ½·√dₖ, √dₖ and 2·√dₖ?",
            "sqrtdk temperature",
        ),
    ),
    "gradients": Kind(
        {
            "jacobians": None,
            "vanish": (
                *("d_k", "n", "scale", "rows", "jacobian_trace_mean", "jacobian_trace_median", "jacobian_trace_p5"),
                *("jacobian_norm_mean", "grad_q_mean", "grad_q_median", "grad_q_p5", "top_share"),
            ),
        },
        gradient_figures.show_gradients,
        Section(
            "Exercise 5: what gradients do",
            "How does ∂softmax/∂input look for uniform and for peaked rows, and do gradients vanish without the scale?",
            "sqrtdk gradients",
        ),
        {"jacobians": "Jacobians of four rows", "vanish": "Gradients over dₖ and n"},
    ),
    "bench": Kind(
        dict.fromkeys(("ratios", "timings", "costs", "growth", "memory", "left_out")),
        bench_figures.show_bench,
        Section(
            "How fast it is",
            "How long does attention take beside its peers, at which error, with how much memory, and what do "
            "statistics cost?",
            "sqrtdk bench",
        ),
        prints_curves=False,
    ),
    "zoo": Kind(
        {"families": None},
        zoo_figures.show_zoo,
        Section(
            "The scale that models use",
            "Which scale does each family of transformers declare, and which one does its code apply?",
            "sqrtdk zoo",
        ),
        folded=("families", "layers"),
    ),
    "info": Kind({"backends": None}),
    "scales": Kind({"scales": None}),
}
"""Every kind of record; the order is that of the report."""


def topic_of(record: Record) -> str:
    """Where a record stands in `KINDS`: its kind, or "learned" for an ablation of scales that learn."""
    learns = record.kind == "ablation" and any(row.get("temperature_by_layer") for row in record.tables["best"])
    return "learned" if learns else record.kind


def kind_of(record: Record) -> Kind:
    """How a record looks; an unknown kind raises and lists the known ones."""
    if record.kind not in KINDS:
        raise unknown_name("record kind", record.kind, list(KINDS))
    return KINDS[topic_of(record)]


def shown_tables(record: Record) -> dict[str, Columns]:
    """The tables that a terminal shows, each with those of its columns that the record has; None: all."""
    shown: dict[str, Columns] = {}
    for name, columns in kind_of(record).tables.items():
        rows = record.tables[name]
        shown[name] = columns if columns is None or not rows else [column for column in columns if column in rows[0]]
    return shown


def figure_for(record: Record) -> Figure:
    """The figure that shows a record.

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
    """The kinds of records that have a figure.

    >>> "variance" in figure_kinds()
    True
    """
    return [name for name, kind in KINDS.items() if kind.figure is not None and name != "learned"]
