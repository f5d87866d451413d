"""Rules for the rows of one snapshot: non-finite rows, limits of a dtype, vanishing gradients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sqrtdk.diagnosis.findings import Finding, Severity, Threshold
from sqrtdk.diagnosis.patterns import NOT_ENOUGH_DATA, OTHER, patterns, rows_that_see
from sqrtdk.diagnosis.precision import PRECISIONS
from sqrtdk.show.table import name_layer
from sqrtdk.summary import BIN_EDGES, HeadSummary
from sqrtdk.summary.heads import Array
from sqrtdk.wording.numbers import write_number

Layers = Mapping[str | None, HeadSummary]


DEAD_TRACE = Threshold(0.01, "chosen here: a row's gradient is at most a hundredth of that of 1 − Σp² = 1")
DEAD_SHARE = 0.95
"""Share of rows that must be below `DEAD_TRACE`; in other words, the 95th percentile is below it."""


def find_non_finite(layers: Layers, dtypes: Mapping[str | None, str]) -> list[Finding]:
    """Return one finding for the first layer with non-finite rows, if any, because later layers inherit NaN."""
    lost = {path: count_non_finite(summary) for path, summary in layers.items()}
    struck = [path for path, rows in lost.items() if rows.any()]
    if not struck:
        return []
    first = struck[0]
    heads = np.flatnonzero(lost[first]).tolist()
    head = heads[0] if len(heads) == 1 else None
    evidence = {
        "rows": int(lost[first].sum()),
        "of_rows": int(layers[first].rows_seen[heads].sum()),
        "heads": heads,
        "layers": len(struck),
    }
    if len(layers) == 1:
        cause = "Scores of these rows are NaN or infinite."
    elif len(struck) == 1:
        cause = (
            f"{name_layer(first or '')} is the only one of {len(layers)} layers with scores that are NaN or infinite."
        )
    else:
        cause = f"{name_layer(first or '')} is the first of {len(struck)} layers with scores that are NaN or infinite."
    if dtypes.get(first) == "float16":
        cause += f" Its scores are rounded to float16, which ends at {PRECISIONS['float16'].largest:g}."
    remedy = "Look at the input and the weights of this layer first: later layers take NaN over from it."
    threshold = Threshold(0.0, "by definition: finite inputs give finite scores")
    at = list(layers).index(first)
    return [Finding("non-finite-rows", "error", first, at, head, evidence, threshold, cause, remedy)]


def count_non_finite(summary: HeadSummary) -> Array:
    """Return the number of rows `[H]` with non-finite logits or scores; rows that see no key do not count."""
    left_out = np.maximum(summary["logit_mean"].left_out, summary["score_max"].left_out)
    sees_nothing = summary["visible_keys"].count - rows_that_see(summary, 1)
    return np.asarray(left_out - sees_nothing)


def judge_precision(layers: Layers, dtypes: Mapping[str | None, str]) -> list[Finding]:
    """Return findings for scores that the dtype cannot hold, or holds with an error of 1 or more."""
    findings = []
    for at, (path, summary) in enumerate(layers.items()):
        if path not in dtypes:
            continue
        name = dtypes[path]
        epsilon, most = PRECISIONS[name]
        coarse = 2.0 / epsilon
        overflow = Threshold(most, f"the largest finite {name} (IEEE 754)")
        rounding = Threshold(coarse, f"2/ε with ε = {epsilon:g} of {name}: from here on numbers are at least 2 apart")
        seen = summary["score_max"]
        for head in np.flatnonzero(seen.count):
            size = float(max(abs(seen.largest[head]), abs(seen.least[head])))
            evidence = {"largest_score_in_size": size, "dtype": name}
            if size > most:
                cause = (
                    f"A score of size {write_number(size)} is infinite in {name}, whose largest number is "
                    f"{write_number(most)}."
                )
                is_narrow = name not in ("float32", "float64")
                remedy = "Check the scale; compute the scores in float32 or with a fused kernel."
                remedy = remedy if is_narrow else "Check the scale."
                findings.append(
                    Finding("score-overflow", "error", path, at, int(head), evidence, overflow, cause, remedy)
                )
            elif size >= coarse:
                spacing = epsilon * 2.0 ** np.floor(np.log2(size))
                evidence["spacing"] = float(spacing)
                cause = (
                    f"At {write_number(size)} numbers of {name} are {spacing:g} apart: a logit is off by up to "
                    f"{spacing / 2:g}, a weight by a factor of up to "
                    f"{write_number(np.exp(min(spacing / 2, 700.0)), 3)}."
                )
                remedy = "Check the scale; keep logits in float32 (a fused kernel does); normalise q and k."
                findings.append(
                    Finding("score-rounding", "warning", path, at, int(head), evidence, rounding, cause, remedy)
                )
    return findings


def judge_gradients(path: str | None, at: int, summary: HeadSummary, pressures: Array) -> list[Finding]:
    """Return findings from a backward pass: heads that pass next to no gradient, and the temperature pressure."""
    several = rows_that_see(summary, 2)
    first_alive = np.searchsorted(BIN_EDGES, DEAD_TRACE.value, side="right")
    alive = summary["jacobian_trace"].histogram[:, first_alive:].sum(axis=1)
    names = patterns(summary)
    is_known = np.array([name != NOT_ENOUGH_DATA for name in names], bool)
    is_dead = is_known & (alive <= (1.0 - DEAD_SHARE) * several)
    findings = []
    for head in np.flatnonzero(is_dead):
        share = 1.0 - float(alive[head] / several[head])
        evidence = {
            "share_of_rows_below_0.01": share,
            "mean_1−Σp²": float(summary["jacobian_trace"].mean[head]),
            "pressure": float(pressures[head]),
            "pattern": names[head],
        }
        nearly = (
            f"{write_number(share, 3)} of the rows are so close to one-hot that softmax passes next to no gradient to "
            "q and k"
        )
        severity: Severity
        if names[head] == OTHER:
            severity, cause = "warning", f"{nearly}, and no position explains it."
        else:
            severity, cause = (
                "info",
                f"{nearly}; heads of healthy models with the pattern {names[head]!r} are like that.",
            )
        remedy = "Measure the loss with the head switched off and at a higher temperature before changing anything."
        findings.append(Finding("dead-gradient", severity, path, at, int(head), evidence, DEAD_TRACE, cause, remedy))
    sharper, softer = np.flatnonzero(pressures < 0).tolist(), np.flatnonzero(pressures > 0).tolist()
    if sharper or softer:
        most = int(np.nanargmax(np.abs(pressures)))
        evidence = {"sharper": sharper, "softer": softer, "pressures": pressures.tolist()}
        cause = (
            "The loss of these batches falls if the heads under 'sharper' get a larger scale and those under 'softer' "
            f"a smaller one; head {most} feels it most, {write_number(pressures[most], 3)} per unit of log scale."
        )
        remedy = "None by itself; a learned temperature lets each head follow it."
        threshold = Threshold(0.0, "by definition: ∂loss/∂log scale = 0 is to want no change")
        findings.append(Finding("temperature-pressure", "info", path, at, None, evidence, threshold, cause, remedy))
    return findings
