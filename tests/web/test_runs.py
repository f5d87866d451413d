"""The Runs page: a store as it is, before it is there, and while somebody writes."""

import json
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.store import CURVES, RunRecord, Store
from sqrtdk.report.palette import NEUTRAL, policy_colour
from sqrtdk.web import make_app, runs
from sqrtdk.web.runs import MOST_CURVES, MOST_RUNS, list_runs, read_curves, read_maps
from web_client import Client


def record(loss, points=3):
    curves = {name: [loss + i for i in range(points)] for name in CURVES}
    return RunRecord({"status": "done", "scale": "sqrt", "final_loss": loss}, curves)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        for seed in range(3):
            store.put(RunSpec(seed=seed), record(0.1 * seed))
    return path


def test_runs_and_curves_are_those_of_the_store(path):
    listed = list_runs(path)
    assert (listed["state"], listed["total"]) == ("ready", 3)
    assert [run["row"]["final_loss"] for run in listed["runs"]] == [0.2, 0.1, 0.0]
    keys = [run["key"] for run in listed["runs"]]
    curves = read_curves(path, keys)
    with Store(path) as store:
        for seed, key in zip((2, 1, 0), keys, strict=True):
            assert curves[key] == store.get(RunSpec(seed=seed)).curves


@pytest.mark.parametrize(
    ("scale", "colour", "label"),
    [
        ("none", policy_colour("none"), "no scaling"),
        ("temperature:0.5", policy_colour("temperature:0.5"), "temperature:0.5"),
        ("temperature:<b>", NEUTRAL, "temperature:<b>"),
        ("__proto__", NEUTRAL, "__proto__"),
    ],
)
def test_runs_have_the_colours_of_the_report(tmp_path, scale, colour, label):
    with Store(tmp_path / "runs.sqlite") as store:
        store.put(RunSpec(), RunRecord({"status": "done", "scale": scale}))
    (run,) = list_runs(tmp_path / "runs.sqlite")["runs"]
    assert (run["colour"], run["label"]) == (colour, label)


def test_the_list_is_left_out_while_nothing_changes(path):
    version = list_runs(path)["version"]
    assert list_runs(path, version) == {"state": "ready", "version": version, "unchanged": True}
    with Store(path) as store:
        store.put(RunSpec(seed=9), record(1.0))
    assert len(list_runs(path, version)["runs"]) == 4


def test_without_a_store_the_page_says_what_to_do(tmp_path):
    assert "sqrtdk serve --store" in list_runs(None)["message"]
    with pytest.raises(InvalidValueError, match="store must be there"):
        read_curves(None, ["a"])


def test_a_store_may_come_later(tmp_path):
    path = tmp_path / "later.sqlite"
    client = Client(make_app(store=path))
    assert client.get("/api/runs").json["state"] == "waiting"
    assert not path.exists()
    path.touch()
    assert client.get("/api/runs").json["state"] == "waiting"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 0")
    with Store(path) as store:
        assert client.get("/api/runs").json["runs"] == []
        store.put(RunSpec(), record(0.5))
        (run,) = client.get("/api/runs").json["runs"]
        assert client.get("/api/curves", {"keys": run["key"]}).json["curves"][run["key"]]["loss"] == [0.5, 1.5, 2.5]


def test_runs_in_training_are_shown_until_they_are_finished(path, monkeypatch):
    spec, curves = RunSpec(scale="none", seed=50), {"step": [0, 10], "loss": [3.0, float("nan")]}
    client = Client(make_app(store=path))
    with Store(path) as store:
        store.put_running(spec, 17, curves)
        answer = client.get("/api/runs").json
        (one,) = answer["running"]
        assert (one["key"], one["step"], one["row"]["seed"], one["label"]) == (spec.key, 17, 50, "no scaling")
        assert one["curves"] == {"step": [0, 10], "loss": [3.0, None]}
        assert client.get("/api/runs", {"version": answer["version"]}).json["unchanged"]
        store.put_running(spec, 18, curves)
        assert client.get("/api/runs", {"version": answer["version"]}).json["running"][0]["step"] == 18
        assert store.get(spec) is None
        assert len(store) == 3
        now = time.time()
        monkeypatch.setattr("sqrtdk.lab.store.time.time", lambda: now + 60)  # its trainer was killed
        assert client.get("/api/runs").json["running"] == []
        monkeypatch.undo()
        store.put(spec, record(0.3))
        assert client.get("/api/runs").json["running"] == []


def test_a_store_made_before_runs_were_followed_is_read(path):
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE running")
    assert list_runs(path)["running"] == []
    with Store(path) as store:
        store.put_running(RunSpec(), 1, {})
        assert len(list_runs(path)["running"]) == 1
    assert list_runs(path)["running"] == []  # whoever closes the store trains no more


def test_what_is_no_store_is_told(tmp_path):
    path = tmp_path / "other"
    path.write_text("hello, this is a text and no database" * 40)
    assert list_runs(path)["state"] == "unreadable"
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE runs (a)")
    assert "made by something else" in list_runs(path)["message"]


