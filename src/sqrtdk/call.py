"""One checked call of attention, for arrays and tensors alike: what is given, which keys are visible, what is wanted.

Shape legend: H query heads, G key/value heads, L queries, S keys, D = dₖ, V = dᵥ; `...` any leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, get_type_hints

from sqrtdk.scales import Policy
from sqrtdk.theory.softmax import namespace_of

# The limits of kernel.h that leave a side of the visible range open.
OPEN_BELOW, OPEN_ABOVE = -(2**63), 2**63 - 1

# Mask entries that are looked at at once when visible keys are counted.
_COUNTED_AT_ONCE = 2**18


class Band(NamedTuple):
    """The visible range: query i, at position i + offset, sees key j if first ≤ j − i ≤ last.

    The offset is None where queries and keys have no positions in common (cross-attention).
    """

    first: int = OPEN_BELOW
    last: int = OPEN_ABOVE
    offset: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether it hides nothing."""
        return self.first == OPEN_BELOW and self.last == OPEN_ABOVE

    def sees(self, rows: Any, keys: Any) -> Any:
        """Which keys `[s]` each row `[l]` sees, both integer arrays or tensors: boolean `[l, s]`, None for all."""
        if self.is_open:
            return None
        apart = keys - rows[:, None]
        if self.first == OPEN_BELOW:
            return apart <= self.last
        if self.last == OPEN_ABOVE:
            return apart >= self.first
        return (apart >= self.first) & (apart <= self.last)

    def distances(self, rows: Any, keys: Any) -> Any:
        """How far behind each row `[l]` each key `[s]` lies, j − i − offset: integers `[l, s]`, negative before it."""
        return keys - rows[:, None] - (self.offset or 0)

    def keys_of(self, rows: slice, keys: int) -> slice:
        """The keys that lie in the range of some of the rows."""
        start = 0 if self.first == OPEN_BELOW else min(max(rows.start + self.first, 0), keys)
        stop = keys if self.last == OPEN_ABOVE else min(max(rows.stop + self.last, start), keys)
        return slice(start, stop)

    def count_keys(self, rows: Any, keys: int) -> Any:
        """How many of the keys each row `[l]` (an integer array or tensor) sees."""
        # Clipped before they are subtracted: an open or far side is near the limits of int64.
        most = (rows + min(self.last, keys)).clip(-1, keys - 1)
        least = (rows + self.first).clip(0, keys)
        return (most - least + 1).clip(0, None)


OPEN, ALIGNED = Band(), Band(offset=0)


class Wanted(NamedTuple):
    """What is asked of an engine.

    Args:
        statistics: the numbers of `AttentionStatistics`.
        weights: the weights `[..., H, L, S]`.
        saved: what a backward pass starts from.
        derivatives: results made of operations that torch differentiates in its turn.
    """

    statistics: bool = False
    weights: bool = False
    saved: bool = False
    derivatives: bool = False


class GradientRequest(NamedTuple):
    """What a backward pass is given, and whether it is to give gradients that not everybody needs.

    Args:
        output: ∂loss/∂output `[..., H, L, V]`.
        weights: ∂loss/∂weights `[..., H, L, S]`, or None.
        scale: whether the gradient of the scale is wanted.
        mask: whether that of an additive mask is.
        derivatives: results made of operations that torch differentiates in its turn.
    """

    output: Any
    weights: Any = None
    scale: bool = True
    mask: bool = False
    derivatives: bool = False

    def gives(self, name: str, call: Call) -> bool:
        """Whether the gradient of a field of the call is among the results: as the request says, or if it is there."""
        asked: bool = getattr(self, name, getattr(call, name) is not None)
        return asked


class Field(NamedTuple):
    """What a field of a call is to those who pass it on: torch's operators, autograd, vmap, the kernel's binding.

    Args:
        schema: its type in a schema of torch.
        lacks: how many axes of the query it is without when it is broadcast in full; None for what is no array.
        is_differentiable: whether it can have a gradient.
    """

    schema: str
    lacks: int | None = None
    is_differentiable: bool = False


