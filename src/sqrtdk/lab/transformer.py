"""Small causal transformer with a swappable scale and weights that pair up across runs.

Shapes: B sequences, H heads, L positions (queries and keys), D = dₖ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.lab.spec import STEPS, RunSpec, query_key_factor
from sqrtdk.lab.tasks import Task
from sqrtdk.operation.visibility import Band
from sqrtdk.scales import LEARNABLE, Policy, resolve
from sqrtdk.statistics import AttentionStatistics
from sqrtdk.torch import attention
from sqrtdk.torch.nn import make_learnable
from sqrtdk.torch.pressure import TemperaturePressure
from sqrtdk.torch.scales import LearnableScale, apply_scale

_WEIGHT_STREAM = 1
_QUERY_KEY_STREAM = 2

_CAUSAL = Band(last=0, offset=0)
_OF_HEADS = ("entropy_ratio", "saturation_index", "jacobian_trace")


class SeenAttention(NamedTuple):
    """Attention of one layer in one pass: its row statistics `[B, H, L]`, its q, k and scale, and their pressure."""

    statistics: AttentionStatistics
    query: Tensor
    key: Tensor
    scale: Policy | LearnableScale
    pressure: TemperaturePressure | None = None

    @property
    def factor(self) -> Tensor:
        """What multiplied q·k, float64 `[B, H, L]`."""
        scaled = apply_scale(self.scale, self.query, self.key, self.key, None, _CAUSAL)
        factor = torch.tensor(scaled.factor, dtype=torch.float64) if scaled.scale is None else scaled.scale
        return factor.double().expand(self.query.shape[:-1])


def sample_query_key(rng: np.random.Generator, init: str, d_out: int, d_in: int, d_k: int) -> Tensor:
    """Sample W_q or W_k, `[d_out, d_in]`, d_out = heads·dₖ.

    For an input of mean square 1 an entry of q has variance 1 (`unit`), 1/3 (`torch`: uniform in ±1/√d_in as
    nn.Linear), 2·d_in/(d_in + d_out) (`xavier`, uniform), 1/√dₖ (`rescaled`: unit times dₖ^−¼, so that q·k carries
    the factor 1/√dₖ without any scale) or √dₖ (`grown`: unit times dₖ^¼, which makes 1/√dₖ of the scale 1/dₖ).
    """
    if init in STEPS:
        weight = rng.standard_normal((d_out, d_in)) / math.sqrt(d_in) * query_key_factor(init, d_k)
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
        self.w_q = nn.Parameter(sample_query_key(query_key_rng, spec.init, d_out, d_model, spec.d_k))
        self.w_k = nn.Parameter(sample_query_key(query_key_rng, spec.init, d_out, d_model, spec.d_k))
        self.w_v = _draw(rng, d_model, d_model)
        self.w_o = _draw(rng, d_model, d_model)
        self.w_in = _draw(rng, spec.feedforward, d_model) if spec.feedforward else None
        self.w_out = _draw(rng, d_model, spec.feedforward) if spec.feedforward else None

    def forward(
        self, x: Tensor, scale: str | Policy, statistics: bool, pressure: TemperaturePressure | None
    ) -> tuple[Tensor, SeenAttention | None]:
        normed = _normalise(x)
        q, k, v = (self._split(normed @ weight.T) for weight in (self.w_q, self.w_k, self.w_v))
        used = scale if isinstance(scale, Policy) else cast(LearnableScale, self.learnable[scale])
        output, rows, _ = attention(q, k, v, scale=used, causal=True, statistics=statistics, pressure=pressure)
        mixed = cast(Tensor, output)
        x = x + mixed.transpose(1, 2).reshape(x.shape) @ self.w_o.T
        if self.w_in is not None and self.w_out is not None:
            x = x + functional.gelu(_normalise(x) @ self.w_in.T) @ self.w_out.T
        return x, None if rows is None else SeenAttention(rows, q.detach(), k.detach(), used, pressure)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)


class Transformer(nn.Module):
    """Pre-norm decoder with learned positions, no biases, and norms without gain.

    Embeddings and positions have unit variance, all other weights variance 1/fan-in, W_q and W_k as `init` says.
    The seed samples W_q and W_k from a stream of their own: with one seed, runs that differ in scale or init
    have all other weights in common, to the bit. A scale that learns has a module in each block, which begins as a
    constant and samples nothing.
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
        self._scale: str | Policy = scale if scale in LEARNABLE else resolve(scale)

    def forward(
        self, tokens: Tensor, statistics: bool = False, pressure: bool = False
    ) -> tuple[Tensor, list[SeenAttention]]:
        """Tokens `[B, L]` to the answers' scores `[B, T, alphabet]`.

        With `statistics` also what each layer's attention did in this very pass; else nothing. The scores are the same.
        With `pressure` too, the backward pass fills in the temperature pressure of each layer.
        """
        x = self.embedding[tokens] + self.positions
        seen = []
        for block in self.blocks:
            x, seen_here = block(x, self._scale, statistics, TemperaturePressure() if pressure else None)
            seen += [] if seen_here is None else [seen_here]
        return _normalise(x[:, -self.answers :]) @ self.unembedding.T, seen

    def parameter_groups(self, lr: float, factor: float, eps: float) -> list[dict[str, Any]]:
        """Parameters for Adam: W_q and W_k with the learning rate lr·factor and eps/factor, all others with lr and eps.

        Adam's step is lr·m/(√v + eps). In weights that are c times as large the gradients are 1/c times as large, so
        lr·c and eps/c make c times the step: a factor inside W_q and W_k moves as it would outside them, exactly.
        """
        query_key = [weight for block in self.blocks for weight in (block.w_q, block.w_k)]
        named = {id(weight) for weight in query_key}
        return [
            {"params": [weight for weight in self.parameters() if id(weight) not in named], "lr": lr, "eps": eps},
            {"params": query_key, "lr": lr * factor, "eps": eps / factor},
        ]

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


