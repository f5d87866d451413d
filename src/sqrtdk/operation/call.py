"""Records of one checked call of attention, for arrays and tensors: its fields, the results wanted, the results.

Shape legend: H query heads, G key/value heads, L queries, S keys, D = dₖ, V = dᵥ; `...` any leading axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints

from sqrtdk.operation.visibility import OPEN, Band
from sqrtdk.scales import Policy


class Wanted(NamedTuple):
    """Results that a forward pass is asked for.

    Args:
        statistics: the numbers of `AttentionStatistics`.
        weights: the weights `[..., H, L, S]`.
        saved: the numbers that a backward pass starts from.
        derivatives: results made of operations that torch can differentiate again.
    """

    statistics: bool = False
    weights: bool = False
    saved: bool = False
    derivatives: bool = False


class GradientRequest(NamedTuple):
    """Gradients that a backward pass is given, and which optional gradients it returns.

    Args:
        output: ∂loss/∂output `[..., H, L, V]`.
        weights: ∂loss/∂weights `[..., H, L, S]`, or None.
        scale: whether the gradient of the scale is wanted.
        mask: whether the gradient of an additive mask is wanted.
        derivatives: results made of operations that torch can differentiate again.
    """

    output: Any
    weights: Any = None
    scale: bool = True
    mask: bool = False
    derivatives: bool = False

    def gives(self, name: str, call: Call) -> bool:
        """Return whether the gradient of a field is among the results: as the request says, else if the call has it."""
        asked: bool = getattr(self, name, getattr(call, name) is not None)
        return asked


class Field(NamedTuple):
    """Properties of a call's field that torch's operators, autograd, vmap and the kernel's binding need.

    Args:
        schema: its type in a torch schema.
        lacks: how many axes fewer than the query it has when it is broadcast in full; None if it is no array.
        is_differentiable: whether it can have a gradient.
        per_head: the meaning of one of its numbers, where an argument gives one number per query head.
        uses_positions: whether the positions of queries and keys change its effect.
    """

    schema: str
    lacks: int | None = None
    is_differentiable: bool = False
    per_head: str | None = None
    uses_positions: bool = False


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
    sinks: Annotated[Any, Field("Tensor?", 2, True, "logit")] = None
    alibi: Annotated[Any, Field("Tensor?", 1, True, "slope", uses_positions=True)] = None
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
        """`[..., H, L]`, the shape of arrays with one number per row."""
        return tuple(self.query.shape[:-1])

    @property
    def heads_shape(self) -> tuple[int, ...]:
        """`[..., H]`; (1,) for a call without a head axis."""
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
        """Whether the soft cap, or a quotient by it, may leave the range of float32."""
        return self.softcap != 0.0 and not 2.0**-60 <= self.softcap <= 2.0**60

    @property
    def logits_shape(self) -> tuple[int, ...]:
        """`[..., H, L, S]`, always with a head axis: the shape that masks broadcast to."""
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


PER_HEAD = tuple(name for name, field in FIELDS.items() if field.per_head)
"""The fields that an argument gives as one number per query head; they follow the mask."""
POSITIONAL = tuple(name for name, field in FIELDS.items() if field.uses_positions)
"""The fields that need common positions of queries and keys."""
assert ARRAYS[-len(PER_HEAD) :] == PER_HEAD

PerHead = Mapping[str, Any] | None
"""Arguments of a call for the fields of `PER_HEAD`, by name; None where all of them are absent."""


def has_positions(per_head: PerHead) -> bool:
    """Return whether one of the arguments per head needs common positions of queries and keys."""
    if per_head is not None:
        for name in POSITIONAL:
            if per_head.get(name) is not None:
                return True
    return False


def full_shape(name: str, call: Call) -> tuple[int, ...]:
    """Return the shape to which an array of the call broadcasts."""
    if name == "mask":
        return call.logits_shape
    lacks = FIELDS[name].lacks
    return call.heads_shape if lacks == 2 else call.rows if lacks == 1 else tuple(getattr(call, name).shape)


def flatten(call: Call) -> tuple[Any, ...]:
    """Return the call as the flat arguments that torch's operators, autograd functions and the kernel take.

    An unknown offset becomes 0: every call that uses an offset has one.
    """
    first, last, offset = call.band
    return (*call[:_OWN], first, last, offset or 0)


def list_numbers(call: Call) -> tuple[Any, ...]:
    """Return the flat arguments that follow the tensors of a call."""
    first, last, offset = call.band
    return (*call[TENSORS:_OWN], first, last, offset or 0)


def restore(flat: Iterable[Any]) -> Call:
    """Return the call from its flat arguments."""
    *own, first, last, offset = flat
    return Call._make((*own, Band(first, last, offset), None))


class Forward(NamedTuple):
    """Results of a forward pass; None, or a tensor without elements in a traced graph, for those not wanted.

    Args:
        output: `[..., H, L, V]`.
        measures, counts: float64 and int64, a block `[..., H, L]` for each of `MEASURES` and `COUNTS` of `statistics`.
        weights: `[..., H, L, S]`.
        saved: each row's largest logit and its sum of exponentials relative to it, float64 `[2, ..., H, L]`.
        exact: the output before it was rounded, where gradients need more digits than it has.
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

    None, or a tensor without elements in a traced graph, for gradients not asked for and for absent fields.
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
"""The fields whose gradient is given per row."""
assert Backward._fields == DIFFERENTIABLE
