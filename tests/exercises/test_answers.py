"""Replies to students: right answers pass, each mistake is named by what it computes, nothing is raised."""

import math

import numpy as np
import pytest

from sqrtdk import softmax
from sqrtdk.errors import InvalidValueError
from sqrtdk.exercises import answers, gradients, temperature, variance
from sqrtdk.exercises.answers import check, compare
from sqrtdk.wording.guesses import compare_number


def dots(q, k):
    return (q * k).sum(axis=1)


def leave(p):
    return (1 - (p**2).sum()) / 0.75


def lead(x, zeros=3):
    return softmax(np.array([x, *[0.0] * zeros]))


def jacobian(p):
    return np.diag(p) - np.outer(p, p)


RIGHT = {
    "spread": lambda q, k: (dots(q, k).std(), dots(q, k).std() / math.sqrt(q.shape[1])),
    "saturation": lambda x: leave(lead(x)),
    "rescale": lambda w_q, w_k: (w_q * w_q.shape[1] ** -0.25, w_k * w_k.shape[1] ** -0.25),
    "temperature": lambda q, k, tau: softmax(q @ k.T / tau, axis=1),
    "gradient": lambda q, k, v, g, scale: scale * k.T @ jacobian(softmax(scale * k @ q)) @ v @ g,
}
ALSO_RIGHT = {
    "spread": lambda q, k: (dots(q, k).std(ddof=1), (dots(q, k) / q.shape[1] ** 0.5).std(ddof=1)),
    "rescale": lambda w_q, w_k: (w_q, w_k / w_k.shape[1] ** 0.5),
    "temperature": lambda q, k, tau: softmax(q @ k.T / tau, axis=1).tolist(),
}
WRONG = [
    ("spread", lambda q, k: (dots(q, k).var(), 1.0), "q·k: this is the variance"),
    ("spread", lambda q, k: ((q * k).sum(axis=0).std(), 1.0), "the sum runs over the pairs"),
    ("spread", lambda q, k: ((q * k).std(), 1.0), "not added up"),
    ("spread", lambda q, k: ((q * k).mean(axis=1).std(), 1.0), "mean of the products"),
    ("spread", lambda q, k: (dots(q, k).std() / 48**0.5, 1.0), "divided by √dₖ already"),
    ("spread", lambda q, k: (dots(q, k).std(), dots(q, k).std() / 48), "the √ is missing"),
    ("spread", lambda q, k: (dots(q, k).std(), dots(q, k).var() / 48), "division: this is the variance"),
    ("spread", lambda q, k: (dots(q, k).std(), dots(q, k).std()), "it is not divided"),
    ("spread", lambda q, k: (dots(q, k).std(), dots(q, k).std() / len(q) ** 0.5), "number of pairs"),
    ("spread", lambda q, k: (dots(q, k).std(), 3 * dots(q, k).std()), "times the right one"),
    ("spread", lambda q, k: dots(q, k).std(), "must return 2 values"),
    ("saturation", lambda x: 0.75 * leave(lead(x)), "Divide it by its value at x = 0"),
    ("saturation", lambda x: (lead(x) ** 2).sum(), "this is Σp²"),
    ("saturation", lambda x: lead(x).max(), "the largest weight"),
    ("saturation", lambda x: 1 - lead(x).sum(), "0 for every x"),
    ("saturation", lambda x: leave(lead(x, 4)) * 0.75 / 0.8, "four zeros"),
    ("saturation", lambda x: lead(x), "must have shape (3,), got (3, 4)"),
    ("rescale", lambda w_q, w_k: (w_q, w_k), "nothing has changed"),
    ("rescale", lambda w_q, w_k: (w_q / 48**0.5, w_k / 48**0.5), "the scale is applied twice"),
    ("rescale", lambda w_q, w_k: (w_q / 48, w_k), "the √ is missing"),
    ("rescale", lambda w_q, w_k: (w_q / 48**0.25, w_k), "one of the two is not rescaled"),
    ("rescale", lambda w_q, w_k: (w_q * 48**0.25, w_k * 48**0.25), "Make the matrices smaller"),
    ("rescale", lambda w_q, w_k: (w_q / 10**0.25, w_k / 10**0.25), "second axis"),
    ("temperature", lambda q, k, tau: softmax(q @ k.T * tau, axis=1), "multiplied by τ"),
    ("temperature", lambda q, k, tau: softmax(q @ k.T / tau, axis=0), "the wrong axis"),
    ("temperature", lambda q, k, tau: softmax(q @ k.T, axis=1), "τ is not used"),
    ("temperature", lambda q, k, tau: softmax(q @ k.T / tau / 48**0.5, axis=1), "the scale is applied twice"),
    ("temperature", lambda q, k, tau: softmax(q @ k.T / 48**0.5, axis=1), "in place of 1/τ"),
    ("temperature", lambda q, k, tau: softmax(q @ k.T / tau**0.5, axis=1), "divided by √τ"),
    ("temperature", lambda q, k, tau: q @ k.T / tau, "Softmax is missing"),
    ("temperature", lambda q, k, tau: np.exp(q @ k.T / tau), "these are exponentials"),
    ("temperature", lambda q, k, tau: softmax(k @ q.T / tau, axis=1), "changed places"),
    ("temperature", lambda q, k, tau: 0 * softmax(q @ k.T, axis=1) + math.nan, "not finite"),
    ("temperature", lambda q, k, tau: softmax(q @ k.T / tau + 1e-3 * np.arange(9), axis=1), "differs from the right"),
    ("gradient", lambda q, k, v, g, s: k.T @ jacobian(softmax(s * k @ q)) @ v @ g, "factor `scale` is missing"),
    ("gradient", lambda q, k, v, g, s: s * s * k.T @ jacobian(softmax(s * k @ q)) @ v @ g, "applied twice"),
    ("gradient", lambda q, k, v, g, s: s * k.T @ jacobian(softmax(k @ q)) @ v @ g, "weights are computed without"),
    ("gradient", lambda q, k, v, g, s: s * k.T @ (softmax(s * k @ q) * (v @ g)), "p·pᵀ is missing"),
    ("gradient", lambda q, k, v, g, s: jacobian(softmax(s * k @ q)) @ v @ g, "Multiply by scale and the keys"),
    ("gradient", lambda q, k, v, g, s: v @ g, "gradient of the weights"),
    ("gradient", lambda q, k, v, g, s: "three", "must be numbers, got str"),
]


