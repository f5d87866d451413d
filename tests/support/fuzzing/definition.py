"""Attention from its definition in extended precision, and bounds for the rounding errors of the package.

Shape legend: N batch entries, H query heads (keys and values repeated to as many), L queries, S keys, D, V.
Nothing of the package is used here. Every tolerance follows from a few constants in `Rounding`, carried through the
operation: first errors of the logits, then intervals of the weights, then everything computed from the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch

from .case import DTYPES, Case, Learnable

Real = np.longdouble
_FAR = Real(11000)  # e to this power is within the range of extended precision


@dataclass(frozen=True)
class Rounding:
    """Precision of the computation, and precision of the stored results.

    A sum of n products may be off by (12 + 2√n) units of the sum of their sizes: twice the square-root estimate of
    rounding errors, with a few roundings before and after the sum. exp is good to 8 units and tanh to 12 units. Results
    of exp below the smallest normal number may be 0. If weights are held in the working precision (`holds_weights`),
    weights below the smallest normal number may be 0 too, and a large sink can make all weights that small. The kernel
    (`by_kernel`) gives equal keys bit-identical logits; a matrix product need not. Products of pairs (`in_pairs`) use
    weights and logit gradients rounded to bfloat16, and numbers below the smallest normal number as 0.
    """

    dtype: str
    working: str
    holds_weights: bool
    by_kernel: bool
    in_pairs: bool = False

    @property
    def most(self) -> Real:
        """Return the largest number of the working precision."""
        return Real(float(ml_dtypes.finfo(DTYPES[self.working]).max))

    @property
    def of_pairs(self) -> Real:
        return Real(1.01 * 2.0**-8 if self.in_pairs else 0.0)

    @property
    def unit(self) -> float:
        return float(ml_dtypes.finfo(DTYPES[self.working]).eps) / 2

    @property
    def smallest(self) -> Real:
        limits = ml_dtypes.finfo(DTYPES[self.working])
        return Real(float(limits.smallest_normal if self.in_pairs else limits.smallest_subnormal))

    @property
    def smallest_normal(self) -> Real:
        return Real(float(ml_dtypes.finfo(DTYPES[self.working]).smallest_normal))

    @property
    def of_exp(self) -> Real:
        # torch's softmax promises twenty units in the last place, and uses another exp on the tail of a vector.
        return Real(self.unit * (40 if self.holds_weights else 8))

    def of_sum(self, terms: int) -> Real:
        return Real(self.unit * (12 + 2 * math.sqrt(terms)))

    def of_storing(self, value: np.ndarray, dtype: str | None = None) -> np.ndarray:
        """Return half a unit of the stored number, plus half the distance between the smallest numbers."""
        limits = ml_dtypes.finfo(DTYPES[dtype or self.dtype])
        # Slightly more than a half, because float32 results are rounded again to fewer bits.
        return 0.501 * np.abs(value) * float(limits.eps) + 0.501 * Real(float(limits.smallest_subnormal))


@dataclass
class Bounded:
    """Expected value and tolerance: NaN expects NaN, infinity any non-finite number; an infinite bound allows all."""

    value: np.ndarray
    tolerance: np.ndarray


def size_of_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return Σ|a||b| over the last axes of a `[..., L, X]` and b `[..., S, X]`, to about three digits."""

    def normalised(x):
        x = np.where(np.isfinite(x), np.abs(x), 0)
        largest = x.max(initial=0)
        return (x / largest if largest else x).astype(np.float64), largest

    (a, of_a), (b, of_b) = normalised(a), normalised(b)
    return (a @ b.swapaxes(-1, -2)).astype(Real) * of_a * of_b


