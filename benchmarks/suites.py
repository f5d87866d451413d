"""Benchmark suites: their cases, and the contenders timed on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.cases import Case
from benchmarks.contender import (
    MODEL,
    MODEL_PEERS,
    PEERS,
    PLAIN,
    SUBJECTS,
    TENSORS,
    TENSORS_BACKWARD,
    TENSORS_RECORDED,
    TENSORS_WITH_STATISTICS,
    TORCH,
    TORCH_BACKWARD,
    TORCH_RECORDED,
    TRAINING,
    TRAINING_PEER,
    TRAINING_WITH_STATISTICS,
    WITH_STATISTICS,
    WITHOUT_MASK,
)
from benchmarks.contenders import BY_HAND, MATRICES, TEXTBOOK
from benchmarks.model import ModelCase
from benchmarks.task import TimedTask
from benchmarks.tensors import BackwardCase, RecordedCase
from benchmarks.training import TrainingCase
from sqrtdk.errors import InvalidValueError, unknown_name

_SQUARES = ((8, 8, 128, 64), (1, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 4096, 128))
# The second shape is that of GPT-2.
_PEER_SQUARES = ((8, 8, 128, 64), (1, 12, 512, 64), (1, 8, 2048, 64), (1, 4, 4096, 128))
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_WINDOW = 256
# Longer sequences are left out of a quick run.
_QUICK_LENGTH = 2048
_TENSORS = (TENSORS, TENSORS_WITH_STATISTICS, TORCH)
_BACKWARD = (TENSORS_BACKWARD, TORCH_BACKWARD)
_RECORDED = (TENSORS_RECORDED, TORCH_RECORDED)


@dataclass(frozen=True)
class Suite:
    """Cases and the names of the contenders timed on them; `about` is a one-line description.

    With `apart`, every contender runs in its own process, including sqrtdk.
    """

    name: str
    about: str
    cases: Sequence[TimedTask] = ()
    contenders: Sequence[str] = ()
    apart: bool = False

    @property
    def subjects(self) -> list[str]:
        """Return the contenders whose times are compared with those of the others."""
        return [name for name in self.contenders if name in SUBJECTS]

    def contenders_for(self, case: TimedTask) -> list[str]:
        """Return the contenders that are timed on a case."""
        for kind, own in ((BackwardCase, _BACKWARD), (RecordedCase, _RECORDED)):
            if isinstance(case, kind):
                return [name for name in self.contenders if name in own]
        left_away = {*_BACKWARD, *_RECORDED}
        # A mask that hides keys changes the result, so only a mask that hides nothing can be left away.
        if not isinstance(case, Case) or case.padding != 0.0:
            left_away.add(WITHOUT_MASK)
        if isinstance(case, Case) and case.suite == "growth" and case.window is not None:
            left_away |= {WITH_STATISTICS, TORCH, TEXTBOOK}  # torch would need the n×n mask
        return [name for name in self.contenders if name not in left_away]


def choose_suites(names: Sequence[str] | None, *, case: str | None = None, quick: bool = False) -> list[Suite]:
    """Return the named suites (None: all), without long sequences if `quick`.

    With `case`, return only cases whose name contains this text, and suites that have such cases.

    >>> [suite.name for suite in choose_suites(["overhead", "square"])]
    ['square', 'overhead']
    >>> [case.name for suite in choose_suites(["square"], case="512") for case in suite.cases]
    ['1×8×512×64 full', '1×8×512×64 causal']
    """
    known = [suite.name for suite in SUITES]
    for name in names or ():
        if name not in known:
            raise unknown_name("suite", name, known)
    chosen = [suite for suite in SUITES if names is None or suite.name in names]
    chosen = [_shorten(suite) for suite in chosen] if quick else chosen
    if case is None:
        return chosen
    matching = [
        replace(suite, cases=cases) for suite in chosen if (cases := [one for one in suite.cases if case in one.name])
    ]
    if not matching:
        cases_there = "; ".join(one.name for suite in chosen for one in suite.cases)
        raise InvalidValueError("case", f"must be a part of the name of one of the cases ({cases_there}), got {case!r}")
    return matching


def memory_lengths(*, quick: bool = False) -> list[int]:
    """Return the numbers of queries and keys at which memory is measured; the headline uses the last."""
    return [n for n in _LENGTHS if n <= _QUICK_LENGTH] if quick else list(_LENGTHS)


def _shorten(suite: Suite) -> Suite:
    short = (case.shorten(_QUICK_LENGTH) for case in suite.cases)
    return replace(suite, cases=[case for case in short if case is not None])


def _squares(suite: str, shapes: Sequence[tuple[int, int, int, int]] = _SQUARES, dtype: str = "float32") -> list[Case]:
    suffix = "" if dtype == "float32" else f", {dtype}"
    return [
        Case(suite, f"{b}×{h}×{n}×{d} {'causal' if causal else 'full'}{suffix}", b, h, n, d, causal=causal, dtype=dtype)
        for b, h, n, d in shapes
        for causal in (False, True)
    ]


def _real() -> list[Case]:
    token: dict[str, Any] = {"by_token": True}
    decode: dict[str, Any] = {"queries": 1, "keys": 8192, "bound_by_reading": True}
    return [
        Case("real", "text encoder, L 77, D 64, causal", 8, 8, 77, 64, causal=True, **token),
        Case("real", "vision, L 197, D 64", 8, 12, 197, 64, **token),
        Case("real", "vision, L 257, D 80", 4, 16, 257, 80, **token),
        Case("real", "image to text, L 4096, S 77, D 40", 2, 8, 4096, 40, keys=77, **token),
        Case("real", "image, L 1024, D 80", 2, 8, 1024, 80, **token),
        Case("real", "language, L 512, D 96, causal", 1, 32, 512, 96, causal=True, **token),
        Case("real", "GQA 32/8, L 512, D 128, causal", 1, 32, 512, 128, groups=8, causal=True, **token),
        Case("real", "padded by up to half, L 512, D 64", 8, 12, 512, 64, padding=0.5, **token),
        Case("real", "mask that hides nothing, L 2048, D 64", 1, 8, 2048, 64, padding=0.0),
        Case("real", f"window {_WINDOW}, L 2048, D 64", 1, 8, 2048, 64, causal=True, window=_WINDOW),
        Case("real", "decode, 8 heads, S 8192, D 64, cache reused", 1, 8, d_k=64, **decode),
        Case("real", "decode, 8 heads, S 8192, D 64, from memory", 1, 8, d_k=64, sets=8, **decode),
        Case("real", "decode, GQA 32/8, S 8192, D 128, from memory", 1, 32, d_k=128, groups=8, sets=4, **decode),
    ]


def _tensors() -> list[Case]:
    """Return forward cases, then forward-and-backward cases; the real shapes cover each layout, group and mask."""
    token: dict[str, Any] = {"by_token": True}
    forward = [
        *_squares("tensors"),
        Case("tensors", "vision, L 197, D 64, [B, L, H, D]", 8, 12, 197, 64, **token),
        Case("tensors", "language, L 512, D 96, causal, [B, L, H, D]", 1, 32, 512, 96, causal=True, **token),
        Case(
            "tensors", "GQA 32/8, L 512, D 128, causal, [B, L, H, D]", 1, 32, 512, 128, groups=8, causal=True, **token
        ),
        Case("tensors", "padded by up to half, L 512, D 64, [B, L, H, D]", 8, 12, 512, 64, padding=0.5, **token),
    ]
    return [*forward, *_with_gradients(forward)]


def _with_gradients(cases: Sequence[Case]) -> list[BackwardCase]:
    return [BackwardCase(**(asdict(case) | {"name": f"{case.name}, with gradients"})) for case in cases]


def _narrow() -> list[Case]:
    forward = _squares("bfloat16", dtype="bfloat16")
    return [*forward, *_with_gradients(forward)]


def _growing() -> list[Case]:
    plain = [Case("growth", f"full, N {n}", 1, 1, n, 64) for n in _LENGTHS]
    return plain + [
        Case("growth", f"window {_WINDOW}, N {n}", 1, 1, n, 64, causal=True, window=_WINDOW) for n in _LENGTHS
    ] + [
        Case("growth", f"window {window}, N 16384", 1, 1, 16384, 64, causal=True, window=window)
        for window in (64, 1024, 4096)
    ]  # fmt: skip


def _tiny() -> list[Case]:
    return [
        Case("overhead", "1×1×1×16", 1, 1, 1, 16),
        Case("overhead", "1×1×8×16", 1, 1, 8, 16),
        Case("overhead", "1×4×16×64", 1, 4, 16, 64),
        Case("overhead", "decode, 8 heads, S 64, D 64", 1, 8, 1, 64, keys=64),
        RecordedCase("overhead", "1×2×4×16, recorded", 1, 2, 4, 16),
        BackwardCase("overhead", "1×2×4×16, with gradients", 1, 2, 4, 16),
    ]


SUITES = (
    Suite("square", "B×H×N×D, full and causal", _squares("square"), (PLAIN, WITH_STATISTICS, TORCH)),
    Suite(
        "statistics",
        "all statistics, against computing them by hand",
        _squares("statistics", _SQUARES[:3]),
        (WITH_STATISTICS, *BY_HAND),
    ),
    Suite("real", "shapes, layouts and masks of models", _real(), (PLAIN, WITH_STATISTICS, WITHOUT_MASK, TORCH)),
    Suite(
        "overhead", "a call on next to nothing", _tiny(), (PLAIN, WITH_STATISTICS, *_TENSORS, *_RECORDED, *_BACKWARD)
    ),
    Suite("tensors", "tensors, forward, and forward and backward", _tensors(), (*_TENSORS, *_BACKWARD)),
    Suite("bfloat16", "the same in bfloat16, B×H×N×D", _narrow(), (*_TENSORS, *_BACKWARD)),
    Suite(
        "peers",
        "other libraries, each in a process of its own",
        [*_squares("peers", _PEER_SQUARES), *_squares("peers", _PEER_SQUARES, "bfloat16")],
        (TENSORS, TORCH, *PEERS),
        apart=True,
    ),
    Suite("model", "a whole model, its attention exchanged", [ModelCase(4, 512)], (MODEL, *MODEL_PEERS)),
    Suite(
        "training",
        "a training step of a whole model, its attention exchanged",
        [TrainingCase(4, 512), TrainingCase(4, 512, dropout=0.1)],
        (TRAINING, TRAINING_WITH_STATISTICS, TRAINING_PEER),
    ),
    Suite("growth", "time over N as a power", _growing(), (PLAIN, WITH_STATISTICS, TORCH, TEXTBOOK)),
    Suite("memory", "peak memory beyond inputs and results", (), (PLAIN, WITH_STATISTICS, TORCH, TEXTBOOK, *MATRICES)),
)
