"""Both notebooks of exercises: cells run and show what is stored, answers say what cells show, checks reply."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def load(name):
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return load("make_notebook")


@pytest.fixture(scope="module")
def notebook(tool):
    return tool.read_notebook()


def assert_same_numbers(shown, stored):
    """The same words, and numbers within 2% (other processors round otherwise)."""
    number = r"-?\d+\.?\d*(?:e-?\d+)?"
    assert re.sub(number, "#", shown).split() == re.sub(number, "#", stored).split()
    numbers = [[float(x) for x in re.findall(number, text)] for text in (shown, stored)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=1e-9)


def test_every_exercise_has_a_question_cells_and_an_answer_to_unfold(notebook):
    cells = notebook["cells"]
    titles = [re.match(r"## (\d)\. ", "".join(cell["source"])) for cell in cells]
    starts = [at for at, title in enumerate(titles) if title]
    assert [titles[at][1] for at in starts] == ["1", "2", "3", "4", "5"]
    assert "".join(cells[-1]["source"]).startswith("## Go on")
    for start, end in zip(starts, [*starts[1:], len(cells) - 1], strict=True):
        part = cells[start:end]
        assert "?" in "".join(part[0]["source"])
        assert any("image/png" in output.get("data", {}) for cell in part for output in cell.get("outputs", ()))
        answer = "".join(part[-1]["source"])
        assert answer.startswith("<details><summary>Answer</summary>\n\n")
        assert "</details>" in answer


def test_numbers_of_answers_are_printed_by_the_cells_before(tool, notebook):
    shown, told = "", 0
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            shown += tool.read_outputs(cell["outputs"])
        elif text.startswith("<details>"):
            numbers = re.findall(r"\*\*([\d.e%-]+)\*\*", text)
            assert [number for number in numbers if number not in shown] == []
            told += len(numbers)
            shown = ""
    assert told >= 15


def strip_outputs(notebook):
    return [
        {name: value for name, value in cell.items() if name not in ("outputs", "execution_count")}
        for cell in notebook["cells"]
    ]


def test_both_notebooks_are_those_of_the_list(tool, notebook):
    assert strip_outputs(notebook) == strip_outputs(tool.build_notebook()), "run docs/make_notebook.py"
    assert tool.read_notebook(tool.STUDENT) == tool.build_student_notebook(), "run docs/make_notebook.py"
    assert [cell["outputs"][-1]["data"]["text/plain"] for cell in tool.code_of(notebook) if asks(cell, "check")] == [
        ["Right."]
    ] * 5


def test_students_get_no_solution(tool):
    text = tool.STUDENT.read_text(encoding="utf-8")
    for one in tool.LIST["EXERCISES"]:
        assert one.question in "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        for line in one.solution.splitlines():
            assert json.dumps(line.strip(), ensure_ascii=False)[1:-1] not in text
        assert not set(re.findall(r"\*\*[\d.e%-]+\*\*", one.answer)) & set(re.findall(r"\*\*[\d.e%-]+\*\*", text))


def asks(cell, name):
    """Whether a cell ends with a call of this function."""
    return "".join(cell["source"]).splitlines()[-1].startswith(f"{name}(")


def run_student(tool, bodies=None, guess="..."):
    """The replies of the notebook for students to guesses and to answers."""
    cells = tool.code_of(tool.build_student_notebook(bodies))
    for cell in cells:
        cell["source"] = ["".join(cell["source"]).replace("guess = ...", f"guess = {guess}")]
    outputs = tool.run_cells(cells, pictures=False)
    said = {name: [] for name in ("compare", "check")}
    for cell, shown in zip(cells, outputs, strict=True):
        for name, replies in said.items():
            if asks(cell, name):
                replies.append("".join(shown[-1]["data"]["text/plain"]))
    return said


def test_the_students_notebook_runs_unfilled(tool):
    said = run_student(tool)
    assert said["compare"] == ["No guess yet: set guess to a number."] * 5
    assert len(said["check"]) == 5
    assert all(reply.startswith("Not filled in yet") for reply in said["check"])


def test_the_students_notebook_accepts_the_solutions(tool):
    bodies = {one.name: one.solution for one in tool.LIST["EXERCISES"]}
    assert run_student(tool, bodies)["check"] == ["Right."] * 5


WRONG_BODIES = {
    "spread": ("    s = (q * k).sum(axis=1)\n    return s.var(), s.var() / q.shape[1]", "this is the variance"),
    "saturation": (
        "    return 1 - (sqrtdk.softmax(np.array([x, 0, 0, 0])) ** 2).sum()",
        "Divide it by its value at x = 0",
    ),
    "rescale": ("    return W_q * W_q.shape[1] ** -0.5, W_k * W_k.shape[1] ** -0.5", "the scale is applied twice"),
    "temperature": ("    p = np.exp(q @ k.T / tau)\n    return p / p.sum(axis=0)", "the wrong axis"),
    "gradient": ("    return undefined_name", "Your function raises NameError"),
}


@pytest.mark.slow
def test_the_students_notebook_names_mistakes_and_compares_guesses(tool):
    said = run_student(tool, {name: body for name, (body, _) in WRONG_BODIES.items()}, guess="1000")
    for reply, (_, expected) in zip(said["check"], WRONG_BODIES.values(), strict=True):
        assert expected in reply
    assert all(reply.startswith("Your guess, 1000, is ") for reply in said["compare"])


@pytest.mark.slow
def test_cells_show_what_is_stored(tool, notebook):
    cells = [cell for cell in tool.code_of(notebook) if not tool.trains(cell)]
    for cell, outputs in zip(cells, tool.run_cells(cells, pictures=False), strict=True):
        assert_same_numbers(tool.read_outputs(outputs), tool.read_outputs(cell["outputs"]))


@pytest.mark.long
def test_the_cell_that_trains_shows_what_is_stored(tool, notebook):
    cells = tool.code_of(notebook)
    at = next(at for at, cell in enumerate(cells) if tool.trains(cell))
    outputs = tool.run_cells([cells[0], cells[at]])[1]
    # How well runs end varies a little between processors; whether they solve the task does not.
    shown, stored = (
        re.findall(r"\w+ \(.*init\)|solved.*", tool.read_outputs(texts)) for texts in (outputs, cells[at]["outputs"])
    )
    assert shown == stored
    assert len(shown) == 6
    assert "image/png" in outputs[-1]["data"]


def test_numbers_that_differ_are_seen():
    assert_same_numbers("mean 1.00, dₖ 4", "mean 1.01, dₖ 4")
    for other in ("mean 1.10, dₖ 4", "mean 1.00, dₖ 8", "median 1.00, dₖ 4"):
        with pytest.raises(AssertionError):
            assert_same_numbers("mean 1.00, dₖ 4", other)
