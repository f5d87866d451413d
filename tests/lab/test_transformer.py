"""The model: causal, paired across policies, and scaled exactly once."""

import math

import numpy as np
import pytest
import torch

from sqrtdk.lab import RunSpec
from sqrtdk.lab.transformer import (
    SeenAttention,
    Transformer,
    describe_attention,
    describe_temperature,
    sample_query_key,
)
from sqrtdk.scales import LEARNABLE
from sqrtdk.torch import attention
from sqrtdk.torch.scales import LearnableScale

EVERY_SCALE = [
    "none",
    "sqrt",
    "inverse",
    "fixed:10",
    "temperature:0.5",
    "mup",
    "log_n",
    "yarn:4",
    "llama4:4",
    "cosine",
    "qk_norm",
]


def make(**changes):
    spec = RunSpec(**changes)
    return Transformer(spec, spec.make_task())


def tokens_of(spec=None, size=4, seed=0):
    return torch.from_numpy((spec or RunSpec()).make_task().sample(np.random.default_rng(seed), size).tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "init"), [("none", "rescaled"), ("inverse", "grown")])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("d_k", [16, 64])
def test_a_rescaled_start_is_the_function_of_unit_with_sqrt(heads, d_k, scale, init):
    tokens = tokens_of()
    rescaled, _ = make(scale=scale, init=init, heads=heads, d_k=d_k)(tokens)
    unit, _ = make(scale="sqrt", init="unit", heads=heads, d_k=d_k)(tokens)
    torch.testing.assert_close(rescaled, unit, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "factor"), [("none", 0.5), ("inverse", 2.0)])
def test_with_plain_gradient_descent_the_step_has_the_factor_squared(scale, factor):
    """At dₖ = 16 all factors are powers of two: with factor² on the learning rate every bit is that of 1/√dₖ."""
    losses = {}
    for name, policy, init, step in (
        ("sqrt", "sqrt", "unit", 1.0),
        ("squared", scale, "rescaled" if factor < 1 else "grown", factor**2),
        ("as with Adam", scale, "rescaled" if factor < 1 else "grown", factor),
    ):
        model = make(scale=policy, init=init, d_k=16)
        groups = [{key: group[key] for key in ("params", "lr")} for group in model.parameter_groups(0.1, step, 1e-8)]
        optimiser = torch.optim.SGD(groups)
        losses[name] = []
        for seed in range(4):
            optimiser.zero_grad()
            loss = model(tokens_of(seed=seed))[0].square().mean()
            losses[name].append(loss.item())
            loss.backward()
            optimiser.step()
    assert losses["squared"] == losses["sqrt"]
    assert losses["as with Adam"] != losses["sqrt"]


@pytest.mark.parametrize("scale", [name for name in EVERY_SCALE if name not in ("sqrt", "mup")])
def test_changing_the_scale_changes_the_output(scale):
    # mup is left out as it is 1/√dₖ at dₖ = 64, by its definition.
    tokens = tokens_of()
    outputs = [make(scale=name)(tokens)[0] for name in (scale, "sqrt")]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2


