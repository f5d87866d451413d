"""The effective scale: what multiplies the product of the projections' outputs, wherever a model applies it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from torch_watched import DIMENSION, HEADS, TOKENS, WIDTH, ByHand, make_input

RIGHT = DIMENSION**-0.5


class Scaled(ByHand):
    """Causal attention by torch's operation, with what a test does to q and k before it and the scale it asks for."""

    def __init__(self, prepare=None, scale=None, project=nn.Linear):
        super().__init__()
        if project is not nn.Linear:
            self.q_proj, self.k_proj = project(WIDTH, WIDTH), project(WIDTH, WIDTH)
        self.prepare = prepare
        self.scale = scale

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.prepare is not None:
            q, k = self.prepare(q, k)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)


def rotate(x, factor=1.0, width=None, by_product=False):
    """Rotary embedding in halves, times a factor as YaRN has it, of the first columns alone if `width` says so.

    `by_product`: angles by a product of matrices, as transformers had it for long.
    """
    width = width or x.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    angles = torch.arange(x.shape[-2])[:, None] / 10.0 ** (2 * torch.arange(width // 2) / width)
    if by_product:
        frequencies = angles[1].expand(x.shape[0], -1)[:, :, None]
        positions = torch.arange(x.shape[-2]).expand(x.shape[0], -1)[:, None].float()
        angles = (frequencies @ positions).transpose(1, 2)[:, None]
    cos, sin = (f(torch.cat([angles, angles], -1)) * factor for f in (torch.cos, torch.sin))
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, kept], -1)


def rotate_complex(x):
    angles = torch.arange(x.shape[-2])[:, None] * torch.arange(1, x.shape[-1] // 2 + 1)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles.float()), angles.float())).flatten(-2)


def record_of(model, *args):
    torch.manual_seed(3)
    with watch(model) as seen:
        model(*(args or (make_input(),)))
    (record,) = seen.scales
    return record


CASES = {
    "by default": (None, None, RIGHT, 1.0),
    "omitted": (None, 1.0, 1.0, 1.0),
    "on the query, call without (Whisper, OPT, ESM)": (lambda q, k: (q * RIGHT, k), 1.0, 1.0, RIGHT),
    "applied twice": (lambda q, k: (q * RIGHT, k), None, RIGHT, RIGHT),
    "half on each": (lambda q, k: (q * RIGHT**0.5, k / RIGHT**-0.5), 1.0, 1.0, RIGHT),
    "of the model's width": (None, WIDTH**-0.5, WIDTH**-0.5, 1.0),
    "rotated": (lambda q, k: (rotate(q), rotate(k)), None, RIGHT, 1.0),
    "rotated by a product": (lambda q, k: (rotate(q, by_product=True), rotate(k, by_product=True)), None, RIGHT, 1.0),
    "rotated as complex numbers": (lambda q, k: (rotate_complex(q), rotate_complex(k)), None, RIGHT, 1.0),
    "rotated in part": (lambda q, k: (rotate(q, width=2), rotate(k, width=2)), None, RIGHT, 1.0),
    "YaRN": (lambda q, k: (rotate(q, 1.1386), rotate(k, 1.1386)), None, RIGHT, 1.1386**2),
    "scaled, then rotated": (lambda q, k: (rotate(q * RIGHT), rotate(k)), 1.0, 1.0, RIGHT),
    "a number in a tensor": (lambda q, k: (q * torch.tensor(0.25), k), 1.0, 1.0, 0.25),
}


@pytest.mark.parametrize("name", CASES)
def test_factors_before_and_at_the_call(name):
    prepare, scale, at_the_call, before = CASES[name]
    record = record_of(Scaled(prepare, scale))
    assert record.at_the_call == pytest.approx(at_the_call, rel=1e-6)
    assert record.before_the_call == pytest.approx(before, rel=1e-4)
    assert record.effective == pytest.approx(at_the_call * before, rel=1e-4)
    assert (record.d_k, record.normalised, record.softcap, record.reason) == (DIMENSION, False, None, None)


def normalise(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    "norm",
    [
        normalise,
        lambda x: functional.normalize(x, dim=-1),
        lambda x: functional.rms_norm(x, (DIMENSION,)),
        nn.LayerNorm(DIMENSION),
    ],
)
def test_norms_are_told_from_factors(norm):
    record = record_of(Scaled(lambda q, k: (rotate(norm(q)), rotate(norm(k)))))
    assert record.normalised
    assert record.before_the_call is None
    assert record.effective == pytest.approx(RIGHT)
    assert "normalised" in record.reason


def test_a_norm_over_all_heads_is_a_norm():
    class OverAll(Scaled):
        def __init__(self):
            super().__init__()
            self.q_norm = nn.RMSNorm(WIDTH)

        def forward(self, x):
            q, k, v = self.q_norm(self.q_proj(x)), self.k_proj(x), self.v_proj(x)
            return functional.scaled_dot_product_attention(*(self.split(one) for one in (q, k, v)))

    assert record_of(OverAll()).normalised


def test_where_it_cannot_be_told_it_says_why():
    by_position = 1 + 0.1 * torch.arange(TOKENS)[:, None]
    record = record_of(Scaled(lambda q, k: (q * by_position, k)))
    assert record.effective is None
    assert not record.normalised
    assert record.reason.startswith("q: its vectors are multiplied by 1 to 1.6 after their projection")

    class WithoutProjection(nn.Module):
        def forward(self, q, k):
            return functional.scaled_dot_product_attention(q, k, k)

    record = record_of(WithoutProjection(), *torch.randn(2, 1, 2, 5, 8))
    assert record.at_the_call == pytest.approx(8**-0.5)
    assert record.effective is None
    assert record.reason == "q: no projection was seen before it; k: no projection was seen before it"


def test_a_scale_per_head_is_not_one_number():
    class PerHead(ByHand):
        def forward(self, x, attention_mask=None):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-1, -2)
            weights = (scores * torch.arange(1.0, HEADS + 1)[:, None, None]).softmax(-1)
            return (weights @ v).transpose(1, 2).flatten(2)

    record = record_of(PerHead())
    assert record.at_the_call is None
    assert record.normalised
    assert "from 1 to 4" in record.reason


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


