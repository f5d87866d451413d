"""Colours: one fixed colour per scaling policy and per verdict, in every figure and on the page.

The three policies of the sources have the colours of Okabe and Ito (2008), blue lightened to stand on dark pages;
all are readable on white and on near black. Colour never carries a meaning alone: legends, dashes or symbols repeat it.
"""

from __future__ import annotations

NEUTRAL = "#7b8390"
ACCENT = "#8a63d2"

_POLICIES = {
    "none": "#d55e00",
    "sqrt": "#1f83c9",
    "inverse": "#009e73",
    "fixed": "#b08900",
    "temperature": "#c0609a",
    "mup": "#6a8f1f",
    "log_n": "#8a63d2",
    "yarn": "#a0522d",
    "llama4": "#4c6ef5",
    "cosine": "#0f9fb0",
    "qk_norm": "#d6336c",
    "learned": "#a845c4",
    "query": "#9a7d0a",
    "position": "#93705f",
}
# With a parameter, the gain of qk_norm is fixed: another policy than the one that learns it.
_FIXED_GAIN = "#e0718f"
# Two temperatures beside the default have their own colours: warm for sharper, cool for softer.
_SHARPER, _SOFTER = "#c0609a", "#5f7fa6"

VERDICT_COLOURS = {"holds": "#2b8a57", "wrong": "#d0342c", "depends": "#b07a00", "undecided": NEUTRAL}
VERDICT_MARKS = {"holds": "✓", "wrong": "✗", "depends": "◐", "undecided": "?"}


def policy_colour(policy: str) -> str:
    """Return the colour of a policy by its name, parameters ignored but for temperatures; an unknown one is grey.

    >>> policy_colour("fixed:10") == policy_colour("fixed")
    True
    >>> policy_colour("temperature:1") == policy_colour("sqrt")
    True
    """
    name, _, parameter = policy.partition(":")
    if name == "temperature" and parameter:
        relative = float(parameter)
        return _POLICIES["sqrt"] if relative == 1.0 else _SHARPER if relative < 1.0 else _SOFTER
    return _FIXED_GAIN if name == "qk_norm" and parameter else _POLICIES.get(name, NEUTRAL)
