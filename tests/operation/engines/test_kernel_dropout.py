"""Dropout in the kernel: the reference's on every level, forward and backward, whatever else a call has."""

import math

import ml_dtypes
import numpy as np
import pytest

from oracle import draw
from sqrtdk import backends
from sqrtdk.operation.arguments import as_float_array
from sqrtdk.operation.call import Call, GradientRequest, Wanted
from sqrtdk.operation.dropout import draw_kept
from sqrtdk.operation.engines.kernel import KERNEL
from sqrtdk.operation.engines.reference import REFERENCE_ENGINE
from sqrtdk.operation.visibility import Band

SEED = 2**61 + 12345
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def make(q_shape, k_shape, d_v, dtype=np.float32, seed=0, **call):
    """A call with dropout of 0.3 unless another is asked for."""
    q, k, v = (as_float_array("x", x.astype(dtype)) for x in draw(seed, q_shape, k_shape, d_v))
    rest = {"factor": 1.0 / math.sqrt(q_shape[-1]), "dropout": 0.3, "seed": SEED} | call
    return Call(q, k, v, **rest)


def widen(call):
    """The same numbers in float64: what the reference shall compute without rounding its results."""
    return call._replace(**{name: getattr(call, name).astype(np.float64) for name in ("query", "key", "value")})


def run(engine, call, grad, plan=None):
    """Output, statistics and weights, and the gradients."""
    plan = backends.plan() if plan is None else plan
    done = engine.forward(call, Wanted(statistics=True, weights=True, saved=True), plan)
    return done, engine.backward(call, GradientRequest(grad), done, plan)


