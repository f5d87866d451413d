"""Describes scores between product and softmax: the two sides of the product and the changes to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from sqrtdk.torch.watch.recognise.coordinates import STILL, Layout, Place, Step, UnevenError
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.lineage import Lineage
from sqrtdk.torch.watch.recognise.vectors import Trace, Way, Weighed


class Side(NamedTuple):
    """One side of a product: vectors `[N, L, D]` with their lineage and trace."""

    vectors: Tensor
    lineage: Lineage | None
    trace: Trace | None
    # The factor that torch's own attention multiplied the vectors by.
    folded: float = 1.0


@dataclass(eq=False)
class Product:
    """Product of q `[N, L, D]` and k `[N, S, D]`, with the origin of both."""

    q: Side
    k: Side
    # Whether q is a parameter, such as the query of a pooling.
    is_query_learnt: bool = False
    # The modules that ran the product.
    stack: Any = ()
    addresses: list[int] = field(default_factory=list)
    # Whether a log-sum-exp of its rows was computed. The softmax of a row may then continue with other keys.
    has_logsumexp: bool = False

    @property
    def entries(self) -> int:
        """Number of scores."""
        return self.q.vectors.shape[0] * self.q.vectors.shape[1] * self.k.vectors.shape[1]

    @property
    def is_followed(self) -> bool:
        """Whether a side comes from a projection or a parameter. The angles of a rotation do not."""
        return self.q.lineage is not None or self.k.lineage is not None

    @property
    def is_of_projections(self) -> bool:
        """Whether both sides come from projections."""
        lineages = (self.q.lineage, self.k.lineage)
        return not self.is_query_learnt and all(one is not None and one.is_projection for one in lineages)

    @property
    def is_over_tokens(self) -> bool | None:
        """Whether the product sums over tokens, as for keys and values in linear attention.

        None if unknown.
        """
        steps = []
        for vectors, _, trace, _ in (self.q, self.k):
            try:
                steps.append(None if trace is None else trace.lay_out().step(vectors.shape[2], vectors.stride(2)))
            except UnevenError:
                steps.append(None)
        if any(step is not None and step.key for step in steps):
            return False
        return None if None in steps else all(step.row for step in steps if step is not None)


class Term(NamedTuple):
    """A tensor that was combined with scores, broadcast to their shape at that time, and the scores' place then."""

    tensor: Tensor
    place: Place
    # Whether the tensor comes from a product, such as queries times positions, and so belongs to the scores.
    is_projected: bool = False

    def varies_along_keys(self) -> bool:
        """Return whether the tensor differs between the keys of a row."""
        return any(
            step.key and size > 1 and stride
            for step, size, stride in zip(self.place.steps, self.place.shape, self.tensor.stride(), strict=True)
        )


class Done(NamedTuple):
    """One change to scores: "multiply", "divide", "add", "fill", "tanh" or "mix", by a number or a term."""

    kind: str
    by: float | Term | None
    value: float | Term | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Entries of a product after the changes in `done`. `stage` is "logits", "exp" or "sum" (of exponentials).

    `sinks` are columns joined before the keys (the first `front` of them) or after the keys.
    """

    product: Product
    layout: Layout
    done: tuple[Done, ...] = ()
    stage: str = "logits"
    sinks: tuple[Term, ...] = ()
    front: int = 0

    @property
    def is_mixed(self) -> bool:
        """Whether scores of several heads were mixed."""
        return any(one.kind == "mix" for one in self.done)

    @property
    def trace(self) -> Trace:
        """The trace of tensors computed from these scores."""
        return Trace(None, Way(Weighed(self.layout, self.product.q.vectors.shape[1])))

    def then(self, tensor: Tensor, place: Place, *done: Done, **changes: Any) -> Scores:
        """Return the scores after more changes, stored in `tensor`."""
        return replace(self, layout=Layout.of(tensor, place), done=self.done + done, **changes)


class Factors(NamedTuple):
    """Two tensors that were multiplied elementwise, broadcast to the product's shape; sums give dot products."""

    q: Side
    k: Side
    stack: Any

    def add_up(self, axis: int | None, output: Tensor) -> Scores | None:
        """Return the scores from the sum over an axis (None: vectors of one entry), or None if they are not scores.

        Axes along which the keys are broadcast belong to the queries, and vice versa.
        """
        ndim, sizes = self.q.vectors.ndim, self.q.vectors.shape
        rows, keys = _broadcast_axes(self.k.vectors), _broadcast_axes(self.q.vectors)
        if not (rows or keys) or set(rows) & set(keys) or axis in rows + keys:
            return None
        shared = [at for at in range(ndim) if at not in (*rows, *keys, axis)]
        last = [] if axis is None else [axis]
        sides = []
        for side, own, others in ((self.q, rows, keys), (self.k, keys, rows)):
            shown = side.vectors
            for at in others:
                shown = shown.narrow(at, 0, 1)
            shown = shown.permute(*shared, *own, *others, *last)
            dense = shown.contiguous()
            trace = side.trace if side.trace is None or dense is shown else side.trace.move(shown, dense)
            counts = (math.prod(sizes[at] for at in own), math.prod(sizes[at] for at in last))
            sides.append(side._replace(vectors=dense.view(-1, *counts), trace=trace))
        steps, row, key = [STILL] * ndim, 1, 1
        for at in reversed([*shared, *rows]):
            steps[at], row = Step(row, 0), row * sizes[at]
        for at in reversed(keys):
            steps[at], key = Step(0, key), key * sizes[at]
        kept = [at for at in range(ndim) if at != axis]
        place = Place(tuple(sizes[at] for at in kept), tuple(steps[at] for at in kept))
        # The sum may have kept the axis with size 1.
        product = Product(sides[0], sides[1], stack=self.stack)
        return Scores(product, Layout.of(output.view(place.shape), place))


def _broadcast_axes(tensor: Tensor) -> list[int]:
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return [at for at, (size, stride) in enumerate(shape) if size > 1 and not stride]
