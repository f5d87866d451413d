"""The store: what is put is there, and a file that is not ours is left alone."""

import contextlib
import functools
import json
import os
import random
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rights import as_nobody
from sqrtdk.errors import InvalidValueError, SqrtdkError, SqrtdkWarning
from sqrtdk.lab import RunRecord, RunSpec, Store
from sqrtdk.lab.store import identify_run, record_failure
from sqrtdk.lab.store_file import APPLICATION_ID, STORE_VERSION
from sqrtdk.lab.store_file import connect as connect_store
from sqrtdk.records.record import Record

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


MAPS = {"tokens": ["A", "B"], "first": 1, "right": [0], "steps": [0, 10], "weights": ["/wA=", "AP8="]}


def test_maps_are_kept_beside_their_run_and_deleted_with_it(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        store.put(RunSpec(), replace(DONE, maps=MAPS))
        store.put(RunSpec(seed=1), DONE)
        store.put_running(RunSpec(seed=2), 3, {}, {**MAPS, "steps": [0]})
        keys = [RunSpec(seed=seed).key for seed in range(3)]
        assert store.maps(keys) == {keys[0]: MAPS, keys[2]: {**MAPS, "steps": [0]}}
        assert store.get(RunSpec()) == replace(DONE, maps=MAPS)
        assert store.get(RunSpec(seed=1)) == DONE
        assert store.delete([keys[0]]) == 1
        assert list(store.maps(keys)) == [keys[2]]


def test_a_store_without_maps_is_read_and_gets_them(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        store.put(RunSpec(), DONE)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE maps")
    with Store(path, read_only=True) as store:
        assert store.get(RunSpec()) == DONE
    with Store(path) as store:
        assert store.get(RunSpec()) == DONE
        store.put(RunSpec(seed=1), replace(DONE, maps=MAPS))
        assert store.get(RunSpec(seed=1)).maps == MAPS


def test_a_kill_between_maps_and_run_leaves_no_run_without_its_maps(tmp_path, monkeypatch):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        insert = store._insert

        def break_off(table, values):
            insert(table, values)
            raise KeyboardInterrupt

        monkeypatch.setattr(store, "_insert", break_off)
        with pytest.raises(KeyboardInterrupt):
            store.put(RunSpec(), replace(DONE, maps=MAPS))
        assert store.get(RunSpec()) is None


def test_damaged_maps_leave_their_run(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        store.put(RunSpec(), replace(DONE, maps=MAPS))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE maps SET content = replace(content, 'A', 'C')")
    with Store(path) as store, pytest.warns(SqrtdkWarning, match="row 1 of maps is damaged"):
        assert store.get(RunSpec()) == DONE


def test_a_path_may_be_text(tmp_path):
    with Store(str(tmp_path / "runs.sqlite")) as store:
        store.put(RunSpec(), DONE)
    with Store(tmp_path / "runs.sqlite") as store:
        assert store.get(RunSpec()) == DONE


def test_a_run_is_seen_by_another_connection_at_once(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as writer, Store(path, read_only=True) as reader:
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
        (other_version, f"must have version {STORE_VERSION} or less, got .* of version {STORE_VERSION + 1}"),
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


def fill(path, runs=40):
    with Store(path) as store:
        for seed in range(runs):
            store.put(RunSpec(seed=seed), RunRecord(DONE.row, {"loss": [0.5] * 300}))


def corrupt(path):
    """Overwrite all pages but the first, which says what the file is."""
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)


def test_corrupted_pages_are_one_error(tmp_path):
    path = tmp_path / "runs.sqlite"
    fill(path)
    corrupt(path)
    with (
        pytest.raises(SqrtdkError, match=r"store .*runs\.sqlite is damaged \(.*\); move it away"),
        Store(path) as store,
    ):
        store.get(RunSpec(seed=3))
    with pytest.raises(SqrtdkError, match=r"is damaged"), Store(path) as store:
        store.put(RunSpec(seed=100), DONE)


def test_a_full_disk_is_one_error_and_keeps_what_was_there(tmp_path):
    path = tmp_path / "runs.sqlite"
    fill(path, 3)
    with Store(path) as store:
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(
            SqrtdkError, match=r"store .* cannot be written \(database or disk is full\); finished runs"
        ):
            store.put(RunSpec(seed=9), RunRecord(DONE.row, {"loss": [0.5] * 100_000}))
        assert len(store) == 3


@pytest.mark.skipif(os.name == "nt", reason="other rights")
@pytest.mark.parametrize("folder_too", [False, True])
def test_a_store_that_may_only_be_read_is_called_so(folder_too):
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: nobody may look into that
        path = Path(folder) / "runs.sqlite"
        fill(path, 2)
        path.chmod(0o444)
        os.chmod(folder, 0o555 if folder_too else 0o777)
        with as_nobody(), pytest.raises(InvalidValueError) as caught:
            Store(path)
        os.chmod(folder, 0o755)
    assert str(caught.value).startswith(f"store must be a file that can be written, got {path} (")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        "row = substr(row, 1, 20)",
        "row = '{}'",
        "row = '[]'",
        "curves = x'ff00'",
        "status = 'dome'",
        "finished = 'now'",
        "spec = CAST(x'fffe' AS TEXT)",
    ],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_damaged_row_is_named_and_the_others_are_read(tmp_path, change, sealed):
    """Without a checksum, as rows of older files are, what can be read is believed."""
    path = tmp_path / "runs.sqlite"
    fill(path, 3)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE runs SET {change} WHERE rowid = 2")
        if not sealed:
            connection.execute("UPDATE runs SET checksum = NULL")
    believed = not sealed and change in ("row = '{}'", "status = 'dome'")
    with Store(path) as store:
        if believed:
            assert store.get(RunSpec(seed=1)) is not None
        else:
            with pytest.warns(SqrtdkWarning, match=r"runs\.sqlite: row 2 of runs is damaged \(.+\) and left out"):
                assert store.get(RunSpec(seed=1)) is None
        assert store.get(RunSpec(seed=0)) == store.get(RunSpec(seed=2)) == RunRecord(DONE.row, {"loss": [0.5] * 300})
        store.put(RunSpec(seed=1), DONE)
        assert store.get(RunSpec(seed=1)) == DONE


@pytest.mark.parametrize("content", ["{}", "[]", DEEP, "nonsense", '{"kind": 3}'])
@pytest.mark.filterwarnings("default")
def test_records_that_are_none_are_left_out(tmp_path, content):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        for seed in range(3):
            store.put_record(Record("variance", {"seed": seed}, {"variance": []}))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE records SET content = ?, checksum = NULL WHERE rowid = 2", (content,))
    with Store(path) as store, pytest.warns(SqrtdkWarning, match="row 2 of records is damaged"):
        assert [record.spec["seed"] for record in store.records()] == [0, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sqrtdk.errors.SqrtdkWarning")
def test_a_flipped_byte_is_never_read_as_something_else(tmp_path):
    """Anywhere in the file: what is read is what was put, or it is missing, or the file is called damaged."""
    path, flipped = tmp_path / "runs.sqlite", tmp_path / "flipped.sqlite"
    truth = {}
    with Store(path) as store:
        for seed in range(12):
            truth[seed] = RunRecord({"status": "done", "final_loss": seed / 8}, {"loss": [seed / 3.0] * 40})
            store.put(RunSpec(seed=seed), truth[seed])
    content = path.read_bytes()
    rng = random.Random(0)
    outcomes = Counter()
    for _ in range(120):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        for beside in ("", "-wal", "-shm"):
            (tmp_path / f"flipped.sqlite{beside}").unlink(missing_ok=True)
        flipped.write_bytes(changed)
        try:
            with Store(flipped) as store:
                found = {seed: store.get(RunSpec(seed=seed)) for seed in truth}
        except SqrtdkError:
            outcomes["refused"] += 1
            continue
        assert all(found[seed] in (None, truth[seed]) for seed in truth)
        outcomes["whole" if found == truth else "in part"] += 1
    assert min(outcomes[kind] for kind in ("refused", "whole", "in part")) > 0
    assert sum(outcomes.values()) == 120


def test_an_older_file_is_brought_to_this_version(tmp_path):
    path = tmp_path / "runs.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "CREATE TABLE runs (key TEXT PRIMARY KEY, status TEXT NOT NULL, spec TEXT NOT NULL, row TEXT NOT NULL, "
            "curves TEXT NOT NULL, versions TEXT NOT NULL, finished REAL NOT NULL)"
        )
        values = (RunSpec().key, "done", "{}", json.dumps(DONE.row), json.dumps(DONE.curves), "{}", 1.0)
        connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
    with Store(path, read_only=True) as store:
        assert store.records() == []
    with Store(path) as store:
        assert store.get(RunSpec()) == DONE
        store.put_running(RunSpec(seed=1), 3, {})
        assert [row["step"] for row in store.running(10)] == [3]


def test_a_second_writer_is_refused_at_once_and_told_who_holds_the_store(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        began = time.monotonic()
        with pytest.raises(SqrtdkError) as caught:
            Store(path)
        assert time.monotonic() - began < 1.0
        year = time.strftime("%Y-")
        words = rf".*runs\.sqlite is in use by this process on {socket.gethostname()} since {year}[-0-9: ]+; wait"
        assert re.match(words, str(caught.value))
        store.put(RunSpec(), DONE)
        with Store(path, read_only=True) as reader:
            assert reader.get(RunSpec()) == DONE
    with Store(path) as store:
        assert store.get(RunSpec()) == DONE
    assert [item.name for item in tmp_path.iterdir()] == ["runs.sqlite"]


@pytest.mark.slow
def test_the_lock_of_another_process_names_it_and_is_free_when_it_was_killed(tmp_path):
    path = tmp_path / "runs.sqlite"
    code = (
        "import time; from sqrtdk.lab import *\n"
        f"store = Store({str(path)!r}); store.put_running(RunSpec(), 3, {{}})\n"
        "print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SqrtdkError, match=f"in use by process {other.pid} on "):
            Store(path)
        with Store(path, read_only=True) as reader:
            assert [row["step"] for row in reader.running(10)] == [3]
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert (tmp_path / "runs.sqlite.lock").exists()
    with Store(path) as store:
        assert store.running(10) == []  # what it had begun runs no more
    assert not (tmp_path / "runs.sqlite.lock").exists()


@pytest.mark.skipif(os.name == "nt", reason="other rights")
def test_a_store_is_read_where_nothing_can_be_written():
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: nobody may look into that
        path = Path(folder) / "runs.sqlite"
        with Store(path) as store:
            store.put_record(Record("variance", {"seed": 0}, {"variance": []}))
            # As after a kill: the last record is in the file of the write-ahead log alone.
            copies = {beside: Path(f"{path}{beside}").read_bytes() for beside in ("", "-wal")}
        for beside, content in copies.items():
            Path(f"{path}{beside}").write_bytes(content)
        path.chmod(0o444)
        os.chmod(folder, 0o555)
        with as_nobody(), Store(path, read_only=True) as store:
            assert [record.kind for record in store.records()] == ["variance"]
        os.chmod(folder, 0o755)


def test_a_store_that_another_process_is_making_is_seen_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "runs.sqlite"
    connect = sqlite3.connect
    with contextlib.closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    assert path.stat().st_size > 0

    class Slow(sqlite3.Connection):
        """The table is made between its first look and the next."""

        def execute(self, statement, *values):
            cursor = super().execute(statement, *values)
            if statement != "PRAGMA application_id":
                return cursor
            (row,) = cursor.fetchall()
            monkeypatch.setattr(sqlite3, "connect", connect)
            connect_store(path).close()
            return SimpleNamespace(fetchone=lambda: row)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(connect, factory=Slow))
    Store(path).close()
    assert sqlite3.connect is connect  # the other one did come in between
