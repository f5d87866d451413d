"""Small models for tests of `watch`: attention written in many ways, sharp enough to reveal a wrong scale."""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module

from sqrtdk.torch import watch
from sqrtdk.torch.watch.recognise.recogniser import Recogniser

BATCH, TOKENS, WIDTH, HEADS = 3, 7, 16, 4
DIMENSION = WIDTH // HEADS
RIGHT = DIMENSION**-0.5  # the usual scale of these models
ROWS = BATCH * TOKENS


def _mask(like):
    return torch.ones(like.shape[-2], like.shape[-2], dtype=torch.bool).tril()


def _textbook(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(DIMENSION)
    return scores.masked_fill(~_mask(q), -math.inf).softmax(-1), v


def _in_place(q, k, v):
    scores = q @ k.transpose(-1, -2)
    scores /= math.sqrt(DIMENSION)
    scores.masked_fill_(~_mask(q), -1e9)
    return scores.softmax(-1), v


def _einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * DIMENSION**-0.5
    return torch.where(_mask(q), scores, torch.finfo(scores.dtype).min).softmax(-1), v


def _merged_batch(q, k, v):
    """Compute in [B·H, L, D], with the query scaled first and the mask added in four axes (the style of fairseq)."""
    q, k = ((x.reshape(-1, *x.shape[-2:])) for x in (q * DIMENSION**-0.5, k))
    scores = torch.bmm(q, k.transpose(1, 2)).view(-1, HEADS, *v.shape[-2:-1], v.shape[-2])
    scores = scores + torch.zeros(v.shape[-2], v.shape[-2]).masked_fill(~_mask(v), -1e4)
    weights = scores.view(-1, *scores.shape[-2:]).softmax(-1)
    return weights.view(-1, HEADS, *weights.shape[-2:]), v


def _baddbmm(q, k, v):
    """Add a bias per head and key within the product itself (BLOOM)."""
    q, k = ((x.reshape(-1, *x.shape[-2:])) for x in (q, k))
    slopes = torch.arange(q.shape[0] * q.shape[1], dtype=q.dtype).view(q.shape[0], 1, -1) / 40
    scores = slopes.baddbmm(q, k.transpose(1, 2), beta=0.5, alpha=DIMENSION**-0.5)
    scores = scores.view(-1, HEADS, *scores.shape[-2:]).masked_fill(~_mask(v), torch.finfo(q.dtype).min)
    return scores.softmax(-1), v


def _exponentials(q, k, v):
    scores = (q @ k.transpose(-1, -2) * DIMENSION**-0.5).masked_fill(~_mask(q), -math.inf)
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True), v


def _keys_first(q, k, v):
    scores = (k @ q.transpose(-1, -2) * DIMENSION**-0.5).masked_fill(~_mask(q).T, -math.inf)
    return scores.softmax(-2).transpose(-1, -2), v


def _zeroed_and_shifted(q, k, v):
    """Multiply scores by a mask of ones and subtract a large number elsewhere (the first GPT)."""
    visible = _mask(q).to(q.dtype)
    scores = q @ k.transpose(-1, -2) * DIMENSION**-0.5
    return (scores * visible - 1e4 * (1 - visible)).softmax(-1), v


def _grouped(q, k, v):
    """Use two query heads per key head, in five axes."""
    k, v = k[:, ::2], v[:, ::2]
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q.unflatten(1, (2, 2)), k) * DIMENSION**-0.5
    weights = scores.masked_fill(~_mask(q), -math.inf).softmax(-1)
    return weights.flatten(1, 2), v.repeat_interleave(2, dim=1)


def _capped(q, k, v):
    scores = 3.0 * torch.tanh(q @ k.transpose(-1, -2) * DIMENSION**-0.5 / 3.0)
    return scores.masked_fill(~_mask(q), -math.inf).softmax(-1), v


