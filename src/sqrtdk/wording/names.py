"""Names for the settings of a run: its scaling policy by formula, and the init and step of W_q and W_k."""

from __future__ import annotations

POLICY_NAMES = {"none": "no scaling", "sqrt": "1/√dₖ", "inverse": "1/dₖ"}
"""The three policies of the four sources; others are called by the names under which they are registered."""

# An init that gives q and k variance 1 is the default and is not named.
_INIT_NAMES = {"unit": "", "torch": "torch init", "xavier": "Xavier init"}
_FACTORS = {"rescaled": "dₖ^−¼", "grown": "dₖ^¼"}
# The factor on W_q and W_k with which a policy starts as 1/√dₖ does.
_RESCALED = {"none": "rescaled", "inverse": "grown"}


def name_policy(policy: str) -> str:
    """Return the name of a policy in sentences, legends and tables.

    >>> name_policy("inverse"), name_policy("fixed:10")
    ('1/dₖ', 'fixed:10')
    """
    return POLICY_NAMES.get(policy, policy)


def name_setting(policy: str, init: str = "unit", *more: str, qk_step: str = "unit") -> str:
    """Return the name of a setting: its policy, its init and step where they are not the default, and further parts.

    >>> name_setting("sqrt", "unit"), name_setting("none", "rescaled", "dₖ 64")
    ('1/√dₖ', 'no scaling, rescaled init, dₖ 64')
    >>> name_setting("none", "rescaled", qk_step="rescaled"), name_setting("sqrt", "rescaled")
    ('no scaling, rescaled init and step', '1/√dₖ, init × dₖ^−¼')
    """
    factors = {what: name for what, name in (("init", init), ("step", qk_step)) if name in _FACTORS}
    rescaled = " and ".join(what for what, name in factors.items() if name == _RESCALED.get(policy))
    others = [f"{what} × {_FACTORS[name]}" for what, name in factors.items() if name != _RESCALED.get(policy)]
    start = "" if init in _FACTORS else _INIT_NAMES.get(init, init)
    parts = (name_policy(policy), start, f"rescaled {rescaled}" if rescaled else "", *others, *more)
    return ", ".join(part for part in parts if part)
