"""Auditing a model: one watched call, the scale of every layer beside its declaration, patterns and findings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sqrtdk.audits import Audit, AuditedHead, AuditedRows, AuditedScale
from sqrtdk.counterfactual import Variation, counterfactual
from sqrtdk.diagnosis import diagnose
from sqrtdk.display import describe_array
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError
from sqrtdk.records import cpu_name, versions
from sqrtdk.torch.declared import declared_scale
from sqrtdk.torch.watch import Seen, watch

# What a model raises for inputs that do not fit it.
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
# Scores of so many rows per layer are kept, for what heads would do at these multiples of their temperature.
_KEPT_ROWS = 16
_LONGEST_KEPT = 4096
_TEMPERATURES = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)


class MisfitError(InvalidValueError):
    """A batch that a model cannot take; `raised` says which model raised what."""

    raised = ""


def audit(model: nn.Module, batch: Any) -> Audit:
    """Run a model once on a batch and say what every head does, the scale of every layer, and what is wrong.

    The model runs in evaluation mode under no_grad and is watched passively; afterwards the mode of each module and the
    random streams (Python's, NumPy's and torch's, on every device of the model) are as before. What a rule needs that
    one call cannot tell (trends, gradients) is not judged. See `sqrtdk.diagnose` for the rules.

    Args:
        model: any module that computes attention.
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.

    Returns:
        The `Audit`: `heads`, `findings`, `scale`, `unattributed`, `padding`; `as_json()` is what `sqrtdk audit --json`
        prints. A model whose attention was seen and not understood has no heads, and says where and why.

    Raises:
        InvalidTypeError: `model` is no module, or `batch` none of these.
        InvalidValueError: the model cannot be called with the batch (its own error is the cause), or computes no
            attention.

    >>> torch.manual_seed(0) and None
    >>> layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    >>> audit(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 300, 32))
    Audit of TransformerEncoder: 2 layers, 4 heads; padding: unknown
    Patterns: 4 broad.
    The scale is 1/√dₖ in all 2 layers, which is 0.25 at dₖ 16, not declared.
    Scores have a standard deviation of 0.497 (geometric mean of 4 heads): 1 by width (scale·√dₖ) × 0.493 by the lengths
    of q and k × 0.983 by what differs between keys × 1.02 by alignment.
    Nothing was found wrong.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
    arguments, named = _read_batch(batch)
    with _unchanged(model), torch.no_grad(), watch(model, keep_rows=_kept_rows(batch)) as seen:
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
    """How many rows per layer keep their scores; none of a batch so long that they would fill the memory."""
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
    """Shapes and dtypes of a batch in a line."""
    if isinstance(batch, Tensor):
        return describe_array(batch)
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_describe(value)}" for name, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(_describe, batch)) + ")"
    return type(batch).__name__


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; mode and random streams as before afterwards."""
    # The flag itself: some modules merge weights or refuse in a train() of their own.
    modes = {module: module.training for module in model.modules()}
    tensors = [*model.parameters(), *model.buffers()]
    devices: dict[str, set[int]] = {}
    for device in {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}:
        devices.setdefault(device.type, set()).add(device.index or 0)
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002 - the stream that a model may use
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, indices in devices.items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))
        try:
            for module in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            random.setstate(python)
            np.random.set_state(array)  # noqa: NPY002


def _judge(model: nn.Module, seen: Seen, batch: str) -> Audit:
    layers = seen.layers
    # A layer whose rows are all padding has a scale and no rows.
    paths = list(dict.fromkeys([record.layer for record in seen.scales] + list(layers)))
    index = {path: at for at, path in enumerate(paths)}
    scales = []
    for record in seen.scales:
        declared = declared_scale(model, record)
        scales.append(
            AuditedScale(
                layer=record.layer,
                layer_index=index[record.layer],
                declared=declared.value,
                declared_by=declared.source,
                measured=record.effective,
                at_the_call=record.at_the_call,
                before_the_call=record.before_the_call,
                d_k=record.d_k,
                normalised=record.normalised,
                softcap=record.softcap,
                how=record.how,
                reason=record.reason,
                dtype=record.dtype,
                logits_dtype=record.logits_dtype,
                on_the_mask=record.on_the_mask,
                difference=record.difference,
                call=record.call,
            )
        )
    findings = diagnose(
        layers,
        scales=[vars(scale) for scale in scales],
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
    """Per layer and head the factors of its scores' standard deviation; layers of unknown scale are left out."""
    known = {one.layer: (one.measured, one.d_k) for one in scales if one.measured is not None}
    return {
        path: [split.parts(head, *known[path]) for head in range(split.heads)]
        for path, split in seen.causes.items()
        if path in known
    }


def _vary(seen: Seen) -> dict[str, list[Variation]]:
    """By layer, what its heads would do at other temperatures."""
    by_layer: dict[str, list[Variation]] = {}
    if any(seen.rows.values()):
        with np.errstate(all="ignore"):  # scores that are not finite are told as findings
            for one in counterfactual(seen, temperatures=_TEMPERATURES).variations:
                by_layer.setdefault(one.layer, []).append(one)
    return by_layer
