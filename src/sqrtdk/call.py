"""A checked call of attention: its arguments in one layout, its scale worked out, its rows cut into tiles.

Shape legend: N batch entries (all leading axes), G key/value heads, R query heads per key/value head (H = G·R),
L queries, S keys, D = dₖ, V = dᵥ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.reference import Rows
from sqrtdk.scales import Policy, ScaleContext, Sqrt, Temperature, resolve

Array = npt.NDArray[Any]
Window = tuple[int | None, int | None]
ScaleLike = float | npt.ArrayLike | str | Policy | None

# Logits held at once, in elements: 2 MiB of float64 per temporary, whatever the sequence length.
BLOCK_ELEMENTS = 2**18

Tile = tuple[slice, slice, slice, slice]


@dataclass(frozen=True)
class Call:
    """A call whose arguments have been checked, in the common layout q `[N, G, R, L, D]`, k and v `[N, G, 1, S, ·]`."""

    q: Array
    k: Array
    v: Array
    batch: tuple[int, ...]
    head_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    policy: Policy
    factor: Array
    mask: Array | None
    causal: bool
    offset: int
    window: Window
    softcap: float | None
    sinks: Array | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of q, k, v and the output."""
        return self.q.dtype

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """N, G, R, L."""
        return tuple(self.q.shape[:-1])

    @property
    def queries(self) -> int:
        """L."""
        return int(self.q.shape[3])

    @property
    def keys(self) -> int:
        """S."""
        return int(self.k.shape[3])

    def restore(self, array: Array) -> Array:
        """`[N, G, R, L, ...]` back to the caller's `[..., H, L, ...]`."""
        return array.reshape(*self.batch, *self.head_shape, self.queries, *array.shape[4:])

    def tiles(self) -> Iterator[Tile]:
        """Blocks of rows (batch, kv head, all its query heads, query) of about BLOCK_ELEMENTS logits each."""
        batch, groups, shared, queries = self.rows_shape
        row = max(shared * self.keys, 1)
        rows_at_once = max(BLOCK_ELEMENTS // row, 1)
        heads_at_once = max(rows_at_once // max(queries, 1), 1)
        batch_at_once = max(heads_at_once // max(groups, 1), 1)
        for n in range(0, batch, batch_at_once):
            for g in range(0, groups, heads_at_once):
                for i in range(0, queries, rows_at_once):
                    yield (
                        slice(n, min(n + batch_at_once, batch)),
                        slice(g, min(g + heads_at_once, groups)),
                        slice(0, shared),
                        slice(i, min(i + rows_at_once, queries)),
                    )

    def rows(self, tile: Tile) -> Rows:
        """The float64 rows of a tile, with its masks worked out."""
        n, g, _, _ = tile
        # C order whatever the caller's strides: the product's rounding follows the layout.
        q, k = self.q[tile].astype(np.float64, order="C"), self.k[n, g].astype(np.float64, order="C")
        with np.errstate(all="ignore"):
            q, k = self.policy.prepare(q, k)
        visible, bias = self.visibility(tile)
        return Rows(
            q=q,
            k=k,
            v=self.v[n, g].astype(np.float64, order="C"),
            scale=self.factor[tile][..., None],
            visible=visible,
            bias=bias,
            softcap=self.softcap,
            sink=None if self.sinks is None else self.sinks[None, g, :, None, None],
        )

    def visibility(self, tile: Tile) -> tuple[Array, Array | None]:
        """Which keys each row of a tile sees, broadcastable to `[n, g, R, l, S]`, and what is added to the scores."""
        visible = self._in_range(tile[3])
        if self.mask is None:
            return visible, None
        n, g, _, i = tile
        shared = all(stride == 0 for stride in self.mask.strides[: len(self.batch)])
        entries = range(1) if shared else range(n.start, n.stop)
        # Sliced before it is copied: a broadcast mask never grows beyond the tile.
        part = np.stack([self._mask_of(entry)[g, :, i] for entry in entries])
        if part.dtype == np.bool_:
            return visible & part, None
        bias = part.astype(np.float64)
        return visible & (bias != -np.inf), bias

    def _mask_of(self, entry: int) -> Array:
        assert self.mask is not None
        mask = self.mask[np.unravel_index(entry, self.batch)] if self.batch else self.mask
        return mask.reshape(*self.rows_shape[1:3], *mask.shape[-2:])

    def _in_range(self, i: slice) -> Array:
        at = np.arange(i.start, i.stop, dtype=np.int64)[:, None] + self.offset
        keys = np.arange(self.keys, dtype=np.int64)[None, :]
        left, right = self.window
        visible = np.ones((i.stop - i.start, self.keys), dtype=bool)
        if self.causal:
            visible &= keys <= at
        if left is not None:
            visible &= keys >= at - left
        if right is not None:
            visible &= keys <= at + right
        return visible

    def count_visible(self) -> Array:
        """Number of visible keys per row, `[N, G, R, L]`."""
        count = np.zeros(self.rows_shape, dtype=np.int64)
        for tile in self.tiles():
            count[tile] = self.visibility(tile)[0].sum(axis=-1)
        return count


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
) -> Call:
    """Check every argument of `sqrtdk.attention` and bring them into one layout; wrong ones raise, none is modified."""
    query, key, value = _validate_arrays(q, k, v)
    heads = query.shape[-3] if query.ndim > 2 else 1
    groups = key.shape[-3] if key.ndim > 2 else 1
    shared = heads // groups if groups else 1
    batch = query.shape[:-3]
    (queries, d_k), keys = query.shape[-2:], key.shape[-2]
    count = math.prod(batch)
    rows_shape = (count, groups, shared, queries)
    offset = _validate_offset(causal, causal_offset, window, queries, keys)
    call = Call(
        q=query.reshape(*rows_shape, d_k),
        k=key.reshape(count, groups, 1, keys, d_k),
        v=value.reshape(count, groups, 1, keys, value.shape[-1]),
        batch=batch,
        head_shape=(heads,) if query.ndim > 2 else (),
        key_shape=key.shape,
        policy=Sqrt(),
        factor=np.ones(rows_shape),
        mask=_validate_mask(mask, (*query.shape[:-1], keys), heads),
        causal=causal,
        offset=offset,
        window=_validate_window(window),
        softcap=_validate_softcap(softcap),
        sinks=_validate_sinks(sinks, heads, groups),
    )
    policy, factor = _validate_scale(scale, call, query.shape[:-1])
    return replace(call, policy=policy, factor=factor)


# Beyond any sequence, and three of them still add up within an int64.
_FAR = 2**61

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _as_array(name: str, value: npt.ArrayLike) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InvalidValueError(
            f"{name} must be an array or nested lists of one shape, got neither ({error})"
        ) from None


def as_float_array(name: str, value: npt.ArrayLike) -> Array:
    """The argument as an array of one of the four float dtypes, not copied."""
    array = _as_array(name, value)
    if array.dtype.name not in _FLOATS:
        raise InvalidTypeError(f"{name} must be a {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]} array, got {array.dtype}")
    return array


def _validate_arrays(q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike) -> tuple[Array, Array, Array]:
    query, key, value = as_float_array("query", q), as_float_array("key", k), as_float_array("value", v)
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidTypeError(
            "query, key and value must have one dtype, "
            f"got {query.dtype}, {key.dtype} and {value.dtype}; convert them with .astype"
        )
    if query.ndim < 2:
        raise InvalidValueError(f"query must have shape [..., H, L, D] or [L, D], got {query.shape}")
    if query.shape[-1] == 0:
        raise InvalidValueError(f"query must have at least one feature (D ≥ 1), got shape {query.shape}")
    d_k = query.shape[-1]
    head = "..., G, " if query.ndim > 2 else ""
    for name, array in (("key", key), ("value", value)):
        if array.ndim != query.ndim:
            raise InvalidValueError(f"{name} must have {query.ndim} axes like query, got shape {array.shape}")
        if array.shape[:-3] != query.shape[:-3]:
            raise InvalidValueError(
                f"{name} must have the leading axes {query.shape[:-3]} of query, got shape {array.shape}"
            )
    if key.shape[-1] != d_k:
        raise InvalidValueError(f"key must have shape [{head}S, {d_k}] ({d_k} from query), got {key.shape}")
    if value.shape[-2] != key.shape[-2]:
        raise InvalidValueError(
            f"value must have shape [{head}{key.shape[-2]}, V] ({key.shape[-2]} keys from key), got {value.shape}"
        )
    if query.ndim > 2:
        heads, groups = query.shape[-3], key.shape[-3]
        if value.shape[-3] != groups:
            raise InvalidValueError(f"value must have {groups} heads like key, got shape {value.shape}")
        if heads != groups and (groups == 0 or heads % groups):
            raise InvalidValueError(
                f"query must have a multiple of key's {groups} heads, got {heads} heads in shape {query.shape}"
            )
    return query, key, value


def _validate_offset(causal: bool, causal_offset: int | None, window: Window | None, queries: int, keys: int) -> int:
    if causal_offset is None:
        if (causal or window is not None) and queries != keys:
            raise InvalidValueError(
                f"causal_offset must be given with {queries} queries and {keys} keys: "
                f"{keys - queries} aligns the ends, 0 the starts"
            )
        return 0
    if isinstance(causal_offset, bool) or not isinstance(causal_offset, int | np.integer):
        raise InvalidTypeError(f"causal_offset must be an integer, got {causal_offset!r}")
    return max(-_FAR, min(int(causal_offset), _FAR))


def _validate_window(window: Window | None) -> Window:
    if window is None:
        return (None, None)
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise InvalidValueError(f"window must be a pair (left, right), got {window!r}")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | np.integer) or side < 0):
            raise InvalidValueError(f"window must hold whole numbers ≥ 0 or None, got {window!r}")
    left, right = (None if side is None else min(int(side), _FAR) for side in window)
    return (left, right)


