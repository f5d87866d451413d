"""The kernel where numbers or visibility leave the ordinary: blind rows, odd bytes, faint tails, ties, NaN."""

import math

import numpy as np
import pytest

from crossing import cross
from levels import NATIVE
from oracle import ROW_FIELDS, draw, same
from sqrtdk import attention, backends

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(not NATIVE, reason="built without the kernel"),
]

ROWS = {"few rows": 3, "tiles": 20}


def by_reference(*arrays, **call):
    with backends.use("reference"):
        return attention(*arrays, **call)


def attend_to(logits, rows, values=None, dtype=np.float32, **call):
    """Attention whose logits are these numbers, exactly, in each of `rows` rows."""
    k = np.asarray(logits, dtype)[:, None]
    v = np.linspace(-1.0, 1.0, len(k))[:, None] if values is None else values
    return attention(np.ones((rows, 1), dtype), k, np.asarray(v, dtype), scale=1.0, **call)


def assert_statistics_equal(result, expected, names):
    for name in names:
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("scale", [1e-13, -1e-300, 1e13])
@pytest.mark.parametrize(
    "call", [{"causal_offset": -10}, {"causal_offset": -40}, {"causal_offset": 50, "window": (3, 3)}]
)
def test_rows_that_see_nothing_beside_a_scale_that_is_not_folded(call, scale):
    q, k, v = draw(1, (32, 64), (32, 64), 16, np.float32)
    call = {"causal": True, "scale": scale} | call
    expected = by_reference(q, k, v, **call)
    for _ in range(20):
        result = attention(q, k, v, **call)
    np.testing.assert_allclose(result.output, expected.output, rtol=1e-5, atol=1e-6)
    assert_statistics_equal(result.statistics, expected.statistics, ("visible_keys", "max_key"))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [None, 0, 70])
def test_visibility_may_end_at_any_key_of_a_block(rows, width):
    """Every key in turn is the last or the first that a row sees: blocks are whole, cut or left out."""
    keys, window = 150, None if width is None else (width, 0)
    for offset in range(-2, keys):
        result = attend_to(np.zeros(keys), ROWS[rows], causal=True, causal_offset=offset, window=window)
        last = np.minimum(np.arange(ROWS[rows]) + offset, keys - 1)
        first = 0 if width is None else np.maximum(np.arange(ROWS[rows]) + offset - width, 0)
        seen = np.maximum(last - first + 1, 0)
        mean = np.where(seen > 0, ((first + last) / (keys - 1) - 1.0), 0.0)  # of values from −1 to 1
        np.testing.assert_array_equal(result.statistics.visible_keys, seen, err_msg=f"offset {offset}")
        np.testing.assert_allclose(result.output[:, 0], mean, atol=2e-6, err_msg=f"offset {offset}")
        np.testing.assert_allclose(result.statistics.effective_keys, seen, rtol=1e-5, err_msg=f"offset {offset}")


@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize("true", [2, 128, 255, "any"])
def test_every_nonzero_byte_of_a_boolean_mask_is_true(queries, true):
    q, k, v = draw(2, (2, queries, 16), (2, 75, 16), 8, np.float32)
    rng = np.random.default_rng(2)
    mask = rng.random((queries, 75)) < 0.5
    byte = rng.integers(1, 256, mask.shape) if true == "any" else true
    odd = np.where(mask, byte, 0).astype(np.uint8).view(np.bool_)
    for strided in (odd, np.asfortranarray(odd), odd[:, ::-1].copy()[:, ::-1]):
        same(attention(q, k, v, mask=mask, scale="log_n"), attention(q, k, v, mask=strided, scale="log_n"))
        same(by_reference(q, k, v, mask=mask, scale="log_n"), by_reference(q, k, v, mask=strided, scale="log_n"))


def exact_tails(logits):
    """Σp, Σp², Σp³ over all keys but the largest, in float64 from the same logits."""
    x = np.asarray(logits, np.float64)
    e = np.exp(np.delete(x, x.argmax()) - x.max())
    total = 1.0 + math.fsum(e)
    return [math.fsum(e**power) / total**power for power in (1, 2, 3)]