@pytest.mark.parametrize("scale", EVERY_SCALE)
def test_logits_are_the_policys(scale):
    """What the first layer's rows say of their logits, against the formula in float64, written out here per policy."""
    model = make(scale=scale, heads=2, d_k=16)
    tokens = tokens_of()
    _, seen = model(tokens, statistics=True)
    x = (model.embedding[tokens] + model.positions).detach().double().numpy()
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    block = model.blocks[0]
    q, k = (
        (x @ weight.detach().double().numpy().T).reshape(4, 24, 2, 16).swapaxes(1, 2)
        for weight in (block.w_q, block.w_k)
    )
    if scale in ("cosine", "qk_norm"):
        q, k = (vector / np.linalg.norm(vector, axis=-1, keepdims=True) for vector in (q, k))
    position = np.arange(24)
    factor = {
        "none": 1.0,
        "sqrt": 1 / 4,
        "inverse": 1 / 16,
        "fixed:10": 1 / 10,
        "temperature:0.5": 1 / 2,
        "mup": 8 / 16,
        "log_n": np.log(position + 1) / 4,
        "yarn:4": (0.1 * math.log(4) + 1) ** 2 / 4,
        "llama4:4": (1 + 0.1 * np.log1p((position + 1) // 4)) / 4,
        "cosine": 10.0,
        "qk_norm": 16 / 4,
    }[scale]
    expected = q @ k.swapaxes(-1, -2) * np.broadcast_to(factor, 24)[:, None]
    visible = np.tril(np.ones((24, 24), dtype=bool))
    rows = seen[0].statistics.numpy()
    largest = np.where(visible, expected, -np.inf).max(-1)
    mean = np.where(visible, expected, 0.0).sum(-1) / (position + 1)
    np.testing.assert_allclose(rows.max_logit, largest, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(rows.logit_mean, mean, rtol=2e-4, atol=2e-4)


def test_attention_is_causal():
    model = make(task="text", scale="sqrt", task_parameters={"context": 12})
    tokens = torch.arange(12).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 7:] += 1
    before, seen = model(tokens, statistics=True)
    after, _ = model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().min(dim=1).values.max() > 1e-3
    for layer in seen:
        assert torch.equal(layer.statistics.visible_keys, torch.arange(1, 13).expand(1, 1, 12))


def test_one_seed_gives_the_same_weights_whatever_the_scale_and_init():
    reference = make(scale="sqrt", init="unit").state_dict()
    for name, weight in make(scale="none", init="unit").state_dict().items():
        assert torch.equal(weight, reference[name]), name
    for init in ("torch", "xavier", "rescaled", "grown"):
        for name, weight in make(init=init).state_dict().items():
            is_query_key = name.endswith(("w_q", "w_k"))
            assert torch.equal(weight, reference[name]) != is_query_key, (init, name)
    assert not torch.equal(make(seed=1).embedding, make(seed=0).embedding)


@pytest.mark.parametrize(
    ("init", "variance"),
    [("unit", 1.0), ("torch", 1 / 3), ("xavier", 2 * 64 / 192), ("rescaled", 1 / 8), ("grown", 8.0)],
)
def test_init_gives_queries_the_variance_it_says(init, variance):
    rng = np.random.default_rng(0)
    weight = sample_query_key(rng, init, d_out=128, d_in=64, d_k=64).double()
    x = torch.from_numpy(rng.standard_normal((4000, 64)))
    # 8192 weights: the variance's relative standard deviation is √(2/8192) = 1.6 %; five of them.
    assert (x @ weight.T).var().item() == pytest.approx(variance, rel=0.08)


def test_unit_init_gives_logits_of_variance_d_k_and_of_one_with_sqrt():
    tokens = tokens_of(size=16)
    variances = {}
    for scale in ("none", "sqrt"):
        seen = [make(scale=scale, seed=seed)(tokens, statistics=True)[1][0] for seed in range(8)]
        # Of the last query, which sees most keys.
        variances[scale] = np.mean([float(layer.statistics.logit_variance[..., -1].mean()) for layer in seen])
    assert variances["none"] == pytest.approx(64, rel=0.2)
    assert variances["none"] / variances["sqrt"] == pytest.approx(64, rel=1e-3)


@pytest.mark.parametrize("scale", ["sqrt", "log_n", "qk_norm"])
def test_statistics_do_not_change_the_scores(scale):
    model = make(scale=scale, heads=2)
    bare, nothing = model(tokens_of())
    described, seen = model(tokens_of(), statistics=True)
    assert torch.equal(bare, described)
    assert (len(nothing), len(seen)) == (0, 2)


def test_swapping_the_scale_equals_beginning_with_it():
    model = make(scale="sqrt")
    model.set_scale("inverse")
    assert torch.equal(model(tokens_of())[0], make(scale="inverse")(tokens_of())[0])


def seen_of(q, k, scale=1.0):
    return SeenAttention(attention(q, k, k, scale=scale, causal=True).statistics, q, k, scale)


def test_description_against_numpy_row_by_row():
    q, k = np.random.default_rng(3).standard_normal((2, 2, 3, 2, 5, 8))
    logits = q @ k.swapaxes(-1, -2)
    ratios, indices, traces = [], [], []
    for place in np.ndindex(2, 3, 2, 5):
        n = place[-1] + 1
        row = logits[place][:n]
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        if n > 1:
            ratios.append(-(p * np.log(p)).sum() / np.log(n))
            indices.append(row.std() / np.sqrt(2 * np.log(n)))
            traces.append(1 - (p**2).sum())
    described = describe_attention([seen_of(*pair) for pair in zip(torch.tensor(q), torch.tensor(k), strict=True)])
    assert described["entropy_ratio"] == pytest.approx(np.mean(ratios), rel=1e-12)
    assert described["saturation_index"] == pytest.approx(np.mean(indices), rel=1e-12)
    assert described["jacobian_trace"] == pytest.approx(np.mean(traces), rel=1e-12)


def test_the_trace_of_one_hot_rows_keeps_its_digits():
    """Two keys, logits 0 and −50: 1 − Σp² = 2e^(−50) to first order; from rounded weights it would be 0."""
    q, k = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[0.0], [-50.0]]])
    assert describe_attention([seen_of(q, k)])["jacobian_trace"] == pytest.approx(2 * math.exp(-50.0), rel=1e-6)


def test_feedforward_takes_part():
    with_it, without = make(feedforward=32), make()
    assert with_it.blocks[0].w_in.shape == (32, 64)
    assert (with_it(tokens_of())[0] - without(tokens_of())[0]).abs().max() > 1e-2


