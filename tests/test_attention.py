"""`sqrtdk.attention` against its definition written out: shapes, masks, features, dtypes, and what must not matter."""

import itertools
import math
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sqrtdk.call
from oracle import ROW_FIELDS, attention_by_definition
from sqrtdk import attention, scaled_dot_product_attention, scales

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def draw(seed, q_shape, k_shape, d_v, dtype=np.float64, sharpness=2.0):
    """q, k, v of a call with sharp attention: in a near-uniform one a wrong scale would be invisible."""
    rng = np.random.default_rng(seed)
    q = sharpness * rng.standard_normal(q_shape)
    k = rng.standard_normal(k_shape)
    v = rng.standard_normal((*k_shape[:-1], d_v))
    return tuple(x.astype(dtype) for x in (q, k, v))


def assert_as_defined(q, k, v, *, scale_by_row=None, rtol=1e-12, **call):
    """The call gives output, weights and statistics of the definition; `scale_by_row` is what its scale should mean."""
    found = attention(q, k, v, weights=True, **call)
    meant = {name: value for name, value in call.items() if name not in ("scale", "causal_offset")}
    scale = call.get("scale") if scale_by_row is None else scale_by_row
    expected = attention_by_definition(q, k, v, scale=scale, causal_offset=call.get("causal_offset") or 0, **meant)
    atol = rtol * max(1.0, np.abs(np.asarray(v).astype(np.float64)).max(initial=0.0))
    assert found.output.dtype == found.weights.dtype == np.asarray(q).dtype
    np.testing.assert_allclose(found.output.astype(np.float64), expected.output, rtol=rtol, atol=atol)
    np.testing.assert_allclose(found.weights.astype(np.float64), expected.weights, rtol=rtol, atol=rtol)
    for name in ROW_FIELDS:
        value = getattr(found.statistics, name)
        np.testing.assert_allclose(value, expected.rows[name], rtol=1e-9, atol=1e-11, err_msg=name)
    return found


def same(one, other):
    """Equal to the bit: output, weights and every statistic."""
    assert one.output.tobytes() == other.output.tobytes()
    if one.weights is not None and other.weights is not None:
        np.testing.assert_array_equal(one.weights, other.weights)
    for name in one.statistics.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(one.statistics, name), getattr(other.statistics, name), err_msg=name)


@pytest.mark.parametrize("d_v", [0, 1, 3])
@pytest.mark.parametrize("d_k", [1, 2, 7])
@pytest.mark.parametrize(
    ("queries", "keys"), [(0, 0), (0, 3), (1, 0), (3, 0), (1, 1), (1, 13), (2, 7), (13, 1), (5, 5)]
)
def test_sizes_that_hit_the_tails(queries, keys, d_k, d_v):
    assert_as_defined(*draw(1, (queries, d_k), (keys, d_k), d_v))
    found = assert_as_defined(
        *draw(2, (2, queries, d_k), (2, keys, d_k), d_v), causal=True, causal_offset=keys - queries
    )
    assert found.output.shape == (2, queries, d_v)
    assert found.weights.shape == (2, queries, keys)
    assert found.statistics.shape == (2, queries)
    if keys == 0:
        assert not found.output.any()


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, 2, 3, 4), (0, 2, 5, 4)),
        ((2, 0, 3, 4), (2, 0, 5, 4)),
        ((2, 0, 3, 4), (2, 2, 5, 4)),
        ((2, 0, 2, 3, 4), (2, 0, 1, 5, 4)),
    ],
)
def test_nothing_to_do_gives_the_right_shapes(q_shape, k_shape):
    q, k, v = draw(0, q_shape, k_shape, 6)
    found = attention(q, k, v, mask=np.ones(5, bool), sinks=np.zeros(q_shape[-3]), weights=True)
    assert found.output.shape == (*q_shape[:-1], 6)
    assert found.weights.shape == (*q_shape[:-1], 5)
    assert found.statistics.shape == q_shape[:-1]


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (1, 2, 1)])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (4, 2), (6, 2), (3, 1), (5, 5)])
def test_batches_and_grouped_heads(batch, heads, groups):
    q, k, v = draw(3, (*batch, heads, 3, 4), (*batch, groups, 5, 4), 2)
    assert_as_defined(q, k, v, sinks=np.linspace(-2, 2, heads), causal=True, causal_offset=2)


