"""Maps each torch operation to its effect on the scores, weights and projections that are followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.torch.internals import bind, storage_address, without_modes
from sqrtdk.torch.minus_infinity import hides
from sqrtdk.torch.watch.recognise.changes import CHANGES, change
from sqrtdk.torch.watch.recognise.coordinates import STILL, Place, UnevenError
from sqrtdk.torch.watch.recognise.copying import replace
from sqrtdk.torch.watch.recognise.following import (
    COLUMNWISE,
    NORMS,
    POWERS,
    REDUCTIONS,
    SELECTIONS,
    WRITES,
    Known,
    follow,
    follow_join,
    move,
    resample,
)
from sqrtdk.torch.watch.recognise.lineage import Lineage, join_products
from sqrtdk.torch.watch.recognise.parts import Candidate
from sqrtdk.torch.watch.recognise.products import see_factors, see_filter, see_product, see_sum, see_weighted
from sqrtdk.torch.watch.recognise.scores import Scores, Term

if TYPE_CHECKING:
    from sqrtdk.torch.watch.recognise.recogniser import Recogniser


def _tensors(args: Any) -> list[Tensor]:
    flat: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            flat.append(arg)
        elif isinstance(arg, list | tuple):
            flat.extend(one for one in arg if isinstance(one, Tensor))
    return flat


def _see_product(watcher: Recogniser, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    if name in ("mm", "bmm"):
        return see_product(watcher, args[0], args[1], result)
    given = bind(func, args, kwargs)
    if name == "mv":
        # A vector is a matrix with one column. Its product with a learnt matrix is a projection.
        if watcher.is_learnt(given["self"]):
            return see_product(watcher, given["vec"][None], given["self"].t(), result[None])
        return see_product(watcher, given["self"], given["vec"][:, None], result[:, None])
    one, other = ("batch1", "batch2") if name == "baddbmm" else ("mat1", "mat2")
    alpha, beta = float(given["alpha"]), float(given["beta"])
    return see_product(watcher, given[one], given[other], result, alpha, given["self"], beta)


def _see_softmax(watcher: Recogniser, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    x, axis = args[0], args[1]
    if x.ndim >= 3 or watcher.memory.look_up(x) is not None:
        watcher.see_softmax(x, axis, result, name == "_safe_softmax")


def _see_elementwise(watcher: Recogniser, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    output = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(output, Tensor):
        return False
    tensors = _tensors(args)
    known = _look_up_all(watcher, tensors)
    is_of_data = False
    for _, fact in known:
        is_of_data = is_of_data or not fact.is_learnt
    origin, folded = None, 1.0
    if name in ("clone", "_to_copy"):
        first = known[0][1] if known and known[0][0] is args[0] else None
        origin, folded = watcher.memory.origin_of(args[0], first), 1.0 if first is None else first.folded
    if known and (output.is_floating_point() or output.is_complex()):
        _carry_on(watcher, name, func, args, kwargs, tensors, known, output)
    elif watcher.memory.look_up(output) is not None:
        watcher.memory.write(output)  # overwritten by an unknown operation
    # Models multiply by numbers with the tensor overload. The scalar overload comes from torch's own attention.
    if func is torch.ops.aten.mul.Scalar:
        watcher.memory.note(output, folded=float(args[1]))
    elif origin is not None and output.is_floating_point():
        watcher.memory.note(output, folded=folded, origin=origin)
    return is_of_data


def _look_up_all(watcher: Recogniser, tensors: list[Tensor]) -> list[Known]:
    look_up = watcher.memory.look_up
    return [(tensor, fact) for tensor in tensors if (fact := look_up(tensor)) is not None]


def _carry_on(
    watcher: Recogniser,
    name: str,
    func: Any,
    args: Any,
    kwargs: Any,
    tensors: list[Tensor],
    known: list[Known],
    output: Tensor,
) -> None:
    """Update the facts about the output of an elementwise operation from those about its inputs."""
    scored, has_candidates, has_lineage = [], False, False
    for tensor, fact in known:
        if fact.scores is not None:
            scored.append((tensor, fact.scores))
        has_candidates = has_candidates or bool(fact.candidates)
        has_lineage = has_lineage or fact.lineage is not None
    if scored and _carry_scores(watcher, name, bind(func, args, kwargs), scored, known, output):
        return
    if name == "sum" and (known[0][1].factors is not None or known[0][1].is_pair):
        axes = args[1] if len(args) > 1 else None
        if isinstance(axes, list | tuple) and len(axes) == 1 and see_sum(watcher, *known[0], axes[0], output):
            return
    if has_candidates:
        _carry_candidates(watcher, name, _candidates_of(known), tensors, known, output)
        return
    if has_lineage:
        follow(watcher, name, args, tensors, known, output)
        if name == "mul" and len(known) == 2:
            see_factors(watcher, known, output)
    elif watcher.memory.look_up(output) is not None:
        watcher.memory.write(output)
    if scored and name == "logsumexp" and isinstance(lineage := scored[0][1].product.q.lineage, Lineage):
        # The normaliser of rows, which joins blocks of keys, is not scores.
        watcher.memory.write(output, lineage=lineage.lost(name))
    elif scored and name not in REDUCTIONS:
        _derive(watcher, name, *scored[0], output)


def _carry_scores(
    watcher: Recogniser,
    name: str,
    given: dict[str, Any],
    scored: list[tuple[Tensor, Scores]],
    known: list[Known],
    output: Tensor,
) -> bool:
    """Return whether the output is still scores, or scores divided by their sum."""
    scored.sort(key=lambda pair: not pair[1].is_mixed)
    if name == "div" and _judge_division(watcher, scored, given, output):
        return True
    projected = [id(tensor) for tensor, fact in known if fact.lineage or fact.scores or fact.candidates]
    # The output of a copy holds the source's entries, not its former ones.
    for x, scores in scored if name != "copy" else [pair for pair in scored if pair[0] is given["src"]]:
        after = change(name, x, scores, given, output, projected)
        if after is not None:
            watcher.memory.write(output, scores=after)
            return True
    return False


def _candidates_of(known: list[Known]) -> tuple[Candidate, ...]:
    return tuple(dict.fromkeys(candidate for _, fact in known for candidate in fact.candidates))


def _carry_candidates(
    watcher: Recogniser,
    name: str,
    candidates: tuple[Candidate, ...],
    tensors: list[Tensor],
    known: list[Known],
    output: Tensor,
) -> None:
    """Record that weights stay weights through elementwise operations, until they are multiplied with values."""
    if name == "exp":
        for candidate in candidates:
            candidate.is_softmax |= candidate.needs_exponential
            candidate.needs_exponential = False
    if name == "mul" and see_weighted(watcher, candidates, tensors, output):
        return
    kept = candidates if output.ndim >= 2 else ()
    watcher.memory.write(output, candidates=kept, trace=move(known, output) if kept else None)


def _derive(watcher: Recogniser, name: str, x: Tensor, scores: Scores, output: Tensor) -> None:
    """Record scores after an operation other than a softmax. Multiplied with values, they may be attention."""
    if scores.stage == "sum" or output.shape != x.shape or name in NORMS or not scores.product.is_followed:
        return
    if scores.stage == "exp":
        reason = f"exponentials of its scores pass {name} and are not divided by their sum"
    elif name in CHANGES:
        return  # a product that was added to another tensor, such as a residual stream: not scores
    else:
        reason = f"its scores pass {name} instead of a softmax"
    candidate = Candidate(scores.product.stack, 0, 0, reason=reason, is_softmax=False)
    watcher.memory.note(output, candidates=(candidate,), trace=scores.trace.move(x, output))


@lru_cache(maxsize=1024)
def _kind_of(name: str) -> str:
    """Return the kind of an unlisted operation by name: "filter", "other", or "apart" if it ignores input entries."""
    if re.search(r"_like|new_|empty|zeros|ones|full|rand|bernoulli|arange|_nested_get", name):
        return "apart"
    return "filter" if re.search(r"linear|mm|matmul|conv|gem[mv]", name) else "other"


def see_unknown(watcher: Recogniser, name: str, args: Any, result: Any) -> None:
    """Handle an unlisted operation: weights stay weights, and the factors of vectors become unknown."""
    kind = _kind_of(name)
    if kind == "apart":
        return
    tensors = _tensors(args)
    if kind == "filter":
        if isinstance(result, Tensor) and tensors:
            see_filter(watcher, name, args, result)
        return
    known = _look_up_all(watcher, tensors)
    if not known:
        return
    plain = name.removeprefix("aten::").removesuffix("_")
    candidates = _candidates_of(known)
    for output in _tensors([result]):
        address = storage_address(output)
        is_view = not name.endswith("_") and any(storage_address(tensor) == address for tensor in tensors)
        if is_view or not output.is_floating_point():
            continue
        scored = next(((tensor, fact.scores) for tensor, fact in known if fact.scores is not None), None)
        lineages = {fact.lineage.number: fact.lineage for _, fact in known if fact.lineage is not None}
        if candidates:
            kept = candidates if output.ndim >= 2 else ()
            watcher.memory.write(output, candidates=kept, trace=move(known, output) if kept else None)
        elif lineages:
            lost = next(iter(lineages.values())).lost(plain)
            # An output computed from several projections may be scores.
            is_projection = lost.is_projection and len(lineages) == 1
            lost = replace(lost, is_projection=is_projection, products=join_products(lineages.values()))
            trace = move(known, output) or resample(*known[0], output)
            watcher.memory.write(output, lineage=lost, trace=trace)
        if scored is not None and not candidates:
            _derive(watcher, plain, *scored, output)


def _judge_division(
    watcher: Recogniser, scored: list[tuple[Tensor, Scores]], given: dict[str, Any], output: Tensor
) -> bool:
    """Return whether exponentials of scores are divided by their own sum, which is a hand-written softmax."""
    stages = {scores.stage: (x, scores) for x, scores in scored}
    if set(stages) != {"exp", "sum"} or stages["exp"][1].product is not stages["sum"][1].product:
        return False
    (x, scores), (total, _) = stages["exp"], stages["sum"]
    if given["self"] is not x or total.ndim != x.ndim:
        return False
    axis = next((i for i, size in enumerate(x.shape) if total.shape[i] != size), x.ndim - 1)
    trace = scores.trace.move(x, output)
    candidate = watcher.judge(scores, x, output, axis)
    watcher.memory.write(output, candidates=() if candidate is None else (candidate,), trace=trace)
    return True


def _see_cat(watcher: Recogniser, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    given = bind(func, args, kwargs)
    tensors, axis = list(given["tensors"]), given["dim"] % result.ndim
    known = _look_up_all(watcher, tensors)
    candidates = _candidates_of(known)
    if candidates:
        watcher.memory.write(result, candidates=candidates)
        return
    scored = [at for at, tensor in enumerate(tensors) if any(tensor is one and fact.scores for one, fact in known)]
    if len(scored) == 1:
        at = scored[0]
        width = sum(tensor.shape[axis] for tensor in tensors[:at] + tensors[at + 1 :])
        if width <= _MOST_SINKS and _add_columns(watcher, tensors, at, axis, result):
            return
    if not result.is_floating_point():
        return
    if name == "stack":
        tensors = [tensor.unsqueeze(axis) for tensor in tensors]
    follow_join(watcher, result, tensors, axis)


def _add_columns(watcher: Recogniser, tensors: list[Tensor], at: int, axis: int, result: Tensor) -> bool:
    """Return whether columns were joined to the keys of scores: sinks, which take part in the softmax."""
    x = tensors[at]
    fact = watcher.memory.look_up(x)
    assert fact is not None
    assert fact.scores is not None
    scores = fact.scores
    try:
        place = scores.layout.locate(x)
    except UnevenError:
        return False
    if scores.stage != "logits" or scores.front or (scores.sinks and at) or place.steps[axis].row:
        return False
    steps = tuple(STILL if i == axis else step for i, step in enumerate(place.steps))
    beside = [tensor for tensor in tensors[:at] + tensors[at + 1 :] if tensor.numel()]
    columns = [tensor.narrow(axis, at, 1) for tensor in beside for at in range(tensor.shape[axis])]
    sinks = tuple(Term(column, Place(tuple(column.shape), steps, place.start)) for column in columns)
    front = sum(tensor.shape[axis] for tensor in tensors[:at])
    start = place.start._replace(key=place.start.key - front)
    longer = Place(tuple(result.shape), place.steps, start)
    watcher.memory.write(result, scores=scores.then(result, longer, sinks=scores.sinks + sinks, front=front))
    return True


def _see_pad(watcher: Recogniser, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Record constant columns beside the keys of scores as sinks. Any other padding is a selection."""
    given = bind(func, args, kwargs)
    x, (before, after, *others) = given["self"], given["pad"]
    fact = watcher.memory.look_up(x)
    if fact is not None and fact.scores is not None and before >= 0 and after >= 0 and before + after <= _MOST_SINKS:
        value = float(given["value"])
        with without_modes():
            columns = [x.new_full((*x.shape[:-1], count), value) for count in (before, after)]
        if (
            not hides(value)
            and not any(others)
            and _add_columns(watcher, [columns[0], x, columns[1]], 1, x.ndim - 1, result)
        ):
            return
    _see_elementwise(watcher, name, func, args, kwargs, result)


