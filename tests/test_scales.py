"""Every scaling policy: its numbers computed on their own, where it does nothing, and in which direction it goes."""

import dataclasses
import math

import numpy as np
import pytest

from oracle import attention_by_definition
from sqrtdk import SqrtdkError, attention, scales


def context(d_k=64, positions=(0,), visible=(1,)):
    return scales.ScaleContext(d_k, np.asarray(positions), lambda: np.asarray(visible))


def noise(seed=0, queries=6, keys=6, d_k=16, heads=2):
    rng = np.random.default_rng(seed)
    return (
        2.0 * rng.standard_normal((heads, queries, d_k)),
        rng.standard_normal((heads, keys, d_k)),
        rng.standard_normal((heads, keys, 3)),
    )


def entropy(scale, **call):
    return float(attention(*noise(**call), scale=scale).statistics.entropy.mean())


NAMES = ["none", "sqrt", "inverse", "fixed", "temperature", "mup", "log_n", "yarn", "llama4", "cosine", "qk_norm"]


def test_the_registry_knows_the_policies_and_each_states_formula_and_source():
    assert scales.names()[: len(NAMES)] == NAMES
    for name in NAMES:
        policy = scales.get(name, 3.0) if name == "fixed" else scales.get(name)
        assert policy.name == name
        assert policy.formula
        assert policy.source
        assert type(policy).__doc__


@pytest.mark.parametrize(
    ("policy", "d_k", "expected"),
    [
        (scales.NoScaling(), 64, 1.0),
        (scales.Sqrt(), 64, 0.125),
        (scales.Sqrt(), 512, 0.04419417382415922),
        (scales.Inverse(), 64, 0.015625),
        (scales.Fixed(10.0), 64, 0.1),
        (scales.Temperature(0.5), 64, 0.25),
        (scales.Temperature(2.0), 64, 0.0625),
        (scales.Mup(), 128, 0.0625),
        (scales.Mup(16.0, 3.0), 32, 0.375),
        (scales.Yarn(4.0), 64, 0.16205962409758827),
        (scales.Yarn(16.0), 64, 0.20392377833435856),
        (scales.Cosine(), 64, 10.0),
        (scales.Cosine(0.0), 64, 1.0),
        (scales.Cosine(9.0), 64, 100.0),
        (scales.QKNorm(), 64, 0.125),
        (scales.QKNorm(3.0), 64, 0.375),
    ],
    ids=str,
)
def test_formulas_with_numbers_computed_elsewhere(policy, d_k, expected):
    assert float(policy.factor(context(d_k))) == pytest.approx(expected, rel=1e-14)


def test_log_n_counts_the_visible_keys():
    visible = [1, 2, 1024, 0]
    result = scales.LogN(0.5).factor(context(16, visible=visible))
    np.testing.assert_allclose(result, [0.0, 0.125 * 0.6931471805599453, 0.125 * 6.931471805599453, 0.0], rtol=1e-15)
    root = scales.LogN(power=0.5).factor(context(16, visible=visible))
    np.testing.assert_allclose(root, [0.0, 0.25 * 0.8325546111576977, 0.25 * 2.6327688477341593, 0.0], rtol=1e-15)


def test_llama4_steps_every_8192_positions():
    positions = [-100, -1, 0, 8190, 8191, 16382, 16383, 65535]
    steps = [0, 0, 0, 0, 1, 1, 2, 8]
    result = scales.Llama4().factor(context(64, positions))
    np.testing.assert_allclose(result, [(1 + 0.1 * math.log(1 + step)) / 8 for step in steps], rtol=1e-15)


NO_OPS = {
    "mup at d_base": scales.Mup(d_base=16.0),
    "temperature 1": scales.Temperature(1.0),
    "temperature of ones": scales.Temperature(np.ones((2, 1))),
    "yarn 1": scales.Yarn(1.0),
    "yarn below 1": scales.Yarn(0.25),
    "llama4 before its floor": scales.Llama4(),
    "fixed √dₖ": scales.Fixed(4.0),
    "log_n of e keys": scales.LogN(1 / math.log(6)),
    "by name": "sqrt",
    "by object": scales.Sqrt(),
    "number": 0.25,
}


@pytest.mark.parametrize("name", NO_OPS)
def test_policies_equal_the_default_where_their_formulas_agree(name):
    q, k, v = noise()
    np.testing.assert_allclose(attention(q, k, v, scale=NO_OPS[name]).output, attention(q, k, v).output, rtol=1e-12)