@dataclass
class Problem:
    """Call in plain numbers: everything broadcast, keys repeated, policies turned into vectors and a factor."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: np.ndarray
    scale_error: np.ndarray
    visible: np.ndarray
    bias: np.ndarray | None
    bias_size: np.ndarray | None
    softcap: float | None
    sinks: np.ndarray | None
    rounding: Rounding
    shared: int
    normalised: float | None = None
    given: tuple[np.ndarray, np.ndarray] | None = None
    features: dict[str, np.ndarray] = field(default_factory=dict)
    kept: np.ndarray | None = None
    growth: Real = field(default_factory=lambda: Real(1))

    def drop(self, x: np.ndarray) -> np.ndarray:
        """Return weights, or gradients of weights, `[N, H, L, S]` after dropout."""
        return x if self.kept is None else np.where(self.kept, x * self.growth, 0)


def pose(case: Case, rounding: Rounding) -> Problem:
    """Return the call of a case as a problem."""
    shape = (math.prod(case.q.shape[:-3]), case.heads)
    groups = case.k.shape[-3] if case.k.ndim > 2 else 1
    shared = case.heads // groups
    q = case.q.astype(Real).reshape(*shape, *case.q.shape[-2:])
    k, v = (
        np.repeat(x.astype(Real).reshape(shape[0], groups, *x.shape[-2:]), shared, axis=1) for x in (case.k, case.v)
    )
    full = (*case.q.shape[:-3], case.heads, q.shape[-2], k.shape[-2])
    rows = (*shape, q.shape[-2])
    bias = None
    if case.mask is not None and case.mask.dtype != bool:
        bias = np.broadcast_to(case.mask.astype(Real), full).reshape(*rows, k.shape[-2])
    bias_size = None if bias is None else np.abs(bias)
    if case.alibi is not None:
        sloped = case.alibi.astype(Real)[:, None, None] * distances_of(case)
        bias_size = np.abs(sloped) + (0 if bias is None else bias_size)
        bias = np.broadcast_to(sloped + (0 if bias is None else bias), (*rows, k.shape[-2]))
    problem = Problem(
        q,
        k,
        v,
        np.zeros(rows, Real),
        np.zeros(rows, Real),
        case.visible().reshape(*rows, k.shape[-2]),
        bias,
        bias_size,
        case.softcap,
        None if case.sinks is None else case.sinks.astype(Real),
        rounding,
        shared,
    )
    if case.dropout:
        problem.kept = _draw_kept(case, problem.visible.shape)
        problem.growth = 1 / (1 - Real(case.dropout)) if case.dropout < 1 else Real(0)
    with np.errstate(all="ignore"):
        _apply_scale(case, problem)
    return problem


def distances_of(case: Case) -> np.ndarray:
    """Return j − i − offset of every query and key, `[L, S]`."""
    rows, keys = (np.arange(x.shape[-2]).astype(Real) for x in (case.q, case.k))
    return keys - rows[:, None] - (case.causal_offset or 0)


def _draw_kept(case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """Return which weights are kept, from 32-bit words of the seed of torch's generator, the row and the key."""
    seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(case.index)))
    words = np.uint64(2**32)

    def mix(x):
        x = (x ^ x >> np.uint64(16)) * np.uint64(0x21F0AAAD) % words
        x = (x ^ x >> np.uint64(15)) * np.uint64(0x735A2D97) % words
        return x ^ x >> np.uint64(15)

    high, low = (np.array([part], np.uint64) for part in divmod(seed, 2**32))
    one, other = mix(low ^ mix(high + np.uint64(1))), mix(high ^ mix((low + np.uint64(1)) % words))
    rows = np.arange(math.prod(shape[:-1]), dtype=np.uint64).reshape(*shape[:-1], 1)
    start = mix(rows ^ mix(one))
    twist = mix((start + other) % words)
    step = mix(twist ^ one) >> np.uint64(1) | np.uint64(1)
    x = (start + np.arange(shape[-1], dtype=np.uint64) * step) % words
    x = (x ^ x >> np.uint64(16)) * np.uint64(0x21F0AAAD) % words
    x = (x ^ x >> np.uint64(15) ^ twist) * np.uint64(0x735A2D97) % words
    return x >= np.uint64(min(math.floor(case.dropout * 2**32), 2**32 - 1))


