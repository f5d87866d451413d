"""The story's sentences follow from the numbers: where a sentence would be false, another one stands."""

import math
import re
import statistics
from dataclasses import replace

import pytest

from example_records import every_kind, make_ablation, make_swap
from sqrtdk.audits import Audit
from sqrtdk.audits.shipped import read_shipped
from sqrtdk.exercises import concentration, gradients, variance
from sqrtdk.lab.shipped import load_ablation
from sqrtdk.records.record import Record
from sqrtdk.report import figure_for, inverse_scale, story_figures, training_figures
from sqrtdk.report.answer import answer
from sqrtdk.report.chapters import Material
from sqrtdk.report.model_figures import show_heads
from sqrtdk.report.panels import Heatmap, Line, Points
from sqrtdk.report.story import SECTIONS
from sqrtdk.wording.numbers import write_number


def with_losses(record, **losses):
    """The same ablation with other median losses by policy."""
    best = [
        {**row, "final_loss_median": losses.get(row["scale"], row["final_loss_median"])}
        for row in record.tables["best"]
    ]
    return replace(record, tables={**record.tables, "best": best})


def with_cells(record, table, **changes):
    """The same record with other numbers in its rows without scaling."""
    rows = [{**row, **(changes if row["scale"] == "none" else {})} for row in record.tables[table]]
    return replace(record, tables={**record.tables, table: rows})


# The answer


def test_the_answer_speaks_of_the_sizes_that_were_measured():
    first, second, third, fourth = answer(every_kind())
    row = next(row for row in every_kind()["variance"].tables["variance"] if (row["d_k"], row["scale"]) == (64, "none"))
    assert f"{row['measured'] ** 2:.3g} measured at dₖ = 64" in first
    cell = story_figures.cells_of(every_kind()["concentration"])[64, 16, "none"]
    assert f"attends to {write_number(cell['effective_keys'], 2)} of 16 keys without the division" in second
    assert third.startswith("In training, 0 of 3 runs solve a recall task without the division at dₖ = 64, and 3 of 3")
    assert "at dₖ = 16, n = 8 the mean is" in fourth


def test_the_answer_leaves_out_what_it_has_no_record_of():
    assert answer({}) == []
    (only,) = answer({"gradients": every_kind()["gradients"]})
    assert "training" not in only


def test_the_example_is_measured_or_the_largest_size_stands_for_it():
    assert story_figures.EXAMPLE == (64, 1024)
    for d_ks, ns, size in (((4, 64, 512), (16, 1024, 2048), (64, 1024)), ((4, 128), (16, 32), (128, 32))):
        assert story_figures.choose_size(Record("gradients", {"d_ks": d_ks, "ns": ns}, {})) == size


def test_a_variance_off_the_formula_is_reported():
    record = with_cells(variance(d_ks=(64,), samples=1000), "variance", measured=3.0, inside=False)
    assert answer({"variance": record}) == [
        "A score q·k should have variance dₖ, but has 9 measured at dₖ = 64: the variance formula does not hold here."
    ]


def test_at_small_sizes_the_picture_says_that_scaling_changes_little():
    record = concentration(d_ks=(1, 2), ns=(64,), budget=4096)
    assert figure_for(record).title.startswith("At dₖ = 2 and n = 64 scaling changes little")


def with_solved(record, **shares):
    """The same ablation with other shares of solved runs by policy."""
    best = [
        {**row, "solved_fraction": shares.get(row["scale"], row["solved_fraction"])} for row in record.tables["best"]
    ]
    return replace(record, tables={**record.tables, "best": best})


def test_training_is_told_by_runs_solved_whatever_they_are():
    record = with_losses(with_solved(make_ablation(), none=1.0, sqrt=1 / 3), none=0.004)
    assert answer({"ablation": record})[0].startswith("In training, 3 of 3 runs solve a recall task without the")
    assert training_figures.show_learning(record).title == (
        "Without scaling 3 of 3 runs solve the task, with 1/√dₖ 1 of 3. Median loss 0.004 and 0.006 (a guess has 2.77)"
    )
    assert [line.value for line in training_figures.show_learning(record).panels[0].lines] == [math.log(16)]
    without_chance = training_figures.show_learning(replace(record, scalars={}))
    assert without_chance.title.endswith("Median loss 0.004 and 0.006")
    assert not without_chance.panels[0].lines


