"""Claims that training decides: by intervals, from hand-made runs and tiny trainings; too little decides nothing."""

from dataclasses import replace

import pytest

import sqrtdk
from sqrtdk.claims import Evidence, check_claims
from sqrtdk.lab import Lab, Processes
from sqrtdk.lab.outcomes import compare, summarise
from sqrtdk.lab.shipped import load_ablation
from sqrtdk.records.record import Record

SOLVED, FAILED = 0.01, 2.6
SETTINGS = {
    "none": ("none", "unit", "unit"),
    "sqrt": ("sqrt", "unit", "unit"),
    "inverse": ("inverse", "unit", "unit"),
    "start": ("none", "rescaled", "unit"),
    "both": ("none", "rescaled", "rescaled"),
}


def decide(name, evidence):
    (row,) = check_claims([name], evidence).tables["claims"]
    return row


def make_run(setting, seed, loss, d_k=64):
    scale, init, qk_step = setting
    return {
        "scale": scale,
        "d_k": d_k,
        "seed": seed,
        "init": init,
        "qk_step": qk_step,
        "lr": 1e-3,
        "status": "done",
        "final_loss": loss + 1e-4 * seed,
        "final_accuracy": 0.5,
        "solved": loss < 0.277,
        "steps_to_threshold": None,
    }


def learning_from(seeds, **solved):
    """Evidence whose ablation has so many solved runs per setting."""
    runs = [
        make_run(setting, seed, SOLVED if seed < solved.get(name, seeds) else FAILED)
        for name, setting in SETTINGS.items()
        for seed in range(seeds)
    ]
    evidence = Evidence(seeds=seeds)
    tables = {"best": summarise(runs), "comparisons": compare(runs, 0.028, "best_lr")}
    evidence.__dict__["learning"] = Record(kind="ablation", spec={}, tables=tables)
    return evidence


@pytest.mark.parametrize(
    ("seeds", "solved", "verdict", "words"),
    [
        (8, {"none": 0}, "depends", "the division sets the start and the step"),
        (3, {"none": 0}, "depends", "Without scaling 0 of 3 runs solve the task"),
        (8, {"none": 0, "start": 0}, "holds", "A rescaled init does not make up for it: 0 of 8 runs"),
        (8, {}, "wrong", "does as well here"),
        (8, {"none": 6}, "undecided", "8 seeds are too few to decide"),
        (8, {"none": 0, "start": 2}, "holds", "A rescaled init does not make up for it: 2 of 8 runs"),
        (8, {"none": 0, "start": 4}, "undecided", "8 seeds are too few to decide"),
        (2, {"none": 0}, "undecided", "2 seeds are too few to decide"),
        (1, {"none": 0}, "undecided", "1 seed is too few to decide"),
        (8, {"none": 0, "sqrt": 3}, "undecided", "In 600 steps not even the models with 1/√dₖ learn the task"),
    ],
)
def test_learning_is_decided_by_intervals(seeds, solved, verdict, words):
    row = decide("grad.learning", learning_from(seeds, **solved))
    assert row["verdict"] == verdict
    assert words in row["why"]
    assert {"none,unit", "sqrt,unit", "inverse,unit", "none,rescaled", "none,rescaled,rescaled"} <= set(row["numbers"])


@pytest.mark.parametrize("none", [0, 1])
@pytest.mark.parametrize("start", [7, 8])
@pytest.mark.parametrize("sqrt", [7, 8])
def test_one_seed_in_eight_does_not_turn_the_verdict(none, start, sqrt):
    assert decide("grad.learning", learning_from(8, none=none, start=start, sqrt=sqrt))["verdict"] == "depends"


def swap_from(seeds, **solved):
    """Evidence whose change of scale has so many solved runs per stage."""
    stages = {"trained": seeds, "swapped": seeds, "continued": seeds, "scratch": 0} | solved
    summary = [
        {"stage": name, "loss_median": FAILED - 2.5 * solved / seeds, "solved_fraction": solved / seeds, "n": seeds}
        for name, solved in stages.items()
    ]
    evidence = Evidence(seeds=seeds)
    evidence.__dict__["swap"] = Record(kind="swap", spec={}, tables={"summary": summary})
    return evidence


