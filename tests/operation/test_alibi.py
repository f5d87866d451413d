"""ALiBi's slopes: the same as an additive mask of slope·(j − i − offset), on arrays and tensors, with gradients."""

import numpy as np
import pytest
import torch

import sqrtdk
import sqrtdk.torch
from oracle import DTYPES, draw
from sqrtdk import backends
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.statistics import ROW_FIELDS

SLOPES = np.array([0.5, 0.125, -0.25, 0.0])
EXACT = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-11}
# Few rows have a loop of their own; 70 are more than a tile.
SHAPES = {"few rows": (2, 4, 3, 16), "a tile": (2, 4, 9, 16), "tiles": (2, 4, 70, 16)}
CALLS = {
    "plain": {"causal_offset": 5},
    "causal": {"causal": True, "causal_offset": 60},
    "window": {"window": (9, 3), "causal_offset": -2},
    "mask": {"mask": np.random.default_rng(1).random((2, 1, 1, 130)) < 0.7, "causal_offset": 0},
    "additive mask": {"mask": np.random.default_rng(2).standard_normal((4, 1, 130)), "causal_offset": 40},
    "soft cap and sinks": {"softcap": 3.0, "sinks": np.array([0.5, -1.0, 2.0, 0.0]), "causal_offset": 1},
}


def as_mask(slopes, queries, keys, causal_offset, mask=None, **_):
    """The bias written out, `[..., H, L, S]`, with the mask that the call has."""
    distances = np.arange(keys) - np.arange(queries)[:, None] - causal_offset
    bias = np.asarray(slopes)[..., None, None] * distances
    if mask is None:
        return bias
    return np.where(mask, bias, -np.inf) if mask.dtype == bool else bias + mask


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_are_a_mask_of_distances(backend, dtype, call, shape):
    q, k, v = draw(3, SHAPES[shape], (2, 2, 130, 16), 8, DTYPES[dtype])
    given, grad = CALLS[call], np.random.default_rng(4).standard_normal((*SHAPES[shape][:-1], 8)).astype(DTYPES[dtype])
    written = {**given, "mask": as_mask(SLOPES, SHAPES[shape][-2], 130, **given)}
    if call in ("plain", "mask", "additive mask", "soft cap and sinks"):
        del written["causal_offset"]
    with backends.use("reference"):
        wide = [x.astype(np.float64) for x in (q, k, v, grad)]
        expected = sqrtdk.attention(*wide[:3], weights=True, **written)
        slopes = sqrtdk.attention_gradients(*wide, **written)
    result = sqrtdk.attention(q, k, v, weights=True, alibi=SLOPES, **given)
    exact = EXACT[dtype]
    for one, other in ((result.output, expected.output), (result.weights, expected.weights)):
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=exact, atol=exact)
    rows = min(exact, 1e-3) if dtype != "float64" else 1e-9
    for name in ROW_FIELDS:
        one, other = getattr(result.statistics, name), getattr(expected.statistics, name)
        np.testing.assert_allclose(one, other, rtol=10 * rows, atol=10 * rows, err_msg=name)
    gradients = sqrtdk.attention_gradients(q, k, v, grad, alibi=SLOPES, **given)
    for name in ("query", "key", "value", "scale"):
        one, other = getattr(gradients, name).astype(np.float64), getattr(slopes, name)
        np.testing.assert_allclose(one, other, rtol=0, atol=4 * exact * max(1.0, np.abs(other).max()), err_msg=name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alibi", [(4,), (1,), (2, 4), (2, 1)])
def test_the_gradient_of_slopes_is_that_of_the_mask_times_the_distances(backend, alibi, shape):
    q, k, v = draw(5, SHAPES[shape], (2, 2, 130, 16), 8)
    given = {"causal": True, "causal_offset": 90, "softcap": 4.0, "sinks": np.array([0.5, -1.0, 2.0, 0.0])}
    slopes = np.random.default_rng(6).standard_normal(alibi) / 8
    grad = np.random.default_rng(7).standard_normal((*SHAPES[shape][:-1], 8))
    found = sqrtdk.attention_gradients(q, k, v, grad, alibi=slopes, **given).alibi
    assert found.shape == alibi
    for at in np.ndindex(*alibi):
        step = np.zeros(alibi)
        step[at] = 1e-5
        two = [(sqrtdk.attention(q, k, v, alibi=slopes + sign * step, **given).output * grad).sum() for sign in (1, -1)]
        np.testing.assert_allclose(found[at], (two[0] - two[1]) / 2e-5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("far", [False, True])
def test_rows_of_the_float64_fallback_keep_their_alibi_slopes(native, far):
    """Products beyond float32, and slopes whose bias passes it."""
    q, k, v = draw(8, (1, 4, 12, 4), (1, 4, 20, 4), 3, np.float32)
    slopes = SLOPES * (1e38 if far else 1.0)
    q[0, 0, 3] *= 1e30
    k[0, 0, 2] *= 1e30
    grad = np.random.default_rng(9).standard_normal((1, 4, 12, 3)).astype(np.float32)
    given = {"alibi": slopes, "causal_offset": 0}
    with backends.use("reference"):
        expected = sqrtdk.attention_gradients(*(x.astype(np.float64) for x in (q, k, v, grad)), **given)
    gradients = sqrtdk.attention_gradients(q, k, v, grad, **given)
    for name in ("value", "alibi"):
        other = getattr(expected, name)
        np.testing.assert_allclose(
            getattr(gradients, name), other, rtol=1e-4, atol=1e-4 * max(np.abs(other).max(), 1.0)
        )


def test_hidden_keys_stay_hidden_for_every_slope(backend):
    q, k, v = draw(10, (2, 9, 4), (2, 9, 4), 3)
    v[:, 5:] = np.nan
    mask = np.arange(9) < 5
    output = sqrtdk.attention(q, k, v, alibi=np.array([1e300, -3.0]), mask=mask).output
    assert np.isfinite(output[1]).all()


def test_one_head_takes_one_slope(backend):
    q, k, v = draw(11, (5, 4), (5, 4), 3)
    for slopes in (np.float64(0.5), np.array([0.5])):
        output = sqrtdk.attention(q, k, v, alibi=slopes).output
        np.testing.assert_allclose(output, sqrtdk.attention(q, k, v, mask=as_mask(0.5, 5, 5, 0)).output)


def test_wrong_slopes_are_refused():
    q, k, v = draw(12, (2, 4, 6, 8), (2, 4, 9, 8), 8)
    with pytest.raises(InvalidValueError, match="causal_offset must be given with 6 queries and 9 keys"):
        sqrtdk.attention(q, k, v, alibi=SLOPES)
    with pytest.raises(InvalidValueError, match=r"alibi must broadcast to \[..., H\] = \(2, 4\), got \(3,\)"):
        sqrtdk.attention(q, k, v, alibi=np.ones(3), causal_offset=0)
    with pytest.raises(InvalidValueError, match="alibi must be finite"):
        sqrtdk.attention(q, k, v, alibi=np.full(4, np.inf), causal_offset=0)
    with pytest.raises(InvalidTypeError, match="alibi must be floating"):
        sqrtdk.attention(q, k, v, alibi=np.ones(4, int), causal_offset=0)
    with pytest.raises(InvalidTypeError, match="alibi must be a floating tensor"):
        sqrtdk.torch.attention(*map(torch.from_numpy, (q, k, v)), alibi=SLOPES, causal_offset=0)
