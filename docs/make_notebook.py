"""Builds both notebooks from docs/exercise_list.py, runs the one with answers without Jupyter, stores its outputs."""

import ast
import base64
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import sqrtdk.report
from sqrtdk.report.matplotlib_renderer import draw
from sqrtdk.report.notebook import draw_together, plan_figure

DOCS = Path(__file__).parent
NOTEBOOK, STUDENT = DOCS / "exercises.ipynb", DOCS / "exercises-student.ipynb"
LIST = runpy.run_path(str(DOCS / "exercise_list.py"))


def read_notebook(path=NOTEBOOK):
    """Return a notebook as stored."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_notebook(notebook, path):
    """Store a notebook."""
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def build_notebook():
    """Return the notebook with answers, its cells without outputs."""
    cells = [_text(LIST["INTRODUCTION"]), _code(LIST["IMPORTS"])]
    for one in LIST["EXERCISES"]:
        *code, last = one.code
        cells += [_text(one.question), _ask(one), _fill(one, one.solution)]
        cells += [_text(one.note)] if one.note else []
        cells += [*map(_code, code), _code(last, ["trains"] if one.trains else [])]
        cells.append(_text(f"<details><summary>Answer</summary>\n\n{one.answer}\n</details>"))
    return _number([*cells, _text(LIST["LAST"])])


def build_student_notebook(bodies=None):
    """Return the notebook without solutions; `bodies` by exercise fill its functions."""
    cells = [_text(LIST["STUDENT_INTRODUCTION"]), _code(LIST["STUDENT_IMPORTS"])]
    for one in LIST["EXERCISES"]:
        hint = f"<details><summary>Hint</summary>\n\n{one.hint}\n</details>"
        cells += [_text(one.question), _ask(one), _fill(one, (bodies or {}).get(one.name, one.gap)), _text(hint)]
    return _number([*cells, _text(LIST["LAST"])])


def _ask(one):
    return _code(f'guess = ...  # your guess: {one.guess}\ncompare("{one.name}", guess)')


def _fill(one, body):
    return _code(f'{one.head}{body}\n\n\ncheck("{one.name}", {one.function})')


def _text(source):
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(source)}


def _code(source, tags=()):
    metadata = {"tags": list(tags)} if tags else {}
    return {"cell_type": "code", "execution_count": None, "metadata": metadata, "outputs": [], "source": _lines(source)}


def _number(cells):
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [{"cell_type": cell["cell_type"], "id": f"cell-{at}", **cell} for at, cell in enumerate(cells)],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def code_of(notebook):
    """Return the code cells of a notebook, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def trains(cell):
    """Return whether a cell trains models, which takes about a minute."""
    return "trains" in cell["metadata"].get("tags", [])


def run_cells(cells, pictures=True):
    """Run cells in one namespace and return the outputs of each, in the notebook format."""
    namespace, plans = {"__name__": "__main__"}, {}

    def figure(data):
        # Plotly needs a browser, so the stored figure is the same plan drawn by matplotlib.
        plan = plan_figure(data)
        drawn = draw_together(plan)
        plans[id(drawn)] = (plan, drawn)
        return drawn

    real, sqrtdk.report.figure = sqrtdk.report.figure, figure
    try:
        return [_run_cell("".join(cell["source"]), namespace, plans, pictures) for cell in cells]
    finally:
        sqrtdk.report.figure = real


def _run_cell(source, namespace, plans, pictures):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    outputs = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        data = _show(value, plans, pictures)
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs


def _show(value, plans, pictures):
    if id(value) in plans:
        plan, _ = plans[id(value)]
        picture = {"image/png": base64.b64encode(_draw(plan)).decode()} if pictures else {}
        return picture | {"text/plain": _lines(plan.title)}
    shown = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        shown["text/html"] = _lines(value._repr_html_())
    return shown


def _draw(plan):
    drawn = io.BytesIO()
    draw(plan).savefig(drawn, format="png", dpi=80, metadata={"Software": None})
    return drawn.getvalue()


def _lines(text):
    return text.splitlines(keepends=True)


def read_outputs(outputs):
    """Return the printed text of a cell, without figures, whose titles may change independently of the numbers."""
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def main():
    """Store both notebooks, the one with answers with the outputs of its cells."""
    write_notebook(build_student_notebook(), STUDENT)
    notebook = build_notebook()
    cells = code_of(notebook)
    for number, (cell, outputs) in enumerate(zip(cells, run_cells(cells), strict=True), 1):
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
        cell["outputs"], cell["execution_count"] = outputs, number
    write_notebook(notebook, NOTEBOOK)
    print(f"outputs of {len(cells)} cells written to {NOTEBOOK}", file=sys.stderr)


if __name__ == "__main__":
    main()
