"""`sqrtdk.attention_gradients` against central differences of `sqrtdk.attention`, and what must have no gradient."""

import math

import ml_dtypes
import numpy as np
import pytest

from sqrtdk import attention, attention_gradients, scales

STEP = 1e-5


def draw(seed, batch=(2,), heads=4, groups=2, queries=3, keys=4, d_k=3, d_v=2):
    rng = np.random.default_rng(seed)
    q = 1.5 * rng.standard_normal((*batch, heads, queries, d_k))
    k = rng.standard_normal((*batch, groups, keys, d_k))
    v = rng.standard_normal((*batch, groups, keys, d_v))
    return q, k, v, rng.standard_normal((*batch, heads, queries, d_v))


def slopes(loss, x):
    """∂loss/∂x by central differences, entry by entry; x is changed in place and restored."""
    gradients = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        kept = x[index]
        x[index] = kept + STEP
        above = loss()
        x[index] = kept - STEP
        gradients[index] = (above - loss()) / (2 * STEP)
        x[index] = kept
    return gradients


def assert_derivatives(q, k, v, grad, scale=None, **call):
    """Every gradient is the slope of Σ output·grad; the scale's where it is given as one number per row."""
    extra = {"scale": scale} | call

    def loss():
        return float((attention(q, k, v, statistics=False, **extra).output * grad).sum())

    gradients = attention_gradients(q, k, v, grad, **extra)
    for name, x in (("query", q), ("key", k), ("value", v)):
        expected = slopes(loss, x)
        np.testing.assert_allclose(getattr(gradients, name), expected, rtol=1e-6, atol=1e-8, err_msg=name)
        at_zero = isinstance(scale, np.ndarray) and not scale.any() and name != "value"
        assert (np.abs(expected).max() > 1e-3) != at_zero, name
    if isinstance(scale, np.ndarray) and scale.shape == q.shape[:-1]:
        expected = slopes(loss, scale)
        np.testing.assert_allclose(gradients.scale, expected, rtol=1e-6, atol=1e-8)
        assert np.abs(expected).max() > 1e-2
    if "sinks" in call:
        np.testing.assert_allclose(gradients.sinks, slopes(loss, call["sinks"]), rtol=1e-6, atol=1e-8)
    else:
        assert gradients.sinks is None
    return gradients


def every_row(values=None):
    return np.linspace(-1.0, 2.0, 24).reshape(2, 4, 3) if values is None else np.full((2, 4, 3), float(values))


