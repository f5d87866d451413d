"""The textbook operation against arbitrary precision, and the row-wise reference it defines."""

import math

import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import FEATURES, draw
from sqrtdk import (
    SqrtdkError,
    attention,
    attention_gradients,
    backends,
    scaled_dot_product_attention,
    softmax,
)
from sqrtdk.operation.arguments import validate
from sqrtdk.operation.engines import reference
from sqrtdk.operation.engines.reference import Rows, attend, differentiate


def exact_softmax(x):
    with mpmath.workdps(60):
        top = max(x)
        e = [mpmath.exp(mpmath.mpf(float(value)) - mpmath.mpf(float(top))) for value in x]
        total = mpmath.fsum(e)
        return [float(value / total) for value in e]


ADVERSARIES = [
    [0.0],
    [1000.0, 1000.0],
    [-1e300, 1e300, 1e300],
    [1e16, 1e16 + 2, 1e16 + 4],
    [0.0, -745.0, -700.0, -1.0],
    [60.0, 0.0, 0.0],
    [25.0, *[0.0] * 50],
    list(np.linspace(-50, 50, 31)),
    [5e-324, 0.0, -5e-324],
    [np.finfo(np.float64).max, -np.finfo(np.float64).max],
    [9.2, -3.1, 8.8, -5.4, 1.2],
]


@pytest.mark.parametrize("row", ADVERSARIES, ids=range(len(ADVERSARIES)))
def test_softmax_is_that_of_arbitrary_precision(row):
    np.testing.assert_allclose(softmax(row), exact_softmax(row), rtol=1e-13, atol=1e-320)


def test_softmax_of_nothing_visible_or_nothing_at_all():
    np.testing.assert_array_equal(softmax([-np.inf, -np.inf]), [0.0, 0.0])
    np.testing.assert_array_equal(softmax([-np.inf, 3.0]), [0.0, 1.0])
    assert softmax(np.zeros((3, 0))).shape == (3, 0)
    assert softmax(np.zeros((0, 3))).shape == (0, 3)
    assert np.isnan(softmax([np.nan, 1.0])).all()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_along_an_axis_sums_to_one(axis):
    x = np.random.default_rng(0).standard_normal((3, 4, 5))
    p = softmax(x, axis=axis)
    np.testing.assert_allclose(p.sum(axis=axis), 1.0, rtol=1e-14)
    np.testing.assert_allclose(p, np.exp(x) / np.exp(x).sum(axis=axis, keepdims=True), rtol=1e-14)


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [
        ("int64", "float64"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("bfloat16", "float32"),
    ],
)
def test_softmax_computes_in_float32_or_better(given_dtype, dtype):
    x = np.array([1, 2, 3]).astype(ml_dtypes.bfloat16 if given_dtype == "bfloat16" else given_dtype)
    assert softmax(x).dtype == dtype
    np.testing.assert_allclose(softmax(x), exact_softmax([1, 2, 3]), rtol=1e-6)


def test_softmax_of_the_largest_float32_numbers():
    top = np.finfo(np.float32).max
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(softmax(np.float32([top, -top, top])), np.float32([0.5, 0.0, 0.5]))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(x=st.lists(st.floats(-700, 700), min_size=1, max_size=20), shift=st.floats(-500, 500))
def test_softmax_ignores_shifts_but_not_scales(x, shift):
    np.testing.assert_allclose(softmax(np.array(x) + shift), softmax(x), rtol=1e-9, atol=1e-12)
    if 0.1 < max(x) - min(x) < 5:
        assert np.abs(softmax(2 * np.array(x)) - softmax(x)).max() > 1e-4