def _in_float64(q, k, v):
    scores = (q @ k.transpose(-1, -2)).to(torch.float64) * DIMENSION**-0.5
    return scores.masked_fill(~_mask(q), -math.inf).softmax(-1).to(q.dtype), v


WAYS = {
    "textbook": _textbook,
    "in place": _in_place,
    "einsum": _einsum,
    "merged batch": _merged_batch,
    "baddbmm": _baddbmm,
    "exponentials": _exponentials,
    "keys first": _keys_first,
    "zeroed and shifted": _zeroed_and_shifted,
    "grouped": _grouped,
    "capped": _capped,
    "in float64": _in_float64,
}


class ByHand(nn.Module):
    """Self-attention written in one of the ways above; `weights` keeps the weights of the last call."""

    def __init__(self, way="textbook", dropout=0.0):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for projection in (self.q_proj, self.k_proj):
            projection.weight.data.mul_(6)
        self.way = WAYS[way]
        self.dropout = dropout
        self.num_heads = HEADS
        self.weights = None

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x, attention_mask=None):
        weights, v = self.way(*(self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj)))
        self.weights = weights.detach()
        weights = functional.dropout(weights, self.dropout, self.training)
        return (weights @ v).transpose(1, 2).flatten(2)


class Fused(ByHand):
    """Self-attention by functional.scaled_dot_product_attention, causal or with a padding mask."""

    def forward(self, x, attention_mask=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool() & _mask(q)
        output = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, dropout_p=self.dropout if self.training else 0.0
        )
        return output.transpose(1, 2).flatten(2)


class Scaled(ByHand):
    """Causal attention by torch's operation, with a test's own preparation of q and k and its own scale."""

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
    """Return the rotary embedding in halves, times a factor as in YaRN, of the first `width` columns (default: all).

    `by_product` computes the angles by a matrix product, as transformers long did.
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


def normalise(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Stack(nn.Module):
    """Two layers with a residual stream; without a second layer, the first is used twice."""

    def __init__(self, first, second=None):
        super().__init__()
        self.layers = nn.ModuleList([first, second or first])

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = x + layer(x, attention_mask=attention_mask)
        return x


def make_input(batch=BATCH, tokens=TOKENS, seed=0):
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def record_of(model, *args):
    """Return the scale record of a one-layer model, watched for one call."""
    torch.manual_seed(3)
    with watch(model) as seen:
        model(*(args or (make_input(),)))
    (record,) = seen.scales
    return record


def entropy_per_head(weights, rows=None):
    """Return the mean entropy of weights `[B, H, L, S]` per head, over some rows `[B, L]`, in float64."""
    entropy = torch.special.entr(weights.double()).sum(-1)
    rows = torch.ones(entropy.shape[0], entropy.shape[2], dtype=torch.bool) if rows is None else rows.bool()
    return torch.stack([entropy[:, head][rows].mean() for head in range(entropy.shape[1])]).numpy()


def build(make, *args, seed=0, **kwargs):
    """Return a model with the weights of a seed."""
    torch.manual_seed(seed)
    return make(*args, **kwargs)


def hooks_now():
    """Return the global hooks and call methods that torch uses for every module."""
    hooks = dict(module._global_forward_hooks), dict(module._global_forward_pre_hooks)
    is_any_mode_on = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    return *hooks, module.Module.__call__, module.Module._call_impl, is_any_mode_on


def modes_now():
    """Return the number of modes that see every operation of torch."""
    return torch._C._len_torch_dispatch_stack()


def replaced_now():
    """Return the parts of torch that a watch may have replaced or switched off."""
    return (
        functional.scaled_dot_product_attention,
        functional.multi_head_attention_forward,
        torch.backends.mha.get_fastpath_enabled(),
    )


def count_followed(monkeypatch):
    """Return a list that grows with each operation that is followed fully."""
    seen, look = [], Recogniser._look_at

    def note(self, name, *rest):
        seen.append(name)
        look(self, name, *rest)

    monkeypatch.setattr(Recogniser, "_look_at", note)
    return seen
