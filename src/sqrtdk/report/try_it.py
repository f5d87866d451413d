"""Sliders of the report: one query among n keys, without scaling and with a scale of the reader's choice.

`try_it.js` samples and computes in the page. This module computes the same with the product's own operation, for the
numbers that the page shows before its script has run, and for the test that both agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidValueError, unknown_name
from sqrtdk.operation.attention import attention, attention_gradients
from sqrtdk.report.counter import sample_normal
from sqrtdk.report.palette import policy_colour
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.quantities import format_cell

__all__ = ["QUANTITIES", "RANGES", "TryIt", "measure_try_it", "render_slider", "render_try_it"]

Array = npt.NDArray[np.float64]

_EXPONENTS = {"none": 0.0, "sqrt": -0.5, "inverse": -1.0}
_QUERY_ROW, _VALUE_ROW, _FIRST_KEY_ROW = 0, 1, 2


def _powers(last: int, first: int = 1) -> tuple[int, ...]:
    """Return sizes about a factor 2^¼ apart, without repeats."""
    steps = range(round(4 * math.log2(last)) + 1)
    return tuple(sorted({size for step in steps if (size := round(2 ** (step / 4))) >= first}))


RANGES: dict[str, tuple[float, ...]] = {
    "d_k": _powers(512),
    "n": _powers(2048, first=2),
    "t": tuple(2.0 ** (step / 4) for step in range(-12, 13)),
    "correlation": tuple(step / 20 for step in range(21)),
}
"""Values of each slider, from its left end to its right end."""

QUANTITIES: dict[str, tuple[str, str]] = {
    "expected_variance": ("variance by the formula", "dₖ·scale², for keys independent of the query"),
    "logit_variance": ("variance of the logits", "of this query; a longer query vector has more"),
    "max_logit": ("largest logit", "softmax receives scale·q·k"),
    "max_weight": ("largest weight", "of the most attended key"),
    "own_weight": ("weight of the query's own key", "the key that the correlation makes similar to the query"),
    "entropy_ratio": ("entropy ratio H/ln n", "1: all keys weigh the same, 0: one key has everything"),
    "effective_keys": ("effective keys 1/Σp²", "as many equally weighted keys would have the same Σp²"),
    "saturation_index": ("saturation index ρ", "σ/√(2 ln n): above 1 a few keys dominate, from 2 on one or two"),
    "jacobian_trace": ("Jacobian trace 1 − Σp²", "how strongly the weights still respond to the logits"),
    "jacobian_norm": ("Jacobian norm ‖J‖", "size of all derivatives ∂weight/∂logit together"),
    "gradient": ("gradient ‖∂output/∂q‖", "of an output with one standard normal value per key"),
}
"""Numbers shown for each scale: name and explanation."""


@dataclass(frozen=True)
class TryIt:
    """Setting of the sliders.

    Args:
        d_k: length of q and k.
        n: keys.
        policy: ``"none"``, ``"sqrt"`` or ``"inverse"``.
        t: factor on the policy's temperature; it divides the scale.
        correlation: correlation of each entry of the query with that of its own key, the first key; the other keys are
            independent of the query.
        seed: seed of the sample.
    """

    d_k: int = 64
    n: int = 1024
    policy: str = "sqrt"
    t: float = 1.0
    correlation: float = 0.0
    # Of the first seeds, the seed whose rows at this size are nearest to the average of many.
    seed: int = 6

    def __post_init__(self) -> None:
        if self.policy not in _EXPONENTS:
            raise unknown_name("policy", self.policy, list(_EXPONENTS))
        for name, values in RANGES.items():
            if not values[0] <= getattr(self, name) <= values[-1]:
                raise InvalidValueError(
                    name, f"must lie between {values[0]:g} and {values[-1]:g}, got {getattr(self, name)}"
                )

    @property
    def scale(self) -> float:
        """Return the factor on q·k.

        >>> TryIt(d_k=64).scale, TryIt(d_k=64, policy="inverse", t=2.0).scale
        (0.125, 0.0078125)
        """
        return math.pow(self.d_k, _EXPONENTS[self.policy]) / self.t


def measure_try_it(state: TryIt) -> dict[str, dict[str, float]]:
    """Measure the numbers of `QUANTITIES` without scaling (``"none"``) and with the chosen scale (``"chosen"``).

    >>> numbers = measure_try_it(TryIt(d_k=64, n=1024))
    >>> numbers["none"]["effective_keys"] < 4 < numbers["chosen"]["effective_keys"]
    True
    """
    q = sample_normal(1, state.d_k, seed=state.seed, first_row=_QUERY_ROW)
    values = sample_normal(1, state.n, seed=state.seed, first_row=_VALUE_ROW).T
    k = sample_normal(state.n, state.d_k, seed=state.seed, first_row=_FIRST_KEY_ROW)
    k[0] = state.correlation * q[0] + math.sqrt(1.0 - state.correlation**2) * k[0]
    return {
        column: _measure(q, k, np.ascontiguousarray(values), scale)
        for column, scale in (("none", 1.0), ("chosen", state.scale))
    }


def _measure(q: Array, k: Array, values: Array, scale: float) -> dict[str, float]:
    _, statistics, weights = attention(q, k, values, scale=scale, weights=True)
    assert statistics is not None
    assert weights is not None
    gradients = attention_gradients(q, k, values, np.ones((1, 1)), scale=scale)
    of_rows = {
        name: float(np.asarray(getattr(statistics, name))[0]) for name in QUANTITIES if hasattr(statistics, name)
    }
    return of_rows | {
        "expected_variance": q.shape[-1] * scale**2,
        "own_weight": float(weights[0, 0]),
        "gradient": float(np.linalg.norm(gradients.query)),
    }


def render_try_it() -> str:
    """Render the sliders, the numbers of their first position and the empty charts that the script fills."""
    state = TryIt()
    numbers = measure_try_it(state)
    words = {
        "d_k": "dₖ, length of q and k",
        "n": "n, number of keys",
        "t": "t, factor on the temperature",
        "correlation": "correlation of the query with its own key",
    }
    sliders = "".join(
        render_slider("try", name, words[name], getattr(state, name), values) for name, values in RANGES.items()
    )
    policies = "".join(
        f'<label><input type="radio" name="try-policy" value="{name}"{" checked" if name == state.policy else ""}> '
        f"{name_policy(name)}</label>"
        for name in _EXPONENTS
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(words)}<small>{escape(about)}</small></th>'
        + "".join(_render_number(name, column, numbers[column][name]) for column in numbers)
        + "</tr>"
        for name, (words, about) in QUANTITIES.items()
    )
    colours = "".join(f"--try-{name}:{policy_colour(name)};" for name in _EXPONENTS)
    return (
        f'<div class="try" id="try-it" style="{colours}" data-seed="{state.seed}">'
        f'<div class="controls"><fieldset><legend>scale</legend>{policies}</fieldset>{sliders}'
        '<div class="buttons"><button type="button" data-do="sample">another sample</button>'
        '<button type="button" data-do="reset">reset</button></div></div>'
        '<p class="try-says" aria-live="polite"></p>'
        '<div class="try-charts"><figure><figcaption>Histogram of the logits</figcaption>'
        '<svg class="small-chart try-logits" role="img" aria-label="Histogram of the logits under both scales"></svg>'
        "</figure><figure><figcaption>Weight of the 1st, 2nd, 3rd … key</figcaption>"
        '<svg class="small-chart try-weights" role="img" aria-label="Sorted softmax weights under both scales"></svg>'
        "</figure></div>"
        '<table class="try-numbers"><thead><tr><th scope="col">this sample</th>'
        '<th scope="col" class="number">no scaling</th>'
        f'<th scope="col" class="number try-chosen">{name_policy(state.policy)}</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def render_slider(owner: str, name: str, words: str, value: float, values: Sequence[float]) -> str:
    """Render a slider over values with its label and the value nearest to the given one; `owner` begins its id."""
    place = min(range(len(values)), key=lambda index: abs(values[index] - value))
    listed = ",".join(f"{one:.17g}" for one in values)
    shown, ident = format_cell(float(value)), f"{owner}-{name}"
    return (
        f'<div class="slider"><label for="{ident}">{escape(words)}</label><output for="{ident}">{shown}</output>'
        f'<input type="range" id="{ident}" min="0" max="{len(values) - 1}" step="1" value="{place}" '
        f'data-name="{name}" data-values="{listed}" aria-valuetext="{shown}"></div>'
    )


def _render_number(name: str, column: str, value: float) -> str:
    return (
        f'<td class="number"><output data-quantity="{name}" data-column="{column}" data-value="{value!r}">'
        f"{format_cell(value)}</output></td>"
    )