def test_grouped_heads_are_repeated_keys_in_a_row():
    q, k, v = draw(4, (2, 6, 5, 4), (2, 2, 7, 4), 3)
    grouped = attention(q, k, v).output
    np.testing.assert_allclose(grouped, attention(q, k.repeat(3, axis=1), v.repeat(3, axis=1)).output, rtol=1e-13)


FULL = (2, 4, 5, 6)
MASK_SHAPES = [shape for rank in range(5) for shape in itertools.product(*[(1, size) for size in FULL[4 - rank :]])]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_every_broadcast_of_a_mask(shape):
    rng = np.random.default_rng(len(shape))
    q, k, v = draw(5, (2, 4, 5, 3), (2, 2, 6, 3), 2)
    assert_as_defined(q, k, v, mask=rng.random(shape) < 0.6)
    additive = np.where(rng.random(shape) < 0.7, 2.0 * rng.standard_normal(shape), -np.inf)
    assert_as_defined(q, k, v, mask=additive)


@pytest.mark.parametrize("dtype", DTYPES)
def test_additive_masks_of_every_dtype(dtype):
    bias = np.array([0.5, -np.inf, -3.0, 0.0]).astype(DTYPES[dtype])
    q, k, v = draw(6, (2, 3, 4), (2, 4, 4), 2)
    found = assert_as_defined(q, k, v, mask=bias.astype(np.float64))
    same(attention(q, k, v, mask=bias, weights=True), found)


RANGES = [{"causal": True, "causal_offset": offset} for offset in (-7, -2, 0, 1, 3, 9)] + [
    {"window": window, "causal_offset": offset, "causal": causal}
    for window in [(0, 0), (1, None), (None, 0), (2, 1), (None, 2), (0, 3), (None, None), (9, 9)]
    for offset in (-2, 0, 3)
    for causal in (False, True)
]


@pytest.mark.parametrize("visible", RANGES, ids=str)
def test_causal_ranges_windows_and_their_intersection(visible):
    q, k, v = draw(7, (2, 5, 3), (2, 7, 3), 2)
    assert_as_defined(q, k, v, **visible)
    mask = np.random.default_rng(7).random((5, 7)) < 0.5
    assert_as_defined(q, k, v, mask=mask, **visible)
    assert_as_defined(q, k, v, mask=np.where(mask, 0.25, -np.inf), **visible)


def test_the_documented_alignments():
    q, k, v = draw(8, (2, 3), (4, 3), 1)
    starts = attention(q, k, v, causal=True, causal_offset=0, weights=True).weights > 0
    ends = attention(q, k, v, causal=True, causal_offset=2, weights=True).weights > 0
    assert starts.tolist() == [[True, False, False, False], [True, True, False, False]]
    assert ends.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_ranges_beyond_any_sequence_are_open():
    q, k, v = draw(9, (2, 5, 3), (2, 5, 3), 2)
    same(attention(q, k, v, window=(sys.maxsize, sys.maxsize)), attention(q, k, v))
    same(attention(q, k, v, causal=True, causal_offset=2**70), attention(q, k, v))
    nothing = attention(q, k, v, causal=True, causal_offset=-(2**70), window=(sys.maxsize, 2**80))
    assert not nothing.output.any()
    assert not nothing.statistics.visible_keys.any()