def test_the_textbook_by_hand():
    """softmax([14, 10, 12]/8) of the text: dₖ = 64, scores 14, 10, 12."""
    Q = np.zeros((1, 64))
    Q[0, 0] = 1.0
    K = np.zeros((3, 64))
    K[:, 0] = [14.0, 10.0, 12.0]
    output, weights = scaled_dot_product_attention(Q, K, np.eye(3))
    np.testing.assert_allclose(weights[0], [0.4191, 0.2542, 0.3264], atol=2e-4)
    np.testing.assert_array_equal(output, weights)
    _, unscaled = scaled_dot_product_attention(Q, K, np.eye(3), scale=1.0)
    np.testing.assert_allclose(unscaled[0], [0.8668, 0.0159, 0.1173], atol=2e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_textbook_is_that_of_arbitrary_precision(seed):
    rng = np.random.default_rng(seed)
    Q, K, V = 20 * rng.standard_normal((3, 16)), rng.standard_normal((5, 16)), rng.standard_normal((5, 2))
    output, weights = scaled_dot_product_attention(Q, K, V)
    with mpmath.workdps(40):
        for i in range(3):
            scores = [mpmath.fdot(map(float, Q[i]), map(float, K[j])) / mpmath.sqrt(16) for j in range(5)]
            e = [mpmath.exp(x) for x in scores]
            p = [x / mpmath.fsum(e) for x in e]
            np.testing.assert_allclose(weights[i], [float(x) for x in p], rtol=1e-12)
            np.testing.assert_allclose(
                output[i], [float(mpmath.fdot(p, map(float, V[:, c]))) for c in range(2)], rtol=1e-10, atol=1e-13
            )


def test_the_textbook_broadcasts_and_keeps_the_dtype():
    rng = np.random.default_rng(0)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        Q, K, V = (rng.standard_normal(s).astype(dtype) for s in [(2, 3, 4, 5), (3, 6, 5), (6, 2)])
        output, weights = scaled_dot_product_attention(Q, K, V)
        assert (output.shape, weights.shape) == ((2, 3, 4, 2), (2, 3, 4, 6))
        assert output.dtype == weights.dtype == dtype
        np.testing.assert_allclose(weights.astype(float).sum(axis=-1), 1.0, atol=0.02)
    assert scaled_dot_product_attention([[1, 0]], [[1, 0], [0, 1]], [[2], [4]])[0].dtype == np.float64
    big = np.float32(1e30) * np.eye(2, dtype=np.float32)
    np.testing.assert_array_equal(scaled_dot_product_attention(big, big, np.eye(2, dtype=np.float32))[0], np.eye(2))


def test_the_textbooks_mask_hides_even_nan():
    Q, K, V = np.random.default_rng(1).standard_normal((3, 4, 4))
    mask = np.tril(np.ones((4, 4), bool))
    mask[0] = False
    clean = scaled_dot_product_attention(Q, K, V, mask)
    K[3], V[3] = np.inf, np.nan
    output, weights = scaled_dot_product_attention(Q, K, V, mask)
    assert not output[0].any()
    assert not weights[0].any()
    np.testing.assert_array_equal(output[:3], clean[0][:3])
    assert np.isnan(output[3]).all()


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"K": np.ones((3, 5))}, ValueError, r"with the same D and S, got \(2, 4\), \(3, 5\), \(3, 2\)"),
        ({"V": np.ones((2, 2))}, ValueError, r"with the same D and S, got \(2, 4\), \(3, 4\), \(2, 2\)"),
        ({"Q": np.ones(4)}, ValueError, r"must have shapes .* got \(4,\)"),
        ({"mask": np.zeros((2, 3))}, TypeError, r"mask must be boolean \(True: may attend\), got float64"),
        ({"mask": np.ones((3, 3), bool)}, ValueError, r"mask must broadcast to .* \(2, 3\), got \(3, 3\)"),
        ({"scale": math.nan}, ValueError, r"scale must be finite, got nan"),
        (
            {"Q": np.ones((2, 2, 4)), "K": np.ones((3, 3, 4))},
            ValueError,
            r"leading axes that broadcast, got \(2, 2, 4\)",
        ),
    ],
)
def test_the_textbook_refuses_shapes_that_do_not_fit(change, kind, text):
    call = {"Q": np.ones((2, 4)), "K": np.ones((3, 4)), "V": np.ones((3, 2))} | change
    with pytest.raises(SqrtdkError, match=text) as raised:
        scaled_dot_product_attention(**call)
    assert isinstance(raised.value, kind)


def test_rows_without_a_batch_attend_and_differentiate():
    """The reference itself works on bare rows; ∂loss/∂v is the weights, as the output is linear in v."""
    rng = np.random.default_rng(2)
    rows = Rows(
        q=rng.standard_normal((2, 3)),
        k=rng.standard_normal((4, 3)),
        v=rng.standard_normal((4, 2)),
        scale=np.full((2, 1), 0.5),
        visible=np.ones((2, 4), bool),
    )
    result = attend(rows)
    expected = exact_softmax([0.5 * math.fsum(rows.q[0] * rows.k[j]) for j in range(4)])
    np.testing.assert_allclose(result.weights[0], expected, rtol=1e-13)
    np.testing.assert_allclose(result.output[0], expected @ rows.v, rtol=1e-12)
    assert attend(rows, statistics=False).statistics is None
    grad = np.array([[1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(differentiate(rows, grad).value[:, 0], expected, rtol=1e-13)
    assert not differentiate(rows, grad).value[:, 1].any()


class TestTiles:
    """Only the reference cuts its rows into tiles of this kind: the kernel has loops of its own."""

    @pytest.mark.parametrize("block", [1, 7, 40])
    @pytest.mark.parametrize("feature", FEATURES)
    def test_tiles_of_any_size_give_the_same(self, feature, block, monkeypatch):
        q, k, v = draw(10, (2, 4, 5, 3), (2, 2, 6, 3), 2)
        with backends.use("reference"):
            whole = attention(q, k, v, weights=True, **FEATURES[feature])
            slopes = attention_gradients(q, k, v, whole.output, **FEATURES[feature])
            monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
            split = attention(q, k, v, weights=True, **FEATURES[feature])
            np.testing.assert_allclose(split.output, whole.output, rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(split.weights, whole.weights, rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(split.statistics.entropy, whole.statistics.entropy, rtol=1e-12)
            again = attention_gradients(q, k, v, whole.output, **FEATURES[feature])
            for one, other in zip(again, slopes, strict=True):
                if one is not None:
                    np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)

    @pytest.mark.parametrize("block", [1, 6, 13, 30, 61, 130, 200])
    def test_tiles_really_split_and_cover_every_row_once(self, block, monkeypatch):
        monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
        q, k, v = draw(11, (3, 4, 5, 3), (3, 2, 6, 3), 2)
        tiles = reference.Tiles(validate(q, k, v, None, None, False, None, None, None, None))
        seen = np.zeros(tiles.shape, int)
        cut = list(tiles)
        for tile in cut:
            seen[tile] += 1
        assert (seen == 1).all()
        assert len(cut) >= 360 // max(block, 12)
