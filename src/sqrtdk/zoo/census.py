"""The census: every family measured in guarded processes, kept family by family, and put together as one record."""

from __future__ import annotations

import datetime
import difflib
import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sqrtdk import backends
from sqrtdk.display import count
from sqrtdk.errors import InvalidValueError, missing_extra
from sqrtdk.families import SAME_SCALE, is_usual
from sqrtdk.records import Record, versions
from sqrtdk.zoo.pool import Answer, measure_families

SECONDS = 60.0
"""The longest that one family may take."""
WITHIN = 1e-5
"""How near recovered weights come to the model's own."""
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
        families: by `model_type`; None: all that the installed transformers knows.
        workers: processes; None: one per CPU, two at least.
        store: a directory with a file per family; those measured by the same versions are not measured again.
        seconds: the longest that one family may take.
        on_family: called with a family that is done, how many are and how many there are.

    Returns:
        A record of kind "zoo". `families`: a row per family, of most of its layers; None where there is no number, the
        note says why. `layers`: a row for each scale in a family.

    Raises:
        MissingExtraError: torch or transformers is not installed.
        InvalidValueError: an unknown family; the message lists similar ones.
    """
    for package, extra in (("torch", "torch"), ("transformers", "hf")):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, extra)
    from sqrtdk.zoo.specimens import list_families

    known = list_families()
    for family in families or ():
        if family not in known:
            similar = difflib.get_close_matches(family, known, n=5) or known[:5]
            raise InvalidValueError(
                "families",
                f"must be of the {len(known)} that transformers knows, got {family!r}; similar ones: "
                f"{', '.join(similar)}",
            )
    wanted = list(dict.fromkeys(families)) if families else known
    answers = {family: answer for family in wanted if (answer := _read_answer(store, family)) is not None}

    def keep(answer: Answer) -> None:
        answers[answer["family"]] = answer
        _write_answer(store, answer)
        on_family(answer["family"], len(answers), len(wanted))

    left = [family for family in wanted if family not in answers]
    measure_families(left, workers or max(2, backends.count_cpus()), seconds, keep)
    return put_together([answers[family] for family in wanted], _versions())


def _versions() -> dict[str, str]:
    return versions() | {package: metadata.version(package) for package in _PACKAGES}


def _read_answer(store: Path | None, family: str) -> Answer | None:
    path = None if store is None else store / f"{family}.json"
    if path is None or not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # cut off while it was written
    answer: Answer = kept.pop("answer", {})
    return answer if kept.get("versions") == _versions() and answer.get("family") == family else None


def _write_answer(store: Path | None, answer: Answer) -> None:
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
        written = json.dumps({"versions": _versions(), "answer": answer})
        (store / f"{answer['family']}.json").write_text(written, encoding="utf-8")


def put_together(answers: Sequence[Answer], installed: dict[str, str]) -> Record:
    """One record from what was measured in each family, with the versions of the packages that it was measured with."""
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


def write_reading(families: Sequence[Any]) -> list[str]:
    """What the rows of families show, in sentences."""
    measured = [row for row in families if row["measured"] is not None]
    others = [row for row in measured if not is_usual(row)]
    normalised = sum(bool(row["normalised"]) for row in others)
    differing = [
        row["family"]
        for row in measured
        if row["declared"] is not None and not math.isclose(row["declared"], row["measured"], rel_tol=SAME_SCALE)
    ]
    lines = [
        f"{len(measured)} of {count(len(families), 'family')} of the transformers library measured: "
        f"{len(measured) - len(others)} use 1/√dₖ, {len(others)} another scale ({normalised} of them normalise q or k)."
    ]
    if any(row["declared"] is not None for row in measured):
        lines.append(
            f"The measured scale is not the declared one in {', '.join(differing)}."
            if differing
            else "Where a scale is declared, it is the measured one."
        )
    return [*lines, "Families of the library are counted, each at its default configuration, not models in use."]


def _group_layers(answer: Answer) -> list[dict[str, Any]]:
    """A row for each scale in a family, that of the most layers first."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for layer in answer["layers"] or ():
        layer = layer | {"measured": _round(layer["effective"]), "declared": _round(layer["declared"])}
        groups.setdefault(tuple(layer[name] for name in ("d_k", "measured", "normalised", "softcap")), []).append(layer)
    rows = []
    for layers in sorted(groups.values(), key=lambda group: -len(group)):
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


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _describe_family(answer: Answer, groups: list[dict[str, Any]]) -> dict[str, Any]:
    understood = [group for group in groups if group["measured"] is not None]
    main = (understood or groups or [dict.fromkeys(_SHOWN)])[0]
    return {
        "family": answer["family"],
        **{name: main[name] for name in _SHOWN},
        "note": _write_note(answer, groups, main),
    }


def _write_note(answer: Answer, groups: list[dict[str, Any]], main: dict[str, Any]) -> str | None:
    """Why there is no number, or what else there is to say."""
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
