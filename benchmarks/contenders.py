"""Benchmark contenders: sqrtdk, the fused attention of other libraries, and statistics computed by hand.

A contender converts the inputs to its own arrays before the clock starts. The timing covers one call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from importlib import metadata

import numpy as np

from benchmarks import by_hand
from benchmarks.cases import Case, Inputs
from benchmarks.contender import PLAIN, WITH_STATISTICS, WITHOUT_MASK, Contender, NotForThisCaseError, TimedCall
from benchmarks.model import MODEL_CONTENDERS
from benchmarks.peers import PEER_CONTENDERS
from benchmarks.task import ContenderResult
from benchmarks.tensors import TENSOR_CONTENDERS, tensor_of, tensors_of
from benchmarks.training import TRAINING_CONTENDERS
from sqrtdk.errors import unknown_name
from sqrtdk.operation.attention import Attention, attention


def find_contender(name: str) -> Contender:
    """Return a contender by its name; an unknown name raises and lists the known ones.

    >>> find_contender("sqrtdk").needs
    ()
    """
    for contender in CONTENDERS:
        if contender.name == name:
            return contender
    raise unknown_name("contender", name, [contender.name for contender in CONTENDERS])


def peer_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that contenders need."""
    versions = {}
    for package in sorted({package for contender in CONTENDERS for package in contender.needs}):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _prepare_sqrtdk(*, statistics: bool, mask: bool = True) -> Callable[[Case, Inputs, int], TimedCall]:
    def prepare(case: Case, inputs: Inputs, threads: int) -> TimedCall:
        q, k, v, padding = inputs[:4]
        options = case.options()
        if padding is not None and mask:
            options["mask"] = padding
        return lambda: attention(q, k, v, statistics=statistics, **options)

    return prepare


def _read_sqrtdk(result: Attention) -> ContenderResult:
    return ContenderResult(result.output, None if result.statistics is None else result.statistics.entropy)


def why_too_large(name: str, n: int) -> str | None:
    """Return the reason why a contender with n×n matrices cannot run here; None if it can, or holds no matrices."""
    needed = _COPIES.get(name, 0) * 4 * n * n
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"needs about {needed / 2**30:.0f} GiB, more than is free" if needed > free else None


def _prepare_textbook(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    _require_equal_heads(case)
    if case.causal or case.padding is not None:
        raise NotForThisCaseError("timed without masks only")
    if (reason := why_too_large(TEXTBOOK, case.queries)) is not None:
        raise NotForThisCaseError(reason)
    q, k, v = tensors_of(inputs)
    return lambda: (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1) @ v


def _prepare_torch_matrix(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    _require_equal_heads(case)
    q, k, v = tensors_of(inputs)
    visible = tensor_of(case.visible())
    return lambda: by_hand.attend_in_torch(q, k, v, visible)


def _prepare_two_passes(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    _require_equal_heads(case)
    if case.window is not None or case.padding is not None:
        raise NotForThisCaseError("the second pass is written for full and causal attention")
    q, k, v = tensors_of(inputs)
    return lambda: by_hand.attend_in_two_passes(q, k, v, case.causal)


def _prepare_numpy_matrix(case: Case, inputs: Inputs, threads: int) -> TimedCall:
    _require_equal_heads(case)
    visible = case.visible()
    return lambda: by_hand.attend_in_numpy(inputs, visible)


def _require_equal_heads(case: Case) -> None:
    if case.groups not in (None, case.heads):
        raise NotForThisCaseError("timed with as many key/value heads as query heads only")


def _read_by_hand(result: by_hand.ByHand) -> ContenderResult:
    return ContenderResult(np.asarray(result.output), np.asarray(result.statistics["entropy"]))


TEXTBOOK = "textbook in torch"
MATRICES = ("n×n in torch", "n×n in NumPy")
BY_HAND = ("torch SDPA + second pass", *MATRICES)
# Number of float32 matrices of all logits that each contender holds: dot products, logits, weights and temporaries.
_COPIES = {TEXTBOOK: 3, **dict.fromkeys(MATRICES, 6)}
CONTENDERS: Sequence[Contender] = (
    Contender(PLAIN, (), _prepare_sqrtdk(statistics=False), _read_sqrtdk),
    Contender(WITH_STATISTICS, (), _prepare_sqrtdk(statistics=True), _read_sqrtdk),
    Contender(WITHOUT_MASK, (), _prepare_sqrtdk(statistics=False, mask=False), _read_sqrtdk),
    *TENSOR_CONTENDERS,
    *MODEL_CONTENDERS,
    *TRAINING_CONTENDERS,
    *PEER_CONTENDERS,
    Contender(TEXTBOOK, ("torch",), _prepare_textbook, lambda output: ContenderResult(output.numpy())),
    Contender("n×n in NumPy", (), _prepare_numpy_matrix, _read_by_hand, takes_threads=False),
    Contender("n×n in torch", ("torch",), _prepare_torch_matrix, _read_by_hand),
    Contender("torch SDPA + second pass", ("torch",), _prepare_two_passes, _read_by_hand),
)
