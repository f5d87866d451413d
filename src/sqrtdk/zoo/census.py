"""Census of model families: each is measured in a guarded process and stored, and all become one record."""

from __future__ import annotations

import datetime
import gc
import importlib.util
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from sqrtdk.children import Child, ChildError, Serve, answer_questions
from sqrtdk.errors import missing_extra, unknown_name
from sqrtdk.operation.cpus import count_cpus
from sqrtdk.records.families import SAME_SCALE, is_usual
from sqrtdk.records.record import Record, versions
from sqrtdk.show.table import count

Measured = dict[str, Any]
_MOST_BYTES = 6 << 30
# No network, one thread per process, only errors on stderr.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def serve(connection: Connection) -> None:
    """Measure the requested families in a process of bounded memory."""
    with suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    os.environ.update(_ENVIRONMENT)
    import torch

    from sqrtdk.zoo.measure import measure

    torch.set_num_threads(1)

    def measure_alone(family: str) -> Measured:
        gc.collect()  # models contain reference cycles
        return measure(family)

    answer_questions(connection, measure_alone)


def measure_families(
    families: Sequence[str],
    workers: int,
    seconds: float,
    on_answer: Callable[[Measured], None],
    serve: Serve = serve,
) -> None:
    """Measure families in processes that run `serve`, each for at most `seconds`.

    `on_answer` is called with each answer, in the order of arrival.
    """
    waiting = deque(families)
    idle: list[Child] = []
    busy: dict[Child, str] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                child = idle.pop() if idle else Child(serve, "sqrtdk-zoo", quiet=True)
                busy[child] = waiting.popleft()
                child.ask(busy[child], seconds)
            left = min(child.deadline for child in busy) - time.monotonic()
            ready = wait([child.connection for child in busy], max(left, 0.0))
            for child in [one for one in busy if one.connection in ready or one.deadline <= time.monotonic()]:
                family = busy.pop(child)
                try:
                    answer = child.answer()
                    idle.append(child)
                except ChildError as reason:
                    child.stop()
                    answer = {"family": family, "layers": None, "reasons": [str(reason)]}
                on_answer(answer)
    finally:
        for child in [*busy, *idle]:
            child.stop()


SECONDS = 60.0
"""Time limit for one family."""
WITHIN = 1e-5
"""Largest difference between recovered weights and the model's own that needs no note."""
_PACKAGES = ("torch", "transformers")
_SHOWN = ("d_k", "declared", "measured", "at_the_call", "normalised", "softcap", "how")


def take_census(
    families: Sequence[str] | None = None,
    *,
    workers: int | None = None,
    store: Path | None = None,
    seconds: float = SECONDS,
    on_family: Callable[[str, int, int], None] = lambda family, done, total: None,
) -> Record:
    """Measure the scale of every family of transformers that a small configuration can build here.

    Args:
        families: names (`model_type`). None means all that the installed transformers knows.
        workers: number of processes. None means one per CPU, at least two.
        store: a directory with a file per family. Families measured by the same versions are not measured again.
        seconds: time limit for one family.
        on_family: called after each family with its name, the number finished and the total.

    Returns:
        A record of kind "zoo" with two tables. ``families`` has one row per family, with the scale of most of its
        layers, or None and a note with the reason. ``layers`` has one row per family and scale.

    Raises:
        MissingExtraError: torch or transformers is not installed.
        InvalidValueError: an unknown family. The message suggests similar names.
    """
    for package, extra in (("torch", "torch"), ("transformers", "hf")):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, extra)
    from sqrtdk.torch.transformers_internals import list_families

    known = list_families()
    for family in families or ():
        if family not in known:
            raise unknown_name("family", family, known, "families", "sqrtdk zoo --all")
    wanted = list(dict.fromkeys(families)) if families else known
    answers = {family: answer for family in wanted if (answer := _read_answer(store, family)) is not None}

    def keep(answer: Measured) -> None:
        answers[answer["family"]] = answer
        _write_answer(store, answer)
        on_family(answer["family"], len(answers), len(wanted))

    left = [family for family in wanted if family not in answers]
    measure_families(left, workers or max(2, count_cpus()), seconds, keep)
    return put_together([answers[family] for family in wanted], _versions())


def _versions() -> dict[str, str]:
    return versions() | {package: metadata.version(package) for package in _PACKAGES}


def _read_answer(store: Path | None, family: str) -> Measured | None:
    path = None if store is None else store / f"{family}.json"
    if path is None or not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # cut off while it was written
    answer: Measured = kept.pop("answer", {})
    return answer if kept.get("versions") == _versions() and answer.get("family") == family else None


def _write_answer(store: Path | None, answer: Measured) -> None:
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
        written = json.dumps({"versions": _versions(), "answer": answer})
        (store / f"{answer['family']}.json").write_text(written, encoding="utf-8")


