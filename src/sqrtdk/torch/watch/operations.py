"""What each of torch's operations means for scores, weights and projections that are being followed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.torch.internals import bind, operator_name
from sqrtdk.torch.watch.coordinates import STILL, Layout, Place, UnevenError
from sqrtdk.torch.watch.scores import Done, Scores, Term

if TYPE_CHECKING:
    from sqrtdk.torch.watch.recognise import Recogniser


def _plain(name: str) -> str:
    return name.removeprefix("aten::").removesuffix("_")


def _tensors(args: Any) -> list[Tensor]:
    flat: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            flat.append(arg)
        elif isinstance(arg, list | tuple):
            flat.extend(one for one in arg if isinstance(one, Tensor))
    return flat


def _see_product(watcher: Recogniser, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    name = _plain(operator_name(func))
    given = bind(func, args, kwargs)
    if name in ("mm", "bmm"):
        watcher.see_product(given["self"], given["mat2"], result)
    elif name == "baddbmm":
        watcher.see_product(
            given["batch1"], given["batch2"], result, float(given["alpha"]), given["self"], float(given["beta"])
        )
    elif name == "addmm":
        watcher.see_product(
            given["mat1"], given["mat2"], result, float(given["alpha"]), given["self"], float(given["beta"])
        )


def _see_softmax(watcher: Recogniser, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    x, axis = args[0], args[1]
    if x.ndim >= 3 or watcher.memory.look_up(x) is not None:
        watcher.see_softmax(x, axis, result, func is torch.ops.aten._safe_softmax.default)


def _see_view(watcher: Recogniser, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    x = args[0]
    if x.ndim == 4 and result.ndim == 3 and result.shape[0] == x.shape[0] * x.shape[1]:
        watcher.memory.note(result, split=(x.shape[0], x.shape[1]))


def _see_elementwise(watcher: Recogniser, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    output = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(output, Tensor):
        return
    _carry_on(watcher, func, args, kwargs, output)
    # Models multiply by numbers with the overload for tensors; this one comes from inside torch's own attention.
    if func is torch.ops.aten.mul.Scalar:
        watcher.memory.note(output, folded=float(args[1]))
    elif func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default) and output.is_floating_point():
        fact = watcher.memory.look_up(args[0])
        folded = 1.0 if fact is None else fact.folded
        watcher.memory.note(output, folded=folded, origin=watcher.memory.origin_of(args[0]))


def _carry_on(watcher: Recogniser, func: Any, args: Any, kwargs: Any, output: Tensor) -> None:
    """An operation entry by entry: what was known about an input holds, changed, for the output."""
    name = _plain(operator_name(func))
    tensors = _tensors(args)
    facts = [(tensor, fact) for tensor in tensors if (fact := watcher.memory.look_up(tensor)) is not None]
    scored = [(tensor, fact.scores) for tensor, fact in facts if fact.scores is not None]
    candidate = next((fact.candidate for _, fact in facts if fact.candidate is not None), None)
    if scored:
        given = bind(func, args, kwargs)
        if name == "div" and _judge_division(watcher, scored, given, output):
            return
        projected = [id(tensor) for tensor, fact in facts if fact.lineage is not None or fact.scores is not None]
        for x, scores in scored:
            after = _change(name, x, scores, given, output, projected)
            if after is not None:
                watcher.memory.write(output, scores=after)
                return
    if candidate is not None:
        watcher.memory.write(output, candidate=candidate if output.ndim >= 2 else None)
    elif any(fact.lineage is not None for _, fact in facts):
        _follow(watcher, name, args, tensors, output)
    elif watcher.memory.look_up(output) is not None:
        watcher.memory.write(output)  # written in place by something unknown


def _change(
    name: str, x: Tensor, scores: Scores, given: dict[str, Any], output: Tensor, projected: list[int]
) -> Scores | None:
    """The scores after one operation; None if what comes out are no scores any more."""
    if name in _REDUCTIONS:
        if name == "sum" and scores.stage == "exp":
            return Scores(
                scores.product, Layout.of(output, Place(tuple(output.shape), (STILL,) * output.ndim)), stage="sum"
            )
        return None
    if scores.stage == "sum":
        return scores.then(output, Place(tuple(output.shape), (STILL,) * output.ndim))
    if name not in _CHANGES:
        return None
    try:
        place = scores.layout.locate(x if x.shape == output.shape else x.expand(output.shape))
    except UnevenError:
        return None
    if name in _COPIES:
        return scores.then(output, place)
    if name == "exp":
        return scores.then(output, place, stage="exp") if scores.stage == "logits" else None
    if name == "tanh":
        return scores.then(output, place, Done("tanh", None))
    if name in ("mul", "div", "add", "sub"):
        return _change_by(name, x, scores, place, given, output, projected)
    if name == "masked_fill":
        hidden = Term(given["mask"].expand(output.shape), place)
        value = given["value"]
        value = float(value) if scores.stage == "logits" else (-torch.inf if float(value) == 0 else 0.0)
        return scores.then(output, place, Done("fill", hidden, value))
    if name == "where":
        kept = given["condition"].expand(output.shape)
        is_first = given["self"] is x
        other = given["other"] if is_first else given["self"]
        hidden = Term(kept.logical_not() if is_first else kept, place)
        return scores.then(output, place, Done("fill", hidden, Term(other.expand(output.shape), place)))
    if name in _LIMITS:
        return scores.then(output, place)
    return None


def _change_by(
    name: str, x: Tensor, scores: Scores, place: Place, given: dict[str, Any], output: Tensor, projected: list[int]
) -> Scores | None:
    """The scores after they met a number or a tensor."""
    is_first = given["self"] is x
    other = given["other"] if is_first else given["self"]
    if isinstance(other, Tensor):
        by: float | Term = Term(other.expand(output.shape), place, id(other) in projected)
    else:
        by = float(other)
    if scores.stage == "exp":
        if name in ("mul", "div") and not (isinstance(by, Term) and by.varies_along_keys()):
            return scores.then(output, place)  # the same for all keys of a row: it cancels in the division
        if name == "mul" and isinstance(by, Term):
            hidden = Term((by.tensor == 0), place)
            return scores.then(output, place, Done("fill", hidden, -torch.inf))
        return None
    if name in ("add", "sub"):
        sign = float(given.get("alpha", 1.0)) * (-1.0 if name == "sub" else 1.0)
        if not is_first and name == "sub":
            return scores.then(output, place, Done("multiply", -float(given.get("alpha", 1.0))), Done("add", by))
        return scores.then(output, place, Done("add", by, sign))
    if name == "div" and not is_first:
        return None
    if name == "div" and given.get("rounding_mode") is not None:
        return None
    return scores.then(output, place, Done("multiply" if name == "mul" else "divide", by))


def _judge_division(
    watcher: Recogniser, scored: list[tuple[Tensor, Scores]], given: dict[str, Any], output: Tensor
) -> bool:
    """Whether exponentials of scores are divided by their own sum: a softmax by hand."""
    stages = {scores.stage: (x, scores) for x, scores in scored}
    if set(stages) != {"exp", "sum"} or stages["exp"][1].product is not stages["sum"][1].product:
        return False
    (x, scores), (total, _) = stages["exp"], stages["sum"]
    if given["self"] is not x or total.ndim != x.ndim:
        return False
    axis = next((i for i, size in enumerate(x.shape) if total.shape[i] != size), x.ndim - 1)
    watcher.memory.write(output, candidate=watcher.judge(scores, x, output, axis))
    return True


def _follow(watcher: Recogniser, name: str, args: Any, tensors: list[Tensor], output: Tensor) -> None:
    """What becomes of a projection's output."""
    memory = watcher.memory
    first = memory.lineage_of(tensors[0])
    if name in ("copy", "index_copy", "index_put", "slice_scatter"):
        source = next((one for one in tensors[1:] if memory.lineage_of(one) is not None), None)
        if source is None:
            return
        lineage = memory.lineage_of(source)
        first_column = _read_columns(output) if name == "copy" else None
        if first_column is not None:
            watcher.follow_columns(output, source, first_column)
        elif name == "copy" and output.numel() == _count_stored(output):
            memory.write(output, lineage=lineage)
        else:  # keys written into a cache
            watcher.follow_join(output, [one for one in (tensors[0], source) if memory.lineage_of(one)], 0)
        return
    if first is not None and first.is_exact and len(args) > 0 and args[0] is tensors[0]:
        if name in _COPIES or name in _LIMITS or name in _SELECTIONS:
            memory.write(output, lineage=first)
            return
        if name in ("mul", "div") and len(args) > 1:
            factor = _as_number(args[1])
            if factor:
                memory.write(output, lineage=first.times(factor if name == "mul" else 1.0 / factor))
                return
        if name == "add" and len(tensors) > 1 and watcher.is_bias(tensors[1], output):
            memory.write(output, lineage=watcher.add_bias(first, tensors[1]))
            return
    if name == "mul" and len(tensors) == 2 and first is None:
        second = memory.lineage_of(tensors[1])
        factor = _as_number(tensors[0])
        if second is not None and second.is_exact and factor:
            memory.write(output, lineage=second.times(factor))
            return
    if first is not None and (name in _NORMS or name in _REDUCTIONS or name in _POWERS):
        # The length of a vector is one number; divided by it, the vector will be found to be normalised.
        is_norm = name in _NORMS and output.shape == tensors[0].shape
        is_number = name in _REDUCTIONS or (name in _NORMS and not is_norm)
        memory.write(output, lineage=first.lost(name, normalised=is_norm, reduced=is_number))
    else:
        watcher.follow(output, tensors, name)


