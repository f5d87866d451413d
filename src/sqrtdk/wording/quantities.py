"""Names of quantities for column headings and pages, and the text of a table cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqrtdk import checks
from sqrtdk.wording.names import POLICY_NAMES, name_policy
from sqrtdk.wording.numbers import write_number

SPREAD_FACTORS = {
    "width": "width (scale·√dₖ)",
    "length": "the lengths of q and k",
    "distinct": "what differs between keys",
    "alignment": "alignment",
}
"""The factors of the scores' standard deviation."""

_TITLES = {
    "d_k": "dₖ",
    "scale": "scaling",
    "predicted": "predicted",
    "low": "95% from",
    "high": "95% to",
    "interval": "95% interval",
    "inside": "prediction inside",
    "limit": "many-key limit (n → ∞)",
    **POLICY_NAMES,
    "main": "used here",
    "diagonal": "diagonal of the Jacobian",
    "first_weight": "weight of x",
    "other_weight": "weight of each 0",
    "slope": "p(1 − p)",
    "jacobian_trace": "1 − Σp²",
    "jacobian_norm": "‖J‖",
    "entropy_ratio": "H/ln n",
    "saturation_index": "ρ",
    "logit_std": "σ",
    "sum_p2": "Σp²",
    "effective_keys": "effective keys",
    "max_weight": "largest weight",
    "begins": "weights begin to concentrate at dₖ = 2 ln n (n → ∞)",
    "concentrated": "mean Σp² is ½ at dₖ = 8 ln n (n → ∞)",
    "concentrated_from": "first dₖ with mean Σp² ≥ ½, exact",
    "half_from": "first measured dₖ with mean Σp² ≥ ½",
    "std": "σ of the scores",
    **{name: f"by {words}" for name, words in SPREAD_FACTORS.items()},
    "relative": "τ/√dₖ",
    "tau": "τ",
    "factor": "scale 1/τ",
    "grad_q": "‖∂loss/∂q‖",
    "grad_k": "‖∂loss/∂K‖/√L",
    "top_share": "share of squared gradient in the top 5% of rows",
    "lr": "learning rate",
    "qk_step": "step of W_q, W_k",
    "final_loss_iqr": "final loss, middle half of the seeds",
    "final_loss_median": "final loss, median",
    "solved_fraction": "fraction solved",
    "steps_to_threshold_median": "steps to solve, median",
    "temperature_by_layer": "τ/√dₖ by layer, medians",
    "temperature_median": "τ/√dₖ, median",
    "temperature_range": "τ/√dₖ, least to largest head",
    "temperature_spread_median": "spread of ln τ over queries, median",
    "temperatures": "τ/√dₖ of the heads, layer by layer",
}
_ENDINGS = {
    "_predicted": "predicted",
    "_low": "95% from",
    "_high": "95% to",
    "_interval": "95% interval",
    "_mean": "mean",
    "_median": "median",
    "_p5": "5th percentile",
}
_BY_LAYER = ("temperature_by_layer", "temperatures")


def title_column(name: str) -> str:
    """Return what readers see above a column.

    >>> title_column("grad_q_median"), title_column("final_loss")
    ('‖∂loss/∂q‖ median', 'final loss')
    """
    if name in _TITLES:
        return _TITLES[name]
    for ending, words in _ENDINGS.items():
        if name.endswith(ending):
            return f"{title_column(name.removesuffix(ending))} {words}"
    return name.replace("_", " ")


