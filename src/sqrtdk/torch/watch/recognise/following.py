"""Follows vectors from a projection to a product, through factors, norms, gains, rotations, copies and caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sqrtdk.torch.internals import unseen
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.lineage import Lineage, join, join_products, merge
from sqrtdk.torch.watch.recognise.vectors import Trace, join_traces

if TYPE_CHECKING:
    from sqrtdk.torch.watch.recognise.known_tensors import KnownTensor
    from sqrtdk.torch.watch.recognise.recogniser import Recogniser

# No query or key is assembled from more pieces than this.
_MOST_PIECES = 6

COPIES = frozenset({"_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh", "copy", "native_dropout"})
LIMITS = frozenset({"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "nan_to_num"})
NORMS = frozenset(
    {"native_layer_norm", "_fused_rms_norm", "rms_norm", "linalg_vector_norm", "norm", "native_group_norm"}
)
REDUCTIONS = frozenset({"mean", "sum", "amax", "max", "var", "var_mean", "logsumexp"})
POWERS = frozenset({"pow", "rsqrt", "sqrt", "square", "reciprocal", "exp", "tanh"})
# Outside training, batch norm applies a learnt factor and summand per column, as a projection does. No vector norm.
COLUMNWISE = frozenset({"native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"})
WRITES = frozenset({"index_copy", "index_put", "slice_scatter"})
# Operations that move entries without changing them. Zero padding adds no length.
SELECTIONS = frozenset({"constant_pad_nd", "roll", "index_select", "index", "gather", "repeat", "flip"})
_KEPT = COPIES | LIMITS

# A tensor and the known facts about it.
Known = tuple[Tensor, "KnownTensor"]


def follow(
    watcher: Recogniser, name: str, args: Any, tensors: list[Tensor], known: list[Known], output: Tensor
) -> None:
    """Record the lineage and trace of an operation's output; `known` are the input tensors with known facts."""
    vectors = [(tensor, fact) for tensor, fact in known if fact.lineage is not None]
    if name == "copy" or name in WRITES:
        _follow_writing(watcher, name, tensors, vectors, output)
        return
    x, fact = vectors[0]
    lineage = fact.lineage
    assert lineage is not None
    is_first = x is tensors[0]
    other = None
    if name in ("mul", "div") and len(args) > 1 and len(vectors) == 1:
        other = args[1 if is_first else 0]
    after: Lineage | None = None
    if other is not None and (is_first or name == "mul"):
        after = _multiply(watcher, name, lineage, other, output)
    if after is None and is_first:
        if lineage.is_exact and (name in _KEPT or name in SELECTIONS):
            after = lineage
        elif lineage.is_exact and name == "add" and len(tensors) > 1 and _is_bias(watcher, tensors[1], output):
            after = watcher.add_bias(lineage, tensors[1])
        elif name in NORMS and output.shape == x.shape:
            after = watcher.normalise(lineage)
        elif name in NORMS or name in REDUCTIONS or name in POWERS:
            # A vector's length is one number. Dividing the vector by this number is later recognised as a norm.
            after = lineage.lost(name, reduced=name not in POWERS)
    if after is None:
        after = _merge(watcher, name, tensors, vectors, output)
    if len(vectors) > 1:
        after = replace(after, products=join_products(one.lineage for _, one in vectors if one.lineage is not None))
    trace = move(vectors, output)
    if trace is None and name in SELECTIONS and is_first:
        trace = resample(x, fact, output)
    watcher.memory.write(output, lineage=after, trace=trace)


def _multiply(watcher: Recogniser, name: str, lineage: Lineage, other: Any, output: Tensor) -> Lineage | None:
    """Return the lineage after multiplying by a number or by a learnt tensor, or None for any other factor."""
    factor = _as_number(other)
    if factor:
        return lineage.times(factor if name == "mul" else 1.0 / factor)
    if name == "mul" and isinstance(other, Tensor) and other.numel() < output.numel() and watcher.is_learnt(other):
        return lineage.gain(other.detach())
    return None


def _merge(watcher: Recogniser, name: str, tensors: list[Tensor], vectors: list[Known], output: Tensor) -> Lineage:
    """Return the lineage of an output that no constant factor relates to its input vectors.

    Lengths are measured only where they carry information. Measured everywhere, they would cost as much as the model's
    own norms and activations.
    """
    known = [(tensor, fact.lineage) for tensor, fact in vectors if fact.lineage is not None]
    first = known[0][1]
    if len(known) > 1:
        first = next((lineage for _, lineage in known if not lineage.reduced), first)
        if _is_own_norm(known, name):
            return watcher.normalise(first)
        # A sum of vectors from several projections does not have the length of any of them.
        if name in ("add", "sub") and len({lineage.number for _, lineage in known}) > 1:
            return first.lost(name)
    for _, lineage in known:
        if lineage.is_lost:
            return first.lost(name)
    met = {id(tensor) for tensor, _ in known}
    if _changes_lengths(name, output, [tensor for tensor in tensors if id(tensor) not in met]):
        return first.lost(name)
    with unseen():
        after = merge(known, name)
    return after if len(after.pieces) <= _MOST_PIECES else first.lost(name)