def _apply_scale(case: Case, problem: Problem) -> None:
    d_k = problem.q.shape[-1]
    root = np.sqrt(Real(d_k))
    rows = problem.scale.shape
    scale = case.scale
    if scale is None:
        scale = 1 / root
    elif isinstance(scale, str):
        scale = _factor_of_policy(case, problem, root)
    elif isinstance(scale, Learnable):
        scale = _factor_of_module(case, problem, root)
    elif isinstance(scale, np.ndarray):
        scale = np.broadcast_to(scale.astype(Real), case.q.shape[:-1]).reshape(rows)
    problem.scale = np.broadcast_to(np.asarray(scale, dtype=Real), rows)


def _normalise(problem: Problem, of_mean: bool) -> None:
    problem.given = problem.q, problem.k
    problem.normalised = 1 / problem.q.shape[-1] if of_mean else 1.0
    problem.q, problem.k = (x / length_of(x, problem.normalised) for x in problem.given)


def length_of(x: np.ndarray, weight: float) -> np.ndarray:
    """Return √(w·Σx² + 1e-12), the divisor of a vector."""
    return np.sqrt(Real(weight) * (x * x).sum(axis=-1, keepdims=True) + Real("1e-12"))


def _factor_of_policy(case: Case, problem: Problem, root: Real) -> np.ndarray:
    name, _, text = case.scale.partition(":")
    d_k = Real(problem.q.shape[-1])
    if name == "none":
        return Real(1)
    if name == "sqrt":
        return 1 / root
    if name == "inverse":
        return 1 / d_k
    if name == "fixed":
        return 1 / Real(text)
    if name == "temperature":
        return 1 / (Real(text) * root)
    if name == "mup":
        return np.sqrt(Real(text or 64)) / d_k
    if name == "log_n":
        return Real(float(text or 1)) * np.log(np.maximum(problem.visible.sum(axis=-1), 1).astype(Real)) / root
    if name == "yarn":
        return (Real(0.1) * np.log(Real(text)) + 1) ** 2 / root
    if name == "llama4":
        steps = np.maximum(_positions(case) + 1, 0) // int(text or 8192)
        return (1 + Real(0.1) * np.log1p(steps.astype(Real))) / root
    _normalise(problem, of_mean=name == "qk_norm")
    if name == "cosine":
        return np.exp(min(Real(float(text)) if text else np.log(Real(10)), np.log(Real(100))))
    assert name == "qk_norm"
    return Real(text or 1) / root


def _positions(case: Case) -> np.ndarray:
    # Bound of positions, so that they stay 64-bit integers.
    far = 2**63 - 2**32
    return np.arange(case.q.shape[-2], dtype=np.int64) + max(-far, min(case.offset, far))


def _factor_of_module(case: Case, problem: Problem, root: Real) -> np.ndarray:
    """Return e to a sum of parameters times features; gradients of the parameters use the same features."""
    module = case.scale
    rows = problem.scale.shape
    position = np.log1p(np.maximum(_positions(case), 0).astype(Real))
    features = {"log_gain": Real(1), "bias": Real(1), "slope": position}
    log_gain, size = np.zeros(rows, Real), np.zeros(rows, Real)
    for name, parameter in module.parameters.items():
        parameter = parameter.astype(Real)
        if name == "weight":
            weight = parameter[:, None, :] if module.per_head else parameter
            problem.features[name] = problem.q / root
            log_gain = log_gain + (problem.q * weight).sum(axis=-1) / root
            size = size + np.abs(problem.q * weight).sum(axis=-1) / root
        else:
            column = parameter[:, None] if module.per_head else parameter
            problem.features[name] = np.broadcast_to(features[name], rows)
            log_gain = log_gain + column * features[name]
            size = size + np.abs(column * features[name])
    # The exponent is computed from the parameters in the working precision.
    problem.scale_error = problem.rounding.of_sum(problem.q.shape[-1]) * (1 + size)
    if module.kind in ("rms", "l2"):
        _normalise(problem, of_mean=module.kind == "rms")
    return np.exp(log_gain) * (root if module.kind == "l2" else 1 / root)