class Call(NamedTuple):
    """A call whose arguments have been checked: NumPy arrays or torch tensors as they were given, never copied here.

    This is the one table of its fields: arrays first, then numbers, in the order of kernel.h.

    Args:
        query, key, value: `[..., H, L, D]`, `[..., G, S, D]`, `[..., G, S, V]`, or without the axis of heads.
        scale: broadcasts to `[..., H, L]`; None: `factor` is the scale.
        mask: boolean or additive, broadcasts to `[..., H, L, S]`.
        sinks: `[H]`; tensors may have batch axes in front.
        alibi: broadcasts to `[..., H, L]`: slopes; slope·(j − i − offset) is added to the logits.
        seed: draws the dropout; an integer, or a tensor.
        factor: the scale where it is one number.
        softcap: 0 is none.
        dropout: the probability that a weight is dropped.
        band: the visible range.
        policy: prepares q and k before the product, where it has to; arrays only, tensors come prepared.
    """

    query: Annotated[Any, Field("Tensor", 0, True)]
    key: Annotated[Any, Field("Tensor", 0, True)]
    value: Annotated[Any, Field("Tensor", 0, True)]
    scale: Annotated[Any, Field("Tensor?", 1, True)] = None
    mask: Annotated[Any, Field("Tensor?", 0, True)] = None
    sinks: Annotated[Any, Field("Tensor?", 2, True)] = None
    alibi: Annotated[Any, Field("Tensor?", 1, True)] = None
    seed: Annotated[Any, Field("Tensor?")] = None
    factor: Annotated[float, Field("float")] = 1.0
    softcap: Annotated[float, Field("float")] = 0.0
    dropout: Annotated[float, Field("float")] = 0.0
    band: Band = OPEN
    policy: Policy | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The fields of `ARRAYS`."""
        return self[: len(ARRAYS)]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The arrays and the seed."""
        return self[:TENSORS]

    @property
    def rows(self) -> tuple[int, ...]:
        """`[..., H, L]`, the shape of what there is one of per row."""
        return tuple(self.query.shape[:-1])

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """`[..., H]`; (1,) for a call without an axis of heads."""
        return tuple(self.query.shape[:-2]) or (1,)

    @property
    def heads(self) -> int:
        """H."""
        return int(self.heads_shape[-1])

    @property
    def groups(self) -> int:
        """G."""
        return int(self.key.shape[-3]) if len(self.key.shape) > 2 else 1

    @property
    def shared(self) -> int:
        """H/G, the query heads that share a key/value head."""
        return self.heads // max(self.groups, 1)

    @property
    def queries(self) -> int:
        """L."""
        return int(self.query.shape[-2])

    @property
    def keys(self) -> int:
        """S."""
        return int(self.key.shape[-2])

    @property
    def d_v(self) -> int:
        """V."""
        return int(self.value.shape[-1])

    @property
    def has_far_softcap(self) -> bool:
        """Whether the soft cap, or a quotient by it, may pass what float32 can hold."""
        return self.softcap != 0.0 and not 2.0**-60 <= self.softcap <= 2.0**60

    @property
    def logits_shape(self) -> tuple[int, ...]:
        """`[..., H, L, S]`, with an axis of heads in any case: what masks broadcast to."""
        return (*self.heads_shape, self.query.shape[-2], self.key.shape[-2])


def _read_table() -> dict[str, Field]:
    hints = get_type_hints(Call, include_extras=True)
    table = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    return {**table, **dict.fromkeys(Band._fields, Field("SymInt"))}


FIELDS = _read_table()
"""The fields of a flat call, in its order: those of the table, and those of the band."""

ARRAYS = tuple(name for name, field in FIELDS.items() if field.lacks is not None)
"""The fields that are arrays or tensors of the call's numbers; they come first."""

