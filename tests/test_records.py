"""Records become plain JSON and are named by their content."""

import json
import math
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
from sqrtdk.records import SCHEMA_VERSION, Record, cpu_name, spec_hash, versions


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
    found = json.loads(text)
    assert found["variance"] == [{"d_k": 4, "value": 1.5, "bad": None, "far": None, "ok": True}]
    assert found["curves"] == {"x": [0.0, 1.0, 2.0], "y": {"1": [0.5, None]}}
    assert found["kind"] == "variance"
    assert found["schema_version"] == SCHEMA_VERSION == 1
    assert found["spec"] == {"d_k": 4, "seed": 0, "path": "a"}
    assert found["spec_hash"] == spec_hash(record.spec)
    assert found["reading"] == ["one", "two"]
    assert found["cpu"] == cpu_name() != ""
    assert found["versions"]["numpy"] == np.__version__
    assert set(versions()) >= {"python", "sqrtdk", "numpy"}


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
