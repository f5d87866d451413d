"""The arguments of attention checked: a wrong one raises and says what was expected, what came and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sqrtdk.call import ALIGNED, OPEN, OPEN_ABOVE, OPEN_BELOW, Band, Call, count_visible
from sqrtdk.errors import InvalidTypeError, InvalidValueError, warn
from sqrtdk.scales import Factor, Policy, ScaleContext, Sqrt, Temperature, resolve

Array = npt.NDArray[Any]
Window = tuple[int | None, int | None]
ScaleLike = float | npt.ArrayLike | str | Policy | None

Names = tuple[str, str, str]
QKV: Names = ("q", "k", "v")
"""What `attention` calls queries, keys and values; errors name an argument as the caller's signature does."""


def validate(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    scale: ScaleLike,
    mask: npt.ArrayLike | None,
    causal: bool,
    causal_offset: int | None,
    window: Window | None,
    softcap: float | None,
    sinks: npt.ArrayLike | None,
    alibi: npt.ArrayLike | None,
) -> Call:
    """Check every argument of `sqrtdk.attention`; wrong ones raise, none is modified.

    This runs before every call of the kernel: what is usual (arrays, the default scale, no mask) must cost little.
    """
    query, key, value = _validate_arrays(q, k, v)
    shape = query.shape
    heads = validate_shapes(shape, key.shape, value.shape)
    keys = key.shape[-2]
    band = ALIGNED if shape[-2] == keys else OPEN
    if causal is not False or window is not None or causal_offset is not None or alibi is not None:
        asks = isinstance(scale, str | Policy)
        band = validate_band(causal, causal_offset, window, shape[-2], keys, asks, alibi is not None)
    if mask is not None:
        mask = _validate_mask(mask, (*shape[:-3], heads, shape[-2], keys))
    policy, array, factor = None, None, 0.0
    if scale is None:
        factor = _default_factor(Sqrt.factor, shape[-1])
    else:
        policy, array, factor = _validate_scale(scale, query, keys, mask, band)
    return Call(
        query,
        key,
        value,
        array,
        mask,
        None if sinks is None else _validate_sinks(sinks, heads),
        None if alibi is None else _validate_alibi(alibi, shape),
        None,
        factor,
        0.0 if softcap is None else validate_softcap(softcap),
        0.0,
        band,
        policy,
    )


# Beyond any sequence, and with the number of a row or key added still within an int64.
_FAR = 2**63 - 2**32

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes of arrays and tensors, in the order of `Dtype` in kernel.h."""

_DEFAULT = Sqrt()


@lru_cache(maxsize=1024)
def _default_factor(formula: Callable[[Sqrt, ScaleContext], Factor], d_k: int) -> float:
    """The default policy's factor, remembered per dₖ: a context for every call would be as slow as the other checks."""
    return float(formula(_DEFAULT, ScaleContext(d_k=d_k)))


# Looking a dtype up is forty times quicker than asking for its name. bfloat16, and numbers of the other byte order, are
# learnt when they come.
_CODES: dict[np.dtype[Any], int] = {np.dtype(name): FLOATS.index(name) for name in ("float16", "float32", "float64")}


def _as_array(name: str, value: npt.ArrayLike) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InvalidValueError(name, f"must be an array or nested lists of one shape, got neither ({error})") from None
    except (RuntimeError, TypeError) as error:  # a tensor with a gradient, or on another device
        raise InvalidTypeError(
            name, f"must be an array, got {type(value).__name__} ({error}); sqrtdk.torch.attention takes tensors"
        ) from None


def as_float_array(name: str, value: npt.ArrayLike) -> Array:
    """The argument as an array of one of the four float dtypes, not copied."""
    array = _as_array(name, value)
    if array.dtype not in _CODES and not _learn(array.dtype):
        raise InvalidTypeError(name, f"must be a {', '.join(FLOATS[:-1])} or {FLOATS[-1]} array, got {array.dtype}")
    return array