def test_damaged_rows_are_told(path):
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET row = '{', curves = '[]' WHERE finished = (SELECT MAX(finished) FROM runs)")
    listed = list_runs(path)
    assert (listed["state"], listed["total"], listed["damaged"], len(listed["runs"])) == ("ready", 3, 1, 2)


def test_reading_leaves_the_store_to_its_writer(path):
    before = path.read_bytes()
    listed = list_runs(path)
    read_curves(path, [run["key"] for run in listed["runs"]])
    assert path.read_bytes() == before
    with Store(path) as store:
        store.put(RunSpec(seed=7), record(0.7))
        assert len(store) == 4


@pytest.mark.slow
def test_a_writer_at_work_disturbs_nobody(path):
    failures, done = [], threading.Event()

    def write():
        try:
            with Store(path) as store:
                for seed in range(100, 160):
                    store.put(RunSpec(seed=seed), record(float(seed)))
        except Exception as error:
            failures.append(error)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    totals = []
    while not done.is_set():
        totals.append(list_runs(path))
    writer.join()
    assert failures == []
    assert {one["state"] for one in totals} == {"ready"}
    assert list_runs(path)["total"] == 63


def test_maps_are_those_of_the_store_also_of_a_run_in_training(path):
    first, second = ({"tokens": ["A"], "steps": list(range(count))} for count in (2, 1))
    keys = [RunSpec(seed=seed).key for seed in (7, 8, 0)]
    with Store(path) as store:
        store.put(RunSpec(seed=7), replace(record(0.5), maps=first))
        store.put_running(RunSpec(seed=8), 3, {}, second)
        client = Client(make_app(store=path))
        assert client.get("/api/maps", {"keys": ",".join(keys)}).json["maps"] == {keys[0]: first, keys[1]: second}
        store.put_running(RunSpec(seed=8), 4, {}, first)
        assert client.get("/api/maps", {"keys": keys[1]}).json["maps"] == {keys[1]: first}
    assert read_maps(path, keys[2:]) == {}
    with pytest.raises(InvalidValueError, match="must name 1 to 64 runs, got 0"):
        read_maps(path, [])
    with pytest.raises(InvalidValueError, match="must be there to read runs from"):
        read_maps(None, keys)


def test_questions_are_bounded(path):
    assert MOST_RUNS == 1000
    for keys in ([], ["x"] * (MOST_CURVES + 1)):
        with pytest.raises(InvalidValueError, match="keys must name 1 to 64 runs"):
            read_curves(path, keys)
    assert read_curves(path, ["' OR 1=1 --"]) == {}
    client = Client(make_app(store=path))
    assert client.get("/api/runs", {"path": "/etc/passwd"}).status == 400
    assert client.get("/api/curves").status == 400


def test_only_the_given_file_is_read(path):
    client = Client(make_app(store=path))
    for target in ("/api/runs", "/api/curves", "/api/maps", "/api/audit"):
        for name in ("store", "file", "audit"):
            assert client.get(target, {name: str(Path("/etc/passwd"))}).status == 400


def write_observations(path, steps, alerts=()):
    """Append observations of a layer of two heads, as a monitor writes them."""
    with path.open("a", encoding="utf-8") as file:
        for step in steps:
            raised = [
                {"step": step, "state": "raised", "severity": "error", "rule": "logit-growth", "layer": "h.0"}
                | {"heads": [1], "cause": "Scores rise."}
                for at in alerts
                if at == step
            ]
            numbers = {name: [0.5, 0.25] for name in ("entropy_ratio", "score_spread", "max_logit")}
            file.write(json.dumps({"step": step, "layers": {"h.0": numbers}, "alerts": raised}) + "\n")


def test_a_monitors_file_is_shown_as_heads_over_steps_with_alerts_marked(tmp_path):
    path = tmp_path / "heads.jsonl"
    assert list_runs(path)["state"] == "waiting"
    write_observations(path, [0, 10, 20], alerts=[20])
    view = list_runs(path)
    assert view["state"] == "monitor"
    assert view["message"] == "3 observations from step 0 to 20 of 1 layer with 2 heads: 1 alert from step 20 on."
    assert [chart["title"] for chart in view["charts"]] == ["Entropy ratio H/ln n", "Largest score above the mean"]
    heat, marks = view["charts"][0]["data"]
    assert heat["z"] == [[0.5] * 3, [0.25] * 3]
    assert (marks["x"], marks["y"]) == ([2.0], [1.0])
    assert view["alerts"][0]["cause"] == "Scores rise."
    assert list_runs(path, view["version"]) == {"state": "monitor", "version": view["version"], "unchanged": True}
    write_observations(path, [30])
    assert list_runs(path, view["version"])["charts"][0]["data"][0]["z"][0] == [0.5] * 4
    path.write_text("no observation\n")
    broken = list_runs(path)
    assert broken["state"] == "unreadable"
    assert str(tmp_path) not in broken["message"]


def test_a_long_monitored_run_is_thinned_and_keeps_its_alerts(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MOST_CELLS", 100)
    path = tmp_path / "heads.jsonl"
    write_observations(path, range(500), alerts=[7])
    heat, marks = list_runs(path)["charts"][0]["data"]
    assert [len(row) for row in heat["z"]] in ([50, 50], [51, 51])
    assert len(marks["x"]) == 1
