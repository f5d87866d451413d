"""Records become plain JSON and are named by their content."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from sqrtdk.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingExtraError,
    SqrtdkError,
    missing_extra,
    unknown_name,
)
from sqrtdk.records.record import SCHEMA_VERSION, Record, cpu_name, spec_hash, versions


def test_equal_specs_have_equal_hashes_and_others_do_not():
    spec = {"d_k": 64, "scale": ["none", "sqrt"], "seed": 0}
    assert spec_hash(spec) == spec_hash(dict(reversed(spec.items())))
    assert spec_hash(spec) == spec_hash(spec | {"d_k": np.int64(64), "scale": ("none", "sqrt")})
    assert spec_hash({"x": np.arange(3)}) == spec_hash({"x": [0, 1, 2]})
    assert spec_hash({"lr": np.float32(0.5)}) == spec_hash({"lr": 0.5})
    changed = [spec | {"d_k": 65}, spec | {"seed": 1}, spec | {"scale": ["sqrt", "none"]}, spec | {"more": None}]
    assert len({spec_hash(other) for other in [spec, *changed]}) == 5
    assert spec_hash({"x": math.inf}) != spec_hash({"x": math.nan}) != spec_hash({"x": None})
    assert len(spec_hash(spec)) == 16
    assert int(spec_hash(spec), 16) >= 0


def test_the_hash_is_the_same_tomorrow():
    """Stored runs are found by it, so it may not change between processes or versions."""
    assert spec_hash({"task": "recall", "d_k": 64}) == "c33dd38b282e6e4d"


def test_a_record_is_plain_json():
    record = Record(
        kind="variance",
        spec={"d_k": np.int64(4), "seed": 0, "path": Path("a")},
        tables={"variance": [{"d_k": 4, "value": np.float64(1.5), "bad": math.nan, "far": -np.inf, "ok": np.True_}]},
        curves={"x": np.arange(3.0), "y": {1: (np.float32(0.5), None)}},
        reading=["one", "two"],
    )
    text = json.dumps(record.as_json(), allow_nan=False)
    content = json.loads(text)
    assert content["variance"] == [{"d_k": 4, "value": 1.5, "bad": None, "far": None, "ok": True}]
    assert content["curves"] == {"x": [0.0, 1.0, 2.0], "y": {"1": [0.5, None]}}
    assert content["kind"] == "variance"
    assert content["schema_version"] == SCHEMA_VERSION == 1
    assert content["spec"] == {"d_k": 4, "seed": 0, "path": "a"}
    assert content["spec_hash"] == spec_hash(record.spec)
    assert content["reading"] == ["one", "two"]
    assert content["cpu"] == cpu_name() != ""
    assert content["versions"]["numpy"] == np.__version__
    assert set(versions()) >= {"python", "sqrtdk", "numpy"}


def make_record(**changes):
    parts = {
        "kind": "variance",
        "spec": {"d_k": (4, np.int64(64)), 1: math.nan},
        "tables": {"variance": ({"d_k": 4, 2: np.inf},), "more": []},
        "curves": {"x": np.array([[1.0, np.nan]]), "y": {1: (0.5, None)}},
        "reading": ("one", "two"),
        "scalars": {"ratio": np.float32(0.5), "far": -math.inf},
    }
    return Record(**{**parts, **changes})


def test_a_record_is_plain_from_the_start():
    record = make_record()
    assert record.spec == {"d_k": [4, 64], "1": None}
    assert record.tables == {"variance": [{"d_k": 4, "2": None}], "more": []}
    assert record.curves == {"x": [[1.0, None]], "y": {"1": [0.5, None]}}
    assert record.scalars == {"ratio": 0.5, "far": None}
    assert record.reading == ["one", "two"]


@pytest.mark.parametrize("changes", [{}, {"scalars": {}}, {"headline": "three"}, {"reading": ()}, {"curves": {}}])
def test_a_record_comes_back_from_its_json(changes):
    record = make_record(**changes)
    assert Record.from_json(json.loads(json.dumps(record.as_json(), allow_nan=False))) == record


def test_versions_and_cpu_are_those_of_the_computation():
    stored = make_record(versions={"sqrtdk": "0.0.1"}, cpu="an abacus").as_json()
    read = Record.from_json(stored)
    assert (read.versions, read.cpu) == ({"sqrtdk": "0.0.1"}, "an abacus")
    assert (read.as_json()["versions"], read.as_json()["cpu"]) == ({"sqrtdk": "0.0.1"}, "an abacus")


def test_what_as_json_gives_is_not_the_record_itself():
    record = make_record()
    record.as_json()["variance"][0]["d_k"] = 5
    assert record.tables["variance"][0]["d_k"] == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "content must be a record as JSON, got list"),
        ({}, "schema version 1, got None"),
        ({"schema_version": 2}, "schema version 1, got 2"),
        ({"schema_version": 1, "kind": "x", "spec": {}, "cpu": ""}, "without versions, reading, headline"),
    ],
)
def test_other_content_is_refused_as_a_record(content, message):
    with pytest.raises(SqrtdkError, match=message):
        Record.from_json(content)


def test_a_table_may_not_hide_what_the_record_says_of_itself():
    with pytest.raises(SqrtdkError, match=r"tables must not be named .*'spec'"):
        Record(kind="x", spec={}, tables={"spec": []})


def test_errors_are_also_the_built_in_ones():
    assert issubclass(InvalidValueError, ValueError)
    assert issubclass(InvalidTypeError, TypeError)
    assert issubclass(MissingExtraError, ImportError)
    assert all(issubclass(kind, SqrtdkError) for kind in (InvalidValueError, InvalidTypeError, MissingExtraError))
    assert 'pip install "sqrtdk[torch]"' in str(missing_extra("torch", "torch"))
    assert str(unknown_name("task", "x", ["b", "a"])) == "unknown task 'x'; known: a, b"


def test_a_notebook_shows_the_first_table_and_the_sentences():
    rows = [{"d_k": 4, "scale": "none", "spread": 1.5}, {"d_k": 64, "scale": "sqrt", "spread": math.nan}]
    record = Record("variance", {}, {"variance": rows, "more": [{"x": 1}]}, reading=["It is 1.", "It stays 1."])
    texts = re.findall(r">([^<]+)<", record._repr_html_())
    assert texts == [
        "Record of variance: variance (2 rows), more (1 row)",
        *("dₖ", "scaling", "spread", "4", "no scaling", "1.5", "64", "1/√dₖ", "–"),
        *("It is 1.", "It stays 1."),
    ]
    assert repr(record) == "Record of variance: variance (2 rows), more (1 row)\nIt is 1.\nIt stays 1."


@pytest.mark.slow
def test_what_a_notebook_shows_is_short_whatever_the_record_holds():
    rows = [{"seed": seed, "temperatures": list(range(1000))} for seed in range(1000)]
    record = Record("ablation", {}, {"runs": rows}, curves={"runs": list(range(10**5))})
    assert len(record._repr_html_()) < 10_000
    assert len(repr(record)) < 100
    assert record._repr_html_().count("<tr>") == 18
    ragged = Record("x", {}, {"t": [{"a": 1}, {"b": 2}]})
    assert ragged._repr_html_().count("<td") == 4
    assert Record("x", {}, {})._repr_html_() == "<div>Record of x: no tables</div>"
    assert Record("x", {}, {"t": []})._repr_html_() == "<div>Record of x: t (0 rows)</div>"


def test_markup_in_a_record_is_text():
    evil = "<img src=x onerror=alert(1)>"
    shown = Record(evil, {}, {evil: [{evil: evil}]}, reading=[evil])._repr_html_()
    assert "<img" not in shown
    assert shown.count("&lt;img src=x") == 5