def _validate_arrays(q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike) -> tuple[Array, Array, Array]:
    if type(q) is type(k) is type(v) is np.ndarray and q.dtype is k.dtype is v.dtype and q.dtype in _CODES:
        return q, k, v
    query, key, value = (as_float_array(name, array) for name, array in zip(QKV, (q, k, v), strict=True))
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidTypeError(
            "q, k and v must have one dtype, "
            f"got {query.dtype}, {key.dtype} and {value.dtype}; convert them with .astype"
        )
    return query, key, value


def _learn(dtype: np.dtype[Any]) -> bool:
    if dtype.name in FLOATS:
        _CODES[dtype] = FLOATS.index(dtype.name)
    return dtype in _CODES


def float_code(dtype: np.dtype[Any]) -> int:
    """The number of a float dtype in kernel.h."""
    return _CODES[dtype]


def validate_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], names: Names = QKV) -> int:
    """The number of query heads, if the three shapes fit together."""
    rank = len(query)
    alike = key == query == value  # one comparison instead of many, and the usual case
    if rank >= 2 and query[-1] > 0 and (alike or _fit(query, key, value)):
        return 1 if rank == 2 else query[-3]
    raise _explain_shapes(query, key, value, names)


def _fit(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> bool:
    if (
        len(key) == len(value) == len(query)
        and key[-1] == query[-1]
        and key[:-1] == value[:-1]
        and key[:-3] == query[:-3]
    ):
        heads, groups = (query[-3], key[-3]) if len(query) > 2 else (1, 1)
        return heads == groups or (groups > 0 and heads % groups == 0)
    return False


def _explain_shapes(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], names: Names
) -> InvalidValueError:
    """What is wrong with shapes that do not fit, the first thing first."""
    query, key, value = tuple(query), tuple(key), tuple(value)
    q, k, v = names
    if len(query) < 2:
        return InvalidValueError(q, f"must have shape [..., H, L, D] or [L, D], got {query}")
    if query[-1] == 0:
        return InvalidValueError(q, f"must have at least one feature (D ≥ 1), got shape {query}")
    d_k = query[-1]
    head = "..., G, " if len(query) > 2 else ""
    for name, shape in ((k, key), (v, value)):
        if len(shape) != len(query):
            return InvalidValueError(name, f"must have {len(query)} axes like {q}, got shape {shape}")
        if shape[:-3] != query[:-3]:
            return InvalidValueError(name, f"must have the leading axes {query[:-3]} of {q}, got shape {shape}")
    if key[-1] != d_k:
        return InvalidValueError(k, f"must have shape [{head}S, {d_k}] ({d_k} from {q}), got {key}")
    if value[-2] != key[-2]:
        return InvalidValueError(v, f"must have shape [{head}{key[-2]}, V] ({key[-2]} keys from {k}), got {value}")
    if value[-3] != key[-3]:
        return InvalidValueError(v, f"must have {key[-3]} heads like {k}, got shape {value}")
    return InvalidValueError(
        q, f"must have a multiple of {k}'s {key[-3]} heads, got {query[-3]} heads in shape {query}"
    )


def validate_band(
    causal: bool,
    causal_offset: int | None,
    window: Window | None,
    queries: int,
    keys: int,
    scale_asks: bool,
    has_alibi: bool,
) -> Band:
    """The visible range of a call that is causal, has a window, an offset or slopes.

    `scale_asks` if the scale may ask for positions, which an offset then moves without hiding a key.
    """
    causal = require_flag("causal", causal)
    if causal_offset is not None and not (causal or window is not None or scale_asks or has_alibi):
        raise InvalidValueError(
            "causal_offset",
            "must come with causal=True, a window, alibi or a policy that asks for positions, "
            f"got causal_offset={causal_offset!r} alone, which would hide nothing",
        )
    needs_offset = causal or window is not None or has_alibi
    offset = _validate_offset(causal_offset, needs_offset, queries, keys)
    left, right = (None, None) if window is None else _validate_window(window)
    # Python's integers have no limit: they are added up first, and bounded once.
    first = OPEN_BELOW if left is None else _bound(offset - left)
    last = OPEN_ABOVE if right is None else _bound(offset + right)
    offset = _bound(offset)
    return Band(first, min(last, offset) if causal else last, offset)


