"""Gradients and directional derivatives of attention by their formulas, with tolerances."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .case import DTYPES, Case
from .definition import Bounded, Problem, Real, Softmax, distances_of, length_of, size_of_products

_MOST = Real("1e4000")


def sees_no_number(problem: Problem) -> np.ndarray:
    """Return whether each row `[N, H, L]` has, or sees, a vector with NaN or infinity."""
    bad_q, bad_k, bad_v = (~np.isfinite(x).all(axis=-1) for x in (problem.q, problem.k, problem.v))
    return (problem.visible & (bad_q[..., None] | (bad_k | bad_v)[:, :, None, :])).any(axis=-1)


def differentiate(case: Case, problem: Problem, soft: Softmax) -> dict[str, Bounded]:
    """Return gradients of Σ output·cotangent (+ Σ weights·cotangent), in the shapes of the inputs; scale per row."""
    with np.errstate(all="ignore"):
        return _differentiate(case, problem, soft)


def _differentiate(case: Case, problem: Problem, soft: Softmax) -> dict[str, Bounded]:
    rounding, visible = problem.rounding, problem.visible
    unit = Real(rounding.unit)
    q, k, v = (np.where(np.isfinite(x), x, 0) for x in (problem.q, problem.k, problem.v))
    keys, d_v = k.shape[-2], v.shape[-1]
    grad = case.cotangents["output"].astype(Real).reshape(*q.shape[:-1], d_v)
    # Rows that see a non-finite number, and the keys that they see, have no gradient to compare.
    unknown = sees_no_number(problem) | soft.poisoned | soft.undefined
    # No bound is promised beyond float64.
    unknown |= (visible & (size_of_products(grad, v) > Real("1e307"))).any(axis=-1)
    p = np.where(unknown[..., None], 0, soft.weights)
    # The kernel's backward pass recomputes scores. For few rows the order differs from that of the maximum, so weights,
    # even one of nearly 1, may be off as far as their sum may.
    is_few = rounding.by_kernel and q.shape[-2] * problem.shared < 8
    p_error = np.where(unknown[..., None], 0, soft.weights_error * 2 + p * 2.0**-39 if is_few else soft.weights_error)
    grad_p = problem.drop(grad @ v.swapaxes(-1, -2))
    grad_p_error = problem.drop(rounding.of_sum(d_v) * size_of_products(grad, v))
    if "weights" in case.cotangents:
        given = case.cotangents["weights"].astype(Real).reshape(p.shape)
        grad_p = grad_p + given
        grad_p_error = grad_p_error + 4 * unit * (np.abs(given) + np.abs(grad_p))
    grad_p, grad_p_error = np.where(visible, grad_p, 0), np.where(visible, grad_p_error, 0)
    delta = (p * grad_p).sum(axis=-1)
    terms = (p * np.abs(grad_p)).sum(axis=-1)
    delta_error = (p_error * np.abs(grad_p) + (p + p_error) * grad_p_error).sum(axis=-1)
    pairs = rounding.of_pairs
    delta_error = delta_error + (rounding.of_sum(keys) + pairs) * terms
    # ⟨gradient of the output, output⟩: an output below the smallest normal number lacks its last digits.
    delta_error = delta_error + rounding.smallest * (d_v + np.abs(grad).sum(axis=-1))
    apart = grad_p - delta[..., None]
    to_logits = p * apart
    logits_error = p_error * np.abs(apart) + (p + p_error) * (grad_p_error + delta_error[..., None])
    logits_error = np.where(visible, logits_error + 4 * rounding.smallest, 0)
    to_scores, scores_error = to_logits, logits_error
    if soft.squashed is not None:
        cap = Real(problem.softcap)
        slope = 1 / np.cosh(np.clip(soft.scores / cap, -5000, 5000)) ** 2
        further = [
            np.abs(1 / np.cosh(np.clip((soft.scores + s * soft.scores_error) / cap, -5000, 5000)) ** 2 - slope)
            for s in (-1, 1)
        ]
        slope_error = np.maximum(*further) + 32 * unit
        to_scores = np.where(visible, to_logits * slope, 0)
        scores_error = np.where(visible, logits_error * (slope + slope_error) + np.abs(to_logits) * slope_error, 0)
    scale, scale_error = problem.scale[..., None], problem.scale_error[..., None]
    to_q = scale * (to_scores @ k)
    kt, qt, gt = k.swapaxes(-1, -2), q.swapaxes(-1, -2), grad.swapaxes(-1, -2)
    scores_error = np.minimum(scores_error, _MOST)
    size = np.abs(to_scores)
    q_error = np.abs(scale) * (
        size_of_products(scores_error, kt) + (rounding.of_sum(keys) + pairs + scale_error) * size_of_products(size, kt)
    )
    # Loss in products below the smallest number, including the scaled query.
    smallest, queries = rounding.smallest, q.shape[-2]
    q_error = q_error + smallest * (1 + keys * np.abs(scale))
    to_k = (to_scores * scale).swapaxes(-1, -2) @ q
    st, et = (size * np.abs(scale)).swapaxes(-1, -2), (scores_error * np.abs(scale)).swapaxes(-1, -2)
    relative = rounding.of_sum(queries * problem.shared) + pairs + problem.scale_error.max(initial=0)
    k_error = size_of_products(et, qt) + relative * size_of_products(st, qt)
    k_error = k_error + smallest * (queries + size.sum(axis=-2)[..., None])
    left, left_error = (problem.drop(x).swapaxes(-1, -2) for x in (p, p_error))
    to_v = left @ grad
    v_error = size_of_products(left_error, gt)
    v_error = v_error + max(problem.growth, 1) * smallest * queries
    v_error = v_error + (rounding.of_sum(queries * problem.shared) + pairs) * size_of_products(left, gt)
    products, reach = np.where(visible, soft.products, 0), np.where(visible, soft.products_size, 0)
    products = np.where(np.isfinite(products), products, 0)
    to_scale = (to_scores * products).sum(axis=-1)
    to_scale_error = (scores_error * np.abs(products)).sum(axis=-1)
    to_scale_error = to_scale_error + (rounding.of_sum(max(q.shape[-1], keys)) + pairs) * (size * reach).sum(axis=-1)
    # ⟨q, Σ dscore·k⟩ sums products below the smallest number, which a large q makes visible.
    to_scale_error = to_scale_error + smallest * keys * np.abs(q).sum(axis=-1)
    q_error = np.where(unknown[..., None], np.inf, q_error)
    to_scale_error = np.where(unknown, np.inf, to_scale_error)
    touched = (visible & unknown[..., None]).any(axis=-2)[..., None]
    k_error, v_error = np.where(touched, np.inf, k_error), np.where(touched, np.inf, v_error)
    results: dict[str, Bounded] = {}
    rows_of_scale = (
        to_scale * problem.scale,
        to_scale_error * np.abs(problem.scale) + np.abs(to_scale * problem.scale) * problem.scale_error,
    )
    if problem.normalised is not None:
        to_q, q_error = _pull_back(problem, 0, to_q, q_error)
        to_k, k_error = _pull_back(problem, 1, to_k, k_error)
    if "weight" in problem.features:
        weight = case.scale.parameters["weight"].astype(Real)
        weight = (weight[:, None, :] if case.scale.per_head else weight) / np.sqrt(Real(q.shape[-1]))
        # The gradient reaches the query in two ways, and torch adds the stored result of each.
        q_error = q_error + rounding.of_storing(to_q) + rounding.of_storing(rows_of_scale[0][..., None] * weight)
        to_q = to_q + rows_of_scale[0][..., None] * weight
        q_error = q_error + (rows_of_scale[1] + 8 * unit * np.abs(rows_of_scale[0]))[..., None] * np.abs(weight)
    results["query"] = _store(case, to_q, q_error, case.q.shape, rounding)
    results["key"] = _store(case, *_by_group(problem, to_k, k_error), case.k.shape, rounding)
    results["value"] = _store(case, *_by_group(problem, to_v, v_error), case.v.shape, rounding)
    results["scale"] = Bounded(to_scale, to_scale_error)
    if problem.sinks is not None:
        sink = np.where(unknown | soft.blind, 0, soft.sink_weight)
        sink_error = np.where(unknown | soft.blind, 0, soft.sink_error)
        error = sink_error * np.abs(delta) + (sink + sink_error) * delta_error
        # The sink's weight may be 0 below the smallest normal number of float32.
        error = error + rounding.smallest_normal * np.abs(delta)
        error = np.where(unknown, np.inf, error).sum(axis=(0, 2))
        error = error + rounding.of_sum(1) * (sink * np.abs(delta)).sum(axis=(0, 2))
        results["sinks"] = Bounded(-(sink * delta).sum(axis=(0, 2)), error)
    if case.alibi is not None:
        distances = distances_of(case)
        size = np.abs(to_logits * distances)
        error = logits_error * np.abs(distances) + rounding.of_sum(keys) * size
        error = np.where(unknown[..., None], np.inf, error).sum(axis=(0, 2, 3))
        unit_of_slopes = Real(float(ml_dtypes.finfo(case.alibi.dtype).eps))
        error = error + (unit_of_slopes if case.on_tensors else 0) * size.sum(axis=(0, 2, 3))
        results["alibi"] = Bounded((to_logits * distances).sum(axis=(0, 2, 3)), error)
    if case.mask is not None and case.mask.dtype != bool:
        full = (*case.q.shape[:-3], case.heads, *p.shape[-2:])
        error = np.where(unknown[..., None] & visible, np.inf, logits_error + 8 * unit * np.abs(to_logits))
        results["mask"] = Bounded(*(sum_to(x.reshape(full), case.mask.shape) for x in (to_logits, error)))
        results["mask"].tolerance += rounding.unit * 64 * sum_to(np.abs(to_logits).reshape(full), case.mask.shape)
    for name, feature in problem.features.items():
        gradient, error = (
            x[..., None] * f if name == "weight" else x * f
            for x, f in (
                (rows_of_scale[0], feature),
                (rows_of_scale[1] + 16 * unit * np.abs(rows_of_scale[0]), np.abs(feature)),
            )
        )
        axes = (0, 2) if case.scale.per_head else (0, 1, 2)
        error = np.where(np.isnan(error), np.inf, error)  # an unknown row at position 0
        results[f"parameter {name}"] = Bounded(gradient.sum(axis=axes), error.sum(axis=axes))
    # Near the largest number intermediate sums, including those of torch, may overflow.
    largest = Real(float(ml_dtypes.finfo(DTYPES[case.dtype]).max)) / 64
    for bounded in results.values():
        if (np.abs(bounded.value) > largest).any():
            bounded.tolerance = np.full_like(bounded.tolerance, np.inf)
    return results


def _by_group(problem: Problem, gradient: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return gradients of repeated keys or values, added up over the query heads that share them."""
    n, heads, *rest = gradient.shape
    shape = (n, heads // problem.shared, problem.shared, *rest)
    return gradient.reshape(shape).sum(axis=2), error.reshape(shape).sum(axis=2)


def _store(case, gradient, error, shape, rounding):
    gradient, error = gradient.reshape(shape), error.reshape(shape)
    return Bounded(gradient, error + rounding.of_storing(gradient))


def _pull_back(problem: Problem, which: int, gradient, error):
    """Return the gradient through y = x/r, r² = w·Σx² + ε: dx = dy/r − x·w·(dy·x)/r³."""
    x, weight = problem.given[which], Real(problem.normalised)
    known = np.isfinite(x).all(axis=-1, keepdims=True)
    x = np.where(known, x, 1)
    r = length_of(x, problem.normalised)
    y = x / r
    carried = (gradient - y * weight * (gradient * y).sum(axis=-1, keepdims=True)) / r
    sizes = np.abs(gradient) + np.abs(y) * weight * (np.abs(gradient) * np.abs(y)).sum(axis=-1, keepdims=True)
    errors = error + np.abs(y) * weight * (error * np.abs(y)).sum(axis=-1, keepdims=True)
    errors = (errors + 2 * problem.rounding.of_sum(x.shape[-1]) * sizes) / r
    # torch computes the gradient from dy/r and Σ dy·x, which may overflow although dx does not.
    by_sum, by_length = (np.abs(gradient) * np.abs(x)).sum(axis=-1, keepdims=True), sizes / r
    passes = np.maximum(by_sum, by_length.max(axis=-1, keepdims=True)) > problem.rounding.most / 64
    return np.where(known, carried, 0), np.where(passes, np.inf, errors)


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(i for i, size in enumerate(shape) if size == 1), keepdims=True)


