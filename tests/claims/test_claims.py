"""Claims are decided by computation: break what they rest on and the verdict changes."""

import json
import re

import numpy as np
import pytest

from sqrtdk import exercises, softmax, theory
from sqrtdk.claims import (
    Evidence,
    check_claims,
    list_claims,
    operation_claims,
    published_claims,
    softmax_claims,
    variance_claims,
)
from sqrtdk.claims.claim import SOURCES, agree, covers, estimate_variance, row
from sqrtdk.errors import SqrtdkError
from sqrtdk.exercises.estimates import Estimate
from sqrtdk.exercises.gaussian_rows import name_importance
from sqrtdk.records.families import is_usual, load_zoo

# The ids of the sources, group by group; a claim that is missing here or there is a claim that nobody checks.
EXPECTED = {
    "op": {"formula", "code", "stable", "same", "always", "instability"},
    "var": {"product", "dot", "terms", "mean", "divide", "root", "inverse", "init", "inputs", "five", "normal"},
    "soft": {
        "exp", "powers", "50", "5", "sum", "dk4", "dk64", "peak", "scores8", "five", "five8", "onehot", "uniform",
        "unstable", "small", "trained",
    },
    "grad": {"jacobian", "healthy", "vanish", "most", "explode", "learning", "range", "inverse"},
    "scale": {
        "none", "sqrt", "inverse", "fixed", "temperature", "query", "models", "quoted", "reason", "widths", "mentioned",
    },
}  # fmt: skip

# The verdicts as known from independent calculations; the checks must arrive there by computing.
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
    "op.code": "depends",
    "op.same": "holds",
    "op.instability": "depends",
    "var.inputs": "depends",
    "var.five": "wrong",
    "var.normal": "depends",
    "soft.powers": "holds",
    "soft.sum": "depends",
    "soft.scores8": "holds",
    "soft.unstable": "depends",
    "soft.small": "depends",
    "grad.most": "holds",
    "grad.explode": "depends",
    "grad.range": "holds",
    "grad.inverse": "depends",
    "scale.quoted": "wrong",
    "scale.reason": "depends",
    "scale.widths": "depends",
    "scale.mentioned": "undecided",
}
QUICK = [claim.id for claim in list_claims() if not claim.trains]


@pytest.fixture(scope="module")
def verdicts():
    rows = check_claims(QUICK).tables["claims"]
    return {row["id"]: row for row in rows}


def test_every_claim_of_the_sources_is_checked_once():
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
        assert claim["verdict"] in ("holds", "wrong", "depends", "undecided")
        assert all(claim[name].strip() for name in ("id", "source", "claimed", "computed", "why"))
        assert claim["why"].endswith(".")


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_verdicts(verdicts, name):
    assert verdicts[name]["verdict"] == VERDICTS[name], verdicts[name]


def test_monte_carlo_lines_state_interval_samples_and_seed(verdicts):
    for name in ("var.product", "var.dot", "var.mean", "var.root", "var.inverse", "var.terms"):
        assert re.search(r"95%, \d+ samples, seed 0", verdicts[name]["computed"])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 20))
def test_verdicts_do_not_depend_on_the_seed(verdicts, seed):
    other = {row["id"]: row for row in check_claims(QUICK, Evidence(seed=seed)).tables["claims"]}
    assert {name: row["verdict"] for name, row in other.items()} == {n: row["verdict"] for n, row in verdicts.items()}
    assert other["var.dot"]["computed"] != verdicts["var.dot"]["computed"]


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
def test_claims_and_exercises_share_one_measurement(verdicts):
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


@pytest.mark.slow
def test_verdicts_are_counted_in_words():
    def first(*ids):
        return check_claims(list(ids)).reading[0]

    assert first("soft.5", "soft.peak") == "Of 2 claims 1 holds and 1 is wrong."
    assert first("soft.5") == "Of 1 claim 1 holds."
    assert first("soft.peak", "soft.five8", "soft.5", "soft.50") == "Of 4 claims 2 hold and 2 are wrong."
    assert first("soft.uniform", "soft.5").startswith("Of 2 claims 1 holds and 1 depends on conditions")
    assert first("scale.mentioned", "soft.5", "soft.peak") == "Of 3 claims 1 holds, 1 is wrong and 1 is undecided."
    assert "Undecided: scale.mentioned." in check_claims(["scale.mentioned"]).reading


