"""Claims of the four sources as executable checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import get_args

# Importing a module registers its claims.
from sqrtdk.claims import (  # noqa: F401
    gradient_claims,
    learning_claims,
    operation_claims,
    policy_claims,
    published_claims,
    softmax_claims,
    variance_claims,
)
from sqrtdk.claims.claim import CLAIMS, SOURCES, Claim, Verdict, VerdictName
from sqrtdk.claims.evidence import Evidence
from sqrtdk.errors import InvalidValueError, MissingExtraError, missing_extra, unknown_name
from sqrtdk.records.record import Record
from sqrtdk.show.table import count

__all__ = [
    "Claim",
    "Evidence",
    "Verdict",
    "check_claims",
    "list_claims",
    "name_sources",
]

_GROUPS = ("op", "var", "soft", "grad", "scale")


def list_claims() -> list[Claim]:
    """Return every claim by subject: operation, variance, softmax, gradients, policies. Claims that train come last.

    >>> [claim.id for claim in list_claims()][:3]
    ['op.formula', 'op.code', 'op.stable']
    """
    return sorted(CLAIMS, key=lambda claim: (_GROUPS.index(claim.id.split(".")[0]), claim.trains))


def check_claims(
    ids: Sequence[str] | None = None,
    evidence: Evidence | None = None,
    *,
    training: bool = True,
    on_claim: Callable[[Claim, int, int], None] | None = None,
) -> Record:
    """Check claims by computation and give each a verdict.

    Args:
        ids: claims, or groups such as ``soft``. None means all claims.
        evidence: the seed and the training experiments. None means the default `Evidence`.
        training: False leaves out the claims that train models.
        on_claim: called before each check with the claim, its index and the number of claims.

    Returns:
        A record of kind ``"claims"`` with a table of the same name, and `texts` with the titles of the sources.

    Raises:
        InvalidValueError: an unknown claim, or no claim is left without training.
        MissingExtraError: a claim needs training and torch is not installed. This is raised before any computation.

    >>> check_claims(["soft.peak"]).tables["claims"][0]["verdict"]
    'wrong'
    """
    evidence = Evidence() if evidence is None else evidence
    chosen = choose_claims(ids, training=training)
    rows = []
    for index, claim in enumerate(chosen):
        if on_claim is not None:
            on_claim(claim, index, len(chosen))
        finding = asdict(claim.check(evidence))
        rows.append({"id": claim.id, "source": claim.source, "claimed": claim.claimed, **finding})
    by_verdict = {name: [row["id"] for row in rows if row["verdict"] == name] for name in get_args(VerdictName)}
    named = [f"{name.capitalize()}: {', '.join(ids)}." for name, ids in by_verdict.items() if ids and name != "holds"]
    reading = [_count_verdicts({name: len(ids) for name, ids in by_verdict.items()}), *named, name_sources()]
    spec = {
        "ids": [claim.id for claim in chosen],
        "seed": evidence.seed,
        "seeds": evidence.seeds,
        "steps": evidence.steps,
    }
    texts = [{"source": name, "title": title} for name, title in SOURCES.items()]
    return Record(kind="claims", spec=spec, tables={"claims": rows, "texts": texts}, reading=reading)


def name_sources() -> str:
    """Return the four sources by title.

    >>> name_sources()[:17]
    'The sources: S0 “'
    """
    return f"The sources: {'; '.join(f'{name} {title}' for name, title in SOURCES.items())}."


def _count_verdicts(counts: Mapping[str, int]) -> str:
    words = {
        "holds": ("holds", "hold"),
        "wrong": ("is wrong", "are wrong"),
        "depends": tuple(f"{verb} on conditions that the sources leave out" for verb in ("depends", "depend")),
        "undecided": ("is undecided", "are undecided"),
    }
    parts = [f"{times} {words[verdict][times != 1]}" for verdict, times in counts.items() if times]
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return f"Of {count(sum(counts.values()), 'claim')} {listed}."


def choose_claims(ids: Sequence[str] | None, *, training: bool = True) -> list[Claim]:
    """Return the claims of these ids and groups in the order of `list_claims`. `training` includes those that train."""
    listed = list_claims()
    known = [claim.id for claim in listed]
    for name in ids or ():
        if name not in known and name not in _GROUPS:
            raise unknown_name("claim", name, [*known, *_GROUPS], "ids", "sqrtdk claims --list")
    named = [claim for claim in listed if ids is None or claim.id in ids or claim.id.split(".")[0] in ids]
    chosen = [claim for claim in named if training or not claim.trains]
    if not chosen:
        raise InvalidValueError("ids", f"must name a claim that needs no training, got {', '.join(ids or ())}")
    trained = [claim.id for claim in chosen if claim.trains]
    if trained and importlib.util.find_spec("torch") is None:
        raise MissingExtraError(f"{missing_extra('torch', 'torch')}; only {', '.join(trained)} need it (--no-training)")
    return chosen