@dataclass
class Softmax:
    """Scores, logits and weights `[N, H, L, S]`, each with the size of its error, and properties of the rows."""

    products: np.ndarray
    products_size: np.ndarray
    scores: np.ndarray
    scores_error: np.ndarray
    squashed: np.ndarray | None
    logits: np.ndarray
    logits_error: np.ndarray
    weights: np.ndarray
    weights_error: np.ndarray
    certain: np.ndarray
    sink_weight: np.ndarray
    sink_error: np.ndarray
    blind: np.ndarray
    poisoned: np.ndarray
    undefined: np.ndarray


def soften(problem: Problem) -> Softmax:
    """Return the softmax of a problem with its errors."""
    with np.errstate(all="ignore"):
        return _soften(problem)


def _soften(problem: Problem) -> Softmax:
    rounding, visible = problem.rounding, problem.visible
    unit, scale = Real(rounding.unit), problem.scale[..., None]
    products = problem.q @ problem.k.swapaxes(-1, -2)
    products_size = size_of_products(problem.q, problem.k)
    scores = scale * products
    reach = np.abs(scale) * products_size
    scores_error = reach * (rounding.of_sum(problem.q.shape[-1]) + problem.scale_error[..., None])
    # Loss below the smallest number, in the scaled query and in the products.
    key_size = np.where(np.isfinite(problem.k), np.abs(problem.k), 0).sum(axis=-1)[..., None, :]
    scores_error = scores_error + rounding.smallest * (problem.q.shape[-1] + key_size)
    # No bound is promised beyond float64.
    query_size = np.where(np.isfinite(problem.q), np.abs(problem.q), 0).max(axis=-1, initial=0)[..., None]
    largest = np.maximum(np.maximum(products_size, reach), np.abs(scale) * query_size)
    undefined = (visible & (largest > Real("1e307"))).any(axis=-1)
    squashed = None
    logits, logits_error = scores, scores_error
    if problem.softcap is not None:
        cap = Real(problem.softcap)
        squashed = np.tanh(scores / cap)
        logits = cap * squashed
        further = [np.abs(cap * np.tanh((scores + sign * scores_error) / cap) - logits) for sign in (-1, 1)]
        logits_error = np.maximum(*further) + 12 * unit * np.abs(logits) + rounding.smallest
    if problem.bias is not None:
        logits_error = logits_error + 2 * unit * (np.abs(logits) + problem.bias_size)
        logits = logits + problem.bias
    logits = np.where(visible, logits, -np.inf)
    blind = ~visible.any(axis=-1)
    poisoned = (visible & (np.isnan(logits) | (logits == np.inf))).any(axis=-1)
    poisoned |= ~blind & (logits == -np.inf).all(axis=-1)
    undefined &= ~poisoned
    logits_error = np.where(visible & np.isfinite(logits), logits_error, 0)
    weights, interval, certain, sink = _weights_between(problem, logits, logits_error, blind)
    poison = np.where(poisoned, Real(np.nan), Real(0))
    return Softmax(
        products,
        products_size,
        scores,
        scores_error,
        squashed,
        logits,
        logits_error,
        np.where(visible, weights + poison[..., None], 0),
        # The weights of a NaN row on hidden keys are not checked.
        np.where(undefined[..., None] | (poisoned[..., None] & ~visible), np.inf, interval),
        certain,
        sink[0] + poison,
        sink[1] + np.where(undefined, np.inf, 0),
        blind,
        poisoned,
        undefined,
    )