@pytest.mark.parametrize(
    ("seeds", "solved", "verdict"),
    [
        (8, {}, "holds"),
        (3, {}, "holds"),
        (8, {"swapped": 7}, "holds"),
        (8, {"scratch": 1}, "holds"),
        (16, {"scratch": 16}, "wrong"),
        (16, {"swapped": 0}, "depends"),
        (16, {"swapped": 0, "continued": 0}, "wrong"),
        (8, {"swapped": 3}, "undecided"),
        (8, {"scratch": 5}, "undecided"),
        (2, {}, "undecided"),
        (1, {}, "undecided"),
        (8, {"trained": 3}, "undecided"),
    ],
)
def test_a_trained_model_is_judged_by_intervals(seeds, solved, verdict):
    row = decide("soft.trained", swap_from(seeds, **solved))
    assert row["verdict"] == verdict
    if verdict == "undecided":
        assert "to decide" in row["why"]


# The record that ships


def with_runs(change=lambda run: {}, **spec):
    """Evidence whose record at three widths has other runs; its tables follow from them."""
    shipped = load_ablation()
    runs = [{**run, "final_accuracy": None, **change(run)} for run in shipped.tables["runs"]]
    tables = {**shipped.tables, "runs": runs, "best": summarise(runs), "comparisons": compare(runs, 0.028, "best_lr")}
    record = replace(shipped, spec={**shipped.spec, **spec}, tables=tables)
    return type("EvidenceOfOthers", (Evidence,), {"widths": record})()


def is_plain(run, scale):
    return (run["scale"], run["init"], run["qk_step"]) == (scale, "unit", "unit")


def test_the_range_of_widths_is_decided_by_the_record_that_ships():
    row = decide("grad.range", Evidence())
    assert row["verdict"] == "holds"
    assert "1/√dₖ 16 of 16, 16 of 16, 15 of 16" in row["computed"]
    assert "sqrtdk ablate --d-k 16,64,256 --control" in row["computed"]
    for solved, verdict in ((lambda run: run["seed"] < 8, "undecided"), (lambda run: run["seed"] < 2, "wrong")):
        evidence = with_runs(
            lambda run, solved=solved: {"solved": solved(run)} if is_plain(run, "sqrt") and run["d_k"] == 256 else {}
        )
        assert decide("grad.range", evidence)["verdict"] == verdict


def test_harm_by_one_over_d_k_is_decided_by_the_record_that_ships():
    row = decide("grad.inverse", Evidence())
    assert row["verdict"] == "depends"
    assert "less often than 1/√dₖ with lr 0.001" in row["why"]
    # Only rates at which both learn, and there is no harm left.
    row = decide("grad.inverse", with_runs(lrs=[3e-3]))
    assert (row["verdict"], "less often than 1/√dₖ nowhere" in row["why"]) == ("wrong", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d_ks", "loss", "verdict"),
    [
        ((16, 64, 256), lambda seed: 1.0 + 0.01 * seed, "holds"),
        ((16,), lambda seed: 1.0 + 0.01 * seed, "depends"),
        ((16, 64, 256), lambda seed: 0.01 + (0.1 + 0.01 * seed) * (-1) ** seed, "undecided"),
    ],
    ids=["worse", "worse at one width", "noise"],
)
def test_harm_follows_the_losses(d_ks, loss, verdict):
    evidence = with_runs(
        lambda run: {"final_loss": loss(run["seed"])} if is_plain(run, "inverse") and run["d_k"] in d_ks else {}
    )
    assert decide("grad.inverse", evidence)["verdict"] == verdict


# Learned temperatures


@pytest.mark.slow
def test_too_short_a_training_decides_nothing():
    evidence = Evidence(seeds=1, steps=2, lab=Lab(executor=Processes(1)))
    ids = ["grad.learning", "soft.trained", "scale.temperature", "scale.query"]
    for verdicts in check_claims(ids, evidence).tables["claims"]:
        assert verdicts["verdict"] == "undecided"
        assert verdicts["why"].startswith("In 2 steps not even the models with 1/√dₖ learn the task")


