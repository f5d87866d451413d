"""Audits of a model: one watched call, measured and declared scale of every layer, patterns and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sqrtdk.audits import Audit, AuditedHead, AuditedRows, AuditedScale
from sqrtdk.diagnosis import diagnose
from sqrtdk.diagnosis.counterfactual import Variation, counterfactual
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError
from sqrtdk.records.record import cpu_name, versions
from sqrtdk.show.table import describe_array
from sqrtdk.torch.models.declared import declared_scale
from sqrtdk.torch.models.evaluation import evaluating
from sqrtdk.torch.watch import Seen, watch

# Errors that models raise for inputs that do not fit.
_MISFITS = (
    TypeError,
    ValueError,
    RuntimeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
_LONGEST_REASON = 300
# Number of rows per layer whose scores are kept, and the temperature factors at which they are evaluated.
_KEPT_ROWS = 16
_LONGEST_KEPT = 4096
_TEMPERATURES = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)


class MisfitError(InvalidValueError):
    """Raised for a batch that a model cannot take; `raised` names the models and their errors."""

    raised = ""


def audit(model: nn.Module, batch: Any) -> Audit:
    """Run a model once on a batch and return its audit: every head, the scale of every layer, and findings.

    The model runs in evaluation mode under no_grad and is watched passively; afterwards the mode of each module and the
    random streams (Python's, NumPy's and torch's, on every device of the model) are as before. Rules that need more
    than one call (trends, gradients) are not judged. See `sqrtdk.diagnose` for the rules.

    Args:
        model: any module that computes attention.
        batch: the input of the model: a tensor, a tuple of arguments, or a dict of keyword arguments.

    Returns:
        The `Audit`: `heads`, `findings`, `scale`, `unattributed`, `padding`; `as_json()` is the output of
        `sqrtdk audit --json`. If attention was seen but not understood, it has no heads and says where and why.

    Raises:
        InvalidTypeError: if `model` is not a module, or `batch` has another type.
        InvalidValueError: if the model cannot be called with the batch (its own error is the cause), or computes no
            attention.

    >>> torch.manual_seed(0) and None
    >>> layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    >>> audit(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 300, 32))
    Audit of TransformerEncoder: 2 layers, 4 heads; padding: unknown
    mean entropy ratio H/ln n; pattern: b broad
    head                    0      1
    layers.0.self_attn  0.98b  0.98b
    layers.1.self_attn  0.98b  0.98b
    Patterns: 4 broad.
    The scale is 1/√dₖ in both layers, which is 0.25 at dₖ 16, not declared.
    Scores have a standard deviation of 0.497 (geometric mean of 4 heads): 1 by width (scale·√dₖ) × 0.493 by the lengths
    of q and k × 0.983 by what differs between keys × 1.02 by alignment.
    No problem was found. Scale, masks, NaN, overflow and rounding of scores were checked.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
    arguments, named = _read_batch(batch)
    with evaluating(model), torch.no_grad(), watch(model, keep_rows=_kept_rows(batch)) as seen:
        try:
            model(*arguments, **named)
        except SqrtdkError:
            raise
        except _MISFITS as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON] or "no reason given"
            raised = f"{type(model).__name__} raised {type(error).__name__}: {reason}"
            misfit = MisfitError("batch", f"must fit the model, got {_describe(batch)}, for which {raised}")
            misfit.raised = raised
            raise misfit from error
    if not seen.scales and not seen.unattributed:
        raise InvalidValueError(
            "model", f"must compute attention, got {type(model).__name__}, in which none was recognised"
        )
    return _judge(model, seen, _describe(batch))


def _kept_rows(batch: Any) -> int | None:
    """Return the number of rows per layer that keep their scores; None for a long batch, to save memory."""
    parts = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    longest = max((max(part.shape, default=0) for part in parts if isinstance(part, Tensor)), default=0)
    return _KEPT_ROWS if longest <= _LONGEST_KEPT else None


def _read_batch(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        strange = [name for name in batch if not isinstance(name, str)]
        if strange:
            raise InvalidTypeError("batch", f"must have names of arguments as keys, got {strange[0]!r}")
        return (), batch
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise InvalidTypeError(
        "batch", f"must be a tensor, a tuple of arguments or a dict of keyword arguments, got {type(batch).__name__}"
    )


def _describe(batch: Any) -> str:
    """Return shapes and dtypes of a batch in one line."""
    if isinstance(batch, Tensor):
        return describe_array(batch)
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_describe(value)}" for name, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(_describe, batch)) + ")"
    return type(batch).__name__


def _judge(model: nn.Module, seen: Seen, batch: str) -> Audit:
    layers = seen.layers
    # If all rows of a layer are padding, the layer has a scale but no rows.
    paths = list(dict.fromkeys([record.layer for record in seen.scales] + list(layers)))
    index = {path: at for at, path in enumerate(paths)}
    scales = []
    for record in seen.scales:
        value, source = declared_scale(model, record)
        place = index[record.layer]
        scales.append(AuditedScale(**vars(record), layer_index=place, declared=value, declared_by=source))
    findings = diagnose(
        layers,
        scales=[scale.as_json() for scale in scales],
        dtype={scale.layer: scale.logits_dtype for scale in scales if scale.layer in layers},
    )
    missed = seen.unattributed
    varied, spreads = _vary(seen), _split_spreads(seen, scales)
    calls = {scale.layer: scale.call for scale in scales}
    return Audit(
        heads=[
            head
            for path, summary in layers.items()
            for head in AuditedHead.of(path, index[path], summary, spreads.get(path, ()), calls[path])
        ],
        findings=[replace(one, layer_index=index[one.layer]) for one in findings if one.layer is not None],
        scale=scales,
        unattributed=sum(one.times for one in missed),
        unattributed_where=list(dict.fromkeys(one.layer for one in missed)),
        padding=seen.padding,
        about={
            "model": type(model).__name__,
            "batch": batch,
            "unattributed_why": {one.layer: one.reason for one in missed},
            "notes": list(seen.notes),
            "versions": versions(),
            "cpu": cpu_name(),
        },
        rows=[one for path, summary in layers.items() for one in AuditedRows.of(path, summary, varied.get(path, []))],
    )


def _split_spreads(seen: Seen, scales: Sequence[AuditedScale]) -> dict[str, list[dict[str, float] | None]]:
    """Return the factors of the scores' standard deviation per layer and head; without layers of unknown scale."""
    known = {one.layer: (one.measured, one.d_k) for one in scales if one.measured is not None}
    return {
        path: [split.parts(head, *known[path]) for head in range(split.heads)]
        for path, split in seen.causes.items()
        if path in known
    }


def _vary(seen: Seen) -> dict[str, list[Variation]]:
    """Return, per layer, the behaviour of its heads at other temperatures."""
    by_layer: dict[str, list[Variation]] = {}
    if any(seen.rows.values()):
        with np.errstate(all="ignore"):  # findings report non-finite scores
            for one in counterfactual(seen, temperatures=_TEMPERATURES).variations:
                by_layer.setdefault(one.layer, []).append(one)
    return by_layer