def _validate_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, int | float | np.number):
        raise InvalidTypeError(f"softcap must be a number, got {softcap!r}")
    if not (math.isfinite(softcap) and softcap > 0):
        raise InvalidValueError(f"softcap must be positive and finite, got {softcap}")
    return float(softcap)


def _validate_mask(mask: npt.ArrayLike | None, shape: tuple[int, ...], heads: int) -> Array | None:
    if mask is None:
        return None
    array = _as_array("mask", mask)
    if array.dtype != np.bool_ and array.dtype.name not in _FLOATS:
        raise InvalidTypeError(f"mask must be boolean (True: may attend) or additive float, got {array.dtype}")
    if len(shape) == 2:
        shape = (heads, *shape)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise InvalidValueError(f"mask must broadcast to [..., H, L, S] = {shape}, got {array.shape}") from None


def _validate_sinks(sinks: npt.ArrayLike | None, heads: int, groups: int) -> Array | None:
    if sinks is None:
        return None
    array = _as_array("sinks", sinks)
    if array.dtype.name not in _FLOATS:
        raise InvalidTypeError(f"sinks must be floating, one logit per query head, got {array.dtype}")
    if array.shape != (heads,):
        raise InvalidValueError(f"sinks must have shape [H] = ({heads},), got {array.shape}")
    wide = array.astype(np.float64)
    if not np.isfinite(wide).all():
        raise InvalidValueError(f"sinks must be finite, got {sinks!r}")
    return wide.reshape(groups, -1) if groups else wide.reshape(0, 1)


