"""Hints for likely mistakes: argument names of other libraries, masks of truth values, scales meant as divisors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sqrtdk.errors import InvalidTypeError, is_own_call, unknown_name, warn
from sqrtdk.scales import default_factor

Function = TypeVar("Function", bound=Callable[..., Any])

_MASK = "is called mask= here: boolean (True: may attend) or additive float"

# Each completes the sentence that begins with the name.
HINTS = {
    "is_causal": "is called causal= here",
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "attn_bias": _MASK,
    "key_padding_mask": "is mask=~key_padding_mask[:, None, None, :] here: True means that a key may be attended to",
    "softmax_scale": "is called scale= here",
    "sm_scale": "is called scale= here",
    "scaling": "is called scale= here",
    "temperature": "divides and scale= multiplies: temperature=τ is scale=1/τ",
    "tau": "divides and scale= multiplies: tau=τ is scale=1/τ",
    "dropout_p": "is called dropout= in sqrtdk.torch.attention",
    "dropout": "is an argument of sqrtdk.torch.attention: arrays have no dropout",
    "enable_gqa": "is not needed: the heads of q may be a multiple of those of k",
    "window_size": "is called window=(left, right) here: None, not -1, leaves a side open",
}


def hide_unknown(function: Function) -> Function:
    """Return the function, with a signature for readers that leaves out its `**unknown`."""
    signature = inspect.signature(function)
    named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def explain_unknown(function: Callable[..., Any], unknown: Iterable[str]) -> InvalidTypeError:
    """Build the error for arguments that a function does not have; the first one is explained.

    >>> print(explain_unknown(lambda q, scale: q, {"temperature": 8.0}))
    temperature= divides and scale= multiplies: temperature=τ is scale=1/τ
    >>> print(explain_unknown(lambda q, scale: q, {"scael": 1.0}))
    unknown argument 'scael'; known: q, scale; did you mean 'scale'?
    """
    name = next(iter(unknown))
    known = list(inspect.signature(function).parameters)
    error = InvalidTypeError(f"{name}= {HINTS[name]}" if name in HINTS else str(unknown_name("argument", name, known)))
    error.argument = name
    return error


def warn_of_truth_values(mask: Any) -> None:
    """Warn if a float mask holds zeros and ones and nothing else: 1 probably means "may attend", but is added.

    The search ends at the first other number, so a usual mask costs little. Takes arrays, and tensors on the CPU.
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


def warn_of_inverse_scale(scale: float, query: Any, key: Any) -> None:
    """Warn if a scale equals √dₖ or dₖ, to rounding, and 1/√dₖ or 1/dₖ was probably meant.

    Vectors of length 1 (QK norm) are multiplied by √dₖ for good reason. So the first query and the first key are read,
    and the warning needs a product of their lengths above √dₖ. That product is 1 for vectors of length 1 and about dₖ
    for entries of variance 1. Sweeps over scales meet √dₖ by chance where dₖ is small, so dₖ must be 32 at least, and
    calls from within sqrtdk are not warned of. Takes arrays, and tensors on the CPU.
    """
    d_k = query.shape[-1] if len(query.shape) > 1 and len(key.shape) > 1 else 0
    if d_k < 32:
        return
    name, at = ("√dₖ", math.sqrt(d_k)) if scale < d_k / 2 else ("dₖ", float(d_k))
    if (
        abs(scale - at) > 1e-6 * at
        or 0 in (*query.shape, *key.shape)
        or is_own_call("sqrtdk.operation", "sqrtdk.torch")
    ):
        return
    lengths = [math.hypot(*map(float, x[(0,) * (len(x.shape) - 1)].tolist())) for x in (query, key)]
    if lengths[0] * lengths[1] > math.sqrt(d_k):
        warn(
            f"scale is {scale:g}, which is {name}, and multiplies q·k; the default is 1/√dₖ = {default_factor(d_k):g}. "
            f"To divide by {name}, give scale={1 / scale:g}; if q·k is to be multiplied by {name}, ignore this"
        )