SHARPER = {
    "none": ("none", "sqrt"),
    "sqrt": ("sqrt", "inverse"),
    "fixed": ("fixed:2", "fixed:8"),
    "temperature": ("temperature:0.5", "temperature:1"),
    "temperature above 1": ("temperature:1", "temperature:2"),
    "mup with a larger base": (scales.Mup(64.0), scales.Mup(16.0)),
    "mup below its base": (scales.Mup(32.0), "sqrt"),
    "mup alpha": (scales.Mup(16.0, 2.0), scales.Mup(16.0)),
    "yarn": ("yarn:8", "sqrt"),
    "yarn further": ("yarn:64", "yarn:8"),
    "llama4 past its floor": (scales.Llama4(floor=2.0), "sqrt"),
    "llama4 beta": (scales.Llama4(floor=2.0, beta=0.5), scales.Llama4(floor=2.0)),
    "cosine": (scales.Cosine(3.0), scales.Cosine(2.0)),
    "qk_norm": (scales.QKNorm(2.0), scales.QKNorm()),
    "log_n": (scales.LogN(2.0), scales.LogN()),
    "log_n beyond e keys": (scales.LogN(), "sqrt"),
    "log_n against its root": (scales.LogN(), scales.LogN(power=0.5)),
}


@pytest.mark.parametrize("name", SHARPER)
def test_sharper_temperatures_have_less_entropy(name):
    sharp, soft = SHARPER[name]
    assert entropy(sharp) < entropy(soft) - 1e-3


def test_log_n_uses_the_keys_each_row_sees():
    q, k, v = noise(queries=5, keys=7)
    counts = np.array([1, 2, 3, 4, 5])
    result = attention(q, k, v, scale="log_n", causal=True, causal_offset=0)
    expected = attention_by_definition(q, k, v, scale=np.log(counts) / 4, causal=True)
    np.testing.assert_allclose(result.output, expected.output, rtol=1e-12)
    mask = np.random.default_rng(0).random((2, 5, 7)) < 0.5
    result = attention(q, k, v, scale=scales.LogN(power=0.5), mask=mask, causal=True, causal_offset=2, window=(4, None))
    counts = result.statistics.visible_keys
    assert len(np.unique(counts)) > 2
    scale = np.sqrt(np.log(np.maximum(counts, 1))) / 4
    expected = attention_by_definition(q, k, v, scale=scale, mask=mask, causal=True, causal_offset=2, window=(4, None))
    np.testing.assert_allclose(result.output, expected.output, rtol=1e-12)
    np.testing.assert_array_equal(counts, expected.rows["visible_keys"])


def test_log_n_keeps_the_saturation_index_of_gaussian_logits():
    index = []
    for n in (64, 4096):
        q, k, v = (x[:, :, :] for x in noise(queries=64, keys=n, d_k=32, heads=1))
        rows = attention(q / 2, k, v, scale=scales.LogN(power=0.5)).statistics
        index.append(float(rows.saturation_index.mean()))
    assert index[0] == pytest.approx(index[1], rel=0.05)


