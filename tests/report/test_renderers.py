"""Both renderers draw the same figure: the same series with the same values, in files that are what they say."""

import builtins
import io
import json
import math
import re
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from example_records import NASTY, make_ablation, make_example
from sqrtdk.errors import InvalidValueError, MissingExtraError
from sqrtdk.report import figure_for, figure_kinds, matplotlib_renderer, plotly_renderer, save_figure
from sqrtdk.report import files as report_files
from sqrtdk.report.panels import Area, Axis, Figure, Heatmap, Line, Note, Panel, Points, ReferenceLine

NAMES = (*figure_kinds(), "ablation-grid")


def record(name):
    if name == "ablation-grid":
        return make_ablation(lrs=(1e-3, 3e-3), inits=("unit", "rescaled"), diverged=True)
    return make_example(name)


def one_of_each(label="group"):
    x, y = (1.0, 2.0, 3.0), (2.0, math.nan, 1.0)
    panel = Panel(
        label,
        Axis(label),
        Axis(label, log=True, low=0.5, high=50.0),
        (
            Line(x, y, "#112233", label),
            Points(x, y, "#112233", label, "diamond", low=y, high=y, text=(label,) * 3),
        ),
        (ReferenceLine(2.0, label), ReferenceLine(2.0, label, "vertical", "start")),
        (Note(1.0, 2.0, label, "above"),),
    )
    heat = Panel("heat", Axis(), Axis(), (Heatmap(((0.0, 0.5), (1.0, 0.2)), 0.0, 1.0, text=(("a", "b"), ("c", "d"))),))
    return Figure(label, (panel, heat), columns=2, caption=label)


