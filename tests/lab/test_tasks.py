"""Tasks: the answer is in the context, the held-out data is apart, the thresholds mean what they say."""

import hashlib
import math
import sys

import numpy as np
import pytest

from sqrtdk.errors import InvalidTypeError, InvalidValueError, MissingExtraError
from sqrtdk.lab import tasks


@pytest.mark.parametrize(("pairs", "symbols"), [(1, 2), (3, 3), (8, 16)])
def test_every_recall_answer_follows_its_key_in_the_context(pairs, symbols):
    batch = tasks.Recall(pairs, symbols).sample(np.random.default_rng(0), 40)
    assert batch.tokens.shape == (40, 3 * pairs)
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        keys, values, queries = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], tokens[2 * pairs :]
        value_of = dict(zip(keys, values, strict=True))
        assert len(value_of) == pairs, "the keys of a sequence must differ"
        assert sorted(queries) == sorted(keys)
        assert [value_of[query] for query in queries] == list(targets)


def test_recall_values_cannot_be_guessed():
    targets = tasks.Recall().sample(np.random.default_rng(1), 4000).targets
    share = np.bincount(targets.ravel(), minlength=16) / targets.size
    # 32 000 samples: the share's standard deviation is 0.00135; six of them.
    assert np.all(np.abs(share - 1 / 16) < 0.0081)


def test_recall_queries_come_in_another_order_each_time():
    task = tasks.Recall()
    batch = task.sample(np.random.default_rng(2), 200)
    assert 0 < (batch.tokens[:, 0] == batch.tokens[:, 2 * task.pairs]).mean() < 0.5


@pytest.mark.parametrize("name", tasks.names())
def test_held_out_data_is_fixed_and_samples_follow_the_generator(name):
    task = tasks.get(name)
    np.testing.assert_array_equal(task.held_out().tokens, task.held_out().tokens)
    first, again, other = (task.sample(np.random.default_rng(seed), 8) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_recall_threshold_is_a_tenth_of_chance():
    task = tasks.Recall()
    assert task.chance_loss == pytest.approx(math.log(16))
    assert task.threshold == pytest.approx(math.log(16) / 10)
    assert "0.277" in task.solved_when
    assert "2.773" in task.solved_when


def test_text_asks_for_the_next_character():
    batch = tasks.Text(context=10).sample(np.random.default_rng(0), 5)
    assert batch.tokens.shape == batch.targets.shape == (5, 10)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_text_pages_are_trained_on_or_held_out_never_both():
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    characters = np.array(sorted(set(whole)))
    corpus = tasks._read_corpus()
    training, held_out = ("".join(characters[codes]) for codes in (corpus.training, corpus.held_out))
    assert len(training) + len(held_out) == len(whole)
    assert 0.08 < len(held_out) / len(whole) < 0.12
    assert held_out.startswith(whole[9 * 2048 : 10 * 2048])
    assert training.startswith(whole[: 9 * 2048] + whole[10 * 2048 : 11 * 2048])
    assert tasks.Text().data_hash == hashlib.sha256(whole.encode()).hexdigest()


def test_text_threshold_lies_between_knowing_pairs_and_knowing_frequencies():
    corpus = tasks._read_corpus()
    counts = np.bincount(corpus.training, minlength=corpus.alphabet) + 1.0
    single = -np.log(counts / counts.sum())[corpus.held_out].mean()
    assert 1.5 < tasks.Text().threshold < single < tasks.Text().chance_loss


def test_bad_parameters_are_refused():
    with pytest.raises(InvalidValueError, match="pairs must be at least 1, got 0"):
        tasks.Recall(pairs=0)
    with pytest.raises(InvalidTypeError, match=r"context must be an integer, got 1\.5"):
        tasks.Text(context=1.5)
    with pytest.raises(InvalidValueError, match="context must be below"):
        tasks.Text(context=10**9)
    with pytest.raises(InvalidValueError, match="unknown task 'Recall'; known: digits, recall, text"):
        tasks.get("Recall")


def test_digits_are_images_with_held_out_ones():
    task = tasks.get("digits")
    held_out = task.held_out()
    assert held_out.tokens.shape == (359, 64)
    assert held_out.targets.shape == (359, 1)
    assert held_out.tokens.max() == 16
    assert set(held_out.targets.flatten()) == set(range(10))
    batch = task.sample(np.random.default_rng(0), 50)
    seen = {row.tobytes() for row in held_out.tokens}
    assert not any(row.tobytes() in seen for row in batch.tokens)
    assert task.chance_loss == pytest.approx(np.log(10))
    assert task.threshold == pytest.approx(np.log(10) / 2)
    assert "half of chance" in task.solved_when


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    tasks._read_images.cache_clear()
    with pytest.raises(MissingExtraError, match=r"sqrtdk\[digits\]"):
        tasks.get("digits")


@pytest.mark.parametrize(("name", "length"), [("recall", 48), ("text", 32), ("digits", 64)])
def test_tasks_have_the_length_that_is_asked_for(name, length):
    assert tasks.get(name, tasks.parameters_at(name, length)).length == length
    with pytest.raises(InvalidValueError, match="must be"):
        tasks.get(name, tasks.parameters_at(name, 0))
