"""Every kind of record has a figure, and the figure shows the record's numbers."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from example_records import POLICIES, every_kind, make_ablation, make_swap
from sqrtdk.errors import InvalidValueError
from sqrtdk.exercises import explain, gradients, saturation, temperature, variance
from sqrtdk.report import figure_for, figure_kinds, learning_figures, reproduction_figures
from sqrtdk.report.palette import VERDICT_COLOURS, policy_colour
from sqrtdk.report.panels import Area, Axis, Figure, Heatmap, Line, Panel, Points, floats

KINDS = (
    *("ablation", "concentration", "explain", "gradients", "grid", "monitor", "reproductions", "saturation", "swap"),
    *("temperature", "variance", "zoo"),
)


def series_of(figure, kind):
    return [series for panel in figure.panels for series in panel.series if isinstance(series, kind)]


def panel_named(figure, title):
    (panel,) = [panel for panel in figure.panels if panel.title == title]
    return panel


@pytest.mark.slow
def test_every_kind_has_a_figure():
    assert sorted(figure_kinds()) == sorted(KINDS)
    assert sorted(every_kind()) == sorted((*KINDS, "bench", "claims"))


@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_titled_and_not_empty(kind):
    figure = figure_for(every_kind()[kind])
    assert figure.title
    assert figure.panels
    for panel in figure.panels:
        assert panel.series
        assert panel.title or len(figure.panels) == 1


def test_unknown_kind_lists_the_known():
    with pytest.raises(InvalidValueError, match=r"unknown record kind 'variants'; known: ablation, .*variance"):
        figure_for(replace(every_kind()["variance"], kind="variants"))


def test_variance_figure_shows_the_measurements():
    record = every_kind()["variance"]
    drawn = series_of(figure_for(record), Points)
    for points, policy in zip(drawn, POLICIES, strict=True):
        rows = [row for row in record.tables["variance"] if row["scale"] == policy]
        assert points.y == tuple(row["measured"] for row in rows)
        assert points.low == tuple(row["low"] for row in rows)
        assert points.high == tuple(row["high"] for row in rows)
        assert points.colour == policy_colour(policy)


def test_saturation_figure_marks_the_main_point():
    record = every_kind()["saturation"]
    figure = figure_for(record)
    main = record.tables["points"][0]["x"]
    assert [line.value for panel in figure.panels for line in panel.lines] == [main, main]
    assert series_of(figure, Points)[0].x == tuple(row["x"] for row in record.tables["points"])


def test_temperature_patterns_share_one_colour_range():
    record = every_kind()["temperature"]
    maps = series_of(figure_for(record), Heatmap)
    assert len(maps) == 3
    assert {(heatmap.low, heatmap.high) for heatmap in maps} == {(-2.0, 0.0)}  # 0.1/n, rounded down to a power of ten
    for heatmap, pattern in zip(maps, record.curves["patterns"], strict=True):
        assert heatmap.ticks == ((-2.0, "0.01"), (-1.0, "0.1"), (0.0, "1"))
        np.testing.assert_allclose(heatmap.z, np.maximum(np.log10(pattern["weights"]), -2.0), rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 5, 7, 20])
def test_temperature_figure_for_any_number_of_temperatures(count):
    relatives = tuple(2.0 ** (index - count // 2) for index in range(count))
    record = temperature(d_k=4, n=4, relatives=relatives, queries=2, samples=8)
    figure = figure_for(record)
    assert len(series_of(figure, Heatmap)) == min(count, 9)
    assert ("at 9 of the 20 temperatures" in figure.caption) == (count == 20)
    summary = panel_named(figure, "Entropy ratio H/ln n")
    assert len(summary.x.ticks) <= 8
    assert len(summary.series) == count
    rows = record.tables["temperature"]
    assert f"{rows[0]['entropy_ratio']:.2f}" in figure.title
    assert f"{rows[-1]['entropy_ratio']:.2f}" in figure.title


def test_soft_patterns_are_not_black():
    """A uniform row lies in the upper half of the colours, where the linear scale of a one-hot one showed nothing."""
    figure = figure_for(temperature(d_k=64, n=32, relatives=(0.1, 8.0), samples=8))
    soft = series_of(figure, Heatmap)[-1]
    assert np.mean(soft.z) > (soft.low + soft.high) / 2 - 0.1


@pytest.mark.slow
def test_variance_of_many_sizes_shows_some_distributions_and_says_so():
    record = variance(d_ks=tuple(2**i for i in range(14)), samples=1000)
    figure = figure_for(record)
    assert len(figure.panels[0].x.ticks) <= 10
    assert [len(panel.series) for panel in figure.panels[1:]] == [4, 4]
    assert "at 4 of the 14 sizes" in figure.caption
    rows = [row for row in record.tables["variance"] if row["scale"] == "none"]
    assert f"{rows[0]['measured']:.3g} at dₖ = 1 to {rows[-1]['measured']:.3g} at dₖ = 8192" in figure.title


def test_saturation_beyond_the_sweep_is_not_drawn_into_it():
    figure = figure_for(saturation(largest=1.0))
    assert figure.title.endswith("saturates at x = 5.04, beyond the sweep to 1")
    assert not [line for panel in figure.panels for line in panel.lines]
    assert "dashed" not in figure.caption
    assert figure.panels[0].x.high < 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_titles_state_a_number(kind):
    """A title that names a topic only says nothing; every finding here has a number."""
    assert any(letter.isdigit() for letter in figure_for(every_kind()[kind]).title)


def test_gradient_heat_maps_are_centred_on_zero():
    for heatmap in series_of(figure_for(every_kind()["gradients"]), Heatmap):
        assert heatmap.low == -heatmap.high
        assert heatmap.text is not None


def test_gradient_lines_are_mean_median_and_percentile():
    record = every_kind()["gradients"]
    panel = panel_named(figure_for(record), "‖∂loss/∂q‖, n = 4 keys")
    rows = [row for row in record.tables["vanish"] if row["scale"] == "none" and row["n"] == 4]
    mean, median, low = [
        line for line in panel.series if isinstance(line, Line) and line.colour == policy_colour("none")
    ]
    assert mean.y == tuple(row["grad_q_mean"] for row in rows)
    assert median.y == tuple(row["grad_q_median"] for row in rows)
    assert low.y == tuple(row["grad_q_p5"] for row in rows)
    assert (mean.dash, median.dash, low.dash) == ("solid", "dash", "dot")


def test_gradients_of_one_size_are_visible_without_lines():
    record = gradients(d_ks=(4,), ns=(4,), budget=1)
    panel = panel_named(figure_for(record), "‖∂loss/∂q‖, n = 4 keys")
    dots = [series for series in panel.series if isinstance(series, Points)]
    row = record.tables["vanish"][0]
    assert [series.y for series in dots[:3]] == [(row["grad_q_mean"],), (row["grad_q_median"],), (row["grad_q_p5"],)]


def test_explanation_shows_measured_points_at_their_index():
    record = every_kind()["explain"]
    rows = {(row["scale"], row["quantity"]): row for row in record.tables["explain"]}
    panel = panel_named(figure_for(record), "Concentration Σp²")
    points = [series for series in panel.series if isinstance(series, Points)]
    for drawn, policy in zip(points, POLICIES, strict=True):
        assert drawn.x == (rows[policy, "saturation_index"]["measured"],)
        assert drawn.y == (rows[policy, "sum_p2"]["measured"],)


def test_the_limit_is_left_out_where_it_is_not_trusted():
    figure = figure_for(explain(d_k=64, n=1024, samples=8, queries=4))
    for title, trusted in (("Entropy ratio H/ln n", lambda x: x <= 0.5), ("Concentration Σp²", lambda x: x >= 2)):
        limit = panel_named(figure, title).series[0]
        assert limit.dash == "dash"
        assert all(math.isnan(y) != trusted(x) for x, y in zip(limit.x, limit.y, strict=True) if abs(x - 0.5) > 1e-9)
    few = figure_for(every_kind()["explain"])  # n = 32
    assert "Dashed" in figure.caption
    assert "limit, n → ∞" in figure.legend()
    assert "Dashed" not in few.caption
    assert "limit, n → ∞" not in few.legend()


# Training


def test_ablation_has_a_thin_line_per_seed_and_a_bold_median_per_policy():
    record = make_ablation(seeds=3)
    lines = panel_named(figure_for(record), "Training loss").series
    thin, bold = [line for line in lines if line.width < 1], [line for line in lines if line.width > 2]
    assert len(thin) == 9
    assert [line.group for line in bold] == ["no scaling", "1/√dₖ", "1/dₖ"]
    runs = [run for run in record.curves["runs"] if run["scale"] == "sqrt"]
    assert bold[1].y == tuple(sorted(values)[1] for values in zip(*(run["loss"] for run in runs), strict=True))


def test_ablation_shows_every_final_loss():
    record = make_ablation(seeds=3)
    points = [s for s in panel_named(figure_for(record), "Final held-out loss").series if isinstance(s, Points)]
    assert sorted(x for series in points for x in series.x) == sorted(
        row["final_loss"] for row in record.tables["runs"]
    )


def test_ablation_counts_runs_without_a_loss_and_follows_the_others():
    figure = figure_for(make_ablation(seeds=3, diverged=True))
    panel = panel_named(figure, "Final held-out loss")
    assert [label for _, label in panel.y.ticks] == ["no scaling (1 diverged)", "1/√dₖ", "1/dₖ"]
    bold = next(line for line in panel_named(figure, "Training loss").series if line.group == "no scaling")
    assert bold.x == (0.0, 10.0, 20.0, 30.0, 40.0, 50.0)


def test_ablation_with_learning_rates_shows_the_best_and_all_final_losses():
    record = make_ablation(lrs=(3e-4, 1e-3, 3e-3), inits=("unit", "rescaled"), seeds=2)
    figure = figure_for(record)
    lines = panel_named(figure, "Training loss").series
    assert len([line for line in lines if line.width < 1]) == 2 * 2 * 3
    shown = {y for line in lines if line.width < 1 for y in line.y}
    assert shown == {y for run in record.curves["runs"] if run["lr"] == 1e-3 for y in run["loss"]}
    by_rate = panel_named(figure, "Final held-out loss by learning rate")
    points = [series for series in by_rate.series if isinstance(series, Points)]
    assert sum(len(series.x) for series in points) == len(record.tables["selection_runs"]) == 3 * 2 * 2 * 3
    assert "its own learning rate, chosen on the seeds that the losses by learning rate show" in figure.caption
    assert list(figure.legend())[:2] == ["no scaling", "1/√dₖ"]


def test_ablation_over_sizes_has_a_loss_panel_for_each():
    titles = [panel.title for panel in figure_for(make_ablation(d_ks=(16, 64))).panels]
    assert titles[:2] == ["Training loss, dₖ = 16", "Training loss, dₖ = 64"]
    assert "Accuracy, dₖ = 64" in titles


def test_ablation_of_learned_scales_shows_the_temperature_of_every_head():
    record = make_ablation(seeds=3)
    assert not [panel.title for panel in figure_for(record).panels if "temperature" in panel.title]
    heads = [0.5, 2.0, 0.8, 0.9]
    runs = [row | ({"temperatures": heads} if row["scale"] == "sqrt" else {}) for row in record.tables["runs"]]
    best = [
        row | {"temperature_by_layer": [1.0, 0.85] if row["scale"] == "sqrt" else None} for row in record.tables["best"]
    ]
    figure = figure_for(replace(record, tables={**record.tables, "runs": runs, "best": best}))
    panel = panel_named(figure, "Learned temperature τ/√dₖ")
    (dots,), (line,) = ([s for s in panel.series if isinstance(s, kind)] for kind in (Points, Line))
    assert sorted(zip(dots.x, dots.y, strict=True)) == sorted(zip([1.0, 1.0, 2.0, 2.0] * 3, heads * 3, strict=True))
    assert (line.x, line.y) == ((1.0, 2.0), (1.0, 0.85))
    assert [line.value for line in panel.lines] == [1.0]
    assert [label for _, label in panel.x.ticks] == ["layer 1", "layer 2"]


def test_ablation_with_one_policy_colours_it_as_always():
    record = make_ablation()
    record = replace(
        record,
        tables={name: [row for row in rows if row["scale"] == "sqrt"] for name, rows in record.tables.items()},
        curves={"runs": [run for run in record.curves["runs"] if run["scale"] == "sqrt"]},
    )
    colours = {line.colour for line in panel_named(figure_for(record), "Training loss").series}
    assert colours == {policy_colour("sqrt")}


def test_swap_shows_the_stages_of_every_seed():
    record = make_swap()
    panel = panel_named(figure_for(record), "Held-out loss by stage")
    assert [label for _, label in panel.x.ticks] == ["trained", "swapped", "continued", "scratch"]
    assert panel.series[1].y == (0.01, 0.07, 1.03, 2.6)
    assert panel.series[-1].y == (0.01, 0.07, 0.53, 2.6)


def test_swap_with_a_diverged_seed_has_the_median_of_the_table():
    record = make_swap()
    rows = [dict(row) for row in record.tables["swap"]]
    rows[0]["continued_loss"] = None
    panel = figure_for(replace(record, tables={**record.tables, "swap": rows})).panels[0]
    assert math.isnan(panel.series[0].y[2])
    assert math.isnan(panel.series[-1].y[2])  # of two seeds one is infinite, and so is their median
    assert panel.x.ticks[2] == (2.0, "continued (∞)")


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_medians_of_diverged_runs_are_those_of_the_table(lost):
    record = make_ablation(seeds=5)
    runs = [dict(row) for row in record.tables["runs"]]
    for row in runs:
        if row["scale"] == "none" and row["seed"] < lost:
            row |= {"status": "diverged", "final_loss": None}
    losses = sorted(row["final_loss"] or math.inf for row in runs if row["scale"] == "none")
    panel = panel_named(figure_for(replace(record, tables={**record.tables, "runs": runs})), "Final held-out loss")
    bar = next(series for series in panel.series if isinstance(series, Line))
    assert bar.x[0] == losses[2] or (math.isinf(losses[2]) and math.isnan(bar.x[0]))


# The data model


@pytest.mark.parametrize(
    "build",
    [
        lambda: Line((1.0,), (1.0, 2.0), "#000000"),
        lambda: Points((1.0,), (1.0,), "#000000", low=(0.5,)),
        lambda: Points((1.0,), (1.0,), "#000000", text=("a", "b")),
        lambda: Heatmap(((1.0,), (1.0, 2.0)), 0.0, 1.0),
        lambda: Axis(low=1.0),
        lambda: Axis(log=True, low=0.0, high=1.0),
    ],
)
def test_series_that_cannot_be_drawn_are_refused(build):
    with pytest.raises(InvalidValueError):
        build()


def test_floats_turn_nothing_into_nan():
    assert floats([1, None])[0] == 1.0
    assert math.isnan(floats([1, None])[1])


def test_legend_names_each_group_once_and_leaves_out_the_nameless():
    line, nameless = Line((0.0,), (1.0,), "#111111", "a"), Line((0.0,), (1.0,), "#222222")
    panel = Panel("p", Axis(), Axis(), (line, nameless, line))
    assert Figure("f", (panel, panel)).legend() == {"a": line}


def relative_luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("background", ["#ffffff", "#14171c"])
def test_colours_stand_out_on_light_and_dark_pages(background):
    from sqrtdk import scales

    names = [*scales.names(), *scales.LEARNABLE, "qk_norm:1"]
    for colour in [policy_colour(name) for name in names] + list(VERDICT_COLOURS.values()):
        pair = sorted([relative_luminance(colour), relative_luminance(background)])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 3.0, colour


def test_every_registered_policy_has_a_colour_of_its_own():
    from sqrtdk import scales

    names = {*scales.names(), *scales.LEARNABLE, "qk_norm:1"}
    assert len({policy_colour(name) for name in names}) == len(names)


def test_what_is_compared_most_is_told_apart_at_a_glance():
    names = ("none", "sqrt", "inverse", "learned", "query", "position", "qk_norm")
    colours = [tuple(int(policy_colour(name)[i : i + 2], 16) for i in (1, 3, 5)) for name in names]
    assert min(math.dist(a, b) for a, b in itertools.combinations(colours, 2)) > 60


@pytest.mark.parametrize(("losses", "log"), [([2.6, 2.7, 2.8], False), ([0.002, 2.6], True), ([0.0, 2.6], False)])
def test_final_losses_are_logarithmic_only_over_decades(losses, log):
    assert learning_figures._spans_decades([*losses, math.nan]) is log


def test_a_grid_shows_bands_and_the_solved_share():
    record = every_kind()["grid"]
    figure = figure_for(record)
    assert [len(series_of(figure, kind)) for kind in (Line, Area, Heatmap)] == [3, 3, 3]
    for band, line in zip(series_of(figure, Area), series_of(figure, Line), strict=True):
        assert all(low <= middle <= high for low, middle, high in zip(band.low, line.y, band.high, strict=True))
    solved = {
        (row["d_k"], row["lr"]): row["solved_fraction"] for row in record.tables["summary"] if row["scale"] == "sqrt"
    }
    drawn = series_of(figure, Heatmap)[1]
    assert drawn.z == tuple(tuple(solved[d_k, lr] for lr in (1e-3, 3e-3)) for d_k in (64, 16))


def with_scale_curves(record, lacking=0):
    """Return a record whose runs, but for the first `lacking`, have pressures, and those with sqrt temperatures."""
    runs = [
        {**run, "pressure": [run["seed"] - 1.0 if at % 2 == 0 else None for at, _ in enumerate(run["step"])]}
        | ({"temperature": [1.0 + 0.1 * run["seed"]] * len(run["step"])} if run["scale"] == "sqrt" else {})
        for run in record.curves["runs"][lacking:]
    ]
    return replace(record, curves={"runs": [*record.curves["runs"][:lacking], *runs]})


@pytest.mark.parametrize("kind", ["ablation", "grid"])
def test_pressure_and_learned_temperature_are_drawn_over_time_with_bands(kind):
    plain = every_kind()[kind]
    figure = figure_for(with_scale_curves(plain))
    added = [panel for panel in figure.panels if panel.title not in {p.title for p in figure_for(plain).panels}]
    assert [panel.title.partition(" over")[0].partition(":")[0] for panel in added] == [
        "Temperature pressure",
        "Learned temperature τ/√dₖ",
    ]
    pressure, temperature = added
    assert {len(panel.series) for panel in added} == {2, 2 * len({run["scale"] for run in plain.curves["runs"]})}
    seeds = sorted({run["seed"] for run in plain.curves["runs"]})
    band, line = pressure.series[:2]
    assert set(line.y) == {float(np.median(seeds)) - 1.0}
    assert (set(band.low), set(band.high)) == ({seeds[0] - 1.0}, {seeds[-1] - 1.0}) or len(seeds) > 4
    assert line.x == tuple(float(step) for step in plain.curves["runs"][-1]["step"][::2])
    assert [one.value for one in (*pressure.lines, *temperature.lines)] == [0.0, 1.0]
    assert "the loss would fall with sharper attention" in figure.caption
    assert "did not record" not in figure.caption


def test_runs_without_pressure_are_counted_and_never_drawn_as_zero():
    plain = every_kind()["ablation"]
    total = len(plain.curves["runs"])
    figure = figure_for(with_scale_curves(plain, lacking=3))
    assert f"3 runs of {total} did not record the temperature pressure." in figure.caption
    assert "pressure" not in figure_for(plain).caption
    everything = with_scale_curves(plain)
    nulls = [{**run, "pressure": [None] * len(run["step"])} for run in everything.curves["runs"]]
    titles = [panel.title for panel in figure_for(replace(everything, curves={"runs": nulls})).panels]
    assert not any("pressure" in title for title in titles)


def test_a_figure_of_one_result_says_whether_it_was_reproduced():
    record = every_kind()["reproductions"]
    one = figure_for(reproduction_figures.select_result(record, "ssmax"))
    assert one.title.startswith("Softmax of one high logit fades as keys are added")
    assert one.title.endswith(": reproduced (3 of 3 expectations)")
    assert [panel.title for panel in one.panels] == ["ssmax: 3 pass"]
    assert list(one.legend()) == ["softmax", "ssmax"]
    with pytest.raises(InvalidValueError, match="unknown reproduction 'none'"):
        reproduction_figures.select_result(record, "none")
    every = figure_for(record)
    assert [panel.name for panel in every.panels] == record.spec["names"]
    assert "ssmax: softmax" in every.legend()
