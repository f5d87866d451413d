"""Every wrong call of the tensor layer raises a `SqrtdkError` that names argument, expectation and what came."""

import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk import SqrtdkError, scales
from sqrtdk.errors import SqrtdkWarning
from sqrtdk.torch import attention, scaled_dot_product_attention
from sqrtdk.torch.huggingface import attend
from sqrtdk.torch.scales import LearnableScale
from torch_cases import ON_THE_BEST_AND_THE_REFERENCE

pytestmark = ON_THE_BEST_AND_THE_REFERENCE

Q = torch.ones(2, 4, 5, 8)
K = torch.ones(2, 2, 6, 8)
V = torch.ones(2, 2, 6, 3)
VALUE, TYPE = ValueError, TypeError


class NeedsThree(scales.Policy):
    name = "needs_three"

    def factor(self, context):
        return np.ones(3)


class LearnsThree(LearnableScale):
    def factor(self, context):
        return torch.ones(3, 1)


class LearnsNothing(LearnableScale):
    pass


WRONG = {
    "causal of text": ({"causal": "yes"}, TYPE, r"causal must be True or False, got 'yes'"),
    "an offset that hides nothing": ({"causal_offset": 1}, VALUE, r"causal_offset must come with causal=True"),
    "array": ({"q": np.ones((2, 4, 5, 8))}, TYPE, r"q must be a .*tensor.*, got .*ndarray"),
    "None": ({"k": None}, TYPE, r"k must be a .*tensor.*, got .*None"),
    "integers": ({"q": Q.long()}, TYPE, r"q must be .*float16, .* or float64.*, got torch.int64"),
    "complex": ({"v": V.to(torch.complex64)}, TYPE, r"v must be .*float16, .* or float64.*, got torch.complex64"),
    "float8": ({"k": K.to(torch.float8_e4m3fn)}, TYPE, r"k must be .*float16, .* or float64.*, got torch.float8"),
    "mixed dtypes": ({"k": K.double()}, TYPE, r"must have one dtype, got .*float32.*float64.*float32"),
    "mixed devices": ({"v": V.to("meta")}, TYPE, r"v must be on q's device cpu, got meta"),
    "sparse": ({"k": K.to_sparse()}, TYPE, r"k must be .*(dense|strided).*, got .*sparse"),
    "rank of query": (
        {"q": torch.ones(8)},
        VALUE,
        r"q must have shape \[\.\.\., H, L, D\] or \[L, D\], got \(8,\)",
    ),
    "no features": ({"q": torch.ones(2, 4, 5, 0)}, VALUE, r"q must have at least one feature .*\(2, 4, 5, 0\)"),
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
    "heads not a multiple": ({"q": Q[:, :3]}, VALUE, r"q must have a multiple of k's 2 heads, got 3 heads"),
    "mask shape": ({"mask": torch.ones(5, 5).bool()}, VALUE, r"mask must broadcast to .*\(2, 4, 5, 6\), got \(5, 5\)"),
    "mask rank": ({"mask": torch.ones(1, 2, 4, 5, 6).bool()}, VALUE, r"mask must broadcast to .*\(1, 2, 4, 5, 6\)"),
    "mask integers": (
        {"mask": torch.ones(5, 6).int()},
        TYPE,
        r"mask must be boolean .* additive float, got .*int32; mask != 0 makes zeros and ones boolean",
    ),
    "mask [B, S]": ({"mask": torch.ones(2, 6).bool()}, VALUE, r"got \(2, 6\); mask\[:, None, None, :\] is a mask of"),
    "mask array": ({"mask": np.ones((5, 6), bool)}, TYPE, r"mask must be .*tensor.*, got .*ndarray"),
    "mask elsewhere": (
        {"mask": torch.ones(5, 6, device="meta")},
        TYPE,
        r"mask must be on the queries' device cpu, got meta",
    ),
    "NaN scale": ({"scale": np.nan}, VALUE, r"scale must be finite, got nan"),
    "infinite scale": ({"scale": -np.inf}, VALUE, r"scale must be finite, got -inf"),
    "scale per head, 1-D": ({"scale": torch.ones(4)}, VALUE, r"scale must .*one-dimensional .*\(4,\) would mean rows"),
    "scale per row, 1-D": ({"scale": torch.ones(5)}, VALUE, r"scale must .*\(2, 4, 5\); a one-dimensional"),
    "scale shape": ({"scale": torch.ones(3, 1)}, VALUE, r"scale must broadcast to .*\(2, 4, 5\), got \(3, 1\)"),
    "boolean scale": ({"scale": True}, TYPE, r"scale must be a number, .* got True"),
    "complex scale": (
        {"scale": torch.ones(4, 1, dtype=torch.complex64)},
        TYPE,
        r"scale must be .*, got torch.complex64",
    ),
    "object scale": ({"scale": object()}, TYPE, r"scale must be a number, .* got .*object"),
    "scale elsewhere": (
        {"scale": torch.ones(4, 1, device="meta")},
        TYPE,
        r"scale must be on the queries' device cpu, got meta",
    ),
    "unknown policy": ({"scale": "sqr"}, VALUE, r"unknown scaling policy 'sqr'; known: cosine, fixed, inverse"),
    "policy's shape": ({"scale": NeedsThree()}, VALUE, r"factor of policy needs_three must broadcast to .* got \(3,\)"),
    "module's shape": ({"scale": LearnsThree()}, VALUE, r"factor of .*LearnsThree.* must broadcast to .* got \(3, 1\)"),
    "causal without offset": ({"causal": True}, VALUE, r"causal_offset must be given with 5 queries and 6 keys"),
    "window without offset": ({"window": (1, 1)}, VALUE, r"causal_offset must be given with 5 queries and 6 keys"),
    "offset 1.0": ({"causal": True, "causal_offset": 1.0}, TYPE, r"causal_offset must be an integer, got 1.0"),
    "negative window": ({"window": (-1, 0), "causal_offset": 0}, VALUE, r"each of window must be at least 0, got -1"),
    "window a number": ({"window": 4, "causal_offset": 0}, VALUE, r"window must be a pair \(left, right\), got 4"),
    "softcap 0": ({"softcap": 0.0}, VALUE, r"softcap must be positive and finite, got 0.0"),
    "softcap −1": ({"softcap": -1}, VALUE, r"softcap must be positive and finite, got -1"),
    "softcap NaN": ({"softcap": np.nan}, VALUE, r"softcap must be positive and finite, got nan"),
    "softcap text": ({"softcap": "30"}, TYPE, r"softcap must be a number, got '30'"),
    "sinks shape": ({"sinks": torch.ones(2)}, VALUE, r"sinks must have shape \[H\] = \(4,\), got \(2,\)"),
    "sinks number": ({"sinks": 1.0}, TYPE, r"sinks must be .*tensor.*, got (1.0|.*float)"),
    "sinks integers": ({"sinks": torch.ones(4).long()}, TYPE, r"sinks must be a floating tensor, .* got torch.int64"),
    "sinks elsewhere": (
        {"sinks": torch.ones(4, device="meta")},
        TYPE,
        r"sinks must be on the queries' device cpu, got meta",
    ),
    "dropout −0.1": ({"dropout": -0.1}, VALUE, r"dropout must lie in \[0, 1\], got -0.1"),
    "dropout 1.1": ({"dropout": 1.1}, VALUE, r"dropout must lie in \[0, 1\], got 1.1"),
    "dropout NaN": ({"dropout": np.nan}, VALUE, r"dropout must lie in \[0, 1\], got nan"),
    "dropout text": ({"dropout": "half"}, TYPE, r"dropout must be a probability, got 'half'"),
    "sample_rows 0": ({"sample_rows": 0}, VALUE, r"sample_rows must .*, got 0"),
    "sample_rows 2.0": ({"sample_rows": 2.0}, TYPE, r"sample_rows must be an integer, got 2\.0"),
    "sample_rows True": ({"sample_rows": True}, TYPE, r"sample_rows must be an integer, got True"),
    "pressure": ({"pressure": 1.0}, TYPE, r"pressure must be a TemperaturePressure.*, got (1.0|.*float)"),
}


