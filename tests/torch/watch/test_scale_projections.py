"""The effective scale of unusual projections (adapters, quantised, fused, latent) and beside added keys and columns."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from torch_watched import DIMENSION, HEADS, RIGHT, TOKENS, WIDTH, ByHand, Scaled, make_input, record_of, rotate


class Adapted(nn.Module):
    """A projection with a low-rank adapter beside it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base_layer, self.down, self.up = nn.Linear(inputs, outputs), nn.Linear(inputs, 2), nn.Linear(2, outputs)

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.up(self.down(functional.dropout(x, 0.1)))


class Quantised(nn.Module):
    """Weights of eight bits with a scale per row, activations with a scale per token."""

    def __init__(self, inputs, outputs):
        super().__init__()
        weight = torch.randn(outputs, inputs)
        self.register_buffer("scales", weight.abs().amax(1) / 127)
        self.register_buffer("weight", (weight / self.scales[:, None]).round().to(torch.int8))

    def forward(self, x):
        by_token = x.abs().amax(-1, keepdim=True) / 127
        return functional.linear((x / by_token).round(), self.weight.to(x.dtype)) * by_token * self.scales


class BatchNormed(nn.Module):
    """A projection whose columns are shifted and scaled by a batch norm (LeViT)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)
        self.norm.weight.data.uniform_(0.5, 2.0)

    def forward(self, x):
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("project", [Adapted, Quantised, BatchNormed])
def test_the_outermost_projection_counts(project):
    record = record_of(Scaled(lambda q, k: (q * RIGHT, rotate(k)), 1.0, project))
    assert record.before_the_call == pytest.approx(RIGHT, rel=1e-4)
    assert record.effective == pytest.approx(RIGHT, rel=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_torchs_own_dynamic_quantisation():
    model = torch.ao.quantization.quantize_dynamic(Scaled(lambda q, k: (q * RIGHT, rotate(k)), 1.0).eval(), {nn.Linear})
    assert type(model.q_proj).__module__.startswith("torch.ao")
    with torch.no_grad():
        record = record_of(model)
    assert record.before_the_call == pytest.approx(RIGHT, rel=1e-4)


class Pooling(ByHand):
    """One learnt query that looks at all tokens (AIMv2's head)."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, HEADS, 1, DIMENSION))

    def forward(self, x):
        k, v = (self.split(f(x)) for f in (self.k_proj, self.v_proj))
        q = self.query.expand(x.shape[0], -1, -1, -1)
        return (q @ k.transpose(-1, -2) * RIGHT).softmax(-1) @ v


def test_a_learnt_query_is_its_own_projection():
    record = record_of(Pooling())
    assert (record.before_the_call, record.effective) == (1.0, pytest.approx(RIGHT))


class WithHeadBias(ByHand):
    """A learnt vector per head is added to scaled queries, head after token (Transformer-XL, Funnel)."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, DIMENSION))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q = q * RIGHT + self.bias * RIGHT
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def test_a_learnt_vector_per_head_is_part_of_the_projection():
    record = record_of(WithHeadBias())
    assert (record.at_the_call, record.before_the_call) == (1.0, pytest.approx(RIGHT))


class Packed(nn.Module):
    """Sequences packed in one row `[T, H, D]`, one head of rotated keys for all queries (vision towers)."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, DIMENSION)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (HEADS, DIMENSION)).transpose(0, 1)
        k = self.k_proj(x)[:, None]
        angles = torch.arange(len(x))[:, None] / torch.tensor([1.0, 10.0]).repeat(2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = k.chunk(2, dim=-1)
        k = (k * cos + torch.cat([-second, first], -1) * sin).transpose(0, 1).expand(HEADS, -1, -1)
        return (q @ k.mT * RIGHT).softmax(-1) @ k


def test_rotated_keys_of_one_head_keep_their_lengths():
    record = record_of(Packed(), make_input()[0])
    assert record.effective == pytest.approx(RIGHT, rel=1e-4)


class FusedProjection(nn.Module):
    """q, k and v from one matrix, head by head (GPT-NeoX, BLOOM), scaled in place of the call."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3, DIMENSION)).unbind(-2)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        scores = rotate(q) @ rotate(k).transpose(-1, -2)
        return (scores / math.sqrt(DIMENSION)).softmax(-1) @ v


def test_a_fused_projection():
    record = record_of(FusedProjection())
    assert (record.at_the_call, record.d_k) == (RIGHT, DIMENSION)
    assert record.before_the_call == pytest.approx(1.0, rel=1e-4)


class Latent(nn.Module):
    """Attention of DeepSeek's kind: a part without rotation from a latent vector, a rotated part that heads share."""

    def __init__(self, factor=1.0, scale=None):
        super().__init__()
        self.q_a, self.q_b = nn.Linear(WIDTH, 8), nn.Linear(8, HEADS * 12)
        self.kv_a, self.kv_b = nn.Linear(WIDTH, 6 + 4), nn.Linear(6, HEADS * (8 + 8))
        self.q_norm, self.kv_norm = nn.RMSNorm(8), nn.RMSNorm(6)
        self.factor, self.scale = factor, scale

    def forward(self, x):
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (HEADS, 12)).transpose(1, 2)
        latent, shared = self.kv_a(x).split([6, 4], dim=-1)
        k, v = self.kv_b(self.kv_norm(latent)).unflatten(-1, (HEADS, 16)).transpose(1, 2).split([8, 8], dim=-1)
        shared = rotate(shared[:, None], self.factor).expand(-1, HEADS, -1, -1)
        q = torch.cat([q[..., :8], rotate(q[..., 8:], self.factor)], -1)
        return functional.scaled_dot_product_attention(q, torch.cat([k, shared], -1), v, scale=self.scale)


def test_latent_attention_is_read_part_by_part():
    record = record_of(Latent())
    assert record.d_k == 12
    assert record.effective == pytest.approx(12**-0.5, rel=1e-4)
    wrong = record_of(Latent(scale=6**-0.5))
    assert wrong.effective == pytest.approx(6**-0.5, rel=1e-4)
    parted = record_of(Latent(factor=1.2))
    assert parted.effective is None
    assert "its parts are multiplied by 1 (8 columns) and 1.2 (4 columns)" in parted.reason


def test_columns_of_padding_do_not_count():
    def widen(q, k):
        return functional.pad(q, (0, 4)), functional.pad(k, (0, 4))

    record = record_of(Scaled(widen))
    assert record.d_k == DIMENSION
    assert record.effective == pytest.approx((DIMENSION + 4) ** -0.5)  # the scale of the padded width: a mistake


class Appended(Scaled):
    """Learnt keys before those of the tokens, and other keys of a prefix after them."""

    def __init__(self, prepare, scale=None):
        super().__init__(prepare, scale)
        self.memory = nn.Parameter(torch.randn(HEADS, 2, DIMENSION))

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.prepare(q, k)
        prefix = torch.randn(x.shape[0], HEADS, 3, DIMENSION)
        k, v = (torch.cat([self.memory.expand(len(x), -1, -1, -1), one, prefix], 2) for one in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, scale=self.scale)


@pytest.mark.parametrize(
    ("prepare", "factor"),
    [
        (lambda q, k: (q, k), 1.0),
        (lambda q, k: (q, k * 0.5), 0.5),
        (lambda q, k: (rotate(q), rotate(k)), 1.0),
        (lambda q, k: (rotate(q), rotate(k, 1.1386)), 1.1386),
    ],
)
def test_appended_keys_leave_the_scale_to_the_others(prepare, factor):
    record = record_of(Appended(prepare))
    assert record.effective == pytest.approx(RIGHT * factor, rel=1e-4)


def test_appended_keys_of_multihead_attention():
    model = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, batch_first=True)
    record = record_of(model, *[make_input()] * 3)
    assert record.effective == pytest.approx(RIGHT, rel=1e-4)


