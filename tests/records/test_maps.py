"""Maps of a run: few steps that begin close together, bytes that come back, and queries that look at the right key."""

import numpy as np
import pytest

from sqrtdk.records.maps import count_right, list_steps, pack, unpack


@pytest.mark.parametrize("total", [1, 2, 12, 29, 30, 31, 100, 600, 601, 10_000, 10**6])
def test_steps_begin_close_together_and_are_few(total):
    steps = list_steps(total)
    assert steps[0] == 0
    assert steps[-1] == total
    assert steps == sorted(set(steps))
    assert len(steps) <= 48
    gaps = np.diff(steps)
    assert gaps[0] == 1
    # Each gap is at most the way so far and one, or the even stride.
    assert all(gap <= max(1, steps[at], -(-total // 30)) for at, gap in enumerate(gaps))


def describe(weights, right):
    queries, keys = np.shape(weights)
    return {"tokens": ["A"] * keys, "first": keys - queries, "right": right, "weights": [pack(np.array(weights))]}


def test_bytes_are_the_weights_to_half_a_step():
    weights = np.random.default_rng(0).dirichlet(np.ones(7), 3)
    read = unpack(describe(weights, []), 0)
    assert read.shape == (3, 7)
    np.testing.assert_allclose(read / 255, weights, atol=0.5 / 255)


def test_weights_that_are_not_finite_count_as_none():
    assert unpack(describe([[np.nan, np.inf, 1.0]], []), 0).tolist() == [[0, 0, 255]]


@pytest.mark.parametrize(
    ("weights", "count"),
    [
        ([[0.9, 0.1, 0.0], [0.0, 0.2, 0.8]], 1),
        ([[0.9, 0.1, 0.0], [0.1, 0.5, 0.4]], 2),
        ([[0.5, 0.5, 0.0], [0.4, 0.2, 0.4]], 0),
        ([[0.3334, 0.3333, 0.3333], [0.0, 1.0, 0.0]], 1),
    ],
    ids=["one", "both", "ties", "ties in bytes"],
)
def test_a_query_is_right_where_no_other_key_has_as_much(weights, count):
    assert count_right(describe(weights, [0, 1]), 0) == count
