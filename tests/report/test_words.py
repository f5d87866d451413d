"""Recorded sentences: rows are distributions, other temperatures follow from them, and the page carries them."""

import math

import pytest

from sqrtdk import softmax
from sqrtdk.report.words import find_row, measure_row, read_sentences, render_words


@pytest.mark.parametrize("place", range(3))
def test_recorded_rows_are_distributions_over_the_tokens(place):
    sentence = read_sentences()["sentences"][place]
    assert len(sentence["heads"]) == 72
    for head in sentence["heads"]:
        assert len(head["nats"]) == len(sentence["tokens"])
        for row in head["nats"]:
            # Hundredths of a nat leave half a percent of rounding.
            assert math.fsum(math.exp(-value / 100) for value in row) == pytest.approx(1.0, rel=6e-3)
            assert len(row) == len(sentence["tokens"])


def test_another_temperature_is_softmax_of_the_scaled_logits():
    logits = [3.0, 1.0, -2.0, 0.5]
    nats = [round(-100 * math.log(weight)) for weight in softmax(logits)]
    for factor in (0.2, 1.0, 5.0):
        weights = softmax([factor * logit for logit in logits])
        measured = measure_row([*nats, None], factor)
        assert measured["max_weight"] == pytest.approx(weights.max(), rel=0.02 * factor + 0.01)
        assert measured["effective_keys"] == pytest.approx(1 / (weights**2).sum(), rel=0.04 * factor + 0.02)


def test_a_sharp_head_softens_with_one_over_d_and_sharpens_without_scaling():
    sentence = read_sentences()["sentences"][0]
    head = min(sentence["heads"], key=lambda one: abs(one["entropy_ratio"] - 0.5))
    row = find_row(sentence, head["layer"], head["head"], 3)
    keys = [measure_row(row, 1 / sentence["scale"] / tau)["effective_keys"] for tau in (1.0, 32**0.5, 32.0)]
    assert keys == sorted(keys)
    assert keys[0] < 2 < 10 < keys[-1]


def test_the_page_carries_the_sentences():
    html = render_words()
    assert html.count("<option") == 3
    assert read_sentences()["sentences"][0]["text"] in html
