"""Sections of the report compute what they need and nothing else; `sqrtdk report` and its options."""

import json
import subprocess
import sys
import warnings
import webbrowser

import pytest

from example_records import every_kind
from sqrtdk.claims import Evidence
from sqrtdk.commands import cli, report_records
from sqrtdk.commands.report_records import TRAINED, gather, list_topics
from sqrtdk.errors import InvalidValueError, MissingExtraError, SqrtdkWarning
from sqrtdk.lab import Lab, Store
from sqrtdk.report.kinds import topic_of
from sqrtdk.report.story import SECTIONS


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.fixture
def store(tmp_path):
    """A store with a finished record of each kind."""
    path = tmp_path / "runs.sqlite"
    with Store(path) as kept:
        for record in every_kind().values():
            kept.put_record(record)
    return path


def test_topics_of_all_sections_are_named_once():
    topics = list_topics(None)
    assert len(topics) == len(set(topics))
    assert set(topics) == {need for section in SECTIONS.values() for need in section.needs}
    assert list_topics(["try"]) == []
    with pytest.raises(InvalidValueError, match=r"unknown section 'gradient'.* did you mean 'gradients'"):
        list_topics(["gradient"])


def test_without_torch_what_has_to_be_trained_is_left_out(monkeypatch):
    monkeypatch.setattr(report_records, "can_train", lambda: False)
    assert not set(TRAINED) & set(list_topics(None))
    assert list_topics(["models"]) == ["zoo", "audit"]
    with pytest.raises(MissingExtraError, match=r'torch is not installed.*"sqrtdk\[torch\]"'):
        list_topics(["training"])
    asked = {}
    monkeypatch.setattr(report_records, "check_claims", lambda *_, training, **__: asked.update(training=training))
    with Lab() as lab, monkeypatch.context() as patch:
        patch.setattr(lab, "keep", lambda record: record)
        gather(["claims"], Evidence(lab=lab))
    assert asked == {"training": False}


def test_only_what_is_asked_for_is_computed(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nobody asked for this")

    for name in ("gradients", "concentration", "temperature"):
        monkeypatch.setattr(report_records.exercises, name, refuse)
    monkeypatch.setattr(report_records, "check_claims", refuse)
    with Lab() as lab:
        monkeypatch.setattr(lab, "run", refuse)
        records, audit, failures = gather(["saturation", "zoo"], Evidence(lab=lab))
        kept = lab.store.records()
    assert [record.kind for record in records] == ["saturation", "zoo"]
    assert [record.kind for record in kept] == ["saturation"], "the zoo comes with sqrtdk"
    assert audit is None
    assert failures == {}


@pytest.mark.slow
def test_every_topic_is_told_under_its_name():
    """What a section asks for is what the page finds under that name."""
    assert {topic_of(record) for record in every_kind().values()} | {"learned", "widths", "audit"} >= set(
        list_topics(None)
    )


def test_a_model_that_is_not_installed_is_not_audited(monkeypatch):
    monkeypatch.setattr(report_records, "MINILM", "no_such_model")
    with Lab() as lab:
        assert gather(["audit"], Evidence(lab=lab)) == ([], None, {})


@pytest.mark.slow
def test_an_audit_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(report_records, "MINILM", "json")  # installed, but no model
    monkeypatch.setattr(report_records.importlib.util, "find_spec", lambda name: name)
    with Lab() as lab, pytest.warns(SqrtdkWarning, match="audit could not be computed: InvalidValueError: MODEL must"):
        _, audit, failures = gather(["audit"], Evidence(lab=lab))
    assert audit is None
    assert "which there is no config.json" in failures["audit"]


def test_a_topic_that_cannot_be_computed_loses_no_other(monkeypatch):
    monkeypatch.setattr(report_records.exercises, "variance", lambda **_: 1 / 0)
    with Lab() as lab, pytest.warns(SqrtdkWarning, match="variance could not be computed: ZeroDivisionError"):
        records, _, failures = gather(["variance", "saturation"], Evidence(lab=lab))
    assert [record.kind for record in records] == ["saturation"]
    assert failures == {"variance": "ZeroDivisionError: division by zero"}


def test_wrong_options_are_not_taken_for_failures():
    with Lab() as lab, pytest.raises(InvalidValueError, match="seed must be at least 0"):
        gather(["variance"], Evidence(seed=-1, lab=lab))


# The command


@pytest.mark.slow
def test_one_section_of_the_command(capsys, tmp_path):
    page = tmp_path / "r.html"
    code, out, _ = run(capsys, "report", "--only", "variance", "--only", "try", "--output", str(page))
    assert code == 0
    text = page.read_text(encoding="utf-8")
    assert '<section id="variance">' in text
    assert 'id="try-it"' in text
    assert '<section id="gradients">' not in text
    assert [line.split()[0] for line in out.splitlines()] == ["variance", "page"]


@pytest.mark.slow
def test_the_command_writes_the_page_when_a_topic_fails(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(report_records.exercises, "variance", lambda **_: 1 / 0)
    page = tmp_path / "r.html"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = run(capsys, "report", "--only", "variance", "--only", "saturation", "--output", str(page))
    assert code == 0
    assert err.splitlines()[-1:] == ["sqrtdk: variance could not be computed: ZeroDivisionError: division by zero"]
    text = page.read_text(encoding="utf-8")
    assert "variance could not be computed: ZeroDivisionError: division by zero" in text
    assert 'id="saturation-0-0"' in text


def test_the_help_names_every_section(capsys):
    _, out, _ = run(capsys, "report", "--help")
    assert f"{', '.join(SECTIONS)}." in " ".join(out.replace("│", " ").split())


@pytest.mark.slow
def test_records_of_a_store_are_told_without_computing(capsys, tmp_path, store, monkeypatch):
    monkeypatch.setattr(report_records, "gather", None)
    page = tmp_path / "r.html"
    code, _, _ = run(capsys, "report", "--from", str(store), "--output", str(page))
    assert code == 0
    text = page.read_text(encoding="utf-8")
    assert all(f'<section id="{name}">' in text for name in SECTIONS)


@pytest.mark.slow
def test_what_json_printed_is_told_again(capsys, tmp_path):
    first, second, printed = tmp_path / "a.html", tmp_path / "b.html", tmp_path / "records.json"
    _, out, _ = run(capsys, "report", "--only", "variance", "--json", "--output", str(first))
    assert [record["kind"] for record in json.loads(out)] == ["variance"]
    printed.write_text(out, encoding="utf-8")
    run(capsys, "report", "--from", str(printed), "--only", "variance", "--output", str(second))
    one, other = (path.read_text(encoding="utf-8").partition('<section id="making">')[0] for path in (first, second))
    assert one == other


def test_open_shows_the_page(capsys, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    page = tmp_path / "r.html"
    run(capsys, "report", "--only", "try", "--open", "--output", str(page))
    assert opened == [page.resolve().as_uri()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "claim"], "unknown section 'claim'; known: answer, "),
        (["--from", "no-such.sqlite"], "--from must be a file, got no-such.sqlite"),
        (["--from", "a", "--store", "b"], "--from and --store exclude each other, got both"),
    ],
)
def test_wrong_options_are_refused_in_one_line(capsys, tmp_path, arguments, message):
    code, _, err = run(capsys, "report", "--output", str(tmp_path / "r.html"), *arguments)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_report_from_records_needs_no_torch(tmp_path, store):
    page = tmp_path / "r.html"
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
        f"from sqrtdk.commands.cli import main; main(['report', '--from', {str(store)!r}, '--output', {str(page)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '<section id="training">' in page.read_text(encoding="utf-8")
