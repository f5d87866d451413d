"""Tables of results in `print` and in a notebook: few lines, whatever the size, in plain text and in HTML."""

import html.parser
import re

import numpy as np
import pytest

from rows_of_noise import statistics_of_noise, take
from sqrtdk import Attention, Gradients, HeadSummary, attention, attention_gradients
from sqrtdk.show.table import MOST_ROWS, Table

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 64, 8)).astype(np.float32)

SHOWN = {
    "attention": lambda: attention(q, k, v, causal=True, weights=True),
    "statistics": lambda: attention(q, k, v, causal=True).statistics,
    "summary": lambda: HeadSummary.of(attention(q, k, v, causal=True).statistics),
    "moments": lambda: HeadSummary.of(attention(q, k, v, causal=True).statistics)["entropy"],
    "max keys": lambda: HeadSummary.of(attention(q, k, v, causal=True).statistics).max_keys,
    "gradients": lambda: attention_gradients(q, k, v, q),
}


class Reader(html.parser.HTMLParser):
    """Tags and texts of a fragment; complains about tags that are not closed."""

    def __init__(self, fragment):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(fragment)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("name", SHOWN)
def test_a_result_of_any_size_is_a_few_lines(name):
    lines = repr(SHOWN[name]()).splitlines()
    assert 1 < len(lines) <= MOST_ROWS + 3
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", SHOWN)
def test_html_says_what_the_text_says(name):
    shown = SHOWN[name]()
    reader = Reader(shown._repr_html_())
    assert re.sub(r"\s+", "", "".join(reader.texts)) == re.sub(r"\s+", "", repr(shown))


@pytest.mark.parametrize("name", SHOWN)
def test_html_needs_nothing_and_takes_the_colours_of_the_page(name):
    fragment = SHOWN[name]()._repr_html_()
    assert {tag for tag, _ in Reader(fragment).tags} <= {"div", "table", "tr", "th", "td"}
    fragment = re.sub(r"background:rgba\(31,131,201,0\.\d\d\)", "", fragment)  # seen through, on any page
    assert not re.search(r"color|background|https?:|url\(|#[0-9a-f]{3}|src=|class=", fragment)


def test_markup_in_a_cell_is_text():
    table = Table("<b>&", ("<i>",), [("<script>alert('x')</script>",)])
    assert Reader(table.as_html()).texts == ["<b>&", "<i>", "<script>alert('x')</script>"]
    assert "<script>" not in table.as_html()


@pytest.mark.parametrize("heads", [3, 40])
def test_the_sharper_a_head_the_stronger_its_colour(heads):
    gains = np.linspace(0.0, 4.0, heads)[:, None]  # one head after the other sharper
    same = (np.broadcast_to(x[0, 0], (heads, 64, 8)) for x in (q, k, v))
    summary = HeadSummary.of(attention(*same, scale=gains).statistics)
    cells = re.findall(r"rgba\(31,131,201,(0\.\d\d)\)\">([\d.]+)<", summary._repr_html_())
    assert [ratio for _, ratio in cells] == [
        f"{ratio:.3g}" for at, ratio in enumerate(summary["entropy_ratio"].mean) if heads == 3 or not 8 <= at < 32
    ]
    shades = [float(shade) for shade, _ in cells]
    assert shades[0] == 0.0
    assert shades == sorted(shades)
    assert shades[-1] > 0.3


@pytest.mark.parametrize("heads", [MOST_ROWS, MOST_ROWS + 1, 500])
def test_of_many_heads_the_middle_is_left_out(heads):
    rows = attention(*np.zeros((3, heads, 2, 4))).statistics
    lines = repr(HeadSummary.of(rows)).splitlines()
    shown = [line.split()[0] for line in lines[2:]]
    first, last = [str(head) for head in range(8)], [str(head) for head in range(heads - 8, heads)]
    assert shown == (first + last if heads == MOST_ROWS else [*first, "…", *last])
    assert lines[0] == f"HeadSummary: {heads} heads, 2 of 2 rows each"


def test_the_overview_has_the_numbers_of_the_rows():
    rows = statistics_of_noise(0, 2, 9)
    assert repr(rows).splitlines()[0] == "AttentionStatistics of rows [2, 3, 9]"
    shown = {line.split()[0]: line.split()[1:] for line in repr(rows).splitlines()[2:]}
    ratio = rows.entropy_ratio[..., 1:]  # the first row sees one key
    assert shown["entropy_ratio"] == [f"{x:.3g}" for x in (ratio.mean(), ratio.min(), ratio.max())] + ["48"]
    logit = rows.max_logit
    assert shown["max_logit"] == [f"{x:.3g}".replace("-", "−") for x in (logit.mean(), logit.min(), logit.max())] + [
        "54"
    ]


def test_rows_of_nan_are_counted_and_their_causes_named():
    q, k = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    told = "NaN logits in {} of 15 rows: look for NaN or infinity in q, in a key that the row sees, in the mask"
    q[1, 2, 0] = np.nan
    result = attention(q, k, k)
    assert np.isnan(result.output).all(-1).sum() == 1
    assert repr(result).splitlines()[2] == told.format(1)
    k[0, 3] = np.nan
    assert repr(attention(q, k, k, causal=True)).splitlines()[2] == told.format(3)  # two rows of head 0 see the key
    q[1, 2, 0] = 0.0
    hidden = np.arange(5) != 3
    assert "NaN" not in repr(attention(q, k, k, mask=hidden))


def test_extremes_of_a_sample_are_bounds():
    some = take(statistics_of_noise(0, 2, 9), [1, 4, 7])
    lines = repr(some).splitlines()
    assert lines[0] == "AttentionStatistics of rows [2, 3, 3], a sample of 3 of 9 query positions"
    assert all(line.count("≥") == line.count("≤") == 1 for line in lines[2:])
    assert "≥" not in repr(take(statistics_of_noise(0, 2, 3), [0, 1, 2]))


def test_results_without_rows_or_statistics_are_shown_too():
    nothing = attention(np.zeros((2, 0, 4)), np.zeros((2, 3, 4)), np.zeros((2, 3, 4)))
    assert repr(nothing.statistics).splitlines()[2].split() == ["entropy_ratio", "–", "–", "–", "0"]
    assert Reader(nothing._repr_html_()).texts
    plain = attention(q, k, v, statistics=False)
    assert repr(plain) == "Attention: output float32 [2, 40, 64, 8], no statistics, no weights, by kernel"
    assert Reader(plain._repr_html_()).texts == [repr(plain)]
    assert "1 head," in repr(HeadSummary.of(attention(*np.zeros((3, 2, 4))).statistics))


def test_results_stay_tuples():
    output, statistics, weights = result = attention(q, k, v)
    assert isinstance(result, Attention)
    assert (output is result.output, statistics is result.statistics, weights) == (True, True, None)
    assert len(result) == 3
    assert len(attention_gradients(q, k, v, q)) == len(Gradients._fields) == 6
