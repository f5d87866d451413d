"""The field's mistakes with the scale, each rebuilt in a few lines, found from the running model alone."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import sqrtdk
from sqrtdk.torch import watch
from sqrtdk.torch.models.declared import declared_scale

WIDTH, HEADS, TOKENS = 24, 4, 9
DIMENSION = WIDTH // HEADS
RIGHT = DIMENSION**-0.5
STRETCH = 16.0
MSCALE = 0.1 * math.log(STRETCH) + 1.0
YARN = {"rope_type": "yarn", "factor": STRETCH, "original_max_position_embeddings": 64}


class Attention(nn.Module):
    """Projections, and `attend(self, q, k, v)` that a case hands over."""

    def __init__(self, attend, index=0):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for projection in (self.q, self.k):
            projection.weight.data.mul_(3)  # flat weights would hide any scale
        self.attend, self.index = attend, index

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, DIMENSION)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.attend(self, q, k, v)[..., :DIMENSION].transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Three layers in `layers`, with a configuration if one is given."""

    def __init__(self, attend, **config):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(attend, index) for index in range(3))
        if config:
            self.config = SimpleNamespace(**config)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(functional.layer_norm(x, (WIDTH,)))
        return x


def find(model):
    """The findings about the scales of a model that ran once."""
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)))
    assert not seen.unattributed
    assert seen.scales
    scales = [
        record.as_json() | {"measured": record.effective, "declared": declared_scale(model, record).value}
        for record in seen.scales
    ]
    findings = sqrtdk.diagnose(seen.layers, scales=scales, dtype="float32")
    assert all("scale" in finding.rule for finding in findings)
    return [(finding.layer, finding.rule, finding.severity, finding.cause) for finding in findings]


def by_hand(scale):
    return lambda layer, q, k, v: (q @ k.mT * scale).softmax(-1) @ v


def by_torch(scale=None, before=1.0):
    return lambda layer, q, k, v: functional.scaled_dot_product_attention(q * before, k, v, scale=scale)


def padded(scale):
    """Heads of 6 as heads of 8, for a kernel that wants it so."""

    def attend(layer, q, k, v):
        return functional.scaled_dot_product_attention(*(functional.pad(x, (0, 2)) for x in (q, k, v)), scale=scale)

    return attend


def rotated(factor):
    def rotate(x):
        angles = torch.arange(TOKENS)[:, None] / 10.0 ** (torch.arange(DIMENSION // 2) / DIMENSION)
        cos, sin = (f(torch.cat([angles, angles], -1)) * factor for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return lambda layer, q, k, v: functional.scaled_dot_product_attention(rotate(q), rotate(k), v)


def by_layer_in_eager(layer, q, k, v):
    return (q @ k.mT * RIGHT / (layer.index + 1)).softmax(-1) @ v


def with_bias(before):
    """Distances as in ALiBi, added to scores before or after these are scaled."""

    def attend(layer, q, k, v):
        distances = -0.5 * (torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]).abs()
        scores = (q @ k.mT + distances) * RIGHT if before else q @ k.mT * RIGHT + distances
        return scores.softmax(-1) @ v

    return attend


def after_exponential(layer, q, k, v):
    scores = q @ k.mT
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True)) * RIGHT
    return exponentials / exponentials.sum(-1, keepdim=True) @ v


