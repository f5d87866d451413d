"""Every wrong call raises a `SqrtdkError` that names the argument, what was expected and what came."""

import re

import numpy as np
import pytest

from sqrtdk import SqrtdkError, attention, attention_gradients, scales

pytestmark = pytest.mark.usefixtures("backend")

Q = np.ones((2, 4, 5, 8))
K = np.ones((2, 2, 6, 8))
V = np.ones((2, 2, 6, 3))


class NeedsThree(scales.Policy):
    name = "needs_three"

    def factor(self, context):
        return np.ones(3)


class NotFinite(scales.Policy):
    name = "not_finite"

    def factor(self, context):
        return np.inf


VALUE, TYPE = ValueError, TypeError
WRONG = {
    "rank of query": ({"q": np.ones(8)}, VALUE, r"q must have shape \[\.\.\., H, L, D\] or \[L, D\], got \(8,\)"),
    "no features": ({"q": np.ones((2, 4, 5, 0))}, VALUE, r"q must have at least one feature .*\(2, 4, 5, 0\)"),
    "rank of key": ({"k": K[0]}, VALUE, r"k must have 4 axes like q, got shape \(2, 6, 8\)"),
    "rank of value": ({"v": V[0]}, VALUE, r"v must have 4 axes like q, got shape \(2, 6, 3\)"),
    "batch of key": ({"k": K[:1]}, VALUE, r"k must have the leading axes \(2,\) of q, got shape \(1, 2, 6, 8\)"),
    "d_k": ({"k": K[..., :7]}, VALUE, r"k must have shape \[\.\.\., G, S, 8\] \(8 from q\), got \(2, 2, 6, 7\)"),
    "length of value": (
        {"v": V[:, :, :5]},
        VALUE,
        r"v must have shape \[\.\.\., G, 6, V\] \(6 keys from k\), got",
    ),
    "heads of value": ({"v": V[:, :1]}, VALUE, r"v must have 2 heads like k, got shape \(2, 1, 6, 3\)"),
    "heads not a multiple": (
        {"q": Q[:, :3]},
        VALUE,
        r"q must have a multiple of k's 2 heads, got 3 heads in shape \(2, 3, 5, 8\)$",
    ),
    "no key heads": ({"k": K[:, :0], "v": V[:, :0]}, VALUE, r"a multiple of k's 0 heads, got 4 heads"),
    "integers": ({"q": Q.astype(int)}, TYPE, r"q must be a float16, bfloat16, float32 or float64 array, got int64"),
    "complex": ({"v": V.astype(complex)}, TYPE, r"v must be a float16, .* array, got complex128"),
    "text": ({"k": "abc"}, TYPE, r"k must be a float16, .* array, got <U3"),
    "None": ({"k": None}, TYPE, r"k must be a float16, .* array, got object"),
    "ragged lists": ({"q": [[1.0, 2.0], [1.0]]}, VALUE, r"q must be an array or nested lists of one shape"),
    "mixed dtypes": ({"k": K.astype(np.float32)}, TYPE, r"must have one dtype, got float64, float32 and float64"),
    "causal of text": ({"causal": "yes"}, TYPE, r"causal must be True or False, got 'yes'"),
    "causal of a number": ({"causal": 1}, TYPE, r"causal must be True or False, got 1"),
    "an offset that hides nothing": (
        {"causal_offset": 1},
        VALUE,
        r"causal_offset must come with causal=True, a window, alibi or a policy .* got causal_offset=1 alone",
    ),
    "mask shape": ({"mask": np.ones((5, 5), bool)}, VALUE, r"mask must broadcast to .* \(2, 4, 5, 6\), got \(5, 5\)$"),
    "mask rank": ({"mask": np.ones((1, 2, 4, 5, 6), bool)}, VALUE, r"mask must broadcast to .*, got \(1, 2, 4, 5, 6\)"),
    "mask of integers": (
        {"mask": np.ones((5, 6), int)},
        TYPE,
        r"mask must be boolean .* or additive float, got int64; mask != 0 makes zeros and ones boolean$",
    ),
    "mask of text": ({"mask": np.full((5, 6), "x")}, TYPE, r"mask must be boolean .* got <U1$"),
    "mask [B, S]": (
        {"mask": np.ones((2, 6), bool)},
        VALUE,
        r"got \(2, 6\); mask\[:, None, None, :\] is a mask of keys per batch entry$",
    ),
    "mask [B, L, S]": (
        {"mask": np.ones((2, 5, 6), bool)},
        VALUE,
        r"got \(2, 5, 6\); mask\[:, None\] is a mask for all heads of a batch entry$",
    ),
    "mask of swapped axes": (
        {"q": np.ones((2, 9, 4, 8)), "k": np.ones((2, 9, 4, 8)), "v": np.ones((2, 9, 4, 3)), "mask": np.eye(9) > 0},
        VALUE,
        r"got \(9, 9\); if the axes are \[..., L, H, D\], swap them with .swapaxes\(-3, -2\)$",
    ),
    "swapped axes": (
        {"q": np.ones((2, 9, 4, 8)), "k": np.ones((2, 7, 4, 8)), "v": np.ones((2, 7, 4, 3))},
        VALUE,
        r"a multiple of k's 7 heads, got 9 heads in shape \(2, 9, 4, 8\); if the axes are \[..., L, H, D\], swap them",
    ),
    "swapped axes of grouped heads": (
        {"q": np.ones((2, 9, 4, 8)), "k": np.ones((2, 9, 2, 8)), "v": np.ones((2, 9, 2, 3)), "causal": True},
        VALUE,
        r"with 4 queries and 2 keys: -2 aligns the ends, 0 the starts; if the axes are \[..., L, H, D\], swap them",
    ),
    "ragged mask": ({"mask": [[True], [True, False]]}, VALUE, r"mask must be an array or nested lists of one shape"),
    "NaN scale": ({"scale": np.nan}, VALUE, r"scale must be finite, got nan"),
    "infinite scale": ({"scale": np.full((4, 1), np.inf)}, VALUE, r"scale must be finite, got array"),
    "scale per head, 1-D": (
        {"scale": np.ones(4)},
        VALUE,
        r"one-dimensional array \(4,\) would mean rows: use scale\[:, N",
    ),
    "scale per row, 1-D": (
        {"scale": np.ones(5)},
        VALUE,
        r"scale must broadcast to .*\(2, 4, 5\); a one-dimensional array",
    ),
    "temperature, 1-D": ({"scale": scales.Temperature(np.ones(5))}, VALUE, r"policy temperature.* would mean rows"),
    "scale shape": ({"scale": np.ones((3, 1))}, VALUE, r"scale must broadcast to .*\(2, 4, 5\), got \(3, 1\)"),
    "boolean scale": ({"scale": True}, TYPE, r"scale must be a number, an array, a policy or its name, got True"),
    "complex scale": ({"scale": 1j}, TYPE, r"scale must be a number, .* got 1j"),
    "object scale": ({"scale": object()}, TYPE, r"scale must be a number, .* got <object"),
    "ragged scale": ({"scale": [[1.0], [1.0, 2.0]]}, VALUE, r"scale must be an array or nested lists of one shape"),
    "unknown policy": (
        {"scale": "sqr"},
        VALUE,
        r"unknown scaling policy 'sqr'; known: cosine, fixed, inverse, llama4, log_n, mup, none, qk_norm, sqrt, temp",
    ),
    "policy's shape": (
        {"scale": NeedsThree()},
        VALUE,
        r"the factor of policy needs_three must broadcast to .* got \(3,\)",
    ),
    "policy's value": ({"scale": NotFinite()}, VALUE, r"the factor of policy not_finite must be finite, got inf"),
    "causal without offset": (
        {"causal": True},
        VALUE,
        r"causal_offset must be given with 5 queries and 6 keys: 1 aligns the ends, 0 the starts$",
    ),
    "window without offset": ({"window": (1, 1)}, VALUE, r"causal_offset must be given with 5 queries and 6 keys"),
    "offset 1.0": ({"causal": True, "causal_offset": 1.0}, TYPE, r"causal_offset must be an integer, got 1.0"),
    "offset True": ({"causal": True, "causal_offset": True}, TYPE, r"causal_offset must be an integer, got True"),
    "negative window": (
        {"window": (-1, 0), "causal_offset": 0},
        VALUE,
        r"each of window must be at least 0, got -1",
    ),
    "window 1.5": ({"window": (1.5, 0), "causal_offset": 0}, TYPE, r"window must be an integer or None, got 1.5"),
    "window of one": (
        {"window": (1,), "causal_offset": 0},
        VALUE,
        r"window must be a pair \(left, right\), got \(1,\)",
    ),
    "window a number": ({"window": 4, "causal_offset": 0}, VALUE, r"window must be a pair \(left, right\), got 4"),
    "softcap 0": ({"softcap": 0.0}, VALUE, r"softcap must be positive and finite, got 0.0"),
    "softcap −1": ({"softcap": -1}, VALUE, r"softcap must be positive and finite, got -1"),
    "softcap NaN": ({"softcap": np.nan}, VALUE, r"softcap must be positive and finite, got nan"),
    "softcap text": ({"softcap": "30"}, TYPE, r"softcap must be a number, got '30'"),
    "sinks shape": ({"sinks": np.ones(2)}, VALUE, r"sinks must have shape \[H\] = \(4,\), got \(2,\)"),
    "sinks number": ({"sinks": 1.0}, VALUE, r"sinks must have shape \[H\] = \(4,\), got \(\)"),
    "sinks integers": ({"sinks": np.ones(4, int)}, TYPE, r"sinks must be floating, .* got int64"),
    "sinks NaN": ({"sinks": np.full(4, np.nan)}, VALUE, r"sinks must be finite, got array\(\[nan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_name_the_argument_the_expectation_and_what_came(name):
    change, kind, text = WRONG[name]
    call = {"q": Q.copy(), "k": K.copy(), "v": V.copy()} | change
    before = {key: value.copy() for key, value in call.items() if isinstance(value, np.ndarray)}
    for function, extra in ((attention, {}), (attention_gradients, {"grad_output": np.ones((2, 4, 5, 3))})):
        with pytest.raises(SqrtdkError, match=text) as raised:
            function(**call, **extra)
        assert isinstance(raised.value, kind)
    for key, value in before.items():
        np.testing.assert_array_equal(call[key], value)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "wrong", [None, np.ones(8), np.ones((2, 2, 6, 8), int), np.ones((3, 2, 6, 8)), np.ones((6, 8))]
)
def test_a_wrong_array_has_the_name_that_it_was_passed_by(name, wrong):
    call = {"q": K, "k": K, "v": K} | {name: wrong}
    for function, extra in ((attention, {}), (attention_gradients, {"grad_output": K})):
        with pytest.raises(SqrtdkError) as raised:
            function(**call, **extra)
        assert re.search(rf"\b{name}\b", str(raised.value))
        assert not re.search(r"\b(query|key|value)\b", str(raised.value))


def test_wrong_output_gradients_are_named():
    with pytest.raises(ValueError, match=r"grad_output must have the output's shape \(2, 4, 5, 3\), got \(4, 5, 3\)"):
        attention_gradients(Q, K, V, np.ones((4, 5, 3)))
    with pytest.raises(TypeError, match=r"grad_output must have the dtype of q, float64, got float32"):
        attention_gradients(Q, K, V, np.ones((2, 4, 5, 3), np.float32))
    with pytest.raises(TypeError, match=r"grad_output must be a float16, .* got int64"):
        attention_gradients(Q, K, V, np.ones((2, 4, 5, 3), int))


def test_a_policy_that_prepares_must_say_how_gradients_come_back():
    class Halved(scales.Policy):
        name = "halved"

        def factor(self, context):
            return 1.0

        def prepare(self, q, k):
            return q / 2, k / 2

    assert attention(Q, K, V, scale=Halved()).output.shape == (2, 4, 5, 3)
    with pytest.raises(SqrtdkError, match=r"Halved defines prepare and must define pull_back"):
        attention_gradients(Q, K, V, np.ones((2, 4, 5, 3)), scale=Halved())


def test_a_policy_without_a_factor_is_refused():
    class Empty(scales.Policy):
        name = "empty"

    with pytest.raises(TypeError, match=r"Empty must define factor\(context\)"):
        attention(Q, K, V, scale=Empty())


def test_two_dimensional_calls_speak_of_two_dimensions():
    q = np.ones((5, 8))
    with pytest.raises(SqrtdkError, match=r"k must have shape \[S, 8\] \(8 from q\), got \(6, 7\)"):
        attention(q, np.ones((6, 7)), np.ones((6, 2)))
    with pytest.raises(SqrtdkError, match=r"v must have shape \[6, V\] \(6 keys from k\), got \(5, 2\)"):
        attention(q, np.ones((6, 8)), np.ones((5, 2)))
    one_per_row = attention(q, np.ones((6, 8)), np.ones((6, 2)), scale=np.ones(5))
    assert one_per_row.output.shape == (5, 2)


def test_an_offset_is_for_policies_that_ask_for_positions_too():
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 8))
    early, late = (attention(q, k, v, scale="llama4", causal_offset=offset).output for offset in (0, 100_000))
    assert np.abs(early - late).max() > 1e-3
