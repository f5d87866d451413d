"""`sqrtdk.attention` against its definition written out, on every backend: sizes, masks, ranges, features, dtypes."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest

from oracle import DTYPES, FEATURES, ROW_FIELDS, attention_by_definition, draw, is_visible, same
from sqrtdk import attention, backends

pytestmark = pytest.mark.usefixtures("backend")


def assert_as_defined(q, k, v, *, rtol=1e-12, **call):
    """The call gives output, weights and statistics of the definition.

    The kernel works in float32 unless the inputs are float64: its logits, and what follows, are as good as that.
    """
    result = attention(q, k, v, weights=True, **call)
    meant = {name: value for name, value in call.items() if name != "causal_offset"}
    expected = attention_by_definition(q, k, v, causal_offset=call.get("causal_offset") or 0, **meant)
    in_float32 = np.asarray(q).dtype.itemsize < 8 and backends.current() != backends.REFERENCE
    rows_rtol, rows_atol = (2e-5, 2e-5) if in_float32 else (1e-9, 1e-11)
    output_rtol = rtol + 4e-6 if in_float32 else rtol
    atol = output_rtol * max(1.0, np.abs(np.asarray(v).astype(np.float64)).max(initial=0.0))
    assert result.output.dtype == result.weights.dtype == np.asarray(q).dtype
    np.testing.assert_allclose(result.output.astype(np.float64), expected.output, rtol=output_rtol, atol=atol)
    np.testing.assert_allclose(result.weights.astype(np.float64), expected.weights, rtol=output_rtol, atol=output_rtol)
    for name in ROW_FIELDS:
        value = getattr(result.statistics, name)
        np.testing.assert_allclose(value, expected.rows[name], rtol=rows_rtol, atol=rows_atol, err_msg=name)
    return result


@pytest.mark.parametrize("d_v", [0, 1, 3])
@pytest.mark.parametrize("d_k", [1, 2, 7])
@pytest.mark.parametrize(
    ("queries", "keys"), [(0, 0), (0, 3), (1, 0), (3, 0), (1, 1), (1, 13), (2, 7), (13, 1), (5, 5)]
)
def test_sizes_that_hit_the_tails(queries, keys, d_k, d_v):
    assert_as_defined(*draw(1, (queries, d_k), (keys, d_k), d_v))
    result = assert_as_defined(
        *draw(2, (2, queries, d_k), (2, keys, d_k), d_v), causal=True, causal_offset=keys - queries
    )
    assert result.output.shape == (2, queries, d_v)
    assert result.weights.shape == (2, queries, keys)
    assert result.statistics.shape == (2, queries)
    if keys == 0:
        assert not result.output.any()


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
    result = attention(q, k, v, mask=np.ones(5, bool), sinks=np.zeros(q_shape[-3]), weights=True)
    assert result.output.shape == (*q_shape[:-1], 6)
    assert result.weights.shape == (*q_shape[:-1], 5)
    assert result.statistics.shape == q_shape[:-1]


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
    result = assert_as_defined(q, k, v, mask=bias.astype(np.float64))
    same(attention(q, k, v, mask=bias, weights=True), result)


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


FAR = [s * 2**p + more for p in (31, 53, 60, 61, 62, 63, 64, 200) for s in (1, -1) for more in (-3, -1, 0, 2)]


def test_offsets_and_windows_of_any_size_are_added_up_without_a_limit():
    q, k, v = draw(9, (5, 3), (4, 3), 2)
    rng = np.random.default_rng(11)

    def pick(numbers):
        return numbers[rng.integers(len(numbers))]

    for _ in range(300):
        offset = pick([*range(-6, 7), *FAR])
        # Half of the windows reach back to where the keys are.
        left, right = (
            pick([None, 0, 3, *map(abs, FAR), *[max(side * offset + d, 0) for d in range(-4, 5)] * 8])
            for side in (1, -1)
        )
        causal = bool(rng.integers(2))
        expected = [
            sum(is_visible(i, j, causal=causal, offset=offset, window=(left, right), entry=True) for j in range(4))
            for i in range(5)
        ]
        call = {"causal": causal, "causal_offset": offset, "window": (left, right)}
        assert attention(q, k, v, **call).statistics.visible_keys.tolist() == expected, call
        by_count = np.log(np.maximum(expected, 1)) / np.sqrt(3)
        same(attention(q, k, v, scale="log_n", **call), attention(q, k, v, scale=by_count, **call))


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature):
    assert_as_defined(*draw(10, (2, 4, 5, 3), (2, 2, 6, 3), 2), **FEATURES[feature])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_the_definition_rounded_once(dtype):
    q, k, v = draw(12, (2, 4, 5, 8), (2, 2, 7, 8), 3, DTYPES[dtype])
    unit = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    assert_as_defined(q, k, v, rtol=max(0.51 * unit, 1e-13), softcap=4.0, causal=True, causal_offset=2)