def versions(call):
    return {name: value._version for name, value in call.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_name_the_argument_the_expectation_and_what_came(name):
    change, kind, text = WRONG[name]
    call = {"q": Q.clone(), "k": K.clone(), "v": V.clone()} | change
    before = versions(call)
    for leaf in (False, True):
        tensors = {
            key: value.detach().requires_grad_()
            if leaf and key in "qkv" and isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for key, value in call.items()
        }
        with pytest.raises(SqrtdkError, match=text) as raised:
            attention(**tensors)
        assert isinstance(raised.value, kind)
    assert versions(call) == before


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"query": np.ones((2, 4, 5, 8))}, TYPE, r"query must be a .*tensor.*, got .*ndarray"),
        ({"value": V.long()}, TYPE, r"value must be .*float16, .* or float64.*, got torch.int64"),
        ({"key": K.double()}, TYPE, r"must have one dtype, got"),
        ({"attn_mask": torch.ones(5, 5).bool()}, VALUE, r"attn_mask must broadcast to .*\(5, 5\)"),
        (
            {"attn_mask": torch.ones(5, 6).int()},
            TYPE,
            r"attn_mask must be boolean .* got .*int32; attn_mask != 0 makes",
        ),
        ({"dropout_p": 1.5}, VALUE, r"dropout_p must .*, got 1.5"),
        ({"query": torch.ones(8)}, VALUE, r"query must have .*, got .*\(8,\)"),
        ({"query": Q[:, :3]}, VALUE, r"query must have a multiple of key's 2 heads, got 3 heads"),
        ({"key": K[..., :7]}, VALUE, r"key must have shape .*8 from query.*, got \(2, 2, 6, 7\)"),
        ({"key": torch.ones(3, 2, 6, 8), "value": torch.ones(3, 2, 6, 3)}, VALUE, r"(leading axes|broadcast)"),
        ({"scale": float("nan")}, VALUE, r"scale must be finite, got nan"),
        ({"scale": "sqrt"}, TYPE, r"scale must be a number.*, got 'sqrt'"),
    ],
)
def test_the_drop_in_names_its_own_arguments(change, kind, text):
    call = {"query": Q, "key": K, "value": V, "enable_gqa": True} | change
    with pytest.raises(SqrtdkError, match=text) as raised:
        scaled_dot_product_attention(**call)
    assert isinstance(raised.value, kind)


