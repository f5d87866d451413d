"""Samples random calls of attention. Seed and index determine a call, so that every mismatch can be repeated."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from .case import DTYPES, Case, Learnable
from .layouts import FOR_ARRAYS, FOR_TENSORS, lay_out, with_odd_bytes

# Probabilities of the entry points. "jvp" is forward mode, "drop-in" has torch's own signature.
FRONTS = {
    "arrays": 0.3,
    "array gradients": 0.1,
    "tensors": 0.14,
    "tensor gradients": 0.26,
    "drop-in": 0.12,
    "jvp": 0.08,
}
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 257)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 129, 130)
POLICIES = ("none", "sqrt", "inverse", "fixed:7", "temperature:0.5", "mup", "mup:16", "log_n", "log_n:0.4", "yarn:4")
POLICIES += ("llama4", "llama4:5", "cosine", "cosine:1", "qk_norm", "qk_norm:3")
MODULES = ("learned", "query", "position", "rms", "l2")
VARIANTS = ("statistics off", "contiguous", "entries apart", "other threads", "hidden keys changed")
SINK_GAP = math.log(0.00394)


def draw_case(seed: int, index: int, levels: tuple[str, ...]) -> Case:
    """Return the call of this seed and index on one of the levels."""
    rng = np.random.default_rng([seed, index])
    front = str(rng.choice(list(FRONTS), p=list(FRONTS.values())))
    dtype = str(rng.choice(list(DTYPES), p=(0.15, 0.15, 0.45, 0.25)))
    extremes = _draw_extremes(rng, front)
    q_shape, k_shape, d_v = _draw_shapes(rng, front)
    case = Case(
        seed,
        index,
        front,
        str(rng.choice(levels)),
        int(rng.choice([1, 2], p=(0.8, 0.2))),
        *_draw_vectors(rng, dtype, q_shape, k_shape, d_v, extremes),
        statistics=bool(rng.random() < 0.8),
        weights=bool(rng.random() < 0.4) and front != "drop-in",
        extremes=extremes,
    )
    _draw_range(rng, case)
    case.scale = _draw_scale(rng, case, extremes)
    if "balanced" in extremes:
        _balance(case)
    if rng.random() < 0.5 or "mask" in extremes:
        case.mask = _draw_mask(rng, case, extremes)
    if front != "drop-in":
        if rng.random() < 0.15 or "softcap" in extremes:
            wide = 10.0 ** rng.uniform(-320, 300) if rng.random() < 0.3 else 10.0 ** rng.uniform(-8, 8)
            case.softcap = max(float(wide), 5e-324) if "softcap" in extremes else float(rng.uniform(1, 50))
        if rng.random() < 0.2 or "sinks" in extremes:
            case.sinks = _draw_sinks(rng, case, extremes)
    if "sharp" in extremes:
        _sharpen(rng, case)
    _lay_out(rng, case)
    if "planted" in extremes:
        _plant(rng, case)
    _draw_cotangents(rng, case)
    if case.front in ("arrays", "tensors", "drop-in"):
        case.variants = tuple(name for name in VARIANTS if rng.random() < 0.25)
    _draw_alibi(np.random.default_rng([seed, index, 2]), case)
    case.changed_keys = rng.random(case.k.shape[-2]) < 0.3
    if case.on_tensors and front != "jvp" and rng.random() < 0.3:
        case.dropout = float(rng.choice([0.1, 0.1, 0.5, 0.9, 1.0]))
    return case


def _draw_extremes(rng, front):
    """Return at most two extremes (and a balance), because with many at once no result is defined well enough."""
    names = ["scale", "sizes", "far", "values", "sinks", "softcap", "mask", "ties", "sharp", "planted", "long"]
    if front == "jvp":  # forward mode holds every logit in the working precision
        names = ["sinks", "mask", "ties", "sharp", "planted"]
    chosen = rng.choice(names, size=int(rng.choice([0, 1, 1, 2, 2])), replace=False)
    balanced = ["balanced"] if {"scale", "sizes"} & set(chosen) and rng.random() < 0.6 else []
    return (*map(str, chosen), *balanced)


def _draw_shapes(rng, front):
    rank = int(rng.choice([2, 3, 4, 5], p=(0.25, 0.2, 0.4, 0.15)))
    groups, shared = int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 1, 2, 3, 5]))
    batch = tuple(int(x) for x in rng.choice([1, 2, 3, 5], size=max(rank - 3, 0)))
    queries, keys = (int(x) for x in rng.choice(LENGTHS, size=2))
    d_k, d_v = (int(x) for x in rng.choice(WIDTHS, size=2))
    if rng.random() < 0.3:
        keys = queries
    if rng.random() < 0.08:
        keys = int(rng.choice([1, 2]))
    if rng.random() < 0.5:
        d_v = d_k
    if rng.random() < 0.08 and rank > 2:  # decoding over many keys, which are split and merged
        queries, shared, keys = 1, int(rng.choice([1, 2])), int(rng.choice([1023, 1025, 2049, 3000]))
        d_k, d_v = (int(x) for x in rng.choice(WIDTHS[:9], size=2))
        batch = (int(rng.choice([1, 4, 9])), *batch[1:2])[: rank - 3]
        return (*batch, *((groups * shared,) if rank > 2 else ()), queries, d_k), (*batch, groups, keys, d_k), d_v
    if rng.random() < 0.02:
        batch = (0, *batch[1:])[: rank - 3]
    if rank == 2:
        groups = shared = 1
    if front == "drop-in" and rng.random() < 0.3:
        d_v, shared = d_k, 1
    # A comparison takes about a microsecond per weight and feature, so large calls are rare.
    most = 2**16 if rng.random() < 0.04 else 2**13
    while math.prod(batch) * groups * shared * queries * keys > most and queries * keys > 4096 // (groups * shared):
        if groups * shared > 1:
            groups, shared = 1, max(shared // 2, 1)
        elif queries > 17:
            queries = int(rng.choice([1, 7, 9, 17]))
        else:
            keys = keys // 2
    while math.prod(batch) * groups * shared * queries * keys > most and max(batch, default=1) > 1:
        batch = tuple(max(x // 2, 1) for x in batch)
    q_shape = (*batch, *((groups * shared,) if rank > 2 else ()), queries, d_k)
    return q_shape, (*batch, *((groups,) if rank > 2 else ()), keys, d_k), d_v


def _draw_vectors(rng, dtype, q_shape, k_shape, d_v, extremes):
    """Return contiguous q, k and v in the dtype."""
    limits = ml_dtypes.finfo(DTYPES[dtype])
    low, high = math.log10(float(limits.smallest_subnormal)), math.log10(float(limits.max))
    q = rng.standard_normal(q_shape) * rng.choice([0.1, 1.0, 3.0])
    k = rng.standard_normal(k_shape)
    v = rng.standard_normal((*k_shape[:-1], d_v))
    if "ties" in extremes:
        k = np.take(k, rng.integers(0, int(rng.choice([1, 1, 3])), k.shape[-2]) % max(k.shape[-2], 1), axis=-2)
    sizes = dict.fromkeys("qkv", 0.0)
    if "sizes" in extremes:
        sizes["q"] = rng.uniform(low, high)
        near = -sizes["q"] + rng.uniform(-1, 1)
        sizes["k"] = near if rng.random() < 0.5 else rng.uniform(low, high) if rng.random() < 0.5 else 0.0
    if "far" in extremes:  # logits up to the end of the dtype, whose differences are lost in rounding
        whole = rng.uniform(3, min(2 * high - 3, 300))
        sizes["q"] = rng.uniform(max(whole - high + 1, 0), min(whole, high - 1))
        sizes["k"] = whole - sizes["q"]
    if "values" in extremes:
        sizes["v"] = high if rng.random() < 0.4 else rng.uniform(low, high)
    return [
        _round_to(x.astype(np.longdouble) * np.longdouble(10) ** sizes[name], dtype)
        for name, x in zip("qkv", (q, k, v), strict=True)
    ]


def _round_to(x, dtype):
    """Return numbers rounded to a dtype, clipped to its largest number."""
    most = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    with np.errstate(all="ignore"):
        return np.clip(x.astype(np.longdouble), -most, most).astype(np.float64).astype(DTYPES[dtype])


def _draw_range(rng, case):
    queries, keys = case.q.shape[-2], case.k.shape[-2]
    case.causal = bool(rng.random() < 0.35)
    if case.front == "drop-in":
        return
    if rng.random() < 0.2:
        left, right = (None if rng.random() < 0.3 else _pick(rng, (0, 1, 3, 17, 100, abs(_far(rng)))) for _ in "lr")
        case.window = (left, right)
    if (case.causal or case.window) and (queries != keys or rng.random() < 0.5):
        usual = (0, -1, -3, -queries // 2, -10, -queries - 5, 5, keys + 5, 40)
        case.causal_offset = keys - queries if rng.random() < 0.25 else _pick(rng, (*usual, _far(rng), _far(rng)))
    if case.window and abs(case.offset) > 2**30 and rng.random() < 0.6:
        # One side of the window reaches from far away to the keys.
        reach = max(abs(case.offset) + int(rng.integers(-3 - queries, keys + 4)), 0)
        case.window = (reach, case.window[1]) if case.offset > 0 else (case.window[0], reach)


def _pick(rng, numbers):
    """Return one of some integers, which may exceed int64."""
    return numbers[int(rng.integers(len(numbers)))]


def _far(rng):
    """Return an integer far beyond any sequence, of either sign, near a power of two."""
    sign, power = _pick(rng, (-1, 1)), _pick(rng, (31, 53, 60, 61, 62, 63, 64, 70))
    return sign * 2**power + int(rng.integers(-3, 4))


def _draw_number(rng, extremes):
    if "scale" in extremes:
        size = 10.0 ** rng.uniform(-20, 20) if rng.random() < 0.5 else 10.0 ** rng.uniform(-323.3, 300)
        return float(rng.choice([-1, 1]) * max(size, 5e-324))
    return float(rng.choice([0.0, 1.0, -0.5, 0.1, rng.uniform(0.01, 2)]))


def _draw_scale(rng, case, extremes):
    kind = rng.choice(["none", "number", "array", "policy", "module"], p=(0.3, 0.25, 0.15, 0.2, 0.1))
    if kind == "none" and "scale" not in extremes:
        return None
    if kind == "policy" and case.front != "drop-in":
        return str(rng.choice(POLICIES))
    if kind == "module" and case.on_tensors and case.front not in ("drop-in", "jvp"):
        return _draw_module(rng, case)
    if kind == "array" and case.front != "drop-in":
        rows = case.q.shape[:-1]
        shape = tuple(1 if rng.random() < 0.4 else size for size in rows)
        shape = shape[int(rng.integers(0, len(shape) - 1)) :] if len(shape) > 2 else shape
        shape = () if rng.random() < 0.15 else shape
        factors = np.array([_draw_number(rng, extremes) for _ in range(math.prod(shape))]).reshape(shape)
        return factors if "scale" in extremes or rng.random() < 0.5 else factors.astype(np.float32)
    return _draw_number(rng, extremes)


def _draw_module(rng, case):
    kind = str(rng.choice(MODULES))
    if kind == "query" and {"sizes", "far"} & set(case.extremes):  # e to the power of a query is rarely finite here
        kind = "learned"
    per_head = bool(rng.random() < 0.5)
    names = {"query": ("weight", "bias"), "position": ("slope", "bias")}.get(kind, ("log_gain",))
    parameters = {}
    for name in names:
        own = (case.q.shape[-1],) if name == "weight" else ()
        size = 0.2 if name == "slope" else 0.5
        parameters[name] = size * rng.standard_normal((case.heads, *own) if per_head else own)
        parameters[name] = np.asarray(parameters[name], dtype=np.float32)
    return Learnable(kind, per_head, parameters)


def _balance(case):
    """Rescale q so that scale·q·k is of order one, as far as the dtype allows."""
    if isinstance(case.scale, str | Learnable) or not case.q.size or not case.k.size:
        return
    scale = 1 / math.sqrt(case.q.shape[-1]) if case.scale is None else np.abs(case.scale).max()
    sizes = [np.abs(x.astype(np.longdouble)).max() for x in (case.q, case.k)]
    reach = np.longdouble(scale) * sizes[0] * sizes[1] * math.sqrt(case.q.shape[-1]) / 4
    if reach == 0:
        return
    case.q = _round_to(case.q.astype(np.longdouble) / reach, case.dtype)


def _draw_mask(rng, case, extremes):
    full = (*case.q.shape[:-3], case.heads, case.q.shape[-2], case.k.shape[-2])
    shape = tuple(1 if rng.random() < 0.3 else size for size in full)
    least = 0 if case.q.ndim > 2 else 1 if rng.random() < 0.8 else 0
    shape = shape[int(rng.integers(least, len(shape) - 1)) :]
    share = float(rng.choice([0.05, 0.3, 0.7, 0.95]))
    seen = rng.random(shape) < share
    if len(shape) > 1 and rng.random() < 0.5:
        seen &= rng.random((*shape[:-1], 1)) < 0.7  # rows that see no key
    if rng.random() < 0.5:
        if rng.random() < 0.4:
            case.layouts["mask bytes"] = "odd bytes"
            return with_odd_bytes(seen, rng)
        return seen
    bias = rng.standard_normal(shape) * rng.choice([0.3, 3.0])
    dtype = str(rng.choice(list(DTYPES)))
    if "mask" in extremes:
        lowest = float(ml_dtypes.finfo(DTYPES[dtype]).min)
        huge = rng.choice([lowest, lowest / 2, lowest / 1e4, -1e4])
        bias = np.where(rng.random(shape) < rng.choice([0.3, 0.95]), huge, bias)
    if rng.random() < 0.7:
        bias = np.where(seen, bias, -np.inf)
    with np.errstate(over="ignore"):
        return bias.astype(DTYPES[dtype])


def _draw_alibi(rng, case):
    """Set ALiBi slopes if positions are known and float32 can represent the distances."""
    offset, known = case.causal_offset or 0, case.q.shape[-2] == case.k.shape[-2] or case.causal_offset is not None
    if case.front in ("drop-in", "jvp") or rng.random() > 0.2 or not known or abs(offset) > 2**20:
        return
    slopes = rng.standard_normal(case.heads) * rng.choice([0.01, 0.3, 3.0])
    case.alibi = slopes.astype(DTYPES[str(rng.choice(["float32", "float64", case.dtype]))])


def _draw_sinks(rng, case, extremes):
    sinks = rng.standard_normal(case.heads)
    if "sinks" in extremes:
        sizes = (12, 20, 50, 87, 100, 110, 300, 1000)
        sinks = np.array([rng.choice((-1, 1, 1)) * rng.choice(sizes) for _ in range(case.heads)], dtype=np.float64)
    return sinks.astype(DTYPES[str(rng.choice(["float32", "float64", case.dtype]))])


def _sharpen(rng, case):
    """Put one key at logit 0 and the others at one distance below, as in the row of a head with a sink."""
    scale = 1 / math.sqrt(case.q.shape[-1]) if case.scale is None else case.scale
    if not isinstance(scale, float) or not 1e-3 < abs(scale) < 1e3 or not case.k.size or not case.q.size:
        return
    gap = float(rng.choice([SINK_GAP, SINK_GAP, -10.0, -20.0, -33.0, -45.0, -60.0]))
    q, k = np.zeros(case.q.shape), np.zeros(case.k.shape)
    q[..., 0] = 1.0
    k[..., 0] = gap / scale
    k[..., int(rng.integers(case.k.shape[-2])), 0] = 0.0
    case.q, case.k = _round_to(q, case.dtype), _round_to(k, case.dtype)


def _lay_out(rng, case):
    kinds = FOR_TENSORS if case.on_tensors else FOR_ARRAYS
    if case.front == "jvp":  # torch makes no dual tensor of a repeated axis
        kinds = tuple(kind for kind in kinds if kind != "broadcast")
    if not case.on_tensors and rng.random() < 0.03:  # all three or none, because they must have the same dtype
        for name in "qkv":
            setattr(case, name, lay_out(getattr(case, name), "byte order", rng))
            case.layouts[name] = "byte order"
        return
    for name in ("q", "k", "v", "mask"):
        array = getattr(case, name)
        if array is None or array.ndim == 0 or rng.random() < 0.6:
            continue
        case.layouts[name] = str(rng.choice(kinds))
        setattr(case, name, lay_out(array, case.layouts[name], rng))


def _plant(rng, case):
    """Put NaN or infinities where no row sees them, and sometimes where a row does."""
    seen = case.visible()
    groups = case.k.shape[-3] if case.k.ndim > 2 else 1
    by_group = seen.reshape(*seen.shape[:-3], groups, -1, *seen.shape[-2:]) if seen.size else None
    if by_group is None:
        return
    hidden_keys = ~by_group.any(axis=(-3, -2)).reshape(case.k.shape[:-1])
    blind = ~seen.any(axis=-1).reshape(case.q.shape[:-1])
    if rng.random() < 0.3:
        hidden_keys = hidden_keys | (rng.random(hidden_keys.shape) < 0.05)
        blind = blind | (rng.random(blind.shape) < 0.05)
    for name, where in (("q", blind), ("k", hidden_keys), ("v", hidden_keys)):
        array = getattr(case, name)
        if not array.size or rng.random() < 0.3:
            continue
        if name == "q" and isinstance(case.scale, Learnable) and case.scale.kind == "query":
            continue  # the scale of such a query is not finite and is refused
        wrong = rng.choice([np.nan, np.inf, -np.inf], size=array.shape)
        part = where[..., None] & (rng.random(array.shape) < rng.choice([0.2, 1.0]))
        setattr(case, name, np.where(part, wrong.astype(array.dtype), array).astype(array.dtype))
        case.layouts.pop(name, None)


def _draw_cotangents(rng, case):
    """Set the cotangents of the output, or the tangents of the inputs, to numbers of order one."""
    d_v, keys = case.v.shape[-1], case.k.shape[-2]
    rows = case.q.shape[:-1]
    if case.front == "jvp":
        for name in ("q", "k", "v", "sinks"):
            array = getattr(case, name)
            if array is not None:
                case.cotangents[name] = rng.standard_normal(array.shape).astype(array.dtype)
        return
    if not case.wants_gradients and case.front != "drop-in":
        return
    shape = (*rows, d_v)
    case.cotangents["output"] = rng.standard_normal(shape).astype(DTYPES[case.dtype])
    if case.on_tensors and rng.random() < 0.05:
        case.layouts["gradient"] = "nowhere"
        case.cotangents["output"] = np.zeros(shape, DTYPES[case.dtype])
    if case.front == "tensor gradients" and case.weights:
        heads = () if case.q.ndim == 2 else (case.heads,)
        shape = (*case.q.shape[:-3], *heads, case.q.shape[-2], keys)
        case.cotangents["weights"] = rng.standard_normal(shape).astype(DTYPES[case.dtype])
