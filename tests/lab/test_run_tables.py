"""Tables of stored runs: what differs, and CSV of curves that not every run has."""

import csv
import io

import pytest

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab import RunRecord, RunSpec, Store
from sqrtdk.lab.run_tables import compare_runs, export_runs


@pytest.fixture
def store():
    with Store(None) as store:
        for seed in range(2):
            curves = {"step": [0, 10], "loss": [2.0, 1.0]} | ({"pressure": [0.5]} if seed else {})
            store.put(RunSpec(seed=seed), RunRecord({"status": "done", "seed": seed, "scale": "sqrt"}, curves))
        yield store


def test_a_value_that_a_curve_lacks_is_empty(store):
    content, lines = export_runs(store, curves=True)
    rows = {(row["key"], row["step"]): row for row in csv.DictReader(io.StringIO(content.decode(), newline=""))}
    assert lines == len(rows) == 4
    assert [rows[RunSpec(seed=1).key, step]["pressure"] for step in ("0", "10")] == ["0.5", ""]
    assert [rows[RunSpec(seed=0).key, step]["pressure"] for step in ("0", "10")] == ["", ""]


def test_a_run_is_equal_to_itself_and_one_run_is_too_few(store):
    key = RunSpec(seed=0).key
    assert compare_runs(store, [key, key]).reading == ["The runs are equal."]
    with pytest.raises(InvalidValueError, match="KEY must name at least two runs, got 1"):
        compare_runs(store, [key])