FEATURES = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.array([-3.0, 0.0, 2.0, 30.0])},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.7},
    "integer scale": {"scale": 2},
    "zero-dimensional scale": {"scale": np.float32(0.75)},
    "scale per head": {"scale": np.array([0.1, 0.5, 2.0, -1.0])[:, None]},
    "scale per row": {"scale": np.linspace(-1, 3, 20).reshape(4, 5)},
    "scale per batch, head and row": {"scale": np.linspace(-1, 3, 40).reshape(2, 4, 5)},
    "scale per batch": {"scale": np.array([0.3, 1.7])[:, None, None]},
    "all": {
        "scale": np.linspace(0.2, 2, 20).reshape(4, 5),
        "softcap": 3.0,
        "sinks": np.array([0.5, -0.5, 1.0, 0.0]),
        "mask": np.where(np.random.default_rng(0).random((4, 5, 6)) < 0.8, 0.5, -np.inf),
        "causal": True,
        "causal_offset": 1,
        "window": (3, None),
    },
}


@pytest.mark.parametrize("block", [1, 7, 40, 2**18])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_in_tiles_of_any_size(feature, block, monkeypatch):
    monkeypatch.setattr(sqrtdk.call, "BLOCK_ELEMENTS", block)
    assert_as_defined(*draw(10, (2, 4, 5, 3), (2, 2, 6, 3), 2), **FEATURES[feature])