def test_runs_that_all_failed_are_no_runs():
    best = [{**row, "solved_fraction": None, "n": 0} for row in make_ablation().tables["best"]]
    counts = training_figures.count_solved(replace(make_ablation(), tables={"best": best}))
    assert counts["none", "unit", "unit"] == [(0, 0)]


def test_a_p_value_stands_only_where_there_are_seeds_enough():
    record = make_ablation()
    assert training_figures.read_difference(record) == ""
    (row,) = record.tables["comparisons"]
    told = {**row, "difference_interval": [2.3, 2.7], "n": 8, "higher": 8}
    for p, ending in ((None, "nats (95% interval)."), (0.0156, "p = 0.016 after Holm's correction).")):
        tables = {**record.tables, "comparisons": [{**told, "holm_p": p}]}
        sentence = training_figures.read_difference(replace(record, tables=tables))
        assert sentence.startswith(
            "Without scaling the loss is higher than with 1/√dₖ for 8 of 8 seeds; the difference"
        )
        assert sentence.endswith(ending)
    page = SECTIONS["training"].tell(Material({"ablation": record}))
    assert "Wilcoxon" not in page.exhibits[0].says


def test_gradients_that_are_even_or_smaller_are_said_so():
    record = gradients(d_ks=(4,), ns=(4,), budget=1024)
    for share, mean, told, titled in (
        (
            0.0,
            1e-3,
            "Gradients are no larger on average without the division and no more uneven",
            "no larger on average",
        ),
        (0.9, 1e3, "Gradients are larger on average without the division and more uneven", ") and more uneven"),
    ):
        changed = with_cells(record, "vanish", top_share=share, grad_q_mean=mean)
        assert answer({"gradients": changed})[0].startswith(told)
        assert titled in story_figures.show_gradient_spread(changed).title


def test_the_example_stands_before_the_most_uneven_size():
    record = every_kind()["gradients"]
    figure = story_figures.show_gradient_spread(record)
    example, extreme = story_figures.choose_size(record), story_figures.find_most_uneven(record)
    labels = [label for _, label in figure.panels[0].y.ticks]
    assert figure.title.startswith(f"At dₖ = {example[0]} and n = {example[1]} ")
    assert labels[0] == f"no scaling, dₖ {example[0]}, n {example[1]}"
    assert labels[-1] == f"1/dₖ, dₖ {extreme[0]}, n {extreme[1]}"


# Division by dₖ


def test_division_by_d_k_is_told_from_the_numbers():
    record = every_kind()["concentration"]
    cells = story_figures.cells_of(record)
    sqrt, inverse = (16 * cells[64, 16, policy]["max_weight"] for policy in ("sqrt", "inverse"))
    figure = story_figures.show_largest_weight(record)
    assert figure.title == (
        f"At dₖ = 64 the most attended of 16 keys has {write_number(sqrt, 2)} times the uniform weight with 1/√dₖ, "
        f"{write_number(inverse, 2)} times with 1/dₖ"
    )
    drawn = [series.y[-1] for series in figure.panels[0].series if isinstance(series, Points)]
    assert drawn == [sqrt, inverse]
    assert "nearly uniform" in inverse_scale.read_weights(record)
    rows = [{**row, "effective_keys": 3.0} for row in record.tables["concentration"]]
    sharp = replace(record, tables={**record.tables, "concentration": rows})
    assert inverse_scale.read_weights(sharp) == (
        "At dₖ = 64 a query attends to 3 of 16 keys with 1/dₖ and to 3 with 1/√dₖ. The weights are not uniform at this "
        "size."
    )


def test_gradients_with_d_k_are_less_or_not():
    record = every_kind()["gradients"]
    assert re.search(r"and [\d.]+ with 1/dₖ, [\d.]+ times less\.$", inverse_scale.read_gradients(record))
    rows = [{**row, "grad_q_mean": 0.5} for row in record.tables["vanish"]]
    equal = replace(record, tables={**record.tables, "vanish": rows})
    assert inverse_scale.read_gradients(equal).endswith("0.5 with 1/√dₖ and 0.5 with 1/dₖ, not less.")