def test_the_sources_are_named_by_their_titles():
    last = check_claims(["soft.5"]).reading[-1]
    for title in (
        "S0 “Math behind √dₖ Scaling Factor in Attention”",
        "S1 “Stabilizing Attention Scores in Transformers”",
        "S2 “Why scale the Scaled Dot-Product Attention?”",
        "S3 “Section 5.3: Scaled Attention: Why √d Matters”",
    ):
        assert title in last


def test_a_wrong_default_scale_is_noticed(monkeypatch):
    for name in ("operation.arguments.known_default_factor", "scales.default_factor"):
        monkeypatch.setattr(f"sqrtdk.{name}", lambda d_k: 1.5 / d_k**0.5)
    verdicts = {row["id"]: row["verdict"] for row in check_claims(["op", "scale.sqrt", "soft.dk4"]).tables["claims"]}
    assert verdicts["op.formula"] == verdicts["scale.sqrt"] == verdicts["soft.dk4"] == "wrong"


@pytest.mark.slow
def test_a_wrong_formula_is_noticed(monkeypatch):
    monkeypatch.setattr(theory, "dot_product_variance", lambda d_k, **kwargs: 1.2 * d_k)
    monkeypatch.setattr(theory, "softmax_jacobian", lambda p: np.diag(p))
    rows = check_claims(["var.dot", "var.root", "grad.jacobian", "grad.healthy"]).tables["claims"]
    assert {row["id"]: row["verdict"] for row in rows} == dict.fromkeys(
        ["var.dot", "var.root", "grad.jacobian", "grad.healthy"], "wrong"
    )


def test_groups_and_unknown_names():
    assert {row["id"] for row in check_claims(["op"]).tables["claims"]} == {f"op.{name}" for name in EXPECTED["op"]}
    with pytest.raises(SqrtdkError, match=r"unknown claim 'opp'; .* lists them; did you mean 'op'"):
        check_claims(["opp"])


def test_record_is_json_of_the_agreed_shape(verdicts):
    content = check_claims(["soft.5"]).as_json()
    assert json.loads(json.dumps(content))["claims"][0].keys() >= {
        "id", "source", "claimed", "computed", "verdict", "why",
    }  # fmt: skip


def test_agree_rounds_as_a_source_does():
    assert agree([0.971], [0.9714999], decimals=3)
    assert not agree([0.971], [0.9716], decimals=3)
    assert row([0.1, 0.25], 1) == "[0.1, 0.2]"


def test_estimate_of_a_variance_covers_it():
    samples = np.random.default_rng(5).standard_normal(50_000) * 3
    assert covers(estimate_variance(samples), 9.0)
    assert not covers(estimate_variance(samples), 9.6)
    assert covers(Estimate(1.0, 0.9, 1.1), 1.19)
    assert not covers(Estimate(1.0, 0.9, 1.1), 1.21)


def test_the_scale_of_models_is_decided_by_the_record_that_ships():
    (row,) = check_claims(["scale.models"]).tables["claims"]
    rows = [one for one in load_zoo().tables["families"] if one["measured"] is not None]
    usual = sum(map(is_usual, rows))
    assert 0 < usual < len(rows)
    assert row["verdict"] == "wrong"
    assert f"{len(rows)} families of the transformers library" in row["computed"]
    assert "not models in use" in row["why"]
    assert f"1/√dₖ in {usual};" in row["computed"]
    assert "gpt_neo (1," in row["computed"]


def check(name, seed=0):
    (row,) = check_claims([name], Evidence(seed=seed)).tables["claims"]
    return row