@pytest.mark.parametrize("block", [1, 6, 13, 30, 61, 130, 200])
def test_tiles_really_split_and_cover_every_row_once(block, monkeypatch):
    monkeypatch.setattr(sqrtdk.call, "BLOCK_ELEMENTS", block)
    q, k, v = draw(11, (3, 4, 5, 3), (3, 2, 6, 3), 2)
    mask = np.random.default_rng(11).random((3, 1, 5, 6)) < 0.6
    call = sqrtdk.call.validate(q, k, v, None, mask, False, None, None, None, None)
    tiles = list(call.tiles())
    seen = np.zeros(call.rows_shape, int)
    for tile in tiles:
        seen[tile] += 1
    assert (seen == 1).all()
    assert len(tiles) >= 360 // max(block, 12)
    for policy in ("log_n", "cosine", "qk_norm", "llama4"):
        split = attention(q, k, v, mask=mask, scale=policy)
        with monkeypatch.context() as whole:
            whole.setattr(sqrtdk.call, "BLOCK_ELEMENTS", 2**18)
            np.testing.assert_allclose(split.output, attention(q, k, v, mask=mask, scale=policy).output, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_the_definition_rounded_once(dtype):
    q, k, v = draw(12, (2, 4, 5, 8), (2, 2, 7, 8), 3, DTYPES[dtype])
    unit = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    assert_as_defined(q, k, v, rtol=max(0.51 * unit, 1e-13), softcap=4.0, causal=True, causal_offset=2)


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
def test_what_is_masked_has_no_influence_to_the_bit(poison, scale, softcap):
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
        found = attention(*call, mask=additive, scale=scale, softcap=softcap, weights=True)
        np.testing.assert_array_equal(found.output, clean.output)
    blind = q.copy()
    blind[..., 4, :] = poison
    same(clean, attention(blind, k, v, mask=mask, scale=scale, softcap=softcap, weights=True))
    assert not clean.output[..., 4, :].any()


@pytest.mark.parametrize("poison", NOT_FINITE)
def test_what_causality_and_windows_hide_has_no_influence(poison):
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
    found = attention(q, k, v, mask=bias, causal=True)
    hit = np.zeros((2, 6), bool)
    hit[1, 3] = True
    if where in ("k", "v"):
        hit[1, 3:] = True
    assert np.isnan(found.output[hit]).all()
    np.testing.assert_array_equal(found.output[~hit], clean.output[~hit])
    if where != "v":
        for name in ("entropy", "max_logit", "logsumexp", "sum_p2", "jacobian_trace", "logit_variance", "max_weight"):
            assert np.isnan(getattr(found.statistics, name)[hit]).all(), name
            np.testing.assert_array_equal(getattr(found.statistics, name)[~hit], getattr(clean.statistics, name)[~hit])


def test_a_nan_in_one_component_of_a_value_stays_in_it():
    q, k, v = draw(20, (4, 5), (6, 5), 3)
    clean = attention(q, k, v).output
    v[2, 1] = np.nan
    found = attention(q, k, v).output
    assert np.isnan(found[:, 1]).all()
    np.testing.assert_allclose(found[:, [0, 2]], clean[:, [0, 2]], rtol=1e-13)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_logits_are_never_taken_for_an_answer(value):
    found = attention(np.ones((1, 2)), np.full((3, 2), value), np.ones((3, 2)))
    assert np.isnan(found.output).all()
    assert np.isnan(found.statistics.entropy).all()


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
    found = attention(q, k, v, mask=mask, weights=True, **extra)
    assert not found.output[:, [1, 3]].any()
    assert not found.weights[:, [1, 3]].any()
    assert found.output[:, [0, 2]].all()
    np.testing.assert_array_equal(found.statistics.sink_weight[:, 1], 1.0 if "sinks" in extra else 0.0)


def test_finite_1e30_in_float32_gives_the_right_finite_answer():
    q, k, v = draw(23, (2, 5, 8), (2, 7, 8), 3, np.float32)
    big = np.float32(1e30)
    found = attention(q * big, k * big, v * big)
    winner = np.einsum("hld,hsd->hls", q.astype(np.float64), k.astype(np.float64)).argmax(axis=-1)
    np.testing.assert_array_equal(found.output, np.take_along_axis(v * big, winner[..., None], axis=-2))
    np.testing.assert_array_equal(found.statistics.max_key, winner)
    assert np.isfinite(found.statistics.logit_variance).all()
    same(attention(q * big, k, v, scale=1e-30 / math.sqrt(8)), attention(q * big, k, v, scale=1e-30 / math.sqrt(8)))
    np.testing.assert_allclose(
        attention(q * big, k * big, v, scale=1e-60).output, attention(q, k, v, scale=1.0).output, rtol=1e-5
    )


def test_the_callers_floating_point_settings_do_not_matter():
    q, k, v = draw(24, (2, 5, 8), (2, 7, 8), 3, np.float16, sharpness=200.0)
    v[:, 0] = 1e-7
    with np.errstate(all="raise"):
        strict = attention(q, k, v, weights=True)
        assert np.geterr()["over"] == "raise"
    same(strict, attention(q, k, v, weights=True))


def test_scores_are_told_apart_from_logits():
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
    found = attention(q, k, v, mask=mask, weights=True)
    output, weights = scaled_dot_product_attention(q, k, v, mask)
    np.testing.assert_allclose(found.output, output, rtol=1e-12)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-12)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(seed=st.integers(0, 2**16), shift=st.floats(-1e3, 1e3), heads=st.integers(1, 3), keys=st.integers(1, 9))
def test_softmax_ignores_shifts(seed, shift, heads, keys):
    q, k, v = draw(seed, (heads, 4, 5), (heads, keys, 5), 3)
    bias = np.random.default_rng(seed).standard_normal((heads, 4, keys))
    found = attention(q, k, v, mask=bias)
    shifted = attention(q, k, v, mask=bias + shift)
    np.testing.assert_allclose(shifted.output, found.output, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(shifted.statistics.entropy, found.statistics.entropy, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(shifted.statistics.logsumexp, found.statistics.logsumexp + shift, rtol=1e-9, atol=1e-10)


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
    found = attention(q, k, v, mask=mask, weights=True)
    moved = attention(q, k[:, order], v[:, order], mask=mask[..., order], weights=True)
    np.testing.assert_allclose(moved.output, found.output, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(moved.weights, found.weights[..., order], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(moved.statistics.entropy, found.statistics.entropy, rtol=1e-10, atol=1e-13)
    seen = found.statistics.visible_keys > 0
    np.testing.assert_array_equal(order[moved.statistics.max_key][seen], found.statistics.max_key[seen])


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
