"""The kernel's backward pass, and the weights and (max, sum) its forward pass leaves, against the reference."""

import functools
import signal
import time

import numpy as np
import pytest

import sqrtdk
from crossing import cross
from oracle import DTYPES
from sqrtdk import backends

kernel = pytest.importorskip("sqrtdk._kernel")

OPEN_BELOW, OPEN_ABOVE = -(2**63), 2**63 - 1
CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SIZES = (1, 7, 8, 9, 63, 64, 65, 130, 300)
NAMES = ("query", "key", "value", "scale", "sinks")


def as_crosses(array):
    return array.view(np.uint16) if array is not None and array.dtype.name == "bfloat16" else array


class Case:
    """A call `[N, H, L, D]` as the binding takes it and as the reference does; arrays may have any strides."""

    def __init__(self, q, k, v, grad, *, scale=None, mask=None, first=None, last=None, softcap=0.0, sinks=None):
        self.q, self.k, self.v, self.grad = q, k, v, grad
        self.dtype = q.dtype.name
        self.scale = 1.0 / np.sqrt(q.shape[-1]) if scale is None else scale
        self.mask, self.first, self.last, self.softcap, self.sinks = mask, first, last, softcap, sinks

    def arguments(self):
        number = isinstance(self.scale, float)
        kind = 0
        if self.mask is not None:
            kind = 1 if self.mask.dtype == np.bool_ else 2 + CODES[self.mask.dtype.name]
        return cross(
            *(as_crosses(x) for x in (self.q, self.k, self.v)),
            CODES[self.dtype],
            kind,
            factor=self.scale if number else 0.0,
            scale=None if number else self.scale,
            mask=as_crosses(self.mask),
            first=OPEN_BELOW if self.first is None else self.first,
            last=OPEN_ABOVE if self.last is None else self.last,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def forward(self, level, threads=1):
        rows = self.q.shape[:-1]
        output = np.empty((*rows, self.v.shape[-1]), self.v.dtype)
        weights = np.full((*rows, self.k.shape[-2]), 7, self.v.dtype)
        saved = np.full((2, *rows), 7.0)
        exact = np.full(output.shape, 7, np.float32) if output.dtype.itemsize == 2 else None
        outputs = (as_crosses(output), None, None, as_crosses(weights), saved, exact)
        assert kernel.forward(level, threads, *self.arguments(), *outputs)
        return output if exact is None else exact, weights, saved

    def backward(self, level, threads=1, forward=None):
        output, _, saved = forward or self.forward(level, threads)
        batch, rows = self.q.shape[:-3], self.q.shape[:-1]
        gradients = [
            np.full(self.q.shape, 7, self.q.dtype),
            np.full((*batch, *self.k.shape[-3:]), 7, self.q.dtype),
            np.full((*batch, *self.v.shape[-3:]), 7, self.q.dtype),
            np.full(rows, 7.0),
            np.full(rows, 7.0),
        ]
        read = (saved, as_crosses(output), as_crosses(self.grad))
        assert kernel.backward(level, threads, *self.arguments(), *read, *(as_crosses(x) for x in gradients), None)
        return dict(zip(NAMES, gradients, strict=True))

    def options(self):
        # The reference knows windows only around i + offset: left and right from an offset of 0.
        window = None
        if self.first is not None or self.last is not None:
            window = (None if self.first is None else -self.first, self.last)
        return {
            "scale": self.scale,
            "mask": self.mask,
            "window": window,
            "causal_offset": None if window is None else 0,
            "softcap": self.softcap or None,
            "sinks": self.sinks,
        }

    def expected(self):
        """Gradients in float64 of the arrays as they are rounded."""
        wide = [x.astype(np.float64) for x in (self.q, self.k, self.v, self.grad)]
        with backends.use("reference"):
            computed = sqrtdk.attention_gradients(*wide, **self.options())
        sinks = np.zeros(self.q.shape[1]) if computed.sinks is None else computed.sinks
        return {
            "query": computed.query,
            "key": computed.key,
            "value": computed.value,
            "scale": computed.scale,
            "sinks": sinks,
        }

    def attended(self):
        with backends.use("reference"):
            return sqrtdk.attention(
                *(x.astype(np.float64) for x in (self.q, self.k, self.v)), **self.options(), weights=True
            )


def draw(rng, dtype="float32", batch=1, groups=2, shared=1, queries=65, keys=130, d_k=16, d_v=16, **options):
    def normal(*shape):
        return rng.standard_normal(shape).astype(DTYPES[dtype])

    heads = groups * shared
    q, k = normal(batch, heads, queries, d_k), normal(batch, groups, keys, d_k)
    return Case(q, k, normal(batch, groups, keys, d_v), normal(batch, heads, queries, d_v), **options)


def spread(rng, array):
    """The same numbers in another order of memory, some axes backwards, gaps between the elements."""
    order = rng.permutation(array.ndim)
    steps = [int(rng.integers(1, 3)) for _ in order]
    memory = np.zeros([array.shape[axis] * step for axis, step in zip(order, steps, strict=True)], array.dtype)
    view = memory[tuple(slice(None, None, step) for step in steps)]
    view = view[tuple(slice(None, None, int(rng.choice([-1, 1]))) for _ in order)].transpose(np.argsort(order))
    view[...] = array
    return view


@functools.cache
def random_case(seed):
    """A call from anywhere in the space of arguments, with its gradients and weights by the reference."""
    rng = np.random.default_rng(seed)
    groups, shared, batch = (int(rng.integers(1, 4)) for _ in range(3))
    queries, keys = int(rng.choice(SIZES)), int(rng.choice(SIZES))
    d_k, d_v = int(rng.choice([1, 2, 7, 16, 17, 40, 64, 65])), int(rng.choice([1, 3, 8, 16, 33, 64, 96]))
    rows = (batch, groups * shared, queries)
    options = {}
    if rng.random() < 0.5:
        options["last"] = int(rng.integers(0, keys + 1))
    if rng.random() < 0.3:
        options["first"] = -int(rng.integers(0, queries + 1))
    if rng.random() < 0.3:
        options["softcap"] = 1.5
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(rows[1])
    if rng.random() < 0.4:
        options["scale"] = rng.choice([0.0, 1.0, 2.0]) * rng.standard_normal(rows) / np.sqrt(d_k)
    shape = tuple(size if rng.random() < 0.6 else 1 for size in (*rows, keys))
    seen = rng.random(shape) < rng.choice([0.0, 0.3, 0.8])
    kind = rng.choice(["none", "boolean", *DTYPES])
    if kind == "boolean":
        options["mask"] = seen
    elif kind != "none":
        options["mask"] = np.where(seen, rng.standard_normal(shape), -np.inf).astype(DTYPES[kind])
    case = draw(rng, str(rng.choice(list(DTYPES))), batch, groups, shared, queries, keys, d_k, d_v, **options)
    if rng.random() < 0.4:
        case.q, case.k, case.v, case.grad = (spread(rng, x) for x in (case.q, case.k, case.v, case.grad))
    if rng.random() < 0.4:
        poison_hidden(rng, case)
    return case, case.expected(), case.attended()


def visible_keys(case):
    """[N, H, L, S]"""
    i, j = np.arange(case.q.shape[-2])[:, None], np.arange(case.k.shape[-2])
    seen = np.ones((*case.q.shape[:-1], case.k.shape[-2]), bool)
    seen &= True if case.first is None else j - i >= case.first
    seen &= True if case.last is None else j - i <= case.last
    if case.mask is not None:
        seen &= case.mask if case.mask.dtype == np.bool_ else case.mask.astype(np.float64) != -np.inf
    return seen


def poison_hidden(rng, case):
    """Keys that nobody sees become NaN or infinite, and rows that see nothing too."""
    seen = visible_keys(case)
    by_group = seen.reshape(len(seen), case.k.shape[1], -1, *seen.shape[2:])
    hidden = ~by_group.any(axis=(2, 3))
    blind = ~seen.any(axis=-1)
    for array, where in ((case.k, hidden), (case.v, hidden), (case.q, blind), (case.grad, blind)):
        array[where] = rng.choice([np.nan, np.inf, -np.inf])


def assert_close(case, gradients, expected, units):
    for name in NAMES:
        computed, right = gradients[name].astype(np.float64), expected[name]
        if name == "sinks":
            computed = computed.sum(axis=(0, 2))
        np.testing.assert_array_equal(np.isnan(computed), np.isnan(right), err_msg=name)
        largest = max(np.abs(right[np.isfinite(right)]).max(initial=0.0), 1.0)
        np.testing.assert_allclose(computed, right, rtol=0, atol=units * UNIT[case.dtype] * largest, err_msg=name)


@pytest.mark.parametrize("seed", range(60))
def test_gradients_and_weights_of_random_calls(native, seed):
    case, expected, attended = random_case(seed)
    forward = case.forward(native)
    units = 12 if case.dtype in ("float16", "bfloat16") else 400
    assert_close(case, case.backward(native, forward=forward), expected, units)
    output, weights, (largest, total) = forward
    tolerance = units * UNIT[case.dtype]
    np.testing.assert_allclose(weights.astype(np.float64), attended.weights, rtol=0, atol=tolerance)
    assert (weights[~visible_keys(case)] == 0).all()
    finite = np.where(np.isfinite(case.v), case.v, 0).astype(np.float64)
    by_weights = weights.astype(np.float64) @ np.repeat(finite, case.q.shape[1] // case.k.shape[1], axis=1)
    np.testing.assert_allclose(output.astype(np.float64), by_weights, rtol=0, atol=8 * tolerance)
    blind = attended.statistics.visible_keys == 0
    assert (total[blind] == 0).all()
    assert (largest[blind] == -np.inf).all()
    with np.errstate(divide="ignore"):
        logsumexp = largest + np.log(total)
    # The working precision is float32 for 16-bit input.
    atol = 400 * max(UNIT[case.dtype], 0) if case.dtype == "float64" else 400 * UNIT["float32"]
    np.testing.assert_allclose(logsumexp, attended.statistics.logsumexp, rtol=0, atol=atol)


@pytest.mark.parametrize("queries", [3, 130])
def test_a_forward_pass_has_the_same_bits_with_any_results_wanted(native, queries):
    case = draw(np.random.default_rng(0), queries=queries, last=7, sinks=np.zeros(2))
    output, _, _ = case.forward(native)
    bare = np.empty_like(output)
    assert kernel.forward(native, 1, *case.arguments(), bare, None, None)
    assert bare.tobytes() == output.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [{"groups": 1}, {"groups": 2, "shared": 3}, {"groups": 9}, {"groups": 1, "d_k": 17}])
def test_bits_do_not_depend_on_threads_or_strides(native, dtype, shape):
    """One and two heads are cut into splits of their queries, nine are not."""
    rng = np.random.default_rng(1)
    case = draw(
        rng, dtype, queries=300, keys=300, last=5, sinks=np.zeros(shape["groups"] * shape.get("shared", 1)), **shape
    )
    alone = case.backward(native)
    for threads in (2, 3):
        crowd = case.backward(native, threads)
        assert all(alone[name].tobytes() == crowd[name].tobytes() for name in NAMES)
    case.q, case.k, case.v, case.grad = (spread(rng, x) for x in (case.q, case.k, case.v, case.grad))
    strided = case.backward(native)
    assert all(alone[name].tobytes() == strided[name].tobytes() for name in NAMES)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_keys_have_no_influence_to_the_bit(native, dtype, poison):
    rng = np.random.default_rng(2)
    mask = rng.random((130, 130)) < 0.7
    mask[:, [0, 70, 129]] = False
    mask[[5, 64, 100]] = False
    case = draw(rng, dtype, queries=130, mask=mask, last=20)
    clean = case.backward(native)
    for array, where in (
        (case.k, [0, 70, 129]),
        (case.v, [0, 70, 129]),
        (case.q, [5, 64, 100]),
        (case.grad, [5, 64, 100]),
    ):
        array[:, :, where] = poison
    dirty = case.backward(native)
    assert all(np.isfinite(dirty[name].astype(np.float64)).all() for name in NAMES)
    assert all(clean[name].tobytes() == dirty[name].tobytes() for name in NAMES)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "grad"])
