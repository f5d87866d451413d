"""Auditing a model: planted faults are found, healthy ones raise nothing, nothing changes, wrong input is named."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk import SqrtdkError
from sqrtdk.audits import Audit
from sqrtdk.torch import audit

WIDTH, HEADS, LAYERS = 32, 2, 3
D_K = WIDTH // HEADS


class Attention(nn.Module):
    """A textbook's attention: q and k times `factor`, the product times `scale`."""

    def __init__(self, scale=D_K**-0.5, factor=1.0, fused=False):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.scale, self.factor, self.fused = scale, factor, fused

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part.reshape(batch, length, HEADS, D_K).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        q = q * self.factor
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) * self.scale, dim=-1) @ v
        return y.transpose(1, 2).reshape(batch, length, WIDTH)


class Blocks(nn.Module):
    """Attention with a residual, a norm and dropout, a few times."""

    def __init__(self, *attentions):
        super().__init__()
        self.h = nn.ModuleList(attentions)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, extra=None):
        for attention in self.h:
            x = self.dropout(x + attention(self.norm(x)))
        return x


def build(*changes, **options):
    """Blocks of attention, with changed ones: (layer, options)."""
    torch.manual_seed(0)
    given = [dict(options) for _ in range(LAYERS)]
    for at, changed in changes:
        given[at].update(changed)
    return Blocks(*(Attention(**one) for one in given))


@pytest.fixture(scope="module")
def batch():
    return torch.randn(1, 300, WIDTH, generator=torch.Generator().manual_seed(1))


def rules(found):
    return [(one.rule, one.severity, one.layer) for one in found.findings]


@pytest.mark.parametrize("fused", [False, True])
def test_a_healthy_model_raises_nothing(batch, fused):
    audited = audit(build(fused=fused), batch)
    assert rules(audited) == []
    assert [scale.layer for scale in audited.scale] == ["h.0", "h.1", "h.2"]
    assert all(scale.measured == pytest.approx(D_K**-0.5) for scale in audited.scale)
    assert [(head.layer_index, head.head) for head in audited.heads] == [(i, j) for i in range(3) for j in range(2)]
    assert all(head.pattern == "broad" for head in audited.heads)
    assert (audited.unattributed, audited.unattributed_where) == (0, ())
    assert audited.about["model"] == "Blocks"
    assert audited.about["batch"] == "float32 [1, 300, 32]"


@pytest.mark.parametrize("fused", [False, True])
def test_an_omitted_scale_is_found_in_every_layer(batch, fused):
    audited = audit(build(scale=1.0, fused=fused), batch)
    assert rules(audited) == [("scale-undeclared", "warning", f"h.{at}") for at in range(LAYERS)]
    assert "No scale is applied" in audited.findings[0].cause
    assert audited.worst == "warning"


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_applied_twice_in_one_layer_is_found_there(batch, fused):
    audited = audit(build((1, {"factor": D_K**-0.5}), fused=fused), batch)
    assert rules(audited) == [
        ("scale-undeclared", "warning", "h.1"),
        ("scale-differs-between-layers", "warning", "h.1"),
    ]
    assert audited.scale[1].before_the_call == pytest.approx(D_K**-0.5)
    assert "1/√dₖ applied twice" in audited.findings[0].cause
    assert {one.layer_index for one in audited.findings} == {1}


def test_a_scale_on_the_mask_is_found(batch):
    class OnMask(Attention):
        def forward(self, x):
            q, k, v = self.project(x).chunk(3, dim=-1)
            bias = torch.linspace(-1.0, 0.0, x.shape[1])
            return torch.softmax((q @ k.transpose(-1, -2) + bias) * WIDTH**-0.5, dim=-1) @ v

    torch.manual_seed(0)
    audited = audit(Blocks(OnMask()), batch)
    assert rules(audited) == [("scale-on-mask", "warning", "h.0")]
    assert audited.scale[0].on_the_mask == pytest.approx(WIDTH**-0.5)
    assert audited.scale[0].difference < 1e-5


def test_a_declared_scale_is_what_counts(batch):
    """A configuration declares: as declared raises nothing, 1/√dₖ in its place is an error."""

    class Config:
        attention_multiplier = 0.1

    for scale, found in ((0.1, []), (D_K**-0.5, [("scale-differs-from-declared", "error")] * LAYERS)):
        model = build(scale=scale)
        model.config = Config()
        audited = audit(model, batch)
        assert [(rule, severity) for rule, severity, _ in rules(audited)] == found
        assert {one.declared for one in audited.scale} == {0.1}
        assert "attention_multiplier" in audited.scale[0].declared_by


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_weight_is_found_with_its_first_layer(batch, fused):
    model = build(fused=fused)
    with torch.no_grad():
        model.h[1].project.weight[0, 0] = torch.nan
    audited = audit(model, batch)
    assert ("non-finite-rows", "error", "h.1") in rules(audited)
    (finding,) = (one for one in audited.findings if one.rule == "non-finite-rows")
    assert finding.layer_index == 1
    json.dumps(audited.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("dtype", "fused", "found"),
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)],
)
def test_rounding_is_reported_only_where_logits_are_rounded(batch, dtype, fused, found):
    """Scores of several hundred: bfloat16 cannot tell neighbours there, but fused kernels keep float32."""
    model = build(fused=fused)
    with torch.no_grad():
        model.h[2].project.weight[: 2 * WIDTH] *= 60.0
    audited = audit(model.to(dtype), batch.to(dtype))
    assert {one.logits_dtype for one in audited.scale} == {"bfloat16" if found else "float32"}
    assert max(head.score_max for head in audited.heads) > 300
    seen = [one for one in audited.findings if one.rule == "score-rounding"]
    assert bool(seen) is found
    assert {one.layer for one in seen} <= {"h.2"}
    assert not [one for one in audited.findings if "scale" in one.rule]


