"""Checks of the arguments of attention: a wrong one raises and says what was expected, what came and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.operation.call import FIELDS, PER_HEAD, POSITIONAL, Call, PerHead, has_positions
from sqrtdk.operation.hints import warn_of_inverse_scale, warn_of_truth_values
from sqrtdk.operation.visibility import ALIGNED, OPEN, OPEN_ABOVE, OPEN_BELOW, Band, count_visible
from sqrtdk.scales import Policy, ScaleContext, Temperature, known_default_factor, resolve

Array = npt.NDArray[Any]
Window = tuple[int | None, int | None]
ScaleLike = float | npt.ArrayLike | str | Policy | None

Names = tuple[str, str, str]
QKV: Names = ("q", "k", "v")
"""Names of queries, keys and values in `attention`; errors use the names of the caller's signature."""


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
    per_head: PerHead,
) -> Call:
    """Return the checked call of `sqrtdk.attention`; a wrong argument raises, none is modified.

    This runs before every call of the kernel, so the usual call (arrays, the default scale, no mask) must cost little.
    """
    query, key, value = _validate_arrays(q, k, v)
    shape = query.shape
    heads = validate_shapes(shape, key.shape, value.shape)
    keys = key.shape[-2]
    band = ALIGNED if shape[-2] == keys else OPEN
    by_head, uses_positions = NONE_PER_HEAD, per_head is not None and has_positions(per_head)
    if causal is not False or window is not None or causal_offset is not None or uses_positions:
        asks = isinstance(scale, str | Policy)
        band = validate_band(causal, causal_offset, window, shape[-2], keys, asks, uses_positions)
    if mask is not None:
        mask = _validate_mask(mask, (*shape[:-3], heads, shape[-2], keys))
    policy, array, factor = None, None, 0.0
    if scale is None:
        factor = known_default_factor(shape[-1])
    else:
        policy, array, factor = _validate_scale(scale, query, keys, mask, band)
        if factor > 1.0 and not isinstance(scale, str | Policy):
            warn_of_inverse_scale(factor, query, key)
    if per_head is not None:
        by_head = check_per_head(_validate_per_head, per_head, shape)
    cap = 0.0 if softcap is None else validate_softcap(softcap)
    return _make_call((query, key, value, array, mask, *by_head, None, factor, cap, 0.0, band, policy))


NONE_PER_HEAD: Sequence[Any] = (None,) * len(PER_HEAD)
"""The fields of `PER_HEAD` of a call that has none of them."""

_make_call = Call._make  # an eighth faster than the class

