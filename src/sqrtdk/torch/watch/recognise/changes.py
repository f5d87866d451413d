"""Records how scores change between the product and the softmax: numbers, masks, caps, exponentials and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sqrtdk.torch.watch.recognise.coordinates import STILL, Layout, Place, UnevenError
from sqrtdk.torch.watch.recognise.following import COPIES, LIMITS, REDUCTIONS
from sqrtdk.torch.watch.recognise.scores import Done, Scores, Term

CHANGES = COPIES | LIMITS | {"mul", "div", "add", "sub", "exp", "tanh", "neg", "where", "masked_fill"}
"""Operations whose output may still be scores."""


def change(
    name: str, x: Tensor, scores: Scores, given: dict[str, Any], output: Tensor, projected: list[int]
) -> Scores | None:
    """Return the scores after one operation, or None if the output is no longer scores."""
    if name in REDUCTIONS:
        scores.product.has_logsumexp |= name == "logsumexp"
        if name == "sum" and scores.stage == "exp":
            return Scores(
                scores.product, Layout.of(output, Place(tuple(output.shape), (STILL,) * output.ndim)), stage="sum"
            )
        return None
    if scores.stage == "sum":
        return scores.then(output, Place(tuple(output.shape), (STILL,) * output.ndim))
    if name not in CHANGES:
        return None
    try:
        place = scores.layout.locate(x if x.shape == output.shape else x.expand(output.shape))
    except UnevenError:
        return None
    if name in COPIES or name in LIMITS:
        return scores.then(output, place)
    if name == "exp":
        return scores.then(output, place, stage="exp") if scores.stage == "logits" else None
    if name == "tanh":
        return scores.then(output, place, Done("tanh", None))
    if name == "neg":
        return scores.then(output, place, Done("multiply", -1.0))
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
    return None


def _change_by(
    name: str, x: Tensor, scores: Scores, place: Place, given: dict[str, Any], output: Tensor, projected: list[int]
) -> Scores | None:
    """Return the scores after arithmetic with a number or a tensor, or None if the output is no longer scores."""
    is_first = given["self"] is x
    other = given["other"] if is_first else given["self"]
    if isinstance(other, Tensor):
        by: float | Term = Term(other.expand(output.shape), place, id(other) in projected)
    else:
        by = float(other)
    if scores.stage == "exp":
        if name in ("mul", "div") and not (isinstance(by, Term) and by.varies_along_keys()):
            return scores.then(output, place)  # a factor per row cancels in the later division
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
