"""Tables for readers: what a column is called and how a value is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqrtdk.setting_names import POLICY_NAMES

_TITLES = {
    "d_k": "dₖ",
    "scale": "scaling",
    "predicted": "predicted",
    "low": "95% from",
    "high": "95% to",
    "interval": "95% interval",
    "inside": "prediction inside",
    "law": "law (n → ∞)",
    **POLICY_NAMES,
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
    "begins": "2 ln n (limit n → ∞)",
    "nearly_one_hot": "8 ln n (limit n → ∞)",
    "concentrated_from": "Σp² ≥ ½ from dₖ, exact",
    "half_from": "first measured dₖ with Σp² ≥ ½",
    "std": "σ of the scores",
    "width": "by width (scale·√dₖ)",
    "length": "by lengths of q and k",
    "distinct": "by what differs between keys",
    "alignment": "by alignment",
    "relative": "τ/√dₖ",
    "tau": "τ",
    "factor": "factor 1/τ",
    "grad_q": "‖∂loss/∂q‖",
    "grad_k": "‖∂loss/∂K‖/√L",
    "top_share": "share of the top twentieth",
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
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_BY_LAYER = ("temperature_by_layer", "temperatures")


def title_column(name: str) -> str:
    """What readers see above a column.

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

    Two numbers are an interval, except in the columns that list one per layer.

    >>> [format_cell(x) for x in (22.6274, 9.81e-11, 4096, None, True, [1.0, 2.5])]
    ['22.63', '9.8·10⁻¹¹', '4096', '–', 'yes', '1 to 2.5']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _format_float(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_cell(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [format_cell(item) for item in value]
        return " to ".join(parts) if len(parts) == 2 and column not in _BY_LAYER else ", ".join(parts)
    return str(value)


def _format_float(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}".replace("-", "−")
    mantissa, exponent = f"{value:.1e}".split("e")
    return spell_power(mantissa, exponent).replace("-", "−")


def spell_power(mantissa: str, exponent: str) -> str:
    """A number in the computer's scientific notation as it is written by hand.

    >>> spell_power("9.8", "-11")
    '9.8·10⁻¹¹'
    """
    return f"{mantissa}·{name_power(int(exponent))}"


def name_power(exponent: int) -> str:
    """A power of ten as it is written by hand.

    >>> name_power(-11)
    '10⁻¹¹'
    """
    return f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def is_number(value: Any) -> bool:
    """Whether a cell holds a number, a range of two, or nothing where a number would be.

    >>> [is_number(value) for value in (1.5, [1.0, 2.0], None, True, "a")]
    [True, True, True, False, False]
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value) == 2 and all(map(is_number, value))
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