WRONG_TENSORS = {
    "no tensor": None,
    "rank": torch.ones(8),
    "integers": torch.ones(2, 2, 6, 8, dtype=torch.int64),
    "batch": torch.ones(3, 2, 6, 8),
    "axes": torch.ones(6, 8),
    "dtype": torch.ones(2, 2, 6, 8, dtype=torch.float64),
    "device": torch.ones(2, 2, 6, 8, device="meta"),
}


OURS, TORCHS = ("q", "k", "v"), ("query", "key", "value")


def explain(function, names, name, wrong):
    """The words of the error of a call in which one tensor is wrong."""
    with pytest.raises(SqrtdkError) as raised:
        function(**dict.fromkeys(names, K) | {name: WRONG_TENSORS[wrong]})
    return set(re.findall(r"\w+", str(raised.value)))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_a_wrong_tensor_has_the_name_that_it_was_passed_by(wrong, place):
    words = explain(attention, OURS, OURS[place], wrong)
    assert OURS[place] in words
    assert not words & set(TORCHS)
    if wrong != "axes":  # those the drop-in broadcasts, as torch does
        words = explain(scaled_dot_product_attention, TORCHS, TORCHS[place], wrong)
        assert TORCHS[place] in words
        assert not words & set(OURS)
    if wrong not in ("no tensor", "rank"):  # which no model passes
        words = explain(partial(attend, torch.nn.Module(), attention_mask=None), TORCHS, TORCHS[place], wrong)
        assert TORCHS[place] in words
        assert not words & set(OURS)


def test_a_model_reads_the_name_of_its_mask():
    with pytest.raises(SqrtdkError, match=r"attention_mask must broadcast to .* got \(2, 2, 5, 5\)"):
        attend(torch.nn.Module(), K, K, K, torch.ones(2, 2, 5, 5).bool())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_on_the_cpu_a_scale_or_sink_tensor_must_be_finite(poison):
    with pytest.raises(ValueError, match=r"(?s)scale must be finite, got .*(nan|inf)"):
        attention(Q, K, V, scale=torch.tensor([1.0, 1.0, poison, 1.0])[:, None])
    with pytest.raises(ValueError, match=r"(?s)sinks must be finite, got .*(nan|inf)"):
        attention(Q, K, V, sinks=torch.tensor([1.0, 1.0, poison, 1.0], requires_grad=True))


@pytest.mark.slow
def test_a_causal_bias_of_torch_is_refused_for_its_elements_mean_nothing():
    from torch.nn.attention.bias import causal_upper_left

    for call in (lambda bias: attention(Q, K, V, mask=bias), lambda bias: scaled_dot_product_attention(Q, Q, Q, bias)):
        with pytest.raises(TypeError, match=r"mask must be a tensor of elements, got CausalBias; .* causal"):
            call(causal_upper_left(5, 5))


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(4, 5, 8), torch.ones(4, 3, 8)], layout=torch.jagged)
    with pytest.raises(SqrtdkError, match=r"q must be .*, got .*(nested|jagged)"):
        attention(nested, K, V)


def test_a_module_without_a_factor_is_refused():
    with pytest.raises(TypeError, match=r"LearnsNothing must define factor\(context\)"):
        attention(Q, K, V, scale=LearnsNothing())


