"""A case run and compared: with the definition, and with the same call made another way."""

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
    """What was wrong, in a word to sort by and in numbers to look at."""

    name: str
    text: str


def check(case: Case) -> list[Mismatch]:
    """Every mismatch of one case."""
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
    """float64 for float64, for the reference and for forward mode, which always work in it; float32 for the rest."""
    by_kernel = case.level != "reference" and case.front != "jvp"
    # A scale that torch computes, or that prepares q and k, comes to the reference in the precision of torch's graph.
    by_torch = case.front in ("tensors", "tensor gradients", "jvp") and isinstance(case.scale, str | Learnable)
    in_float64 = case.dtype == "float64" or (not by_kernel and not by_torch)
    holds_weights = not by_kernel or case.front not in ("arrays", "tensors")
    in_pairs = by_kernel and case.level == "avx512_bf16" and case.dtype == "bfloat16"
    return Rounding(case.dtype, "float64" if in_float64 else "float32", holds_weights, by_kernel, in_pairs)


def compare_with_definition(case: Case, results: dict[str, np.ndarray]) -> list[Mismatch]:
    problem = pose(case, choose_rounding(case))
    soft = soften(problem)
    if case.front == "jvp":
        # In forward-mode a vector that is no number makes the whole row NaN, even where a soft cap would not.
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
    """Whether an array lies within its bounds; the place that is farthest outside is told."""
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
    """The index of a largest logit, the first of those whose keys are the same vector; −1 where nothing is seen."""
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
    """The output is the weights times the values, whatever the weights are."""
    if not np.isfinite(problem.v).all() or not results["output"].size:
        return []
    weights = results["weights"].astype(Real).reshape(problem.visible.shape)
    output = problem.drop(weights) @ problem.v
    with np.errstate(invalid="ignore"):  # where anything is allowed, a dropout of 1 leaves 0 of it
        rounding = np.nan_to_num(problem.drop(np.abs(expected["weights"].tolerance)) @ np.abs(problem.v), nan=np.inf)
    return compare("output of weights", results["output"], Bounded(output, rounding + expected["output"].tolerance))


def _check_sums_of_value_gradients(case, problem, soft, result) -> list[Mismatch]:
    """Σ over keys of ∂loss/∂v is Σ over rows of ∂loss/∂output: weights add up to 1 at any size of the logits."""
    given = case.cotangents["output"].astype(Real).reshape(*problem.q.shape[:-1], problem.v.shape[-1])
    known = np.isfinite(problem.v).all() and not (soft.poisoned | soft.undefined).any()
    if not known or not result.size or not given.size:
        return []
    value = result.astype(Real).reshape(given.shape[0], -1, *problem.v.shape[-2:])
    # The query heads that share a key/value head have their rows one behind the other.
    given = np.where(soft.blind[..., None], 0, given).reshape(*value.shape[:2], -1, given.shape[-1])
    size = np.abs(value).sum(axis=-2) + np.abs(given).sum(axis=-2)
    rounding = problem.rounding
    unit = max(float(ml_dtypes.finfo(DTYPES[case.dtype]).eps) / 2, rounding.unit)
    relative = 2 * unit + rounding.of_sum(given.shape[-2]) + rounding.of_pairs + rounding.of_exp + Real(2.0**-39)
    expected = Bounded(given.sum(axis=-2), relative * size + rounding.smallest_normal * result.size)
    return compare("sum of gradient.value", value.sum(axis=-2).astype(np.float64), expected)


def _check_rows_of_one_key(problem, soft, result) -> list[Mismatch]:
    """The query of a row that sees one key has a gradient of exactly 0, whatever the rounding."""
    lone = (problem.visible.sum(axis=-1) == 1) & ~(sees_no_number(problem) | soft.poisoned | soft.undefined)
    if not lone.any():
        return []
    # Products beyond the largest number leave no number, and are nobody's rounding.
    wrong = np.nan_to_num(np.abs(result.astype(Real)), nan=0, posinf=0).reshape(*lone.shape, -1)[lone]
    return [Mismatch("gradient.query of one key", f"{wrong.max():.3g} for 0")] if wrong.any() else []


def compare_with_variant(case: Case, results: dict[str, np.ndarray], variant: str) -> list[Mismatch]:
    """The same call made another way gives the same bits."""
    rows = np.ones(case.q.shape[:-1], dtype=bool)
    # Weights of tensors, all that level `reference` makes of them and the lengths of their vectors are torch's sums:
    # their bits follow threads, strides and batch.
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
        # Dropout counts the rows of a call.
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
    """The bits as integers, every NaN alike."""
    if array.dtype.kind == "i":
        return array
    array = np.ascontiguousarray(array.astype(DTYPES[array.dtype.name]))
    integers = array.view(f"i{array.dtype.itemsize}")
    return np.where(np.isnan(array), np.iinfo(integers.dtype).max, integers)


def _take_entry(case: Case, i: int) -> Case:
    """The call with one entry of the first batch axis."""
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
    """Other numbers, and none, in some keys and values: rows that see none of them must not notice."""
    rng = np.random.default_rng([case.seed, case.index, 2])
    changed = {}
    for name in ("k", "v"):
        array = getattr(case, name)
        other = rng.choice([0.0, 1.0, -3.0, 1e4, np.nan, np.inf, -np.inf], size=array.shape).astype(array.dtype)
        changed[name] = np.where(case.changed_keys[:, None], other, array).astype(array.dtype)
    return replace(case, **changed)
