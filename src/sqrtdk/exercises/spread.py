"""Spread of the scores of real heads, split into width, lengths, differences between keys, and alignment."""

from __future__ import annotations

import math
from typing import Any

from sqrtdk.audits import Audit
from sqrtdk.audits.sentences import describe_spread
from sqrtdk.errors import InvalidValueError
from sqrtdk.records.record import Record
from sqrtdk.show.table import name_layer
from sqrtdk.wording.numbers import write_number
from sqrtdk.wording.quantities import SPREAD_FACTORS


def spread(audit: Audit) -> Record:
    """Explain why the scores of each head in an audited model are as large as they are.

    σ = |scale|·√dₖ · √(E‖q‖²/dₖ·E‖k‖²/dₖ) · √(share of ‖k‖² that differs between keys) · √alignment, as in
    `sqrtdk.diagnosis.score_size.CauseSplit.parts`. For independent standard normal q and k the last three are 1.

    Returns:
        A record with the table ``spread``: one row per head, the largest σ first.

    Raises:
        InvalidValueError: the audit has no head whose spread is known.

    >>> from sqrtdk.audits import read_shipped
    >>> list(spread(read_shipped("minilm")).tables["spread"][0])
    ['layer', 'head', 'std', 'width', 'length', 'distinct', 'alignment']
    """
    known = [head for head in audit.heads if head.spread is not None]
    if not known:
        raise InvalidValueError("audit", "must hold heads whose spread is known, got none; audit the model again")
    rows: list[dict[str, Any]] = [
        {"layer": name_layer(head.layer), "head": head.head, **(head.spread or {})} for head in known
    ]
    rows.sort(key=lambda row: -row["std"])
    first = rows[0]
    most = max(SPREAD_FACTORS, key=lambda name: abs(math.log(first[name])))
    sentences = [
        *describe_spread([head.spread for head in known]),
        f"The largest is {write_number(first['std'], 3)}, in head {first['head']} of {first['layer']}: "
        + " × ".join(f"{write_number(first[name], 3)} by {words}" for name, words in SPREAD_FACTORS.items())
        + f". The factor farthest from 1 is {SPREAD_FACTORS[most]}.",
    ]
    source = audit.about.get("source", audit.about.get("model", "a model"))
    return Record(
        kind="spread",
        spec={"source": source, "input": audit.about.get("input")},
        tables={"spread": rows},
        reading=sentences,
        headline=sentences[0],
    )
