"""Destinations of observations: lines of JSON, loggers, functions, several at once."""

import json

import pytest

from sqrtdk import SqrtdkError
from sqrtdk.records.destinations import open_destination


def test_lines_are_appended_and_an_unfinished_one_is_taken_away(tmp_path):
    path = tmp_path / "heads.jsonl"
    write = open_destination(path)
    assert not path.exists()
    write(0, {"layers": {}, "alerts": []})
    write(1, {"layers": {"a": {"max_logit": [1.0, None]}}, "alerts": []})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    with path.open("a") as file:  # what a kill leaves
        file.write('{"step": 2, "layers": {"a"')
    open_destination(str(path))(2, {"layers": {}, "alerts": []})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_file_of_somebody_else_loses_nothing(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not ours")
    open_destination(path)(0, {"layers": {}, "alerts": []})
    assert path.read_text().splitlines()[0] == "not ours"


def test_scalars_and_functions():
    class Writer:
        def __init__(self):
            self.scalars, self.texts = {}, []

        def add_scalar(self, tag, value, step):
            self.scalars[tag, step] = value

        def add_text(self, tag, text, step):
            self.texts.append((tag, text, step))

    writer = Writer()
    entry = {
        "layers": {"a": {"max_logit": [1.5, None], "pattern": ["fixed key", "broad"]}},
        "alerts": [{"rule": "logit-growth", "cause": "It grows."}],
    }
    open_destination(writer)(3, entry)
    names = ["sqrtdk/a/max_logit/least", "sqrtdk/a/max_logit/largest", "sqrtdk heads/a/max_logit/0"]
    assert writer.scalars == {(name, 3): 1.5 for name in names}
    assert writer.texts == [("sqrtdk/logit-growth", "It grows.", 3)]
    open_destination([writer], lambda alert: alert["rule"])(4, entry)
    assert writer.texts[1:] == [("sqrtdk/logit-growth", "logit-growth", 4)]
    assert open_destination(print) is print


def test_several_destinations_are_written_though_one_of_them_fails(tmp_path):
    class Run:
        def __init__(self):
            self.logged = []

        def log(self, metrics, step=None):
            self.logged.append((metrics, step))

    class Client:
        def __init__(self):
            self.logged = []

        def log_metrics(self, metrics, step=None):
            self.logged.append((metrics, step))

    def broken(step, entry):
        raise OSError("disk full")

    run, client, path = Run(), Client(), tmp_path / "heads.jsonl"
    entry = {"layers": {"a (call 0)": {"max_logit": [1.5, -2.0]}}, "alerts": []}
    with pytest.raises(OSError, match="disk full"):
        open_destination([broken, run, client, path])(3, entry)
    assert run.logged[0][0]["sqrtdk/a (call 0)/max_logit/least"] == -2.0
    assert client.logged[0][0]["sqrtdk/a _call 0_/max_logit/largest"] == 1.5
    assert run.logged[0][1] == client.logged[0][1] == 3
    assert json.loads(path.read_text())["step"] == 3


def test_what_is_no_destination_is_refused(tmp_path):
    with pytest.raises(SqrtdkError, match="to must be a path, an object with add_scalar"):
        open_destination(3)
    with pytest.raises(SqrtdkError, match="there is no directory"):
        open_destination(tmp_path / "nowhere" / "heads.jsonl")
    with pytest.raises(SqrtdkError, match="it is a directory"):
        open_destination(tmp_path)