UNDECLARED, DECLARED = ("scale-undeclared", "warning"), ("scale-differs-from-declared", "error")
GPT2 = {"scale_attn_weights": True}
BY_LAYER = {**GPT2, "scale_attn_by_inverse_layer_idx": True}
CASES = {
    "omitted": (by_hand(RIGHT), by_hand(1.0), {}, UNDECLARED, "No scale is applied"),
    "omitted though declared": (by_hand(RIGHT), by_hand(1.0), GPT2, DECLARED, "No scale is applied"),
    "applied twice": (by_torch(1.0, RIGHT), by_torch(None, RIGHT), {}, UNDECLARED, "or 1/√dₖ applied twice"),
    "√d_model": (by_hand(RIGHT), by_hand(WIDTH**-0.5), {}, UNDECLARED, "that of 24 dimensions instead of 6"),
    "padded head": (padded(RIGHT), padded(None), {}, UNDECLARED, "that of 8 dimensions instead of 6"),
    "YaRN's factor missing": (
        *(rotated(MSCALE), rotated(1.0), {"rope_parameters": YARN}),
        *(DECLARED, "the declared one is not applied"),
    ),
    "query_pre_attn_scalar ignored": (
        *(by_torch(5**-0.5), by_torch(), {"query_pre_attn_scalar": 5}),
        *(DECLARED, "the declared one is not applied"),
    ),
    "query_pre_attn_scalar without its root": (
        *(by_torch(5**-0.5), by_torch(1 / 5), {"query_pre_attn_scalar": 5}),
        *(DECLARED, "that of 25 dimensions instead of 6"),
    ),
    "after the exponential": (by_hand(RIGHT), after_exponential, {}, UNDECLARED, "No scale is applied"),
    "into the mask": (
        *(with_bias(before=False), with_bias(before=True), {}),
        *(("scale-on-mask", "warning"), "multiplied by 0.4082 as well"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_in_every_layer_and_the_right_code_raises_nothing(name):
    right, wrong, config, (rule, severity), cause = CASES[name]
    assert find(Model(right, **config)) == []
    findings = find(Model(wrong, **config))
    assert [finding[:3] for finding in findings] == [(f"layers.{at}", rule, severity) for at in range(3)]
    assert all(cause in finding[3] for finding in findings)


def test_a_backend_that_ignores_the_scale_of_each_layer():
    assert find(Model(by_layer_in_eager, **BY_LAYER)) == []
    findings = find(Model(by_torch(), **BY_LAYER))
    # The first layer's number is one: there both are right.
    assert [finding[:3] for finding in findings] == [(f"layers.{at}", *DECLARED) for at in (1, 2)]
    assert rules_of(find(Model(by_layer_in_eager))) == {"scale-undeclared", "scale-differs-between-layers"}


def rules_of(findings):
    return {finding[1] for finding in findings}


class Latent(nn.Module):
    """Keys from a latent vector of 3, heads of 6 + 2 (the rotated part is shared): DeepSeek's attention."""

    def __init__(self, dimensions, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.down, self.up = nn.Linear(WIDTH, HEADS * 8), nn.Linear(WIDTH, 3 + 2), nn.Linear(3, HEADS * 12)
        self.scale = factor * dimensions**-0.5

    def forward(self, x):
        q = self.q(x).unflatten(-1, (HEADS, 8)).transpose(1, 2)
        latent, shared = self.down(x).split([3, 2], dim=-1)
        k, v = self.up(latent).unflatten(-1, (HEADS, 12)).transpose(1, 2).chunk(2, dim=-1)
        k = torch.cat([k, shared[:, None].expand(-1, HEADS, -1, -1)], -1)
        return functional.scaled_dot_product_attention(q, k, v, scale=self.scale)


def test_the_latent_dimension_is_not_the_heads():
    assert find(Latent(8)) == []
    ((_, rule, severity, cause),) = find(Latent(3))
    assert (rule, severity) == UNDECLARED
    assert "that of 3 dimensions instead of 8" in cause


def test_the_factor_over_all_dimensions_of_latent_heads():
    rope = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    for factor, expected in ((MSCALE**2, []), (1.0, [DECLARED]), (MSCALE, [DECLARED])):
        model = Latent(8, factor)
        model.config = SimpleNamespace(rope_parameters=rope, qk_rope_head_dim=2)
        assert [finding[1:3] for finding in find(model)] == expected


def test_a_mask_of_huge_numbers_may_be_scaled_and_terms_of_queries_must_be():
    """−∞ and its stand-ins stay what they are; what a query says about positions (Transformer-XL) is a score too."""
    hidden = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    places = torch.randn(DIMENSION, TOKENS, generator=torch.Generator().manual_seed(2))

    def attend(layer, q, k, v):
        return ((q @ k.mT + hidden) * RIGHT).softmax(-1) @ v

    def attend_places(layer, q, k, v):
        return ((q @ k.mT + q @ places) * RIGHT).softmax(-1) @ v

    assert find(Model(attend)) == []
    assert find(Model(attend_places)) == []