FAINT = {
    f"{n} keys at {p:.3g}": [0.0] + [math.log(p)] * (n - 1) for n in (2, 128, 700) for p in (0.00394, 1e-6, 2**-48)
}
SPREAD = {
    f"{n} keys of spread {sigma}": np.random.default_rng(n).standard_normal(n) * sigma
    for n in (65, 300, 1500)
    for sigma in (1, 4, 12)
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", [*FAINT, *SPREAD])
def test_sums_over_the_tail_are_right_to_a_millionth(case, rows):
    logits = np.asarray({**FAINT, **SPREAD}[case], np.float32)
    result = attend_to(logits, ROWS[rows]).statistics
    for field, expected in zip(("tail_weight", "tail_p2", "tail_p3"), exact_tails(logits), strict=True):
        np.testing.assert_allclose(getattr(result, field), expected, rtol=1e-6, err_msg=field)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_bits_of_long_decoding_do_not_depend_on_the_batch_or_on_strides(heads):
    q, k, v = draw(3, (2, 5, heads, 1, 16), (2, 5, heads, 2500, 16), 8, np.float32)
    whole = attention(q, k, v)
    uneven = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v)]
    same(whole, attention(*uneven))
    one = attention(q[1, 2], k[1, 2], v[1, 2])
    assert one.output.tobytes() == whole.output[1, 2].tobytes()
    for name in ROW_FIELDS:
        np.testing.assert_array_equal(
            getattr(one.statistics, name), getattr(whole.statistics, name)[1, 2], err_msg=name
        )
    alone = attention(q[1, 2, :1], k[1, 2, :1], v[1, 2, :1])
    assert alone.output.tobytes() == whole.output[1, 2, :1].tobytes()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_near_the_largest_number_are_averaged(dtype, rows):
    values = np.linspace(0.5, 0.9, 40)[:, None] * np.finfo(dtype).max
    expected = by_reference(np.ones((1, 1)), np.zeros((40, 1)), values).output[0]
    result = attend_to(np.zeros(40), ROWS[rows], values, dtype).output
    np.testing.assert_allclose(result, np.broadcast_to(expected, result.shape), rtol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dtype", "sink"), [(np.float32, 100.0), (np.float32, 130.0), (np.float64, 720.0)])
def test_a_sink_far_above_the_logits(dtype, sink, rows):
    values = np.linspace(1.0, 2.0, 30)[:, None] * 1e30
    result = attend_to(np.linspace(0, 1, 30), ROWS[rows], values, dtype, sinks=[sink])
    # Of the sink's share nothing is missing: the weights are exp(logit − sink).
    weights = np.exp(np.linspace(0, 1, 30).astype(dtype).astype(np.float64) - sink)
    expected = np.broadcast_to(weights @ values.astype(dtype).astype(np.float64), result.output.shape)
    np.testing.assert_allclose(result.output, expected, rtol=1e-6, atol=np.finfo(dtype).smallest_subnormal)


def test_a_sink_beyond_any_weight_leaves_zeros():
    assert not attend_to(np.zeros(9), 20, sinks=[1e4]).output.any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("logits", "mean", "variance"),
    [
        ([1e308] * 5, 1e308, 0.0),
        ([-1e30] * 7, -1e30, 0.0),
        ([-1e30, -1e30 * (1 - 2**-52)], None, None),
        ([1e308, -1e308], 0.0, math.inf),
        ([3e153, -3e153] * 50, 0.0, 9e306),
    ],
)
def test_mean_and_variance_of_enormous_logits(logits, mean, variance, rows):
    if mean is None:  # an ulp apart: half of it is the deviation of both
        apart = logits[1] - logits[0]
        mean, variance = logits[0], (apart / 2) ** 2
    result = attend_to(logits, ROWS[rows], dtype=np.float64).statistics
    np.testing.assert_allclose(result.logit_mean, mean, rtol=1e-15, atol=1e290 if mean == 0.0 else 0.0)
    np.testing.assert_allclose(result.logit_variance, variance, rtol=1e-14)
    np.testing.assert_array_equal(result.score_variance, result.logit_variance)


