"""Glossary: the terms that a newcomer may not know and their meanings, for the pages and docs/glossary.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

GLOSSARY: dict[str, str] = {
    "query, key, value": "A token asks with a query, is found by its key and passes on its value: three vectors.",
    "dₖ": "the length of query and key vectors",
    "dot product": "q·k, the sum of dₖ products qᵢ·kᵢ, before any scale",
    "spread": "the standard deviation σ: the typical distance from the mean",
    "variance": "the square of the spread, σ²; variances of independent terms add up",
    "score": "scale · q·k",
    "logit": "the number that softmax receives: the score, soft-capped, plus mask or bias",
    "softmax": "turns numbers into positive weights with the sum 1: pᵢ = exp(xᵢ)/Σ exp(xⱼ)",
    "weight": "softmax of the logits",
    "head": "one attention computation with its own W_q, W_k and W_v; a layer has several",
    "row": "one query in one head",
    "n": "the number of keys that a query can see",
    "scale, temperature τ": "The scale multiplies and the temperature divides: scale = 1/τ. τ is absolute, with the "
    "default √dₖ. A factor on top of it is called *t*.",
    "effective keys": "The number of equally weighted keys that would give the same Σp². A mean over queries is the "
    "mean of 1/Σp², which is not 1 over the mean Σp².",
    "entropy ratio": "H/ln n: 1 if all keys have the same weight, 0 if one key has all the weight",
    "saturation index ρ": "The logit spread divided by √(2 ln n). Above 1 a few keys dominate.",
    "gradient": "how the loss changes with an entry; training follows it, and where it is 0 nothing is learned",
    "Jacobian trace": "1 − Σp²: how strongly the weights still respond to the logits",
    "temperature pressure": "whether the loss would fall with sharper or with softer attention",
    "declared scale, measured scale": "The declared scale is what the configuration or the model family promises. The "
    "measured scale is what the running model applies.",
    "backend, level": "A backend is an implementation of attention. A level is the CPU instruction set that it uses.",
    "fixed key (attention sink)": "a head whose rows mostly attend to one key of the sequence, often the first token",
    "`sinks=`": "one more logit per head in the denominator of softmax; it belongs to no key",
}
"""Term → meaning, in the order of docs/glossary.md. A term may list several words, separated by commas."""


def explain_terms(html: str, terms: Iterable[str]) -> str:
    """Mark the first place of each term in escaped text, so that its meaning shows on hover, touch and focus.

    Args:
        html: escaped text without tags inside the terms.
        terms: words of `GLOSSARY`; a term that the text lacks is left out.

    >>> explain_terms("Softmax weights", ["softmax"])[:70]
    '<span class="term" tabindex="0" role="note" aria-label="Softmax: turns'
    """
    places: list[tuple[int, int, str]] = []
    for term in terms:
        found = re.search(rf"(?<!\w){re.escape(term)}(s|es)?(?!\w)", html, re.IGNORECASE)
        if found and not any(found.start() < end and start < found.end() for start, end, _ in places):
            places.append((found.start(), found.end(), find_meaning(term)))
    for start, end, meaning in sorted(places, reverse=True):
        word, told = html[start:end], escape(meaning.replace("*", ""))
        mark = f'<span class="term" tabindex="0" role="note" aria-label="{word}: {told}" data-meaning="{told}">'
        html = f"{html[:start]}{mark}{word}</span>{html[end:]}"
    return html


def find_meaning(word: str) -> str:
    """Return the meaning of one word of a term, with or without its symbol.

    >>> find_meaning("key")[:10], find_meaning("saturation index")[:16]
    ('A token as', 'The logit spread')
    """
    return next(meaning for term, meaning in GLOSSARY.items() if word in re.sub(" [ρτ]", "", term).split(", "))