def _bound(position: int) -> int:
    return max(-_FAR, min(position, _FAR))


def require_flag(name: str, value: bool) -> bool:
    """True or False: text, a number or an array would be taken for the truth of something else."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidTypeError(name, f"must be True or False, got {value!r}")
    return bool(value)


def _validate_offset(causal_offset: int | None, is_needed: bool, queries: int, keys: int) -> int:
    if causal_offset is None:
        if queries != keys and is_needed:
            raise InvalidValueError(
                "causal_offset",
                f"must be given with {queries} queries and {keys} keys: {keys - queries} aligns the ends, 0 the starts",
            )
        return 0
    if isinstance(causal_offset, bool) or not isinstance(causal_offset, int | np.integer):
        raise InvalidTypeError("causal_offset", f"must be an integer, got {causal_offset!r}")
    return int(causal_offset)


def _validate_window(window: Window) -> Window:
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise InvalidValueError("window", f"must be a pair (left, right), got {window!r}")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | np.integer) or side < 0):
            raise InvalidValueError("window", f"must hold whole numbers ≥ 0 or None, got {window!r}")
    left, right = (None if side is None else int(side) for side in window)
    return (left, right)


def validate_softcap(softcap: float) -> float:
    """A number that is positive and finite."""
    if isinstance(softcap, bool) or not isinstance(softcap, int | float | np.number):
        raise InvalidTypeError("softcap", f"must be a number, got {softcap!r}")
    if not 0.0 < softcap < math.inf:
        raise InvalidValueError("softcap", f"must be positive and finite, got {softcap}")
    return float(softcap)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether arrays of one shape broadcast to another."""
    # np.broadcast_to would tell as well, at the price of half a call.
    return len(shape) <= len(to) and all(
        own == 1 or own == other for own, other in zip(reversed(shape), reversed(to), strict=False)
    )


def _validate_mask(mask: npt.ArrayLike, shape: tuple[int, ...]) -> Array:
    array = _as_array("mask", mask)
    if array.dtype != np.bool_ and array.dtype not in _CODES and not _learn(array.dtype):
        raise InvalidTypeError("mask", f"must be boolean (True: may attend) or additive float, got {array.dtype}")
    require_mask_shape("mask", array.shape, shape)
    if array.dtype != np.bool_:
        warn_of_truth_values(array)
    return array


