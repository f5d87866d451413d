"""First screen of the report and of the local pages: q·k built term by term, and what softmax makes of it.

`cause.js` draws the walks and computes the numbers in the page. They are those of `try_it` for few keys.
"""

from __future__ import annotations

import math

import numpy as np

from sqrtdk.report.counter import sample_normal
from sqrtdk.report.palette import NEUTRAL, policy_colour
from sqrtdk.report.panels import Axis, Line, Panel, floats
from sqrtdk.report.svg_renderer import draw_panel
from sqrtdk.report.try_it import RANGES, TryIt, measure_try_it, render_slider
from sqrtdk.wording.glossary import explain_terms
from sqrtdk.wording.numbers import write_number

__all__ = ["D_KS", "KEYS", "START", "measure_cause", "render_cause", "say_cause"]

KEYS = 16
D_KS = tuple(int(d_k) for d_k in RANGES["d_k"] if d_k <= 256)
"""Values of the slider."""
# A seed whose 16 dot products spread as predicted, within 10%, at dₖ 4, 16 and 64.
START = TryIt(d_k=64, n=KEYS, seed=29)

_SENTENCES = (
    (
        "The dot product of a query and a key adds up dₖ products. Each line in the chart is the sum of one key.",
        ("dot product", "query", "key", "dₖ"),
    ),
    ("Independent terms of either sign partly cancel, so the sums spread like √dₖ, not like dₖ.", ("spread",)),
    (
        "Softmax of widely spread numbers picks a few keys. Divided by √dₖ the numbers spread by about 1 at every dₖ.",
        ("softmax",),
    ),
)


def measure_cause(state: TryIt, divided: bool) -> dict[str, float]:
    """Measure what the first screen shows: spread of the logits, largest weight and effective keys.

    >>> sorted(measure_cause(START, divided=True))
    ['effective_keys', 'max_weight', 'spread']
    """
    numbers = measure_try_it(state)["chosen" if divided else "none"]
    return {
        "spread": math.sqrt(numbers["logit_variance"]),
        "max_weight": numbers["max_weight"],
        "effective_keys": numbers["effective_keys"],
    }


def say_cause(state: TryIt, divided: bool) -> str:
    """Return the sentence below the charts; `cause.js` writes the same.

    >>> say_cause(START, divided=False)[:40]
    'dₖ = 64, not divided: the 16 dot product'
    """
    numbers = {name: write_number(value, 2) for name, value in measure_cause(state, divided).items()}
    how, predicted = ("divided by √dₖ", 1.0) if divided else ("not divided", math.sqrt(state.d_k))
    return (
        f"dₖ = {state.d_k}, {how}: the {state.n} dot products spread by {numbers['spread']} "
        f"(predicted {write_number(predicted, 2)}). The largest weight is {numbers['max_weight']}, "
        f"as if {numbers['effective_keys']} keys shared the weight equally."
    )


def _draw_walks() -> str:
    """Draw the walks at the start: what readers without a script see."""
    rows = sample_normal(2 + KEYS, START.d_k, seed=START.seed)
    terms = floats(range(START.d_k + 1))
    walks = [
        Line(terms, floats([0.0, *np.cumsum(rows[0] * key)]), policy_colour("none"), opacity=0.75) for key in rows[2:]
    ]
    edges = [Line(terms, floats(sign * i**0.5 for i in terms), NEUTRAL, dash="dash") for sign in (1, -1)]
    reach = 2.6 * D_KS[-1] ** 0.5
    panel = Panel("", Axis("terms added; dashed: ±√terms"), Axis("", low=-reach, high=reach), (*walks, *edges))
    return draw_panel(panel, 340, 200, "walks", "Sixteen random walks")


def render_cause() -> str:
    """Render the three sentences, the slider, the switch and the charts that the script draws again."""
    sentences = "".join(f"<li>{explain_terms(sentence, terms)}</li>" for sentence, terms in _SENTENCES)
    return (
        f'<div class="cause" data-seed="{START.seed}" data-keys="{KEYS}" '
        f'data-none="{policy_colour("none")}" data-sqrt="{policy_colour("sqrt")}">'
        f"<div><ol>{sentences}</ol>"
        f'<div class="controls">{render_slider("cause", "d_k", "dₖ, terms of the sum", START.d_k, D_KS)}'
        '<label><input type="checkbox" class="divide"> divide by √dₖ</label>'
        '<button type="button" data-do="sample">another sample</button></div></div>'
        '<div class="charts-of-cause"><figure><figcaption>q·k of sixteen keys, term by term</figcaption>'
        f"{_draw_walks()}</figure>"
        "<figure><figcaption>Their softmax weights</figcaption>"
        '<svg class="small-chart bars" role="img" aria-label="Softmax weights of sixteen keys"></svg></figure></div>'
        f'<p class="cause-says" aria-live="polite">{say_cause(START, divided=False)}</p></div>'
    )
