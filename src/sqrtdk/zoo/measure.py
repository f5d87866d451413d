"""One family measured: a small model of it runs under a watch, and so do the models inside it that did not run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from sqrtdk.families import DESIGNED
from sqrtdk.torch import watch
from sqrtdk.torch.declared import declared_scale
from sqrtdk.torch.watch import ScaleRecord, Unattributed
from sqrtdk.zoo.meals import Meal, make_meals
from sqrtdk.zoo.shrink import DEEP, SIZES, Size
from sqrtdk.zoo.specimens import NOT_BUILT, NotBuiltError, build, describe

Answer = dict[str, Any]
_SAME = 1e-3


class Run(NamedTuple):
    """A model, or one inside it, that took a meal; and what was seen."""

    path: str
    part: nn.Module
    meal: Meal
    scales: list[ScaleRecord]
    missed: list[Unattributed]


def measure(family: str) -> Answer:
    """The scales of a family's layers as JSON.

    Returns:
        `layers`: a record per layer, None if nothing ran; `missed`: what was not understood; `left_out`: models inside
        that took no meal; `differs_by_sdpa`: layers whose scale is another one in torch's own attention; `called`: how
        many modules are called attention; `reasons`: why nothing ran.
    """
    warnings.simplefilter("ignore")
    reasons: list[str] = []
    best: Answer | None = None
    for size in SIZES:
        answer, is_whole = _try(family, size, reasons)
        if answer is not None and (best is None or len(answer["layers"]) > len(best["layers"])):
            best = answer
        if is_whole or _is_no_question_of_size(reasons):
            break
    if best is not None and not best["layers"]:
        deeper, _ = _try(family, DEEP, reasons)
        best = deeper if deeper is not None and deeper["layers"] else best
    return best or {"family": family, "layers": None, "reasons": list(dict.fromkeys(reasons))}


def _is_no_question_of_size(reasons: list[str]) -> bool:
    """Whether a larger model would not run either: what it lacks is an argument, a package, a part of its default."""
    lacking = reasons[-1:] and "required positional argument" in reasons[-1]
    return bool(lacking) or any(reasons.count(reason) > 2 for reason in reasons if reason.startswith(NOT_BUILT))


def _try(family: str, size: Size, reasons: list[str]) -> tuple[Answer | None, bool]:
    """What was measured in one size, and whether the whole model ran."""
    try:
        model = build(family, size)
    except NotBuiltError as error:
        reasons.append(str(error))
        return None, False
    runs, left_out = _run_parts(model, reasons)
    if not runs:
        return None, False
    answer = {
        "family": family,
        "size": str(size),
        "layers": [_describe_layer(model, run, record) for run in runs for record in run.scales],
        "missed": sorted({(_join(run.path, one.layer), one.reason) for run in runs for one in run.missed}),
        "left_out": left_out,
        "called": sum("Attention" in type(module).__name__ for module in model.modules()),
        "differs_by_sdpa": _compare_with_sdpa(model, runs),
        "reasons": [],
    }
    return answer, not runs[0].path


def _join(path: str, layer: str) -> str:
    return ".".join(part for part in (path, layer) if part)


def _describe_layer(model: nn.Module, run: Run, record: ScaleRecord) -> Answer:
    record = replace(record, layer=_join(run.path, record.layer))
    declaration = declared_scale(model, record, DESIGNED.get)
    return record.as_json() | {"declared": declaration.value, "declared_by": declaration.source}


def _run_parts(model: nn.Module, reasons: list[str]) -> tuple[list[Run], list[str]]:
    """Feed the model, then every model inside it that has not run by then."""
    from transformers import PreTrainedModel

    parts: dict[str, nn.Module] = {
        path: part for path, part in model.named_modules() if isinstance(part, PreTrainedModel)
    }
    ran: set[str] = set()
    runs: list[Run] = []
    left_out: list[str] = []
    for path, part in parts.items():
        if path in ran:
            continue
        inner = {name: one for name, one in parts.items() if name == path or name.startswith(f"{path}.") or not path}
        run, called = _feed(path, part, inner, reasons)
        ran |= called
        if run is not None:
            runs.append(run)
        elif path:
            left_out.append(path)
    return runs, [path for path in left_out if path not in ran]


def _feed(path: str, part: nn.Module, inner: dict[str, nn.Module], reasons: list[str]) -> tuple[Run | None, set[str]]:
    """Offer a model meals until it takes one; which of the models inside it ran."""
    for meal in make_meals(part):
        called: set[str] = set()
        try:
            with ExitStack() as stack:
                for name, one in inner.items():
                    stack.callback(_mark(one, name, called))
                seen = stack.enter_context(watch(part))
                with torch.no_grad():
                    part(**meal)
        except Exception as error:  # other people's code: whatever it raises is the reason
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in meal.items() if isinstance(x, torch.Tensor))
            reasons.append(f"does not run with {shapes}: {describe(error)}")
            continue
        return Run(path, part, meal, seen.scales, seen.unattributed), called
    return None, set()


def _mark(part: nn.Module, name: str, called: set[str]) -> Callable[[], None]:
    """Enter a name into a set when a module is called; what is returned ends that."""
    return part.register_forward_pre_hook(lambda *_: called.add(name)).remove


def _compare_with_sdpa(model: Any, runs: list[Run]) -> list[str]:
    """The layers whose scale is another one when the model hands its attention to torch's operation."""
    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, AttributeError):
        return []
    differing = []
    for run in runs:
        try:
            with torch.no_grad(), watch(run.part) as seen:
                run.part(**run.meal)
        except Exception:  # not supported after all
            return []
        eager = {record.layer: record.effective for record in run.scales}
        for record in seen.scales:
            one, other = eager.get(record.layer), record.effective
            if one is not None and other is not None and not math.isclose(one, other, rel_tol=_SAME):
                differing.append(f"{_join(run.path, record.layer)}: {other:.6g}")
    return differing