def assert_as_reference(call, seed=1):
    """All that the kernel gives for a call is the reference's, as good as the dtype allows; returns its output."""
    dtype = call.query.dtype
    grad = np.random.default_rng(seed).standard_normal((*call.rows, call.d_v)).astype(dtype)
    ours, gradients = run(KERNEL, call, grad)
    theirs, expected = run(REFERENCE_ENGINE, widen(call), grad.astype(np.float64))
    exact = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype.name]
    for name in ("output", "weights", "measures", "counts"):
        one, other = (np.asarray(getattr(x, name), np.float64) for x in (ours, theirs))
        close = 3e-5 if name == "measures" and dtype.itemsize < 8 else exact if name != "measures" else 1e-9
        np.testing.assert_allclose(one, other, rtol=close, atol=close * max(1.0, scale_of(other)), err_msg=name)
    for name, one, other in zip(expected._fields, gradients, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            size = max(1.0, scale_of(other))
            np.testing.assert_allclose(
                one.astype(np.float64), other, rtol=4 * exact, atol=8 * exact * size, err_msg=name
            )
    return ours.output


def scale_of(x):
    """The largest finite number."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


RNG = np.random.default_rng(4)
CALLS = {
    "plain": {},
    "causal": {"band": Band(last=0)},
    "window": {"band": Band(-9, 3)},
    "boolean mask": {"mask": RNG.random((2, 1, 70, 140)) < 0.5},
    "additive mask": {"mask": np.where(RNG.random((4, 70, 140)) < 0.8, RNG.standard_normal((4, 70, 140)), -np.inf)},
    "blind rows": {"mask": RNG.random((70, 1)) < 0.5},
    "sinks": {"sinks": np.array([0.5, -1.0, 2.0, 3.0])},
    "soft cap": {"softcap": 2.0},
    "scales": {"scale": RNG.random((4, 70)) + 0.1},
    "everything": {
        "band": Band(-60, 20),
        "mask": RNG.random((2, 1, 70, 140)) < 0.8,
        "sinks": np.array([0.5, -1.0, 2.0, 3.0]),
        "softcap": 3.0,
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_tiles_drop_as_the_reference_does(native, name, dtype):
    assert_as_reference(make((2, 4, 70, 24), (2, 2, 140, 24), 20, DTYPES[dtype], **CALLS[name]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 5, 511, 513, 2100])
def test_few_rows_drop_as_the_reference_does(native, keys, dtype):
    sinks = np.array([0.5, -1.0, 2.0, 3.0])
    mask = np.random.default_rng(keys).random((2, 1, 2, keys)) < 0.9
    assert_as_reference(make((2, 4, 2, 16), (2, 2, keys, 16), 18, DTYPES[dtype], sinks=sinks, mask=mask))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 17, 31, 33, 63, 64, 65, 129])
@pytest.mark.parametrize("keys", [1, 3, 64, 127, 129, 260])
def test_tails_of_tiles_and_blocks(native, rows, keys):
    for dtype in (np.float32, np.float64, ml_dtypes.bfloat16):
        assert_as_reference(make((1, 2, rows, 9), (1, 1, keys, 9), 5, dtype, rows))


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_dropped_key_with_all_the_weight_passes_on_the_gradients_of_the_others(native, rows, dtype):
    """The weight of the first key rounds to 1. Where it is dropped, the faint keys alone make the output, and the
    gradient of its score is minus the sum of theirs: small, and not 0."""
    call = make((1, 2, rows, 9), (1, 2, 12, 9), 5, dtype, dropout=0.5, factor=1.0)
    call.query[...], call.key[..., 0, :] = 1.0, 2.5 if dtype == np.float32 else 4.5
    call.key[..., 1:, :] *= 0.1
    grad = np.random.default_rng(1).standard_normal((1, 2, rows, 5)).astype(dtype)
    ours, gradients = run(KERNEL, call, grad)
    _, expected = run(REFERENCE_ENGINE, widen(call), grad.astype(np.float64))
    dropped = ~draw_kept(0.5, SEED, np.arange(2 * rows).reshape(1, 2, rows, 1), np.arange(1))[..., 0]
    assert (ours.weights[..., 0] == 1.0).all()
    assert dropped.any()
    size = np.abs(expected.query[dropped]).max(-1, keepdims=True)
    assert (size > 0).all()
    assert (np.abs(gradients.query[dropped] - expected.query[dropped]) <= 1e-4 * size).all()


def test_every_weight_is_dropped_or_kept_by_its_own_word(native):
    """Values that are unit vectors: the output is the dropped weights themselves, of every row and key."""
    for queries, keys in ((1, 1500), (3, 40), (150, 300)):
        call = make((3, 2, queries, 8), (3, 2, keys, 8), 1)
        call = call._replace(value=np.broadcast_to(np.eye(keys, dtype=np.float32), (3, 2, keys, keys)))
        done = KERNEL.forward(call, Wanted(weights=True), backends.plan())
        kept = draw_kept(0.3, SEED, np.arange(6 * queries).reshape(3, 2, queries, 1), np.arange(keys))
        assert 0.6 < kept.mean() < 0.8
        assert np.array_equal(done.output != 0, kept & (done.weights != 0))
        np.testing.assert_allclose(done.output, np.where(kept, done.weights / 0.7, 0.0), rtol=1e-5, atol=1e-30)


def test_leading_axes_that_lie_unevenly_count_their_rows_through(native):
    q, k, v = (np.random.default_rng(i).standard_normal((3, 4, 2, 12, 8)) for i in range(3))
    even = Call(q, k, v, factor=0.4, dropout=0.5, seed=SEED)
    uneven = even._replace(query=np.repeat(q, 2, axis=0)[::2], key=np.stack([k] * 2, axis=1)[:, 0])
    uneven = uneven._replace(value=np.ascontiguousarray(v.swapaxes(0, 1)).swapaxes(0, 1))
    grad = np.random.default_rng(9).standard_normal(q.shape)
    ours, gradients = run(KERNEL, uneven, grad)
    other, expected = run(KERNEL, even, grad)
    assert np.array_equal(ours.output, other.output)
    for one, two in zip(gradients[:3], expected[:3], strict=True):
        assert np.array_equal(one, two)
    assert_as_reference(uneven)


def test_probability_0_changes_no_bit_and_1_drops_everything(native):
    for shape in ((2, 4, 70, 16), (2, 2, 3, 16)):
        call = make(shape, (2, 2, 130, 16), 8, dropout=0.0)
        grad = np.random.default_rng(2).standard_normal((*shape[:-1], 8)).astype(np.float32)
        plain, gradients = run(KERNEL, call._replace(seed=None), grad)
        for seed in (0, SEED):
            done, again = run(KERNEL, call._replace(seed=seed), grad)
            assert done.output.tobytes() == plain.output.tobytes()
            assert all(one.tobytes() == two.tobytes() for one, two in zip(gradients[:4], again[:4], strict=True))
        done, gradients = run(KERNEL, call._replace(dropout=1.0, seed=SEED), grad)
        assert not done.output.any()
        assert not any(gradient.any() for gradient in gradients[:4])
        np.testing.assert_array_equal(done.measures, plain.measures)
        np.testing.assert_array_equal(done.weights, plain.weights)


def test_bits_do_not_depend_on_threads(native):
    call = make((1, 4, 200, 16), (1, 2, 300, 16), 16, band=Band(last=100))
    grad = np.random.default_rng(3).standard_normal(call.query.shape).astype(np.float32)
    done, gradients = run(KERNEL, call, grad, backends.plan()._replace(threads=1))
    for threads in (2, 3):
        other, others = run(KERNEL, call, grad, backends.plan()._replace(threads=threads))
        assert done.output.tobytes() == other.output.tobytes()
        assert all(one.tobytes() == two.tobytes() for one, two in zip(gradients[:4], others[:4], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [3, 70])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_hidden_keys_have_no_influence_and_visible_keys_have(native, dtype, queries, poison):
    hidden = np.random.default_rng(5).random(130) < 0.2
    call = make((2, 4, queries, 16), (2, 2, 130, 16), 8, DTYPES[dtype], mask=~hidden)
    clean = assert_as_reference(call)
    grad = np.ones((2, 4, queries, 8), DTYPES[dtype])
    _, gradients = run(KERNEL, call, grad)
    spoiled = call._replace(key=call.key.copy(), value=call.value.copy())
    spoiled.key[:, :, hidden] = spoiled.value[:, :, hidden] = poison
    done, others = run(KERNEL, spoiled, grad)
    np.testing.assert_array_equal(done.output, clean)
    close = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 1e-4, "float64": 1e-11}[dtype]
    for one, two in zip(others[:3], gradients[:3], strict=True):
        np.testing.assert_allclose(one.astype(np.float64), two.astype(np.float64), rtol=close, atol=close)
    # A value that is seen reaches every row, dropped or not: 0·NaN is NaN.
    seen = int(np.flatnonzero(~hidden)[3])
    spoiled.value[0, 0, seen] = poison
    done, _ = run(KERNEL, spoiled, grad)
    theirs = REFERENCE_ENGINE.forward(widen(spoiled), Wanted(), backends.plan())
    for one in (done.output, theirs.output):
        assert not np.isfinite(one[0, :2].astype(np.float64)).any()
        assert np.isfinite(one[1].astype(np.float64)).all()
    np.testing.assert_array_equal(np.isnan(done.output.astype(np.float64)), np.isnan(theirs.output))


@pytest.mark.parametrize("queries", [4, 140])
def test_rows_that_overflow_float32_are_dropped_as_others_are(native, queries):
    """Scores beyond float32 go key by key in float64; gradients that add up beyond it, the head again in float64."""
    large = make((1, 2, queries, 8), (1, 2, 40, 8), 6)
    large = large._replace(query=large.query * 1e25, key=large.key * 1e25, factor=1e-51)
    done = KERNEL.forward(large, Wanted(), backends.plan())
    expected = REFERENCE_ENGINE.forward(widen(large), Wanted(), backends.plan())
    np.testing.assert_allclose(done.output, expected.output, rtol=1e-5, atol=1e-6)
    call = make((1, 2, queries, 8), (1, 2, 40, 8), 6, factor=0.01)
    grad = np.full((1, 2, queries, 6), 3e38, np.float32)
    grad[:, :, : queries // 2] *= -1
    call = call._replace(value=call.value * np.float32(1e-37))
    _, ours = run(KERNEL, call, grad)
    _, theirs = run(REFERENCE_ENGINE, widen(call), grad.astype(np.float64))
    for name in ("query", "key", "value"):
        one, other = getattr(ours, name), getattr(theirs, name)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * scale_of(other), err_msg=name)