def _weights_between(problem, logits, error, blind):
    """Return weights, their largest errors, whether each is surely above 0, and the sink's weight with its error."""
    rounding, visible = problem.rounding, problem.visible
    unit = Real(rounding.unit)
    top = np.where(blind, 0, logits.max(axis=-1, initial=-np.inf))[..., None]
    below = np.where(visible, logits - top, -np.inf)
    e = np.exp(below)
    apart = np.where(visible, error + 2 * unit * np.minimum(np.abs(below), _FAR), 0)
    slack = rounding.of_exp + rounding.of_sum(logits.shape[-1])
    high = np.where(visible, np.exp(np.minimum(below + apart, _FAR)) * (1 + slack), 0)
    low = np.where(visible, np.exp(np.maximum(below - apart, -_FAR)) * (1 - slack), 0)
    low = np.where(low < 2 * rounding.smallest_normal, 0, low)
    sink, sink_high, sink_low = (np.zeros(blind.shape, Real) for _ in range(3))
    if problem.sinks is not None:
        distance = problem.sinks[:, None] - top[..., 0]
        apart = 4 * unit * (np.abs(problem.sinks[:, None]) + np.abs(top[..., 0]) + 1)
        sink, sink_high, sink_low = (np.exp(np.clip(distance + x, -_FAR, _FAR)) for x in (0, apart, -apart))
    total, total_high, total_low = (x.sum(axis=-1) for x in (e, high, low))

    def share(part, others):
        whole = part + np.maximum(others, 0)
        return np.where(whole > 0, part / np.where(whole > 0, whole, 1), 0)

    weights = share(e, (total + sink)[..., None] - e)
    most = share(high, (total_low + sink_low)[..., None] - low)
    least = share(low, (total_high + sink_high)[..., None] - high)
    interval = np.maximum(most - weights, weights - least) + rounding.of_exp * weights
    if rounding.holds_weights or rounding.working == "float64":
        interval = interval + np.where(visible, rounding.smallest_normal, 0)
    own = share(sink, total)
    own_error = np.maximum(share(sink_high, total_low) - own, own - share(sink_low, total_high))
    return weights, interval, low > 0, (own, own_error)


def attend(problem: Problem, soft: Softmax) -> dict[str, Bounded]:
    """Return output `[N, H, L, V]` and weights `[N, H, L, S]`."""
    rounding = problem.rounding
    with np.errstate(all="ignore"):
        finite = np.isfinite(problem.v)
        v = np.where(finite, problem.v, 0)
        weights = problem.drop(soft.weights)
        output = weights @ v
        error = problem.drop(soft.weights_error.clip(max=Real("1e4000"))) @ np.abs(v)
        relative = rounding.of_sum(v.shape[-2]) + rounding.of_pairs
        sizes = size_of_products(weights, v.swapaxes(-1, -2))
        error = error + relative * sizes
        if problem.kept is not None:
            # Weights that dropout enlarged may add up to more than 1, so sums may overflow where the output does not.
            error = np.where(sizes >= Real(0.99) * rounding.most, np.inf, error)
        # Loss in products of weights and values below the smallest number.
        error = error + rounding.of_storing(output) + max(problem.growth, 1) * rounding.smallest * v.shape[-2]
        error = np.where(soft.undefined[..., None], np.inf, error)
        if not finite.all():
            bad = (~finite).astype(np.float64)
            surely = (problem.visible & soft.certain & (soft.weights > 0)).astype(np.float64) @ bad > 0
            perhaps = problem.visible.astype(np.float64) @ bad > 0
            output = np.where(surely & ~np.isnan(output), np.inf, output)
            error = np.where(perhaps & ~surely, np.inf, error)
        stored = rounding.of_storing(soft.weights) + rounding.smallest_normal
        return {"output": Bounded(output, error), "weights": Bounded(soft.weights, soft.weights_error + stored)}
