"""`sqrtdk runs`: what a store has is listed, shown, compared, exported and deleted; wrong input is one line."""

import csv
import json
import re

import pytest

from sqrtdk.commands.cli import main
from sqrtdk.lab import RunRecord, RunSpec, Store
from sqrtdk.lab.store import identify_run, record_failure

SPECS = [RunSpec(seed=0), RunSpec(seed=1, scale="none"), RunSpec(seed=2)]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


@pytest.fixture
def path(tmp_path):
    """A store with two runs that are done and one that failed, and the checkpoint of an unfinished one."""
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        for number, spec in enumerate(SPECS[:2]):
            row = {**identify_run(spec), "status": "done", "final_loss": 0.5 + number, "final_accuracy": 0.25}
            store.put(spec, RunRecord(row, {"step": [0, 10], "loss": [2.0, 0.5 + number]}))
        store.put(SPECS[2], record_failure(SPECS[2], "out of paper"))
        store.checkpoints.put("f" * 16, b"unfinished")
    return path


def test_runs_are_listed_newest_first(capsys, path):
    code, out, _ = run(capsys, "runs", "list", path, "--json")
    content = json.loads(out)
    assert code == 0
    assert [row["key"] for row in content["runs"]] == [spec.key for spec in reversed(SPECS)]
    assert [row["final_loss"] for row in content["runs"]] == [None, 1.5, 0.5]
    assert content["reading"] == [f"1 run can go on from a checkpoint: {'f' * 16}."]
    code, out, _ = run(capsys, "runs", "list", path, "--most", "1")
    assert code == 0
    assert "3 runs in runs.sqlite; the latest 1 are listed." in out
    assert SPECS[2].key in out
    assert SPECS[0].key not in out


def test_one_run_is_shown_by_the_beginning_of_its_key(capsys, path):
    code, out, _ = run(capsys, "runs", "show", path, SPECS[0].key[:6], "--json")
    content = json.loads(out)
    assert code == 0
    assert {"name": "final_loss", "value": 0.5} in content["run"]
    assert content["curves"]["runs"] == [{"step": [0, 10], "loss": [2.0, 0.5]}]
    assert "out of paper" in run(capsys, "runs", "show", path, SPECS[2].key)[1]


def test_runs_are_compared_by_what_differs(capsys, path):
    code, out, _ = run(capsys, "runs", "compare", path, SPECS[0].key, SPECS[1].key, "--json")
    rows = {row.pop("name"): list(row.values()) for row in json.loads(out)["differences"]}
    assert code == 0
    assert {name: rows[name] for name in ("scale", "seed", "final_loss")} == {
        "scale": ["sqrt", "none"],
        "seed": [0, 1],
        "final_loss": [0.5, 1.5],
    }
    assert "d_k" not in rows


def test_runs_are_exported_with_every_column(capsys, path, tmp_path):
    assert run(capsys, "runs", "export", path, tmp_path / "runs.csv")[0] == 0
    with open(tmp_path / "runs.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == [spec.key for spec in reversed(SPECS)]
    assert [row["final_loss"] for row in rows] == ["", "1.5", "0.5"]
    assert rows[0]["message"] == "out of paper"
    assert run(capsys, "runs", "export", path, tmp_path / "curves.csv", "--curves")[0] == 0
    with open(tmp_path / "curves.csv", encoding="utf-8", newline="") as file:
        points = list(csv.DictReader(file))
    assert [(row["key"], row["step"], row["loss"]) for row in points] == [
        (SPECS[1].key, "0", "2.0"),
        (SPECS[1].key, "10", "1.5"),
        (SPECS[0].key, "0", "2.0"),
        (SPECS[0].key, "10", "0.5"),
    ]


def test_runs_are_deleted_with_their_checkpoints(capsys, path):
    assert run(capsys, "runs", "delete", path, "--failed")[:2] == (0, f"1 run deleted from {path}\n")
    assert run(capsys, "runs", "delete", path, SPECS[0].key[:8], "ffff")[:2] == (0, f"2 runs deleted from {path}\n")
    with Store(path, read_only=True) as store:
        assert [row["key"] for row in store.runs(10)] == [SPECS[1].key]
        assert store.checkpoints.list_keys() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list", "nowhere.sqlite"), "STORE must be a file that exists, got nowhere.sqlite"),
        (("show", "{path}", "zzz"), "KEY must be the beginning of one run's key, got 'zzz', unknown"),
        (("show", "{path}", ""), "KEY must be the beginning of one run's key, got '', the beginning of "),
        (("show", "{path}", "ffff"), "KEY must name finished runs, got ffffffffffffffff, which is unfinished"),
        (("compare", "{path}", "ffff"), "KEY must name at least two runs, got 1"),
        (("delete", "{path}"), "KEY must name runs, or --failed stand in their place, got neither"),
        (("delete", "{path}", "--failed", "ffff"), "KEY must name runs, or --failed stand in their place, got both"),
        (("list", "{path}", "--most", "0"), "--most must be at least 1, got '0'"),
        (("erase", "{path}"), "No such command 'erase'"),
    ],
)
def test_wrong_input_is_one_line_and_harms_nothing(capsys, path, arguments, words):
    before = path.read_bytes()
    code, out, err = run(capsys, "runs", *(one.format(path=path) for one in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("sqrtdk: ")
    assert err.count("\n") == 1
    assert words in err
    assert path.read_bytes() == before


def test_a_store_in_use_is_listed_but_nothing_is_deleted_from_it(capsys, path):
    with Store(path):
        assert run(capsys, "runs", "list", path)[0] == 0
        code, _, err = run(capsys, "runs", "delete", path, "--failed")
    assert code == 2
    assert re.search(r"STORE .* is in use by this process on .*; wait for it", err)


def test_a_file_that_is_no_store_is_refused(capsys, tmp_path):
    other = tmp_path / "diary.txt"
    other.write_text("dear diary, " * 100)
    code, _, err = run(capsys, "runs", "list", other)
    assert code == 2
    assert "STORE must be a SQLite file made by sqrtdk" in err
