"""Defines one call of attention with all its arguments, and the keys that its queries may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .layouts import is_true

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


@dataclass(frozen=True)
class Learnable:
    """Module of `sqrtdk.torch.nn` with its parameters, one set per head (`[H, ...]`) or one for all heads."""

    kind: str
    per_head: bool
    parameters: dict[str, np.ndarray]


@dataclass
class Case:
    """One call: its arrays with their memory layout, its options, and the results to check."""

    seed: int
    index: int
    front: str
    level: str
    threads: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: Any = None
    mask: np.ndarray | None = None
    causal: bool = False
    causal_offset: int | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    alibi: np.ndarray | None = None
    dropout: float = 0.0
    statistics: bool = True
    weights: bool = True
    cotangents: dict[str, np.ndarray] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    changed_keys: np.ndarray | None = None
    layouts: dict[str, str] = field(default_factory=dict)
    extremes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        return self.q.dtype.name

    @property
    def on_tensors(self) -> bool:
        return self.front not in ("arrays", "array gradients")

    @property
    def wants_gradients(self) -> bool:
        return self.front in ("array gradients", "tensor gradients")

    @property
    def normalises(self) -> bool:
        if isinstance(self.scale, Learnable):
            return self.scale.kind in ("rms", "l2")
        return isinstance(self.scale, str) and self.scale.startswith(("cosine", "qk_norm"))

    @property
    def heads(self) -> int:
        return self.q.shape[-3] if self.q.ndim > 2 else 1

    @property
    def offset(self) -> int:
        return self.causal_offset or 0

    def visible(self) -> np.ndarray:
        """Return the keys that each query may see, boolean `[..., H, L, S]`, from the rule alone."""
        queries, keys = self.q.shape[-2], self.k.shape[-2]
        # Python integers, because an offset may leave int64 when something is added to it.
        apart = np.arange(keys)[None, :] - np.arange(queries)[:, None]
        seen = np.ones((*self.q.shape[:-3], self.heads, queries, keys), dtype=bool)

        def at_most(limit: int) -> np.ndarray:
            return apart <= min(max(limit, -(10**9)), 10**9)

        if self.causal:
            seen &= at_most(self.offset)
        left, right = self.window or (None, None)
        if right is not None:
            seen &= at_most(self.offset + right)
        if left is not None:
            seen &= ~at_most(self.offset - left - 1)
        if self.mask is not None:
            seen &= is_true(self.mask) if self.mask.dtype == bool else self.mask.astype(np.longdouble) != -np.inf
        return seen

    def describe(self) -> str:
        """Return a readable description of the call; `--seed` and `--case` reproduce it exactly."""
        shapes = ", ".join(
            f"{name} {x.shape}{'' if self.layouts.get(name, 'plain') == 'plain' else ' ' + self.layouts[name]}"
            for name, x in (("q", self.q), ("k", self.k), ("v", self.v))
        )
        options = []
        for name in ("scale", "mask", "causal", "causal_offset", "window", "softcap", "sinks", "alibi", "dropout"):
            value = getattr(self, name)
            if value is None or value is False or (name == "dropout" and not value):
                continue
            if isinstance(value, np.ndarray):
                entries = f" {np.array2string(value.astype(float), precision=4)}" if 0 < value.size < 5 else ""
                layouts = [self.layouts[key] for key in (name, f"{name} bytes") if key in self.layouts]
                value = " ".join([f"{value.dtype.name}{value.shape}{entries}", *layouts])
            elif isinstance(value, Learnable):
                value = f"nn {value.kind}{' per head' if value.per_head else ''}"
            options.append(f"{name}={value}")
        return (
            f"{self.front} on {self.level}, {self.threads} threads, {self.dtype}: {shapes}; "
            f"{', '.join(options) or 'plain'}; statistics={self.statistics}, weights={self.weights}; "
            f"extreme: {', '.join(self.extremes) or 'nothing'}"
        )
