"""Watching with sqrtdk's own attention in place of the model's: torch's operation, MultiheadAttention, the registry."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.errors import InvalidValueError
from sqrtdk.torch.functional import attention, scaled_dot_product_attention
from sqrtdk.torch.huggingface import attend
from sqrtdk.torch.internals import without_modes
from sqrtdk.torch.watch.lineage import ratio_of
from sqrtdk.torch.watch.parts import Candidate
from sqrtdk.torch.watch.seen import Seen
from sqrtdk.torch.watch.session import Watch

_LEFT = "stays as the model computes it, and is measured beside it"


class FusedWatch(Watch):
    """Computes what it can reach with sqrtdk; measures the rest beside the model, and lists it."""

    def __init__(self, model: nn.Module, sample_rows: int | None, every: int, scale: Any) -> None:
        super().__init__(model, sample_rows, every)
        self._scale = scale
        self._needs_every_call = scale is not None
        # Of eager functions: whether sqrtdk computes the same, by module, found out at its first call.
        self._agrees: dict[nn.Module, bool] = {}

    def __enter__(self) -> Seen:
        seen = super().__enter__()
        with ExitStack() as stack:
            stack.push(super().__exit__)
            stack.enter_context(_without_fast_path())
            for holder, name, make in (
                (functional, "scaled_dot_product_attention", self._replace_torch),
                (functional, "multi_head_attention_forward", self._replace_multihead),
                (_find_registry(), "get_interface", self._replace_registry),
            ):
                if holder is not None:
                    stack.enter_context(_replaced(holder, name, make(getattr(holder, name))))
            self._replacements = stack.pop_all()
        return seen

    def __exit__(self, *details: Any) -> None:
        self._replacements.close()

    # What stands in for the model's own

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
            wanted = self._thread.wanted
            if self._scale is None and wanted is None:
                return scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            result: Any = attention(
                self._without_factor(query, key),
                key,
                value,
                scale=scale if self._scale is None else self._scale,
                mask=attn_mask,
                causal=is_causal,
                causal_offset=0 if is_causal else None,
                dropout=dropout_p,
                statistics=False,
                weights=wanted is not None,
            )
            if wanted is not None:
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
            # torch computes weights and output by hand where weights are wanted; sqrtdk gives both.
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
            # An eager function adds the mask that it is given, and nothing is causal by itself.
            kwargs = {**kwargs, "is_causal": False, "sliding_window": None}
            if module not in self._agrees:
                self._agrees[module] = _agree(eager, module, query, key, value, attention_mask, kwargs)
            if not self._agrees[module]:
                return eager(module, query, key, value, attention_mask, **kwargs)
            return self._attend(module, query, key, value, attention_mask, **kwargs)

        return fused

    def _attend(self, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._scale is not None:
            query, kwargs = self._without_factor(query, key), {**kwargs, "scaling": self._scale}
        return attend(module, query, key, *args, **kwargs)

    def _without_factor(self, query: Tensor, key: Tensor) -> Tensor:
        """The query without what it and the key were multiplied by since their projections: a scale replaces it."""
        recogniser = self._thread.recogniser
        if self._scale is None or recogniser is None:
            return query
        factor = 1.0
        with without_modes(), torch.no_grad():
            for name, x in (("q", query), ("k", key)):
                ratio = ratio_of(x.detach(), recogniser.memory.lineage_of(x))
                if ratio.factor is None and not ratio.normalised:
                    raise InvalidValueError(
                        f"scale cannot replace that of {recogniser.path or 'the model'}: what multiplies {name} before "
                        f"the call cannot be told ({ratio.reason}); use fuse=True without scale"
                    )
                factor *= 1.0 if ratio.factor is None else ratio.factor
        return query if factor == 1.0 else query / factor

    # What was not reached

    def _take(self, candidate: Candidate) -> None:
        how = None if candidate.call is None else candidate.call.how
        if how != "sqrtdk":
            note = f"not fused: {candidate.path or 'the model itself'} {_LEFT}"
            if self._scale is not None:
                self._thread.error = InvalidValueError(
                    f"scale cannot reach the attention of {candidate.path or 'the model itself'}, which the model "
                    "computes in code of its own; use watch without scale"
                )
            with self._lock:
                if note not in self.seen.notes:
                    self.seen.notes.append(note)
        super()._take(candidate)


def _find_registry() -> Any:
    """The class of transformers that hands out attention functions, if transformers is in use."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    return interface if hasattr(interface, "get_interface") else None


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
    """Let torch's layers call attention instead of computing it inside one operation."""
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
    """Whether sqrtdk computes what a module's eager function computes: some models have one of their own."""
    given = {**kwargs, "dropout": 0.0}
    with without_modes(), torch.no_grad():
        expected = eager(module, query, key, value, mask, **given)[0]
        try:
            output = attend(module, query, key, value, mask, **given)[0]
        except (InvalidValueError, TypeError):
            return False
        if output.shape != expected.shape:
            return False
        close = torch.isclose(output, expected, rtol=1e-2, atol=64 * _resolution(output) * float(value.abs().max()))
        if mask is not None and mask.is_floating_point():
            sees_nothing = (mask <= torch.finfo(mask.dtype).min / 2).all(dim=-1).transpose(1, 2)[..., None]
            close = close | sees_nothing
        return bool(close.all())


def _resolution(x: Tensor) -> float:
    return math.sqrt(float(torch.finfo(x.dtype).eps)) / 8
