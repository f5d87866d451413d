"""The small causal transformer that is trained, with a scale that can be swapped and weights that pair up.

Shapes: B sequences, H heads, L positions (queries and keys), D = dₖ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.lab.spec import RunSpec
from sqrtdk.lab.tasks import Task
from sqrtdk.scales import LEARNABLE, Policy, ScaleContext, resolve
from sqrtdk.torch.nn import make_learnable
from sqrtdk.torch.scales import LearnableScale, TensorContext

_WEIGHT_STREAM = 1
_QUERY_KEY_STREAM = 2


@dataclass(frozen=True)
class SeenAttention:
    """What one layer's attention did in a pass: `[B, H, L, L]` each; logits are finite above the diagonal too.

    `factor` is what multiplied q·k, a number or a tensor that broadcasts to `[B, H, L, 1]`.
    """

    logits: Tensor
    weights: Tensor
    factor: float | Tensor = 1.0


@dataclass(frozen=True)
class _Fixed:
    """A policy without parameters to train, and its factor at this dₖ and length."""

    policy: Policy
    factor: float | Tensor


def draw_query_key(rng: np.random.Generator, init: str, d_out: int, d_in: int, d_k: int) -> Tensor:
    """Draw W_q or W_k, `[d_out, d_in]`, d_out = heads·dₖ.

    For an input of mean square 1 an entry of q has variance 1 (`unit`), 1/3 (`torch`: uniform in ±1/√d_in as
    nn.Linear), 2·d_in/(d_in + d_out) (`xavier`, uniform) or 1/√dₖ (`absorbed`: unit times dₖ^(−1/4), so that
    q·k carries the factor 1/√dₖ without any scale).
    """
    if init in ("unit", "absorbed"):
        weight = rng.standard_normal((d_out, d_in)) / math.sqrt(d_in)
        weight *= d_k**-0.25 if init == "absorbed" else 1.0
    else:
        bound = 1.0 / math.sqrt(d_in) if init == "torch" else math.sqrt(6.0 / (d_in + d_out))
        weight = rng.uniform(-bound, bound, (d_out, d_in))
    return torch.tensor(weight, dtype=torch.float32)


class _Block(nn.Module):
    """Attention and, if it has a width, a feed-forward part, each on the normalised stream and added to it."""

    def __init__(self, spec: RunSpec, rng: np.random.Generator, query_key_rng: np.random.Generator) -> None:
        super().__init__()
        d_model, d_out = spec.d_model, spec.heads * spec.d_k
        self.heads = spec.heads
        self.learnable = nn.ModuleDict()
        self.w_q = nn.Parameter(draw_query_key(query_key_rng, spec.init, d_out, d_model, spec.d_k))
        self.w_k = nn.Parameter(draw_query_key(query_key_rng, spec.init, d_out, d_model, spec.d_k))
        self.w_v = _draw(rng, d_model, d_model)
        self.w_o = _draw(rng, d_model, d_model)
        self.w_in = _draw(rng, spec.feedforward, d_model) if spec.feedforward else None
        self.w_out = _draw(rng, d_model, spec.feedforward) if spec.feedforward else None

    def forward(self, x: Tensor, scale: str | _Fixed, hidden: Tensor) -> tuple[Tensor, SeenAttention]:
        normed = _normalise(x)
        q, k, factor = self._scaled(scale, self._split(normed @ self.w_q.T), self._split(normed @ self.w_k.T))
        logits = (q @ k.transpose(-1, -2)) * factor
        weights = logits.masked_fill(hidden, -math.inf).softmax(dim=-1)
        mixed = weights @ self._split(normed @ self.w_v.T)
        x = x + mixed.transpose(1, 2).reshape(x.shape) @ self.w_o.T
        if self.w_in is not None and self.w_out is not None:
            x = x + functional.gelu(_normalise(x) @ self.w_in.T) @ self.w_out.T
        return x, SeenAttention(logits, weights, factor)

    def _scaled(self, scale: str | _Fixed, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
        """What enters the product, and what multiplies it."""
        if isinstance(scale, _Fixed):
            return *scale.policy.prepare(q, k), scale.factor
        module = self.learnable[scale]
        assert isinstance(module, LearnableScale)
        length = q.shape[-2]
        context = TensorContext(q, lambda: torch.arange(length), lambda: torch.arange(1, length + 1))
        return *module.prepare(q, k), module.factor(context).unsqueeze(-1)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)


class Transformer(nn.Module):
    """A pre-norm decoder with learned positions, no biases, and norms without gain.

    Embeddings and positions have unit variance, all other weights variance 1/fan-in, W_q and W_k as `init` says.
    The seed draws W_q and W_k from a stream of their own: with one seed, runs that differ in scale or init
    have all other weights in common, to the bit. A scale that learns has a module in each block, which begins as a
    constant and draws nothing.
    """

    def __init__(self, spec: RunSpec, task: Task) -> None:
        super().__init__()
        rng = np.random.default_rng([_WEIGHT_STREAM, spec.seed])
        query_key_rng = np.random.default_rng([_QUERY_KEY_STREAM, spec.seed])
        self.embedding = _draw(rng, task.alphabet, spec.d_model, fan_in=1)
        self.positions = _draw(rng, task.length, spec.d_model, fan_in=1)
        self.blocks = nn.ModuleList(_Block(spec, rng, query_key_rng) for _ in range(spec.layers))
        self.unembedding = _draw(rng, task.alphabet, spec.d_model)
        self.answers = task.answers
        self._d_k = spec.d_k
        self._heads = spec.heads
        self._hidden = torch.ones(task.length, task.length, dtype=torch.bool).triu(1)
        # Both, so that an optimiser of all parameters knows the modules before a swap.
        for scale in (spec.start_scale, spec.scale):
            if scale is not None:
                self.set_scale(scale)

    def set_scale(self, scale: str) -> None:
        """Use another scale from here on; the weights stay, and a module that has learned goes on where it was."""
        if scale in LEARNABLE:
            for block in self.blocks:
                assert isinstance(block, _Block)
                if scale not in block.learnable:
                    block.learnable[scale] = make_learnable(scale, self._d_k, self._heads)
            self._scale: str | _Fixed = scale
            return
        length = len(self._hidden)
        policy = resolve(scale)
        context = ScaleContext(
            d_k=self._d_k, positions=np.arange(length), count_visible=lambda: np.arange(1, length + 1)
        )
        self._scale = _Fixed(policy, _as_multiplier(policy.factor(context)))

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[SeenAttention]]:
        """Tokens `[B, L]` to the answers' scores `[B, T, alphabet]`, and what each layer's attention did."""
        x = self.embedding[tokens] + self.positions
        seen = []
        for block in self.blocks:
            x, seen_here = block(x, self._scale, self._hidden)
            seen.append(seen_here)
        return _normalise(x[:, -self.answers :]) @ self.unembedding.T, seen

    def query_key_gradient_norms(self) -> tuple[float, float]:
        """Norms of the loss's gradient in all layers' W_q together, and in all layers' W_k."""
        squares = [[_square(block.w_q.grad), _square(block.w_k.grad)] for block in self.blocks]
        return math.sqrt(sum(q for q, _ in squares)), math.sqrt(sum(k for _, k in squares))