def test_samples_of_code_run_once_their_names_are_defined(monkeypatch):
    row = check("op.code")
    assert row["numbers"] == {"missing": {"attention": "softmax", "stable softmax": "np"}, "difference_as_meant": 0.0}
    whole = {name: f"import numpy as np\nfrom sqrtdk import softmax\n{code}"
             for name, code in operation_claims._SAMPLES.items()}  # fmt: skip
    monkeypatch.setattr(operation_claims, "_SAMPLES", whole)
    assert check("op.code")["verdict"] == "holds"
    by_width = whole | {"attention": whole["attention"].replace("np.sqrt(Q.shape[-1])", "Q.shape[-1]")}
    monkeypatch.setattr(operation_claims, "_SAMPLES", by_width)
    assert check("op.code")["verdict"] == "wrong"


def test_an_unstable_softmax_is_not_the_same(monkeypatch):
    monkeypatch.setattr(operation_claims, "softmax", lambda x: softmax(0.999 * np.asarray(x)))
    assert check("op.same")["verdict"] == "wrong"


def test_scaling_helps_at_the_start_only(verdicts):
    sums = verdicts["op.instability"]["numbers"]["sum_p2"]
    assert sums["sqrt"] < 0.01 < 0.5 < min(sums["none"], sums["sqrt_grown"])
    assert sums["none_smaller_weights"] == pytest.approx(sums["sqrt"], rel=1e-6)
    assert verdicts["op.instability"]["numbers"]["float16"] == {"divided_after": None, "divided_before": 8192.0}


def test_inputs_have_the_variance_that_layer_norm_or_embeddings_give(verdicts):
    numbers = verdicts["var.inputs"]["numbers"]
    predicted = {name: one["predicted"] for name, one in numbers.items()}
    assert predicted["layer norm of the latter"] == pytest.approx(64.0)
    assert predicted["embeddings of variance 1 plus sinusoids"] == pytest.approx(1.5**2 * 64, rel=0.15)
    small = predicted["embeddings of standard deviation 0.02"] / predicted["embeddings of variance 1"]
    assert small == pytest.approx(0.02**4)
    value, low, high = numbers["layer norm of the latter"]["within_rows"]
    assert low < value < high < 64.0


def test_five_scores_and_the_kurtosis_of_many(verdicts):
    five = verdicts["var.five"]["numbers"]
    assert (five["population"], five["sample"]) == (pytest.approx(5.99, abs=0.005), pytest.approx(6.70, abs=0.005))
    # Quantiles of χ² with four degrees of freedom: 0.4844 and 11.143.
    assert five["range_of_five"] == pytest.approx([8 * (0.4844 / 4) ** 0.5, 8 * (11.143 / 4) ** 0.5], rel=0.02)
    excess = verdicts["var.normal"]["numbers"]["excess_kurtosis"]
    assert [excess[d] for d in ("4", "64", "512")] == pytest.approx([1.5, 6 / 64, 6 / 512], rel=0.1)