@pytest.fixture(scope="module")
def temperatures():
    """Three tiny trainings per scale, whose rows the tests below change."""
    return Evidence(seeds=3, steps=2, lab=Lab(executor=Processes(1))).temperatures


def trained(temperatures, **changes):
    """The claims on learned temperatures, decided by a table whose rows have been changed, in place of training."""
    evidence = Evidence(seeds=3, steps=2)
    summary = [
        {**row, "solved_fraction": 1.0, **changes.get(row["scale"], {})} for row in temperatures.tables["summary"]
    ]
    runs = [{**run, **changes.get(f"{run['scale']}_run", {})} for run in temperatures.tables["runs"]]
    evidence.__dict__["temperatures"] = replace(
        temperatures, tables={**temperatures.tables, "summary": summary, "runs": runs}
    )
    rows = check_claims(["scale.temperature", "scale.query"], evidence).tables["claims"]
    return {row["id"]: row for row in rows}


MOVED = {"learned_run": {"temperatures": [1.2, 0.9]}, "query_run": {"temperature_spread": 0.2}}
TWO = {"n": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "temperature", "query"),
    [
        (MOVED, "holds", "holds"),
        (MOVED | {"learned": {"solved_fraction": 0.0}}, "depends", "holds"),
        (MOVED | {"learned": {"solved_fraction": 2 / 3}}, "holds", "holds"),
        (MOVED | {"query": {"solved_fraction": 0.0}}, "holds", "depends"),
        (MOVED | {"learned_run": {"temperatures": [1.001, 0.999]}}, "depends", "holds"),
        (MOVED | {"query_run": {"temperature_spread": 0.001}}, "holds", "depends"),
        (MOVED | {"sqrt": {"solved_fraction": 0.0}}, "undecided", "undecided"),
        (MOVED | {"sqrt": TWO, "learned": TWO, "query": TWO}, "undecided", "undecided"),
    ],
    ids=["both", "learned worse", "one seed", "query worse", "no move", "no spread", "nothing learned", "two seeds"],
)
def test_learned_temperatures_are_judged_by_the_runs(temperatures, changes, temperature, query):
    rows = trained(temperatures, **changes)
    assert (rows["scale.temperature"]["verdict"], rows["scale.query"]["verdict"]) == (temperature, query)


@pytest.mark.slow
def test_a_temperature_that_softens_the_wrong_way_is_noticed(temperatures, monkeypatch):
    monkeypatch.setattr(sqrtdk.scales.Temperature, "factor", lambda self, context: self.relative / context.d_k**0.5)
    assert trained(temperatures, **MOVED)["scale.temperature"]["verdict"] == "wrong"


# Whole trainings


@pytest.mark.long
def test_learning_claims_are_decided_by_training():
    evidence = Evidence(seeds=3, steps=600)
    rows = {row["id"]: row for row in check_claims(["grad.learning", "soft.trained"], evidence).tables["claims"]}
    learning = rows["grad.learning"]["numbers"]
    assert learning["none,unit"]["solved_fraction"] < learning["sqrt,unit"]["solved_fraction"]
    assert rows["grad.learning"]["verdict"] == "depends"
    assert learning["none,rescaled"]["solved_fraction"] > learning["none,unit"]["solved_fraction"]
    assert rows["soft.trained"]["verdict"] == "holds"
    assert check_claims(["grad.learning"], evidence).tables["claims"][0] == rows["grad.learning"]


@pytest.mark.long
def test_temperature_claims_are_decided_by_training():
    evidence = Evidence(seeds=3, steps=600)
    rows = {row["id"]: row for row in check_claims(["scale.temperature", "scale.query"], evidence).tables["claims"]}
    assert {row["verdict"] for row in rows.values()} == {"holds"}
    assert rows["scale.query"]["numbers"]["temperature_spread_median"] > 0.05
    assert rows["scale.temperature"]["numbers"]["temperature_spread_median"] == 0.0
    for first, second in rows["scale.temperature"]["numbers"]["temperatures"]:
        assert first > 1.02
        assert second < 0.98
