"""The story's sentences follow from the numbers: where a sentence would be false, another one stands."""

import math
from dataclasses import replace

import pytest

from example_records import every_kind, make_ablation, make_swap
from sqrtdk.audits import Audit
from sqrtdk.audits.shipped import read_shipped
from sqrtdk.exercises import condensation, gradients, variance
from sqrtdk.lab.shipped import load_ablation
from sqrtdk.report import figure_for, story_figures, training_figures
from sqrtdk.report.answer import answer
from sqrtdk.report.model_figures import show_heads
from sqrtdk.report.panels import Heatmap, Line, Points
from sqrtdk.report.story import SECTIONS, Material


def with_losses(record, **losses):
    """The same ablation with other median losses by policy."""
    best = [
        {**row, "final_loss_median": losses.get(row["scale"], row["final_loss_median"])}
        for row in record.tables["best"]
    ]
    return replace(record, tables={**record.tables, "best": best})


def with_cells(record, table, **changes):
    """The same record with other numbers in its unscaled rows."""
    rows = [{**row, **(changes if row["scale"] == "none" else {})} for row in record.tables[table]]
    return replace(record, tables={**record.tables, table: rows})


# The answer


def test_the_answer_speaks_of_the_sizes_that_were_measured():
    first, second, third = answer(every_kind())
    row = next(row for row in every_kind()["variance"].tables["variance"] if (row["d_k"], row["scale"]) == (64, "none"))
    assert f"at dₖ = 64 it is measured as {row['measured'] ** 2:.3g}" in first
    cell = story_figures.cells_of(every_kind()["condensation"])[64, 16, "none"]
    assert f"attends to {story_figures.name_keys(cell['effective_keys'])} of 16 keys" in second
    assert "uneven" in third
    assert "loss 2.6 against 0.006 with 1/√dₖ" in third


def test_the_answer_leaves_out_what_it_has_no_record_of():
    assert answer({}) == []
    (only,) = answer({"gradients": every_kind()["gradients"]})
    assert "training" not in only


def test_a_variance_that_is_not_the_law_is_said_so():
    record = with_cells(variance(d_ks=(64,), samples=1000), "variance", measured=3.0, inside=False)
    assert answer({"variance": record}) == [
        "The variance of a score q·k should be dₖ, but at dₖ = 64 it is measured as 9: the law is not borne out here."
    ]


def test_below_condensation_the_answer_does_not_claim_it():
    record = condensation(d_ks=(1, 2), ns=(64,), budget=4096)
    assert "at dₖ = 2, which lies below that, a query attends to" in answer({"condensation": record})[0]
    assert figure_for(record).title.startswith("At dₖ = 2 and n = 64 scaling changes little")


def test_training_that_does_not_fail_is_said_so():
    record = with_losses(make_ablation(), none=0.004)
    assert "does not fail here" in answer({"ablation": record})[0]
    assert training_figures.show_learning(record).title.startswith("Without scaling the model learns, too")


def test_training_that_learns_nothing_decides_nothing():
    title = training_figures.show_learning(with_losses(make_ablation(), sqrt=2.6)).title
    assert title.startswith("In these steps nothing is learned")


def test_the_control_is_part_of_the_answer_where_it_was_made():
    record = make_ablation(inits=("unit", "absorbed"))
    cured = [
        {**row, "final_loss_median": 0.01 if row["init"] == "absorbed" else row["final_loss_median"]}
        for row in record.tables["best"]
    ]
    rescued = replace(record, tables={**record.tables, "best": cured})
    assert "unless W_q and W_k start smaller in its place (0.01)" in answer({"ablation": rescued})[0]
    assert training_figures.show_learning(rescued).title.endswith("unless it has the start of 1/√dₖ (0.01)")
    assert training_figures.show_learning(record).title.endswith("nor with the start of 1/√dₖ alone")
    assert "unless" not in answer({"ablation": record})[0]


def test_gradients_that_are_even_or_smaller_are_said_so():
    record = gradients(d_ks=(4,), ns=(4,), budget=1024)
    even = with_cells(record, "vanish", top_share=0.0)
    assert "no more uneven" in story_figures.show_gradient_spread(even).title
    assert "do not become more uneven" in answer({"gradients": even})[0]
    smaller = with_cells(record, "vanish", top_share=0.9, grad_q_mean=1e-3)
    assert story_figures.show_gradient_spread(smaller).title.startswith("Unscaled gradients are uneven and smaller")
    assert "uneven and smaller" in answer({"gradients": smaller})[0]


# Condensation


