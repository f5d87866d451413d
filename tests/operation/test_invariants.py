"""Invariants of `sqrtdk.attention`: strides, hidden numbers, order and shifts must not matter, and others must."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import DTYPES, draw, same
from sqrtdk import attention, scaled_dot_product_attention, scales

pytestmark = pytest.mark.usefixtures("backend")


def transposed(x):
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)).swapaxes(-1, -2)


def reversed_in_memory(x):
    return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]


def every_other(x):
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def misaligned(x):
    raw = np.zeros(x.nbytes + 1, dtype=np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def read_only(x):
    x = x.copy()
    x.setflags(write=False)
    return x


def heads_last(x):
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, 2)), 2, 1)


@pytest.mark.parametrize("lay_out", [transposed, reversed_in_memory, every_other, misaligned, read_only, heads_last])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_change_a_bit(lay_out, dtype):
    q, k, v = draw(13, (2, 4, 37, 24), (2, 2, 41, 24), 17, DTYPES[dtype])
    mask = np.random.default_rng(13).random((2, 4, 37, 41)) < 0.9
    plain = attention(q, k, v, mask=mask)
    same(plain, attention(lay_out(q), lay_out(k), lay_out(v), mask=lay_out(mask)))


def test_broadcast_inputs_are_what_they_look_like():
    q, k, v = draw(14, (1, 1, 5, 4), (1, 1, 6, 4), 3)
    wide = [np.broadcast_to(x, (3, 2, *x.shape[2:])) for x in (q, k, v)]
    same(attention(*wide), attention(*(x.copy() for x in wide)))


def test_bits_do_not_depend_on_batch_or_statistics():
    q, k, v = draw(15, (3, 4, 19, 16), (3, 2, 23, 16), 5)
    whole = attention(q, k, v)
    np.testing.assert_array_equal(whole.output, attention(q, k, v, statistics=False, weights=True).output)
    for n in range(3):
        np.testing.assert_array_equal(whole.output[n], attention(q[n], k[n], v[n]).output)
    assert attention(q, k, v, statistics=False).statistics is None
    assert whole.weights is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [3, 70])
def test_statistics_without_values_are_those_with_values_to_the_bit(queries, dtype):
    q, k, v = draw(17, (2, 4, queries, 24), (2, 2, 150, 24), 17, DTYPES[dtype])
    mask = np.random.default_rng(17).random((2, 4, queries, 150)) < 0.9
    whole, bare = attention(q, k, v, mask=mask), attention(q, k, v[..., :0], mask=mask)
    assert bare.output.shape == (2, 4, queries, 0)
    same(whole._replace(output=whole.output[..., :0]), bare)


def test_inputs_are_never_modified():
    q, k, v = draw(16, (2, 3, 4), (2, 3, 4), 4)
    mask = np.where(np.eye(3) > 0, -np.inf, 0.0)
    extra = {"scale": np.ones((2, 3)), "sinks": np.ones(2), "mask": mask}
    for scale in (extra["scale"], "cosine", "qk_norm", "log_n"):
        before = [x.copy() for x in (q, k, v, mask, extra["sinks"])]
        attention(q, k, v, **extra | {"scale": scale}, causal=True, softcap=2.0)
        for one, other in zip(before, (q, k, v, mask, extra["sinks"]), strict=True):
            np.testing.assert_array_equal(one, other)


NOT_FINITE = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("poison", NOT_FINITE)
@pytest.mark.parametrize("scale", [None, 0.0, "cosine", "qk_norm", "log_n"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_masked_keys_have_no_influence_to_the_bit(poison, scale, softcap):
    q, k, v = draw(17, (2, 4, 9, 5), (2, 2, 11, 5), 3)
    mask = np.ones((9, 11), bool)
    mask[:, [2, 10]] = False
    mask[4] = False
    clean = attention(q, k, v, mask=mask, scale=scale, softcap=softcap, weights=True)
    for name, dirty in (("k", k.copy()), ("v", v.copy())):
        dirty[..., [2, 10], 1] = poison
        call = (q, dirty, v) if name == "k" else (q, k, dirty)
        same(clean, attention(*call, mask=mask, scale=scale, softcap=softcap, weights=True))
        additive = np.where(mask, 0.0, -np.inf)
        result = attention(*call, mask=additive, scale=scale, softcap=softcap, weights=True)
        np.testing.assert_array_equal(result.output, clean.output)
    blind = q.copy()
    blind[..., 4, :] = poison
    same(clean, attention(blind, k, v, mask=mask, scale=scale, softcap=softcap, weights=True))
    assert not clean.output[..., 4, :].any()


@pytest.mark.parametrize("poison", NOT_FINITE)
def test_keys_hidden_by_causality_or_windows_have_no_influence(poison):
    q, k, v = draw(18, (2, 6, 5), (2, 6, 5), 3)
    for hidden, call in ((5, {"causal": True, "causal_offset": -1}), (0, {"window": (0, None), "causal_offset": 1})):
        clean = attention(q, k, v, **call)
        dirty_k, dirty_v = k.copy(), v.copy()
        dirty_k[:, hidden] = dirty_v[:, hidden] = poison
        same(clean, attention(q, dirty_k, dirty_v, **call))


@pytest.mark.parametrize("where", ["q", "k", "v", "mask"])
def test_a_visible_nan_reaches_its_rows_and_only_those(where):
    q, k, v = draw(19, (2, 6, 5), (2, 6, 5), 3)
    bias = np.zeros((2, 6, 6))
    clean = attention(q, k, v, mask=bias, causal=True)
    {"q": q, "k": k, "v": v}.get(where, bias)[1, 3] = np.nan
    result = attention(q, k, v, mask=bias, causal=True)
    hit = np.zeros((2, 6), bool)
    hit[1, 3] = True
    if where in ("k", "v"):
        hit[1, 3:] = True
    assert np.isnan(result.output[hit]).all()
    np.testing.assert_array_equal(result.output[~hit], clean.output[~hit])
    if where != "v":
        for name in ("entropy", "max_logit", "logsumexp", "sum_p2", "jacobian_trace", "logit_variance", "max_weight"):
            assert np.isnan(getattr(result.statistics, name)[hit]).all(), name
            np.testing.assert_array_equal(getattr(result.statistics, name)[~hit], getattr(clean.statistics, name)[~hit])


def test_a_nan_in_one_component_of_a_value_stays_in_it():
    q, k, v = draw(20, (4, 5), (6, 5), 3)
    clean = attention(q, k, v).output
    v[2, 1] = np.nan
    result = attention(q, k, v).output
    assert np.isnan(result[:, 1]).all()
    np.testing.assert_allclose(result[:, [0, 2]], clean[:, [0, 2]], rtol=1e-13)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_logits_are_never_taken_for_an_answer(value):
    result = attention(np.ones((1, 2)), np.full((3, 2), value), np.ones((3, 2)))
    assert np.isnan(result.output).all()
    assert np.isnan(result.statistics.entropy).all()


def test_a_visible_key_of_logit_minus_infinity_gets_no_weight():
    q, k, v = draw(21, (4, 1), (6, 1), 3)
    q, k[5] = np.abs(q), -np.inf
    np.testing.assert_allclose(attention(q, k, v).output, attention(q, k[:5], v[:5]).output, rtol=1e-14)


@pytest.mark.parametrize(
    "extra", [{}, {"causal": True}, {"softcap": 30.0}, {"sinks": np.zeros(2)}, {"scale": "cosine"}]
)
def test_a_row_that_sees_nothing_gives_zeros(extra):
    q, k, v = draw(22, (2, 4, 3), (2, 4, 3), 5)
    mask = np.array([True, False, True, False])[:, None]
    result = attention(q, k, v, mask=mask, weights=True, **extra)
    assert not result.output[:, [1, 3]].any()
    assert not result.weights[:, [1, 3]].any()
    assert result.output[:, [0, 2]].all()
    np.testing.assert_array_equal(result.statistics.sink_weight[:, 1], 1.0 if "sinks" in extra else 0.0)


def test_finite_1e30_in_float32_gives_the_right_finite_answer():
    q, k, v = draw(23, (2, 5, 8), (2, 7, 8), 3, np.float32)
    big = np.float32(1e30)
    result = attention(q * big, k * big, v * big)
    winner = np.einsum("hld,hsd->hls", q.astype(np.float64), k.astype(np.float64)).argmax(axis=-1)
    np.testing.assert_array_equal(result.output, np.take_along_axis(v * big, winner[..., None], axis=-2))
    np.testing.assert_array_equal(result.statistics.max_key, winner)
    assert np.isfinite(result.statistics.logit_variance).all()
    np.testing.assert_allclose(
        attention(q * big, k * big, v, scale=1e-60).output, attention(q, k, v, scale=1.0).output, rtol=1e-5, atol=1e-6
    )


def test_the_callers_floating_point_settings_do_not_matter():
    q, k, v = draw(24, (2, 5, 8), (2, 7, 8), 3, np.float16, sharpness=200.0)
    v[:, 0] = 1e-7
    with np.errstate(all="raise"):
        strict = attention(q, k, v, weights=True)
        assert np.geterr()["over"] == "raise"
    same(strict, attention(q, k, v, weights=True))


def test_scores_and_logits_are_distinguishable():
    q, k, v = draw(25, (2, 5, 8), (2, 7, 8), 3)
    capped = attention(q, k, v, softcap=0.5).statistics
    plain = attention(q, k, v).statistics
    np.testing.assert_allclose(capped.score_max, plain.max_logit, rtol=1e-15)
    np.testing.assert_allclose(capped.score_variance, plain.logit_variance, rtol=1e-14)
    assert (capped.max_logit <= 0.5).all()
    np.testing.assert_array_equal(plain.score_variance, plain.logit_variance)


def test_the_textbook_gives_the_same():
    q, k, v = draw(26, (2, 5, 8), (2, 7, 8), 3)
    mask = np.random.default_rng(26).random((5, 7)) < 0.7
    result = attention(q, k, v, mask=mask, weights=True)
    output, weights = scaled_dot_product_attention(q, k, v, mask)
    np.testing.assert_allclose(result.output, output, rtol=1e-12)
    np.testing.assert_allclose(result.weights, weights, rtol=1e-12)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(seed=st.integers(0, 2**16), shift=st.floats(-1e3, 1e3), heads=st.integers(1, 3), keys=st.integers(1, 9))
def test_softmax_ignores_shifts(seed, shift, heads, keys):
    q, k, v = draw(seed, (heads, 4, 5), (heads, keys, 5), 3)
    bias = np.random.default_rng(seed).standard_normal((heads, 4, keys))
    result = attention(q, k, v, mask=bias)
    shifted = attention(q, k, v, mask=bias + shift)
    np.testing.assert_allclose(shifted.output, result.output, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(shifted.statistics.entropy, result.statistics.entropy, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(shifted.statistics.logsumexp, result.statistics.logsumexp + shift, rtol=1e-9, atol=1e-10)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 2**16), factor=st.floats(0.125, 8.0), policy=st.sampled_from([None, 0.3, "inverse", "log_n"])
)
def test_scaling_q_is_scaling_k_and_not_nothing(seed, factor, policy):
    q, k, v = draw(seed, (2, 4, 5), (2, 6, 5), 3)
    by_q = attention(factor * q, k, v, scale=policy, weights=True)
    np.testing.assert_allclose(
        by_q.weights, attention(q, factor * k, v, scale=policy, weights=True).weights, atol=1e-12
    )
    if not 0.9 < factor < 1.1:
        assert np.abs(by_q.weights - attention(q, k, v, scale=policy, weights=True).weights).max() > 1e-3


@settings(deadline=None, max_examples=40, derandomize=True)
@given(seed=st.integers(0, 2**16), factor=st.floats(0.05, 20.0))
def test_the_scale_is_applied_exactly_once(seed, factor):
    q, k, v = draw(seed, (2, 4, 5), (2, 6, 5), 3)
    by_scale = attention(q, k, v, scale=factor)
    np.testing.assert_allclose(by_scale.output, attention(factor * q, k, v, scale=1.0).output, atol=1e-12)
    np.testing.assert_allclose(
        by_scale.statistics.max_logit, factor * attention(q, k, v, scale=1.0).statistics.max_logit
    )
    if not 0.9 < factor < 1.1:
        assert np.abs(by_scale.output - attention(q, k, v, scale=1.0).output).max() > 1e-4


@settings(deadline=None, max_examples=40, derandomize=True)
@given(seed=st.integers(0, 2**16), keys=st.integers(1, 12))
def test_the_order_of_keys_does_not_matter(seed, keys):
    q, k, v = draw(seed, (2, 4, 5), (2, keys, 5), 3)
    mask = np.random.default_rng(seed).random((2, 4, keys)) < 0.7
    order = np.random.default_rng(seed).permutation(keys)
    result = attention(q, k, v, mask=mask, weights=True)
    moved = attention(q, k[:, order], v[:, order], mask=mask[..., order], weights=True)
    np.testing.assert_allclose(moved.output, result.output, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(moved.weights, result.weights[..., order], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(moved.statistics.entropy, result.statistics.entropy, rtol=1e-10, atol=1e-13)
    seen = result.statistics.visible_keys > 0
    np.testing.assert_array_equal(order[moved.statistics.max_key][seen], result.statistics.max_key[seen])


@pytest.mark.slow
def test_no_matrix_of_all_logits_is_ever_held():
    length = 8192
    q, k, v = draw(27, (1, length, 16), (1, length, 16), 16, np.float32)
    tracemalloc.start()
    try:
        attention(q, k, v, causal=True, scale=scales.LogN())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20  # all logits in float64 would be 512 MiB
