"""Rules for scales: compare each measured scale with the declared scale, with 1/√dₖ and with the other layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqrtdk import checks
from sqrtdk.diagnosis.findings import Finding, Severity, Threshold
from sqrtdk.diagnosis.precision import PRECISIONS, name_dtype
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.scales import default_factor
from sqrtdk.wording.numbers import write_number

__all__ = ["SCALE_RULES", "SCALE_TOLERANCE", "judge_scales", "scale_tolerance"]

SCALE_RULES = ("scale-differs-from-declared", "scale-undeclared", "scale-differs-between-layers")
"""Rules that compare the factor on q·k. The first two also explain the factor."""

SCALE_TOLERANCE = 1e-3
"""Relative tolerance for float32 and wider, chosen here: a measured scale is a ratio of rounded norms."""

UNKNOWN_EPSILON = 2.0**-7
"""Epsilon for an unknown dtype: that of bfloat16, the coarsest that models compute in, so rounding is no finding."""

_KIND = "a number or None"


@dataclass(frozen=True)
class _LayerScale:
    """Checked record of `scales`. `relative` is the scale as a multiple of 1/√dₖ."""

    layer: str
    layer_index: int
    d_k: int
    measured: float
    declared: float | None
    normalised: bool
    on_the_mask: float | None
    tolerance: float

    @property
    def relative(self) -> float:
        return self.measured * math.sqrt(self.d_k)


def judge_scales(
    scales: Sequence[Mapping[str, Any]], paths: Sequence[str | None], epsilon: float | None
) -> list[Finding]:
    """Return the findings about the scales of layers. `epsilon` is that of the measured dtype, None if unknown.

    If a record has its own `dtype`, the rounding of that dtype applies.

    Two scales are equal if they differ by at most 1e-3, or by ε if that is more: half an ε for the rounding of the
    factor and half for that of q. Layers whose scale could not be measured are skipped.

    >>> judge_scales([{"layer": "h.0", "d_k": 64, "measured": 0.25, "declared": 0.125}], [], None)[0]
    error: scale-differs-from-declared in h.0: measured 0.25, declared 0.125, ratio 2, dₖ 64. The scale is 1/√16, that
    of 16 dimensions instead of 64.
    """
    layers = _read(scales, paths, UNKNOWN_EPSILON if epsilon is None else epsilon)
    findings = [one for layer in layers for judge in (_judge_layer, _judge_mask) for one in judge(layer)]
    return findings + _compare_layers(layers, max((layer.tolerance for layer in layers), default=SCALE_TOLERANCE))


def scale_tolerance(dtype: Any) -> float:
    """Return the relative difference of two scales that rounding explains, for q and k of this dtype (None: unknown).

    >>> scale_tolerance("float32"), scale_tolerance("bfloat16")
    (0.001, 0.0078125)
    """
    return max(SCALE_TOLERANCE, UNKNOWN_EPSILON if dtype is None else PRECISIONS[name_dtype(dtype)].epsilon)


def _read(scales: Any, paths: Sequence[str | None], epsilon: float) -> list[_LayerScale]:
    if isinstance(scales, Mapping | str) or not isinstance(scales, Sequence):
        raise InvalidTypeError("scales", f"must be a sequence of records, one per layer, got {type(scales).__name__}")
    layers = []
    for at, record in enumerate(scales):
        if not isinstance(record, Mapping):
            raise InvalidTypeError(f"scales[{at}] must be a mapping, got {type(record).__name__}")
        missing = [name for name in ("layer", "measured", "d_k") if name not in record]
        if missing:
            raise InvalidValueError(f"scales[{at}] must have layer, measured and d_k, got none of {missing}")
        layer, index, dtype = record["layer"], record.get("layer_index"), record.get("dtype")
        measured, declared, on_the_mask = (
            None if (value := record.get(name)) is None else checks.number(f"{name} of scales[{at}]", value, kind=_KIND)
            for name in ("measured", "declared", "on_the_mask")
        )
        if measured is None:
            continue
        if index is None:
            index = paths.index(layer) if layer in paths else at
        layers.append(
            _LayerScale(
                layer=layer,
                layer_index=int(index),
                d_k=checks.integer(f"d_k of scales[{at}]", record["d_k"], 1),
                measured=measured,
                declared=declared,
                normalised=bool(record.get("normalised", False)),
                on_the_mask=on_the_mask,
                tolerance=max(SCALE_TOLERANCE, epsilon) if dtype is None else scale_tolerance(dtype),
            )
        )
    return layers


def _same(one: float, two: float, tolerance: float) -> bool:
    return abs(one - two) <= tolerance * abs(two)


def _judge_layer(layer: _LayerScale) -> list[Finding]:
    usual, tolerance = default_factor(layer.d_k), layer.tolerance
    where = (layer.layer, layer.layer_index, None)
    if layer.declared is not None:
        if _same(layer.measured, layer.declared, tolerance):
            return []
        ratio = layer.measured / layer.declared if layer.declared else math.inf
        evidence = {"measured": layer.measured, "declared": layer.declared, "ratio": ratio, "d_k": layer.d_k}
        threshold = Threshold(tolerance, "relative difference that rounding explains, against the declared scale")
        remedy = "Make the code multiply by the declared scale once, or correct the declaration."
        cause = _explain(layer)
        return [Finding("scale-differs-from-declared", "error", *where, evidence, threshold, cause, remedy)]
    if _same(layer.measured, usual, tolerance):
        return []
    severity: Severity = "info" if layer.normalised else "warning"
    evidence = {"measured": layer.measured, "usual": usual, "ratio": layer.measured / usual, "d_k": layer.d_k}
    cause = _explain(layer)
    if layer.normalised:
        cause += " q and k are normalised, where another scale than 1/√dₖ is common."
    threshold = Threshold(tolerance, "relative difference that rounding explains, against 1/√dₖ (Vaswani et al. 2017)")
    remedy = "Declare the scale in the configuration if it is meant, else multiply by 1/√dₖ."
    return [Finding("scale-undeclared", severity, *where, evidence, threshold, cause, remedy)]


def _judge_mask(layer: _LayerScale) -> list[Finding]:
    """Return a finding if the scale also multiplies a term added to the scores, such as a position bias or mask."""
    factor, tolerance = layer.on_the_mask, layer.tolerance
    if factor is None or _same(factor, 1.0, tolerance):
        return []
    evidence = {"on_the_mask": factor, "measured": layer.measured, "d_k": layer.d_k}
    threshold = Threshold(tolerance, "relative difference that rounding explains, against 1: a mask is not scaled")
    cause = f"What is added to the scores is multiplied by {write_number(factor)} as well."
    remedy = "Scale the scores before the mask or bias is added to them."
    where = (layer.layer, layer.layer_index, None)
    return [Finding("scale-on-mask", "warning", *where, evidence, threshold, cause, remedy)]


def _explain(layer: _LayerScale) -> str:
    """Return an explanation of the measured scale in terms of dₖ, if it is a known scale."""
    measured, d_k, tolerance = layer.measured, layer.d_k, layer.tolerance
    if _same(layer.relative, 1.0, tolerance):
        return f"The scale is 1/√dₖ of dₖ = {d_k}; the declared one is not applied."
    if _same(measured, 1.0, tolerance):
        return "No scale is applied: the product is multiplied by 1."
    if _same(measured, 1.0 / d_k, tolerance):
        return "The scale is 1/dₖ: that of muP, or 1/√dₖ applied twice."
    dimensions = 1.0 / measured**2 if measured > 0 else 0.0
    whole = round(dimensions) if dimensions < 1e6 else 0
    if whole > 1 and _same(measured, default_factor(whole), SCALE_TOLERANCE):
        return f"The scale is 1/√{whole}, that of {whole} dimensions instead of {d_k}."
    return (
        f"The product is multiplied by {write_number(measured)}, which is {write_number(layer.relative)} times 1/√dₖ."
    )


def _compare_layers(layers: Sequence[_LayerScale], tolerance: float) -> list[Finding]:
    """Return one finding per layer that differs from the most common multiple of 1/√dₖ.

    Layers with a declared scale are left out, and so are layers with normalised q and k, which may learn their own
    scale.
    """
    silent = [layer for layer in layers if layer.declared is None and not layer.normalised]
    agreeing = [sum(_same(other.relative, layer.relative, tolerance) for other in silent) for layer in silent]
    if not silent or max(agreeing) == len(silent):
        return []
    # Among equally common multiples, take the nearest to 1/√dₖ.
    common = min(
        (-votes, abs(layer.relative - 1.0), layer.relative) for votes, layer in zip(agreeing, silent, strict=True)
    )[2]
    threshold = Threshold(tolerance, "relative difference that rounding explains, between layers of one model")
    findings = []
    for layer in silent:
        if _same(layer.relative, common, tolerance):
            continue
        evidence = {
            "measured": layer.measured,
            "times_1/√dₖ": layer.relative,
            "commonest_times_1/√dₖ": common,
            "layers_that_agree": max(agreeing),
            "of_layers": len(silent),
        }
        cause = (
            f"{max(agreeing)} of {len(silent)} layers use {write_number(common)}/√dₖ, this one "
            f"{write_number(layer.relative)}/√dₖ."
        )
        remedy = (
            "Declare the scales of the layers in the configuration if they are meant to differ, else make them one."
        )
        where = (layer.layer, layer.layer_index, None)
        findings.append(Finding("scale-differs-between-layers", "warning", *where, evidence, threshold, cause, remedy))
    return findings
