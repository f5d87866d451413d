"""The words that dropout draws: the same from NumPy and torch as written down, and as good as independent."""

import math

import numpy as np
import pytest
import torch

from sqrtdk.operation.dropout import draw, draw_kept, growth_of_kept

SEEDS = [0, 1, 7, 2**62 - 1]
MANY = np.arange(2000)


def mix(x):
    x = x ^ x >> 16
    x = x * 0x21F0AAAD % 2**32
    x = x ^ x >> 15
    x = x * 0x735A2D97 % 2**32
    return x ^ x >> 15


def words_of_row(seed, row):
    """Start, step and twist of a row, or of an array of rows."""
    low, high = seed % 2**32, seed >> 32
    first, second = mix(low ^ mix((high + 1) % 2**32)), mix(high ^ mix((low + 1) % 2**32))
    start = mix(row % 2**32 ^ mix((row >> 32) ^ first))
    twist = mix((start + second) % 2**32)
    return start, mix(twist ^ first) >> 1 | 1, twist


def draw_by_definition(seed, row, key):
    """One word, by integers without any limit."""
    start, step, twist = words_of_row(seed, row)
    x = (start + key * step) % 2**32
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= (x >> 15) ^ twist
    return x * 0x735A2D97 % 2**32


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**62 - 1, 2**63 - 1])
def test_words_are_the_same_however_they_are_drawn(seed):
    rows = [0, 1, 2, 63, 2**31, 2**32 - 1, 2**32, 2**40 + 5]
    keys = [0, 1, 2, 127, 128, 2**31 - 1, 2**32 - 1, 2**32]
    expected = [[draw_by_definition(seed, row, key % 2**32) for key in keys] for row in rows]
    assert draw(seed, np.array(rows)[:, None], np.array(keys)).tolist() == expected
    for given in (seed, torch.tensor(seed)):
        assert draw(given, torch.tensor(rows)[:, None], torch.tensor(keys)).tolist() == expected


@pytest.mark.parametrize("p", [0.0, 2.0**-40, 0.1, 0.5, 1.0 - 2.0**-53, 1.0])
def test_kept_weights_have_words_of_at_least_the_probability(p):
    words = draw(3, MANY[:, None], MANY[:300])
    kept = draw_kept(p, 3, MANY[:, None], MANY[:300])
    assert np.array_equal(kept, words >= min(math.floor(p * 2**32), 2**32 - 1))
    assert kept.all() == (p < 1e-9)
    assert growth_of_kept(p) == (0.0 if p == 1.0 else 1.0 / (1.0 - p))


def spread(sums, terms):
    """How many deviations Σz² of independent standardised sums lies from its mean; each is a sum of `terms` ±."""
    z = np.asarray(sums) / math.sqrt(terms)
    return (np.square(z).sum() - z.size) / math.sqrt(2 * z.size)


# A true independence exceeds 5 deviations once in 1.7 million comparisons; there are 300 here.
FAR = 5.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_neighbours_are_independent(seed, p):
    def standardised(seed):
        dropped = ~draw_kept(p, seed, MANY[:, None], MANY)
        return (dropped - p) / math.sqrt(p * (1 - p))

    x = standardised(seed)
    n = len(MANY)
    far = {
        "all": x.sum() / n,
        "rows": spread(x.sum(1), n),
        "keys": spread(x.sum(0), n),
        "squares of neighbours": (x[1:, 1:] * x[1:, :-1] * x[:-1, 1:] * x[:-1, :-1]).sum() / (n - 1),
    }
    for apart in (1, 2, 4, 16, 64):
        rows, keys = x[apart:] * x[:-apart], x[:, apart:] * x[:, :-apart]
        far[f"rows {apart} apart"] = spread(rows.sum(1), n)
        far[f"rows {apart} apart, all"] = rows.sum() / math.sqrt(rows.size)
        far[f"keys {apart} apart"] = spread(keys.sum(0), n)
        far[f"keys {apart} apart, all"] = keys.sum() / math.sqrt(keys.size)
    for step in (1, 2**32):
        both = x * standardised((seed + step) % 2**63)
        far[f"seeds {step} apart, rows"] = spread(both.sum(1), n)
        far[f"seeds {step} apart, keys"] = spread(both.sum(0), n)
        far[f"seeds {step} apart, all"] = both.sum() / n
    assert {name: value for name, value in far.items() if abs(value) > FAR} == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_no_two_rows_and_no_two_keys_of_a_call_are_alike(seed):
    """Of 500 thousand pairs of independent rows of 1000 words none lies 6.5 deviations from a half."""
    signs = np.where(draw_kept(0.5, seed, MANY[:1000, None], MANY[:1000]), 1.0, -1.0)
    for x in (signs, signs.T):
        products = x @ x.T / math.sqrt(1000)
        np.fill_diagonal(products, 0.0)
        assert np.abs(products).max() < 6.5


