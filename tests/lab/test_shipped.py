"""The ablation that comes with sqrtdk: what its command trains, complete, and its tables follow from its runs."""

import json
from importlib import resources
from pathlib import Path

import pytest

from sqrtdk import lab
from sqrtdk.commands.cli import main
from sqrtdk.lab import AblationSpec, Lab, Processes, ablate
from sqrtdk.lab.ablation import read_ablation
from sqrtdk.lab.outcomes import MARGIN, choose_best, compare, setting_of, summarise
from sqrtdk.lab.shipped import COMMAND, SHIPPED, chosen_rates, compact, load_ablation
from sqrtdk.lab.tasks import Recall
from sqrtdk.records.record import Record
from sqrtdk.report import figure_for
from sqrtdk.wording.names import name_setting
from sqrtdk.wording.numbers import write_loss


def test_the_command_that_is_named_trains_what_is_shipped(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(lab, "ablate", lambda spec, place: asked.append(spec) or load_ablation())
    with pytest.raises(SystemExit, match="0"):
        main([*COMMAND.replace("runs.sqlite", str(tmp_path / "runs.sqlite")).split()[1:], "--json"])
    assert [spec.as_dict() for spec in asked] == [SHIPPED.as_dict()]


def test_the_record_is_complete_and_small():
    record = load_ablation()
    spec = json.loads(json.dumps(SHIPPED.as_dict()))
    assert {**record.spec, **spec} == record.spec
    assert record.spec["command"] == COMMAND
    choices = SHIPPED.choices()
    assert len(record.tables["runs"]) == len(record.curves["runs"]) == len(choices) * 16
    assert len(record.tables["selection_runs"]) == len(choices) * 4 * 6
    assert {run["seed"] for run in record.tables["runs"]} == set(range(16))
    assert {run["seed"] for run in record.tables["selection_runs"]} == {1000, 1001, 1002, 1003}
    assert {run["status"] for run in record.tables["runs"]} <= {"done", "diverged"}
    assert (resources.files("sqrtdk.records.data") / "ablation.json").stat().st_size < 400_000


def test_its_tables_and_sentences_follow_from_its_runs():
    tables = load_ablation().tables
    runs = [{**run, "final_accuracy": None} for run in tables["runs"]]
    for row, again in zip(tables["best"], summarise(runs), strict=True):
        assert setting_of(row) == setting_of(again)
        assert row["final_loss_median"] == pytest.approx(again["final_loss_median"], rel=1e-3)
        assert row["solved_fraction"] == again["solved_fraction"]
    comparisons = compare(runs, MARGIN * Recall().chance_loss, "best_lr")
    for row, again in zip(tables["comparisons"], comparisons, strict=True):
        assert (row["outcome"], row["n"]) == (again["outcome"], again["n"])
        assert row["difference"] == pytest.approx(again["difference"], rel=1e-2, abs=1e-5)
    assert load_ablation().reading[-3:] == read_ablation(Recall(), tables["best"], comparisons, SHIPPED)[-3:]


@pytest.mark.tree
def test_the_table_of_the_docs_is_the_record():
    text = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    cells = {}
    for row in load_ablation().tables["best"]:
        setting = name_setting(row["scale"], row["init"], qk_step=row["qk_step"])
        solved = f"{round(row['solved_fraction'] * row['n'])} of {row['n']}"
        cells.setdefault(setting, []).append(f"{solved}, {write_loss(row['final_loss_median'])} at {row['lr']:g}")
    assert len(cells) == 7
    for setting, columns in cells.items():
        assert f"| {setting} | {' | '.join(columns)} |" in text
    assert COMMAND in text


def test_rates_were_chosen_on_the_selection_and_not_at_an_end():
    tables = load_ablation().tables
    chosen = {setting_of(row).choice: row["lr"] for row in choose_best(tables["selection"])}
    assert {setting_of(row).choice: row["lr"] for row in tables["best"]} == chosen
    assert not any(row["at_edge"] for row in tables["best"])
    assert chosen_rates(64) == {choice: lr for choice, lr in chosen.items() if choice.d_k == 64}


def test_rescaled_init_and_step_have_the_losses_of_sqrt():
    """To the bit where dₖ^¼ is a power of two."""
    losses = {
        (*setting_of(run).choice, run["lr"], run["seed"]): run["final_loss"]
        for name in ("runs", "selection_runs")
        for run in load_ablation().tables[name]
    }
    pairs = [
        (loss, losses["sqrt", d_k, "unit", "unit", *rest])
        for (scale, d_k, init, qk_step, *rest), loss in losses.items()
        if (scale, init, qk_step) == ("none", "rescaled", "rescaled") and d_k in (16, 256)
    ]
    assert len(pairs) == 2 * (16 + 4 * 6)
    assert all(mine == theirs for mine, theirs in pairs)


@pytest.mark.slow
def test_a_compact_record_comes_back_and_is_drawn():
    spec = AblationSpec(d_model=16, batch=4, d_ks=(4, 16), seeds=2, steps=12, lrs=(1e-3, 3e-3), selection=2)
    with Lab(executor=Processes(1)) as place:
        record = ablate(spec, place)
    small = compact(record, "2026-11-17")
    assert Record.from_json(json.loads(json.dumps(small.as_json()))) == small
    assert small.curves["runs"][0]["step"] == [0, 11]
    assert len(json.dumps(small.as_json())) < 0.5 * len(json.dumps(record.as_json()))
    assert [panel.title for panel in figure_for(small).panels][:2] == [
        "Training loss, dₖ = 4",
        "Training loss, dₖ = 16",
    ]