def test_non_finite_numbers_reach_only_rows_that_see_them(native, dtype, where, poison):
    """Row 70 or key 70 is not finite; rows and keys of the first half do not see it, and keep their digits."""
    rng = np.random.default_rng(3)
    mask = rng.random((130, 130)) < 0.5
    mask[:60, 65:] = mask[60:, :65] = False
    case = draw(rng, dtype, queries=130, d_k=17, mask=mask, sinks=np.zeros(2))
    getattr(case, where)[:, 0, 70] = poison
    expected = case.expected()
    assert np.isnan(expected["query"]).any()
    assert np.isfinite(expected["key"][:, 0]).any()
    assert np.isfinite(expected["value"][:, 0]).any()
    # A sink's gradient is summed over the rows by the reference, so one NaN is all that can be seen of it.
    with np.errstate(invalid="ignore"):
        assert_close(case, case.backward(native), expected, 400)


def test_products_beyond_float32_are_taken_in_float64(native):
    rng = np.random.default_rng(4)
    case = draw(rng, queries=130)
    for array, size in ((case.v, 1e25), (case.grad, 1e15), (case.q, 1e-19), (case.k, 1e-19)):
        array *= np.float32(size)
    case.scale = 1.0
    gradients = case.backward(native)
    assert np.abs(gradients["query"]).max() > 1e20
    assert_close(case, gradients, case.expected(), 400)


