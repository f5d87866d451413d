"""Names for the settings of a run: its scaling policy by formula, and how W_q and W_k begin and move."""

from __future__ import annotations

POLICY_NAMES = {"none": "no scaling", "sqrt": "1/√dₖ", "inverse": "1/dₖ"}
"""The three policies of the texts; others are called by the names under which they are registered."""

# q and k of variance 1 are the rule that needs no words.
_START_NAMES = {"unit": "", "torch": "torch's start", "xavier": "Xavier's start"}
_FACTORS = {"absorbed": "dₖ^−¼", "grown": "dₖ^¼"}
# The factor on W_q and W_k that makes 1/√dₖ of a policy.
_RESCALED = {"none": "absorbed", "inverse": "grown"}


def name_policy(policy: str) -> str:
    """What sentences, legends and tables call a policy.

    >>> name_policy("inverse"), name_policy("fixed:10")
    ('1/dₖ', 'fixed:10')
    """
    return POLICY_NAMES.get(policy, policy)


def name_setting(policy: str, init: str = "unit", *more: str, qk_step: str = "unit") -> str:
    """A policy with how W_q and W_k begin and move, where that is not the rule, and whatever more tells it from others.

    >>> name_setting("sqrt", "unit"), name_setting("none", "absorbed", "dₖ 64")
    ('1/√dₖ', 'no scaling, rescaled init, dₖ 64')
    >>> name_setting("none", "absorbed", qk_step="absorbed"), name_setting("sqrt", "absorbed")
    ('no scaling, rescaled init and step', '1/√dₖ, init × dₖ^−¼')
    """
    factors = {what: name for what, name in (("init", init), ("step", qk_step)) if name in _FACTORS}
    rescaled = " and ".join(what for what, name in factors.items() if name == _RESCALED.get(policy))
    others = [f"{what} × {_FACTORS[name]}" for what, name in factors.items() if name != _RESCALED.get(policy)]
    start = "" if init in _FACTORS else _START_NAMES.get(init, init)
    parts = (name_policy(policy), start, f"rescaled {rescaled}" if rescaled else "", *others, *more)
    return ", ".join(part for part in parts if part)
