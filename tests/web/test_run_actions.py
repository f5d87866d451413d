"""Runs compared, exported and deleted by requests: the command's results, and refusals that change nothing."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from rights import as_nobody
from sqrtdk.commands.cli import main
from sqrtdk.lab import RunRecord, RunSpec, Store
from sqrtdk.lab.store import identify_run, record_failure
from sqrtdk.records.record import tabulate
from sqrtdk.web import make_app
from web_client import Client

SPECS = [RunSpec(seed=0), RunSpec(seed=1, scale="none"), RunSpec(seed=2)]
KEYS = [spec.key for spec in SPECS]
UNFINISHED = "f" * 16
OWN = {"origin": "http://127.0.0.1:8000", "content_type": "application/json"}
TOKEN = "a-token-of-24-characters"


@pytest.fixture
def path(tmp_path):
    """A store with two finished runs and a failed one, of which one and an unfinished one have checkpoints."""
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        for number, spec in enumerate(SPECS[:2]):
            row = {**identify_run(spec), "status": "done", "final_loss": 0.5 + number, "final_accuracy": 0.25}
            store.put(spec, RunRecord(row, {"step": [0, 10], "loss": [2.0, 0.5 + number]}))
        store.put(SPECS[2], record_failure(SPECS[2], "out of paper, “twice”\nin two lines"))
        for key in (KEYS[2], UNFINISHED):
            store.checkpoints.put(key, b"unfinished")
    return path


@pytest.fixture
def client(path):
    return Client(make_app(store=path))


def run_command(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def delete(client, keys, **headers):
    body = keys if isinstance(keys, bytes) else json.dumps({"keys": keys}).encode()
    return client.ask("POST", "/api/delete", body=body, **{**OWN, **headers})


def contents(path):
    """Keys of all runs and checkpoints, and the files beside the store."""
    with Store(path, read_only=True) as store:
        keys = sorted(row["key"] for row in store.runs(100))
        return keys, store.checkpoints.list_keys(), sorted(file.name for file in path.parent.iterdir())


def test_a_comparison_is_that_of_the_command(client, path, capsys):
    printed = json.loads(run_command(capsys, "runs", "compare", path, *KEYS, "--json"))
    answer = client.get("/api/compare", {"keys": ",".join(KEYS)}).json
    assert answer["differences"] == printed["differences"]
    table = tabulate(printed["differences"])
    assert (answer["columns"], answer["rows"]) == (list(table.columns), [list(row) for row in table.rows])
    assert answer["reading"] == []
    assert ["final_loss", 0.5, 1.5, None] in [list(row.values()) for row in answer["differences"]]


@pytest.mark.parametrize(("what", "option"), [("runs", ()), ("curves", ("--curves",))])
def test_an_export_has_the_bytes_of_the_command(client, path, capsys, tmp_path, what, option):
    run_command(capsys, "runs", "export", path, tmp_path / "out.csv", *option)
    reply = client.get("/api/export", {"what": what})
    assert reply.body == (tmp_path / "out.csv").read_bytes()
    assert reply.header("content-type") == "text/csv; charset=utf-8"
    assert reply.header("content-disposition") == f'attachment; filename="{what}.csv"'
    assert len(reply.body) > 100


def test_runs_are_deleted_with_their_checkpoints(client, path):
    version = client.get("/api/runs").json["version"]
    assert client.get("/api/runs").json["checkpoints"] == {KEYS[2]: 10, UNFINISHED: 10}
    assert delete(client, [KEYS[0], KEYS[2], KEYS[2]]).json == {"deleted": 2, "checkpoints": 1}
    assert contents(path)[:2] == ([KEYS[1]], [UNFINISHED])
    listed = client.get("/api/runs", {"version": version}).json
    assert [run["key"] for run in listed["runs"]] == [KEYS[1]]
    assert delete(client, [UNFINISHED]).json == {"deleted": 1, "checkpoints": 1}
    assert client.get("/api/runs", {"version": listed["version"]}).json["checkpoints"] == {}
    assert contents(path)[1] == []


@pytest.mark.parametrize(
    ("keys", "status", "told"),
    [
        ([], 400, "keys must name 1 to 1000 runs, got 0"),
        (["0" * 16] * 5000, 400, "keys must name 1 to 1000 runs, got 5000"),
        (["0" * 16] * 50_000, 413, "the body must have at most 131072 bytes"),
        ([KEYS[0], "0" * 16], 400, "got '0000000000000000', unknown"),
        ([KEYS[0], KEYS[1][:8]], 400, "keys must be of 16 digits and letters a to f, got"),
        ([KEYS[0], ""], 400, "keys must be of 16 digits"),
        ([KEYS[0], "../../../etc/pw"], 400, "keys must be of 16 digits"),
        (["' OR 1=1; DROP TABLE runs; --"], 400, "keys must be of 16 digits"),
        ([KEYS[0] + "\n"], 400, "keys must be of 16 digits"),
        (["ａ" * 16], 400, "keys must be of 16 digits"),
        ([KEYS[0], 7], 400, "the body must be"),
        ([[KEYS[0]]], 400, "the body must be"),
        (KEYS[0], 400, "the body must be"),
        ({KEYS[0]: True}, 400, "the body must be"),
        (b"", 400, "the body must be"),
        (b"{", 400, "the body must be"),
        (b"\xff\xfe", 400, "the body must be"),
        (b"[" * 100_000, 400, "the body must be"),
        (b"9" * 100_000, 400, "the body must be"),
        (json.dumps(KEYS).encode(), 400, "the body must be"),
        (json.dumps({"keys": KEYS, "all": True}).encode(), 400, "the body must be"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_hostile_keys_delete_nothing(client, path, keys, status, told):
    before = contents(path)
    reply = delete(client, keys)
    assert (reply.status, list(reply.json)) == (status, ["error"])
    assert told in reply.json["error"]
    assert contents(path) == before


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:8001"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}, 403),
        ({"host": "evil.example"}, 403),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": "multipart/form-data; boundary=x"}, 415),
        ({"content_type": "application/json, text/plain"}, 415),
        ({"content_type": ""}, 415),
    ],
)
def test_requests_of_others_delete_nothing(client, path, headers, status):
    before = contents(path)
    assert delete(client, KEYS, **headers).status == status
    assert contents(path) == before


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_runs_are_deleted_by_post_alone(client, path, method):
    body = json.dumps({"keys": KEYS}).encode()
    assert client.ask(method, "/api/delete", body=body, **OWN).status == 405
    assert len(contents(path)[0]) == 3


def test_a_query_deletes_nothing(client, path):
    assert client.ask("POST", "/api/delete", {"keys": KEYS[0]}, b'{"keys": []}', **OWN).status == 400
    assert len(contents(path)[0]) == 3


def test_without_its_token_a_server_deletes_nothing(path):
    client = Client(make_app(store=path, token=TOKEN))
    assert delete(client, KEYS[:1]).status == 401
    assert client.ask("POST", "/api/delete", {"token": TOKEN}, b"{}", **OWN).status == 401
    assert len(contents(path)[0]) == 3
    assert delete(client, KEYS[:1], authorization=f"Bearer {TOKEN}").json["deleted"] == 1


def test_while_a_driver_holds_the_store_its_name_is_the_answer(client, path):
    with Store(path):
        reply = delete(client, KEYS[:1])
    assert reply.status == 400
    assert re.search(r"runs\.sqlite is in use by this process on .* since .*; wait for it", reply.json["error"])
    assert str(path.parent) not in reply.json["error"]
    assert len(contents(path)[0]) == 3


def test_a_run_in_training_is_named_and_stays(client, path):
    with Store(path) as store:
        store.put_running(SPECS[0], 70, {})
        reply = delete(client, [KEYS[1], KEYS[0]])
        assert reply.json["error"] == f"keys {KEYS[0]} is in training (step 70); delete it when it has ended"
    assert len(contents(path)[0]) == 3


def test_a_store_that_cannot_be_written_stays(path):
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: nobody may look into that
        copy = Path(folder) / "runs.sqlite"
        shutil.copyfile(path, copy)
        client = Client(make_app(store=copy))
        copy.chmod(0o444)
        os.chmod(folder, 0o555)
        with as_nobody():
            reply = delete(client, KEYS[:1])
            assert len(client.get("/api/runs").json["runs"]) == 3
            assert client.get("/api/export").status == 200
        os.chmod(folder, 0o755)
        assert reply.status == 400
        assert "store must be a file that can be written, got runs.sqlite" in reply.json["error"]
        assert len(contents(copy)[0]) == 3


@pytest.mark.parametrize("name", ["later.sqlite", None])
def test_without_a_store_nothing_is_made(tmp_path, name):
    client = Client(make_app(store=name and tmp_path / name))
    for reply in (delete(client, KEYS), client.get("/api/export"), client.get("/api/compare", {"keys": "a,b"})):
        assert (reply.status, reply.json["error"]) == (400, "store must be there to read runs from, got none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("route", "query", "told"),
    [
        ("compare", {"keys": KEYS[0]}, "keys must name 2 to 64 runs, got 1"),
        ("compare", {"keys": ",".join(KEYS[:2] * 1000)}, "keys must name 2 to 64 runs, got 2000"),
        ("compare", {"keys": f"{KEYS[0]},{UNFINISHED}"}, "which is unfinished or damaged"),
        ("compare", {"keys": f"{KEYS[0]},' OR 1=1"}, "must be the beginning of one run's key"),
        ("export", {"what": "../../etc/passwd"}, "known: curves, runs"),
        ("export", {"path": "/etc/passwd"}, "unknown parameter 'path'"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused_in_words(client, route, query, told):
    reply = client.get(f"/api/{route}", query)
    assert reply.status == 400
    assert told in reply.json["error"]


def test_checkpoints_outside_the_folder_are_out_of_reach(path):
    outside = path.parent / "other.safetensors"
    outside.write_bytes(b"of somebody else")
    with Store(path) as store:
        store.checkpoints.drop("../other")
    assert outside.exists()
