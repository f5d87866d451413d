"""The effective scale: what multiplies the product of the projections' outputs, wherever a model applies it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_watched import (
    DIMENSION,
    HEADS,
    RIGHT,
    TOKENS,
    WIDTH,
    ByHand,
    Scaled,
    make_input,
    normalise,
    record_of,
    rotate,
    rotate_complex,
)

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


def test_a_learned_factor_is_read_without_a_warning():
    factor = nn.Parameter(torch.tensor(0.25))
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch warns of such a reading once per process
    try:
        assert record_of(Scaled(lambda q, k: (q * factor, k), 1.0)).effective == pytest.approx(0.25, rel=1e-4)
    finally:
        torch.set_warn_always(always)


@pytest.mark.parametrize(
    "norm",
    [
        normalise,
        lambda x: functional.normalize(x, dim=-1),
        lambda x: functional.rms_norm(x, (DIMENSION,)),
        nn.LayerNorm(DIMENSION),
    ],
)
def test_norms_are_distinguished_from_factors(norm):
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


def test_an_unknown_scale_has_a_reason():
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
def test_factors_of_normalised_vectors_count(name):
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
