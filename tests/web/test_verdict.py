"""Verdicts on claimed weights: right to the digits of the claim, wrong with both numbers, sums checked."""

import pytest

from sqrtdk import softmax
from sqrtdk.errors import InvalidValueError
from sqrtdk.web.explore_query import Experiment
from sqrtdk.web.measurement import measure
from sqrtdk.web.presets import PRESETS
from sqrtdk.web.vectors import sample
from sqrtdk.web.verdict import judge

LABELS = {"none": "no scaling", "sqrt": "1/√dₖ"}


def verdicts_of(query):
    asked = Experiment.read(query)
    return measure(asked, sample(asked))["verdicts"]


def weights_of(scores, d_k):
    return {"none": softmax(scores), "sqrt": softmax([score / d_k**0.5 for score in scores])}


@pytest.mark.parametrize(
    ("claimed", "holds", "scale"),
    [
        (["0.867", "0.016", "0.117"], True, "none"),
        (["0.419", "0.254", "0.326"], True, "sqrt"),
        (["0.86"], True, "none"),
        (["0.85"], False, None),
        (["1", "0", "0"], True, "none"),
        (["0.4", "0.3", "0.3"], True, "sqrt"),
        (["0.33", "0.33", "0.33"], False, None),
    ],
)
def test_a_claim_holds_to_its_digits(claimed, holds, scale):
    verdict = judge(claimed, weights_of([14.0, 10.0, 12.0], 64), LABELS)
    assert (verdict.holds, verdict.scale) == (holds, scale)


def test_a_wrong_claim_is_told_with_both_numbers():
    (verdict,) = verdicts_of({"source": "scores", "scores": "8.5,-2.1,7.9", "claimed": "0.99,0.00,0.01"})
    assert not verdict["holds"]
    assert verdict["text"].startswith("Wrong: key 1 claimed 0.99, softmax gives 0.646 with no scaling.")


def test_weights_that_do_not_sum_to_one_are_told():
    told = judge(["0.31", "0.07", "0.30", "0.05", "0.12"], weights_of([9.2, -3.1, 8.8, -5.4, 1.2], 64), LABELS).text
    assert told.endswith("The claimed weights sum to 0.85, not to 1.")
    assert "sum" not in judge(["0.31", "0.07"], weights_of([9.2, -3.1, 8.8, -5.4, 1.2], 64), LABELS).text


def test_the_examples_of_the_sources_take_the_same_path():
    judged = {preset.title: verdicts_of(preset.query) for preset in PRESETS if "claimed" in preset.query}
    assert {title: [one["holds"] for one in verdicts] for title, verdicts in judged.items()} == {
        "three scores [14, 10, 12]": [True, True],
        "[50, 10, 5] over 10": [True, True],
        "[8.5, −2.1, 7.9]": [False],
        "five scores": [True, False],
    }


@pytest.mark.parametrize(
    ("claimed", "told"),
    [
        ("0.5,0.3,0.1,0.1", "claimed must have at most 3 weights, one per score, got 4"),
        ("0.5,1.5", "each claimed must be a number from 0 to 1, got 1.5"),
        ("0.5,x", "each claimed must be a number from 0 to 1, got 'x'"),
        ("1;1;1;1;1", "claimed must be 1 to 4 lists separated by semicolons"),
    ],
)
def test_what_is_no_list_of_weights_is_refused(claimed, told):
    with pytest.raises(InvalidValueError) as refused:
        Experiment.read({"source": "scores", "scores": "1,2,3", "claimed": claimed})
    assert told.split(" must")[1] in str(refused.value)


def test_claims_are_read_for_given_scores_alone():
    assert Experiment.read({"claimed": "0.5"}).claimed == ()
    assert Experiment.read({"source": "scores", "scores": "1,2", "claimed": " "}).claimed == ()
