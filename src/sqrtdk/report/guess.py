"""Questions to answer before the numbers are shown: choices or a slider, and a reply to every possible guess.

`guess.js` shows the replies. Without a script the answer is folded below its question; on paper it is unfolded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sqrtdk.report.table import render_text
from sqrtdk.report.try_it import render_slider
from sqrtdk.wording.guesses import compare_choice, compare_number

__all__ = ["Question", "ask_choice", "ask_number", "list_sizes", "render_question"]


@dataclass(frozen=True)
class Question:
    """Question with a reply to each guess.

    Args:
        text: the question.
        answer: the computed answer in one or two sentences.
        replies: by guess, in order, the sentence that compares it with what was computed.
        right: the right choice; None for a number.
        label: what the slider sets; empty for choices.
    """

    text: str
    answer: str
    replies: dict[str | float, str]
    right: str | None = None
    label: str = ""


def ask_choice(text: str, choices: Sequence[str], right: str, answer: str) -> Question:
    """Return a question with choices.

    >>> ask_choice("More or less?", ("more", "less"), "less", "3 is less than 4.").replies["more"]
    'Not “more”: the numbers say “less”.'
    """
    assert right in choices
    return Question(text, answer, {choice: compare_choice(choice, right) for choice in choices}, right)


def ask_number(text: str, label: str, values: Sequence[float], computed: float, answer: str) -> Question:
    """Return a question for a number, with a slider over the values.

    >>> ask_number("How many?", "keys", (1, 2, 4), 2.1, "2.1 keys.").replies[4]
    'Your guess, 4, is 1.9 times the computed 2.1.'
    """
    return Question(text, answer, {value: compare_number(value, computed) for value in values}, label=label)


def list_sizes(last: float) -> tuple[int, ...]:
    """Return whole numbers from 1 to the last or beyond, about a factor √2 apart.

    >>> list_sizes(16)
    (1, 2, 3, 4, 6, 8, 11, 16)
    """
    sizes = [1]
    step = 1
    while sizes[-1] < last:
        step += 1
        if (size := round(2 ** (step / 2))) > sizes[-1]:
            sizes.append(size)
    return tuple(sizes)


def render_question(name: str, question: Question | None, *, opened: bool = False) -> str:
    """Render a question, its answer folded unless `opened`; empty for None. The name begins the ids of its elements."""
    if question is None:
        return ""
    guesses = list(question.replies)
    if question.label:
        values = [float(guess) for guess in guesses]
        middle = values[len(values) // 2]
        controls = (
            f"{render_slider(f'guess-{name}', 'guess', question.label, middle, values)}"
            '<button type="button" data-guess>Guess</button>'
        )
    else:
        controls = "".join(
            f'<button type="button" data-guess="{place}">{escape(str(guess))}</button>'
            for place, guess in enumerate(guesses)
        )
    replies = escape(json.dumps(list(question.replies.values()), ensure_ascii=False))
    right = "" if question.right is None else f' data-right="{guesses.index(question.right)}"'
    return (
        f'<div class="guess" id="guess-{name}" role="group" aria-label="Guess first" data-replies="{replies}"{right}>'
        f'<p class="guess-asks"><b>Guess first.</b> {render_text(question.text)}</p>'
        f'<div class="controls">{controls}</div><p class="guess-says" aria-live="polite"></p>'
        f"<details{' open' if opened else ''}><summary>The computed answer</summary>"
        f"<p>{render_text(question.answer)}</p></details></div>"
    )