@pytest.mark.parametrize(
    ("shift", "missed", "verdict"),
    [
        (0.0, [], "holds"),
        (1.5, [16, 512], "holds"),
        (2.5, [16, 512], "wrong"),
        (9.0, variance_claims._MEAN_SIZES, "wrong"),
    ],
)
def test_the_mean_is_counted_over_many_sizes(monkeypatch, shift, missed, verdict):
    """Means of 0, and of some sizes that many half widths of their interval off."""

    def sample(d_k, count, seed):
        values = np.tile([-1.0, 1.0], count // 2)
        return values + shift * (d_k in missed) * 1.96 / np.sqrt(count)

    monkeypatch.setattr(variance_claims, "sample_dot_products", sample)
    row = check("var.mean")
    sizes = len(variance_claims._MEAN_SIZES)
    assert row["verdict"] == verdict
    assert (
        f"includes 0 at {sizes - len(missed)} of {sizes} sizes from dₖ = 2 to 512 (33 are expected" in row["computed"]
    )
    assert row["numbers"]["includes_0"] == [d for d in variance_claims._MEAN_SIZES if d not in missed]


def test_terms_as_shown_do_not_add_up_to_the_sum(verdicts):
    assert verdicts["soft.sum"]["numbers"]["shown"] == pytest.approx(152.767)
    assert verdicts["soft.sum"]["numbers"]["exact"] == pytest.approx(152.780, abs=5e-4)


def test_dividing_by_d_k_is_stable_by_one_measure_only(verdicts):
    errors = verdicts["soft.unstable"]["numbers"]["errors"]
    assert set(errors) == {f"{name},{d}" for name in ("float32", "bfloat16", "float16") for d in (64, 512, 4096)}
    wide = [errors["bfloat16,4096"][name]["of_signal"] for name in ("inverse", "sqrt")]
    assert wide == pytest.approx([0.14, 0.005], rel=0.15)
    assert 0.005 < errors["bfloat16,4096"]["none"]["of_signal"] < 0.04


@pytest.mark.parametrize(
    ("inverse", "verdict"),
    [((0.1, 9.0), "depends"), ((0.1, 0.1), "wrong"), ((9.0, 9.0), "holds"), ((9.0, 0.1), "depends")],
    ids=["depends on the measure", "calm", "unstable", "the other way round"],
)
def test_stability_is_decided_by_both_measures(monkeypatch, inverse, verdict):
    errors = {name: softmax_claims._RoundingErrors(*pair)
              for name, pair in {"none": (1.0, 1.0), "sqrt": (1.0, 1.0), "inverse": inverse}.items()}  # fmt: skip
    monkeypatch.setattr(softmax_claims, "_measure_rounding", lambda *_: errors)
    assert check("soft.unstable")["verdict"] == verdict


@pytest.mark.slow
def test_scaling_matters_where_explain_says_so(verdicts):
    numbers = verdicts["soft.small"]["numbers"]
    for d_k, n in ((4, 16), (4, 1024), (64, 1024)):
        effective = {one["scale"]: one["measured"] for one in exercises.explain(d_k=d_k, n=n).tables["explain"]
                     if one["quantity"] == "effective_keys"}  # fmt: skip
        assert numbers["effective_keys_ratio"][f"{d_k},{n}"] == effective["sqrt"] / effective["none"]
        assert numbers["matters"][f"{d_k},{n}"] == name_importance(effective["sqrt"] / effective["none"])
    assert (numbers["matters"]["4,16"], numbers["matters"]["4,1024"]) == ("somewhat", "much")
    assert numbers["half_from"] == {"16": 12, "1024": 41}


@pytest.mark.parametrize(
    ("at_four", "at_large", "verdict"),
    [((1.0, 1.0), 9.0, "holds"), ((3.0, 3.0), 9.0, "wrong"), ((1.0, 3.0), 9.0, "depends"), ((1.0, 1.0), 1.5, "wrong")],
)
def test_the_claim_on_small_d_k_uses_the_definition_of_explain(monkeypatch, at_four, at_large, verdict):
    def gain(d_k, n, evidence):
        return {1: 1.0, 4: at_four[n == 1024], 512: at_large}.get(d_k, 5.0)

    monkeypatch.setattr(softmax_claims, "_gain", gain)
    assert check("soft.small")["verdict"] == verdict


def test_most_elements_and_both_extremes(verdicts):
    shares = verdicts["grad.most"]["numbers"]
    assert all(one["elements"] > 0.7 for one in shares.values())
    assert all(one["queries"] < 0.5 for one in shares.values())
    assert verdicts["grad.explode"]["numbers"]["shares"]["64,16"]["either"][2] < 0.5


def test_the_quote_is_judged_by_the_formula_in_the_paper(monkeypatch):
    assert check("scale.quoted")["numbers"]["variance_as_quoted"] == pytest.approx(4096, rel=0.05)
    monkeypatch.setattr(published_claims, "_POWER_IN_PAPER", 0.5)
    assert check("scale.quoted")["verdict"] == "holds"


def test_widths_are_those_of_the_record_that_ships(verdicts):
    numbers = verdicts["scale.widths"]["numbers"]
    widths = [one["d_k"] for one in load_zoo().tables["families"] if one["d_k"]]
    assert (numbers["families"]["64"], numbers["families"]["128"]) == (widths.count(64), widths.count(128))
    assert numbers["below_64"] == sum(d_k < 64 for d_k in widths) > 0
    assert sum(numbers["families"].values()) == numbers["known"] == len(widths)


def test_training_can_be_left_out():
    rows = check_claims(["soft.5", "soft.trained"], training=False).tables["claims"]
    assert [row["id"] for row in rows] == ["soft.5"]