def test_sums_beyond_float32_on_the_way_are_finite_in_the_end(native):
    """Rows that add 2e38 to a key's gradient, then rows that take it away."""
    case = draw(np.random.default_rng(5), groups=1, queries=128, keys=2, d_k=1, d_v=1, scale=1.0)
    case.q[...] = np.where(np.arange(128) < 64, 4.0, -4.0)[:, None]
    case.k[...] = 0
    case.v[...] = np.array([1e20, -1e20])[:, None]
    case.grad[...] = 1e18
    gradients = case.backward(native)
    assert all(np.isfinite(gradients[name]).all() for name in NAMES)
    expected = case.expected()
    np.testing.assert_allclose(gradients["value"], expected["value"], rtol=1e-6)
    np.testing.assert_allclose(gradients["key"], expected["key"], atol=1e34)


def test_a_head_in_the_float64_fallback_has_its_own_maxima(native):
    """Logits of 1e10, which float32 rounds by hundreds: its maxima have nothing to say beside scores in float64."""
    case = draw(np.random.default_rng(6), groups=1, queries=128, keys=2, d_k=1, d_v=1, scale=1.0)
    case.q[...] = (101966.6 + np.arange(128) / 64.0)[:, None]
    case.k[...] = 101966.6
    case.v[...] = 0
    case.grad[...] = np.where(np.arange(128) < 64, 3e37, -2.9e37)[:, None]
    gradients = case.backward(native)
    np.testing.assert_allclose(gradients["value"], case.expected()["value"], rtol=1e-5)