def put_together(answers: Sequence[Measured], installed: dict[str, str]) -> Record:
    """Return one record of the answers for all families, with the versions of the packages that measured them."""
    layers = [row for answer in answers for row in _group_layers(answer)]
    families = [_describe_family(answer, [row for row in layers if row["family"] == answer["family"]])
                for answer in answers]  # fmt: skip
    spec = {"families": [answer["family"] for answer in answers], "date": datetime.date.today().isoformat()}
    when = f"Measured {spec['date']} with transformers {installed['transformers']}, torch {installed['torch']}."
    return Record(
        "zoo",
        spec,
        {"families": families, "layers": layers},
        reading=[*write_reading(families), when],
        versions=installed,
    )


_COUNTED = (
    "Each family is measured at its default configuration; a published model may have other settings. The text and the "
    "vision part of a model count as two families. Families are counted, not models in use."
)


def write_reading(families: Sequence[Any]) -> list[str]:
    """Return sentences about the rows of families."""
    measured = [row for row in families if row["measured"] is not None]
    others = [row for row in measured if not is_usual(row)]
    normalised = sum(bool(row["normalised"]) for row in others)
    differing = [
        row["family"]
        for row in measured
        if row["declared"] is not None and not math.isclose(row["declared"], row["measured"], rel_tol=SAME_SCALE)
    ]
    usual = len(measured) - len(others)
    lines = [
        f"{len(measured)} of {count(len(families), 'family')} of the transformers library "
        f"{'was' if len(measured) == 1 else 'were'} measured. {usual} {'uses' if usual == 1 else 'use'} 1/√dₖ, and "
        f"{len(others)} {'uses' if len(others) == 1 else 'use'} another scale"
        + (f" ({normalised} of them with normalised q or k)." if normalised else ".")
    ]
    if any(row["declared"] is not None for row in measured):
        lines.append(
            f"The measured scale is not the declared one in {', '.join(differing)}."
            if differing
            else "Every declared scale equals the measured one."
        )
    return [*lines, _COUNTED]


def _group_layers(answer: Measured) -> list[dict[str, Any]]:
    """Return one row per scale in a family, the scale of most layers first."""
    groups: list[list[Any]] = []
    for layer in answer["layers"] or ():
        layer = layer | {"measured": _round(layer["effective"]), "declared": _round(layer["declared"])}
        alike = next((group for group in groups if _has_same_scale(group[0], layer)), None)
        if alike is None:
            groups.append([layer])
        else:
            alike.append(layer)
    rows = []
    for layers in sorted(groups, key=lambda group: -len(group)):
        first = layers[0]
        rows.append(
            {
                "family": answer["family"],
                "layers": len(layers),
                "first": first["layer"],
                **{name: first[name] for name in _SHOWN},
                "at_the_call": _round(first["at_the_call"]),
                "declared_by": first["declared_by"],
                "on_the_mask": _round(first["on_the_mask"]),
                "difference": max((one["difference"] or 0.0 for one in layers), default=None),
                "reason": first["reason"],
            }
        )
    return rows


def _has_same_scale(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two layers have one scale but for the rounding of measured ones."""
    if any(one[name] != other[name] for name in ("d_k", "normalised", "softcap")):
        return False
    scales = (one["measured"], other["measured"])
    return scales[0] == scales[1] or (None not in scales and math.isclose(*scales, rel_tol=SAME_SCALE))


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _describe_family(answer: Measured, groups: list[dict[str, Any]]) -> dict[str, Any]:
    understood = [group for group in groups if group["measured"] is not None]
    main = (understood or groups or [dict.fromkeys(_SHOWN)])[0]
    return {
        "family": answer["family"],
        **{name: main[name] for name in _SHOWN},
        "note": _write_note(answer, groups, main),
    }


def _write_note(answer: Measured, groups: list[dict[str, Any]], main: dict[str, Any]) -> str | None:
    """Return why there is no number, or remarks; None if there are none."""
    if answer["layers"] is None:
        return answer["reasons"][-1] if answer["reasons"] else "nothing to feed it with"
    parts = []
    if not groups and not answer["missed"]:
        none = "no attention in what ran"
        parts.append("no attention was recognised in what ran" if answer["called"] else none)
    if main.get("reason") and main["measured"] is None:
        parts.append(str(main["reason"]))
    for group in groups:
        if group is not main:
            scale = "a scale that cannot be told" if group["measured"] is None else f"{group['measured']:.4g}"
            parts.append(f"{scale} at dₖ {group['d_k']} in {count(group['layers'], 'layer')} from {group['first']}")
    reasons = dict.fromkeys(reason for _, reason in answer["missed"])
    parts += [f"not understood in part: {reason}" if groups else f"not understood: {reason}" for reason in reasons]
    worst = max((group["difference"] or 0.0 for group in groups), default=0.0)
    if worst > WITHIN:
        parts.append(f"recovered weights within {worst:.1g} of its own")
    if answer["differs_by_sdpa"]:
        parts.append(f"with torch's attention: {answer['differs_by_sdpa'][0]}")
    if answer["left_out"]:
        parts.append(f"not run: {', '.join(answer['left_out'])}")
    return "; ".join(parts) or None
