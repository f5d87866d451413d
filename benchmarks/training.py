"""Benchmark task with a training step of a Hugging Face model: forward, backward, AdamW, exchangeable attention.

Every contender trains its own copy from the same random weights. The check compares the gradient before the first step,
without dropout, because each attention samples its own dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.contender import TRAINING, TRAINING_PEER, TRAINING_WITH_STATISTICS, Contender, TimedCall
from benchmarks.model import ModelCase, ModelInputs, register_sqrtdk
from benchmarks.task import Array, ContenderResult, Errors, Truth

# Number of tokens of the last sequence on which the gradient is checked.
CHECKED_TOKENS = 64
_LEARNING_RATE = 1e-5
_WITH_STATISTICS = "sqrtdk-with-statistics"


class TrainingTruth(NamedTuple):
    """Gradient of the first layer's projection to q, k and v, in float64."""

    gradient: Array

    def compare(self, answer: ContenderResult) -> Errors:
        """Return the largest error relative to the largest entry."""
        assert answer.gradients is not None
        return Errors(float(np.abs(answer.gradients[0] - self.gradient).max() / np.abs(self.gradient).max()))


@dataclass(frozen=True)
class TrainingCase(ModelCase):
    """One step on all tokens; `dropout` applies to weights, residuals and embeddings, as in GPT-2."""

    dropout: float = 0.0
    suite: str = "training"

    error_of: ClassVar[str] = "a gradient, relative"

    @property
    def name(self) -> str:
        """Return the name of the model, the number of tokens and the dropout.

        >>> TrainingCase(4, 512, dropout=0.1).name
        'GPT-2 small, 4×512 tokens, training step, dropout 0.1'
        """
        return f"{super().name}, training step, dropout {self.dropout:g}"

    def settings(self) -> dict[str, Any]:
        """Return the dropout probabilities."""
        return dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), self.dropout)

    def make_inputs(self, rng: np.random.Generator) -> list[ModelInputs]:
        """Return a model with random weights, and random tokens."""
        made = super().make_inputs(rng)
        made[0].model.loss_type = "ForCausalLM"  # the model's own choice, set here to avoid its warning
        return made

    def compute_truth(self, inputs: ModelInputs) -> Truth:
        """Return the gradient in float64, with the eager attention of transformers."""
        exact = copy.deepcopy(inputs.model).double()
        exact.set_attn_implementation("eager")
        return TrainingTruth(_differentiate(exact, inputs.tokens))

    def multiply_adds(self) -> int:
        """Return the multiply-adds: three times those of the forward pass, and one recomputed product of attention."""
        forward = super().multiply_adds()
        seen = self.batch * self.tokens * (self.tokens + 1) // 2
        return 3 * forward + self.layers * self.width * seen

    def shorten(self, longest: int) -> TrainingCase:
        """Return the case with one short sequence."""
        short = super().shorten(longest)
        return replace(self, batch=short.batch, tokens=short.tokens)


def _differentiate(model: Any, tokens: Any) -> Array:
    """Return the gradient of the first projection, without dropout; the model stays in training mode."""
    import torch

    model.eval()
    checked = tokens[-1:, :CHECKED_TOKENS]
    loss = model(checked, labels=checked, use_cache=False).loss
    (gradient,) = torch.autograd.grad(loss, [model.transformer.h[0].attn.c_attn.weight])
    model.train()
    return np.asarray(gradient.numpy())


def _prepare(implementation: str) -> Callable[[TrainingCase, ModelInputs, int], TimedCall]:
    def prepare(case: TrainingCase, inputs: ModelInputs, threads: int) -> TimedCall:
        import torch

        if implementation != "sdpa":
            register_sqrtdk()
        if implementation == _WITH_STATISTICS:
            _register_with_statistics()
        model = copy.deepcopy(inputs.model)
        model.set_attn_implementation(implementation)
        answer = ContenderResult(np.empty(0), gradients=(_differentiate(model, inputs.tokens),))
        optimiser = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

        def step() -> ContenderResult:
            model(inputs.tokens, labels=inputs.tokens, use_cache=False).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            return answer

        return step

    return prepare


def _register_with_statistics() -> None:
    """Register sqrtdk's attention with unused statistics of every row, to time the statistics alone."""
    from sqrtdk.torch import attention
    from sqrtdk.torch.huggingface import make_mask

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, dropout: float = 0.0, **rest: Any
    ) -> tuple[Any, None]:
        causal = mask is None
        result: Any = attention(query, key, value, scale=scaling, mask=mask, causal=causal, dropout=dropout)
        return result.output.transpose(1, 2).contiguous(), None

    transformers = import_module("transformers")
    transformers.AttentionInterface.register(_WITH_STATISTICS, attend)
    transformers.AttentionMaskInterface.register(_WITH_STATISTICS, make_mask)


_IMPLEMENTATIONS = {TRAINING: "sqrtdk", TRAINING_WITH_STATISTICS: _WITH_STATISTICS, TRAINING_PEER: "sdpa"}

TRAINING_CONTENDERS = tuple(
    Contender(name, ("torch", "transformers"), _prepare(implementation), lambda answer: answer)
    for name, implementation in _IMPLEMENTATIONS.items()
)