def _square(gradient: Any) -> float:
    return float(gradient.double().square().sum())


def _normalise(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _draw(rng: np.random.Generator, rows: int, columns: int, fan_in: int | None = None) -> nn.Parameter:
    weight = rng.standard_normal((rows, columns)) / math.sqrt(columns if fan_in is None else fan_in)
    return nn.Parameter(torch.tensor(weight, dtype=torch.float32))


def _as_multiplier(factor: Any) -> float | Tensor:
    if np.ndim(factor) == 0:
        return float(factor)
    # One factor per query multiplies that query's row of logits.
    return torch.tensor(np.asarray(factor), dtype=torch.float32).unsqueeze(-1)


def describe_attention(seen: list[SeenAttention]) -> dict[str, float]:
    """Means over layers, heads, sequences and queries that see two keys or more.

    Returns:
        `entropy_ratio` H/ln n, `saturation_index` σ/√(2 ln n) with σ the standard deviation of a row's visible
        logits, and `jacobian_trace` 1 − Σp².
    """
    with torch.no_grad():
        logits = torch.stack([layer.logits for layer in seen])[..., 1:, :].double()
        weights = torch.stack([layer.weights for layer in seen])[..., 1:, :].double()
        length = logits.shape[-1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()[1:]
        n = visible.sum(dim=-1).double()
        entropy = -torch.xlogy(weights, weights).sum(dim=-1)
        mean = (logits * visible).sum(dim=-1) / n
        variance = ((logits - mean.unsqueeze(-1)).square() * visible).sum(dim=-1) / n
        index = variance.sqrt() / (2.0 * n.log()).sqrt()
        trace = 1.0 - weights.square().sum(dim=-1)
        return {
            "entropy_ratio": float((entropy / n.log()).mean()),
            "saturation_index": float(index.mean()),
            "jacobian_trace": float(trace.mean()),
        }


def describe_temperature(seen: list[SeenAttention], d_k: int) -> dict[str, Any]:
    """How far the temperatures are from √dₖ, over layers, heads, sequences and queries that see two keys or more.

    Returns:
        `temperature` τ/√dₖ, the geometric mean of all; `temperatures`, the geometric means of the heads, layer by
        layer, with `temperature_least` and `temperature_largest`; `temperature_spread`, the standard deviation of ln τ
        over the queries of a head (root mean square over heads).
    """
    with torch.no_grad():
        factors = [
            torch.as_tensor(layer.factor).double().expand(*layer.logits.shape[:-1], 1)[..., 1:, 0] for layer in seen
        ]
        # [layers, H, B·(L − 1)]
        log_temperature = -(torch.stack(factors) * math.sqrt(d_k)).log().transpose(1, 2).flatten(2)
        of_heads = log_temperature.mean(dim=-1)
        return {
            "temperature": math.exp(float(of_heads.mean())),
            "temperature_least": math.exp(float(of_heads.min())),
            "temperature_largest": math.exp(float(of_heads.max())),
            "temperature_spread": math.sqrt(float(log_temperature.var(dim=-1, correction=0).mean())),
            "temperatures": of_heads.exp().flatten().tolist(),
        }