def test_llama4_counts_absolute_positions():
    q, k, v = noise(queries=4, keys=6)
    policy = scales.Llama4(floor=3.0, beta=1.0)
    for offset in (0, 2):
        result = attention(q, k, v, scale=policy, causal_offset=offset)
        steps = [(i + offset + 1) // 3 for i in range(4)]
        expected = attention_by_definition(q, k, v, scale=(1 + np.log1p(steps)) / 4)
        np.testing.assert_allclose(result.output, expected.output, rtol=1e-12)
    nothing = attention(q, k, v, scale=policy, causal=True, causal_offset=-10)
    assert not nothing.output.any()


@pytest.mark.parametrize("policy", ["cosine", "qk_norm"])
def test_normalisation_ignores_the_size_of_q_and_k(policy):
    q, k, v = noise()
    sizes = np.linspace(0.5, 1e3, 6)[:, None]
    plain = attention(q, k, v, scale=policy).output
    np.testing.assert_allclose(attention(q * sizes, k / 7, v, scale=policy).output, plain, rtol=1e-9)
    assert np.abs(attention(q * sizes, k, v).output - attention(q, k, v).output).max() > 0.1


def test_cosine_is_the_cosine():
    q, k, v = noise()
    unit_q, unit_k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    result = attention(q, k, v, scale=scales.Cosine(1.0))
    np.testing.assert_allclose(
        result.output, attention_by_definition(unit_q, unit_k, v, scale=math.e).output, rtol=1e-9
    )
    assert (np.abs(attention(q, q, q, scale="cosine").statistics.max_logit - 10.0) < 1e-9).all()


def test_qk_norm_divides_by_the_root_mean_square():
    q, k, v = noise()
    normed = [x / np.sqrt((x * x).mean(axis=-1, keepdims=True)) for x in (q, k)]
    result = attention(q, k, v, scale=scales.QKNorm(1.5))
    np.testing.assert_allclose(result.output, attention_by_definition(*normed, v, scale=1.5 / 4).output, rtol=1e-9)


def test_a_temperature_per_head_and_per_query():
    q, k, v = noise()
    for relative in (np.array([[0.5], [2.0]]), np.linspace(0.5, 2, 12).reshape(2, 6)):
        result = attention(q, k, v, scale=scales.Temperature(relative))
        expected = attention_by_definition(q, k, v, scale=1 / (4 * relative))
        np.testing.assert_allclose(result.output, expected.output, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_matters_and_counts_once(name):
    """Against the same policy with its factor doubled by hand: the factor multiplies q·k once, after `prepare`."""
    policy = scales.get(name, 3.0) if name == "fixed" else scales.get(name)
    q, k, v = noise()
    factor = np.asarray(policy.factor(context(16, np.arange(6), np.full(6, 6))))
    prepared = policy.prepare(q, k)
    result = attention(q, k, v, scale=policy)
    expected = attention_by_definition(*prepared, v, scale=factor)
    np.testing.assert_allclose(result.output, expected.output, rtol=1e-11)
    doubled = attention_by_definition(*prepared, v, scale=2 * factor)
    assert np.abs(result.output - doubled.output).max() > 1e-2


def test_a_custom_policy(monkeypatch):
    monkeypatch.setattr(scales, "_registry", dict(scales._registry))

    @scales.register
    @dataclasses.dataclass(frozen=True)
    class Decaying(scales.Policy):
        rate: float = 1.0
        name = "decaying"
        formula = "exp(−rate·position)"
        source = "this test"

        def factor(self, context):
            return np.exp(-self.rate * context.positions)

    assert "decaying" in scales.names()
    assert str(scales.get("decaying:0.5")) == "decaying:0.5"
    q, k, v = noise()
    expected = attention_by_definition(q, k, v, scale=np.exp(-0.5 * np.arange(6)))
    np.testing.assert_allclose(attention(q, k, v, scale="decaying:0.5").output, expected.output, rtol=1e-12)
    with pytest.raises(SqrtdkError, match="a policy named 'decaying' is registered already"):
        scales.register(Decaying)


def test_a_policy_must_say_what_it_is():
    class Silent(scales.Policy):
        name = "silent"

    with pytest.raises(SqrtdkError, match="Silent must state name, formula and source"):
        scales.register(Silent)
    assert "silent" not in scales.names()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: scales.get("sqr"), r"unknown scaling policy 'sqr'; known: cosine, fixed"),
        (lambda: scales.get("learned"), r"'learned' has parameters to train .*sqrtdk\.torch\.nn\.LearnedTemperature"),
        (lambda: attention(*noise(), scale="query"), r"'query' has parameters .*sqrtdk\.torch\.nn\.QueryTemperature"),
        (lambda: scales.get("fixed"), r"policy 'fixed' takes the parameters: divisor"),
        (lambda: scales.get("fixed:ten"), r"the parameter of 'fixed' must be a number, got 'ten'"),
        (lambda: scales.get("none:3"), r"policy 'none' takes the parameters: none"),
        (lambda: scales.get("mup", base=3), r"policy 'mup' takes the parameters: d_base, alpha"),
        (lambda: scales.Fixed(0.0), r"divisor must be positive and finite, got 0.0"),
        (lambda: scales.Fixed(None), r"divisor must be a number, got None"),
        (lambda: scales.Fixed("8"), r"divisor must be a number, got '8'"),
        (lambda: scales.Temperature(np.array([1.0, -1.0])), r"relative must be positive and finite, got array"),
        (lambda: scales.Temperature(math.inf), r"relative must be positive and finite, got inf"),
        (lambda: scales.Mup(-1.0), r"d_base must be positive and finite, got -1.0"),
        (lambda: scales.Mup(64.0, 0.0), r"alpha must be positive and finite, got 0.0"),
        (lambda: scales.LogN(0.0), r"s must be positive and finite, got 0.0"),
        (lambda: scales.LogN(power=math.nan), r"power must be positive and finite, got nan"),
        (lambda: scales.Yarn(0.0), r"extension must be positive and finite, got 0.0"),
        (lambda: scales.Llama4(floor=0.0), r"floor must be positive and finite, got 0.0"),
        (lambda: scales.QKNorm(-2.0), r"gain must be positive and finite, got -2.0"),
        (lambda: scales.Cosine(math.nan), r"log_scale must be finite, got nan"),
        (lambda: scales.Cosine("big"), r"log_scale must be a number, got 'big'"),
        (lambda: scales.resolve(3.0), r"scale must be a policy, a policy's name or None here, got float"),
    ],
)
def test_wrong_parameters_are_named(make, text):
    with pytest.raises(SqrtdkError, match=text):
        make()


def test_a_policy_is_resolved_from_none_a_name_or_an_object():
    assert scales.resolve(None) == scales.resolve("sqrt") == scales.Sqrt()
    policy = scales.Yarn(2.0)
    assert scales.resolve(policy) is policy
    assert str(scales.Sqrt()) == "sqrt"
    for text in ("fixed:10.0", "temperature:0.5", "yarn:4.0", "none", "inverse"):
        assert str(scales.get(text)) == text
