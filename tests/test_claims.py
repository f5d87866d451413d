"""Claims are decided by computation: break what they rest on and the verdict changes."""

import json

import numpy as np
import pytest

import sqrtdk
from sqrtdk import exercises, theory
from sqrtdk.claims import Evidence, check_claims, list_claims
from sqrtdk.claims.claim import SOURCES, agree, covers, estimate_variance, row
from sqrtdk.errors import SqrtdkError
from sqrtdk.exercises.gaussian_rows import Estimate
from sqrtdk.families import is_usual, load_zoo
from sqrtdk.lab import Lab, Processes

# The ids of the texts, group by group; a claim that is missing here or there is a claim that nobody checks.
EXPECTED = {
    "op": {"formula", "stable", "always"},
    "var": {"product", "dot", "terms", "mean", "divide", "root", "inverse", "init"},
    "soft": {
        "exp", "50", "5", "dk4", "dk64", "peak", "five", "five8", "onehot", "uniform", "unstable", "small", "trained",
    },
    "grad": {"jacobian", "healthy", "vanish", "learning"},
    "scale": {"none", "sqrt", "inverse", "fixed", "temperature", "query", "models"},
}  # fmt: skip

# What the texts' own summary says of them; the checks below must arrive there by computing.
VERDICTS = {
    "soft.exp": "wrong",
    "soft.peak": "wrong",
    "soft.five8": "wrong",
    "soft.five": "holds",
    "soft.dk64": "holds",
    "soft.onehot": "depends",
    "grad.vanish": "depends",
    "scale.models": "wrong",
    "var.init": "depends",
    "var.dot": "holds",
}
QUICK = [claim.id for claim in list_claims() if not claim.trains]


@pytest.fixture(scope="module")
def verdicts():
    rows = check_claims(QUICK).tables["claims"]
    return {row["id"]: row for row in rows}


def test_every_claim_of_the_texts_is_checked_once():
    ids = [claim.id for claim in list_claims()]
    assert len(set(ids)) == len(ids)
    assert set(ids) == {f"{group}.{name}" for group, names in EXPECTED.items() for name in names}


def test_every_source_is_explained():
    named = {name for claim in list_claims() for name in claim.source.split(", ")}
    assert named == {*SOURCES, "all"}
    assert all(f"{name} {words}" in check_claims(["op.stable"]).reading[-1] for name, words in SOURCES.items())


@pytest.mark.slow
def test_each_row_is_complete(verdicts):
    for claim in verdicts.values():
        assert claim["verdict"] in ("holds", "wrong", "depends")
        assert all(claim[name].strip() for name in ("id", "source", "claimed", "computed", "why"))
        assert claim["why"].endswith(".")


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_verdicts(verdicts, name):
    assert verdicts[name]["verdict"] == VERDICTS[name], verdicts[name]


def test_monte_carlo_lines_state_interval_n_and_seed(verdicts):
    for name in ("var.product", "var.dot", "var.mean", "var.root", "var.inverse", "var.terms"):
        assert "95%, n=" in verdicts[name]["computed"]
        assert "seed 0" in verdicts[name]["computed"]


@pytest.mark.long
def test_verdicts_do_not_hang_on_the_seed():
    ids = ["var", "soft.onehot", "soft.uniform", "soft.unstable", "scale.sqrt"]
    zero = check_claims(ids).tables["claims"]
    for seed in (1, 2, 3):
        other = check_claims(ids, Evidence(seed=seed)).tables["claims"]
        assert [claim["verdict"] for claim in other] == [claim["verdict"] for claim in zero], seed
        assert [claim["computed"] for claim in other] != [claim["computed"] for claim in zero], seed


def test_the_numbers_of_the_worked_examples(verdicts):
    assert verdicts["soft.exp"]["numbers"]["ratio"]["50"] == pytest.approx(1000, rel=1e-6)
    assert verdicts["soft.peak"]["numbers"]["ratio"] == pytest.approx(np.exp(0.6))
    assert verdicts["soft.five8"]["numbers"]["claimed_sum"] == pytest.approx(0.85)
    np.testing.assert_allclose(
        verdicts["soft.five8"]["numbers"]["weights"], [0.3710, 0.0797, 0.3529, 0.0598, 0.1365], atol=5e-5
    )


def test_gradients_are_larger_but_uneven_without_scaling(verdicts):
    numbers = verdicts["grad.vanish"]["numbers"]
    wide = [numbers[f"64,1024,{name}"]["grad_q_mean"] for name in ("none", "sqrt", "inverse")]
    np.testing.assert_allclose(wide, [13.7, 0.40, 0.031], rtol=0.15)
    assert numbers["512,16,none"]["grad_q_p5"] < 1e-7 < 1 < numbers["512,16,sqrt"]["grad_q_p5"]


