"""The report page: complete, self-contained, escaped, and true to the records."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from example_records import NASTY, every_kind, make_ablation, make_claims
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.records import spec_hash
from sqrtdk.report import render_report, write_report
from sqrtdk.report.table import format_cell, render_table, title_column


class PageReader(HTMLParser):
    """Collects what tests ask about: tags, attributes, visible text, and whether the tags nest."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.addresses, self.text, self.open = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append((tag, values))
        if "id" in values:
            self.ids.append(values["id"])
        self.addresses += [values[name] for name in ("src", "href", "action", "data", "srcset") if name in values]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def visible(self):
        return " ".join(self.text)


@pytest.fixture(scope="module")
def page():
    return render_report(every_kind())


@pytest.fixture(scope="module")
def reader(page):
    return PageReader(page)


def test_tags_nest_and_ids_are_unique(reader):
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))


def test_page_asks_the_network_for_nothing(page, reader):
    assert all(address.startswith("#") for address in reader.addresses)
    assert "@import" not in page.partition("</style>")[0]
    assert "url(" not in page.partition("</style>")[0]
    assert not [tag for tag, _ in reader.tags if tag in ("link", "img", "iframe", "object")]
    policy = next(values["content"] for tag, values in reader.tags if values.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_plotly_is_embedded_once(page):
    from plotly.offline import get_plotlyjs

    assert page.count(get_plotlyjs()) == 1
    assert page.count('<script id="plotly">') == 1


def test_links_lead_to_sections_on_the_page(reader):
    targets = [address.removeprefix("#") for address in reader.addresses]
    assert set(targets) <= set(reader.ids)
    assert {"claims", "ablation", "making", *every_kind()} <= set(targets)


def test_every_claim_and_every_reading_is_there(reader):
    claims = every_kind()["claims"].tables["claims"]
    rows = [values for tag, values in reader.tags if tag == "tr" and "data-verdict" in values]
    assert [values["data-verdict"] for values in rows] == [row["verdict"] for row in claims]
    for row in claims:
        assert row["id"] in reader.visible
    for record in every_kind().values():
        for sentence in record.reading:
            assert sentence in reader.visible


def test_claims_are_counted_and_can_be_filtered(reader):
    buttons = [values["data-verdict"] for tag, values in reader.tags if tag == "button" and "data-verdict" in values]
    assert buttons == ["", "holds", "depends", "wrong"]
    assert "Here 6 claims about why are computed" in reader.visible
    assert "hidden_detail" not in reader.visible


def test_every_panel_of_every_figure_has_a_place_and_its_data(reader):
    from sqrtdk.report import figure_for

    data = [values["data-for"] for tag, values in reader.tags if values.get("class") == "plot-data"]
    expected = [
        f"figure-{name}-{index}"
        for name, record in every_kind().items()
        for index in range(len(figure_for(record).panels))
    ]
    assert sorted(data) == sorted(expected)
    assert set(data) <= set(reader.ids)


def test_page_says_how_it_was_made():
    text = PageReader(render_report(every_kind(), command="sqrtdk report --seeds 4")).visible
    assert "sqrtdk report --seeds 4" in text
    assert "numpy" in text
    for record in every_kind().values():
        assert spec_hash(record.spec) in text


def test_page_has_its_own_order_whatever_comes_in(page):
    shuffled = dict(reversed(list(every_kind().items())))
    assert render_report(shuffled) == page


def test_texts_are_escaped():
    records = {
        "claims": make_claims(why=NASTY),
        "ablation": replace(make_ablation(), reading=[NASTY], spec={"task": NASTY}),
    }
    text = render_report(records, command=NASTY)
    reader = PageReader(text)
    assert "<script>alert" not in text
    assert reader.open == []
    assert NASTY in reader.visible


def test_a_sequence_of_records_gets_names_by_kind():
    reader = PageReader(render_report([make_ablation(), make_ablation(seeds=2), make_claims()]))
    assert {"ablation", "ablation-2", "claims"} <= set(reader.ids)


def test_names_tell_records_of_one_kind_apart():
    reader = PageReader(render_report({"ablation": make_ablation(), "ablation_controls": make_ablation(seeds=2)}))
    assert "Exercise 3: training with and without the scale (controls)" in reader.visible


def test_long_tables_and_single_runs_are_folded():
    text = render_report([make_ablation(seeds=2)])
    assert re.search(r"<details><summary>Every run \(6 rows\)</summary>", text)
    assert "<h3>Summary over seeds</h3>" in text


def test_a_page_without_claims_promises_none():
    text = PageReader(render_report([every_kind()["saturation"]])).visible
    assert "claims about why" not in text
    assert "are wrong" not in text


def test_no_records_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="records must hold at least one record"):
        write_report({}, tmp_path / "report.html")
    with pytest.raises(InvalidTypeError, match="got dict for 'x'"):
        write_report({"x": {}}, tmp_path / "report.html")
    with pytest.raises(InvalidValueError, match="unknown record kind 'other'"):
        write_report([replace(make_claims(), kind="other")], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_report_is_written_whole(tmp_path, page):
    path = write_report(every_kind(), tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == page
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(InvalidValueError, match="existing directory"):
        write_report(every_kind(), tmp_path / "nowhere" / "report.html")


def test_report_loads_neither_torch_nor_a_renderer_until_asked():
    code = (
        "import sys, sqrtdk.report;"
        "print([name for name in ('torch', 'plotly', 'matplotlib', 'sqrtdk.lab') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-3.2, "−3.2"),
        (1234.5678, "1235"),
        (123456.0, "1.2·10⁵"),
        (-4.5e-5, "−4.5·10⁻⁵"),
        (float("inf"), "∞"),
        (float("nan"), "–"),
        (False, "no"),
        ([0.1, None], "0.1 to –"),
        ([1, 2, 3], "1, 2, 3"),
        ({"a": 1}, "a 1"),
    ],
)
def test_cells(value, text):
    assert format_cell(value) == text


def test_two_layers_are_no_interval():
    assert format_cell([1.2, 0.9], "temperature_by_layer") == "1.2, 0.9"
    assert "<td>1.2, 0.9</td>" in render_table([{"temperatures": [1.2, 0.9]}]).replace(' class="number"', "")
    assert format_cell([0.9, 1.2], "temperature_range") == "0.9 to 1.2"


def test_learned_scales_have_a_section_of_their_own():
    plain = make_ablation()
    best = [{**row, "temperature_by_layer": None} for row in plain.tables["best"]]
    best[1]["temperature_by_layer"] = [1.2, 0.9]
    runs = [{**row, "temperatures": [1.2, 0.9]} for row in plain.tables["runs"]]
    learned = replace(plain, tables={**plain.tables, "runs": runs, "best": best})
    page = render_report([learned, plain])
    assert page.index("<h2>Exercise 3: training with and without the scale</h2>") < page.index(
        "<h2>Temperatures that learn</h2>"
    )
    assert 'id="ablation"' in page
    assert 'id="learned"' in page


def test_rows_with_different_keys_make_one_table():
    text = render_table([{"a": 1}, {"b": 2.5}])
    assert text.count("<th") == 3  # thead and two columns
    assert text.count("–") == 2


def test_main_rows_are_bold_instead_of_a_column():
    text = render_table([{"x": 1, "main": True}, {"x": 2, "main": False}])
    assert text.count('<tr class="main">') == 1
    assert "yes" not in text


def test_columns_have_readable_titles():
    assert title_column("jacobian_trace_p5") == "1 − Σp² 5th percentile"
    assert title_column("entropy_ratio_low") == "H/ln n 95% from"