ODD = {
    "ties": {3: 2.0, 7: 2.0, 60: 2.0},
    "one NaN": {5: math.nan},
    "NaN after the largest": {2: 9.0, 5: math.nan, 6: math.nan},
    "NaN first": {0: math.nan, 1: 5.0},
    "infinite": {4: math.inf, 9: math.inf},
    "infinite and NaN": {4: math.inf, 9: math.nan},
    "minus infinity": {0: -math.inf, 4: -math.inf},
}


@pytest.mark.parametrize("keys", [70, 2500])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("call", [{}, {"softcap": 4.0}, {"mask": True}, {"mask": 0.0}])
@pytest.mark.parametrize("case", ODD)
def test_max_key_and_maxima_of_ties_and_non_finite_logits(case, call, rows, keys):
    logits = np.zeros(keys)
    logits[keys // 2 :] = 1.0
    for at, value in ODD[case].items():
        logits[at] = value
    call = dict(call)
    if "mask" in call:  # the first keys are hidden, the row's own NaN and its ties among them or not
        mask = np.full((rows, keys), call["mask"])
        mask[:, 0] = mask[:, 4] = False if call["mask"] is True else -np.inf
        call["mask"] = mask
    result = attend_to(logits, rows, **call).statistics
    with backends.use("reference"):
        expected = attend_to(logits, rows, **call).statistics
    assert_statistics_equal(result, expected, ("visible_keys", "max_key"))
    np.testing.assert_allclose(result.max_logit, expected.max_logit, rtol=3e-7)
    np.testing.assert_allclose(result.score_max, expected.score_max, rtol=3e-7)
    for name in ("entropy", "tail_weight", "logit_mean", "logit_variance", "logsumexp", "score_variance"):
        one, other = getattr(result, name), getattr(expected, name)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other), err_msg=name)
        np.testing.assert_array_equal(np.isinf(one), np.isinf(other), err_msg=name)


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_that_sees_only_minus_infinity_names_a_visible_key(rows):
    mask = np.ones((ROWS[rows], 6), bool)
    mask[:, :2] = False
    result = attend_to([0.0, 1.0] + [-math.inf] * 4, ROWS[rows], mask=mask)
    assert (result.statistics.max_key == 2).all()
    assert np.isneginf(result.statistics.logsumexp).all()
    assert np.isnan(result.output).all()
    with backends.use("reference"):
        expected = attend_to([0.0, 1.0] + [-math.inf] * 4, ROWS[rows], mask=mask)
    assert_statistics_equal(result.statistics, expected.statistics, ("max_key", "max_logit", "score_max", "logsumexp"))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1e20, 1e25, 3e38])
def test_statistics_too_large_for_float32_leave_the_bits_of_the_output(size, rows):
    """Squared deviations overflow float32 and are taken again in float64; the output needs no second pass."""
    logits = np.linspace(-1.0, 0.0, 33) * size
    logits[5] = -4e38 if size > 1e38 else 0.0  # beyond float32: an infinity whose weight is 0 all the same
    logits[-2] = -0.3
    with np.errstate(over="ignore"):
        described = attend_to(logits, ROWS[rows])
        bare = attend_to(logits, ROWS[rows], statistics=False)
    assert described.output.tobytes() == bare.output.tobytes()


def test_a_tensor_without_an_address_is_refused(native):
    from sqrtdk import _kernel

    q, to = np.ones((1, 2, 4), np.float32), np.empty((1, 2, 4), np.float32)
    nowhere = (0, 4, (1, 2, 4), (8, 4, 1))
    with pytest.raises(ValueError, match="address"):
        _kernel.forward(native, 1, *cross(nowhere, q, q), to, None, None)


def test_unknown_codes_are_refused(native):
    from sqrtdk import _kernel

    q = np.ones((1, 2, 4), np.float32)
    to = np.empty_like(q)
    for code in (-1, 4):
        with pytest.raises(ValueError, match="dtype"):
            _kernel.forward(native, 1, *cross(q, q, q, code), to, None, None)
    with pytest.raises(ValueError, match="mask"):
        _kernel.forward(native, 1, *cross(q, q, q, 2, 6), to, None, None)
