"""Pictures without a script: every series is drawn inside the frame, and dark cells of every map are the sharp ones."""

import math
import re

import pytest

from example_records import every_kind
from sqrtdk.audits.shipped import read_shipped
from sqrtdk.report import head_figures, model_figures
from sqrtdk.report.exercise_figures import show_saturation, show_temperature, show_variance
from sqrtdk.report.panels import Area, Axis, Heatmap, Line, Panel, Points, list_colours, shade
from sqrtdk.report.svg_renderer import draw_panel


def darkness(colour):
    return -sum(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def maps_of(figure):
    return [series for panel in figure.panels for series in panel.series if isinstance(series, Heatmap)]


def test_dark_is_sharp_in_every_map():
    (entropy,) = maps_of(model_figures.show_heads(read_shipped("minilm"), "m"))
    ratios, logits = maps_of(head_figures.show_audit(read_shipped("minilm")))
    weights = maps_of(show_temperature(every_kind()["temperature"]))[0]
    for heat, sharp, soft in (
        (entropy, 0.0, 1.0),
        (ratios, 0.0, 1.0),
        (logits, logits.high, logits.low),
        (weights, weights.high, weights.low),
    ):
        assert darkness(shade(heat, sharp)) > darkness(shade(heat, soft))
        assert {shade(heat, heat.low), shade(heat, heat.high)} == {list_colours(heat)[0], list_colours(heat)[-1]}


def test_lines_points_and_cells_lie_inside_the_frame():
    line = Line((1.0, 10.0, 100.0), (0.1, math.nan, 3.0), "#112233", dash="dash")
    points = Points((10.0,), (2.0,), "#445566", symbol="diamond", low=(1.0,), high=(2.5,))
    svg = draw_panel(Panel("", Axis("x", log=True), Axis("y", low=0.0, high=4.0), (line, points)), 300, 200)
    (path,) = re.findall(r'<path d="([^"]+)"', svg)
    assert path.count("M") == 2, "a missing number breaks the line"
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d", path)]
    assert all(0 <= number <= 300 for number in numbers)
    assert "10²" in svg or "100" in svg
    heat = Heatmap(((0.0, 1.0), (math.nan, 0.5)), 0.0, 1.0, text=(("0", "1"), ("", "½")))
    svg = draw_panel(Panel("", Axis("head"), Axis("layer"), (heat,)), 300, 200)
    assert svg.count("<rect") == 3
    assert ">½</text>" in svg


@pytest.mark.parametrize("nasty", ["<script>", '"><img src=x>'])
def test_names_are_escaped(nasty):
    axis = Axis(nasty, ticks=((0.5, nasty),))
    heat = Heatmap(((0.0,),), 0.0, 1.0, text=((nasty,),))
    assert nasty not in draw_panel(Panel(nasty, axis, axis, (heat,)), 900, 200)


def test_captions_of_parts_name_the_panels_that_are_there():
    densities = show_variance(every_kind()["variance"]).part("none", "sqrt", columns=2)
    assert "Left" not in densities.caption
    assert "distribution" in densities.caption
    definitions = show_saturation(every_kind()["saturation"]).part("sensitivity", "definitions", columns=2)
    assert "Right: the diamond" in definitions.caption
    assert any(isinstance(one, Points) and one.symbol == "diamond" for one in definitions.panels[1].series)


def test_a_band_lies_between_its_ends_without_unknown_numbers():
    band = Area((0.0, 1.0, 2.0), (0.0, math.nan, 0.0), (1.0, 2.0, 4.0), "#123456")
    svg = draw_panel(Panel("", Axis("x", low=0.0, high=2.0), Axis("y"), (band,)), 300, 200)
    (corners,) = re.findall(r'<polygon points="([^"]*)"', svg)
    across, down = zip(*(map(float, corner.split(",")) for corner in corners.split()), strict=True)
    assert len(across) == 5  # the unknown end is left out
    assert across == (*across[:2], across[1], across[3], across[0])
    assert down[0] == down[1] > down[4] > down[3] > down[2]