def format_cell(value: Any, column: str = "") -> str:
    """Write a value for a reader: four significant digits, powers of ten spelled out, – for nothing.

    Two numbers are an interval, except in the columns that list one per layer. The columns of quantities and of
    scalings show their names.

    >>> [format_cell(x) for x in (22.6274, 9.81e-11, 4096, None, True, [1.0, 2.5])]
    ['22.63', '9.8·10⁻¹¹', '4096', '–', 'yes', '1 to 2.5']
    >>> format_cell("none", "scale"), format_cell("sum_p2", "quantity")
    ('no scaling', 'Σp²')
    """
    if column == "quantity":
        return title_column(str(value))
    if column == "scale" and isinstance(value, str):
        return name_policy(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, float):
        return write_number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_cell(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [format_cell(item) for item in value]
        return " to ".join(parts) if len(parts) == 2 and column not in _BY_LAYER else ", ".join(parts)
    return str(value)


def is_numeric(value: Any) -> bool:
    """Return whether a cell holds a number, a range of two numbers, or nothing in place of a number.

    >>> [is_numeric(value) for value in (1.5, [1.0, 2.0], None, True, "a")]
    [True, True, True, False, False]
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value) == 2 and all(map(is_numeric, value))
    return value is None or checks.is_number(value)


class Quantity(NamedTuple):
    """A number on the pages: its name, its formula and one line about it."""

    key: str
    name: str
    formula: str
    meaning: str


_SATURATION = Quantity(
    "saturation_index",
    "saturation index ρ",
    "ρ = σ_row/√(2 ln n)",
    "Logit spread of a row relative to its n keys. Weights concentrate above 1, on one or two keys from 2 on.",
)
_ENTROPY = Quantity(
    "entropy_ratio",
    "entropy ratio",
    "H/ln n, H = −Σp ln p",
    "1: all keys have the same weight; 0: one key has all the weight.",
)
_KEYS = Quantity("effective_keys", "effective keys", "1/Σp²", "Number of equally weighted keys that give the same Σp².")
_LARGEST = Quantity("max_weight", "largest weight", "max p", "Weight of the most attended key, mean over queries.")

EXPLORED = (
    Quantity("scale", "scale", "logits = scale · q·k", "Number that multiplies q·k before softmax."),
    Quantity(
        "logit_std",
        "σ of the logits",
        "σ = scale · √(dₖ·Var(qᵢkᵢ))",
        "Spread of all logits of all queries.",
    ),
    _SATURATION,
    _ENTROPY,
    _KEYS,
    _LARGEST,
    Quantity("sum_p2", "Σp²", "Σp²", "From 1/n (uniform) to 1 (one-hot)."),
    Quantity(
        "jacobian_trace",
        "Jacobian trace",
        "1 − Σp² = Σ p(1 − p)",
        "How strongly the weights still respond to the logits: 0 for one-hot weights. Mean over queries.",
    ),
    Quantity("jacobian_trace_p5", "… of the sharpest 5%", "5th percentile of 1 − Σp²", "5% of the rows have less."),
    Quantity("jacobian_norm", "Jacobian norm", "‖J‖ = √(Σp² − 2Σp³ + (Σp²)²)", "Size of the whole softmax Jacobian."),
    Quantity(
        "grad_q",
        "gradient of a query, mean",
        "‖∂loss/∂q‖, ∂loss/∂output standard normal",
        "What training tells a query, averaged over the queries.",
    ),
    Quantity("grad_q_median", "… median", "median of ‖∂loss/∂q‖", "Gradient of a typical query."),
    Quantity("grad_q_p5", "… 5th percentile", "5th percentile of ‖∂loss/∂q‖", "5% of the queries get less."),
    Quantity(
        "own_weight",
        "weight of its own key",
        "p of the key that correlates with the query",
        "Whether attention finds the key that belongs to the query.",
    ),
)

AUDITED = (
    _ENTROPY,
    _SATURATION,
    _KEYS,
    _LARGEST,
    Quantity("max_logit", "largest logit", "max over all rows", "Largest number that softmax received."),
    Quantity("score_max", "largest score", "max of scale·q·k", "Before soft cap and mask."),
    Quantity(
        "offset_share",
        "share on the most frequent offset",
        "share of rows with one max_key − position",
        "1: every row attends equally far back or ahead.",
    ),
    Quantity(
        "key_share",
        "share on the most attended key",
        "share of a sequence's rows that attend most to one key",
        "Near 1 the head attends to one fixed key.",
    ),
)