@pytest.mark.slow
def test_training_with_d_k_counts_runs_and_learning_rates():
    shipped = inverse_scale.read_training(load_ablation())
    assert shipped == (
        "Training at dₖ = 64 does not rule out 1/dₖ: 16 of 16 runs solve the task with 1/dₖ, 16 of 16 with 1/√dₖ, each "
        "at its own learning rate. Of 6 learning rates, at least half of the runs solve the task at 0.003 and 0.01 "
        "with 1/dₖ and at 0.001 and 0.003 with 1/√dₖ."
    )
    worse = inverse_scale.read_training(with_solved(make_ablation(lrs=(1e-3, 3e-3)), inverse=1 / 3))
    assert worse.startswith("Training at dₖ = 64 is worse with 1/dₖ: 1 of 3 runs solve the task with 1/dₖ, 3 of 3 with")
    assert "solve the task at none with 1/dₖ and at 0.001 and 0.003 with 1/√dₖ" in worse
    assert inverse_scale.read_training(make_ablation()).endswith(
        "0 of 3 runs solve the task with 1/dₖ, 3 of 3 with 1/√dₖ."
    )
    only = {name: [row for row in rows if row["scale"] != "inverse"] for name, rows in make_ablation().tables.items()}
    assert inverse_scale.read_training(replace(make_ablation(), tables=only)) == ""


# Concentration


def test_crossover_is_read_off_the_rows():
    record = every_kind()["concentration"]
    for row in record.tables["crossover"]:
        assert row["begins"] == pytest.approx(2 * math.log(row["n"]))
        assert row["concentrated"] == pytest.approx(8 * math.log(row["n"]))
        cells = [
            (d_k, cell)
            for (d_k, n, scale), cell in story_figures.cells_of(record).items()
            if (n, scale) == (row["n"], "none")
        ]
        assert row["half_from"] == next(
            (d_k for d_k, cell in sorted(cells, key=lambda one: one[0]) if cell["sum_p2"] >= 0.5), None
        )


def test_the_exact_crossing_stands_before_the_limit():
    record = concentration(d_ks=(1, 64), ns=(2, 16), budget=1)
    title = story_figures.show_concentration(record).title
    assert title.endswith("most of the weight at every dₖ with 2 keys and from dₖ = 12 on with 16 keys")
    assert "8 ln n, which is 5.5 for n = 2 and 22.2 for n = 16." in story_figures.show_concentration(record).caption
    assert "From dₖ = 12 on" in story_figures.show_effective_keys(record).caption
    two = concentration(d_ks=(1, 64), ns=(2,), budget=1)
    assert story_figures.show_effective_keys(two).caption.endswith("bars are 95% intervals.")
    for records in (record, two):
        figures = (story_figures.show_concentration(records), story_figures.show_effective_keys(records))
        assert "one-hot" not in " ".join(figure.title + figure.caption for figure in figures)


def test_the_crossing_of_the_example_comes_first():
    title = story_figures.show_concentration(concentration(d_ks=(64,), ns=(16, 1024), budget=1)).title
    assert title.index("with 1024 keys") < title.index("with 16 keys")


def test_weights_by_rank_are_medians_over_the_queries():
    record = every_kind()["temperature"]
    figure = story_figures.show_ranked_weights(record)
    for line, pattern in zip(figure.panels[0].series, record.curves["patterns"], strict=True):
        assert line.x == tuple(map(float, range(1, 9)))
        assert line.y[0] == statistics.median(max(row) for row in pattern["weights"])
        assert f"{write_number(line.y[0], 2)} at {line.group}" in figure.title


def test_the_picture_shows_the_effective_keys_of_the_largest_n():
    record = every_kind()["concentration"]
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
    record = make_ablation(d_ks=(16, 64), inits=("unit", "rescaled"))
    best = [{**row, "qk_step": step} for row in record.tables["best"] for step in ("unit", "rescaled")]
    shares = {"none": (0, 0), "sqrt": (1, 1), "start": (1, 0), "both": (1, 1)} | solved
    names = {
        ("none", "unit", "unit"): "none",
        ("sqrt", "unit", "unit"): "sqrt",
        ("none", "rescaled", "unit"): "start",
        ("none", "rescaled", "rescaled"): "both",
    }
    kept = [
        {**row, "solved_fraction": share, "solved_interval": [0.7 * share, 0.3 + 0.7 * share]}
        for row in best
        if (name := names.get((row["scale"], row["init"], row["qk_step"])))
        for share in [shares[name][row["d_k"] == 64]]
    ]
    runs = [{**run, "qk_step": step} for run in record.tables["runs"] for step in ("unit", "rescaled")]
    return replace(record, tables={**record.tables, "best": kept, "runs": runs})


