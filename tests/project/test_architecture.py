"""The tree and the pages about it: rooms, the order of imports, recipes, oracles."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from sqrtdk.statistics import ROW_FIELDS

ROOT = Path(__file__).parents[2]
MAKER = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))
RECIPES = dict(MAKER["read_recipes"]())


def test_the_drawings_are_those_of_the_contracts():
    page = MAKER["PAGE"].read_text(encoding="utf-8")
    assert page.count("\n  ↓\n") == len(MAKER["read_layers"]()["sqrtdk"]) - 1
    assert page == MAKER["draw_page"](page), "run docs/make_architecture.py"


def test_the_contracts_leave_no_room_out():
    ordered = MAKER["read_layers"]()
    rooms = ("operation", "torch", "torch.watch", "torch.watch.recognise", "lab", "report", "web", "commands")
    assert [*ordered] == ["sqrtdk", *(f"sqrtdk.{room}" for room in rooms), "benchmarks"]


def test_two_imports_are_exceptions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    ignored = [one for contract in contracts for one in contract.get("ignore_imports", [])]
    assert ignored == [f"sqrtdk.web.** -> sqrtdk.lab.{module}" for module in ("store", "run_tables")]


def test_there_is_a_recipe_for_each_common_change_with_its_sources():
    text = MAKER["RECIPES"].read_text(encoding="utf-8")
    changes = ("a policy", "a field of a call", "a row statistic", "a rule of diagnosis", "an engine", "a command")
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == [f"Add {change}" for change in changes]
    assert len(RECIPES) == len(changes)
    assert text == MAKER["fill_recipes"](text), "run docs/make_architecture.py"


@pytest.mark.parametrize("example", RECIPES)
def test_the_files_of_a_recipe_contain_its_example(example):
    word = re.sub(r"^def (\w+)\($", r"\1", example)
    sources = [name for name in RECIPES[example] if not name.startswith(("docs/", "tests/"))]
    assert sources
    assert len(sources) < len(RECIPES[example])  # documents and tests belong to every change
    assert [name for name in RECIPES[example] if word not in (ROOT / name).read_text(encoding="utf-8")] == []


def test_a_field_of_a_call_touches_at_most_ten_sources():
    sources = {name for word in ("alibi", "ALiBi") for name in MAKER["list_sources"](word)}
    # Recognising other libraries' models is no part of the call.
    assert 0 < len({name for name in sources if "/torch/watch/" not in name}) <= 10


def test_a_row_statistic_touches_three_sources():
    by_name = [set(MAKER["list_sources"](name)) for name in ROW_FIELDS]
    listing = ["kernel/row_statistics.h", "src/sqrtdk/operation/engines/row_statistics.py", "src/sqrtdk/statistics.py"]
    assert sorted(set.intersection(*by_name)) == listing


def test_folders_of_tests_mirror_the_source():
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    own = {Path("project"), Path("benchmarks")}  # the tree itself, and the package beside the product
    assert [name for name in folders - own if not (ROOT / "src" / "sqrtdk" / name).is_dir()] == []


def test_every_oracle_has_a_sentence():
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([\w/.]+)` \| .{20,} \|$", text, re.MULTILINE)
    assert len(told) > 5
    assert [name for name in told if not (ROOT / name).exists()] == []