def same(a, b):
    return np.array_equal(np.asarray(a, dtype=float), np.asarray(b, dtype=float), equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_both_renderers_show_the_same_series(name):
    figure = figure_for(record(name))
    charts = plotly_renderer.draw(figure)
    canvas = matplotlib_renderer.draw(figure)
    # Colour bars are axes too; the panels come first.
    panels = canvas.axes[: len(figure.panels)]
    assert len(charts) == len(figure.panels)
    for panel, chart, axes in zip(figure.panels, charts, panels, strict=True):
        assert len(chart.data) == len(panel.series)
        drawn_lines = [line for line in axes.lines if line.get_label().startswith("_child")]
        lines = iter(drawn_lines)
        images = iter(axes.images)
        bands = (one for one in axes.collections if isinstance(one, PolyCollection))
        for series, trace in zip(panel.series, chart.data, strict=True):
            if isinstance(series, Heatmap):
                assert same(trace.z, series.z)
                assert same(next(images).get_array(), series.z)
                assert trace.zmin == series.low
                continue
            if isinstance(series, Area):
                assert same(trace.x, (*series.x, *reversed(series.x)))
                assert same(trace.y, (*series.high, *reversed(series.low)))
                corners = next(bands).get_paths()[0].vertices
                assert {tuple(corner) for corner in corners} >= set(zip(series.x, series.low, strict=True))
                assert {tuple(corner) for corner in corners} >= set(zip(series.x, series.high, strict=True))
                continue
            line = next(lines)
            assert same(trace.x, series.x)
            assert same(trace.y, series.y)
            assert same(line.get_xdata(), series.x)
            assert same(line.get_ydata(), series.y)
            colour = trace.line.color if isinstance(series, Line) else trace.marker.color
            assert colour == series.colour == line.get_color()
        assert axes.get_title(loc="left") == panel.title


def test_renderers_draw_every_part_of_the_model():
    figure = one_of_each()
    canvas = matplotlib_renderer.draw(figure)
    main, heat = plotly_renderer.draw(figure)
    assert [trace.type for trace in main.data] == ["scatter", "scatter"]
    assert [trace.mode for trace in main.data] == ["lines", "markers"]
    assert [list(row) for row in heat.data[0].text] == [["a", "b"], ["c", "d"]]
    assert heat.layout.yaxis.autorange == "reversed"
    assert len(main.layout.shapes) == 2
    assert len(main.layout.annotations) == 3
    texts = {text.get_text() for text in canvas.axes[1].texts}
    assert texts == {"a", "b", "c", "d"}


@pytest.mark.slow
def test_logarithmic_axes_are_logarithmic_in_both():
    figure = one_of_each()
    layout = plotly_renderer.draw(figure)[0].layout
    axes = matplotlib_renderer.draw(figure).axes[0]
    assert layout.yaxis.type == "log"
    assert axes.get_yscale() == "log"
    assert layout.yaxis.range == pytest.approx((math.log10(0.5), math.log10(50.0)))
    assert axes.get_ylim() == pytest.approx((0.5, 50.0))
    # Plotly places annotations by exponent and shapes by value.
    assert layout.annotations[0].y == pytest.approx(math.log10(2.0))
    assert layout.shapes[0].y0 == 2.0


# Lines, points and heat maps. The SVG files show that no kind of figure is blank.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["variance", "ablation-grid", "zoo"])
def test_png_files_are_pictures(name, tmp_path):
    from PIL import Image

    path = save_figure(record(name), tmp_path / "figure.PNG")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with Image.open(path) as image:
        image.load()
        assert image.width >= 1000
        assert image.height >= 400
        # A blank picture has one colour.
        assert len(image.convert("L").getcolors(256)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_svg_files_are_pictures(name, tmp_path):
    path = save_figure(record(name), tmp_path / "figure.svg")
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = (float(root.get(side).removesuffix("pt")) for side in ("width", "height"))
    assert width >= 500
    assert height >= 200
    # A blank picture has its background alone.
    drawn = [one for one in root.iter() if one.tag.rpartition("}")[2] in ("path", "use", "image")]
    assert len(drawn) > 20


@pytest.mark.slow
def test_png_files_repeat_byte_for_byte():
    figure = figure_for(record("saturation"))
    assert matplotlib_renderer.render(figure, "png") == matplotlib_renderer.render(figure, "png")
    assert b"<dc:date>" not in matplotlib_renderer.render(figure, "svg")


def test_html_file_is_a_complete_page_with_its_data(tmp_path):
    text = save_figure(record("variance"), tmp_path / "figure.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.count('<script id="plotly">') == 1
    blocks = re.findall(
        r'<script type="application/json" class="plot-data" data-for="([^"]+)">(.*?)</script>', text, re.S
    )
    figure = figure_for(record("variance"))
    assert [name for name, _ in blocks] == ["figure-0", "figure-1", "figure-2"]
    for panel, (name, block) in zip(figure.panels, blocks, strict=True):
        assert f'id="{name}"' in text
        data = json.loads(block)["data"]
        assert [tuple(trace["y"]) for trace in data] == [series.y for series in panel.series]


def test_plots_are_named_for_screen_readers():
    figure = figure_for(record("variance"))
    fragment = plotly_renderer.render_fragment(figure, "f")
    for panel in figure.panels:
        assert f'role="img" aria-label="{panel.title}"' in fragment


def test_missing_numbers_become_null_as_json_has_no_nan():
    fragment = plotly_renderer.render_fragment(one_of_each(), "f")
    block = re.search(r'data-for="f-0">(.*?)</script>', fragment, re.S).group(1)

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(block, parse_constant=refuse)["data"][0]["y"] == [2.0, None, 1.0]


def test_texts_cannot_break_out_of_the_page():
    fragment = plotly_renderer.render_fragment(one_of_each(NASTY), "f")
    assert "<script>alert" not in fragment
    assert fragment.count("</script>") == 2
    assert "<b>" not in fragment
    block = re.search(r'data-for="f-0">(.*?)</script>', fragment, re.S).group(1)
    chart = json.loads(block)
    # Plotly reads tags in names and texts; escaped ones are shown, not read.
    shown = [chart["data"][0]["name"], chart["data"][1]["text"][0], chart["layout"]["xaxis"]["title"]["text"]]
    shown += [annotation["text"] for annotation in chart["layout"]["annotations"]]
    assert all("<" not in text and "&lt;" in text for text in shown)
    matplotlib_renderer.render(one_of_each(NASTY.replace("&", "$")), "svg")


# Files


@pytest.mark.parametrize("name", ["figure.pdf", "figure", "figure.png.txt"])
def test_other_suffixes_are_refused_with_the_known_ones(name, tmp_path):
    with pytest.raises(InvalidValueError, match=r"path must end in \.png, \.svg, \.html, got"):
        save_figure(record("saturation"), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_missing_directory_is_named_and_not_made(suffix, tmp_path):
    with pytest.raises(InvalidValueError, match="existing directory"):
        save_figure(record("saturation"), tmp_path / "nowhere" / f"figure{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_not_a_file(tmp_path):
    (tmp_path / "figure.png").mkdir()
    with pytest.raises(InvalidValueError, match="must be a file"):
        save_figure(record("saturation"), tmp_path / "figure.png")


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(report_files.os, "replace", fail)
    with pytest.raises(InvalidValueError, match=r"path must be a file that can be written, got .*disk full"):
        save_figure(record("saturation"), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["figure.png"]
    assert path.read_bytes() == b"old"


def test_an_existing_file_is_replaced(tmp_path):
    path = tmp_path / "figure.svg"
    path.write_text("old")
    assert save_figure(record("saturation"), str(path)) == path
    assert "old" not in path.read_text(encoding="utf-8")[:3]


@pytest.mark.parametrize(("suffix", "package"), [(".png", "matplotlib"), (".html", "plotly")])
def test_a_missing_package_names_the_extra(suffix, package, tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=rf'{package} is not installed.*"sqrtdk\[report\]"'):
        save_figure(record("saturation"), tmp_path / f"figure{suffix}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_matplotlib_keeps_its_global_state():
    before = dict(matplotlib.rcParams)
    out = io.BytesIO(matplotlib_renderer.render(figure_for(record("explain")), "png"))
    assert out.getbuffer().nbytes > 1000
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("kind", ["gradients", "temperature"])
def test_pictures_carry_their_caption(kind):
    figure = figure_for(record(kind))
    canvas = matplotlib_renderer.draw(figure)
    titles = [legend.get_title().get_text() for legend in canvas.legends]
    shown = " ".join([canvas.get_supxlabel(), *titles]).split()
    assert shown == figure.caption.split()
    assert bool(titles) == bool(figure.legend())