def push_forward(case: Case, problem: Problem, soft: Softmax) -> dict[str, Bounded]:
    """Return the output's tangent for tangents of q, k, v and sinks."""
    with np.errstate(all="ignore"):
        return _push_forward(case, problem, soft)


def _push_forward(case: Case, problem: Problem, soft: Softmax) -> dict[str, Bounded]:
    rounding, visible = problem.rounding, problem.visible
    tangents = {name: x.astype(Real) for name, x in case.cotangents.items()}
    groups = problem.q.shape[1] // problem.shared
    dq = tangents["q"].reshape(problem.q.shape)
    dk, dv = (
        np.repeat(tangents[name].reshape(x.shape[0], groups, *x.shape[-2:]), problem.shared, axis=1)
        for name, x in (("k", problem.k), ("v", problem.v))
    )
    q, k, v = (np.where(np.isfinite(x), x, 0) for x in (problem.q, problem.k, problem.v))
    scale = problem.scale[..., None]
    if problem.normalised is not None:
        (dq, dk) = (_push_through(problem, which, x) for which, x in ((0, dq), (1, dk)))
    d_logits = scale * (dq @ k.swapaxes(-1, -2) + q @ dk.swapaxes(-1, -2))
    sizes = np.abs(scale) * (size_of_products(dq, k) + size_of_products(q, dk))
    error = sizes * (4 * rounding.of_sum(q.shape[-1]) + problem.scale_error[..., None])
    if soft.squashed is not None:
        cap = Real(problem.softcap)
        slope = 1 / np.cosh(np.clip(soft.scores / cap, -5000, 5000)) ** 2
        further = [
            np.abs(1 / np.cosh(np.clip((soft.scores + s * soft.scores_error) / cap, -5000, 5000)) ** 2 - slope)
            for s in (-1, 1)
        ]
        slope_error = np.maximum(*further) + 32 * Real(rounding.unit)
        error = error * (slope + slope_error) + np.abs(d_logits) * slope_error
        d_logits = d_logits * slope
    d_logits, error = np.where(visible, d_logits, 0), np.where(visible, error, 0)
    p, p_error = np.where(soft.poisoned[..., None], 0, soft.weights), soft.weights_error
    mean = (p * d_logits).sum(axis=-1)
    mean_error = (p_error * np.abs(d_logits) + (p + p_error) * error).sum(axis=-1)
    mean_error = mean_error + rounding.of_sum(k.shape[-2]) * (p * np.abs(d_logits)).sum(axis=-1)
    if problem.sinks is not None:
        d_sink = tangents["sinks"][:, None]
        mean = mean + np.where(soft.blind, 0, soft.sink_weight * d_sink)
        mean_error = mean_error + (soft.sink_error + 8 * rounding.unit * soft.sink_weight) * np.abs(d_sink)
    apart = d_logits - mean[..., None]
    d_p = p * apart
    d_p_error = p_error * np.abs(apart) + (p + p_error) * (error + mean_error[..., None])
    output = d_p @ v + p @ dv
    vt, dvt = v.swapaxes(-1, -2), dv.swapaxes(-1, -2)
    size = p * (np.abs(d_logits) + np.abs(mean)[..., None])
    output_error = size_of_products(d_p_error, vt) + size_of_products(p_error, dvt)
    output_error += rounding.of_sum(k.shape[-2]) * (size_of_products(size, vt) + size_of_products(p, dvt))
    unknown = sees_no_number(problem) | soft.poisoned | soft.undefined
    output_error = np.where(unknown[..., None], np.inf, output_error + rounding.of_storing(output))
    return {"tangent": Bounded(output, output_error)}


def _push_through(problem: Problem, which: int, tangent):
    x, weight = problem.given[which], Real(problem.normalised)
    x = np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 1)
    r = length_of(x, problem.normalised)
    y = x / r
    return (tangent - y * weight * (tangent * y).sum(axis=-1, keepdims=True)) / r
