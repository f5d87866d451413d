"""Hints for likely mistakes: names of other libraries, masks of truth values, scales meant as divisors."""

import inspect
import re

import numpy as np
import pytest

import sqrtdk
from sqrtdk import attention, attention_gradients, scales
from sqrtdk.errors import InvalidTypeError
from sqrtdk.exercises.temperature import temperature
from sqrtdk.operation.hints import HINTS

Q = np.ones((2, 4, 5, 8), np.float32)


def functions():
    import torch

    import sqrtdk.torch

    tensor = torch.from_numpy(Q)
    return [
        (sqrtdk.attention, (Q, Q, Q)),
        (sqrtdk.attention_gradients, (Q, Q, Q, Q)),
        (sqrtdk.torch.attention, (tensor, tensor, tensor)),
    ]


@pytest.mark.parametrize("name", HINTS)
def test_another_name_is_answered_with_ours(name):
    for function, tensors in functions():
        if name in inspect.signature(function).parameters:
            continue
        with pytest.raises(InvalidTypeError, match=f"^{name}= {re.escape(HINTS[name])}$") as raised:
            function(*tensors, **{name: 1.0})
        assert raised.value.argument == name


def test_hints_name_arguments_that_there_are():
    known = set(inspect.signature(sqrtdk.torch.attention).parameters)
    for name, hint in HINTS.items():
        named = set(re.findall(r"(?<![=~])\b([a-z_]+)=", hint)) - {name}
        assert named <= known, name
        assert named or name in ("enable_gqa", "dropout"), name


def test_a_misspelt_name_is_answered_with_the_likeliest():
    for function, tensors in functions():
        with pytest.raises(InvalidTypeError, match=r"^unknown argument 'casual'; known: .*; did you mean 'causal'\?$"):
            function(*tensors, casual=True)


def test_signatures_hide_the_collector_of_unknown_names():
    for function, _ in functions():
        assert "unknown" not in str(inspect.signature(function))


class TestScalesThatWouldDivide:
    """√dₖ or dₖ as a scale, where 1/√dₖ or 1/dₖ was meant."""

    Q, K = np.random.default_rng(0).standard_normal((2, 4, 5, 64))

    @pytest.mark.parametrize(("scale", "name"), [(8.0, "√dₖ"), (8, "√dₖ"), (np.float32(8), "√dₖ"), (64.0, "dₖ")])
    def test_they_are_warned_of(self, scale, name):
        text = rf"scale is {scale:g}, which is {name}, and .* is 1/√dₖ = 0.125. To divide .* scale={1 / scale:g};"
        with pytest.warns(sqrtdk.errors.SqrtdkWarning, match=text):
            attention(self.Q, self.K, self.K, scale=scale)
        with pytest.warns(sqrtdk.errors.SqrtdkWarning, match=text):
            attention_gradients(self.Q, self.K, self.K, self.K, scale=scale)

    @pytest.mark.parametrize(
        "scale", [0.125, 1.0, 7.9, 8.001, 9.0, 63.9, 65.0, scales.Fixed(1 / 8), np.full((4, 1), 8.0)]
    )
    def test_no_other_scale_is(self, scale):
        attention(self.Q, self.K, self.K, scale=scale)  # the test configuration turns warnings into errors

    def test_vectors_of_length_one_may_be_multiplied(self):
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (self.Q, self.K))
        attention(q, k, self.K, scale=8.0)

    def test_small_sizes_and_calls_without_rows_are_not(self):
        attention(self.Q[..., :16], self.K[..., :16], self.K, scale=4.0)
        attention(self.Q[:, :0], self.K, self.K, scale=8.0)
        attention(self.Q[:, :1], self.K[:, :0], self.K[:, :0], scale=8.0)

    def test_sweeps_of_sqrtdk_itself_are_not(self):
        temperature(d_k=64, n=8, relatives=(1 / 64, 1.0), queries=4)


class TestMasksOfZerosAndOnes:
    def test_a_float_mask_of_truth_values_is_warned_of(self):
        with pytest.warns(sqrtdk.errors.SqrtdkWarning, match=r"mask is float64 and holds only zeros and ones"):
            attention(Q, Q, Q, mask=np.tri(5))

    @pytest.mark.parametrize("mask", [np.zeros((5, 5)), np.ones((5, 5)), np.tri(5) - 1, np.tri(5, dtype=bool)])
    def test_no_other_mask_is(self, mask):
        attention(Q, Q, Q, mask=mask)  # the test configuration turns warnings into errors
