"""Tables of a benchmark in Markdown: what they say is in the record, losses stand out, documents are filled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.markdown import fill_tables, write_tables
from example_records import make_bench
from sqrtdk.errors import InvalidValueError

DOCUMENT = (
    "# Title\n\n<!-- bench: square -->\nold\n<!-- end -->\n\nBetween.\n\n<!-- bench: peers -->\nkept\n<!-- end -->\n"
)
ROOT = Path(__file__).parents[2]


def test_every_ratio_of_a_case_stands_in_its_row():
    lines = write_tables(make_bench())["square"].splitlines()
    assert lines[0] == ("| case | error (output) | sqrtdk / torch SDPA | sqrtdk with statistics / torch SDPA |")
    assert lines[2] == "| 1×8×512×64 full | 2.0e-07 | 1.40 [1.30, 1.50], 3.0e-07 | **0.90** [0.80, 0.95], 3.0e-07 |"
    assert lines[3] == "| noisy | 2.0e-07 | too few good rounds | – |"
    assert lines[5].startswith("a CPU, avx512, threads: 2")


def test_who_is_missing_is_said_under_the_table():
    record = make_bench()
    record.tables["left_out"].append({"contender": "jax", "cases": "all", "why": "not installed: jax"})
    assert write_tables(record)["square"].endswith(" Not timed, or not everywhere: jax (not installed: jax).\n")


def test_costs_have_a_table():
    record = make_bench()
    record.tables["costs"] = [
        {"suite": "square", "case": "full", "cost_of": "all statistics", "percent": 5.04, "low": 4.9, "high": 5.2},
        {"suite": "square", "case": "noisy", "cost_of": "all statistics", "percent": None, "low": None, "high": None},
    ]
    lines = write_tables(record)["costs_square"].splitlines()
    assert lines[2:4] == [
        "| full | all statistics | 5.0 [4.9, 5.2] |",
        "| noisy | all statistics | too few good rounds |",
    ]


def test_the_growth_with_keys_has_a_table_per_logit():
    record = make_bench()
    record.curves["growth"] = [
        {"contender": "sqrtdk", "window": None, "n": [512, 1024], "milliseconds": [0.262144, 2.097152]},
        {"contender": "textbook in torch", "window": None, "n": [512], "milliseconds": [None]},
        {"contender": "sqrtdk", "window": 64, "n": [512, 1024], "milliseconds": [1.0, 2.0]},
    ]
    record.tables["memory"] = [
        {"contender": "sqrtdk", "n": 512, "mebibytes": 0.25, "why_not": None},
        {"contender": "sqrtdk", "n": 1024, "mebibytes": None, "why_not": "too large"},
    ]
    power = {"what": "time, full", "grows_with": "N", "smallest": 512, "largest": 1024, "power": 3.0}
    record.tables["growth"] = [{**power, "contender": "sqrtdk", "low": 2.9, "high": 3.1}]
    lines = write_tables(record)["per_logit"].splitlines()
    assert lines[2:4] == ["| 512 | 1 | – | 0.2 | – |", "| 1024 | 2 | – | – | – |"]
    assert lines[5] == "- sqrtdk, time, full: grows as N from 512 to 1024 to the power 3.00 [2.90, 3.10]."


def test_only_what_was_measured_is_written():
    filled = fill_tables(DOCUMENT, [make_bench()])
    assert "old" not in filled
    assert "**0.90**" in filled
    assert filled.endswith("Between.\n\n<!-- bench: peers -->\nkept\n<!-- end -->\n")
    assert fill_tables(filled, [make_bench()]) == filled


def test_a_document_without_such_tables_is_refused():
    with pytest.raises(InvalidValueError, match=r"must hold a table of square .* got peers"):
        fill_tables(DOCUMENT.replace("square", "peers"), [make_bench()])


@pytest.mark.slow
def test_the_script_fills_files(tmp_path):
    raw, document = tmp_path / "bench.json", tmp_path / "page.md"
    raw.write_text(json.dumps(make_bench().as_json()))
    document.write_text(DOCUMENT)
    subprocess.run([sys.executable, "-m", "benchmarks.fill_tables", raw, document], cwd=ROOT, check=True)
    assert "**0.90**" in document.read_text()