def test_mode_random_streams_and_weights_are_as_before(batch):
    model = build().train()
    model.h[1].eval()
    modes = [module.training for module in model.modules()]
    weights = [parameter.clone() for parameter in model.parameters()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002

    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model
            self.batch_norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            random.seed(3)
            np.random.seed(3)  # noqa: NPY002
            torch.manual_seed(3)
            return self.batch_norm(self.blocks(x).transpose(1, 2))

    careless = Careless()
    first = audit(careless, batch)
    assert audit(careless, batch).as_json()["heads"] == first.as_json()["heads"]  # no dropout inside
    assert [module.training for module in model.modules()] == modes
    assert careless.training
    assert int(careless.batch_norm.num_batches_tracked) == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.is_grad_enabled()


def test_a_failing_call_changes_nothing_and_says_what_did_not_fit(batch):
    model = build().train()
    with pytest.raises(
        SqrtdkError, match=r"batch must fit the model, got float32 \[1, 300, 7\], for which Blocks raised"
    ):
        audit(model, torch.randn(1, 300, 7))
    with pytest.raises(SqrtdkError, match=r"got \{y: float32 \[1, 300, 32\]\}, for which Blocks raised TypeError"):
        audit(model, {"y": batch})
    assert all(module.training for module in model.modules())
    assert not nn.modules.module._global_forward_hooks
    assert audit(model, batch).findings == ()


def test_a_batch_is_a_tensor_a_tuple_or_a_dict(batch):
    model = build()
    heads = [audit(model, given).heads for given in (batch, (batch, None), [batch], {"x": batch})]
    assert all(other == heads[0] for other in heads)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (nn.Linear(4, 4), torch.zeros(2, 4), "model must compute attention, got Linear, in which none was recognised"),
        ("gpt2", torch.zeros(2, 4), "model must be a torch.nn.Module, got str"),
        (nn.Linear(4, 4), "text", "batch must be a tensor, a tuple of arguments or a dict .*, got str"),
        (nn.Linear(4, 4), None, "batch must be a tensor, .* got NoneType"),
        (nn.Linear(4, 4), {1: 2}, "batch must have names of arguments as keys, got 1"),
    ],
)
def test_wrong_input_is_named(model, given, message):
    with pytest.raises(SqrtdkError, match=message):
        audit(model, given)


def test_unattributed_computations_are_counted_and_named(batch):
    """A temperature on the weights after exp cancels; what replaces scores by a number in between is not followed."""

    class Strange(Attention):
        def forward(self, x):
            q, k, v = self.project(x).chunk(3, dim=-1)
            scores = (q @ k.transpose(-1, -2)).sort(dim=-1).values
            return torch.softmax(scores, dim=-1) @ v

    torch.manual_seed(0)
    audited = audit(Blocks(Attention(), Strange()), batch)
    assert (audited.unattributed, audited.unattributed_where) == (1, ("h.1",))
    assert "Not understood: 1 call that looks like attention, in h.1" in repr(audited)
    alone = audit(Blocks(Strange()), batch)
    assert (alone.heads, alone.unattributed) == ((), 1)


def test_hostile_names_are_data_and_the_record_comes_back(batch):
    class Hostile(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<script>alert(1)</script>", Attention())

        def forward(self, x):
            return next(self.children())(x)

    audited = audit(Hostile(), batch)
    assert audited.heads[0].layer == "<script>alert(1)</script>"
    assert "<script" not in audited._repr_html_()
    assert Audit.from_json(json.loads(json.dumps(audited.as_json(), allow_nan=False))) == audited


@pytest.mark.long
def test_layers_that_share_their_weights_are_audited_one_by_one():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    passes = 4
    config = transformers.AlbertConfig(
        vocab_size=100,
        embedding_size=16,
        hidden_size=WIDTH,
        num_hidden_layers=passes,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
    )
    model = transformers.AlbertModel(config)
    found = audit(model, {"input_ids": torch.randint(100, (2, 160))})
    (path,) = {name.rsplit(" (call", 1)[0] for name in found.layers}
    assert list(found.layers) == [f"{path} (call {call})" for call in range(passes)]
    assert dict(model.named_modules())[path] is not None
    assert [head.call for head in found.heads] == [call for call in range(passes) for _ in range(HEADS)]
    assert [(one.call, one.layer_index, one.declared_by is not None) for one in found.scale] == [
        (call, call, True) for call in range(passes)
    ]
    assert f"Audit of AlbertModel: {passes} layers, {passes * HEADS} heads" in repr(found)
    assert f"each call a layer: {path} ({passes} times)." in repr(found)
    assert Audit.from_json(json.loads(json.dumps(found.as_json()))) == found
    # Each layer has the rows of its own pass.
    assert {head.rows for head in found.heads} == {320}
    assert len({head.entropy_ratio for head in found.heads}) == passes * HEADS


def test_a_module_that_is_called_once_has_no_call():
    found = audit(build(), torch.randn(2, 40, WIDTH))
    assert {head.call for head in found.heads} == {one.call for one in found.scale} == {None}
    assert "each call a layer" not in repr(found)
