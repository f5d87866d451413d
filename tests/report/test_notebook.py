"""`sqrtdk.report.figure`: any result of a user's own as one Plotly figure."""

import json
import subprocess
import sys
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import numpy as np
import pytest

import sqrtdk
from example_records import make_ablation, make_swap
from sqrtdk import exercises
from sqrtdk.audits import read_shipped
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.report import figure, figure_for

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 40, 16))
result = sqrtdk.attention(q, k, v, causal=True)
summary = sqrtdk.HeadSummary.of(result.statistics)


def kinds(shown):
    return [trace.type for trace in shown.data]


@pytest.mark.slow
def test_rows_are_drawn_over_positions_and_beside_the_law():
    for data in (result, result.statistics):
        shown = figure(data)
        heat, rows, limit = shown.data
        assert (heat.type, np.shape(heat.z)) == ("heatmap", (4, 40))
        mean = np.nanmean(result.statistics.entropy_ratio[..., 1:], axis=0)
        np.testing.assert_allclose(np.array(heat.z)[:, 1:], mean, rtol=1e-12)
        assert np.isnan(np.array(heat.z)[:, 0]).all()  # the first query sees one key
        assert len(rows.x) == 2 * 4 * 39
        np.testing.assert_allclose(limit.y, 1 - np.square(limit.x))
        least = np.nanmin(result.statistics.entropy_ratio)
        assert shown.layout.title.text.endswith(f"the least {least:.2g}")


def test_weights_are_drawn_if_there_are_any():
    weighted = sqrtdk.attention(q, k, v, causal=True, weights=True)
    shown = figure(weighted)
    assert kinds(shown) == ["heatmap"] * 4
    np.testing.assert_allclose(shown.data[2].z, weighted.weights[0, 2])
    one = figure(sqrtdk.attention(q[0, 0], k[0, 0], v[0, 0], weights=True))
    assert np.shape(one.data[0].z) == (40, 40)


def test_heads_of_a_layer_have_the_numbers_of_their_summary():
    ratio, logit = figure(summary).data
    np.testing.assert_allclose(ratio.y, summary["entropy_ratio"].mean)
    np.testing.assert_allclose(logit.y, summary["max_logit"].largest)
    np.testing.assert_allclose(
        np.array(ratio.y) + ratio.error_y.array, summary["entropy_ratio"].quantile(0.95), rtol=1e-12
    )


def test_layers_with_different_heads_are_one_map():
    small = sqrtdk.HeadSummary.of(sqrtdk.attention(q[:, :2], k[:, :2], v[:, :2]).statistics)
    shown = figure({"first": summary, "<b>second</b>": small})
    z = np.array(shown.data[0].z)
    np.testing.assert_allclose(z[0], summary["entropy_ratio"].mean)
    assert np.isnan(z[1, 2:]).all()
    assert "2 layers, 6 heads" in shown.layout.title.text
    assert "<b>" not in shown.to_json().replace("\\u003c", "<")


def test_what_was_seen_is_told_by_its_layers():
    seen = SimpleNamespace(layers={"block": summary})
    assert figure(seen).to_json() == figure({"block": summary}).to_json()


def test_an_audit_shows_its_sharpest_head():
    minilm = read_shipped("minilm")
    shown = figure(minilm)
    assert np.shape(shown.data[0].z) == (6, 12)
    assert shown.layout.title.text.replace("<br>", " ").startswith(
        "BertModel, 6 layers, 72 heads: the sharpest is head 2 of layer 0 (entropy ratio 0.0323)"
    )
    nothing = replace(minilm.heads[0], entropy_ratio=None, max_logit=None)
    assert "none has a row" in figure(replace(minilm, heads=[nothing])).layout.title.text


def test_panels_of_a_record_are_subplots_with_their_axes():
    record = exercises.saturation()
    plan, shown = figure_for(record), figure(record)
    assert len(shown.data) == sum(len(panel.series) for panel in plan.panels)
    axes = [shown.layout[f"xaxis{number or ''}"] for number in ("", *range(2, len(plan.panels) + 1))]
    assert [axis.title.text for axis in axes] == [panel.x.title for panel in plan.panels]
    assert len({axis.domain for axis in axes}) == len(axes)
    entries = [unescape(trace.name) for trace in shown.data if trace.showlegend]
    assert entries == list(plan.legend())
    assert all(" domain" in shape.yref or " domain" in shape.xref for shape in shown.layout.shapes)
    json.loads(shown.to_json())


@pytest.mark.parametrize("make", [make_ablation, make_swap], ids=lambda make: make.__name__)
def test_every_series_of_a_record_is_drawn_in_its_subplot(make):
    record = make()
    plan, shown = figure_for(record), figure(record)
    assert len(shown.data) == sum(len(panel.series) for panel in plan.panels)
    columns = min(plan.columns, len(plan.panels))
    heights = {axis.domain for axis in shown.select_yaxes()}
    assert len(heights) == -(-len(plan.panels) // columns)
    assert "<script" not in shown.to_json()


@pytest.mark.parametrize("rows", [257, 1000])
def test_long_sequences_are_thinned_and_say_so(rows):
    long = np.random.default_rng(1).standard_normal((3, 2, rows, 4))
    shown = figure(sqrtdk.attention(*long, causal=True))
    assert np.shape(shown.data[0].z) == (2, 256)
    assert any(f"256 of {rows} positions" in note.text.replace("<br>", " ") for note in shown.layout.annotations)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([1, 2], InvalidTypeError, "data must be an Attention, .* got list"),
        ({"layer": 3}, InvalidTypeError, "got dict"),
        (np.zeros(3), InvalidTypeError, "got ndarray"),
        ({}, InvalidValueError, "there must be a head to draw, got none"),
        (sqrtdk.attention(q, k, v, statistics=False), InvalidValueError, "statistics or weights to draw, got neither"),
        (sqrtdk.attention(q[..., :1, :], k[..., :1, :], v[..., :1, :]), InvalidValueError, "two keys or more"),
        (sqrtdk.attention(q[..., :0, :], k, v, weights=True), InvalidValueError, "got shape"),
    ],
)
def test_what_cannot_be_drawn_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        figure(data)


@pytest.mark.slow
def test_without_plotly_the_extra_is_named():
    script = (
        "import sys; sys.modules['plotly'] = None\nimport numpy as np, sqrtdk, sqrtdk.report\n"
        "sqrtdk.report.figure(sqrtdk.attention(*np.ones((3, 4, 2))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert 'plotly is not installed; it comes with: pip install "sqrtdk[report]"' in done.stderr


@pytest.mark.slow
def test_tensors_and_watched_models_are_drawn():
    import torch

    import sqrtdk.torch

    tensors = (torch.from_numpy(x).requires_grad_() for x in (q, k, v))
    of_tensors = sqrtdk.torch.attention(*tensors, causal=True, weights=True)
    np.testing.assert_allclose(figure(of_tensors).data[0].z, of_tensors.weights.detach()[0, 0])
    assert kinds(figure(of_tensors.statistics)) == kinds(figure(result))
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with sqrtdk.torch.watch(model) as seen:
        model(torch.randn(2, 33, 16))
    assert np.shape(figure(seen).data[0].z) == (2, 2)
    assert "rgba(31,131,201," in seen._repr_html_()