@pytest.mark.slow
def test_claims_and_exercises_speak_of_one_measurement(verdicts):
    explained = {(row["scale"], row["quantity"]): row for row in exercises.explain(d_k=64, n=1024).tables["explain"]}
    numbers = {name: verdicts[name]["numbers"] for name in ("soft.onehot", "soft.uniform", "soft.small", "grad.vanish")}
    assert numbers["soft.onehot"]["sum_p2"]["64,1024"] == explained["none", "sum_p2"]["measured"]
    assert numbers["soft.uniform"]["entropy_ratio"]["64"] == explained["inverse", "entropy_ratio"]["measured"]
    lost = explained["sqrt", "entropy_ratio"]["measured"] - explained["none", "entropy_ratio"]["measured"]
    assert numbers["soft.small"]["entropy_ratio_lost"]["64,1024"] == lost
    gradient = numbers["grad.vanish"]["64,1024,none"]["grad_q_mean"]
    assert gradient == pytest.approx(explained["none", "grad_q"]["measured"], rel=1e-12)
    sampled = verdicts["var.dot"]["numbers"]["sampled"]
    for size in exercises.variance().tables["variance"]:
        if size["scale"] == "none":
            assert sampled[str(size["d_k"])] == pytest.approx(size["measured"] ** 2, rel=1e-4)


def test_verdicts_are_counted_in_words():
    def first(*ids):
        return check_claims(list(ids)).reading[0]

    assert first("soft.5", "soft.peak") == "Of 2 claims 1 holds and 1 is wrong."
    assert first("soft.5") == "Of 1 claim 1 holds."
    assert first("soft.peak", "soft.five8", "soft.5", "soft.50") == "Of 4 claims 2 hold and 2 are wrong."
    assert first("soft.uniform", "soft.5").startswith("Of 2 claims 1 holds and 1 depends on conditions")


def test_the_texts_are_named_by_their_titles():
    last = check_claims(["soft.5"]).reading[-1]
    for title in (
        "S0 “Math behind √dₖ Scaling Factor in Attention”",
        "S1 “Stabilizing Attention Scores in Transformers”",
        "S2 “Why scale the Scaled Dot-Product Attention?”",
        "S3 “Section 5.3: Scaled Attention: Why √d Matters”",
    ):
        assert title in last


def test_a_wrong_default_scale_is_noticed(monkeypatch):
    monkeypatch.setattr(sqrtdk.scales.Sqrt, "factor", lambda self, context: 1.5 / context.d_k**0.5)
    verdicts = {row["id"]: row["verdict"] for row in check_claims(["op", "scale.sqrt", "soft.dk4"]).tables["claims"]}
    assert verdicts["op.formula"] == verdicts["scale.sqrt"] == verdicts["soft.dk4"] == "wrong"


def test_a_wrong_law_is_noticed(monkeypatch):
    monkeypatch.setattr(theory, "dot_product_variance", lambda d_k, **kwargs: 1.2 * d_k)
    monkeypatch.setattr(theory, "softmax_jacobian", lambda p: np.diag(p))
    rows = check_claims(["var.dot", "var.root", "grad.jacobian", "grad.healthy"]).tables["claims"]
    assert {row["id"]: row["verdict"] for row in rows} == dict.fromkeys(
        ["var.dot", "var.root", "grad.jacobian", "grad.healthy"], "wrong"
    )


def test_groups_and_unknown_names():
    assert {row["id"] for row in check_claims(["op"]).tables["claims"]} == {"op.formula", "op.stable", "op.always"}
    with pytest.raises(SqrtdkError, match=r"unknown claim 'opp'; known: grad, .*op\.formula"):
        check_claims(["opp"])


def test_record_is_json_of_the_agreed_shape(verdicts):
    content = check_claims(["soft.5"]).as_json()
    assert json.loads(json.dumps(content))["claims"][0].keys() >= {
        "id", "source", "claimed", "computed", "verdict", "why",
    }  # fmt: skip


def test_agree_rounds_as_a_text_does():
    assert agree([0.971], [0.9714999], decimals=3)
    assert not agree([0.971], [0.9716], decimals=3)
    assert row([0.1, 0.25], 1) == "[0.1, 0.2]"


def test_estimate_of_a_variance_covers_it():
    draws = np.random.default_rng(5).standard_normal(50_000) * 3
    assert covers(estimate_variance(draws), 9.0)
    assert not covers(estimate_variance(draws), 9.6)
    assert covers(Estimate(1.0, 0.9, 1.1), 1.19)
    assert not covers(Estimate(1.0, 0.9, 1.1), 1.21)