# Beyond any sequence; the number of a row or key can be added without leaving int64.
_FAR = 2**63 - 2**32

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes of arrays and tensors, in the order of `Dtype` in kernel.h."""

# Looking up a dtype is forty times as fast as asking for its name. bfloat16 and the other byte order are added when
# they first come.
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
    """Return the argument as an array of one of the four float dtypes, not copied."""
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


def _are_finite(array: Array) -> bool:
    return 0 not in np.isfinite(array).tobytes()  # for a few numbers an eighth of the time of `all`


def _learn(dtype: np.dtype[Any]) -> bool:
    if dtype.name in FLOATS:
        _CODES[dtype] = FLOATS.index(dtype.name)
    return dtype in _CODES


def float_code(dtype: np.dtype[Any]) -> int:
    """Return the number that kernel.h gives to a float dtype."""
    return _CODES[dtype]


def validate_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], names: Names = QKV) -> int:
    """Return the number of query heads; shapes that do not fit together raise."""
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
    """Build the error for shapes that do not fit; it names the first fault."""
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
    hint = _SWAP_AXES if query[-2] == key[-2] < min(query[-3], key[-3]) else ""
    return InvalidValueError(
        q, f"must have a multiple of {k}'s {key[-3]} heads, got {query[-3]} heads in shape {query}{hint}"
    )


# Only in errors: a shape that can be computed may be what was meant.
_SWAP_AXES = "; if the axes are [..., L, H, D], swap them with .swapaxes(-3, -2)"


def validate_band(
    causal: bool,
    causal_offset: int | None,
    window: Window | None,
    queries: int,
    keys: int,
    scale_asks: bool,
    uses_positions: bool,
) -> Band:
    """Return the visible range of a call that is causal, has a window, an offset or a field that uses positions.

    With `scale_asks` the scale may ask for positions, which an offset then moves without hiding a key.
    """
    causal = checks.flag("causal", causal)
    if causal_offset is not None and not (causal or window is not None or scale_asks or uses_positions):
        raise InvalidValueError(
            "causal_offset",
            f"must come with causal=True, a window, {', '.join(POSITIONAL)} or a policy that asks for positions, "
            f"got causal_offset={causal_offset!r} alone, which would hide nothing",
        )
    needs_offset = causal or window is not None or uses_positions
    offset = _validate_offset(causal_offset, needs_offset, queries, keys)
    left, right = (None, None) if window is None else _validate_window(window)
    # Python's integers have no limit: they are added up first, and bounded once.
    first = OPEN_BELOW if left is None else _bound(offset - left)
    last = OPEN_ABOVE if right is None else _bound(offset + right)
    offset = _bound(offset)
    return Band(first, min(last, offset) if causal else last, offset)


def _bound(position: int) -> int:
    return max(-_FAR, min(position, _FAR))


def _validate_offset(causal_offset: int | None, is_needed: bool, queries: int, keys: int) -> int:
    if causal_offset is None:
        if queries != keys and is_needed:
            # More queries than keys: grouped heads look so where the sequence should be.
            hint = _SWAP_AXES if queries > keys > 0 == queries % keys else ""
            raise InvalidValueError(
                "causal_offset",
                f"must be given with {queries} queries and {keys} keys: {keys - queries} aligns the ends, 0 the starts"
                f"{hint}",
            )
        return 0
    return checks.integer("causal_offset", causal_offset)


def _validate_window(window: Window) -> Window:
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise InvalidValueError("window", f"must be a pair (left, right), got {window!r}")
    kind = "an integer or None"
    left, right = (None if side is None else checks.integer("window", side, 0, each=True, kind=kind) for side in window)
    return (left, right)


def validate_softcap(softcap: float) -> float:
    """Return a soft cap that is positive and finite."""
    return checks.number("softcap", softcap, above=0.0)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Return whether arrays of one shape broadcast to another."""
    # np.broadcast_to would do the same, in half the time of a small call. A loop takes half the time of `all`.
    for own, other in zip(reversed(shape), reversed(to), strict=False):
        if own != 1 and own != other:
            return False
    return len(shape) <= len(to)


def _validate_mask(mask: npt.ArrayLike, shape: tuple[int, ...]) -> Array:
    array = _as_array("mask", mask)
    if array.dtype != np.bool_ and array.dtype not in _CODES and not _learn(array.dtype):
        raise refuse_mask_dtype("mask", array.dtype)
    require_mask_shape("mask", array.shape, shape)
    if array.dtype != np.bool_:
        warn_of_truth_values(array)
    return array


def refuse_mask_dtype(name: str, dtype: Any) -> InvalidTypeError:
    """Build the error for a mask that is neither boolean nor floating."""
    hint = f"; {name} != 0 makes zeros and ones boolean" if "int" in str(dtype) else ""
    return InvalidTypeError(name, f"must be boolean (True: may attend) or additive float, got {dtype}{hint}")