HOLES = np.random.default_rng(0).random((2, 4, 3, 4)) < 0.7
HOLES[0, 1, 2] = False
CALLS = {
    "plain": {},
    "number": {"scale": 0.8},
    "row scales": {"scale": every_row()},
    "scale 0": {"scale": every_row(0.0)},
    "softcap": {"softcap": 1.2, "scale": every_row()},
    "softcap at scale 0": {"softcap": 1.2, "scale": every_row(0.0)},
    "sinks": {"sinks": np.array([-1.0, 0.0, 0.5, 3.0]), "scale": every_row()},
    "mask": {"mask": HOLES, "scale": every_row()},
    "additive": {"mask": np.where(HOLES, 0.3, -np.inf)},
    "causal": {"causal": True, "causal_offset": 0, "scale": every_row()},
    "window": {"window": (1, 0), "causal_offset": 1},
    "cosine": {"scale": "cosine"},
    "qk_norm": {"scale": "qk_norm"},
    "qk_norm, everything": {
        "scale": scales.QKNorm(2.0),
        "softcap": 1.5,
        "sinks": np.array([-1.0, 0.0, 0.5, 3.0]),
        "mask": HOLES,
        "causal": True,
        "causal_offset": 1,
    },
    "log_n": {"scale": "log_n", "mask": HOLES},
    "temperature": {"scale": scales.Temperature(np.array([0.5, 1.0, 2.0, 4.0])[:, None])},
    "everything": {
        "scale": every_row(),
        "softcap": 2.5,
        "sinks": np.array([-1.0, 0.0, 0.5, 1.0]),
        "mask": np.where(HOLES, 0.3, -np.inf),
        "causal": True,
        "causal_offset": 2,
        "window": (2, None),
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_numerical_derivatives(name):
    call = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in CALLS[name].items()}
    assert_derivatives(*draw(1), **call)


def test_gradients_of_one_head():
    q, k, v, grad = draw(2, batch=(), heads=1, groups=1, queries=5, keys=5)
    assert_derivatives(q[0], k[0], v[0], grad[0], causal=True)


@pytest.mark.parametrize("policy", [None, 0.7, "inverse", "mup", "log_n", "cosine", "qk_norm"])
def test_eulers_identity_ties_the_scale_to_the_query(policy):
    """Σ over a head of scale·∂loss/∂scale = ⟨q, ∂loss/∂q⟩, with the q that enters the product."""
    q, k, v, grad = draw(3, queries=5, keys=6)
    gradients = attention_gradients(q, k, v, grad, scale=policy)
    factor = {None: 3**-0.5, 0.7: 0.7, "inverse": 1 / 3, "mup": 8 / 3, "log_n": math.log(6) / math.sqrt(3)}
    factor |= {"cosine": 10.0, "qk_norm": 3**-0.5}
    pressure = factor[policy] * gradients.scale.sum(axis=(0, 2))
    if policy in ("cosine", "qk_norm"):
        q, k = scales.get(policy).prepare(q, k)
        gradients = attention_gradients(q, k, v, grad, scale=factor[policy])
        np.testing.assert_allclose(factor[policy] * gradients.scale.sum(axis=(0, 2)), pressure, rtol=1e-9)
    np.testing.assert_allclose(pressure, (q * gradients.query).sum(axis=(0, 2, 3)), rtol=1e-9)
    assert np.abs(pressure).min() > 1e-3


@pytest.mark.parametrize("policy", ["cosine", "qk_norm"])
def test_normalised_vectors_have_no_gradient_along_themselves(policy):
    q, k, v, grad = draw(4)
    gradients = attention_gradients(q, k, v, grad, scale=policy)
    np.testing.assert_allclose((q * gradients.query).sum(axis=-1), 0.0, atol=1e-8)
    np.testing.assert_allclose((k * gradients.key).sum(axis=-1), 0.0, atol=1e-8)
    assert np.abs(gradients.query).max() > 1e-2


def test_one_hot_and_constant_values_have_no_gradient():
    q, k, v, grad = draw(5)
    gradients = attention_gradients(q, k, np.ones_like(v), grad)
    np.testing.assert_allclose(gradients.query, 0.0, atol=1e-14)
    np.testing.assert_allclose(gradients.value.sum(axis=2), grad.reshape(2, 2, 2, 3, 2).sum(axis=(2, 3)), rtol=1e-12)


EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.zeros(4)},
    "cosine": {"scale": "cosine"},
    "qk_norm": {"scale": "qk_norm"},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_keys_have_no_influence_on_gradients_to_the_bit(poison, extra):
    q, k, v, grad = draw(6, queries=5, keys=6)
    mask = np.ones((5, 6), bool)
    mask[:, 4] = False
    mask[2] = False
    clean = attention_gradients(q, k, v, grad, mask=mask, **EXTRAS[extra])
    assert not clean.query[..., 2, :].any()
    assert not clean.scale[..., 2].any()
    assert not clean.key[..., 4, :].any()
    assert not clean.value[..., 4, :].any()
    dirty = [x.copy() for x in (q, k, v, grad)]
    dirty[0][..., 2, :] = dirty[3][..., 2, 1] = poison
    dirty[1][..., 4, 0] = dirty[2][..., 4, :] = poison
    gradients = attention_gradients(*dirty, mask=mask, **EXTRAS[extra])
    for name, one, other in zip(clean._fields, clean, gradients, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_a_visible_nan_reaches_the_gradients_of_its_rows_only():
    q, k, v, grad = draw(7, groups=4, queries=5, keys=5)
    clean = attention_gradients(q, k, v, grad, causal=True)
    q[1, 2, 3, 0] = np.nan
    gradients = attention_gradients(q, k, v, grad, causal=True)
    assert np.isnan(gradients.query[1, 2, 3]).all()
    assert np.isnan(gradients.key[1, 2, :4]).all()
    assert np.isnan(gradients.scale[1, 2, 3])
    np.testing.assert_array_equal(gradients.key[1, 2, 4], clean.key[1, 2, 4])
    np.testing.assert_array_equal(np.delete(gradients.query[1, 2], 3, axis=0), np.delete(clean.query[1, 2], 3, axis=0))
    np.testing.assert_array_equal(gradients.key[0], clean.key[0])


def test_nothing_to_see_gives_zero_gradients():
    for keys in (0, 4):
        q, k, v, grad = draw(8, keys=keys)
        gradients = attention_gradients(q, k, v, grad, mask=np.zeros(keys, bool), sinks=np.ones(4), softcap=3.0)
        assert not any(part.any() for part in gradients if part is not None)
        assert (gradients.query.shape, gradients.key.shape, gradients.value.shape) == (q.shape, k.shape, v.shape)
        assert (gradients.scale.shape, gradients.sinks.shape) == ((2, 4, 3), (4,))


@pytest.mark.parametrize("sizes", [{"batch": (0,)}, {"queries": 0}, {"d_v": 0}])
def test_empty_calls_have_gradients_of_the_right_shape(sizes):
    q, k, v, grad = draw(9, **sizes)
    gradients = attention_gradients(q, k, v, grad)
    assert (gradients.query.shape, gradients.key.shape, gradients.value.shape) == (q.shape, k.shape, v.shape)
    assert not any(part.any() for part in gradients[:4])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_gradients_come_in_the_callers_dtype(dtype):
    narrow = [x.astype(dtype) for x in draw(10)]
    gradients = attention_gradients(*narrow, causal=True, causal_offset=1)
    exact = attention_gradients(*(x.astype(np.float64) for x in narrow), causal=True, causal_offset=1)
    unit = float(ml_dtypes.finfo(dtype).eps)
    for name in ("query", "key", "value"):
        assert getattr(gradients, name).dtype == dtype
        np.testing.assert_allclose(
            getattr(gradients, name).astype(np.float64), getattr(exact, name), rtol=0.51 * unit + 2e-6, atol=1e-6
        )
    assert gradients.scale.dtype == np.float64
    np.testing.assert_allclose(gradients.scale, exact.scale, rtol=1e-5, atol=1e-5)  # the kernel works in float32


def test_strides_do_not_change_a_bit_and_inputs_stay():
    arrays = draw(11, queries=19, keys=23, d_k=16, d_v=9)
    before = [x.copy() for x in arrays]
    for policy in (None, "qk_norm"):
        plain = attention_gradients(*arrays, scale=policy)
        turned = [np.ascontiguousarray(np.swapaxes(x, -1, -2)).swapaxes(-1, -2) for x in arrays]
        for x in turned:
            x.setflags(write=False)
        for one, other in zip(plain[:4], attention_gradients(*turned, scale=policy)[:4], strict=True):
            np.testing.assert_array_equal(one, other)
    for one, other in zip(before, arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_large_finite_inputs_and_strict_settings_give_finite_gradients():
    q, k, v, grad = (x.astype(np.float32) for x in draw(12))
    with np.errstate(all="raise"):
        gradients = attention_gradients(q * np.float32(1e30), k, v, grad, scale=1e-30, softcap=5.0)
    assert all(np.isfinite(part).all() for part in gradients[:3])
    np.testing.assert_allclose(gradients.key, attention_gradients(q, k, v, grad, scale=1.0, softcap=5.0).key, rtol=1e-4)
