"""Gradients at any size of the logits: weights that add up to 1, and zeros where the truth is zero, on every level."""

import ml_dtypes
import numpy as np
import pytest

import sqrtdk
from oracle import DTYPES

UNIT = {name: float(ml_dtypes.finfo(dtype).eps) / 2 for name, dtype in DTYPES.items()}
# What the weights of few rows may be off by in float64; others are rounded alone.
ADDS_UP = 2.0**-40
# Fewer than eight rows of a head have a loop of their own.
ROWS = {"few rows": 4, "one tile": 9, "two tiles": 70}
# Sizes of q and of k: of their products rounding leaves nothing, or not even a number of float32.
SIZES = {"float16": (1.0, 30.0, 3e3), "bfloat16": (1.0, 1e4, 1e18, 1e30), "float32": (1.0, 1e4, 1e18, 1e30)}
SIZES["float64"] = (1.0, 1e7, 1e9, 1e60, 1e150)


def draw(dtype, queries, keys, size=1.0, d_k=16, seed=0):
    """q, k, v and a gradient of the output, of two heads."""
    rng = np.random.default_rng(seed)
    shapes = ((queries, d_k), (keys, d_k), (keys, 5), (queries, 5))
    numbers = [rng.standard_normal((2, *shape)) for shape in shapes]
    numbers[0] *= size
    numbers[1] *= size
    return [x.astype(DTYPES[dtype]) for x in numbers]


def assert_weights_add_up(dtype, q, k, v, grad, **call):
    """Σ over keys of ∂loss/∂v is Σ over rows of ∂loss/∂output, if the weights of every row add up to 1."""
    value = sqrtdk.attention_gradients(q, k, v, grad, **call).value.astype(np.float64)
    given = grad.astype(np.float64)
    size = np.abs(value).sum(-2) + np.abs(given).sum(-2)
    assert (np.abs(value.sum(-2) - given.sum(-2)) <= (16 * UNIT[dtype] + ADDS_UP) * size).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes])