def test_crossover_is_read_off_the_rows():
    record = every_kind()["condensation"]
    for row in record.tables["crossover"]:
        assert row["begins"] == pytest.approx(2 * math.log(row["n"]))
        assert row["nearly_one_hot"] == pytest.approx(8 * math.log(row["n"]))
        cells = [
            (d_k, cell)
            for (d_k, n, scale), cell in story_figures.cells_of(record).items()
            if (n, scale) == (row["n"], "none")
        ]
        assert row["half_from"] == next(
            (d_k for d_k, cell in sorted(cells, key=lambda one: one[0]) if cell["sum_p2"] >= 0.5), None
        )


def test_the_exact_crossing_stands_before_the_limit():
    record = condensation(d_ks=(1, 64), ns=(2, 16), budget=1)
    title = story_figures.show_condensation(record).title
    assert title.endswith("unscaled weight at every dₖ with 2 keys and from dₖ = 12 on with 16 keys")
    assert "8 ln n is 5.5 for n = 2 and 22.2 for n = 16." in story_figures.show_condensation(record).caption
    assert "From dₖ = 12 on" in story_figures.show_effective_keys(record).caption
    two = condensation(d_ks=(1, 64), ns=(2,), budget=1)
    assert story_figures.show_effective_keys(two).caption.endswith("bars are 95% intervals over draws.")
    assert answer({"condensation": two})[0].startswith("Without the division, at dₖ = 64, a query attends to 1")
    for records in (record, two):
        figures = (story_figures.show_condensation(records), story_figures.show_effective_keys(records))
        assert "one-hot" not in " ".join(figure.title + figure.caption for figure in figures)


def test_the_picture_shows_the_effective_keys_of_the_largest_n():
    record = every_kind()["condensation"]
    figure = figure_for(record)
    assert len(figure.panels) == 1
    dots = [series for series in figure.panels[0].series if isinstance(series, Points)]
    cells = story_figures.cells_of(record)
    for series, policy in zip(dots, ("none", "sqrt", "inverse"), strict=True):
        assert series.y == tuple(cells[d_k, 16, policy]["effective_keys"] for d_k in (1, 64))
    assert "seed 0" in figure.caption


def test_decades_are_few_and_hold_the_ends():
    ticks = story_figures._name_decades([3e-11, 40.0])
    assert len(ticks) <= 6
    assert ticks[-1] == (100.0, "10²")
    assert (1.0, "1") in story_figures._name_decades([0.2, 3.0])


# Training


def at_sizes(**solved):
    """An ablation at two sizes with the controls, and so many solved runs of eight by setting and size."""
    record = make_ablation(d_ks=(16, 64), inits=("unit", "absorbed"))
    best = [{**row, "qk_step": step} for row in record.tables["best"] for step in ("unit", "absorbed")]
    shares = {"none": (0, 0), "sqrt": (1, 1), "start": (1, 0), "both": (1, 1)} | solved
    names = {
        ("none", "unit", "unit"): "none",
        ("sqrt", "unit", "unit"): "sqrt",
        ("none", "absorbed", "unit"): "start",
        ("none", "absorbed", "absorbed"): "both",
    }
    kept = [
        {**row, "solved_fraction": share, "solved_interval": [0.7 * share, 0.3 + 0.7 * share]}
        for row in best
        if (name := names.get((row["scale"], row["init"], row["qk_step"])))
        for share in [shares[name][row["d_k"] == 64]]
    ]
    runs = [{**run, "qk_step": step} for run in record.tables["runs"] for step in ("unit", "absorbed")]
    return replace(record, tables={**record.tables, "best": kept, "runs": runs})


def test_widths_are_told_by_the_share_of_runs_that_learn():
    assert training_figures.show_widths(at_sizes()).title == (
        "At dₖ = 16, 64 most runs learn with 1/√dₖ at each, without scaling at none, "
        "without it but with its start alone at 16, with its start and step at each"
    )
    other = at_sizes(sqrt=(0, 1), none=(1, 1), start=(0.5, 0.5))
    assert training_figures.show_widths(other).title.startswith(
        "At dₖ = 16, 64 most runs learn with 1/√dₖ at 64, without scaling at each, without it but with its start alone "
        "at none"
    )
    sentence = answer({"widths": at_sizes(start=(1, 0.25)), "ablation": make_ablation()})[0]
    assert sentence == (
        "Training without the scale fails at dₖ = 16, 64 (0%, 0% of the runs learn, with 1/√dₖ 100%, 100%), unless W_q "
        "and W_k have its start and its step in another way (100%, 100%; its start alone 100%, 25%)."
    )
    assert "does not always fail at dₖ = 16, 64 (100%, 0% of" in answer({"widths": at_sizes(none=(1, 0))})[0]
    assert "); where W_q and W_k have" in answer({"widths": at_sizes(both=(1, 0))})[0]