@pytest.mark.parametrize("exercise", RIGHT)
def test_right_answers_pass(exercise):
    assert check(exercise, RIGHT[exercise]).right is True
    if exercise in ALSO_RIGHT:
        assert repr(check(exercise, ALSO_RIGHT[exercise])) == "Right."
    assert list(RIGHT) == list(answers.EXERCISES)


@pytest.mark.parametrize(("exercise", "answer", "says"), WRONG, ids=[f"{one[0]}: {one[2]}" for one in WRONG])
def test_mistakes_are_named(exercise, answer, says):
    reply = check(exercise, answer)
    assert reply.right is False
    assert says in reply.says
    assert reply.says[0].isupper()


@pytest.mark.parametrize("exercise", RIGHT)
def test_mistakes_can_be_told_from_the_right_answer_and_from_each_other(exercise):
    known = answers.EXERCISES[exercise]
    for part in known.parts(known.inputs()):
        values = [np.asarray(value, dtype=float) for value in (part.right, *part.mistakes.values())]
        for at, one in enumerate(values):
            for two in values[:at]:
                assert not answers._same(one, two, known.tolerance)


@pytest.mark.parametrize("exercise", RIGHT)
@pytest.mark.parametrize("empty", [lambda *inputs: None, lambda *inputs: ..., lambda *inputs: (..., ...), None, ...])
def test_what_is_not_filled_in_is_not_wrong(exercise, empty):
    if exercise in ("spread", "rescale") or not callable(empty) or empty() != (..., ...):
        reply = check(exercise, empty)
        assert reply.right is None
        assert reply.says.startswith("Not filled in yet")


def test_half_an_answer_is_not_filled_in():
    assert (
        repr(check("spread", lambda q, k: (1.0, ...)))
        == "Not filled in yet: the standard deviation after the division."
    )


def test_exceptions_are_told():
    reply = check("temperature", lambda q, k, tau: q @ k)
    assert reply.right is False
    assert reply.says.startswith("Your function raises ValueError: ")
    assert check("gradient", lambda q: q).says.startswith("Your function raises TypeError: ")
    assert check("rescale", lambda w_q, w_k: (w_q, 3)).right is False
    assert check("spread", 3.0).says == "The answer must be a function, got float."


def test_a_function_cannot_change_what_it_is_checked_with():
    def spoil(q, k):
        q *= 0
        return dots(q, k).std(), 0.0

    assert check("spread", spoil).right is False


@pytest.mark.slow
def test_guesses_are_compared_with_what_is_computed():
    rows = {row["relative"]: row for row in temperature().tables["temperature"]}
    means = {row["scale"]: row["grad_q_mean"] for row in gradients(d_ks=(64,), ns=(1024,)).tables["vanish"]}
    computed = {
        "spread": variance(d_ks=(512,)).tables["variance"][0]["measured"],
        "saturation": 5.043,
        "rescale": 0.125,
        "temperature": rows[0.5]["effective_keys"],
        "gradient": means["none"] / means["sqrt"],
    }
    for exercise, value in computed.items():
        assert compare(exercise, 1000).says == compare_number(1000.0, value)
        assert compare(exercise, 1000).right is False
        assert compare(exercise, np.float64(value)).right is True
        for nothing in (None, ..., "many", True):
            assert compare(exercise, nothing).right is None


def test_an_unknown_exercise_lists_the_known_ones():
    for ask in (check, compare):
        with pytest.raises(InvalidValueError, match=r"unknown exercise 'sprad'.*spread"):
            ask("sprad", None)
