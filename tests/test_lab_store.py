"""The store: what is put is there, and a file that is not ours is left alone."""

import sqlite3
from pathlib import Path

import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab import RunRecord, RunSpec, Store
from sqrtdk.lab.store import STORE_VERSION, identify_run, record_failure

DONE = RunRecord({"status": "done", "final_loss": 0.25}, {"step": [0, 10], "loss": [2.7, 0.3]})


def test_a_run_is_there_after_reopening(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        assert store.get(RunSpec()) is None
        store.put(RunSpec(), DONE)
    with Store(path) as store:
        assert store.get(RunSpec()) == DONE
        assert store.get(RunSpec(seed=1)) is None
        assert len(store) == 1


def test_a_run_is_seen_by_another_connection_at_once(tmp_path):
    with Store(tmp_path / "runs.sqlite") as writer, Store(tmp_path / "runs.sqlite") as reader:
        writer.put(RunSpec(), DONE)
        assert reader.get(RunSpec()) == DONE


def test_a_failed_run_is_kept_but_tried_again(tmp_path):
    with Store(None) as store:
        store.put(RunSpec(), record_failure(RunSpec(), "out of paper"))
        assert len(store) == 1
        assert store.get(RunSpec()) is None
        store.put(RunSpec(), DONE)
        assert len(store) == 1
        assert store.get(RunSpec()) == DONE


def test_a_row_begins_with_what_names_the_run():
    row = identify_run(RunSpec(scale="fixed:10", d_k=32, seed=7, init="xavier", lr=3e-3))
    assert list(row)[:5] == ["scale", "d_k", "seed", "init", "lr"]
    assert list(row.values())[:5] == ["fixed:10", 32, 7, "xavier", 3e-3]
    assert row["pairs"] == 8
    assert "start_scale" not in row


def other_sqlite(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE letters (body TEXT)")
    connection.commit()
    connection.close()


def other_version(path):
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {STORE_VERSION + 1}")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("dear diary, " * 100), "must be a SQLite file made by sqrtdk"),
        (other_sqlite, "made by something else"),
        (other_version, f"must have version {STORE_VERSION}, got .* of version {STORE_VERSION + 1}"),
    ],
)
def test_a_foreign_file_is_refused_and_left_as_it_was(tmp_path, make, message):
    path = tmp_path / "file"
    make(path)
    before = path.read_bytes()
    with pytest.raises(InvalidValueError, match=message):
        Store(path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_missing_folder_and_a_folder_are_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="must lie in a folder that exists"):
        Store(tmp_path / "nowhere" / "runs.sqlite")
    with pytest.raises(InvalidValueError, match="must be a file, got the folder"):
        Store(tmp_path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder where not even root may write")
def test_a_place_that_cannot_be_written_is_refused():
    with pytest.raises(InvalidValueError, match=r"must be a file that can be written, got /proc/runs\.sqlite"):
        Store(Path("/proc/runs.sqlite"))


def test_an_empty_file_becomes_a_store(tmp_path):
    path = tmp_path / "runs.sqlite"
    path.touch()
    with Store(path) as store:
        store.put(RunSpec(), DONE)
        assert len(store) == 1