def test_words_are_uniform():
    words = draw(5, MANY[:, None], MANY)
    counts = np.bincount((words >> 24).ravel(), minlength=256)
    expected = words.size / 256
    assert abs((np.square(counts - expected) / expected).sum() - 255) < FAR * math.sqrt(2 * 255)


def correlate(seed, one, other, keys=4096):
    """Correlations, in deviations, of what p = ½ keeps of some rows and of others, at every shift below `keys`.

    `one` and `other` are rows `[n]`; the result is `[n, 2·keys − 1]`, the rows of one shifted, then those of the other.
    """
    signs = [np.where(draw_kept(0.5, seed, rows[:, None], np.arange(2 * keys)), 1.0, -1.0) for rows in (one, other)]
    whole = [np.fft.rfft(x) for x in signs]
    begun = [np.fft.rfft(np.where(np.arange(2 * keys) < keys, x, 0.0)) for x in signs]
    ahead = np.fft.irfft(whole[0] * begun[1].conj())[:, :keys]
    behind = np.fft.irfft(whole[1] * begun[0].conj())[:, 1:keys]
    return np.concatenate([ahead, behind], axis=1) / math.sqrt(keys)


def test_rows_that_share_no_step_are_not_alike_some_keys_apart():
    """With one step for all rows these two went through the same numbers: 0.42, 27 deviations, at a shift of 2537."""
    far = correlate(7, np.array([107606]), np.array([224671]))
    assert abs(far[0, 2537]) < FAR
    # 2 million correlations of 250 pairs, none 6.5 deviations from 0.
    assert np.abs(correlate(7, MANY[:250], MANY[250:500])).max() < 6.5


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 7])
def test_no_two_of_400_thousand_rows_are_alike_at_any_shift(seed):
    """Rows a and b draw from start + key·step. At a shift their numbers differ by c + key·(step_a − step_b): they stay
    at one difference, or few, only if the steps agree in their lower bits. All pairs that agree in 20 or more of the 31
    are tried at every shift below 4096; a pair that agrees in all would have to start on the other's way as well."""
    start, step, _ = words_of_row(seed, np.arange(400_000))
    order = np.argsort(step % 2**20, kind="stable")
    pairs = []
    for apart in range(1, 30):
        one, other = order[:-apart], order[apart:]
        pairs.append(np.stack([one, other])[:, step[one] % 2**20 == step[other] % 2**20])
    one, other = np.concatenate(pairs, axis=1)
    assert len(one) > 100_000
    assert not pairs[-1].size  # no run of rows is longer
    alike = step[one] == step[other]
    inverse = np.array([pow(int(x), -1, 2**32) for x in step[one[alike]]], dtype=object)
    shifts = (start[other[alike]] - start[one[alike]]).astype(object) * inverse % 2**32
    assert all(4096 <= shift <= 2**32 - 4096 for shift in shifts)
    # 10⁹ correlations: the largest of so many independent ones lies near 6.1 deviations, above 7.5 once in 10⁴ times.
    far = max(np.abs(correlate(seed, one[i : i + 64], other[i : i + 64])).max() for i in range(0, len(one), 64))
    assert 5.5 < far < 7.5
