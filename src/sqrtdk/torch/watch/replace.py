"""Watches a model while sqrtdk computes its attention, in place of torch's functions and the transformers registry."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.errors import SqrtdkError
from sqrtdk.torch.functional import attention, scaled_dot_product_attention
from sqrtdk.torch.huggingface import attend
from sqrtdk.torch.internals import unseen
from sqrtdk.torch.minus_infinity import close_hidden, hides
from sqrtdk.torch.transformers_internals import find_registry
from sqrtdk.torch.watch.recognise.parts import Candidate
from sqrtdk.torch.watch.seen import Seen
from sqrtdk.torch.watch.session import Watch

_LEFT = "stays as the model computes it, and is measured beside it"


class FusedWatch(Watch):
    """Watch that computes attention with sqrtdk where it can, and measures and lists the rest unchanged."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # Per module, whether sqrtdk matches the eager function; determined at the first call.
        self._agrees: dict[nn.Module, bool] = {}

    def __enter__(self) -> Seen:
        seen = super().__enter__()
        with ExitStack() as stack:
            stack.push(super().__exit__)
            stack.enter_context(_without_fast_path())
            for holder, name, make in (
                (functional, "scaled_dot_product_attention", self._replace_torch),
                (functional, "multi_head_attention_forward", self._replace_multihead),
                (find_registry(), "get_interface", self._replace_registry),
            ):
                if holder is not None:
                    stack.enter_context(_replaced(holder, name, make(getattr(holder, name))))
            self._replacements = stack.pop_all()
        return seen

    def __exit__(self, *details: Any) -> None:
        self._replacements.close()

    # Replacements of the model's attention

    def _replace_torch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fused(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            if not self._thread.frames or not query.is_floating_point() or query.is_nested:
                return original(  # type: ignore[no-any-return]
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            attn_mask = None if attn_mask is None else close_hidden(attn_mask)
            wanted = self._thread.wanted
            if wanted is None:
                return scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            result: Any = attention(
                query,
                key,
                value,
                scale=scale,
                mask=attn_mask,
                causal=is_causal,
                causal_offset=0 if is_causal else None,
                dropout=dropout_p,
                statistics=False,
                weights=True,
            )
            wanted.append(result.weights)
            return result.output  # type: ignore[no-any-return]

        return fused

    def _replace_multihead(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def fused(*args: Any, **kwargs: Any) -> Any:
            if not self._thread.frames:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if not given["need_weights"]:
                return original(*args, **kwargs)
            # torch computes attention step by step if weights are requested. sqrtdk returns both output and weights.
            given["need_weights"] = False
            is_batched = given["query"].dim() == 3
            self._thread.wanted = []
            try:
                output, _ = original(**given)
                (weights,) = self._thread.wanted
            finally:
                self._thread.wanted = None
            weights = weights.mean(dim=1) if given["average_attn_weights"] else weights
            return output, weights if is_batched else weights.squeeze(0)

        return fused

    def _replace_registry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fused(registry: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function: Callable[..., Any] = original(registry, attn_implementation, default)
            if not self._thread.frames:
                return function
            if function is attend:
                return self._attend
            if function is default:
                return self._make_eager(default)
            return function

        return fused

    def _make_eager(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        def fused(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
        ) -> Any:
            # An eager function applies only the given mask, so nothing else is causal.
            kwargs = {**kwargs, "is_causal": False, "sliding_window": None}
            if module not in self._agrees:
                self._agrees[module] = _agree(eager, module, query, key, value, attention_mask, kwargs)
            if not self._agrees[module]:
                return eager(module, query, key, value, attention_mask, **kwargs)
            return self._attend(module, query, key, value, attention_mask, **kwargs)

        return fused

    def _attend(self, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(module, query, key, *args, **kwargs)

    # Attention that was not replaced

    def _take(self, candidate: Candidate) -> None:
        how = None if candidate.call is None else candidate.call.how
        if how != "sqrtdk":
            note = f"not fused: {candidate.path or 'the model itself'} {_LEFT}"
            with self._lock:
                if note not in self.seen.notes:
                    self.seen.notes.append(note)
        super()._take(candidate)


@contextmanager
def _replaced(holder: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(holder, name)
    setattr(holder, name, replacement)
    try:
        yield
    finally:
        setattr(holder, name, original)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Switch off torch's fast path in a `with` block, so that torch's layers call the replaced functions."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _agree(
    eager: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    """Return whether sqrtdk's output matches that of a module's eager function, which some models define themselves."""
    given = {**kwargs, "dropout": 0.0}
    with unseen():
        expected = eager(module, query, key, value, mask, **given)[0]
        try:
            output = attend(module, query, key, value, mask, **given)[0]
        except SqrtdkError:
            return False
        if output.shape != expected.shape:
            return False
        close = torch.isclose(output, expected, rtol=1e-2, atol=64 * _resolution(output) * float(value.abs().max()))
        if mask is not None and mask.is_floating_point():
            sees_nothing = hides(mask).all(dim=-1).transpose(1, 2)[..., None]
            close = close | sees_nothing
        return bool(close.all())


def _resolution(x: Tensor) -> float:
    return math.sqrt(float(torch.finfo(x.dtype).eps)) / 8