def _validate_scale(scale: ScaleLike, call: Call, rows: tuple[int, ...]) -> tuple[Policy, Array]:
    """The policy (its `prepare` matters) and the factor of every row `[N, G, R, L]`."""
    if scale is None or isinstance(scale, str | Policy):
        policy = resolve(scale)
        positions = np.arange(call.queries, dtype=np.int64) + call.offset
        context = ScaleContext(
            d_k=call.q.shape[-1], positions=positions, count_visible=lambda: call.restore(call.count_visible())
        )
        given: Any = policy.factor(context)
        what = f"the factor of policy {policy}"
    else:
        policy, given, what = Sqrt(), scale, "scale"
    array = _as_array(what, given)
    if array.dtype.name not in _FLOATS and array.dtype.kind not in "iu":
        raise InvalidTypeError(f"{what} must be a number, an array, a policy or its name, got {given!r}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise InvalidValueError(f"{what} must be finite, got {given!r}")
    if array.ndim == 1 and len(rows) > 1 and (what == "scale" or isinstance(policy, Temperature)):
        raise InvalidValueError(
            f"{what} must broadcast to [..., H, L] = {rows}; a one-dimensional array {array.shape} would mean rows: "
            "use scale[:, None] for one number per head, scale[None, :] for one per query"
        )
    try:
        spread = np.broadcast_to(array, rows)
    except ValueError:
        raise InvalidValueError(f"{what} must broadcast to [..., H, L] = {rows}, got {array.shape}") from None
    return policy, spread.reshape(call.rows_shape)
