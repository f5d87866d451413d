"""Sentences through a stored model: its tokens, and the weights between them in every head."""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

import torch

from sqrtdk.audits.checkpoints import find_checkpoint
from sqrtdk.errors import InvalidValueError
from sqrtdk.torch.models.audit import audit
from sqrtdk.torch.models.evaluation import evaluating
from sqrtdk.torch.models.stored import StoredModel, load_model

__all__ = ["MOST_TOKENS", "SentenceReader"]

MOST_TOKENS = 512


class SentenceReader:
    """Model that reads sentences, loaded when the first one comes; it remembers the last sentence.

    Args:
        name: a directory or an installed package, as for `sqrtdk audit`.

    Raises:
        InvalidValueError: there is no such model.
    """

    def __init__(self, name: str) -> None:
        self.name, self._path = name, find_checkpoint(name)
        self._stored: StoredModel | None = None
        self._patterns: dict[tuple[int, int], dict[str, Any]] = {}
        self._scale: dict[str, float] = {}
        self._read: tuple[str, dict[str, Any], list[torch.Tensor]] | None = None

    def read(self, text: str) -> dict[str, Any]:
        """Return tokens and heads of a sentence: its entropy ratio, and the head's pattern on the text of sqrtdk.

        Raises:
            InvalidValueError: no words, or a model that does not give its weights.
        """
        return self._run(text)[0]

    def read_head(self, text: str, layer: int, head: int) -> list[list[int | None]]:
        """Return −ln(weight) of one head in hundredths, a row per query; None where the weight is 0.

        Softmax of −(−ln weight)·c gives the weights at c times the scale, since softmax ignores shifts.
        """
        _, weights = self._run(text)
        if not (0 <= layer < len(weights) and 0 <= head < len(weights[layer])):
            raise InvalidValueError("head", f"must be one of the model, got layer {layer}, head {head}")
        return [
            [None if weight <= 0.0 else round(-100.0 * math.log(weight)) for weight in row]
            for row in weights[layer][head].tolist()
        ]

    def _run(self, text: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
        if self._read is None or self._read[0] != text:
            self._read = (text, *self._measure(text))
        return self._read[1], self._read[2]

    def _load(self) -> StoredModel:
        if self._stored is None:
            stored = load_model(self._path)
            if stored.tokenizer is None:
                raise InvalidValueError("model", f"must have a tokenizer to read sentences, got {self.name!r}")
            # The weights themselves are read, which fused attention does not give.
            choose: Any = stored.model.set_attn_implementation
            choose("eager")
            text = (resources.files("sqrtdk.records.data") / "text.txt").read_text(encoding="utf-8")
            # A sentence has too few rows to tell a pattern.
            audited = audit(stored.model, self._tokenize(stored.tokenizer, text))
            self._patterns = {
                (head.layer_index, head.head): {"pattern": head.pattern, "share": head.pattern_share}
                for head in audited.heads
            }
            scale = audited.scale[0]
            used = scale.measured if scale.measured is not None else 1.0 / math.sqrt(scale.d_k)
            self._scale = {"d_k": scale.d_k, "scale": used}
            self._stored = stored
        return self._stored

    @staticmethod
    def _tokenize(tokenizer: Any, text: str) -> dict[str, torch.Tensor]:
        return dict(tokenizer(text, return_tensors="pt", truncation=True, max_length=MOST_TOKENS))

    def _measure(self, text: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
        model, tokenizer, _ = self._load()
        if not text.strip():
            raise InvalidValueError("text", "must have words, got none")
        batch = self._tokenize(tokenizer, text)
        with evaluating(model), torch.no_grad():
            output = model(**batch, output_attentions=True)
        attentions = getattr(output, "attentions", None)
        if not attentions or any(one is None for one in attentions):
            raise InvalidValueError("model", f"must give its attention weights, got none from {type(model).__name__}")
        layers = [weights[0].float() for weights in attentions]
        heads = [
            {
                "layer": layer,
                "head": head,
                "entropy_ratio": _average_entropy_ratio(weights[head]),
                **self._patterns.get((layer, head), {"pattern": "unknown", "share": None}),
            }
            for layer, weights in enumerate(layers)
            for head in range(len(weights))
        ]
        tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
        return {"model": self.name, "text": text, "tokens": tokens, **self._scale, "heads": heads}, layers


def _average_entropy_ratio(weights: torch.Tensor) -> float | None:
    """Return the mean of H/ln n over rows `[L, S]`; keys of weight 0 are not counted, rows of one key neither."""
    entropy = torch.special.entr(weights.double()).sum(dim=-1)
    keys = (weights > 0).sum(dim=-1)
    ratios = entropy[keys > 1] / keys[keys > 1].log()
    return float(ratios.mean()) if len(ratios) else None