def _count_stored(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _read_columns(written: Tensor) -> int | None:
    """The first column that was written, if it was some columns of all vectors in a storage."""
    if written.ndim < 2 or written.stride(-1) != 1 or not written.numel():
        return None
    apart = [stride for stride, size in zip(written.stride()[:-1], written.shape[:-1], strict=True) if size > 1]
    width = min(apart, default=0)
    if width <= written.shape[-1] or written.numel() // written.shape[-1] * width != _count_stored(written):
        return None
    return int(written.storage_offset()) % width


def _as_number(value: Any) -> float | None:
    """A number, also one that comes as a tensor of one entry on the CPU."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.is_cpu and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) else None


def _see_cat(watcher: Recogniser, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    given = bind(func, args, kwargs)
    tensors, axis = list(given["tensors"]), given["dim"] % result.ndim
    fact = watcher.memory.look_up(tensors[0])
    if fact is not None and fact.scores is not None and len(tensors) == 2 and tensors[1].shape[axis] == 1:
        try:
            place = fact.scores.layout.locate(tensors[0])
        except UnevenError:
            return
        column = Place(
            tuple(tensors[1].shape), tuple(STILL if i == axis else step for i, step in enumerate(place.steps))
        )
        longer = Place(tuple(result.shape), place.steps, place.start)
        watcher.memory.write(result, scores=fact.scores.then(result, longer, sink=Term(tensors[1], column)))
        return
    if result.is_floating_point():
        watcher.follow_join(result, tensors, axis)


_PRODUCTS = ("mm", "bmm", "baddbmm", "addmm")
_COPIES = frozenset({"_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh", "copy", "native_dropout"})
_LIMITS = frozenset({"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "nan_to_num"})
_NORMS = frozenset(
    {"native_layer_norm", "_fused_rms_norm", "rms_norm", "linalg_vector_norm", "norm", "native_group_norm"}
)
_REDUCTIONS = frozenset({"mean", "sum", "amax", "max", "var", "var_mean", "logsumexp"})
_POWERS = frozenset({"pow", "rsqrt", "sqrt", "square", "reciprocal", "exp", "tanh"})
_SHAPED = frozenset({"neg", "where", "masked_fill", "stack"})
# Outside training a factor and a summand for each column, learnt like those of a projection: no norm of vectors.
_COLUMNWISE = frozenset({"native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"})
_WRITES = frozenset({"index_copy", "index_put", "slice_scatter"})
# Entries as they were, in other places; a padding of zeros has no length.
_SELECTIONS = frozenset({"constant_pad_nd", "roll", "index_select", "index", "gather", "repeat", "flip"})

_ARITHMETIC = frozenset({"mul", "div", "add", "sub"})
_CHANGES = _COPIES | _LIMITS | _ARITHMETIC | {"exp", "tanh", "where", "masked_fill"}
_ELEMENTWISE = _CHANGES | _COLUMNWISE | _NORMS | _REDUCTIONS | _POWERS | _SHAPED | _WRITES | _SELECTIONS

HANDLERS: dict[str, Any] = {f"aten::{name}{end}": _see_product for name in _PRODUCTS for end in ("", "_")}
HANDLERS |= {f"aten::{name}": _see_softmax for name in ("_softmax", "_safe_softmax")}
HANDLERS |= {f"aten::{name}": _see_view for name in ("view", "_unsafe_view", "reshape")}
HANDLERS |= {f"aten::{name}{end}": _see_elementwise for name in _ELEMENTWISE for end in ("", "_")}
HANDLERS["aten::cat"] = _see_cat