def test_weights_add_up_to_one(backend, dtype, size, rows):
    for keys in (2, 20, 130):
        assert_weights_add_up(dtype, *draw(dtype, ROWS[rows], keys, size), scale=1.0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("extra", ["soft cap", "bias", "large values"])
def test_weights_add_up_to_one_beside_soft_caps_biases_and_large_values(backend, dtype, rows, extra):
    """None of these is rounded otherwise in the backward pass. Values near the largest number overflow on the way: the
    forward pass takes such rows in float64, whose logits are not those of a tile."""
    q, k, v, grad = draw(dtype, ROWS[rows], 20, 1e3, seed=1)
    call = {}
    if extra == "soft cap":
        call["softcap"] = 20000001.3  # its inverse in float32 is not that of what float32 makes of it
    elif extra == "bias":
        call["mask"] = 1e9 * np.random.default_rng(2).standard_normal((ROWS[rows], 20))
    else:
        k[:] = k[:, :1]
        v[:] = 0.9 * float(ml_dtypes.finfo(v.dtype).max)
        grad *= 1e-4
    assert_weights_add_up(dtype, q, k, v, grad, scale=1.0, **call)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lone", ["one key", "one visible key", "one key far above the other"])
def test_a_key_with_all_the_weight_has_no_gradient_but_its_value_s(backend, dtype, rows, lone):
    q, k, v, grad = draw(dtype, ROWS[rows], 1 if lone == "one key" else 2, d_k=64)
    call = {}
    if lone == "one visible key":
        call = {"mask": np.arange(ROWS[rows])[:, None] % 2 == np.arange(2)}
    elif lone == "one key far above the other":
        q, k = np.abs(q), np.sign(np.arange(2) - 0.5).astype(q.dtype)[:, None] * np.abs(k)
        call = {"scale": 1e3}
    gradients = sqrtdk.attention_gradients(q, k, v, grad, **call)
    for name in ("query", "key", "scale"):
        assert not np.asarray(getattr(gradients, name), np.float64).any(), name
    given = gradients.value.astype(np.float64).sum(-2)
    np.testing.assert_allclose(given, grad.astype(np.float64).sum(-2), rtol=0, atol=2e2 * UNIT[dtype] + 10 * ADDS_UP)


@pytest.mark.parametrize("rows", ROWS)
def test_a_faint_key_with_a_large_value_keeps_its_gradient(backend, rows):
    """The other key's weight rounds to 1, and its score has a gradient all the same: 1e-8 of a value of 1e9."""
    q, k, v, grad = draw("float32", ROWS[rows], 2)
    q[...], k[...] = 1.0, 0.0
    k[:, 1] = -18.4 / 16
    v[:, 1] *= 1e9
    call = {"scale": 1.0}
    one, other = (
        sqrtdk.attention_gradients(*(x.astype(dtype) for x in (q, k, v, grad)), **call)
        for dtype in (np.float32, np.float64)
    )
    for name in ("query", "key", "value", "scale"):
        expected = getattr(other, name)
        np.testing.assert_allclose(getattr(one, name), expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert np.abs(other.key).max() > 1.0


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hides", [False, True])
def test_a_soft_cap_does_not_hide_that_a_score_passed_float32_on_the_way(backend, rows, hides):
    """3e40 − 3.5e40 is positive in float32: infinite, then what a finite number leaves of that."""
    signs = np.array([[1.0], [-1.0], [0.0]])
    k = np.concatenate([3e20 * signs, -3.5e20 * signs], axis=1).astype(np.float32)[None]
    q = np.full((1, ROWS[rows], 2), 1e20, np.float32)
    v, grad = draw("float32", ROWS[rows], 3)[2:]
    mask = np.array([False, False, True]) if hides else None
    arrays = [q, k, v[:1], grad[:1]]
    call = {"scale": 1.0, "softcap": 2.0, "mask": mask}
    output = sqrtdk.attention(*arrays[:3], **call).output
    gradients = sqrtdk.attention_gradients(*arrays, **call)
    wide = [x.astype(np.float64) for x in arrays]
    np.testing.assert_allclose(output, sqrtdk.attention(*wide[:3], **call).output, rtol=1e-6)
    expected = sqrtdk.attention_gradients(*wide, **call)
    np.testing.assert_allclose(gradients.value, expected.value, rtol=1e-5, atol=1e-7)
    bare = sqrtdk.attention(q, k * 0 + 1 if hides else k, v[:1], **call).output
    assert not hides or output.tobytes() == bare.tobytes()  # what is hidden decides nothing


def test_rows_beside_a_lone_key_keep_their_gradients(backend):
    q, k, v, grad = draw("float32", 70, 70)
    q[:, 3] *= 1e4
    one = sqrtdk.attention_gradients(q, k, v, grad, causal=True)
    other = sqrtdk.attention_gradients(*(x.astype(np.float64) for x in (q, k, v, grad)), causal=True)
    assert not one.query[:, 0].any()
    for name in ("query", "key", "value"):
        expected = getattr(other, name)
        np.testing.assert_allclose(getattr(one, name), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("keys", [2, 5, 64, 300])
@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
def test_the_scale_s_gradient_in_bfloat16_is_within_its_stated_tolerance(native, keys, size):
    """2⁻⁸ of Σ|∂score·(q·k)| for the slopes and of Σp|∂p|·Σp|q·k| for the weights, both rounded to bfloat16
    (kernel/README.md). A row whose terms nearly cancel may be off by a fifth of what is left, and more."""
    worst = 0.0
    for seed in range(20):
        q, k, v, grad = draw("bfloat16", 40, keys, size, seed=seed)
        scale = sqrtdk.attention_gradients(q, k, v, grad).scale
        wide = [x.astype(np.float64) for x in (q, k, v, grad)]
        products, reach = wide[0] @ wide[1].mT, np.abs(wide[0]) @ np.abs(wide[1]).mT
        weights = sqrtdk.softmax(products / 4.0)
        to_weights = wide[3] @ wide[2].mT
        to_scores = weights * (to_weights - (weights * to_weights).sum(-1, keepdims=True))
        expected = (to_scores * products).sum(-1)
        by_slopes = (np.abs(to_scores) * np.abs(products)).sum(-1)
        by_weights = (weights * np.abs(to_weights)).sum(-1) * (weights * np.abs(products)).sum(-1)
        tolerance = 2.0**-8 * (by_slopes + by_weights) + 1e-5 * (np.abs(to_scores) * reach).sum(-1)
        assert (np.abs(scale - expected) <= tolerance).all()
        worst = max(worst, (np.abs(scale - expected) / tolerance).max())
    # It says something: where pairs are multiplied and few keys leave no errors to cancel, some row comes near it.
    assert worst > 0.25 or keys > 5 or native != "avx512_bf16"