def test_vectors_without_features_are_refused_on_the_short_way_too():
    with pytest.raises(SqrtdkError, match=r"q must have at least one feature \(D ≥ 1\), got shape \(2, 3, 0\)"):
        attention(*[torch.zeros(2, 3, 0)] * 3)
    with pytest.raises(SqrtdkError, match="query must have at least one feature"):
        scaled_dot_product_attention(*[torch.zeros(2, 3, 0)] * 3)


def test_two_dimensional_calls_speak_of_two_dimensions():
    q = torch.ones(5, 8)
    with pytest.raises(SqrtdkError, match=r"k must have shape \[S, 8\] \(8 from q\), got \(6, 7\)"):
        attention(q, torch.ones(6, 7), torch.ones(6, 2))
    assert attention(q, torch.ones(6, 8), torch.ones(6, 2), scale=torch.ones(5)).output.shape == (5, 2)


def test_inputs_are_never_modified():
    rng = np.random.default_rng(0)
    call = {
        "q": torch.from_numpy(rng.standard_normal((2, 4, 5, 8))),
        "k": torch.from_numpy(rng.standard_normal((2, 2, 6, 8))),
        "v": torch.from_numpy(rng.standard_normal((2, 2, 6, 3))),
        "mask": torch.from_numpy(np.where(rng.random((4, 5, 6)) < 0.7, 0.5, -np.inf)),
        "sinks": torch.from_numpy(rng.standard_normal(4)),
        "scale": torch.from_numpy(rng.standard_normal((4, 5))),
    }
    call["k"][0, 0, 2] = torch.nan
    call["mask"][:, :, 2] = -torch.inf
    before = {name: value.clone() for name, value in call.items()}
    leaves = {name: value.requires_grad_() for name, value in call.items()}
    count = versions(leaves)
    result = attention(**leaves, softcap=3.0, weights=True, dropout=0.3)
    (result.output.sum() + result.weights.square().sum()).backward()
    assert versions(leaves) == count
    for name, value in before.items():
        torch.testing.assert_close(leaves[name].detach(), value, rtol=0, atol=0, equal_nan=True)
        assert leaves[name].grad.isfinite().all(), name


@pytest.mark.slow
def test_without_torch_the_error_names_the_extra():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import sqrtdk\n"
        "try:\n    import sqrtdk.torch\n"
        "except sqrtdk.SqrtdkError as error:\n    assert isinstance(error, ImportError); print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert 'torch is not installed; it comes with: pip install "sqrtdk[torch]"' in done.stdout


def test_a_tensor_with_a_gradient_is_not_taken_for_an_array():
    q = torch.zeros(3, 4, requires_grad=True)
    with pytest.raises(SqrtdkError, match=r"q must be an array, got Tensor .*sqrtdk\.torch\.attention") as raised:
        sqrtdk.attention(q, q, q)
    assert isinstance(raised.value, TypeError)


def test_a_float_mask_of_zeros_and_ones_is_warned_of_in_attention_alone():
    q = torch.ones(2, 4, 4)
    mask = torch.ones(4, 4).tril()
    with pytest.warns(SqrtdkWarning, match="holds only zeros and ones"):
        attention(q, q, q, mask=mask)
    # The test configuration turns warnings into errors.
    scaled_dot_product_attention(q, q, q, attn_mask=mask)
    torch.compile(lambda q: attention(q, q, q, mask=mask).output, backend="eager", fullgraph=True)(q)


def test_a_scale_of_the_root_of_d_k_is_warned_of_in_attention_alone():
    q = torch.ones(2, 4, 64)
    with pytest.warns(SqrtdkWarning, match=r"scale is 8, which is √dₖ, .* To divide by √dₖ, give scale=0.125;"):
        attention(q, q, q, scale=8.0)
    # The test configuration turns warnings into errors.
    attention(q / 8, q / 8, q, scale=8.0)
    attention(q, q, q, scale=torch.tensor(8.0))
    for key in (torch.tensor(1.0), q.to_sparse(), torch.nested.as_nested_tensor([q, q], layout=torch.jagged)):
        with pytest.raises(SqrtdkError, match=r"^k must"):
            attention(q, key, q, scale=8.0)
    scaled_dot_product_attention(q, q, q, scale=8.0)
    torch.compile(lambda q: attention(q, q, q, scale=8.0).output, backend="eager", fullgraph=True)(q)


def test_the_drop_in_refuses_an_is_causal_that_is_neither():
    q = torch.ones(2, 4, 4)
    with pytest.raises(SqrtdkError, match="is_causal must be True or False, got 'no'"):
        scaled_dot_product_attention(q, q, q, is_causal="no")
