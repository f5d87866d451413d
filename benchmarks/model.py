"""A whole model of transformers as a task: GPT-2 from its configuration, with one attention or another.

Weights are random; nothing is downloaded. All contenders share them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.contender import MODEL, MODEL_PEERS, Contender, NotForThisCaseError, Run
from benchmarks.task import Answer, Array, Errors, Truth
from sqrtdk.errors import MissingExtraError

# Logits are checked at this many tokens of the last sequence, the first ones: the model is causal, so the rest of the
# sequence has no influence on them.
CHECKED_TOKENS = 256
_QUICK_TOKENS = 128
# Entries of q and k have about this standard deviation, so logits its square: sharp enough for a wrong scale to show.
_SPREAD = 1.4


class ModelInputs(NamedTuple):
    """The model, in evaluation mode and float32, and tokens `[B, L]`."""

    model: Any
    tokens: Any


class LogitTruth(NamedTuple):
    """Logits `[R, vocabulary]` in float64 for the first R tokens of the last sequence."""

    logits: Array

    def compare(self, answer: Answer) -> Errors:
        """The largest error relative to the largest logit."""
        logits = answer.output[-1, : len(self.logits)]
        return Errors(float(np.abs(logits - self.logits).max() / np.abs(self.logits).max()))


@dataclass(frozen=True)
class ModelCase:
    """Logits of a GPT-2 for all tokens, without gradients and without a cache; the defaults are its small one."""

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
        """The model and the number of tokens.

        >>> ModelCase(4, 512).name
        'GPT-2 small, 4×512 tokens'
        """
        return f"{self.model}, {self.batch}×{self.tokens} tokens"

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """(B, L, layers, H, width, vocabulary)."""
        return self.batch, self.tokens, self.layers, self.heads, self.width, self.vocabulary

    def settings(self) -> dict[str, Any]:
        """What else is set in the configuration."""
        return {}

    def make_inputs(self, rng: np.random.Generator) -> list[ModelInputs]:
        """A model with random weights, and random tokens; torch's random stream is left as it was."""
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
        """What the model says in float64, with the attention that transformers writes out in full."""
        exact = copy.deepcopy(inputs.model).double()
        exact.set_attn_implementation("eager")
        return LogitTruth(_predict(exact, inputs.tokens[-1:, :CHECKED_TOKENS])[0].numpy())

    def multiply_adds(self) -> int:
        """Multiply-adds of projections, attention and the last layer, hidden pairs left out.

        >>> ModelCase(1, 2, layers=1, heads=1, width=1, vocabulary=10).multiply_adds()
        50
        """
        seen = self.batch * self.tokens * (self.tokens + 1) // 2
        weights = self.layers * 12 * self.width**2 + self.width * self.vocabulary
        return self.batch * self.tokens * weights + self.layers * 2 * self.width * seen

    def bytes_read(self) -> None:
        """Not judged by it."""

    def shorten(self, longest: int) -> ModelCase:
        """One short sequence."""
        return replace(self, batch=1, tokens=min(self.tokens, longest, _QUICK_TOKENS))


def _predict(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def _prepare(implementation: str) -> Callable[[ModelCase, ModelInputs, int], Run]:
    def prepare(case: ModelCase, inputs: ModelInputs, threads: int) -> Run:
        if implementation == "sqrtdk":
            register_sqrtdk()
        shared = {id(tensor): tensor for tensor in (*inputs.model.parameters(), *inputs.model.buffers())}
        model = copy.deepcopy(inputs.model, shared)
        model.set_attn_implementation(implementation)
        return lambda: _predict(model, inputs.tokens)

    return prepare


def register_sqrtdk() -> None:
    """Make transformers know sqrtdk; where it is too old for that, no case can be computed."""
    from sqrtdk.torch.huggingface import register_huggingface

    try:
        register_huggingface()
    except MissingExtraError as reason:  # a transformers too old for it
        raise NotForThisCaseError(str(reason)) from None


def _read(logits: Any) -> Answer:
    return Answer(logits.numpy())


MODEL_CONTENDERS = tuple(
    Contender(name, ("torch", "transformers"), _prepare(name.removeprefix("model with ")), _read)
    for name in (MODEL, *MODEL_PEERS)
)