def require_mask_shape(name: str, shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    """Refuse a mask that does not broadcast to `[..., H, L, S]`."""
    if not broadcasts(shape, to):
        raise InvalidValueError(name, f"must broadcast to [..., H, L, S] = {tuple(to)}, got {tuple(shape)}")


def require_sinks_shape(shape: tuple[int, ...], heads: int) -> None:
    """Refuse sinks that are not one logit per query head."""
    if tuple(shape) != (heads,):
        raise InvalidValueError("sinks", f"must have shape [H] = ({heads},), got {tuple(shape)}")


def require_scale_shape(name: str, kind: str, shape: tuple[int, ...], rows: tuple[int, ...], rows_known: bool) -> None:
    """Refuse a scale, an array or tensor by its `kind`, that does not broadcast to `[..., H, L]`.

    One axis would silently mean rows: it is refused for several heads, unless its maker knows (`rows_known`).
    """
    shape, rows = tuple(shape), tuple(rows)
    if len(shape) == 1 and len(rows) > 1 and not rows_known:
        raise InvalidValueError(
            name,
            f"must broadcast to [..., H, L] = {rows}; a one-dimensional {kind} {shape} would mean rows: "
            "use scale[:, None] for one number per head, scale[None, :] for one per query",
        )
    if not broadcasts(shape, rows):
        raise InvalidValueError(name, f"must broadcast to [..., H, L] = {rows}, got {shape}")


def warn_of_truth_values(mask: Any) -> None:
    """Warn if a float mask consists of zeros and ones, both: somebody meant "may attend" and would get a shift by 1.

    It looks until it finds another number, so that a usual mask costs a glance. Arrays, and tensors on the CPU.
    """
    flat = mask.reshape(-1)
    some_zero = some_one = False
    start, length = 0, 256
    while start < flat.shape[0]:
        part = flat[start : start + length]
        is_zero, is_one = part == 0, part == 1
        if not bool((is_zero | is_one).all()):
            return
        some_zero, some_one = some_zero or bool(is_zero.any()), some_one or bool(is_one.any())
        start, length = start + length, min(4 * length, 2**20)
    if some_zero and some_one:
        warn(
            f"mask is {mask.dtype} and holds only zeros and ones: it is added to the logits, so a 0 hides nothing. "
            "If 1 was to mean 'may attend', give a boolean mask (mask != 0); if it was to be added, ignore this",
        )


def _validate_sinks(sinks: npt.ArrayLike, heads: int) -> Array:
    array = _as_array("sinks", sinks)
    if array.dtype not in _CODES and not _learn(array.dtype):
        raise InvalidTypeError("sinks", f"must be floating, one logit per query head, got {array.dtype}")
    require_sinks_shape(array.shape, heads)
    wide = array.astype(np.float64)
    if not np.isfinite(wide).all():
        raise InvalidValueError("sinks", f"must be finite, got {sinks!r}")
    return wide


def require_alibi_shape(shape: tuple[int, ...], query: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which slopes `[..., H]` broadcast to `[..., H, L]`; others are refused."""
    heads = tuple(query[:-2]) or (1,)
    if not broadcasts(shape, heads):
        raise InvalidValueError("alibi", f"must broadcast to [..., H] = {heads}, got {tuple(shape)}")
    return (1,) if len(query) == 2 else (*shape, 1)


def _validate_alibi(alibi: npt.ArrayLike, query: tuple[int, ...]) -> Array:
    array = _as_array("alibi", alibi)
    if array.dtype not in _CODES and not _learn(array.dtype):
        raise InvalidTypeError("alibi", f"must be floating, one slope per query head, got {array.dtype}")
    wide = array.astype(np.float64).reshape(require_alibi_shape(array.shape, query))
    if not np.isfinite(wide).all():
        raise InvalidValueError("alibi", f"must be finite, got {alibi!r}")
    return wide


def _validate_scale(
    scale: ScaleLike, query: Array, keys: int, mask: Array | None, band: Band
) -> tuple[Policy | None, Array | None, float]:
    """The policy if it has to prepare q and k; the scale as an array that broadcasts to `[..., H, L]`, or a number."""
    policy, given, name, rows_known = None, scale, "scale", False
    if isinstance(scale, str | Policy):
        policy = resolve(scale)
        context = ScaleContext(
            d_k=query.shape[-1],
            positions=np.arange(query.shape[-2], dtype=np.int64) + (band.offset or 0),
            count_visible=lambda: count_visible(query, keys, mask, band),
        )
        given, name = policy.factor(context), f"the factor of policy {policy}"
        # What a user wrote into a temperature is his own; the others count rows themselves.
        rows_known = not isinstance(policy, Temperature)
        policy = None if type(policy).prepare is Policy.prepare else policy
    if type(given) is float and math.isfinite(given):
        return policy, None, given
    array = _as_array(name, cast(npt.ArrayLike, given))
    if array.dtype.name not in FLOATS and array.dtype.kind not in "iu":
        raise InvalidTypeError(name, f"must be a number, an array, a policy or its name, got {given!r}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise InvalidValueError(name, f"must be finite, got {given!r}")
    if not array.ndim:
        return policy, None, float(array)
    require_scale_shape(name, "array", array.shape, query.shape[:-1], rows_known)
    return policy, array, 0.0