def describe_attention(seen: Sequence[SeenAttention]) -> dict[str, float]:
    """Return means over layers, heads, sequences and queries that see two keys or more.

    Returns:
        `entropy_ratio` H/ln n, `saturation_index` σ/√(2 ln n) with σ the standard deviation of a row's visible
        logits, and `jacobian_trace` 1 − Σp².
    """
    # The first query sees one key alone.
    means = {
        name: [float(cast(Tensor, getattr(layer.statistics, name))[..., 1:].mean()) for layer in seen]
        for name in _OF_HEADS
    }
    return {name: sum(of_layers) / len(of_layers) for name, of_layers in means.items()}


def sum_pressure(seen: Sequence[SeenAttention]) -> float | None:
    """Return ∂loss/∂log scale for a scale that all heads share, after the backward pass.

    None if it was not followed, or if a gradient is not finite.
    """
    of_layers = [layer.pressure for layer in seen]
    if any(pressure is None or pressure.per_head is None or pressure.overflows for pressure in of_layers):
        return None
    return float(sum(cast(Tensor, cast(TemperaturePressure, pressure).per_head).sum() for pressure in of_layers))


def describe_heads(seen: Sequence[SeenAttention]) -> list[dict[str, float]]:
    """Return the same for each head alone, with its `layer` and `head`: means over queries that see two keys."""
    heads = []
    for layer, attended in enumerate(seen):
        means = {name: cast(Tensor, getattr(attended.statistics, name))[..., 1:].mean(dim=(0, 2)) for name in _OF_HEADS}
        heads += [
            {"layer": layer, "head": head, **{name: float(of_heads[head]) for name, of_heads in means.items()}}
            for head in range(attended.query.shape[1])
        ]
    return heads


def describe_temperature(seen: Sequence[SeenAttention], d_k: int) -> dict[str, Any]:
    """How far the temperatures are from √dₖ, over layers, heads, sequences and queries that see two keys or more.

    Returns:
        `temperature` τ/√dₖ, the geometric mean of all; `temperatures`, the geometric means of the heads, layer by
        layer, with `temperature_least` and `temperature_largest`; `temperature_spread`, the standard deviation of ln τ
        over the queries of a head (root mean square over heads).
    """
    with torch.no_grad():
        factors = torch.stack([layer.factor for layer in seen])[..., 1:]
        # [layers, H, B·(L − 1)]
        log_temperature = -(factors * math.sqrt(d_k)).log().transpose(1, 2).flatten(2)
        of_heads = log_temperature.mean(dim=-1)
        return {
            "temperature": math.exp(float(of_heads.mean())),
            "temperature_least": math.exp(float(of_heads.min())),
            "temperature_largest": math.exp(float(of_heads.max())),
            "temperature_spread": math.sqrt(float(log_temperature.var(dim=-1, correction=0).mean())),
            "temperatures": of_heads.exp().flatten().tolist(),
        }
