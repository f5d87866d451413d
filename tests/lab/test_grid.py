"""Grids: all combinations are trained, a TOML file says which, and a plan tells how many runs and how long."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sqrtdk.commands.cli import main
from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.lab import GridSpec, Lab, Processes, RunSpec, plan_grid, read_grid, train_grid
from sqrtdk.lab.train import train
from sqrtdk.report import figure_for
from sqrtdk.report.panels import Area, Heatmap

SMALL = GridSpec(d_ks=(4, 8), lrs=(1e-3, 1e-2), seeds=2, steps=3, d_model=16, layers=1, lengths=(12,))

TOML = """
tasks = ["recall", "text"]
lengths = [12]
scales = ["none", "sqrt"]
d_ks = [4, 8]
heads = [1, 2]
lrs = [1e-3, 1e-2]
inits = ["unit", "torch"]
seeds = [5, 7]
steps = 3
"""


def test_a_file_makes_the_product(tmp_path):
    file = tmp_path / "sweep.toml"
    file.write_text(TOML)
    runs = read_grid(file).runs()
    assert len(runs) == len(set(runs_key(runs))) == 2**7
    assert {run.make_task().length for run in runs} == {12}
    assert {run.seed for run in runs} == {5, 7}
    assert len(read_grid(file, d_ks=(16,), seeds=1).runs()) == 2**5


def runs_key(runs):
    return [run.key for run in runs]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("scale = ['none']", r"unknown key in sweep.toml 'scale'; known: batch, .*did you mean 'scales'\?"),
        ("scales = ['non']", "unknown scaling policy 'non'"),
        ("steps = 0", "steps must be at least 1, got 0"),
        ("lengths = [13]", "lengths of recall must be multiples of 3, got 13"),
        ("heads = 2", "heads must be a sequence"),
        ("tasks = []", "tasks must"),
        ("scales = [", "must be a TOML file that can be read"),
        ("tasks = ['recal']", "unknown task 'recal'"),
    ],
)
def test_a_bad_file_is_refused_in_words(tmp_path, content, message, capsys):
    file = tmp_path / "sweep.toml"
    file.write_text(content)
    with pytest.raises(SqrtdkError, match=message):
        read_grid(file)
    with pytest.raises(SystemExit) as ended:
        main(["grid", str(file), "--store", str(tmp_path / "runs.sqlite")])
    assert ended.value.code == 2
    assert not (tmp_path / "runs.sqlite").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidValueError, match=r"nowhere\.toml"):
        read_grid(tmp_path / "nowhere.toml")


@pytest.mark.slow
def test_a_grid_is_trained_planned_and_drawn():
    with Lab(executor=Processes(1)) as lab:
        plan = plan_grid(SMALL, lab, workers=2)
        assert [(row["runs"], row["stored"]) for row in plan.tables["plan"]] == [(8, 0), (8, 0)]
        assert plan.reading[0].startswith("16 runs, 0 of them stored. The other 16 take about ")
        record = train_grid(SMALL, lab)
        again = plan_grid(SMALL, lab, workers=2)
        more = plan_grid(replace(SMALL, seeds=3), lab, workers=2)
    assert again.scalars["seconds"] == 0.0
    assert "16 runs, 16 of them stored" in again.reading[0]
    assert [row["timed"] for row in more.tables["plan"]] == ["stored runs"] * 2
    assert more.scalars["seconds"] > 0
    assert len(record.tables["summary"]) == 8
    assert len(record.tables["runs"]) == len(record.curves["runs"]) == 16
    assert record.headline == "0 of 16 runs solve the task."
    figure = figure_for(record)
    maps = [series for panel in figure.panels for series in panel.series if isinstance(series, Heatmap)]
    assert [one.z for one in maps] == [((0.0, 0.0), (0.0, 0.0))] * 2
    assert sum(isinstance(series, Area) for series in figure.panels[0].series) == 2


def test_a_run_that_diverges_ends_early_with_its_step():
    wild = RunSpec(lr=3.0, steps=200, d_model=16, layers=1, stop_above=1.5, record_every=1)
    record = train(wild)
    assert record.row["status"] == "diverged"
    assert record.row["diverged_at"] == record.curves["step"][-1] < 199
    assert record.curves["loss"][-1] > 1.5 * wild.make_task().chance_loss
    assert "diverged_at" not in train(replace(wild, lr=1e-3, steps=3)).row


@pytest.mark.slow
def test_the_command_plans_and_trains(tmp_path, capsys):
    options = ["--scale", "sqrt", "--d-k", "4", "--lr", "1e-3", "--n", "12", "--seeds", "2", "--steps", "2", "--json"]
    shared = [*options, "--store", str(tmp_path / "runs.sqlite"), "--workers", "1"]
    with pytest.raises(SystemExit):
        main(["grid", *shared, "--dry-run"])
    assert json.loads(capsys.readouterr().out)["plan"][0]["runs"] == 2
    with pytest.raises(SystemExit):
        main(["grid", *shared, "--plot", str(tmp_path / "grid.svg")])
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
    assert (tmp_path / "grid.svg").stat().st_size > 1000


@pytest.mark.tree
def test_the_file_in_the_docs_is_a_grid(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    file = tmp_path / "sweep.toml"
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    assert len(read_grid(file).runs()) == 2 * 2 * 3 * 4
