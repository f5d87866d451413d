"""Benchmark task with a whole Hugging Face model: GPT-2 from its configuration, with exchangeable attention.

Weights are random and shared by all contenders; nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.contender import MODEL, MODEL_PEERS, Contender, NotForThisCaseError, TimedCall
from benchmarks.task import Array, ContenderResult, Errors, Truth
from sqrtdk.errors import MissingExtraError

# Logits are checked at this many first tokens of the last sequence. The model is causal, so later tokens do not
# affect them.
CHECKED_TOKENS = 256
_QUICK_TOKENS = 128
# Standard deviation of entries of q and k; logits have its square, sharp enough to reveal a wrong scale.
_SPREAD = 1.4


class ModelInputs(NamedTuple):
    """Model in evaluation mode and float32, and tokens `[B, L]`."""

    model: Any
    tokens: Any


class LogitTruth(NamedTuple):
    """Logits `[R, vocabulary]` in float64 for the first R tokens of the last sequence."""

    logits: Array

    def compare(self, answer: ContenderResult) -> Errors:
        """Return the largest error relative to the largest logit."""
        logits = answer.output[-1, : len(self.logits)]
        return Errors(float(np.abs(logits - self.logits).max() / np.abs(self.logits).max()))


@dataclass(frozen=True)
class ModelCase:
    """Logits of a GPT-2 for all tokens, without gradients or cache. The defaults are those of GPT-2 small."""

    batch: int
    tokens: int
    model: str = "GPT-2 small"
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50257
    suite: str = "model"

    dtype: ClassVar[str] = "float32"
    sets: ClassVar[int] = 1
    error_of: ClassVar[str] = "logits, relative"

    @property
    def name(self) -> str:
        """Return the name of the model and the number of tokens.

        >>> ModelCase(4, 512).name
        'GPT-2 small, 4×512 tokens'
        """
        return f"{self.model}, {self.batch}×{self.tokens} tokens"

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Return (B, L, layers, H, width, vocabulary)."""
        return self.batch, self.tokens, self.layers, self.heads, self.width, self.vocabulary

    def settings(self) -> dict[str, Any]:
        """Return further settings of the configuration."""
        return {}

    def make_inputs(self, rng: np.random.Generator) -> list[ModelInputs]:
        """Return a model with random weights, and random tokens; torch's random stream is unchanged."""
        import torch

        transformers = import_module("transformers")
        config = transformers.GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.tokens,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            initializer_range=_SPREAD / self.width**0.5,
            bos_token_id=None,
            eos_token_id=None,
            **self.settings(),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**31)))
            model = transformers.GPT2LMHeadModel(config).eval()
        return [ModelInputs(model, torch.from_numpy(rng.integers(self.vocabulary, size=(self.batch, self.tokens))))]

    def compute_truth(self, inputs: ModelInputs) -> Truth:
        """Return the logits in float64, with the eager attention of transformers."""
        exact = copy.deepcopy(inputs.model).double()
        exact.set_attn_implementation("eager")
        return LogitTruth(_predict(exact, inputs.tokens[-1:, :CHECKED_TOKENS])[0].numpy())

    def multiply_adds(self) -> int:
        """Return the multiply-adds of projections, attention and the last layer, without hidden pairs.

        >>> ModelCase(1, 2, layers=1, heads=1, width=1, vocabulary=10).multiply_adds()
        50
        """
        seen = self.batch * self.tokens * (self.tokens + 1) // 2
        weights = self.layers * 12 * self.width**2 + self.width * self.vocabulary
        return self.batch * self.tokens * weights + self.layers * 2 * self.width * seen

    def bytes_read(self) -> None:
        """Return None: the task is not judged by reading."""

    def shorten(self, longest: int) -> ModelCase:
        """Return the case with one short sequence."""
        return replace(self, batch=1, tokens=min(self.tokens, longest, _QUICK_TOKENS))


def _predict(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def _prepare(implementation: str) -> Callable[[ModelCase, ModelInputs, int], TimedCall]:
    def prepare(case: ModelCase, inputs: ModelInputs, threads: int) -> TimedCall:
        if implementation == "sqrtdk":
            register_sqrtdk()
        shared = {id(tensor): tensor for tensor in (*inputs.model.parameters(), *inputs.model.buffers())}
        model = copy.deepcopy(inputs.model, shared)
        model.set_attn_implementation(implementation)
        return lambda: _predict(model, inputs.tokens)

    return prepare


def register_sqrtdk() -> None:
    """Register sqrtdk with transformers; raise `NotForThisCaseError` if transformers is too old."""
    from sqrtdk.torch.huggingface import register_huggingface

    try:
        register_huggingface()
    except MissingExtraError as reason:  # transformers is too old
        raise NotForThisCaseError(str(reason)) from None


def _read(logits: Any) -> ContenderResult:
    return ContenderResult(logits.numpy())


MODEL_CONTENDERS = tuple(
    Contender(name, ("torch", "transformers"), _prepare(name.removeprefix("model with ")), _read)
    for name in (MODEL, *MODEL_PEERS)
)