def require_mask_shape(name: str, shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    """Refuse a mask that does not broadcast to `[..., H, L, S]`."""
    if not broadcasts(shape, to):
        shape, to = tuple(shape), tuple(to)
        hint = ""
        if len(to) == 4 and shape == (to[0], to[3]):
            hint = f"; {name}[:, None, None, :] is a mask of keys per batch entry"
        elif len(to) == 4 and shape == (to[0], to[2], to[3]):
            hint = f"; {name}[:, None] is a mask for all heads of a batch entry"
        elif shape[-2:] == (to[-3], to[-3]):
            hint = _SWAP_AXES
        raise InvalidValueError(name, f"must broadcast to [..., H, L, S] = {to}, got {shape}{hint}")


def check_per_head(check: Callable[[str, Any, Any], Any], per_head: PerHead, query: Any) -> Sequence[Any]:
    """Return the fields of `PER_HEAD` as `check(name, argument, query)` returns them; None for the absent ones."""
    if per_head is None:
        return NONE_PER_HEAD
    checked = []
    for name in PER_HEAD:
        given = per_head.get(name)
        checked.append(None if given is None else check(name, given, query))
    return checked


def require_per_head_shape(name: str, shape: tuple[int, ...], query: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a field per head is kept; the argument's must be `[H]`, or broadcast to `[..., H]`."""
    shape, heads = tuple(shape), tuple(query[:-2]) or (1,)
    if FIELDS[name].lacks == 2:
        if shape != heads[-1:]:
            raise InvalidValueError(name, f"must have shape [H] = {heads[-1:]}, got {shape}")
        return shape
    if not broadcasts(shape, heads):
        raise InvalidValueError(name, f"must broadcast to [..., H] = {heads}, got {shape}")
    return (1,) if len(query) == 2 else (*shape, 1)  # broadcasts to [..., H, L]


def require_scale_shape(name: str, kind: str, shape: tuple[int, ...], rows: tuple[int, ...], rows_known: bool) -> None:
    """Refuse a scale that does not broadcast to `[..., H, L]`; errors call it an array or tensor (`kind`).

    One axis would silently mean rows: it is refused for several heads, unless the scale counts rows (`rows_known`).
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


def _validate_per_head(name: str, given: npt.ArrayLike, query: tuple[int, ...]) -> Array:
    array = _as_array(name, given)
    if array.dtype not in _CODES and not _learn(array.dtype):
        raise InvalidTypeError(name, f"must be floating, one {FIELDS[name].per_head} per query head, got {array.dtype}")
    shape, wide = require_per_head_shape(name, array.shape, query), array.astype(np.float64)
    wide = wide if shape == array.shape else wide.reshape(shape)
    if not _are_finite(wide):
        raise InvalidValueError(name, f"must be finite, got {given!r}")
    return wide


def _validate_scale(
    scale: ScaleLike, query: Array, keys: int, mask: Array | None, band: Band
) -> tuple[Policy | None, Array | None, float]:
    """Return the policy if it prepares q and k, and the scale: array that broadcasts to `[..., H, L]`, or float."""
    policy, given, name, rows_known = None, scale, "scale", False
    if isinstance(scale, str | Policy):
        policy = resolve(scale)
        context = ScaleContext(
            d_k=query.shape[-1],
            positions=np.arange(query.shape[-2], dtype=np.int64) + (band.offset or 0),
            count_visible=lambda: count_visible(query, keys, mask, band),
        )
        given, name = policy.factor(context), f"the factor of policy {policy}"
        # The array in a temperature comes from the caller; other policies count rows themselves.
        rows_known = not isinstance(policy, Temperature)
        policy = None if type(policy).prepare is Policy.prepare else policy
    if type(given) is float and math.isfinite(given):
        return policy, None, given
    array = _as_array(name, cast(npt.ArrayLike, given))
    if array.dtype.name not in FLOATS and array.dtype.kind not in "iu":
        raise InvalidTypeError(name, f"must be a number, an array, a policy or its name, got {given!r}")
    array = array.astype(np.float64)
    if not _are_finite(array):
        raise InvalidValueError(name, f"must be finite, got {given!r}")
    if not array.ndim:
        return policy, None, float(array)
    require_scale_shape(name, "array", array.shape, query.shape[:-1], rows_known)
    return policy, array, 0.0
