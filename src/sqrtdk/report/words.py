"""Recorded sentences: the weights between their tokens in every head of MiniLM, at any temperature."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib import resources
from typing import Any

__all__ = ["find_row", "measure_row", "read_sentences", "render_view", "render_words"]


@lru_cache
def read_sentences() -> dict[str, Any]:
    """Return the sentences that come with sqrtdk, with the command that records them.

    >>> len(read_sentences()["sentences"])
    3
    """
    content: dict[str, Any] = json.loads(
        (resources.files("sqrtdk.records.data") / "sentences.json").read_text(encoding="utf-8")
    )
    return content


def measure_row(nats: Sequence[int | None], factor: float) -> dict[str, float]:
    """Measure a row at a factor on the model's scale: largest weight and effective keys; `words.js` does the same.

    Args:
        nats: hundredths of −ln(weight), None for a hidden key.
        factor: 1 gives the recorded weights.

    >>> measure_row([69, 69, None], 1.0)["effective_keys"]
    2.0
    """
    least = min(value for value in nats if value is not None)
    raised = [0.0 if value is None else math.exp(-factor * (value - least) / 100.0) for value in nats]
    total = math.fsum(raised)
    weights = [value / total for value in raised]
    return {"max_weight": max(weights), "effective_keys": 1.0 / math.fsum(weight * weight for weight in weights)}


def render_view(head: str) -> str:
    """Render the view that `words.js` fills, below what chooses the sentence."""
    return (
        f'<div class="words">{head}<div class="words-tokens" role="group" aria-label="Tokens: choose a query"></div>'
        '<p class="words-says" aria-live="polite"></p><div class="words-slider">'
        '<label for="words-temperature">temperature τ: the scores of this head divided by it</label>'
        '<input type="range" id="words-temperature" class="words-temperature" min="0" max="200" step="1">'
        '<div class="words-marks"></div></div>'
        '<div class="words-below"><figure><figcaption>Weights of this query over all tokens</figcaption>'
        '<svg class="small-chart words-bars" role="img" aria-label="Weights of the chosen query"></svg></figure>'
        "<figure><figcaption>Layers × heads: choose one; dark is sharp</figcaption>"
        '<div class="words-map"></div><p class="words-pattern"></p></figure></div></div>'
    )


def render_words() -> str:
    """Render the recorded sentences with their data."""
    recorded = read_sentences()
    options = "".join(
        f'<option value="{at}">{escape(sentence["text"])}</option>' for at, sentence in enumerate(recorded["sentences"])
    )
    data = json.dumps(recorded, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    head = f'<label class="words-choice">sentence <select>{options}</select></label>'
    return f'{render_view(head)}<script type="application/json" id="recorded-sentences">{data}</script>'


def find_row(sentence: Mapping[str, Any], layer: int, head: int, row: int) -> list[int | None]:
    """Return one recorded row of a head."""
    found = next(one for one in sentence["heads"] if (one["layer"], one["head"]) == (layer, head))
    rows: list[list[int | None]] = found["nats"]
    return rows[row]
