"""Measurement of one family: a small model runs under `watch`, then each inner model that did not run with it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from sqrtdk.records.families import DESIGNED
from sqrtdk.torch import watch
from sqrtdk.torch.models.declared import declared_scale
from sqrtdk.torch.models.random_input import Inputs, make_inputs
from sqrtdk.torch.watch import ScaleRecord, Unattributed
from sqrtdk.zoo.shrink import DEEP, ORDINARY_TOKENS, SIZES, Size
from sqrtdk.zoo.small_models import NOT_BUILT, NotBuiltError, build, describe

Measured = dict[str, Any]
_SAME = 1e-3


class WatchedPart(NamedTuple):
    """A model or inner model that ran, its inputs, and what was observed."""

    path: str
    part: nn.Module
    inputs: Inputs
    scales: list[ScaleRecord]
    missed: list[Unattributed]


def measure(family: str) -> Measured:
    """Return the scales of a family's layers as JSON.

    Returns:
        A dictionary with `layers` (a record per layer, None if nothing ran), `missed` (calls that were not understood),
        `left_out` (inner models that did not run), `differs_by_sdpa` (layers with another scale in torch's own
        attention), `called` (the number of modules named attention) and `reasons` (why nothing ran).
    """
    warnings.simplefilter("ignore")
    reasons: list[str] = []
    best: Measured | None = None
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
    """Return whether a larger model would fail as well, because it lacks an argument, a package or a default."""
    lacking = reasons[-1:] and "required positional argument" in reasons[-1]
    return bool(lacking) or any(reasons.count(reason) > 2 for reason in reasons if reason.startswith(NOT_BUILT))


def _try(family: str, size: Size, reasons: list[str]) -> tuple[Measured | None, bool]:
    """Return what was measured at one size, and whether the whole model ran."""
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


def _describe_layer(model: nn.Module, run: WatchedPart, record: ScaleRecord) -> Measured:
    record = replace(record, layer=_join(run.path, record.layer))
    declaration = declared_scale(model, record, DESIGNED.get)
    return record.as_json() | {"declared": declaration.value, "declared_by": declaration.source}


def _run_parts(model: nn.Module, reasons: list[str]) -> tuple[list[WatchedPart], list[str]]:
    """Run the model, then every inner model that has not run by then."""
    from transformers import PreTrainedModel

    parts: dict[str, nn.Module] = {
        path: part for path, part in model.named_modules() if isinstance(part, PreTrainedModel)
    }
    ran: set[str] = set()
    runs: list[WatchedPart] = []
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


def _feed(
    path: str, part: nn.Module, inner: dict[str, nn.Module], reasons: list[str]
) -> tuple[WatchedPart | None, set[str]]:
    """Try inputs until a model runs. Return the run, and the names of the inner models that ran with it."""
    for inputs in make_inputs(part, ORDINARY_TOKENS):
        called: set[str] = set()
        try:
            with ExitStack() as stack:
                for name, one in inner.items():
                    stack.callback(_mark(one, name, called))
                seen = stack.enter_context(watch(part))
                with torch.no_grad():
                    part(**inputs)
        except Exception as error:  # other people's code: whatever it raises is the reason
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items() if isinstance(x, torch.Tensor))
            reasons.append(f"does not run with {shapes}: {describe(error)}")
            continue
        return WatchedPart(path, part, inputs, seen.scales, seen.unattributed), called
    return None, set()


def _mark(part: nn.Module, name: str, called: set[str]) -> Callable[[], None]:
    """Add a name to a set when a module is called. Return the function that removes the hook."""
    return part.register_forward_pre_hook(lambda *_: called.add(name)).remove


def _compare_with_sdpa(model: Any, runs: list[WatchedPart]) -> list[str]:
    """Return the layers with another scale when torch's own operation computes the attention."""
    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, AttributeError):
        return []
    differing = []
    for run in runs:
        try:
            with torch.no_grad(), watch(run.part) as seen:
                run.part(**run.inputs)
        except Exception:  # not supported after all
            return []
        eager = {record.layer: record.effective for record in run.scales}
        for record in seen.scales:
            one, other = eager.get(record.layer), record.effective
            if one is not None and other is not None and not math.isclose(one, other, rel_tol=_SAME):
                differing.append(f"{_join(run.path, record.layer)}: {other:.6g}")
    return differing