def _see_list(watcher: Recogniser, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Record sequences of different lengths that are packed into one nested tensor."""
    follow_join(watcher, result, list(args[0]), 0)


_PRODUCTS = ("mm", "bmm", "baddbmm", "addmm", "mv")
# Limit for columns joined to scores that count as sinks; sinks are few.
_MOST_SINKS = 64
VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("transpose", "permute", "t", "slice", "select", "unsqueeze", "squeeze", "expand", "split", "unbind"),
        *("split_with_sizes", "as_strided", "unfold", "view_as_real", "view_as_complex", "diagonal", "detach_"),
        *("view", "_unsafe_view", "reshape"),
    )
)
"""Operations whose output shares the memory of the input."""
_ELEMENTWISE = CHANGES | COLUMNWISE | NORMS | REDUCTIONS | POWERS | WRITES | SELECTIONS

# True if the result is known to be computed from more than learnt tensors.
Handler = Callable[["Recogniser", str, Any, Any, Any, Any], bool | None]


def _name_handlers() -> Iterator[tuple[str, Handler, str]]:
    for names, handler in (
        (_PRODUCTS, _see_product),
        (("_softmax", "_safe_softmax"), _see_softmax),
        (_ELEMENTWISE, _see_elementwise),
        (("cat", "stack"), _see_cat),
        (("constant_pad_nd",), _see_pad),
        (("_nested_tensor_from_tensor_list",), _see_list),
    ):
        for name in names:
            yield f"aten::{name}", handler, name
            yield f"aten::{name}_", handler, name


HANDLERS: dict[str, tuple[Handler, str]] = {name: (handler, plain) for name, handler, plain in _name_handlers()}
"""Handler and plain name of each listed operation, in place or not."""