def test_the_scale_of_models_is_decided_by_the_record_that_ships():
    (row,) = check_claims(["scale.models"]).tables["claims"]
    rows = [one for one in load_zoo().tables["families"] if one["measured"] is not None]
    usual = sum(map(is_usual, rows))
    assert 0 < usual < len(rows)
    assert row["verdict"] == "wrong"
    assert f"{len(rows)} families of transformers" in row["computed"]
    assert f"1/√dₖ in {usual};" in row["computed"]
    assert "gpt_neo (1," in row["computed"]


@pytest.mark.slow
def test_too_short_a_training_decides_nothing():
    evidence = Evidence(seeds=1, steps=2, lab=Lab(executor=Processes(1)))
    ids = ["grad.learning", "soft.trained", "scale.temperature", "scale.query"]
    for verdicts in check_claims(ids, evidence).tables["claims"]:
        assert verdicts["verdict"] == "depends"
        assert verdicts["why"].startswith("In 2 steps not even the models with 1/√dₖ learn the task")


def test_training_can_be_left_out():
    rows = check_claims(["soft.5", "soft.trained"], training=False).tables["claims"]
    assert [row["id"] for row in rows] == ["soft.5"]


@pytest.mark.long
def test_learning_claims_are_decided_by_training():
    evidence = Evidence(seeds=2, steps=400)
    rows = {row["id"]: row for row in check_claims(["grad.learning", "soft.trained"], evidence).tables["claims"]}
    learning = rows["grad.learning"]["numbers"]
    assert learning["none,unit"]["solved_fraction"] < learning["sqrt,unit"]["solved_fraction"]
    assert rows["grad.learning"]["verdict"] == "depends"
    assert learning["none,absorbed"]["solved_fraction"] > learning["none,unit"]["solved_fraction"]
    assert rows["soft.trained"]["verdict"] in ("holds", "depends")
    again = check_claims(["grad.learning"], evidence).tables["claims"][0]
    assert again == rows["grad.learning"]


def trained(**changes):
    """The claims on learned temperatures, decided by a table whose rows have been changed, in place of training."""
    evidence = Evidence(seeds=2, steps=2, lab=Lab(executor=Processes(1)))
    record = evidence.temperatures
    for setting in record.tables["summary"]:
        setting |= {"solved_fraction": 1.0} | changes.get(setting["scale"], {})
    for run in record.tables["runs"]:
        run |= changes.get(f"{run['scale']}_run", {})
    rows = check_claims(["scale.temperature", "scale.query"], evidence).tables["claims"]
    return {row["id"]: row for row in rows}


MOVED = {"learned_run": {"temperatures": [1.2, 0.9]}, "query_run": {"temperature_spread": 0.2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "temperature", "query"),
    [
        (MOVED, "holds", "holds"),
        (MOVED | {"learned": {"solved_fraction": 0.5}}, "depends", "holds"),
        (MOVED | {"query": {"solved_fraction": 0.5}}, "holds", "depends"),
        (MOVED | {"learned_run": {"temperatures": [1.001, 0.999]}}, "depends", "holds"),
        (MOVED | {"query_run": {"temperature_spread": 0.001}}, "holds", "depends"),
        (MOVED | {"sqrt": {"solved_fraction": 0.0}}, "depends", "depends"),
    ],
    ids=["both", "learned worse", "query worse", "no move", "no spread", "undecided"],
)
def test_learned_temperatures_are_judged_by_the_runs(changes, temperature, query):
    rows = trained(**changes)
    assert (rows["scale.temperature"]["verdict"], rows["scale.query"]["verdict"]) == (temperature, query)


def test_a_temperature_that_softens_the_wrong_way_is_noticed(monkeypatch):
    monkeypatch.setattr(sqrtdk.scales.Temperature, "factor", lambda self, context: self.relative / context.d_k**0.5)
    assert trained(**MOVED)["scale.temperature"]["verdict"] == "wrong"


@pytest.mark.long
def test_temperature_claims_are_decided_by_training():
    """Seeds 0 and 1, 400 steps, on the runs of the learning claims where they are the same."""
    evidence = Evidence(seeds=2, steps=400)
    rows = {row["id"]: row for row in check_claims(["scale.temperature", "scale.query"], evidence).tables["claims"]}
    assert {row["verdict"] for row in rows.values()} == {"holds"}
    assert rows["scale.query"]["numbers"]["temperature_spread_median"] > 0.05
    assert rows["scale.temperature"]["numbers"]["temperature_spread_median"] == 0.0
    for first, second in rows["scale.temperature"]["numbers"]["temperatures"]:
        assert first > 1.02
        assert second < 0.98