def test_per_layer_factors_and_soft_cap():
    class ByLayer(ByHand):
        def forward(self, x, attention_mask=None):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            scores = q @ k.transpose(-1, -2) / DIMENSION**0.5 / 3.0
            return 2.5 * torch.tanh(scores / 2.5), v

        def __call__(self, x):
            return super().__call__(x)

    class Capped(ByLayer):
        def forward(self, x):
            scores, v = super().forward(x)
            return scores.softmax(-1) @ v

    record = record_of(Capped())
    assert record.softcap == pytest.approx(2.5)
    assert record.effective == pytest.approx(RIGHT / 3.0)


def test_a_scale_multiplied_into_the_mask_or_after_the_exponential():
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

    class IntoMask(ByHand):
        def forward(self, x):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            bias = torch.where(visible, torch.arange(TOKENS) * 0.5, -torch.inf)
            weights = ((q @ k.transpose(-1, -2) + bias) * RIGHT).softmax(-1)
            self.weights = weights.detach()
            return weights @ v

    record = record_of(IntoMask())
    assert record.effective == pytest.approx(RIGHT)
    assert record.on_the_mask == pytest.approx(RIGHT)
    assert record.difference < 1e-5

    class AfterExponential(ByHand):
        def forward(self, x):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            scores = (q @ k.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
            exponentials = torch.exp(scores - scores.amax(-1, keepdim=True)) * RIGHT
            return exponentials / exponentials.sum(-1, keepdim=True) @ v

    assert record_of(AfterExponential()).effective == pytest.approx(1.0)


def test_records_go_into_json():
    record = record_of(Scaled())
    assert record.as_json() == {
        "layer": "",
        "d_k": DIMENSION,
        "at_the_call": RIGHT,
        "before_the_call": 1.0,
        "effective": RIGHT,
        "normalised": False,
        "softcap": None,
        "how": "exact",
        "reason": None,
        "on_the_mask": None,
        "difference": None,
        "dtype": "float32",
        "logits_dtype": "float32",
        "call": None,
        "after_the_norm": None,
    }


class Plain(ByHand):
    """Attention by hand; q and k are cast before their product if `wide` says so."""

    def __init__(self, wide=None):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (q, k) if self.wide is None else (q.to(self.wide), k.to(self.wide))
        scores = (q @ k.transpose(-1, -2) * RIGHT).float()
        return torch.softmax(scores, dim=-1).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_only_products_in_half_precision_round_logits_to_it(dtype):
    """A softmax in float32 comes too late; a fused kernel never writes them down."""
    x, name = make_input().to(dtype), str(dtype).removeprefix("torch.")
    for model, logits in ((Plain(), name), (Plain(torch.float32), "float32"), (Scaled(), "float32")):
        assert record_of(model.to(dtype), x).logits_dtype == logits
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        record = record_of(Scaled().to(dtype), x)
    assert record.logits_dtype == "float32"  # torch computes its product in float32


def unit(x):
    return functional.normalize(x, dim=-1)


GAINS = {
    "cosine × 4 (nViT)": (lambda q, k: (unit(q) * 2, unit(k) * 2), 1.0, 4.0),
    "on the query": (lambda q, k: (unit(q) * 10, unit(k)), 1.0, 10.0),
    "by hand, then rotated": (lambda q, k: (rotate(normalise(q) * 3), rotate(normalise(k))), None, 3 * RIGHT),
    "YaRN after a norm": (
        lambda q, k: (rotate(normalise(q), 1.1386), rotate(normalise(k), 1.1386)),
        None,
        RIGHT * 1.1386**2,
    ),
}


@pytest.mark.parametrize("name", GAINS)
def test_what_multiplies_normalised_vectors_counts(name):
    prepare, scale, effective = GAINS[name]
    record = record_of(Scaled(prepare, scale))
    assert record.normalised
    assert record.before_the_call is None
    assert record.effective == pytest.approx(effective, rel=1e-4)
    assert record.at_the_call * record.after_the_norm == pytest.approx(effective, rel=1e-4)
    if effective != RIGHT:
        assert "and multiplied by" in record.reason


class Gain(Scaled):
    """A learnt gain after the norm, beside it or in a module with it (QK-norm)."""

    def __init__(self, gain, own_module):
        super().__init__(scale=1.0)
        self.gain = nn.Parameter(gain)
        self.norm = Normed(gain) if own_module else None

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (self.norm(one) if self.norm is not None else unit(one) * self.gain for one in (q, k))
        return functional.scaled_dot_product_attention(q, k, v, scale=1.0)


class Normed(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.weight = nn.Parameter(gain.clone())

    def forward(self, x):
        return normalise(x) * self.weight


def test_a_learnt_gain_beside_its_norm_counts_and_one_inside_is_the_norms_own():
    even, uneven = torch.full((DIMENSION,), 2.0), torch.linspace(1.0, 2.0, DIMENSION)
    assert record_of(Gain(even, False)).effective == pytest.approx(4.0)
    record = record_of(Gain(uneven, False))
    assert record.effective is None
    assert "its entries are multiplied by 1 to 2, which is learnt" in record.reason
    for gain in (even, uneven):
        record = record_of(Gain(gain, True))
        assert (record.effective, record.after_the_norm) == (1.0, 1.0)


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