@pytest.mark.parametrize("front", [True, False])
def test_columns_beside_the_scores_are_sinks(front):
    """Several learnt logits per head, before the keys or after them, and zeros by padding."""

    class Sinks(ByHand):
        def __init__(self):
            super().__init__()
            self.sinks = nn.Parameter(torch.randn(HEADS, 1, 3))

        def forward(self, x):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            scores = q @ k.mT * RIGHT
            columns = self.sinks.expand(len(x), -1, TOKENS, -1)
            scores = torch.cat([columns, scores] if front else [scores, columns], -1)
            weights = scores.softmax(-1)[..., 3:] if front else scores.softmax(-1)[..., :-3]
            return weights @ v

    class Zeros(ByHand):
        def forward(self, x):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            weights = functional.pad(q @ k.mT * RIGHT, (2, 0) if front else (0, 2)).softmax(-1)
            return (weights[..., 2:] if front else weights[..., :-2]) @ v

    for model in (Sinks(), Zeros()):
        with torch.no_grad(), watch(model) as seen:
            model(make_input())
        assert not seen.unattributed
        assert seen.scales[0].effective == pytest.approx(RIGHT)
        assert seen.scales[0].difference < 1e-5
        assert (seen.layers[""]["sink_weight"].mean > 0).all()
        assert (seen.layers[""]["visible_keys"].mean == TOKENS).all()
