"""The reproductions that ship, with the expectations of the code, on the page as in the record."""

import importlib.util
from importlib import resources
from pathlib import Path

import pytest

from sqrtdk.reproductions import REPRODUCTIONS
from sqrtdk.reproductions.reproduction import name_outcome
from sqrtdk.reproductions.shipped import COMMAND, load_reproductions

DOCS = Path(__file__).parents[2] / "docs"


def test_the_record_has_the_expectations_of_the_code():
    record = load_reproductions()
    assert record.spec["names"] == list(REPRODUCTIONS)
    assert record.spec["command"] == COMMAND
    for name in record.spec["names"]:
        one = REPRODUCTIONS[name]
        rows = [row for row in record.tables["reproductions"] if row["name"] == name]
        assert [row["expected"] for row in rows] == [str(expected) for expected in one.expectations]
        assert {row["scaled_down"] for row in rows} == {one.scaled_down}
        assert {row["trains"] for row in rows} == {one.trains}
        assert record.curves[name]["outcome"] == name_outcome(rows)
        assert record.curves[name]["title"] == one.title
        assert record.sentences[name].startswith(f"{one.title}: {name_outcome(rows)}. ")
    assert (resources.files("sqrtdk.records.data") / "reproductions.json").stat().st_size < 100_000


@pytest.mark.tree
def test_the_page_is_that_of_the_record():
    spec = importlib.util.spec_from_file_location("make_literature", DOCS / "make_literature.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    record = load_reproductions()
    assert (DOCS / "literature.md").read_text(encoding="utf-8") == script.write_page(record)
    for name in record.spec["names"]:
        assert (DOCS / "images" / f"literature-{name}.png").stat().st_size > 10_000