def test_a_record_that_ships_names_its_command_and_day():
    assert "sqrtdk ablate" not in training_figures.show_widths(at_sizes()).caption
    record = load_ablation()
    for figure in (training_figures.show_widths(record), training_figures.show_rates(record)):
        assert figure.caption.endswith(record.spec["command"])
        assert record.spec["date"] in figure.caption


def test_lines_of_every_control_are_drawn_apart():
    (panel,) = training_figures.show_widths(at_sizes()).panels
    lines = {series.group: series.dash for series in panel.series if isinstance(series, Line)}
    assert lines == {
        "no scaling": "solid",
        "1/√dₖ": "solid",
        "no scaling, rescaled init": "dash",
        "no scaling, rescaled init and step": "dashdot",
    }
    assert len(training_figures.show_rates(load_ablation()).panels) == 3


def test_the_training_chapter_is_told_from_what_is_there():
    both = Material({"ablation": make_ablation(), "widths": load_ablation()})
    assert [exhibit.source for exhibit in SECTIONS["training"].tell(both).exhibits] == ["ablation", "widths", "widths"]
    shipped = Material({"widths": load_ablation()})
    assert [exhibit.table for exhibit in SECTIONS["training"].tell(shipped).exhibits] == ["best", "selection"]
    live = SECTIONS["training"].tell(Material({"ablation": make_ablation(lrs=(1e-3, 3e-3))}))
    assert [exhibit.source for exhibit in live.exhibits] == ["ablation", "ablation"]
    assert live.exhibits[0].says == (
        "Seed by seed the loss without scaling is higher than with 1/√dₖ in 3 of 3 pairs; by 2.3 to 2.7 nats "
        "(95% interval)."
    )


def test_learning_rates_are_counted_by_what_they_reach():
    record = make_ablation(lrs=(3e-4, 1e-3, 3e-3), seeds=2)
    assert training_figures.show_rates(record).title == (
        "Unscaled, the task is learned at 0 of 3 learning rates; with 1/√dₖ at 3"
    )
    assert training_figures.show_rates(make_ablation()) is None


def test_a_best_rate_at_the_edge_is_said_so():
    record = make_ablation()
    assert "edge" not in training_figures.show_learning(record).caption
    best = [{**row, "at_edge": row["scale"] == "none"} for row in record.tables["best"]]
    caption = training_figures.show_learning(replace(record, tables={**record.tables, "best": best})).caption
    assert caption.endswith("The best rate of no scaling is at the edge of those tried.")


def test_trained_heads_are_those_of_the_best_runs():
    record = make_ablation(seeds=2)
    figure = training_figures.show_trained_heads(record)
    dots = [series for series in figure.panels[0].series if isinstance(series, Points) and len(series.x) == 4]
    assert [series.x for series in dots] == [(0.3, 0.4, 0.3, 0.4)] * 3
    assert "with no scaling from 0.11 to 0.35, with 1/√dₖ from" in figure.title
    without = [
        {name: value for name, value in run.items() if name != "measured_heads"} for run in record.tables["runs"]
    ]
    assert training_figures.show_trained_heads(replace(record, tables={**record.tables, "runs": without})) is None


def test_a_swap_that_hurts_is_said_so():
    record = make_swap()
    assert training_figures.show_taken_away(record).title.startswith("A trained model outlives the loss of its scale")
    rows = [{**row, "swapped_loss": 2.5} for row in record.tables["swap"]]
    hurt = replace(record, tables={**record.tables, "swap": rows})
    assert training_figures.show_taken_away(hurt).title.startswith("A trained model needs its scale")
    assert "after training as well" in training_figures.read_taken_away(hurt)


# A model


def test_heads_of_a_model_are_a_map_of_their_entropy():
    audit = read_shipped("minilm")
    (heat,) = show_heads(audit, "MiniLM").panels[0].series
    assert isinstance(heat, Heatmap)
    assert len(heat.z) == 6
    assert [value for row in heat.z for value in row] == [head.entropy_ratio for head in audit.heads]
    sharp = sum(head.saturation_index > 1 for head in audit.heads)
    assert f"MiniLM uses 1/√dₖ; {sharp} of its 72 heads are sharp" in show_heads(audit, "MiniLM").title


def test_layers_of_different_widths_and_scales():
    audit = read_shipped("minilm")
    odd = Audit(
        audit.heads[:-1],
        (),
        [replace(audit.scale[0], measured=1.0), *audit.scale[1:]],
        0,
        (),
        "unknown",
        audit.about,
    )
    figure = show_heads(odd, "a model")
    assert math.isnan(figure.panels[0].series[0].z[-1][-1])
    assert "2 different scales" in figure.title


def test_every_line_of_the_story_figures_has_its_policy():
    lines = [series for series in figure_for(every_kind()["condensation"]).panels[0].series if isinstance(series, Line)]
    assert [line.group for line in lines] == ["no scaling", "1/√dₖ", "1/dₖ"]
