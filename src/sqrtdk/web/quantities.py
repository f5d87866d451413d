"""What each number on the pages is called, its formula, and what it means in one line."""

from __future__ import annotations

from typing import NamedTuple


class Quantity(NamedTuple):
    """A number of the pages: its name there, its formula and one line about it."""

    key: str
    name: str
    formula: str
    meaning: str


EXPLORED = (
    Quantity("scale", "scale", "logits = scale · q·k", "What multiplies q·k before the softmax."),
    Quantity(
        "logit_std",
        "σ of the logits",
        "σ = scale · √(dₖ·Var(qᵢkᵢ))",
        "How far all the logits spread; √dₖ without a scale, 1 with 1/√dₖ.",
    ),
    Quantity(
        "saturation_index",
        "saturation index ρ",
        "ρ = σ_row/√(2 ln n)",
        "σ within a row, measured against n keys: weights concentrate past 1, on one or two keys from 2 on.",
    ),
    Quantity(
        "entropy_ratio", "entropy ratio", "H/ln n, H = −Σp ln p", "1: every key gets the same weight; 0: one gets all."
    ),
    Quantity("effective_keys", "effective keys", "1/Σp²", "How many equal weights would be as concentrated."),
    Quantity("max_weight", "largest weight", "max p", "The share of the most attended key, mean over queries."),
    Quantity("sum_p2", "Σp²", "Σp²", "From 1/n (uniform) to 1 (one-hot)."),
    Quantity(
        "jacobian_trace",
        "Jacobian's trace",
        "1 − Σp² = Σ p(1 − p)",
        "The diagonal of ∂softmax that the texts speak of: 0 where a row is one-hot. Mean over queries.",
    ),
    Quantity(
        "jacobian_trace_p5", "… of the sharpest 5 %", "5th percentile of 1 − Σp²", "A twentieth of the rows has less."
    ),
    Quantity("jacobian_norm", "Jacobian's norm", "‖J‖ = √(Σp² − 2Σp³ + (Σp²)²)", "The size of all of ∂softmax."),
    Quantity(
        "grad_q",
        "gradient of a query, mean",
        "‖∂loss/∂q‖, ∂loss/∂output standard normal",
        "Unscaled it is often larger on average: a few rows get everything.",
    ),
    Quantity("grad_q_median", "… median", "median of ‖∂loss/∂q‖", "What a typical query gets."),
    Quantity("grad_q_p5", "… 5th percentile", "5th percentile of ‖∂loss/∂q‖", "A twentieth of the queries gets less."),
    Quantity(
        "own_weight",
        "weight of its own key",
        "p of the key that correlates with the query",
        "Does attention find the key that belongs to the query?",
    ),
)

AUDITED = (
    Quantity("entropy_ratio", "entropy ratio", "H/ln n", "1: uniform over the keys; 0: one key. Mean over rows."),
    Quantity(
        "saturation_index", "saturation index ρ", "σ/√(2 ln n)", "Past 1 Gaussian logits condense. It condemns nothing."
    ),
    Quantity("effective_keys", "effective keys", "1/Σp²", "How many equal weights would be as concentrated."),
    Quantity("max_weight", "largest weight", "max p", "The share of the most attended key, mean over rows."),
    Quantity("max_logit", "largest logit", "max over all rows", "What the softmax saw at most."),
    Quantity("score_max", "largest score", "max of scale·q·k", "Before soft cap and mask."),
    Quantity(
        "offset_share",
        "share of the commonest offset",
        "share of rows with one max_key − position",
        "1: every row looks equally far back or ahead.",
    ),
    Quantity(
        "key_share",
        "share of the commonest key",
        "share of a sequence's rows that look at one key",
        "Near 1 it is a sink.",
    ),
)