def test_gradient_norms_cover_every_layer():
    model = make()
    model(tokens_of())[0].square().sum().backward()
    norm_q, norm_k = model.query_key_gradient_norms()
    for norm, name in ((norm_q, "w_q"), (norm_k, "w_k")):
        stacked = torch.cat([getattr(block, name).grad.flatten() for block in model.blocks])
        assert norm == pytest.approx(stacked.double().norm().item(), rel=1e-9)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    ("scale", "fixed"), [("learned", "sqrt"), ("query", "sqrt"), ("position", "sqrt"), ("qk_norm", "qk_norm:1")]
)
def test_a_scale_that_learns_begins_as_the_fixed_one_with_the_same_weights(scale, fixed, heads):
    """dₖ = 24: 1/√24 has no exact float, so one more or less rounding of it would show."""
    begun, reference = make(scale=scale, d_k=24, heads=heads), make(scale=fixed, d_k=24, heads=heads)
    weights = begun.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in reference.state_dict().items())
    extra = {name: weight for name, weight in weights.items() if name not in reference.state_dict()}
    assert extra
    assert all(f".learnable.{scale}." in name and not weight.any() for name, weight in extra.items())
    assert torch.equal(begun(tokens_of())[0], reference(tokens_of())[0])


@pytest.mark.slow
@pytest.mark.parametrize("scale", sorted(LEARNABLE))
def test_every_scale_parameter_gets_a_gradient_of_its_own(scale):
    model = make(scale=scale, heads=2, d_k=16)
    model(tokens_of())[0].square().sum().backward()
    parameters = {name: weight for name, weight in model.named_parameters() if ".learnable." in name}
    assert len(parameters) == 2 * (2 if scale in ("query", "position") else 1)
    for name, parameter in parameters.items():
        assert parameter.grad.abs().min() > 0.0, name
        assert len(parameter.grad.unique()) == parameter.numel(), name


@pytest.mark.slow
def test_swapping_to_a_scale_that_learns_and_back_keeps_what_it_learned():
    model = make(scale="learned")
    with torch.no_grad():
        model.blocks[0].learnable["learned"].log_gain.fill_(0.5)
    sharp = model(tokens_of())[0]
    model.set_scale("sqrt")
    assert torch.equal(model(tokens_of())[0], make(scale="sqrt")(tokens_of())[0])
    model.set_scale("learned")
    assert torch.equal(model(tokens_of())[0], sharp)
    assert not torch.equal(sharp, make(scale="learned")(tokens_of())[0])


@pytest.mark.slow
def test_a_model_with_a_swap_ahead_knows_both_scales_and_stands_at_the_last():
    model = make(scale="sqrt", start_scale="learned", start_steps=1)
    assert torch.equal(model(tokens_of())[0], make(scale="sqrt")(tokens_of())[0])
    with torch.no_grad():
        model.blocks[0].learnable["learned"].log_gain.fill_(0.5)
    assert torch.equal(model(tokens_of())[0], make(scale="sqrt")(tokens_of())[0])


class GivenFactor(LearnableScale):
    """A scale whose factor is what it was given."""

    def __init__(self, factor):
        super().__init__()
        self.given = factor

    def factor(self, context):
        return self.given


def test_temperatures_of_factors_made_by_hand():
    """Two layers, two heads, dₖ = 4: τ/√dₖ = ½ and 2 in the first, 1 and one per query in the second."""
    q = torch.zeros(3, 2, 5, 4)
    by_query = torch.tensor([7.0, 1.0, 4.0, 1.0, 4.0]).expand(3, 5)  # the first query sees one key and does not count
    first = torch.tensor([0.5, 2.0]).view(2, 1)
    second = torch.stack([torch.ones(3, 5), by_query], dim=1)
    seen = [seen_of(q, q, GivenFactor(1.0 / (2.0 * relative))) for relative in (first, second)]
    described = describe_temperature(seen, d_k=4)
    assert described["temperatures"] == pytest.approx([0.5, 2.0, 1.0, 2.0])
    least, largest = described["temperature_least"], described["temperature_largest"]
    assert (least, largest) == (pytest.approx(0.5), pytest.approx(2.0))
    assert described["temperature"] == pytest.approx(2.0**0.25)
    assert described["temperature_spread"] == pytest.approx(math.log(2.0) / 2.0)  # √(mean of 0, 0, 0 and (ln 2)²)


def test_a_fixed_scale_has_no_spread():
    _, seen = make(scale="temperature:2")(tokens_of(), statistics=True)
    described = describe_temperature(seen, 64)
    assert described["temperature"] == pytest.approx(2.0)
    assert described["temperature_spread"] == 0.0