def test_widths_are_told_by_the_runs_that_learn():
    record = at_sizes(sqrt=(0, 1), none=(1, 0))
    assert training_figures.show_widths(record).title == (
        "Runs that solve the task at dₖ = 16, 64: 3, 0 of 3 without scaling, 0, 3 of 3 with 1/√dₖ"
    )
    assert training_figures.read_other_settings(at_sizes(start=(1, 1 / 3))) == (
        "Runs that solve the task in the other settings: no scaling, rescaled init 3, 1 of 3; no scaling, rescaled "
        "init and step 3, 3 of 3."
    )
    sentence = answer({"widths": at_sizes(none=(1, 0)), "ablation": make_ablation()})[0]
    assert sentence == (
        "In training, 0 of 3 runs solve a recall task without the division at dₖ = 64, and 3 of 3 with 1/√dₖ. With a "
        "rescaled init and step of W_q and W_k in place of the division, 3 of 3 runs solve it."
    )
    assert ", 1 of 3 runs solve it." in answer({"widths": at_sizes(both=(1, 1 / 3))})[0]


def test_a_record_that_ships_names_its_command_and_day():
    assert "sqrtdk ablate" not in training_figures.show_widths(at_sizes()).caption
    record = load_ablation()
    assert training_figures.show_widths(record).caption.endswith(record.spec["command"])
    for figure in (training_figures.show_widths(record), training_figures.show_rates(record)):
        assert record.spec["date"] in figure.caption


def test_lines_of_every_control_are_distinguishable():
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
    assert live.exhibits[0].says == "Runs that solve the task in the other settings: 1/dₖ 0 of 3."


def test_learning_rates_are_counted_by_what_they_reach():
    record = make_ablation(lrs=(3e-4, 1e-3, 3e-3), seeds=2)
    assert training_figures.show_rates(record).title == (
        "Learning rates, of 3, at which the task is learned: 0 without scaling, 3 with 1/√dₖ"
    )
    assert training_figures.show_rates(make_ablation()) is None
    half = [{**run, "solved": run["seed"] == 1000} for run in record.tables["selection_runs"]]
    halved = replace(record, tables={**record.tables, "selection_runs": half})
    assert training_figures.list_learned(halved, "sqrt", 64) == ([3e-4, 1e-3, 3e-3], 3)


def test_a_best_rate_at_the_edge_is_said_so():
    assert training_figures.state_rates(make_ablation()) == ""
    record = make_ablation(lrs=(3e-4, 1e-3, 3e-3))
    chosen = "Each setting has the best of 3 learning rates, chosen on other seeds."
    assert training_figures.state_rates(record) == chosen
    best = [{**row, "at_edge": row["scale"] != "inverse"} for row in record.tables["best"]]
    edged = replace(record, tables={**record.tables, "best": best})
    for figure in (training_figures.show_learning(edged), training_figures.show_widths(edged)):
        assert figure.caption.endswith(f"{chosen} The best rate lies at the edge of those tried: no scaling; 1/√dₖ.")
    assert "edge" not in training_figures.show_widths(load_ablation()).caption


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
    assert training_figures.show_taken_away(record).title.startswith(
        "A trained model works without its scale: held-out loss"
    )
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
        [replace(audit.scale[0], effective=1.0), *audit.scale[1:]],
        0,
        (),
        "unknown",
        audit.about,
    )
    figure = show_heads(odd, "a model")
    assert math.isnan(figure.panels[0].series[0].z[-1][-1])
    assert "2 different scales" in figure.title


def test_every_line_of_the_story_figures_has_its_policy():
    lines = [
        series for series in figure_for(every_kind()["concentration"]).panels[0].series if isinstance(series, Line)
    ]
    assert [line.group for line in lines] == ["no scaling", "1/√dₖ", "1/dₖ"]
