"""Runs a case and compares it with the definition, and with the same call made another way."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from .calls import run
from .case import DTYPES, Case, Learnable
from .definition import Bounded, Problem, Real, Rounding, Softmax, attend, pose, soften
from .derivatives import differentiate, push_forward, sees_no_number, sum_to
from .layouts import is_true
from .rows import describe, is_same_key


@dataclass(frozen=True)
class Mismatch:
    """Mismatch with a short name for sorting and a text with numbers."""

    name: str
    text: str


def check(case: Case) -> list[Mismatch]:
    """Return every mismatch of one case."""
    try:
        results = run(case)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
        return [Mismatch(f"raises {type(error).__name__}", text)]
    mismatches = compare_with_definition(case, results)
    for variant in case.variants:
        mismatches += compare_with_variant(case, results, variant)
    return mismatches


def choose_rounding(case: Case) -> Rounding:
    """Return float64 for float64, for the reference and for forward mode, which always use it; float32 for the rest."""
    by_kernel = case.level != "reference" and case.front != "jvp"
    # A scale that torch computes, or that prepares q and k, reaches the reference in the precision of torch's graph.
    by_torch = case.front in ("tensors", "tensor gradients", "jvp") and isinstance(case.scale, str | Learnable)
    in_float64 = case.dtype == "float64" or (not by_kernel and not by_torch)
    holds_weights = not by_kernel or case.front not in ("arrays", "tensors")
    in_pairs = by_kernel and case.level == "avx512_bf16" and case.dtype == "bfloat16"
    return Rounding(case.dtype, "float64" if in_float64 else "float32", holds_weights, by_kernel, in_pairs)


def compare_with_definition(case: Case, results: dict[str, np.ndarray]) -> list[Mismatch]:
    problem = pose(case, choose_rounding(case))
    soft = soften(problem)
    if case.front == "jvp":
        # In forward mode a non-finite vector makes the whole row NaN, even if a soft cap would not.
        soft.undefined = soft.undefined | (sees_no_number(problem) & ~soft.blind)
    expected = attend(problem, soft)
    if any(name.startswith("statistics.") for name in results):
        expected |= {f"statistics.{name}": bounded for name, bounded in describe(problem, soft).items()}
    if any(name.startswith("gradient.") for name in results):
        expected |= {f"gradient.{name}": bounded for name, bounded in differentiate(case, problem, soft).items()}
        _shape_scale_gradient(case, expected)
    if "tangent" in results:
        expected |= push_forward(case, problem, soft)
        strange = sees_no_number(problem)[..., None]
        for name in ("output", "weights"):
            expected[name].tolerance = np.where(strange, np.inf, expected[name].tolerance)
    mismatches = []
    for name, array in results.items():
        if name == "statistics.max_key":
            mismatches += _check_max_key(array, problem, soft)
        else:
            mismatches += compare(name, array, expected[name])
    if {"output", "weights"} <= set(results):
        mismatches += _check_output_of_weights(case, problem, results, expected)
    if "gradient.value" in results and problem.sinks is None and not case.dropout:
        mismatches += _check_sums_of_value_gradients(case, problem, soft, results["gradient.value"])
    if "gradient.query" in results and problem.sinks is None and not case.dropout:
        mismatches += _check_rows_of_one_key(problem, soft, results["gradient.query"])
    return mismatches


def _shape_scale_gradient(case: Case, expected: dict[str, Bounded]) -> None:
    if isinstance(case.scale, np.ndarray) and case.front == "tensor gradients":
        rows = expected["gradient.scale"]
        value, tolerance, size = (
            sum_to(x.reshape(case.q.shape[:-1]), case.scale.shape)
            for x in (rows.value, rows.tolerance, np.abs(rows.value))
        )
        unit = float(ml_dtypes.finfo(case.scale.dtype).eps)
        expected["gradient.scale"] = Bounded(value, tolerance + unit * size)


def compare(name: str, result: np.ndarray, expected: Bounded) -> list[Mismatch]:
    """Return a mismatch for the entry farthest outside its bounds, if an array leaves them."""
    if result.size != expected.value.size:
        return [Mismatch(f"{name} shape", f"{result.shape} for {expected.value.shape}")]
    if not result.size:
        return []
    most, smallest, unit = Real(np.inf), Real(0), Real(0)
    if result.dtype.kind != "i":
        limits = ml_dtypes.finfo(result.dtype)
        most, smallest, unit = (Real(float(x)) for x in (limits.max, limits.smallest_subnormal, limits.eps / 2))
    value, tolerance = (np.asarray(x, dtype=Real).reshape(result.shape) for x in (expected.value, expected.tolerance))
    tolerance = tolerance + np.where(np.isfinite(value), unit * np.abs(value), 0) + smallest
    given = result.astype(Real)
    with np.errstate(all="ignore"):
        apart = np.abs(given - value)
        right = (tolerance == np.inf) | (given == value) | (apart <= tolerance)
        right |= np.isnan(value) & np.isnan(given)
        right |= (value == np.inf) & ~np.isfinite(given)
        right |= np.isinf(given) & (np.sign(given) == np.sign(value)) & (np.abs(value) + tolerance >= most)
        right |= np.isinf(given) & (tolerance >= most)
        if right.all():
            return []
        excess = np.where(right, -1, np.nan_to_num(apart / tolerance, nan=np.inf))
    at = np.unravel_index(int(excess.argmax()), excess.shape)
    shown = f"{given[at]:.9g} for {value[at]:.9g} ± {tolerance[at]:.2g}"
    strange = " (not finite)" if not np.isfinite(given[at]) and np.isfinite(value[at]) else ""
    place = tuple(int(i) for i in at)
    return [Mismatch(name + strange, f"{shown} at {place}, {(~right).sum()} of {right.size} wrong")]


def _check_max_key(result: np.ndarray, problem: Problem, soft: Softmax) -> list[Mismatch]:
    """Return a mismatch unless max_key is the index of a largest logit, the first of equal keys, or −1 without keys."""
    result = result.reshape(soft.blind.shape)
    known = ~(soft.poisoned | soft.undefined)
    wrong = known & soft.blind & (result != -1)
    sees = known & ~soft.blind
    if sees.any():
        keys = problem.visible.shape[-1]
        inside = (result >= 0) & (result < keys)
        at = np.clip(result, 0, keys - 1)[..., None]
        top = soft.logits.max(axis=-1)
        own, own_error = (np.take_along_axis(x, at, -1)[..., 0] for x in (soft.logits, soft.logits_error))
        slack = own_error + np.take_along_axis(soft.logits_error, soft.logits.argmax(axis=-1)[..., None], -1)[..., 0]
        is_seen = np.take_along_axis(problem.visible, at, -1)[..., 0]
        with np.errstate(all="ignore"):
            wrong |= sees & ~(inside & is_seen & (top - own <= slack))
        earlier = problem.visible & (np.arange(keys) < at) & (soft.logits == np.take_along_axis(soft.logits, at, -1))
        earlier &= is_same_key(problem, at)
        if problem.rounding.by_kernel and not wrong.any() and (earlier.any(axis=-1) & sees).any():
            place = tuple(int(i[0]) for i in np.nonzero(earlier.any(axis=-1) & sees))
            first = int(earlier[place].argmax())
            return [Mismatch("statistics.max_key of ties", f"{result[place]} for {first} at {place}")]
    if not wrong.any():
        return []
    place = tuple(int(i[0]) for i in np.nonzero(wrong))
    return [Mismatch("statistics.max_key", f"{result[place]} for {soft.logits[place].argmax()} at {place}")]


def _check_output_of_weights(case, problem, results, expected) -> list[Mismatch]:
    """Return mismatches unless the output is the product of weights and values, for any weights."""
    if not np.isfinite(problem.v).all() or not results["output"].size:
        return []
    weights = results["weights"].astype(Real).reshape(problem.visible.shape)
    output = problem.drop(weights) @ problem.v
    with np.errstate(invalid="ignore"):  # an infinite tolerance times 0, at a dropout of 1, is NaN
        rounding = np.nan_to_num(problem.drop(np.abs(expected["weights"].tolerance)) @ np.abs(problem.v), nan=np.inf)
    return compare("output of weights", results["output"], Bounded(output, rounding + expected["output"].tolerance))


def _check_sums_of_value_gradients(case, problem, soft, result) -> list[Mismatch]:
    """Return mismatches unless Σ over keys of ∂loss/∂v is Σ over rows of ∂loss/∂output: weights add up to 1."""
    given = case.cotangents["output"].astype(Real).reshape(*problem.q.shape[:-1], problem.v.shape[-1])
    known = np.isfinite(problem.v).all() and not (soft.poisoned | soft.undefined).any()
    if not known or not result.size or not given.size:
        return []
    value = result.astype(Real).reshape(given.shape[0], -1, *problem.v.shape[-2:])
    # Query heads that share a key/value head have their rows one after another.
    given = np.where(soft.blind[..., None], 0, given).reshape(*value.shape[:2], -1, given.shape[-1])
    size = np.abs(value).sum(axis=-2) + np.abs(given).sum(axis=-2)
    rounding = problem.rounding
    unit = max(float(ml_dtypes.finfo(DTYPES[case.dtype]).eps) / 2, rounding.unit)
    relative = 2 * unit + rounding.of_sum(given.shape[-2]) + rounding.of_pairs + rounding.of_exp + Real(2.0**-39)
    expected = Bounded(given.sum(axis=-2), relative * size + rounding.smallest_normal * result.size)
    return compare("sum of gradient.value", value.sum(axis=-2).astype(np.float64), expected)


def _check_rows_of_one_key(problem, soft, result) -> list[Mismatch]:
    """Return a mismatch unless the query of every row with one visible key has a gradient of exactly 0."""
    lone = (problem.visible.sum(axis=-1) == 1) & ~(sees_no_number(problem) | soft.poisoned | soft.undefined)
    if not lone.any():
        return []
    # Products beyond the largest number give NaN or infinity, which is not a rounding error.
    wrong = np.nan_to_num(np.abs(result.astype(Real)), nan=0, posinf=0).reshape(*lone.shape, -1)[lone]
    return [Mismatch("gradient.query of one key", f"{wrong.max():.3g} for 0")] if wrong.any() else []


def compare_with_variant(case: Case, results: dict[str, np.ndarray], variant: str) -> list[Mismatch]:
    """Return mismatches unless the same call made another way gives the same bits."""
    rows = np.ones(case.q.shape[:-1], dtype=bool)
    # torch sums the weights of tensors, all results of level `reference` and the lengths of vectors. The bits of these
    # sums depend on threads, strides and batch.
    own_products = not case.on_tensors or variant in ("statistics off", "hidden keys changed")
    if not own_products and (case.level == "reference" or case.normalises):
        return []
    if variant == "statistics off":
        if not case.statistics:
            return []
        others = run(replace(case, statistics=False))
    elif variant == "contiguous":
        others = run(replace(case, **{name: _copy(getattr(case, name)) for name in ("q", "k", "v", "mask")}))
    elif variant == "other threads":
        others = run(replace(case, threads=3 - case.threads))
    elif variant == "entries apart":
        # Dropout depends on the row number within a call.
        if case.q.ndim < 4 or case.q.shape[0] < 2 or case.dropout:
            return []
        entries = [run(_take_entry(case, i)) for i in range(case.q.shape[0])]
        others = {name: np.concatenate([entry[name] for entry in entries]) for name in results}
    else:
        rows = ~case.visible()[..., case.changed_keys].any(axis=-1).reshape(rows.shape)
        results = run(replace(case, k=_copy(case.k), v=_copy(case.v)))
        others = run(_change_keys(case))
    mismatches = []
    for name in sorted(results.keys() & others.keys()):
        if name.startswith("gradient.") or (name == "weights" and not own_products):
            continue
        one, other = results[name][rows], others[name][rows]
        differ = _bits(one) != _bits(other)
        if differ.any():
            at = tuple(int(i[0]) for i in np.nonzero(differ))
            text = f"{one[at]} for {other[at]} at {at}, {differ.sum()} of {differ.size} differ"
            mismatches.append(Mismatch(f"bits, {variant}: {name}", text))
    return mismatches


def _copy(array):
    if array is None:
        return None
    return is_true(array) if array.dtype == bool else array.copy(order="C")


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bits as integers, with all NaN equal."""
    if array.dtype.kind == "i":
        return array
    array = np.ascontiguousarray(array.astype(DTYPES[array.dtype.name]))
    integers = array.view(f"i{array.dtype.itemsize}")
    return np.where(np.isnan(array), np.iinfo(integers.dtype).max, integers)


def _take_entry(case: Case, i: int) -> Case:
    """Return the call with one entry of the first batch axis."""
    rank = case.q.ndim

    def take(array, axes):
        own = isinstance(array, np.ndarray) and array.ndim == axes and array.shape[0] > 1
        return array[i : i + 1] if own else array

    return replace(
        case,
        q=case.q[i : i + 1],
        k=case.k[i : i + 1],
        v=case.v[i : i + 1],
        mask=take(case.mask, rank),
        scale=case.scale if isinstance(case.scale, str | Learnable) else take(case.scale, rank - 1),
        cotangents={name: x if name == "sinks" else x[i : i + 1] for name, x in case.cotangents.items()},
    )


def _change_keys(case: Case) -> Case:
    """Return the call with other or non-finite numbers in some keys and values, which rows that hide them ignore."""
    rng = np.random.default_rng([case.seed, case.index, 2])
    changed = {}
    for name in ("k", "v"):
        array = getattr(case, name)
        other = rng.choice([0.0, 1.0, -3.0, 1e4, np.nan, np.inf, -np.inf], size=array.shape).astype(array.dtype)
        changed[name] = np.where(case.changed_keys[:, None], other, array).astype(array.dtype)
    return replace(case, **changed)