def _follow_writing(
    watcher: Recogniser, name: str, tensors: list[Tensor], vectors: list[Known], output: Tensor
) -> None:
    """Record the lineage of memory that vectors are written into: all of it, some columns, or part of a cache."""
    written = next(((tensor, fact) for tensor, fact in vectors if tensor is not tensors[0]), None)
    if written is None:
        return
    source, fact = written
    first_column = _read_columns(output) if name == "copy" else None
    if first_column is not None:
        _follow_columns(watcher, output, *written, first_column)
    elif name == "copy" and output.numel() == _count_stored(output):
        watcher.memory.write(output, lineage=fact.lineage, trace=move([written], output))
    else:  # keys written into a cache
        follow_join(watcher, output, [tensor for tensor, _ in vectors if tensor is tensors[0] or tensor is source], 0)


def _follow_columns(watcher: Recogniser, output: Tensor, source: Tensor, fact: KnownTensor, first: int) -> None:
    """Record that a source was written into some columns of an output that is assembled in pieces."""
    before = watcher.memory.lineage_of(output)
    assert fact.lineage is not None
    with unseen():
        part = merge([(source, fact.lineage)], "copy")
    parts = () if before is None or first == 0 else before.parts
    if sum(columns for columns, _ in parts) == first:
        parts += ((source.shape[-1], part),)
    watcher.memory.write(output, lineage=replace(part, parts=parts))


def follow_join(watcher: Recogniser, output: Tensor, tensors: list[Tensor], axis: int) -> None:
    """Record that an output consists of tensors joined along an axis."""
    memory = watcher.memory
    if not output.is_nested:
        tensors = [tensor for tensor in tensors if tensor.numel()]
    facts = [memory.look_up(tensor) for tensor in tensors]
    lineages = [None if fact is None else fact.lineage for fact in facts]
    if not any(lineage is not None for lineage in lineages):
        return
    if len(tensors) == 1 and lineages[0] is not None and not output.is_nested and tensors[0].shape == output.shape:
        # A copy, such as the first keys of a cache.
        lineage = replace(lineages[0], fresh=False)
        memory.write(
            output, lineage=lineage, trace=None if facts[0] is None else move([(tensors[0], facts[0])], output)
        )
        return
    trace = None
    if not output.is_nested:
        traces = [None if fact is None else fact.trace for fact in facts]
        trace = join_traces(list(zip(traces, tensors, strict=True)), axis, output)
    with unseen():
        joined = join(tensors, lineages, axis)
    if joined is not None:
        joined = replace(joined, products=join_products(one for one in lineages if one is not None))
    memory.write(output, lineage=joined, trace=trace)


def move(known: list[Known], output: Tensor) -> Trace | None:
    """Return the trace of an elementwise output, from the first input with the same shape, or None without one."""
    for tensor, fact in known:
        if fact.trace is not None and not output.is_nested and tensor.shape == output.shape:
            return fact.trace.move(tensor, output)
    return None


def resample(x: Tensor, fact: KnownTensor | None, output: Tensor) -> Trace | None:
    """Return the trace of a tensor after a selection of its tokens, or None if no trace is known."""
    return None if fact is None or fact.trace is None or output.is_nested else fact.trace.resample(x, output)


def _is_own_norm(known: list[tuple[Tensor, Lineage]], operation: str) -> bool:
    """Return whether vectors are multiplied by a number computed from themselves, as in x·rsqrt(mean(x²))."""
    if operation not in ("mul", "div"):
        return False
    reduced = {(lineage.name, lineage.number) for _, lineage in known if lineage.reduced}
    whole = {(lineage.name, lineage.number) for _, lineage in known if not lineage.reduced}
    return bool(reduced & whole)


def _changes_lengths(operation: str, output: Tensor, unknown: list[Tensor]) -> bool:
    """Return whether an unknown tensor makes lengths uninformative: it is added, or has a number per entry."""
    if operation in ("add", "sub"):
        return bool(unknown)
    # A rotation's cosines are shared by all heads. The operands of a gate or a dropout are not, and have no head axis.
    has_no_heads = output.ndim <= 3 and 1 not in output.shape[:-1]
    return operation in ("mul", "div") and has_no_heads and any(x.numel() == output.numel() for x in unknown)


def _is_bias(watcher: Recogniser, tensor: Tensor, output: Tensor) -> bool:
    """Return whether a tensor is a learnt vector, or one vector per head, that is the same for all tokens."""
    if not watcher.is_learnt(tensor):
        return False
    if tensor.ndim == 1 or (tensor.ndim > 1 and tensor.shape[-2] == 1):
        return True
    return tensor.ndim == 2 and output.ndim == 4


def _count_stored(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _read_columns(written: Tensor) -> int | None:
    """Return the first written column if some columns of all vectors in a storage were written, else None."""
    if written.ndim < 2 or written.stride(-1) != 1 or not written.numel():
        return None
    apart = [stride for stride, size in zip(written.stride()[:-1], written.shape[:-1], strict=True) if size > 1]
    width = min(apart, default=0)
    if width <= written.shape[-1] or written.numel() // written.shape[-1] * width != _count_stored(written):
        return None
    return int(written.storage_offset()) % width


def _as_number(value: Any) -> float | None:
    """Return a number, also from a CPU tensor with one entry, or None for any other value."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 and value.is_cpu and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) else None