def test_a_dominating_sink_keeps_the_digits(native):
    case = draw(np.random.default_rng(6), queries=64, sinks=np.array([75.0, 3.0]))
    gradients, expected = case.backward(native), case.expected()
    np.testing.assert_allclose(gradients["value"][:, 0], expected["value"][:, 0], rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(gradients["query"][:, 0], expected["query"][:, 0], rtol=1e-4, atol=1e-37)


def test_leading_axes_that_do_not_join_are_gone_through_one_by_one(native):
    rng = np.random.default_rng(7)
    whole = draw(rng, batch=6, queries=9, keys=23, last=3, sinks=np.zeros(2))
    together = whole.backward(native)
    uneven = Case(
        *(whole.__dict__[name].reshape(3, 2, *whole.__dict__[name].shape[1:]) for name in ("q", "k", "v", "grad"))
    )
    uneven.last, uneven.sinks = whole.last, whole.sinks
    for name in ("q", "k", "v", "grad"):
        array = getattr(uneven, name)
        setattr(uneven, name, np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1))
    apart = uneven.backward(native)
    assert all(apart[name].tobytes() == together[name].tobytes() for name in NAMES)


def same_precision(case):
    """The textbook's gradients evaluated in float32, matrix by matrix."""
    q, k, v, grad = (x[0] for x in (case.q, case.k, case.v, case.grad))
    scale = np.float32(case.scale)
    logits = np.where(visible_keys(case)[0], scale * q @ k.swapaxes(-1, -2), np.float32(-np.inf))
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    delta = (grad * (weights @ v)).sum(axis=-1, keepdims=True)
    slopes = weights * (grad @ v.swapaxes(-1, -2) - delta)
    turned = slopes.swapaxes(-1, -2)
    assert slopes.dtype == np.float32
    return {
        "query": scale * (slopes @ k),
        "key": scale * (turned @ q),
        "value": weights.swapaxes(-1, -2) @ grad,
        "scale": (q * (slopes @ k)).sum(axis=-1),
    }


@pytest.mark.parametrize("last", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_float32_errors_are_within_three_times_an_evaluation_in_float32(native, last, sharpness):
    case = draw(
        np.random.default_rng(8), groups=2, queries=512, keys=512, d_k=64, d_v=64, last=last, scale=sharpness / 8.0
    )
    gradients, expected, peer = case.backward(native), case.expected(), same_precision(case)
    for name, right in expected.items():
        if name == "sinks":
            continue
        errors = [
            np.abs(computed[name].astype(np.float64).reshape(right.shape) - right) for computed in (gradients, peer)
        ]
        for measure in (np.max, np.mean):
            assert measure(errors[0]) <= 3 * measure(errors[1]), (name, measure.__name__)


def test_an_unknown_dtype_or_mask_is_an_error(native):
    case = draw(np.random.default_rng(9))
    for place, code in ((1, 4), (1, -1), (2, 6)):
        arguments = list(case.arguments())
        arguments[place] = code
        with pytest.raises(ValueError, match=r"no such (dtype|kind of mask)"):
            kernel.forward(native, 1, *arguments, np.empty(case.grad.shape, np.float32), None, None)


def test_ctrl_c_stops_a_long_pass(native):
    """One head whose pieces take longer than anyone would wait: asked in the middle of them."""
    rng = np.random.default_rng(10)
    case = draw(rng, "float64", groups=1, queries=6000, keys=6000, d_k=64, d_v=64)
    output, saved = np.zeros(case.grad.shape), np.stack([np.zeros((1, 1, 6000)), np.full((1, 1, 6000), 6e3)])

    def stop(*_):
        raise InterruptedError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        start = time.monotonic()
        with pytest.raises(InterruptedError):
            case.backward(native, forward=(output, None, saved))
        assert time.monotonic() - start < 2.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
