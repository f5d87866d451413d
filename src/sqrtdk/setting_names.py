"""What readers call the settings of a run: its scaling policy by formula, and how W_q and W_k begin."""

from __future__ import annotations

POLICY_NAMES = {"none": "no scaling", "sqrt": "1/√dₖ", "inverse": "1/dₖ"}
"""The three policies of the texts; others are called by the names under which they are registered."""

# q and k of variance 1 are the rule that needs no words.
_START_NAMES = {
    "unit": "",
    "absorbed": "smaller start",
    "torch": "torch's start",
    "xavier": "Xavier's start",
}


def name_policy(policy: str) -> str:
    """What sentences, legends and tables call a policy.

    >>> name_policy("inverse"), name_policy("fixed:10")
    ('1/dₖ', 'fixed:10')
    """
    return POLICY_NAMES.get(policy, policy)


def name_setting(policy: str, init: str = "unit", *more: str) -> str:
    """A policy with how W_q and W_k begin, where that is not the rule, and whatever more tells it from others.

    >>> name_setting("sqrt", "unit"), name_setting("none", "absorbed", "dₖ 64")
    ('1/√dₖ', 'no scaling, smaller start, dₖ 64')
    """
    return ", ".join(part for part in (name_policy(policy), _START_NAMES.get(init, init), *more) if part)