TENSORS = len(ARRAYS) + 1
"""How many items of a flat call are tensors: the arrays, and the seed behind them."""

_OWN = len(FIELDS) - len(Band._fields)


def flatten(call: Call) -> tuple[Any, ...]:
    """The call as the flat arguments that torch's operators, autograd functions and the kernel take.

    An offset that is not known is 0: nobody who asks for it does without one.
    """
    first, last, offset = call.band
    return (*call[:_OWN], first, last, offset or 0)


def restore(flat: Iterable[Any]) -> Call:
    """The call that was flattened."""
    *own, first, last, offset = flat
    return Call._make((*own, Band(first, last, offset), None))


class Forward(NamedTuple):
    """What an engine gives for a call; None, or no elements in a traced graph, for what was not wanted.

    Args:
        output: `[..., H, L, V]`.
        measures, counts: float64 and int64, a block `[..., H, L]` for each of `MEASURES` and `COUNTS` of `statistics`.
        weights: `[..., H, L, S]`.
        saved: each row's largest logit and its sum of exponentials relative to it, float64 `[2, ..., H, L]`.
        exact: the output before it was rounded, where gradients are to start from more digits than it has.
    """

    output: Any
    measures: Any = None
    counts: Any = None
    weights: Any = None
    saved: Any = None
    exact: Any = None


class Backward(NamedTuple):
    """The gradients of `DIFFERENTIABLE`, in its order: of query, key, value and mask in their shapes, of others per row
    `[..., H, L]`.

    None, or no elements in a traced graph, for what was not asked for or is not there.
    """

    query: Any
    key: Any
    value: Any
    scale: Any = None
    mask: Any = None
    sinks: Any = None
    alibi: Any = None


DIFFERENTIABLE = tuple(name for name, field in FIELDS.items() if field.is_differentiable)
"""The fields that can have a gradient."""
BY_ROW = tuple(name for name in DIFFERENTIABLE if FIELDS[name].lacks)
"""Those of which it is given per row."""
assert Backward._fields == DIFFERENTIABLE


def row_numbers(query: Any) -> Any:
    """0, 1, …, L − 1 beside the query: an int64 array, or a tensor on its device."""
    return namespace_of(query).arange(query.shape[-2], device=query.device)


def as_truth(mask: Any) -> Any:
    """Whether each entry of a mask lets its key be seen; bytes that are neither 0 nor 1 count as true."""
    xp = namespace_of(mask)
    return mask.view(xp.uint8) != 0 if mask.dtype == xp.bool else mask != -xp.inf


def count_visible(query: Any, keys: int, mask: Any, band: Band) -> Any:
    """How many keys each row sees, integers that broadcast to `[..., H, L]`: along the mask's own axes, never more."""
    xp = namespace_of(query)
    rows = row_numbers(query)
    if mask is None:
        return band.count_keys(rows, keys)
    if mask.ndim > len(query.shape):  # one head without an axis, which its mask may have
        mask = mask[0]
    mask = mask[(None,) * (2 - mask.ndim)]
    mask = xp.broadcast_to(mask, (*mask.shape[:-1], keys))
    queries = rows.shape[0]
    every_key = xp.arange(keys, device=rows.device)
    at_once = max(_COUNTED_AT_ONCE // max(keys * math.prod(mask.shape[:-2]), 1), 1)
    counts = []
    for start in range(0, max(queries, 1), at_once):
        i = slice(start, min(start + at_once, queries))
        visible = as_truth(mask if mask.shape[-2] == 1 else mask[..., i, :])
        in_range = band.sees(rows[i], every_key)
        if in_range is None:
            seen = visible.sum(-1)
            counts.append(xp.broadcast_to(seen, (*seen.shape[:-1], i.stop - i.start)))
        else:
            counts.append((visible & in_range).sum(-1))
    return xp.concatenate(counts, -1)
